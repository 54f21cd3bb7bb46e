"""Checkpoints of the benchmark, made once and kept below a number of bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cases import DCP, MODELS, NATIVE, UNIVERSAL, Case
from benchmarks.launching import Launcher

#: Bytes on disk for each parameter: fp32 masters, two states and bf16 weights; what the converter leaves; fp32 alone.
_NBYTES = {NATIVE: 14, UNIVERSAL: 20, DCP: 12}
#: And what the converter needs beside that while it works.
_CONVERTING = 12
_MARK = "made.json"


class Store:
    """A folder of checkpoints.

    Args:
        root: the folder.
        most_nbytes: what all of them may take; the ones used least recently go.
        launcher: runs the jobs that make them.
        say: told what is being made.
    """

    def __init__(self, root: Path, most_nbytes: int, launcher: Launcher, say: Callable[[str], None]) -> None:
        self._root = root.resolve()
        self._most_nbytes = most_nbytes
        self._launcher = launcher
        self._say = say

    def folder(self, case: Case, source: str) -> Path:
        """Where a source of a case lies; that of torch.distributed.checkpoint does not depend on the stage."""
        stage = "" if source == DCP else f"z{case.stage}-"
        return self._root / f"{case.params}-{stage}dp{case.saved_dp}-{source}"

    def folders(self, case: Case, sources: Sequence[str]) -> dict[str, str]:
        """Absolute paths, by source."""
        return {source: str(self.folder(case, source)) for source in sources}

    def fits(self, case: Case, sources: Sequence[str]) -> bool:
        """Whether they may all be on disk together."""
        return self._need(case, sources) <= self._most_nbytes

    @staticmethod
    def _need(case: Case, sources: Sequence[str]) -> int:
        per_param = sum(_NBYTES[source] for source in sources)
        if UNIVERSAL in sources:
            per_param += (_NBYTES[NATIVE] if NATIVE not in sources else 0) + _CONVERTING
        return per_param * MODELS[case.params].numel

    def ensure(self, case: Case, sources: Sequence[str], timeout_s: float) -> None:
        """Make what is missing, and have it all on disk."""
        wanted = {source: self.folder(case, source) for source in sources}
        missing = [source for source, folder in wanted.items() if not (folder / _MARK).exists()]
        if UNIVERSAL in missing:
            wanted[NATIVE] = self.folder(case, NATIVE)
            if not (wanted[NATIVE] / _MARK).exists() and NATIVE not in missing:
                missing.append(NATIVE)
        for source in missing:
            shutil.rmtree(wanted[source], ignore_errors=True)
        self._make_room(self._need(case, missing), set(wanted.values()))
        saved = [source for source in missing if source != UNIVERSAL]
        if saved:
            self._say(f"saving {case.params}, ZeRO-{case.stage}, on {case.saved_dp} ranks ({', '.join(saved)})")
            arguments = {"case": asdict(case), "folders": {source: str(wanted[source]) for source in saved}}
            self._make(saved, wanted, case.saved_dp, "save", arguments, timeout_s)
        if UNIVERSAL in missing:
            self._say(f"converting {case.params}, ZeRO-{case.stage}, of {case.saved_dp} ranks")
            pair = {source: str(wanted[source]) for source in (NATIVE, UNIVERSAL)}
            self._make([UNIVERSAL], wanted, 1, "convert", {"folders": pair}, timeout_s)
        for folder in wanted.values():
            (folder / _MARK).touch()

    def _make(
        self,
        sources: list[str],
        wanted: dict[str, Path],
        ranks: int,
        job: str,
        arguments: dict[str, Any],
        timeout_s: float,
    ) -> None:
        for source in sources:
            wanted[source].mkdir(parents=True)
        self._launcher.run(ranks, job, arguments, timeout_s)

    def conversion(self, case: Case) -> dict[str, float]:
        """What the conversion took: ``conversion_seconds``, ``conversion_worker_nbytes``; empty if there was none."""
        mark = self.folder(case, UNIVERSAL) / _MARK
        return dict(json.loads(mark.read_text(encoding="utf-8"))) if mark.exists() else {}

    def common_nbytes(self, case: Case) -> int:
        """Size of what every rank of DeepSpeed's universal load reads whole."""
        files = self.folder(case, UNIVERSAL).glob("*/zero/optimizer_state.pt")
        return max((file.stat().st_size for file in files), default=0)

    def _make_room(self, nbytes: int, keep: Collection[Path]) -> None:
        """Remove what was used least recently, until so many bytes fit."""
        folders = [path for path in self._root.glob("*") if path.is_dir()]
        sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in folders}
        for path in sorted(folders, key=_last_used):
            if sum(sizes.values()) + nbytes <= self._most_nbytes:
                return
            if path not in keep:
                self._say(f"removing {path.name}")
                shutil.rmtree(path)
                del sizes[path]


def _last_used(folder: Path) -> float:
    mark = folder / _MARK
    return mark.stat().st_mtime if mark.exists() else 0.0
