"""Which file is of which rank, and how their metadata become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.core.chunks import BlockCode, StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import RankCoordinates, SequenceParallel
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    MASTER,
    CheckpointMetadata,
    ReplicatedState,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    TensorMetadata,
)
from elastic_ckpt.core.shard_specs import declared_by
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.grid import Grid, grid_of
from elastic_ckpt.formats.merging import LayerShard, merge_shards, merge_stages, with_module_files
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.saved_config import StatedDegrees
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from tests.formats.model_shards import model

# --- ranks ------------------------------------------------------------------------------------------------------


def ranks(*models: ModelShard) -> dict[int, ModelShard]:
    return dict(enumerate(models))


@pytest.mark.parametrize("degrees", [(2, 3), (3, 2), (6, 1), (1, 6)])
def test_the_files_say_how_many_ranks_of_each_kind_there_are(degrees: tuple[int, int]) -> None:
    grid = grid_of(ranks(*[model(["a"], degrees)] * 6), "/ckpt")
    assert (grid.tp, grid.pp) == degrees
    assert [rank for stage in grid.stages for rank in stage] == list(range(6))


@pytest.mark.parametrize(
    ("names", "stages"),
    [
        ("a a a a", ((0, 1, 2, 3),)),
        ("a a b b", ((0, 1), (2, 3))),
        ("a b c d", ((0,), (1,), (2,), (3,))),
        ("a b a b", ((0,), (1,), (2,), (3,))),
        ("a", ((0,),)),
    ],
)
@pytest.mark.parametrize("where", ["shapes", "weights"])
def test_older_files_are_told_apart_by_their_parameters(
    names: str, stages: tuple[tuple[int, ...], ...], where: str
) -> None:
    models = [model([name]) if where == "shapes" else model(weights=[name]) for name in names.split()]
    assert grid_of(ranks(*models), "/ckpt").stages == stages


def test_ranks_that_cannot_be_told_apart_are_refused() -> None:
    for models in ([model(["a"]), model(["a"]), model(["b"])], [model(), model()], [model(["a"]), model()]):
        with pytest.raises(UnsupportedError, match="is not known"):
            grid_of(ranks(*models), "/ckpt")
    assert grid_of(ranks(model()), "/ckpt").stages == ((0,),)


@pytest.mark.parametrize(
    ("held", "degrees", "found"),
    [
        ([0, 2], None, "2: 0, 2"),
        ([1, 2], None, "2: 1, 2"),
        ([0, 1], (2, 2), "2: 0, 1"),
        ([0, 1, 2], (2, 1), "3: 0, 1, 2"),
    ],
)
def test_missing_ranks_are_damage(held: list[int], degrees: tuple[int, int] | None, found: str) -> None:
    with pytest.raises(DamagedError, match="missing") as caught:
        grid_of({rank: model(["a"], degrees) for rank in held}, "/ckpt")
    assert caught.value.found == found


def test_a_sequence_parallel_degree_that_stands_in_the_tensor_parallel_ones_place_is_told_by_the_files() -> None:
    grid = grid_of(
        {0: replace(model(["a"]), stated=StatedDegrees((2, 1), 1, 4), counters={"dp_world_size": 4})}, "/ckpt"
    )
    assert (grid.tp, grid.pp, grid.partition_degree, grid.sequence) == (1, 1, 4, SequenceParallel(2))


@pytest.mark.parametrize(
    ("place", "degree"),
    [
        (RankCoordinates(4, sequence=SequenceParallel(2)), 2),
        (RankCoordinates(4, sequence=SequenceParallel(4)), 1),
        (RankCoordinates(2, sequence=SequenceParallel(2)), 1),
        (RankCoordinates(4, tp=2, sequence=SequenceParallel(2)), 1),
        (RankCoordinates(4, sequence=SequenceParallel(2, partitioned=False)), 1),
        (RankCoordinates(4), 1),
        (None, 1),
    ],
)
def test_a_degree_that_only_the_counters_speak_for_is_taken_from_the_same_ranks_alone(
    place: RankCoordinates | None, degree: int
) -> None:
    saved = replace(
        model(["a"]), stated=StatedDegrees((1, 1), 1, 4, possible=frozenset({2})), counters={"dp_world_size": 4}
    )
    assert grid_of({0: saved}, "/ckpt", place).sequence == SequenceParallel(degree)
    stated = replace(saved, stated=StatedDegrees((1, 1), 1, 4, sequence=1, possible=frozenset({2})))
    assert grid_of({0: stated}, "/ckpt", place).sequence == SequenceParallel()


def test_entries_that_contradict_each_other_and_the_files_are_both_named() -> None:
    with pytest.raises(DamagedError, match="contradict each other") as caught:
        grid_of(ranks(*[model(["a"], (2, 1), mp=1)] * 3), "/ckpt")
    expected = str(caught.value.expected)
    assert "mp_world_size 1" in expected and "'tp_degree': 2, 'pp_degree': 1" in expected
    assert caught.value.found == "3: 0, 1, 2"


@pytest.mark.parametrize(("held", "mp"), [([0], 2), ([1], 2)])
def test_a_lost_tensor_parallel_rank_is_not_taken_for_sequence_parallelism(held: list[int], mp: int) -> None:
    with pytest.raises(DamagedError, match="missing"):
        grid_of({rank: model(["a"], (2, 1), mp=mp) for rank in held}, "/ckpt")


#: Saved, live: data-parallel degree and sequence parallelism.
@pytest.mark.parametrize(
    ("saved", "live", "own"),
    [
        ((2, SequenceParallel(2)), (2, SequenceParallel(2)), [0, 1, 2, 3]),
        ((2, SequenceParallel(2)), (2, SequenceParallel()), [0, 2]),
        ((2, SequenceParallel()), (2, SequenceParallel(2)), [0, 0, 1, 1]),
        ((2, SequenceParallel(4)), (2, SequenceParallel(2)), [0, 0, 4, 4]),
        ((2, SequenceParallel(2, partitioned=False)), (2, SequenceParallel(2)), [0, 0, 1, 1]),
        ((2, SequenceParallel(2)), (2, SequenceParallel(2, partitioned=False)), [0, 2]),
        ((2, SequenceParallel(2)), (4, SequenceParallel()), [None] * 4),
        ((4, SequenceParallel()), (2, SequenceParallel(2)), [None] * 4),
        # groups that are no neighbours: each rank's own at the same ranks, and nobody's at others
        ((2, SequenceParallel(2)), (2, SequenceParallel(2, strided=True)), [0, 1, 2, 3]),
        ((2, SequenceParallel()), (2, SequenceParallel(2, strided=True)), [None] * 4),
    ],
)
def test_what_belongs_to_a_data_parallel_rank_is_found_at_any_sequence_parallel_degree(
    saved: tuple[int, SequenceParallel], live: tuple[int, SequenceParallel], own: list[int | None]
) -> None:
    grid = Grid(((0,),), saved[0] * saved[1].ranks_per_sample, saved[1])
    dp, per_sample = live[0] * live[1].ranks_per_sample, live[1].ranks_per_sample
    places = [RankCoordinates(dp, rank, sequence=live[1], sp_rank=rank % per_sample) for rank in range(dp)]
    assert [grid.own_file(place) for place in places] == own
    assert all(grid.has_ranks_of(place) == (own[0] is not None) for place in places)


# --- merging ----------------------------------------------------------------------------------------------------


def tensor(name: str, key: str, numel: int, file: int = 0, dtype: str = "float32", **more: Any) -> TensorMetadata:
    sources = chunks_of(StorageChunk(FlatRange(0, numel), file, 8)) if numel else chunks_of()
    return TensorMetadata(name, key, (numel,), dtype, sources, **more)


def metadata(
    held: Mapping[str, int],
    files: Sequence[str] = ("a.pt",),
    scalars: tuple[tuple[str, float], ...] = (("step", 4.0),),
    **more: Any,
) -> CheckpointMetadata:
    """One rank's: of each parameter so many elements, and their states in the last file."""
    last = len(files) - 1
    return CheckpointMetadata(
        source=SourceFacts("native", "/ckpt", "tag", 1, 1, "0"),
        files=tuple(SourceFile(name, 100) for name in files),
        parameters={name: SavedParameter((numel,), 0, scalars) for name, numel in held.items()},
        tensors={(name, key): tensor(name, key, numel, last) for name, numel in held.items() for key in (MASTER, "exp_avg")},
        groups=({"lr": 0.1},),
        **more,
    )  # fmt: skip


