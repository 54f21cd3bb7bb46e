"""Engines without an optimizer take the weights of any checkpoint, at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.conftest import SUB_GROUPS
from tests.distributed.facts import Loaded, Resumes
from tests.distributed.model import Setup

NOTHING_PERSISTS = (("stage3_param_persistence_threshold", 0), ("offload_param", {"device": "cpu"}))
#: DeepSpeed would gather weights in bf16 for it, and what it keeps gathered must not come back rounded.
AUTOCAST = (("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),)
ENGINES = {
    "ZeRO-0": Setup(0),
    "ZeRO-0, bf16": Setup(0, "bf16"),
    "ZeRO-3": Setup(3),
    "ZeRO-3, bf16": Setup(3, "bf16"),
    "ZeRO-3, nothing persists": Setup(3, zero=NOTHING_PERSISTS),
    "ZeRO-3, autocast": Setup(3, config=AUTOCAST),
}
Z1, Z3 = Save(Setup(1)), Save(Setup(3))
SAVED = [
    Save(Setup(0)),
    Z1,
    Save(Setup(3, zero=SUB_GROUPS)),
    Save(Setup(2, "bf16")),
    Save(Setup(3, "bf16"), converted=True),
]


def evaluated(save: Save, engine: str) -> Cell:
    setup = ENGINES[engine]
    is_exact = save.setup.precision == setup.precision == "fp32"
    gap = 1e-5 if is_exact and not setup.config else 5e-3
    return crossing(save, setup, 3, "evaluation_jobs.evaluate", Resumes(save.format, gap), engine)


@cells([evaluated(save, engine) for engine in ENGINES for save in SAVED])
def test_weights_of_every_stage_load_into_engines_without_an_optimizer(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


def without_masters(copy: Path) -> None:
    """As somebody left it who removed the optimizer files."""
    for path in (copy / "step4").glob("*optim_states.pt"):
        path.unlink()


@cells(
    [
        Cell(setup.name, Z1, "evaluation_jobs.without_masters", 2, {"setup": setup}, without_masters)
        for setup in (Setup(0), Setup(3))
    ]
)
def test_a_folder_without_masters_has_the_weights_below_zero3(cell: Cell, facts: list[Loaded]) -> None:
    Resumes(says=("own weights, saved in float32",)).check(facts)


BY_HAND = {"setup": Setup(3), "custom_load_fn": True}


@cells([Cell("ZeRO-3", Z3, "evaluation_jobs.refuse", 2, BY_HAND, fits=(Z3, {**BY_HAND, "custom_load_fn": False}))])
def test_what_deepspeeds_own_loader_fails_to_load_is_not_left_to_it(cell: Cell, facts: list[Any]) -> None:
    """Even at the saved topology, where it raises an AttributeError."""
    for found in facts:
        assert "UnsupportedError" in found.error


def asked(setup: Setup, has_optimizer: bool, below: str, tag: str | None) -> Cell:
    """A load from a folder without checkpoint, with an empty folder of the tag, or from no folder at all."""
    case = {"setup": setup, "has_optimizer": has_optimizer, "below": below, "tag": tag}
    name = f"{setup.name}{' with optimizer' * has_optimizer}, {below or 'empty'}, {tag}"
    fits = (None, {**case, "tag": None if tag else "step4"})
    return Cell(name, None, "evaluation_jobs.without_checkpoint", 2, case, fits=fits)


ASKED = [
    (setup, has_optimizer, below)
    for setup in (Setup(0), Setup(3))
    for has_optimizer in (False, True)
    for below in ("", "none")
]


@cells([asked(*each, tag=None) for each in ASKED])
def test_a_folder_without_checkpoint_begins_a_run(cell: Cell, facts: list[Any]) -> None:
    """Without an optimizer too, where DeepSpeed's ZeRO-3 has no checkpoint engine."""
    for found in facts:
        assert found.returned == (None, None), found.error


def appears(setup: Setup, *ranks: int) -> Cell:
    """A load from a folder in which these ranks have a checkpoint once all have looked; it fits if it was there before."""
    case = {"setup": setup, "ranks": ranks}
    save = Save(setup)
    return Cell(
        f"{setup.name}, {ranks}", save, "evaluation_jobs.appearing", 2, case, fits=(save, {**case, "is_there": True})
    )


@cells([appears(setup, *ranks) for setup in (Setup(1), Setup(3)) for ranks in ((), (0,), (1,), (0, 1))])
def test_what_appears_when_all_have_looked_is_loaded_by_none(cell: Cell, facts: list[Any]) -> None:
    """DeepSpeed's own loader would look again, on each rank for itself."""
    for found in facts:
        assert (found.returned, found.error, found.changed) == ((None, None), [], [])


@cells([asked(*each, tag="step4") for each in ASKED])
def test_a_tag_that_is_asked_for_has_to_be_there(cell: Cell, facts: list[Any]) -> None:
    """DeepSpeed has no words for it."""
    for found in facts:
        assert found.error[:1] == ["NotFoundError"]
