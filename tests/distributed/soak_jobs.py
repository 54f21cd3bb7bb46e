"""What the ranks of a soak do: load the last stop's checkpoint, compare, train on, save. See :mod:`tests.soak.walk`."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import optimizer_truth, parallel_models, parallel_truth
from tests.distributed import truth as plain_truth
from tests.distributed.convert import convert
from tests.distributed.facts import on_all_ranks
from tests.distributed.jobs import truth_of
from tests.distributed.model import BUILDERS, Setup, build_engine, close, param_groups, train
from tests.distributed.parallel_models import Parallel
from tests.soak.walk import FAMILIES, OPTIONS, Family, Stop


class Plain:
    """Data parallel engines of :mod:`tests.distributed.model`."""

    def __init__(self, family: Family, stop: Stop) -> None:
        zero = tuple(entry for option in stop.options for entry in OPTIONS[option][1].items())
        self._model = BUILDERS[family.model]
        self._setup = Setup(stop.stage, stop.precision, stop.optimizer, zero, stop.groups)
        self._members: list[list[str]] = []

    def build(self, seed: int) -> Any:
        """An engine with weights of this seed."""
        model = self._model(seed)
        names = {id(param): name for name, param in model.named_parameters()}
        groups = param_groups(model, self._setup.groups)
        self._members = [[names[id(param)] for param in group["params"]] for group in groups]
        return build_engine(self._setup, model)

    def train(self, engine: Any, first: int, last: int) -> list[float]:
        """Losses of these steps."""
        return train(engine, first, last)

    def truth(self, engine: Any) -> dict[str, Any]:
        """What the engine holds, by name. Collective."""
        plain_truth.relink(engine)
        state = next(iter(plain_truth.base_of(engine).state.values()))
        keys = sorted(key for key, value in state.items() if torch.is_tensor(value) and value.dim())
        now = plain_truth.gather(engine, keys)
        groups = zip(self._members, now["groups"], strict=True)
        now["groups"] = {
            name: {key: value for key, value in values.items() if key != "name"}
            for names, values in groups
            for name in names
        }
        now["scheduler"] = {key: now["scheduler"][key] for key in ("last_epoch", "_step_count")}
        return now | {"scalars": optimizer_truth.scalars(engine)}

    def differences(self, engine: Any, truth: dict[str, Any]) -> dict[str, str]:
        """What of an engine is not exactly the truth. Collective."""
        now = self.truth(engine)
        expected = {**truth, "weights": truth["weights"] | truth["masters"]}
        was, is_now = expected.pop("scale"), now["scale"]
        if was and is_now:
            expected["scale"] = was
        found = plain_truth.compare(now, expected)
        report = engine.elastic_report
        if report is None or report.verified.without_checksum_nbytes + report.verified.incomplete_nbytes:
            found["verified"] = str(report and report.verified)
        return found


class InParallel:
    """Tensor and pipeline parallel engines of :mod:`tests.distributed.parallel_models`."""

    def __init__(self, family: Family, stop: Stop) -> None:
        self._parallel = Parallel(family.model, family.style, stop.tp, stop.pp, stop.stage, stop.precision)

    def build(self, seed: int) -> Any:
        """An engine with weights of this seed."""
        return parallel_models.build(self._parallel, seed)

    def train(self, engine: Any, first: int, last: int) -> list[float]:
        """Losses of these steps."""
        return parallel_models.train(engine, self._parallel, first, last)

    def truth(self, engine: Any) -> dict[str, Any]:
        """What the engine holds, by name. Collective."""
        return parallel_truth.gather(engine, self._parallel)

    def differences(self, engine: Any, truth: dict[str, Any]) -> dict[str, str]:
        """What of an engine is not exactly the truth. Collective."""
        return parallel_truth.differences(engine, self._parallel, truth)


def visit(arguments: dict[str, Any]) -> list[tuple[int, dict[str, str]]]:
    """Visit numbered stops of a walk; what was wrong on any rank, by number. Ends at the first stop where something is.

    Of the arguments: ``family``, ``stops`` and ``folder``, where each stop saves into a folder of its number.
    """
    elastic_ckpt.install()
    found = []
    family = FAMILIES[arguments["family"]]
    for number, stop in arguments["stops"]:
        wrong = _visit(family, stop, number, Path(arguments["folder"]))
        found.append((number, wrong))
        if wrong:
            break
    return found


def _visit(family: Family, stop: Stop, number: int, folder: Path) -> dict[str, str]:
    kind = (InParallel if family.style else Plain)(family, stop)
    engine = kind.build(seed=7 + number)
    wrong: dict[str, str] = {}
    if number:
        last = folder / (f"{number - 1}-universal" if stop.universal else str(number - 1))
        try:
            engine.load_checkpoint(str(last))
        except elastic_ckpt.ElasticCkptError:
            return {"load": traceback.format_exc()}
        for of_rank in on_all_ranks(kind.differences(engine, truth_of(last))):
            wrong |= of_rank
    if not wrong:
        kind.train(engine, engine.global_steps, engine.global_steps + stop.steps)
        engine.save_checkpoint(str(folder / str(number)), tag="step4")
        truth = kind.truth(engine)
        if dist.get_rank() == 0:
            torch.save(truth, folder / str(number) / "truth.pt")
    close(engine)
    dist.barrier()
    return wrong


def start(_: Any) -> None:
    """Nothing: by then DeepSpeed has compiled what it needs to start."""


def to_universal(arguments: dict[str, Any]) -> None:
    """Convert the checkpoint of stop ``number`` in ``folder`` with DeepSpeed's converter."""
    folder, name = Path(arguments["folder"]), str(arguments["number"])
    convert(folder / name, folder / f"{name}-universal")