def test_shards_lie_side_by_side_each_in_its_own_files() -> None:
    merged = merge_shards(
        [
            metadata({"a": 4, "b": 1}, ["0a", "0b"]),
            metadata({"a": 3, "b": 1}, ["1a"]),
            metadata({"a": 0, "b": 1}, ["2a", "2b"]),
        ]
    )
    assert [file.path for file in merged.files] == ["0a", "0b", "1a", "2a", "2b"]
    a = merged.tensors["a", "exp_avg"]
    assert a.shards == ((4,), (3,), (0,))
    assert [[(chunk.file, chunk.range.stop) for chunk in shard] for shard in a.sources] == [[(1, 4)], [(2, 3)], []]
    assert [[chunk.file for chunk in shard] for shard in merged.tensors["b", MASTER].sources] == [[1], [2], [4]]
    assert merged.parameters["a"].shards == ((4,), (3,), (0,))
    assert merged.parameters["a"].shape == (4,)
    assert merged.source.tp == 3


def test_one_rank_and_one_stage_stay_as_they_are() -> None:
    alone = metadata({"a": 4})
    assert merge_shards([alone]) is merge_stages([alone]) is alone


def coded(name: str) -> TensorMetadata:
    code = BlockCode(BlockFormat(4, "absmax1", Codebook((0.0, 1.0))), 0, 0)
    return TensorMetadata(name, "exp_avg", (4,), "float32", chunks_of(StorageChunk(FlatRange(0, 4), 0, 0, code)))


