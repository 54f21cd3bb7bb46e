"""What the builder of metadata collects, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_ckpt.core.chunks import PartitionRule
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, SourceFile, TensorMetadata
from elastic_ckpt.core.state_kinds import StateOptions, codebook
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.merging import shard_by_shard
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, dense_tensor, module_tensors, refuse_view
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.saved_states import StatesOfOne
from elastic_ckpt.formats.shards import FlatShard
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from tests.formats.model_shards import model

SHAPES = [("a", (2, 3)), ("b", (2,))]
#: On two ranks with partitions of four elements.
RULES = [PartitionRule(6, 4), PartitionRule(2, 4, shift=6)]


def ref(dtype: str, *shape: int, offset: int = 64) -> TensorRef:
    return TensorRef(dtype, shape, (*shape[1:], 1), offset)


def builder(**options: Any) -> MetadataBuilder:
    found = CheckpointInfo("native", "/ckpt/tag", "tag", sort_names([], is_universal=False))
    return MetadataBuilder(found, [SourceFile("0.pt", 999), SourceFile("1.pt", 999)], StateOptions(**options))


def flat(dtype: str = "float32") -> FlatShard:
    return FlatShard(ref(dtype, 4), 4, StatesOfOne({"two": ref("bfloat16", 2, 4, offset=128)}))


def test_every_row_of_a_state_is_cut_as_the_partition_is() -> None:
    made = builder()
    made.add_flat(SHAPES, RULES, 0, {}, [flat(), flat()], range(2))
    tensors = made.build(model(), 1, ({},)).tensors
    chunks = [(e.range.start, e.range.stop, e.file, e.byte_offset) for e in tensors["a", MASTER].chunks]
    assert chunks == [(0, 4, 0, 64), (4, 6, 1, 64)]
    assert tensors["a", "two"].shape == (2, 2, 3)
    chunks = [(e.range.start, e.range.stop, e.file, e.byte_offset) for e in tensors["a", "two"].chunks]
    assert chunks == [(0, 4, 0, 128), (4, 6, 1, 128), (6, 10, 0, 136), (10, 12, 1, 136)]
    chunks = [(e.range.start, e.range.stop, e.file, e.byte_offset) for e in tensors["b", "two"].chunks]
    assert chunks == [(0, 2, 1, 132), (2, 4, 1, 140)]


def test_ranks_that_saved_a_parameter_in_different_dtypes_are_damage() -> None:
    made = builder()
    with pytest.raises(DamagedError, match="different dtypes") as caught:
        made.add_flat(SHAPES, RULES, 0, {}, [flat(), flat("bfloat16")], range(2))
    error = caught.value
    assert (error.parameter, error.file, error.found) == ("a", "1.pt", "bfloat16")


def test_a_parameter_in_two_flat_tensors_is_damage() -> None:
    made = builder()
    made.add_flat(SHAPES, RULES, 0, {}, [flat(), flat()], range(2))
    with pytest.raises(DamagedError, match="listed twice") as caught:
        made.add_flat(SHAPES[1:], RULES[1:], 1, {}, [flat(), flat()], range(2))
    assert (caught.value.parameter, caught.value.file) == ("b", "0.pt")


def test_shards_of_different_dtypes_are_damage_unless_they_are_empty() -> None:
    def shard(dtype: str, numel: int) -> TensorMetadata:
        return dense_tensor("mask", "buffer", ref(dtype, numel), file=0)

    with pytest.raises(DamagedError, match="different dtypes") as caught:
        shard_by_shard([shard("int64", 2), shard("int32", 2)])
    assert (caught.value.parameter, caught.value.found) == ("mask", "int64, int32")
    assert shard_by_shard([shard("float32", 0), shard("int32", 2)]).dtype == "int32"


def test_a_view_is_refused_by_name() -> None:
    refuse_view("a", "this buffer", ref("float32", 2, 3), "0.pt")
    with pytest.raises(UnsupportedError, match="this buffer was saved as a view") as caught:
        refuse_view("a", "this buffer", TensorRef("float32", (2, 3), (1, 2), 64), "0.pt")
    assert (caught.value.parameter, caught.value.file) == ("a", "0.pt")


def test_states_of_stacked_experts_as_a_whole_are_refused() -> None:
    stacked = {"a": (0, 1)}
    touched = [replace(flat(), states=StatesOfOne({"momentum_buffer": ref("float32", numel)})) for numel in (6, 8)]
    with pytest.raises(UnsupportedError, match=r"(?s)'momentum_buffer' is kept for stacked experts as a whole.*a"):
        builder().add_flat(SHAPES, RULES, 0, {}, touched, range(2), stacked)
    alone = FlatShard(ref("float32", 2, 3), 6, StatesOfOne({"row": ref("float32", 7)}))
    with pytest.raises(UnsupportedError, match=r"(?s)'row' is kept for stacked experts as a whole.*a"):
        builder().add_flat(SHAPES[:1], [PartitionRule(6, 6)], 0, {}, [alone], range(1), stacked, is_alone=True)
    of_weights = builder(are_restored=False)
    of_weights.add_flat(SHAPES, RULES, 0, {}, touched, range(2), stacked)
    assert {key for _, key in of_weights.build(model(), 1, ({},)).tensors} == {MASTER}


def test_a_state_that_is_a_view_is_opaque() -> None:
    made = builder()
    view = replace(flat(), states=StatesOfOne({"exp_avg": TensorRef("float32", (4,), (2,), 64)}))
    whole = replace(flat(), states=StatesOfOne({"exp_avg": ref("float32", 4)}))
    made.add_flat(SHAPES, RULES, 0, {}, [whole, view], range(2))
    made.add_flat([("c", (4,))], [PartitionRule(4, 4)], 0, {}, [view], range(1), is_alone=True)
    assert made.opaque == {"exp_avg": "a view of shape (4,) and strides (2,)"}


CODEBOOK = codebook(tuple(number / 255 for number in range(256)))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_codes_whose_scales_are_a_view_are_opaque(alone: bool, stride: int) -> None:
    scales = TensorRef("float32", (2,), (stride,), 4096)
    tensors = {"state1": ref("uint8", 512), "absmax1": scales, "qmap1": ref("float32", 256)}
    states = StatesOfOne(tensors, codebooks={"qmap1": CODEBOOK})
    found = CheckpointInfo("native", "/ckpt/tag", "tag", sort_names([], is_universal=False))
    made = MetadataBuilder(found, [SourceFile("0.pt", 9999)], StateOptions(), [("0.pt", states)])
    whole = FlatShard(ref("float32", 512), 512, states)
    made.add_flat([("a", (512,))], [PartitionRule(512, 512)], 0, {}, [whole], range(1), is_alone=alone)
    why = "its scales, absmax1, are a view of shape (2,) and strides (2,)"
    assert made.opaque == ({} if stride == 1 else {"state1": why})


@pytest.mark.parametrize("stride", [1, 2])
def test_a_part_of_a_frozen_parameter_that_is_a_view_is_refused(stride: int) -> None:
    parts = [{"a": TensorRef("float32", (4,), (step,), 64)} for step in (1, stride)]
    shapes = (("a", (2, 4)),)
    ranks = [
        replace(model(), frozen_shapes=shapes, frozen_fragments=each, path=f"{n}.pt") for n, each in enumerate(parts)
    ]
    if stride == 1:
        assert [*module_tensors(ranks, None, ())[0]] == [("a", FROZEN)]
        return
    with pytest.raises(UnsupportedError, match="part of this frozen parameter was saved as a view") as caught:
        module_tensors(ranks, None, ())
    assert (caught.value.parameter, caught.value.file) == ("a", "1.pt")


@pytest.mark.parametrize(("own", "is_said"), [(None, True), (0, False), (1, False)])
def test_buffers_that_differ_are_spoken_of_where_all_ranks_get_one_ranks(own: int | None, is_said: bool) -> None:
    shards = [replace(model(weights=["mean"]), buffer_names=("mean",), buffers_crc32=crc32) for crc32 in (1, 2)]
    tensors, notes = module_tensors(shards, own, ())
    assert bool(notes) is is_said
    (chunk,) = tensors["mean", BUFFER].chunks
    assert chunk.file == (own or 0)
