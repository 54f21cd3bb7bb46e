"""``torch.distributed.checkpoint``: what FSDP2 saves is loaded by engines, what engines save by FSDP2, bit by bit."""

from __future__ import annotations

import json
from typing import Any

from tests.distributed.cells import Cell, Save, cells
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes
from tests.distributed.jobs import SAVE_AT
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel


def engine(stage: int, **options: Any) -> Setup:
    """An engine that trains as FSDP2 does: without clipping, which DeepSpeed does by default."""
    more = (("elastic_checkpoint", options),) if options else ()
    return Setup(stage, config=(("gradient_clipping", 0.0), *more))


def fsdp(layout: str) -> Save:
    return Save(layout, 2, "dcp_jobs.save_fsdp")


def resumed(name: str, save: Save, setup: Setup, expected: Any = None, **more: Any) -> Cell:
    return Cell(name, save, "dcp_jobs.resume", 3, {"setup": setup, **more}, expected=expected)


EXACT = Resumes("dcp", 1e-5)
#: Of which nothing goes on as it was: only what was loaded is looked at.
RESTORED = Resumes("dcp", float("inf"))


@cells(
    [
        resumed("plain", fsdp("plain"), engine(3), EXACT),
        resumed("app", fsdp("app"), engine(1), EXACT),
        resumed("torchtitan", fsdp("torchtitan"), engine(0), EXACT),
    ]
)
def test_what_fsdp2_saved_on_two_ranks_is_resumed_on_three(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    for load in facts:
        assert load.client_state["dcp"]["train_state"] == {"step": SAVE_AT, "seen": [1, 2, 3]}
        if cell.name != "torchtitan":
            assert "not restored: rng" in load.text


FRESH = Resumes("dcp", float("inf"), ("the checkpoint holds no optimizer state", "counters start from zero"))
WEIGHTS_ALONE = {"states": False, "arguments": {"load_optimizer_states": False}}


@cells(
    [
        resumed("a checkpoint without states", fsdp("weights"), engine(3), FRESH, states=False),
        resumed("states that are not asked for", fsdp("ungrouped"), engine(3), RESTORED, **WEIGHTS_ALONE),
    ]
)
def test_weights_alone_are_restored_and_states_start_fresh(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


@cells(
    [
        Cell(f"ZeRO-{setup.stage}", Save("mesh", 4, "dcp_jobs.save_dtensors"), "dcp_jobs.resume", 3, {"setup": setup})
        for setup in (engine(3), engine(2))
    ]
)
def test_a_mesh_may_have_cut_tensors_along_any_dimensions(cell: Cell, facts: list[Loaded]) -> None:
    RESTORED.check(facts)


def refused(name: str, save: Save, ranks: int, words: str, error: str = "UnsupportedError") -> Cell:
    case = {"setup": engine(3)}
    expected = Refuses(error, (words,))
    return Cell(name, save, "dcp_jobs.refuse", ranks, case, expected=expected, fits=(fsdp("plain"), case))


#: By layout, what an error says of states that it does not know, and what loads the others.
SETTLED = {"ungrouped": {"states": {"optim": "fresh"}}, "slow": {"states": {"slow": "fresh"}}}


@cells(
    [
        refused("ungrouped", fsdp("ungrouped"), 3, "optimizer state 'optim' has a layout"),
        refused("averaged", fsdp("averaged"), 3, "may be the model's"),
        *(
            refused(f"{layout}, one rank", fsdp(layout), 1, f'"elastic_checkpoint": {json.dumps(settled)}')
            for layout, settled in SETTLED.items()
        ),
    ]
)
def test_states_and_models_that_are_not_recognized_are_refused_on_all_ranks(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)


@cells(
    [
        resumed(layout, fsdp(layout), engine(3, **settled), RESTORED, states=layout != "ungrouped")
        for layout, settled in SETTLED.items()
    ]
)
def test_what_an_error_says_of_unknown_states_loads_the_others(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


def converted(model: str) -> Save:
    """What an engine saved, by our command."""
    return Save(engine(3), 3, more={"model": model}, converted=True, converter="convert.convert_to_dcp")


@cells(
    [
        Cell(f"{model} on {ranks} ranks", converted(model), "dcp_jobs.load_into_fsdp", ranks, {"model": model})
        for ranks in (2, 3)
        for model in ("UntiedLM", "TinyLM")
    ]
)
def test_what_engines_saved_is_loaded_by_fsdp2_once_it_is_converted(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences == {} and load.loss_gap < 1e-5, load.where


def megatron(style: str, target: Parallel) -> Cell:
    """What Megatron Core saved itself."""
    save = Save(Parallel("megatron", style, tp=2), 2, "dcp_jobs.save_megatron")
    case = {"setup": target, "options": {"rename": ["megatron-core-local"]}}
    says = ("does not record the members of its param groups",)
    return Cell(target.name, save, "dcp_jobs.resume_megatron", 2, case, expected=Resumes("dcp", 1e-4, says))


@cells(
    [
        megatron(style, Parallel("megatron", style, tp=tp, stage=stage))
        for style in ("llama", "gpt")
        for tp, stage in ((1, 3), (2, 1))
    ]
)
def test_what_megatron_core_saved_at_tp_2_is_loaded_at_tp_1_and_2(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    for load in facts:
        assert load.client_state["dcp"]["args"].seed == 5