def with_state(state: TensorMetadata) -> CheckpointMetadata:
    one = metadata({"a": 4})
    return replace(one, tensors={**one.tensors, ("a", "exp_avg"): state})


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (metadata({"a": 4, "b": 1}), "parameters"),
        (replace(metadata({"a": 4}), tensors={("a", MASTER): tensor("a", MASTER, 4)}), "tensors"),
        (replace(metadata({"a": 4}), groups=({"eps": 0.2},)), "hyperparameters of the param groups"),
        (metadata({"a": 4}, scalars=(("step", 5.0),)), "scalar optimizer states"),
        (with_state(tensor("a", "exp_avg", 4, dtype="bfloat16")), "dtypes"),
        (with_state(coded("a")), "dtypes"),
        (with_state(tensor("a", "exp_avg", 4, has_own_shape=True)), "dtypes"),
    ],
)
def test_ranks_of_a_stage_that_disagree_are_damage_by_name(other: CheckpointMetadata, what: str) -> None:
    with pytest.raises(DamagedError) as caught:
        merge_shards([metadata({"a": 4}), metadata({"a": 4}), replace(other, files=(SourceFile("other.pt", 1),))])
    assert caught.value.file == "other.pt"
    assert caught.value.problem.endswith(f"with different {what}")


def test_replicated_states_must_be_the_same_on_all_ranks() -> None:
    def rank(crc: int, *more: ReplicatedState) -> CheckpointMetadata:
        state = ReplicatedState("qmap1", "float32", (256,), 0, 8, crc)
        one = metadata({"a": 4})
        return replace(one, parameters={"a": replace(one.parameters["a"], replicated=(state, *more))})

    second = ReplicatedState("qmap2", "float32", (256,), 0, 8, 1)
    assert not merge_shards([rank(1), rank(1)]).parameters["a"].replicated[0].differs
    assert merge_shards([rank(1), rank(2)]).parameters["a"].replicated[0].differs
    assert [s.differs for s in merge_shards([rank(1, second), rank(1)]).parameters["a"].replicated] == [False, True]
    stages = merge_stages([metadata({"b": 1}, ["0", "1"]), merge_shards([rank(1), rank(1)])])
    assert stages.parameters["a"].replicated[0].file == 2


def test_stages_follow_each_other_and_copies_of_tied_parameters_are_replicas() -> None:
    stages = [
        metadata({"a": 4, "tied": 2}, ["0"]),
        metadata({"tied": 2, "b": 3}, ["1a", "1b"]),
        metadata({"tied": 2}, ["2"]),
    ]
    merged = merge_stages(stages)
    assert [file.path for file in merged.files] == ["0", "1a", "1b", "2"]
    assert list(merged.parameters) == ["a", "tied", "b"]
    assert merged.tensors["tied", MASTER].chunks[0].file == 0
    assert merged.tensors["b", MASTER].chunks[0].file == 2
    assert [replica.chunks[0].file for replica in merged.replicas["tied", "exp_avg"]] == [2, 3]
    assert set(merged.replicas) == {("tied", MASTER), ("tied", "exp_avg")}
    assert (merged.source.pp, merged.source.tp) == (3, 1)
    with pytest.raises(UnsupportedError, match="different param groups"):
        merge_stages([stages[0], replace(stages[1], groups=({"eps": 0.2},))])


def test_what_is_said_of_several_catalogs_is_united() -> None:
    one = metadata(
        {"a": 1},
        aliases={"x": "a"},
        notes=("n",),
        warnings=("w",),
        declared=declared_by({"parameter_with_row_parallelism_patterns": ["a"]}),
    )
    two = metadata({"b": 1}, aliases={"x": "b", "y": "b"}, notes=("n", "m"), states=StateFacts({"s": "?"}, {"d": "!"}, frozenset("f")), declared=declared_by({"tp_replicated_parameter_patterns": ["b"]}))  # fmt: skip
    two = replace(two, source=replace(two.source, frozen_recorded=False))
    merged = merge_stages([one, two])
    assert merged.aliases == {"x": "a", "y": "b"}
    assert (merged.notes, merged.warnings) == (("n", "m"), ("w",))
    assert (merged.states.opaque, merged.states.damaged, merged.states.fresh) == ({"s": "?"}, {"d": "!"}, {"f"})
    assert not merged.source.frozen_recorded
    assert [merged.declared.spec(name).kind for name in "ab"] == ["row", "replicated"]  # type: ignore[union-attr]


