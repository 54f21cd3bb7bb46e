"""Copies that should be equal, in real files: which are compared, how far they are apart, and what becomes of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.core.chunks import BlockCode, StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import LiveShards, ModelLayout, RankCoordinates
from elastic_ckpt.core.metadata import (
    BUFFER,
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, ReplicaCheck, RequantizeItem, TargetTensor
from elastic_ckpt.core.shard_specs import ShardSpec, declared_by
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.core.strided import TPLayout, duplicates, fused, reshard
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import Drift, find_drift, judge_drift, united
from elastic_ckpt.io.reader import ReadStats, execute
from elastic_ckpt.planning.planner import compare_replicas
from elastic_ckpt.planning.read_items import read_items, rows_in_order
from elastic_ckpt.sharding.resolve import FIRST, MEAN, STRICT, ReshardPlan, resolve
from elastic_ckpt.sharding.rules import ShardingRules

OPTIONS = ReadOptions(threads=2)
NAN, INF = math.nan, math.inf


def write(path: Path, *tensors: torch.Tensor) -> SourceFile:
    raw = b"\xee" * 3 + b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    path.write_bytes(raw)
    return SourceFile(str(path), len(raw))


def drift_of(tmp_path: Path, *copies: torch.Tensor, taken: str = FIRST, options: ReadOptions = OPTIONS) -> list[Drift]:
    files = tuple(write(tmp_path / str(number), copy) for number, copy in enumerate(copies))
    dtypes = [str(copy.dtype).removeprefix("torch.") for copy in copies]
    items = tuple((ReadItem(number, 3, 0, 0, copies[0].numel(), dtype),) for number, dtype in enumerate(dtypes))
    comparison = ReplicaCheck("a", MASTER, copies[0].numel(), items, taken)
    return united(find_drift(tuple(files), (comparison,), options))


# --- how far copies are apart -----------------------------------------------------------------------------------


def test_equal_copies_are_no_drift(tmp_path: Path) -> None:
    same = torch.tensor([0.1, NAN, INF, -INF, -0.0])
    assert drift_of(tmp_path, same, same.clone(), same.clone()) == []
    assert drift_of(tmp_path, torch.zeros(2), -torch.zeros(2)) == []
    assert drift_of(tmp_path, torch.empty(0), torch.empty(0)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64"])
def test_the_largest_difference_is_that_from_the_first_copy(tmp_path: Path, dtype: str) -> None:
    first = torch.tensor([1, 2, 3, 4]).to(getattr(torch, dtype))
    second, third = first.clone(), first.clone()
    second[1] += 4
    third[0] -= 2
    third[3] += 2
    (found,) = drift_of(tmp_path, first, second, third, taken=MEAN)
    assert facts([found]) == [("a", MASTER, 4.0, 3, MEAN, False)]
    assert str(found) == "a: 3 copies, at most 4 apart (0, 1)"
    assert str(replace(found, check=replace(found.check, key="exp_avg"))).startswith("a exp_avg: 3 copies")


def test_numbers_beyond_single_precision_are_told_apart(tmp_path: Path) -> None:
    big = torch.tensor([2**53 - 1], dtype=torch.int64)
    assert drift_of(tmp_path, big, big.clone()) == []
    assert drift_of(tmp_path, big, big - 1)[0].largest == 1.0
    tiny = torch.tensor([1.0], dtype=torch.float64)
    assert drift_of(tmp_path, tiny, tiny + 2**-50)[0].largest == 2**-50


@pytest.mark.parametrize(
    "copies",
    [
        (torch.tensor([2**53, 5]), torch.tensor([2**53 + 1, 5])),
        (torch.tensor([1 + 2j, 3j]), torch.tensor([1 - 2j, 3j])),
    ],
)
def test_numbers_that_fit_into_no_float_are_told_apart(
    tmp_path: Path, copies: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert len(drift_of(tmp_path, *copies)) == 1


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_what_is_no_number_in_one_copy_only_is_infinitely_far(tmp_path: Path, odd: float) -> None:
    (found,) = drift_of(tmp_path, torch.tensor([1.0, odd]), torch.tensor([1.0, 2.0]))
    assert found.largest == INF
    (found,) = drift_of(tmp_path, torch.tensor([1.0, INF]), torch.tensor([1.0, -INF]))
    assert found.largest == INF


def test_equal_infinities_beside_a_difference_count_as_equal(tmp_path: Path) -> None:
    (found,) = drift_of(tmp_path, torch.tensor([INF, NAN, 1.0, 1.0]), torch.tensor([INF, NAN, 1.5, 1.0]))
    assert found.largest == 0.5


def test_the_largest_difference_is_that_of_all_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are read in several goes, or told apart in several steps."""
    few = replace(OPTIONS, staging_nbytes=2 * 2 * 3 * 4)
    for patched in ("_LEAST_NBYTES", "_STEP_NUMEL"):
        monkeypatch.setattr(f"elastic_ckpt.io.compare_replicas.{patched}", 3)
        first = torch.arange(8.0)
        second = first + torch.tensor([0, 1, 0, 0, 0, 0, 0, 7.0])
        (found,) = drift_of(tmp_path, first, second, options=few)
        assert found.largest == 7.0
        apart = drift_of(tmp_path, first, first + torch.tensor([0, 0, 0, 0, 2.0, 0, 0, 0]), options=few)
        assert apart[0].largest == 2.0


