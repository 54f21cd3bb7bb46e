"""What a file has many of is looked up, and not compared each with all: comparisons and walks are counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import CheckpointMetadata, SavedParameter, SourceFacts, SourceFile, TensorMetadata
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import PerRank, RecordedCounts, TrainingState, merged
from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats import merging, shards
from elastic_ckpt.formats.dcp import _Builder
from elastic_ckpt.formats.dcp_entries import CommonState, Entries
from elastic_ckpt.formats.leftovers import find_leftovers
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.same_save import compare_counts
from elastic_ckpt.formats.saved_config import AHEAD, CONFIG_KEY, counts_ahead
from elastic_ckpt.formats.saved_states import with_strangers
from elastic_ckpt.planning import live_names
from elastic_ckpt.tools import comparison, export, inspection, module_files
from elastic_ckpt.tools.conversion.dcp import _paths_of
from elastic_ckpt.tools.logical import LogicalTensor

COUNT = 100


class Compared:
    """A value that counts how often any is compared."""

    times = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"value {self.number}"

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]


def test_param_groups_by_parameter_are_not_compared_with_all_others() -> None:
    names = [f"p{number}" for number in range(COUNT)]
    values = {f"{name}.lr": {"": Compared(number // 2)} for number, name in enumerate(names)}
    saved = {((), name): {"lr": f"{name}.lr"} for name in names}
    found = SimpleNamespace(folder="folder")
    of_folder = SimpleNamespace(
        _entries=Entries({name: name for name in names}), _values=values, _found=found, _common=CommonState()
    )
    Compared.times = 0
    members, groups = _Builder._groups_of(of_folder, saved)  # type: ignore[arg-type]
    assert members == {name: number // 2 for number, name in enumerate(names)}
    assert len(groups) == COUNT // 2
    assert Compared.times == 0


def test_what_tensor_parallel_ranks_differ_in_is_not_compared_with_all() -> None:
    one, two = ([Compared(number) for number in range(start, start + COUNT)] for start in (0, 1))
    Compared.times = 0
    assert [item.number for item in merging._only_in(one, two)] == [0]
    assert [item.number for item in merging._only_in(two, one)] == [COUNT]
    assert Compared.times == 0


class Walked(dict[Any, Any]):
    """Tensors that count how often all of them are met."""

    times = 0

    def items(self) -> Any:
        Walked.times += 1
        return super().items()

    def __iter__(self) -> Iterator[Any]:
        Walked.times += 1
        return super().__iter__()


def test_tensors_are_met_once_for_all_parameters_without_elements() -> None:
    """As AutoTP leaves them on some rank."""
    names = [f"p{number}" for number in range(COUNT)]
    chunk = StorageChunk(FlatRange(0, 4), 0, 0)
    tensors = Walked(
        ((name, key), TensorMetadata(name, key, (4,), "float32", chunks_of(chunk)))
        for name in names
        for key in ("fp32", "exp_avg")
    )
    layout = SimpleNamespace(degree=2, shard_shape=lambda number: (0,))
    declared = SimpleNamespace(layout=lambda name: layout)
    source = SourceFacts("native", "/ckpt", "step", 1, 2, "0.19.8")
    parameters = dict.fromkeys(names, SavedParameter((4,), 0, ()))
    files = (SourceFile("/ckpt/a", 99),)
    first = CheckpointMetadata(source, files, parameters, tensors, ({},), declared=declared)  # type: ignore[arg-type]
    second = replace(first, parameters={}, tensors={})
    Walked.times = 0
    _, completed = merging._with_empty_shards([first, second])
    assert {key: tensor.shape for key, tensor in completed.tensors.items()} == dict.fromkeys(tensors, (0,))
    assert Walked.times <= 5


def test_members_are_assigned_without_a_look_at_all_groups() -> None:
    class Shape(tuple[int, ...]):
        times = 0
        __slots__ = ()
        __hash__ = tuple.__hash__

        def __eq__(self, other: object) -> bool:
            Shape.times += 1
            return tuple.__eq__(self, other)  # type: ignore[arg-type]

    names = [f"p{number}" for number in range(COUNT)]
    weights = {name: Shape((number, 7)) for number, name in enumerate(names)}
    groups = [[Shape((number, 7))] for number in range(COUNT)]
    numbered = SimpleNamespace(is_flat=False, shapes=groups, weights=weights)
    assert live_names._assigned(numbered, names) == [[name] for name in names]  # type: ignore[arg-type]
    assert Shape.times <= 20 * COUNT
    twice = SimpleNamespace(is_flat=False, shapes=[[(1,)], [(1,)]], weights={"a": (1,), "b": (1,)})
    assert live_names._assigned(twice, ["a", "b"]) is None  # type: ignore[arg-type]
    mixed = SimpleNamespace(is_flat=False, shapes=[[(1,), None], [(2,)]], weights={"a": (1,), "b": (3,), "c": (2,)})
    assert live_names._assigned(mixed, ["a", "b", "c"]) == [["a", "b"], ["c"]]  # type: ignore[arg-type]


@pytest.fixture
def of_many_groups() -> CheckpointMetadata:
    """Each parameter with a param group, a name that is tied to it and a state that no other has."""
    names = [f"p{number}" for number in range(COUNT)]
    chunk = StorageChunk(FlatRange(0, 4), 0, 0)
    keys = [(name, key) for number, name in enumerate(names) for key in ("fp32", f"state{number}")]
    return CheckpointMetadata(
        SourceFacts("native", "/ckpt", "step", 1, 2, "0.19.8"),
        (SourceFile("/ckpt/a", 99),),
        Walked((name, SavedParameter((4,), number, ())) for number, name in enumerate(names)),
        Walked((at, TensorMetadata(*at, (4,), "float32", chunks_of(chunk))) for at in keys),
        ({},) * COUNT,
        aliases=Walked((f"tied{number}", name) for number, name in enumerate(names)),
    )


def test_tied_names_are_met_once_for_all_parameters(of_many_groups: CheckpointMetadata) -> None:
    Walked.times = 0
    weights = dict.fromkeys(of_many_groups.parameters)
    chosen = export.selected(of_many_groups, weights, ["tied7$"], [])  # type: ignore[arg-type]
    assert list(chosen) == ["p7"]
    logical = (LogicalTensor(name, "fp32", (4,), "float32") for name in of_many_groups.parameters)
    paths = [path for each in logical for path in _paths_of(each, of_many_groups)]
    assert paths[:2] == [("model", "p0"), ("model", "tied0")]
    assert len(paths) == 2 * COUNT
    assert Walked.times <= 5


def test_parameters_are_met_once_for_all_param_groups(of_many_groups: CheckpointMetadata) -> None:
    Walked.times = 0
    facts = export.optimizer_facts(of_many_groups, set(of_many_groups.parameters))
    assert json.loads(facts["param_groups"]) == [{"params": [name]} for name in of_many_groups.parameters]
    assert not list(inspection._state_findings(of_many_groups))
    assert Walked.times <= 9


def test_a_finding_names_the_first_of_many_states_that_a_parameter_lacks(of_many_groups: CheckpointMetadata) -> None:
    parameters = {name: replace(saved, group=0) for name, saved in of_many_groups.parameters.items()}
    findings = list(inspection._state_findings(replace(of_many_groups, parameters=parameters)))
    assert [finding.parameter for finding in findings] == list(parameters)
    assert findings[0].text.startswith("no state1, state10, state11, ")
    assert f" and {COUNT - 1 - 8} more of this parameter" in findings[0].text
    assert all(len(finding.text) < 200 for finding in findings)


class Kind(str):
    """A key of states that counts how often any is compared."""

    times = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Kind.times += 1
        return str.__eq__(self, other)


def test_differences_are_met_once_for_all_kinds_of_states() -> None:
    kinds = [Kind(f"state{number}") for number in range(COUNT)]
    found = [
        (kind, comparison.Difference("p", kind, comparison.MISSING, "", float(at))) for at, kind in enumerate(kinds)
    ]
    Kind.times = 0
    rows = comparison._kinds({Kind("equal"): 3}, found)
    assert rows["state7"] == {"equal": 0, "differs": 0, "missing": 1, "largest": 7.0}
    assert rows["equal"] == {"equal": 3, "differs": 0, "missing": 0, "largest": ""}
    assert Kind.times <= 9 * COUNT


def test_a_param_group_with_many_values_is_not_compared_with_each_of_many(
    of_many_groups: CheckpointMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {name: replace(saved, group=0) for name, saved in of_many_groups.parameters.items()}
    values = {f"value{number}": Compared(number) for number in range(COUNT)}
    left = replace(of_many_groups, parameters=one, groups=(values,))
    training = (TrainingState.after(0), TrainingState.after(0))
    facts = [fact for kind, fact in comparison._facts(left, of_many_groups, training) if kind == "hyperparameters"]
    assert len(facts) == COUNT * COUNT  # of so few, all
    monkeypatch.setattr(comparison, "_MOST_HYPERPARAMETERS", 10 * COUNT)
    Compared.times = 0
    with pytest.raises(UnsupportedError, match="too many hyperparameters"):
        list(comparison._facts(left, of_many_groups, training))
    assert Compared.times <= 30 * COUNT


def test_a_long_value_is_written_out_once_for_all_param_groups(of_many_groups: CheckpointMetadata) -> None:
    class Long:
        times = 0

        def __repr__(self) -> str:
            Long.times += 1
            return "long"

    one = {name: replace(saved, group=0) for name, saved in of_many_groups.parameters.items()}
    left = replace(of_many_groups, parameters=one, groups=({"value": Long()},))
    training = (TrainingState.after(0), TrainingState.after(0))
    facts = [fact for _, fact in comparison._facts(left, of_many_groups, training) if fact is not None]
    assert [fact.detail for fact in facts] == ["long and None"] * COUNT
    assert Long.times == 1


class Step(int):
    """A count of steps that counts how often it is subtracted from, or taken from another."""

    times = 0
    __hash__ = int.__hash__

    def __sub__(self, other: int) -> Step:
        Step.times += 1
        return Step(int(self) - int(other))

    def __add__(self, other: int) -> Step:
        Step.times += 1
        return Step(int(self) + int(other))

    __radd__ = __add__

    def __rsub__(self, other: int) -> Step:
        Step.times += 1
        return Step(int(other) - int(self))


def test_counts_of_the_optimizer_are_not_compared_with_all_that_a_run_has_recorded() -> None:
    steps = [frozenset({Step(4 * number)}) for number in range(COUNT)]
    recorded = RecordedCounts({"step": frozenset(Step(-4 * number - 2) for number in range(COUNT))}, at_save=True)
    Step.times = 0
    odd, why = compare_counts(10, 0, steps, (), "0.19.8", recorded, exact=False)  # type: ignore[arg-type]
    assert len(odd) > COUNT - 5 and why is None
    assert Step.times <= 8 * COUNT


def test_recorded_counts_do_not_share_a_hash() -> None:
    """Of integers of any length, thousands have the one of zero."""
    steps = [number * ((1 << 61) - 1) for number in range(-COUNT, COUNT)]
    tree = {"ds_config": {CONFIG_KEY: {AHEAD: {"step": [*steps, 7, True, "x"]}}}}
    found = counts_ahead(SimpleNamespace(tree=tree)).ahead["step"]  # type: ignore[arg-type]
    assert 7 in found
    assert max(Counter(map(hash, found)).values()) < 20


def test_tied_modules_are_not_looked_for_in_all_files_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shapes(dict[str, Any]):
        times = 0

        def __contains__(self, name: object) -> bool:
            Shapes.times += 1
            return super().__contains__(name)

        def __getitem__(self, name: str) -> Any:
            Shapes.times += 1
            return super().__getitem__(name)

        def items(self) -> Any:
            Shapes.times += 1
            return super().items()

    files = SimpleNamespace(layers={(layer, 0): f"layer {layer}" for layer in range(COUNT)})
    found: Any = SimpleNamespace(files=files, foreign="", folder=str(tmp_path), path=str)
    listed = {f"tied_modules.{number}.weight": (4,) for number in range(COUNT)}
    monkeypatch.setattr(module_files, "_shapes_in", lambda *_: Shapes(weight=(4,)))
    monkeypatch.setattr(module_files, "_listed", lambda *_: {0: {**listed, "tied_modules.x.bias": (4,)}})
    Shapes.times = 0
    assert [each.parameter for each in module_files.layer_findings(found)] == ["tied_modules.x.bias"]
    assert Shapes.times <= 4 * COUNT


def test_values_of_a_rank_are_not_looked_for_among_those_of_all_others() -> None:
    class Key(str):
        times = 0
        __slots__ = ()

        def __hash__(self) -> int:
            Key.times += 1
            return str.__hash__(self)

    parts = [(range(rank, rank + 1), {Key(f"only on {rank}"): 1, Key("lr"): 0.1}) for rank in range(COUNT)]
    Key.times = 0
    found = merged(parts)
    assert list(found)[:3] == ["only on 0", "lr", "only on 1"]
    assert found["lr"] == 0.1
    assert found["only on 7"] == PerRank(((7, 1),))
    assert Key.times <= 10 * COUNT


class Rank(int):
    """A model-parallel rank that counts how often any is compared."""

    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Rank.times += 1
        return int(self) == other


def test_files_of_a_folder_are_sorted_once_for_all_model_parallel_ranks() -> None:
    optimizer = {(0, Rank(mp)): f"optimizer {mp}" for mp in range(COUNT)}
    model = {mp: f"model {mp}" for mp in range(COUNT)}
    files = SimpleNamespace(mp_ranks=range(COUNT), model=model, model_zero3={}, optimizer=optimizer)
    Rank.times = 0
    indexed = dict.fromkeys([*model.values(), *optimizer.values()])
    assert find_leftovers(SimpleNamespace(files=files), indexed) == frozenset()  # type: ignore[arg-type]
    assert Rank.times <= 10 * COUNT


def test_sub_groups_are_marked_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[int] = []

    def with_strangers_counted(states: Any, base: Any) -> Any:
        marked.append(len(states))
        return with_strangers(states, base)

    monkeypatch.setattr(shards, "with_strangers", with_strangers_counted)
    flats = [torch.ones(4) for _ in range(3)]
    group = {"lr": 0.1, "params": [0, 1, 2]}
    state = {number: {"step": 1.0, "exp_avg": flat} for number, flat in enumerate(flats)}
    base = {"state": {**state, "odd": 1}, "param_groups": [group]}
    own = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": flats, "optimizer_state_dict": base}
    path = str(tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"optimizer_state_dict": own, "ds_version": "0.19.8", "ds_config": {}}, path)
    shard = shards.index_shard(open_pickled(path), 0, StateOptions())
    assert marked == [3]
    assert [list(flat.states.opaque) for flat in shard.flats] == [["odd"], [], []]