# --- files of pipeline layers -----------------------------------------------------------------------------------


def ref(*shape: int, offset: int = 64, stride: tuple[int, ...] | None = None) -> TensorRef:
    strides = (*shape[1:], 1) if len(shape) > 1 else (1,) * len(shape)
    return TensorRef("bfloat16", shape, stride or strides, offset)


def layer(number: int, tp_rank: int, **weights: TensorRef) -> LayerShard:
    return LayerShard(f"/ckpt/layer_{number:02}-model_{tp_rank:02}.pt", 10, number, tp_rank, weights)


def test_entries_of_layers_have_the_names_of_the_model() -> None:
    known = frozenset(["3.weight", "tied_modules.embed.weight", "tied_modules.embed.norm.weight", "0.bias"])
    entries = {"weight": ref(2), "norm.weight": ref(2), "bias": ref(2), "extra": ref(2)}
    first = LayerShard("p", 1, 0, 0, entries).named(known)
    assert set(first) == {"tied_modules.embed.weight", "tied_modules.embed.norm.weight", "0.bias", "0.extra"}
    assert "3.weight" in LayerShard("p", 1, 3, 0, entries).named(known)


def test_two_tied_modules_that_end_alike_are_not_told_apart() -> None:
    known = frozenset(["tied_modules.embed.weight", "tied_modules.head.weight", "tied_modules.head.bias"])
    found = LayerShard("p", 1, 7, 0, {"weight": ref(2), "bias": ref(2)}).named(known)
    assert set(found) == {"7.weight", "tied_modules.head.bias"}
    assert set(LayerShard("p", 1, 7, 0, {"weight": ref(2)}).named(known | {"7.weight"})) == {"7.weight"}


def named(layers: Sequence[LayerShard]) -> list[tuple[LayerShard, int, Mapping[str, TensorRef]]]:
    return [(each, each.tp_rank, each.named(frozenset())) for each in layers]


def test_buffers_and_frozen_parameters_come_from_the_layers_of_all_ranks_in_order() -> None:
    layers = [
        layer(1, 1, table=ref(3, offset=72), frozen=ref(2, 3)),
        layer(0, 0, weight=ref(2)),
        layer(1, 0, table=ref(2), frozen=ref(1, 3), empty=ref(0)),
        layer(0, 1, weight=ref(2)),
        layer(2, 0, alone=ref(2)),
    ]
    base = metadata({"0.weight": 4}, ["a", "b"])
    whole = with_module_files(base, named(layers), "1.table".__eq__, tp=2)
    found = whole.tensors
    assert [file.path for file in whole.files] == [*(file.path for file in base.files), *(item.path for item in layers)]
    assert found.keys() - base.tensors.keys() == {("1.table", BUFFER), ("1.frozen", FROZEN)}
    assert base.tensors.items() <= found.items()
    table, frozen = found["1.table", BUFFER], found["1.frozen", FROZEN]
    assert (table.shards, table.shape, table.dtype) == (((2,), (3,)), (2,), "bfloat16")
    assert table.sources == (
        *chunks_of(StorageChunk(FlatRange(0, 2), 4, 64)),
        *chunks_of(StorageChunk(FlatRange(0, 3), 2, 72)),
    )
    assert frozen.shards == ((1, 3), (2, 3))


def test_what_a_layer_has_beside_trained_parameters_is_refused_if_it_is_a_view() -> None:
    """Left out, it would be missing from what is exported, and a live model would have it instead of the checkpoint."""
    layers = [layer(0, 0, mask=ref(2, 2), turned=ref(2, 2, stride=(1, 2)))]
    with pytest.raises(UnsupportedError, match="this weight or buffer was saved as a view") as caught:
        with_module_files(metadata({}), named(layers), ["0.mask"].__contains__)
    assert caught.value.parameter == "0.turned"


def test_without_tensor_parallelism_there_are_no_shards() -> None:
    layers = [layer(0, 0, mask=ref(2, 2), none=ref(0))]
    found = with_module_files(metadata({}), named(layers), ["0.mask", "0.none"].__contains__).tensors
    assert found["0.mask", BUFFER] == TensorMetadata(
        "0.mask", BUFFER, (2, 2), "bfloat16", chunks_of(StorageChunk(FlatRange(0, 4), 1, 64))
    )
    assert found["0.none", BUFFER].chunks == ()
    assert set(found) == {("0.mask", BUFFER), ("0.none", BUFFER)}