def test_other_bytes_of_the_same_numbers_are_no_drift(tmp_path: Path) -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x3F800000, -0x80000000], dtype=torch.int32).view(torch.float32)
    same = torch.tensor([NAN, NAN, 1.0, 0.0])
    assert nans.view(torch.int32).tolist() != same.view(torch.int32).tolist()
    assert drift_of(tmp_path, nans, same) == []
    (found,) = drift_of(tmp_path, nans, same + torch.tensor([0.0, 0.0, 0.0, 2.0]))
    assert found.largest == 2.0


def test_copies_of_other_dtypes_are_compared_by_their_values(tmp_path: Path) -> None:
    wide = torch.tensor([1.0, 2.0, 3.0])
    assert drift_of(tmp_path, wide.bfloat16(), wide, wide.double()) == []
    (found,) = drift_of(tmp_path, wide.bfloat16(), wide, wide.double() + torch.tensor([0, 0.75, 0]))
    assert (found.largest, found.copies) == (0.75, 3)


def test_equal_copies_are_read_once_and_never_turned_into_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[ReadPlan] = []

    def counted(plan: ReadPlan, *others: Any, **named: Any) -> ReadStats:
        plans.append(plan)
        return execute(plan, *others, **named)

    monkeypatch.setattr("elastic_ckpt.io.compare_replicas.execute", counted)
    monkeypatch.setattr("elastic_ckpt.io.compare_replicas._STEP_NUMEL", 0)  # to take a step would fail
    files = [write(tmp_path / str(number), torch.arange(100.0)) for number in range(2)]
    small = [
        ReplicaCheck(str(at), MASTER, 10, tuple((ReadItem(file, 3 + 40 * at, 0, 0, 10, "float32"),) for file in (0, 1)))
        for at in range(10)
    ]
    assert find_drift(tuple(files), tuple(small), OPTIONS) == []
    (plan,) = plans  # all of them in one go
    assert sum(copy.numel for copy in plan.items) == 200
    assert not plan.requantize_items
    assert {target.dtype for target in plan.targets} == {"float32"}


def test_quantized_copies_are_compared_by_their_values(tmp_path: Path) -> None:
    book = Codebook(tuple(code / 255 for code in range(256)))
    codes, scales = torch.tensor([51, 102], dtype=torch.uint8), [torch.tensor([s]) for s in (1.0, 2.0, 0.5)]
    files = tuple(write(tmp_path / str(n), scale, codes * (1 if n < 2 else 2)) for n, scale in enumerate(scales))
    code = BlockCode(BlockFormat(256, "absmax1", book), 0, 3)
    items = [(ReadItem(number, 7, 0, 0, 2, "uint8", code=code),) for number in range(3)]

    def drift(*copies: int) -> list[Drift]:
        one = ReplicaCheck("a", "exp_avg", 2, tuple(items[copy] for copy in copies))
        return united(find_drift(tuple(files), (one,), OPTIONS))

    assert drift(0, 1)[0].largest == pytest.approx(0.4)
    assert drift(0, 2) == []  # other codes, other scales, the same values


# --- what becomes of them ---------------------------------------------------------------------------------------

BIG = Drift(ReplicaCheck("big", MASTER, 10, ()), 4, 2.0)
SMALL = Drift(ReplicaCheck("small", "exp_avg", 10, (), MEAN), 4, 0.5)


def facts(drifts: Sequence[Drift]) -> list[tuple[object, ...]]:
    return [(e.check.name, e.check.key, e.largest, e.copies, e.check.taken, e.check.is_guess) for e in drifts]


def difference(start: int, numel: int, largest: float, **other: Any) -> Drift:
    return Drift(ReplicaCheck("a", MASTER, numel, (), start=start, **{"number": 1, **other}), 3, largest)


