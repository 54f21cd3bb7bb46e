"""Ways to bring the state back, each behind the same few methods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import elastic_ckpt
from benchmarks import privates
from benchmarks.cases import CONTENDERS, FLOORS, RESUME
from benchmarks.floor import Floor, record_plan
from benchmarks.held import Held, Part
from benchmarks.sharded import Sharded


class Runner(Protocol):
    """One contender, on one rank.

    Attributes:
        folder: what it reads.
        owned_nbytes: what this rank needs of it.
        phases: seconds of the last load's phases, where it tells them.
        tensor_nbytes: bytes of tensors that the last load read, where it tells.
    """

    folder: Path
    owned_nbytes: int
    phases: dict[str, float]
    tensor_nbytes: int | None

    def prepare(self, kind: str) -> int:
        """Bring memory into the state that ``kind`` asks for; how many bytes the load will allocate and keep."""

    def load(self, kind: str) -> None:
        """What is measured. Collective."""

    def parts(self) -> Iterator[Part]:
        """What the load restored."""

    def judge(self) -> dict[str, bool]:
        """What of it is as it was saved."""

    def drop(self) -> None:
        """Free what only this contender needs."""


class InEngine:
    """A load by ``engine.load_checkpoint``.

    Args:
        held: the engine.
        folder: what is given to it.
        elastic: whether elastic_ckpt loads, or DeepSpeed itself.
        universal: ``load_universal``, for DeepSpeed itself.
        verify: the option ``"verify"`` of elastic_ckpt.
    """

    def __init__(self, held: Held, folder: Path, elastic: bool, universal: bool, verify: str = "load") -> None:
        self.folder = folder
        self.owned_nbytes = held.owned_nbytes
        self.phases: dict[str, float] = {}
        self.tensor_nbytes: int | None = None
        self._held = held
        self._elastic = elastic
        self._universal = universal
        self._verify = verify

    def prepare(self, kind: str) -> int:
        """See :class:`Runner`."""
        self._held.scramble(kind)
        (elastic_ckpt.install if self._elastic else elastic_ckpt.uninstall)()
        privates.prefer_universal(self._held.engine, self._universal)
        privates.set_elastic_options(self._held.engine, verify=self._verify)
        return 8 * sum(master.numel() for master in self._held.masters) if kind == RESUME else 0

    def load(self, kind: str) -> None:
        """See :class:`Runner`."""
        self._held.engine.load_checkpoint(str(self.folder))
        if self._elastic:
            report = self._held.engine.elastic_report
            if report is None:
                raise RuntimeError(f"elastic_ckpt left {self.folder} to DeepSpeed's own loader")
            self.phases = dict(report.mine.seconds)
            self.tensor_nbytes = report.mine.read.nbytes

    def parts(self) -> Iterator[Part]:
        """See :class:`Runner`."""
        return self._held.everything()

    def judge(self) -> dict[str, bool]:
        """See :class:`Runner`."""
        return self._held.judge()

    def drop(self) -> None:
        """See :class:`Runner`."""
        privates.drop_states(self._held.engine)


def build_runner(key: str, held: Held, folders: dict[str, Path], stage: int) -> Runner:
    """The contender of this key. Collective for floors, which ask elastic_ckpt for its plan."""
    folder = folders[CONTENDERS[key].source]
    if key in FLOORS:
        ours = InEngine(held, folder, elastic=True, universal=False)
        ours.prepare(RESUME)
        with record_plan() as recorded:
            ours.load(RESUME)
        ours.drop()
        return Floor(held, folder, recorded)
    if key == "dcp":
        return Sharded(held.engine, folder)
    kinds: dict[str, dict[str, Any]] = {
        "native": {"elastic": True, "universal": False},
        "unverified": {"elastic": True, "universal": False, "verify": "off"},
        "universal": {"elastic": True, "universal": False},
        "ds-native": {"elastic": False, "universal": False},
        "ds-universal": {"elastic": False, "universal": True},
    }
    return InEngine(held, folder, **kinds[key])
