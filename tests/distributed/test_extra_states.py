"""What modules keep beside parameters and buffers comes back by ``set_extra_state``, or is refused by name."""

from __future__ import annotations

from typing import Any

from tests.distributed.cells import CONVERT, Cell, Save, cells
from tests.distributed.extra_state_jobs import KINDS
from tests.distributed.model import Setup

OURS = "convert.convert_by_command"
NAMES = ("inner.gauge._extra_state", "inner.same._extra_state")
STAGES = [Setup(stage) for stage in range(4)]
#: Of bytes, which a module may unpickle.
PACKED = ("stream", "bytes", "packed")
TRUSTED = {"trust_pickle": True}
READ = [kind for kind in KINDS if kind not in ("object", "none")]


def saved(setup: Setup, kind: str, converted: bool = False, converter: str = CONVERT, **more: Any) -> Save:
    told = {"kind": kind, **more}
    return Save(setup, job="extra_state_jobs.save_each", more=told, converted=converted, converter=converter)


def loaded(
    save: Save, target: Setup, ranks: int, note: str = "", fits: dict[str, Any] | None = None, **case: Any
) -> Cell:
    """A load of what a module keeps; ``fits``: entries of a case that is not refused."""
    kind = save.more["kind"]
    name = f"{kind}, {save.name} to {target.name}-dp{ranks}{note and ', '}{note}"
    trusted = {"config": TRUSTED} if kind in PACKED else {}
    told = {"setup": target, "kind": kind, "format": save.format, **trusted, **case}
    instead = None if fits is None else (save, {**told, **fits})
    return Cell(name, save, "extra_state_jobs.load", ranks, told, fits=instead)