def test_what_ranks_found_in_pieces_of_a_tensor_is_one_line() -> None:
    first, second = difference(0, 10, 0.5), difference(60, 30, 2.0)
    assert facts(united([second, first])) == [("a", MASTER, 2.0, 3, FIRST, False)]
    assert facts(united([first, second, first])) == facts(united([first, second]))  # two ranks compared the same
    assert facts(united([first, difference(0, 50, 1.0, number=2), second])) == [("a", MASTER, 2.0, 3, FIRST, False)]
    (both,) = united([first, difference(90, 10, 0.0, is_guess=True, taken=MEAN)])
    assert both.check.is_guess and both.check.taken == MEAN
    assert united([]) == []


def test_drift_is_refused_unless_the_user_says_what_to_take() -> None:
    with pytest.raises(MismatchError, match="only one can be kept") as caught:
        judge_drift([SMALL, BIG, BIG], frozenset(), STRICT)
    assert caught.value.parameter == "big, small"
    assert caught.value.found == f"{BIG}; {SMALL}"
    assert '"replicated_params": "first"' in str(caught.value.remedy)
    for policy in (FIRST, MEAN):
        notes = judge_drift([SMALL, BIG, BIG], frozenset(), policy)
        assert notes == (
            f"replicated, but different when saved: {BIG}; the first was taken",
            f"replicated, but different when saved: {SMALL}; the mean was taken",
        )


def test_guesses_that_differ_are_named_with_the_rules_that_fit_the_shapes() -> None:
    """Beside a live model with the shape of one shard, the shards of a whole parameter fit no rule."""
    names = ("3.norm.weight", "4.norm.weight", "head.bias")
    guessed = [Drift(ReplicaCheck(name, MASTER, 10, (), is_guess=True), 2, 1.0) for name in names]
    patterns = [r"\d+\.norm\.weight", r"head\.bias"]
    for has_live_model, kinds in ((True, ["replicated"]), (False, ["column", "replicated"])):
        with pytest.raises(MismatchError, match="would be copies") as caught:
            judge_drift(guessed, frozenset(), STRICT, has_live_model)
        rules = [each.config["tp_rules"] for each in caught.value.remedies if each.config]
        assert rules == [[{"pattern": pattern, "kind": kind} for pattern in patterns] for kind in kinds]
        assert caught.value.parameters == names


def test_what_a_rule_averages_may_differ() -> None:
    assert len(judge_drift([BIG, SMALL], frozenset({"big", "small"}), STRICT)) == 2
    with pytest.raises(MismatchError) as caught:
        judge_drift([BIG, SMALL], frozenset({"big"}), STRICT)
    assert caught.value.parameter == "small"
    assert judge_drift([], frozenset(), STRICT) == ()


def test_a_copy_of_a_stage_that_nothing_trains_may_differ_and_excuses_no_other() -> None:
    def apart(key: str, *, zero: bool = False, number: int = 1) -> Drift:
        check = ReplicaCheck("tied", key, 10, (), number=number)
        return Drift(check, 2, 1.0, others_are_zero=zero)

    dead = [apart(MASTER), apart("exp_avg", zero=True), apart("exp_avg_sq", zero=True)]
    (note,) = judge_drift(dead, frozenset(), STRICT)
    assert "only the first pipeline stage trains" in note and "tied" in note
    assert judge_drift([apart(MASTER), apart("exp_avg")], frozenset({"tied"}), STRICT) == (note,)
    by_another = replace(apart("exp_avg"), first_is_zero=True)
    with pytest.raises(
        MismatchError, match=r"only one can be kept(?s:.*)a later pipeline stage trains"
    ):  # not as declared
        judge_drift([apart(MASTER), by_another], frozenset({"tied"}), STRICT)
    for trained in (
        [apart(MASTER)],  # no state tells
        [*dead, apart("exp_avg", number=2)],  # the copy of a third stage
        [*dead, apart(MASTER, number=0)],  # tensor-parallel ranks' copies of the first stage
    ):
        with pytest.raises(MismatchError, match="only one can be kept"):
            judge_drift(trained, frozenset(), STRICT)


def test_many_differences_are_cut_short_and_counted() -> None:
    many = [Drift(ReplicaCheck(f"p{number}", MASTER, 10, ()), 4, float(number)) for number in range(9)]
    with pytest.raises(MismatchError, match="; and 3 more"):
        judge_drift(many, frozenset(), STRICT)
    notes = judge_drift(many, frozenset(), FIRST)
    assert len(notes) == 7
    assert "p8" in notes[0]
    assert notes[-1].startswith("and 3 more")
    assert not any("more" in note for note in judge_drift(many[:6], frozenset(), FIRST))


# --- which copies are compared, and what a plan takes -----------------------------------------------------------


