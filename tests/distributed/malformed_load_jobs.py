"""Real loads of checkpoints whose files were changed, one after another: ``malformed_load_jobs.<function>`` of :mod:`jobs`."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import PartialLoadError
from elastic_ckpt.tools.verification import verify
from tests.distributed import expert_jobs, jobs, parallel_models
from tests.distributed import model as models
from tests.distributed import pretrained_jobs as pretrained
from tests.distributed import truth as oracle
from tests.distributed.facts import on_all_ranks
from tests.distributed.malformed import outcome
from tests.distributed.malformed_files import FileChange, Runs, drawn, entry_change

#: Address space that a load may take: a reader without measure gets a MemoryError.
MOST_NBYTES = 6 << 30
#: Resident memory that a load may take and give back.
MOST_GROWTH = 512 << 20


@dataclass(frozen=True)
class Live:
    """What loads: how an engine is made, loads a folder, and is freed. All collective."""

    build: Callable[[], Any]
    load: Callable[[Any, str], Any]
    close: Callable[[Any], None] = models.close


def _by_engine(case: dict[str, Any]) -> Live:
    def build() -> Any:
        engine = models.build_engine(case["setup"], models.BUILDERS[case.get("model", "TinyLM")](seed=8))
        engine._config.load_universal_checkpoint = case.get("universal", False)
        models.train(engine, 100, 101)
        if case["setup"].stage:
            oracle.relink(engine)
        return engine

    return Live(build, _load_checkpoint(case))


def _by_pretrained(case: dict[str, Any]) -> Live:
    def build() -> Any:
        return models.build_engine(replace(case["setup"], groups="one"), pretrained.build(case))

    def load(engine: Any, folder: str) -> Any:
        return elastic_ckpt.load_pretrained(engine, folder, strict=case.get("strict", True))

    return Live(build, load)


def _by_parallel(case: dict[str, Any]) -> Live:
    build = partial(parallel_models.build, case["setup"], seed=8)
    return Live(build, _load_checkpoint(case), parallel_models.end)


def _by_experts(case: dict[str, Any]) -> Live:
    return Live(partial(expert_jobs.build, case["setup"], seed=8), _load_checkpoint(case), expert_jobs.end)


#: By ``into`` of a case.
KINDS = {"engine": _by_engine, "pretrained": _by_pretrained, "parallel": _by_parallel, "experts": _by_experts}


def _load_checkpoint(case: dict[str, Any]) -> Callable[[Any, str], Any]:
    """A load that says so when it took nothing, as DeepSpeed does of a folder without checkpoint."""

    def load(engine: Any, folder: str) -> Any:
        return engine.load_checkpoint(folder, **case.get("arguments", {}))[0] or "nothing"

    return load


def load_each(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load changed copies of ``folder``: how many were ``refused``, and ``problems`` in words.

    ``into``: a key of :data:`KINDS`; ``changes``: (file, place, way) of each entry, or ``seed`` and ``count`` of
    what is drawn, and ``some`` of these; ``<folder>-other`` is another save.
    """
    elastic_ckpt.install()
    live, folder = KINDS[case.get("into", "engine")](case), Path(case["folder"])
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        engine = live.build()
        live.load(engine, str(folder))
        whole = oracle.fingerprint(engine)  # what every load that is exact makes of an engine
        live.close(engine)
        judge, refused, problems = _Judge(live, whole), 0, list[str]()
        for text, exact, path in _changes(case, folder):
            print(f"{text}", flush=True)
            found = judge.load(path, exact)
            refused += found.startswith("refused")
            if found not in ("refused", "ok"):
                problems.append(f"{text}: {found}")
                print(f"-- {case.get('name')} {problems[-1]}", flush=True)
        judge.close()
        os.chdir("/")
    print(f"{refused} refused, {len(problems)} broke", flush=True)
    return [SimpleNamespace(refused=refused, problems=problems)]