@cells(
    [
        loaded(saved(STAGES[number % 4], kind), STAGES[(number + step) % 4], ranks)
        for number, kind in enumerate(READ)
        for step, ranks in ((0, 2), (1, 3), (3, 1))
    ]
    + [
        # DeepSpeed's converter takes each entry for a tensor below ZeRO-3
        loaded(saved(STAGES[stage], kind, True, converter=converter), STAGES[target], ranks)
        for stage, kind, converter, target, ranks in (
            (1, "tensor", CONVERT, 1, 2),
            (3, "dictionary", CONVERT, 2, 3),
            (2, "stream", OURS, 3, 3),
        )
    ]
)
def test_one_value_of_all_ranks_comes_back_at_every_topology(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.error is None, each.error
        assert each.report is not None, "elastic_ckpt's own load"
        assert each.value == each.expected
        assert each.times_set == len(NAMES)
        assert each.outcomes == {"restored": NAMES}
        assert each.differences == {}


BY_RULE = {"config": {"replicated_params": "first"}}


def of_ranks(setup: Setup, converted: bool = False) -> Save:
    return saved(setup, "dictionary", converted, by_rank=True)


@cells(
    [
        loaded(of_ranks(STAGES[3]), STAGES[3], 2, "each its own", expected=[1, 2]),
        loaded(of_ranks(STAGES[3]), STAGES[2], 2, "each its own", expected=[1, 2]),
        # of which there is rank 0's alone
        loaded(of_ranks(STAGES[1]), STAGES[3], 2, "the first"),
        loaded(of_ranks(STAGES[3]), STAGES[3], 3, "by rule", **BY_RULE),
    ]
)
def test_values_of_their_own_come_back_to_as_many_ranks_or_by_rule(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.error is None, each.error
        assert (each.value, each.outcomes) == (each.expected, {"restored": NAMES})
        by_rule = [note for note in each.report.notes if "extra states of modules that differed" in note]
        assert len(by_rule) == ("config" in cell.case)


@cells([loaded(of_ranks(STAGES[3]), STAGES[stage], 3, fits=BY_RULE) for stage in (0, 3)])
def test_values_of_their_own_are_refused_at_another_number_of_ranks(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert type(each.error).__name__ == "MismatchError", each.error
        assert each.error.parameters == NAMES
        assert "zero_pp_rank_0_" in each.error.expected and "zero_pp_rank_1_" in each.error.found
        assert [each.config for each in each.error.remedies] == [{}, {"replicated_params": "first"}]
        assert (each.times_set, each.report) == (0, None), "the engine is as it was"


OBJECTS = saved(STAGES[2], "object")


@cells(
    [
        loaded(OBJECTS, STAGES[3], 3, "allowed", allows=True),
        loaded(OBJECTS, STAGES[1], 2, "trusted", config={"trust_pickle": True}),
    ]
)
def test_a_class_of_the_users_comes_back_where_it_is_allowed(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.error is None, each.error
        assert (each.value, each.outcomes, each.differences) == (each.expected, {"restored": NAMES}, {})


@cells([loaded(OBJECTS, STAGES[stage], ranks, fits={"allows": True}) for stage, ranks in ((2, 2), (3, 3))])
def test_a_class_of_the_users_is_refused_by_name(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert type(each.error).__name__ == "UnsafePickleError", each.error
        assert each.error.parameter == NAMES[0]
        assert "extra_state_jobs.Diary" in each.error.found
        assert {"trust_pickle": True} in [remedy.config for remedy in each.error.remedies]
        assert (each.times_set, each.report) == (0, None), "the engine is as it was"


@cells(
    [
        loaded(saved(STAGES[stage], kind), STAGES[target], ranks, "not trusted", fits={"config": TRUSTED}, config={})
        for kind, stage, target, ranks in (("stream", 1, 1, 2), ("bytes", 3, 2, 3), ("packed", 2, 3, 3))
    ]
)
def test_bytes_that_a_module_may_unpickle_are_refused_by_name(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert type(each.error).__name__ == "UnsafePickleError", each.error
        assert each.error.parameter == NAMES[0] and "may unpickle" in each.error.problem
        assert [remedy.config for remedy in each.error.remedies] == [TRUSTED]
        assert (each.times_set, each.report) == (0, None), "the engine is as it was"


#: The same weights, in a module without extra state; and with it.
WITHOUT, WITH = ({"kind": "number", "module": module} for module in ("linear", "gauge"))
NOT_STRICT = {"load_module_strict": False}


def one_sided(save: dict[str, Any], load: dict[str, Any], stage: int, arguments: dict[str, Any] | None = None) -> Cell:
    source = Save(STAGES[stage], job="extra_state_jobs.save_each", more=save)
    name = f"{save['module']} to {load['module']}, ZeRO-{stage} to {stage}-dp3, {arguments or 'strict'}"
    case = {"setup": STAGES[stage], "format": "native", "arguments": arguments or {}, **load}
    return Cell(name, source, "extra_state_jobs.load", 3, case, fits=(source, {**case, **save}))


@cells([one_sided(WITHOUT, WITH, 1), one_sided(WITH, WITHOUT, 3)])
def test_what_one_side_keeps_alone_is_an_error_of_a_strict_load(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert type(each.error).__name__ == "MismatchError", each.error
        assert each.error.parameters == NAMES
        assert [remedy.arguments for remedy in each.error.remedies] == [NOT_STRICT]


@cells([one_sided(WITHOUT, WITH, 1, NOT_STRICT), one_sided(WITH, WITHOUT, 3, NOT_STRICT)])
def test_what_one_side_keeps_alone_is_reported_by_a_load_that_is_not_strict(cell: Cell, facts: list[Any]) -> None:
    what = "fresh" if cell.case["module"] == "gauge" else "ignored"
    for each in facts:
        assert each.error is None, each.error
        assert (each.times_set, each.outcomes, each.differences) == (0, {what: NAMES}, {})


@cells([loaded(saved(STAGES[1], "none"), STAGES[3], 3), loaded(saved(STAGES[1], "none"), STAGES[1], 2)])
def test_a_module_that_kept_nothing_is_given_nothing_as_torch_gives_it(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert each.error is None, each.error
        assert (each.value, each.times_set, each.outcomes, each.differences) == ("None", len(NAMES), {}, {})


@cells(
    [
        loaded(saved(STAGES[2], "number"), STAGES[stage], ranks, "refuses", fits={"refuses": False}, refuses=True)
        for stage, ranks in ((2, 2), (3, 3))
    ]
)
def test_a_module_that_takes_no_such_state_is_named_on_every_rank(cell: Cell, facts: list[Any]) -> None:
    for each in facts:
        assert type(each.error).__name__ == "PartialLoadError", each.error
        assert each.error.parameter == NAMES[0]
        assert "amax_history" in each.error.found and "set_extra_state of Gauge" in each.error.expected
        assert each.report is None


def pipeline(saved_stage: int, stages: int, stage: int, ranks: int) -> Cell:
    save = Save(Setup(saved_stage), ranks=4, job="extra_state_jobs.save_pipeline")
    name = f"ZeRO-{saved_stage} of 2 stages to ZeRO-{stage} of {stages} on {ranks} ranks"
    return Cell(name, save, "extra_state_jobs.load_pipeline", ranks, {"setup": Setup(stage), "stages": stages})


@cells([pipeline(1, 4, 1, 4), pipeline(1, 1, 0, 2)])
def test_layers_of_a_pipeline_get_theirs_on_any_stage(cell: Cell, facts: list[Any]) -> None:
    names = {name for each in facts for name in each.after}
    assert names == {"1.gauge._extra_state", "2.gauge._extra_state", "tied_modules.tie.gauge._extra_state"}
    for each in facts:
        assert each.after == {name: number - each.shift for name, number in each.before.items()}
        assert set(each.restored) == names


@cells(
    [
        Cell(f"of {save.name}, by_rank={by_rank}", save, "extra_state_jobs.look_at", 1, {"by_rank": by_rank})
        for by_rank, save in ((False, saved(STAGES[1], "number")), (True, saved(STAGES[3], "number", by_rank=True)))
    ]
)
def test_commands_say_what_modules_keep(cell: Cell, facts: list[Any]) -> None:
    (each,) = facts
    named = [", ".join(NAMES), *(NAMES if cell.case["by_rank"] else ())]
    assert (each.inspected, each.verified) == (named, named)
    assert each.differences == [(NAMES[0], "differs")]
    assert (each.same["equal"], each.same["differs"]) == (2, 0)
    assert [note for note in each.exported if "extra states" in note and NAMES[0] in note]
    assert [note for note in each.converted if "extra states" in note and NAMES[0] in note]