def checkpoint(
    folder: Path, held: Mapping[str, Sequence[torch.Tensor]], keys: Sequence[str] = (MASTER,)
) -> CheckpointMetadata:
    """A file for each shard of each tensor; states are ten times the weights."""
    files: list[SourceFile] = []
    tensors = {}
    for name, shards in held.items():
        for key in keys:
            sources = []
            for shard in shards:
                values = shard * (1 if key == keys[0] else 10)
                files.append(write(folder / f"{name}-{key}-{len(sources)}", values))
                sources += chunks_of(StorageChunk(FlatRange(0, shard.numel()), len(files) - 1, 3))
            shapes = tuple(tuple(shard.shape) for shard in shards)
            dtype = str(shards[0].dtype).removeprefix("torch.")
            sharded = shapes if len(shapes) > 1 else ()
            tensors[name, key] = TensorMetadata(name, key, shapes[0], dtype, tuple(sources), shards=sharded)
    parameters = {name: SavedParameter(tuple(shards[0].shape), 0, ()) for name, shards in held.items()}
    facts = SourceFacts("native", str(folder), "tag", 1, 1, "0")
    return CheckpointMetadata(facts, tuple(files), parameters, tensors, ({},))


def engine(
    layouts: Mapping[str, LiveShards], tp: int = 1, tp_rank: int = 0, dp: int = 1, dp_rank: int = 0
) -> ModelLayout:
    return ModelLayout(RankCoordinates(dp, dp_rank, tp, tp_rank), layouts)


def difference_in(
    metadata: CheckpointMetadata, live: ModelLayout, resharding: ReshardPlan, states: bool = True
) -> list[Drift]:
    names = {name for name, _ in metadata.tensors}
    comparisons = compare_replicas(metadata, live, resharding, names, states)
    return find_drift(metadata.files, comparisons, OPTIONS)


def drift_in(
    metadata: CheckpointMetadata, live: ModelLayout, resharding: ReshardPlan, states: bool = True
) -> list[Drift]:
    return united(difference_in(metadata, live, resharding, states))


def taken(metadata: CheckpointMetadata, name: str, resharding: ReshardPlan, numel: int) -> torch.Tensor:
    """What a plan would put into the live shard."""
    transfer, tensor = resharding.transfers[name, ""], metadata.tensors[name, MASTER]
    values = torch.zeros(numel, dtype=torch.float64)
    items = rows_in_order(read_items(tensor, transfer, FlatRange(0, numel)))
    recode = RequantizeItem(0, 0, numel, None, -1, 0, items, transfer.scale)
    execute(
        ReadPlan(metadata.files, (TargetTensor(MASTER, 0, "", numel, "float64"),), (), (recode,)),
        [values],
        OPTIONS,
    )
    return values


@pytest.mark.parametrize("live_is_cut", [False, True])
@pytest.mark.parametrize(
    ("kind", "policy"), [("replicated", STRICT), ("replicated", FIRST), ("replicated", MEAN), ("averaged", STRICT)]
)
def test_what_the_notes_say_was_taken_is_what_the_plan_takes(
    tmp_path: Path, kind: str, policy: str, live_is_cut: bool
) -> None:
    copies = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 6.0, 3.0, 4.0])]
    metadata = checkpoint(tmp_path, {"norm": copies}, (MASTER, "exp_avg"))
    preset = {"parameter_to_average_patterns" if kind == "averaged" else "tp_replicated_parameter_patterns": ["norm"]}
    metadata = replace(metadata, declared=declared_by(preset))
    split = fused((4,), 0, [[1, 1, 1, 1]])
    layout = LiveShards(((1,),) * 4, layout=split) if live_is_cut else LiveShards(((4,),))
    tp = len(layout.shapes)
    live = engine({"norm": layout}, tp)
    found = resolve(metadata, live, ["norm"], ShardingRules(), policy)
    got = taken(metadata, "norm", found, 1 if live_is_cut else 4)
    every = [each for rank in range(tp) for each in difference_in(metadata, engine({"norm": layout}, tp, rank), found)]
    states, weights = united(every)
    assert (weights.check.key, weights.largest, weights.copies) == (MASTER, 4.0, 2)
    assert (states.check.key, states.largest) == ("exp_avg", 40.0)
    wanted = {FIRST: copies[0], MEAN: torch.stack(copies).mean(0)}[weights.check.taken]
    assert got.tolist() == wanted[: len(got)].tolist()
    if kind == "averaged":
        assert judge_drift(every, found.averaged, policy)