def _changes(case: dict[str, Any], folder: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Of each change its text, what it leaves exact, and a copy that has it, which rank 0 makes. Collective."""
    other = folder.with_name(f"{folder.name}-other")
    changes: list[FileChange] = []
    if dist.get_rank() == 0:
        given = other if other.exists() else None
        if "changes" in case:
            changes = [entry_change(folder, *each) for each in case["changes"]]
        else:
            changes = [*drawn(folder, given, case["seed"], case["count"])][slice(*case.get("some", (None,)))]
    (count, *_) = on_all_ranks(len(changes))
    for number in range(count):
        copy, told = Path(f"copy{number}").absolute(), ("", ())
        if dist.get_rank() == 0:
            shutil.copytree(folder, copy, copy_function=os.link)
            if not jobs.SPOILS:
                changes[number].apply(copy)
            told = (str(changes[number]), changes[number].exact)
        ((text, exact), path), *_ = on_all_ranks((told, str(copy)))
        yield text, exact, path
        if dist.get_rank() == 0:
            shutil.rmtree(copy)


class _Judge:
    """Loads changed folders into one engine, or into the next one, once something was loaded.

    Args:
        live: makes engines.
        whole: what this rank holds after a load of what was not changed.
    """

    def __init__(self, live: Live, whole: dict[str, str]) -> None:
        self._live, self._whole, self._engine = live, whole, live.build()

    def load(self, folder: str, exact: tuple[str, ...]) -> str:
        """``refused`` or ``ok``, or what is wrong, the same on every rank. Collective."""
        before, answers = oracle.fingerprint(self._engine), answered(self._engine)
        _growth()
        with _limited():
            what, found = outcome(lambda: self._live.load(self._engine, folder))
        growth, after = _growth(), oracle.fingerprint(self._engine)
        changed = sorted(part for part in before if before[part] != after[part])
        if not any(on_all_ranks(changed)) and answers != answered(self._engine):
            changed = ["what DeepSpeed's getters answer"]
        wrong = sorted(part for part in exact if after[part] != self._whole[part])
        mine = what, found if isinstance(found, str) else f"{type(found).__name__}: {found}" if what != "ok" else ""
        everybody = on_all_ranks((mine, changed, wrong, growth, os.path.exists(Runs.MARK)))
        outcomes, changes, wrongs, growths, ran = zip(*everybody, strict=True)
        if changes != ([],) * len(changes):
            self._renew()
        if len({(what, text if what != "ok" else "") for what, text in outcomes}) > 1:
            return f"ranks differ: {outcomes}"
        what, text = outcomes[0]
        if any(ran):
            os.rmdir(Runs.MARK)
            return f"code ran, {what} {text}"
        if max(growths) > MOST_GROWTH:
            return f"takes {max(growths) >> 20} MiB, {what} {text}"
        if what == "broke" or isinstance(found, PartialLoadError):
            return f"load: {text}"
        if what == "refused" or text == "nothing":
            return f"{what} {text}, but changed {changes}" if any(changes) else _verified(found, folder)
        return f"loaded with other values: {wrongs}" if any(wrongs) else "ok"

    def _renew(self) -> None:
        self.close()
        self._engine = self._live.build()

    def close(self) -> None:
        """Free the engine. Collective."""
        self._live.close(self._engine)


def _verified(error: Any, folder: str) -> str:
    """``refused``, unless ``verify`` has nothing against a folder that a load has proven damaged. Collective."""
    found = "refused"
    if dist.get_rank() == 0 and getattr(error, "proves_damage", False):
        what, result = outcome(lambda: verify(folder, None, ElasticConfig(), full=True))
        if what == "broke" or (what == "ok" and result.ok):
            found = f"damaged, but verify {what} {result if what == 'broke' else ''}: {error}"
    return on_all_ranks(found)[0]


def answered(engine: Any) -> list[str]:
    """Hashes of the masters and states that DeepSpeed's getters answer, where it has some. Collective."""
    params = [param for param in engine.module.parameters() if hasattr(param, "_hp_mapping") or hasattr(param, "ds_id")]
    keys = ["exp_avg", "exp_avg_sq"]
    if not all(oracle.base_of(engine).state.get(flat) for flat in oracle.flats(engine.optimizer)):
        keys = []
    answers = [safe_get_full_fp32_param(param) for param in params]
    answers += [safe_get_full_optimizer_state(param, key) for param in params for key in keys]
    return [oracle._digest([answer]) for answer in answers]


def _growth() -> int:
    """By how much resident memory has been larger than it is since the last call, in bytes."""
    status = Path("/proc/self/status").read_text()
    most, now = (int(status.partition(f"{key}:")[2].split()[0]) << 10 for key in ("VmHWM", "VmRSS"))
    Path("/proc/self/clear_refs").write_text("5")  # the largest size is that of now
    return most - now


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """This process gets no memory without measure."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_NBYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