def test_integers_are_compared_and_the_first_is_taken_whatever_the_policy(tmp_path: Path) -> None:
    metadata = checkpoint(tmp_path, {"ids": [torch.tensor([1, 2]), torch.tensor([1, 4])]}, (BUFFER,))
    found = resolve(metadata, engine({"ids": LiveShards(((2,),))}), ["ids"], ShardingRules(), MEAN)
    every = difference_in(metadata, engine({}), found)
    assert facts(united(every)) == [("ids", BUFFER, 2.0, 2, FIRST, True)]
    for policy in (STRICT, FIRST, MEAN):  # each rank's own bounds, say: no policy makes one of them right for all
        with pytest.raises(MismatchError, match="by their shapes alone"):
            judge_drift(every, frozenset(), policy)


def test_what_is_summed_is_not_compared(tmp_path: Path) -> None:
    metadata = checkpoint(tmp_path, {"bias": [torch.tensor([1.0]), torch.tensor([2.0])]})
    book = ShardingRules((ShardSpec(pattern="bias", kind="summed"),))
    found = resolve(metadata, engine({"bias": LiveShards(((1,),))}), ["bias"], book, STRICT)
    assert drift_in(metadata, engine({}), found) == []


def test_every_shard_of_a_tied_parameter_is_compared_with_its_replicas(tmp_path: Path) -> None:
    shards = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    metadata = checkpoint(tmp_path, {"tied": shards, "other": [shards[0], shards[1] + 1], "same": shards})
    replicas = tuple(replace(metadata.tensors[name, MASTER], name="tied") for name in ("same", "other"))
    both = replace(
        metadata, tensors={("tied", MASTER): metadata.tensors["tied", MASTER]}, replicas={("tied", MASTER): replicas}
    )
    assert facts(drift_in(both, engine({}), ReshardPlan())) == [("tied", MASTER, 1.0, 2, FIRST, False)]
    mended = replace(both, replicas={("tied", MASTER): replicas[:1]})
    assert drift_in(mended, engine({}), ReshardPlan()) == []
    assert compare_replicas(both, engine({}), ReshardPlan(), [], True) == ()


def test_parts_that_several_ranks_hold_of_a_parameter_that_is_cut_are_compared(tmp_path: Path) -> None:
    whole = torch.arange(8.0).view(2, 4)  # the last column is on both ranks
    held = (((0, 1), (3, 4)), ((1, 3), (3, 4)))
    shards = [torch.cat([whole[:, a:b] for a, b in rank], 1) for rank in held]
    layouts = (TPLayout((2, 4), 1, (((0, 4),),)), TPLayout((2, 4), 1, held))
    for change, expected in ((0.0, []), (2.0, [("p", MASTER, 2.0, 2, FIRST, False)])):
        shards[1][1, 2] += change
        metadata = checkpoint(tmp_path, {"p": shards})
        found = ReshardPlan({("p", ""): reshard(*layouts[::-1], 0)}, overlaps={"p": duplicates(layouts[1])})
        assert facts(drift_in(metadata, engine({}), found)) == expected
        assert taken(metadata, "p", found, 8).tolist() == whole.flatten().tolist()


def test_states_are_compared_only_if_they_are_loaded_and_only_what_can_be_cut(tmp_path: Path) -> None:
    metadata = checkpoint(tmp_path, {"a": [torch.zeros(2), torch.ones(2)]}, (MASTER, "exp_avg"))
    found = ReshardPlan(replicas=frozenset("a"))
    assert sorted(drift.check.key for drift in drift_in(metadata, engine({}), found)) == ["exp_avg", MASTER]
    assert [drift.check.key for drift in drift_in(metadata, engine({}), found, states=False)] == [MASTER]
    factor = {("a", "exp_avg"): replace(metadata.tensors["a", "exp_avg"], has_own_shape=True)}
    assert drift_in(replace(metadata, tensors=factor), engine({}), found) == []


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 3), (2, 2), (3, 1), (4, 4)])
def test_each_comparison_is_dealt_to_exactly_one_rank_of_a_stage(tmp_path: Path, tp: int, dp: int) -> None:
    names = [f"p{number}" for number in range(7)]
    metadata = checkpoint(tmp_path, {name: [torch.zeros(1)] * 2 for name in names}, (MASTER, "exp_avg"))
    found = ReshardPlan(replicas=frozenset(names))
    shares = []
    for rank in range(tp):
        for dp_rank in range(dp):
            mine = compare_replicas(metadata, engine({}, tp, rank, dp, dp_rank), found, names, True)
            shares.append([(one.name, one.key) for one in mine])
    assert Counter(one for share in shares for one in share) == Counter(
        (n, k) for n in names for k in (MASTER, "exp_avg")
    )
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
