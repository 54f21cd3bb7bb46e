"""Files of experts, and which ranks divide which experts among them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.fqn import EXPERTS, ExpertRank, NumberedStates
from elastic_ckpt.core.local_state import LiveGroup
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import DamagedError, LayoutError, UnsupportedError
from elastic_ckpt.formats.assembling import _refuse_different_experts
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.merging import index_expert
from elastic_ckpt.formats.metadata_builder import weights_crc32s
from elastic_ckpt.formats.model_states import index_unpartitioned
from elastic_ckpt.formats.partitioned import PartitionGroup, check_experts, is_across, partition_groups
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.stacked_experts import stacked_experts
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.zero0 import _degree, unpartitioned_metadata
from elastic_ckpt.planning.live_names import name_states

LAYER = f"layers.0.{EXPERTS}"


def saved(tmp_path: Path, weights: Any, name: str = "file.pt") -> Any:
    torch.save(weights, tmp_path / name)
    return open_pickled(str(tmp_path / name))


def run(shapes: list[list[str]], counts: tuple[int, ...], partitions: tuple[int, ...], **more: Any) -> tuple[Any, Any]:
    """A model-states file and optimizer-states files of four ranks."""
    param_shapes = tuple(tuple((name, (2,)) for name in group) for group in shapes)
    features = SimpleNamespace(experts=counts)
    model = SimpleNamespace(param_shapes=param_shapes, features=features, path="model.pt", stacked={}, **more)
    return model, [SimpleNamespace(partition_count=partitions, zero_stage=1, data_before_experts=False)] * 4


def expert(layer: int, number: int, path: str = "layers.0.") -> Any:
    return SimpleNamespace(
        layer=layer, expert=number, path_of_layer=path, weights={"a": 1}, path=f"layer_{layer}_expert_{number}.pt"
    )


def test_the_ranks_of_each_expert_parallel_rank_divide_its_experts() -> None:
    model, shards = run([["head"], [f"{LAYER}0.w", f"{LAYER}1.w"]], (4,), (4, 2))
    assert list(partition_groups(model, shards, 0)) == [PartitionGroup((("head", (2,)),), range(4))]
    first, second = partition_groups(model, shards, 1)
    assert first == PartitionGroup([(f"{LAYER}0.w", (2,)), (f"{LAYER}1.w", (2,))], range(0, 4, 2))
    assert second == PartitionGroup([(f"{LAYER}2.w", (2,)), (f"{LAYER}3.w", (2,))], range(1, 4, 2))
    shards[0].data_before_experts = True
    assert [each.ranks for each in partition_groups(model, shards, 1)] == [range(2), range(2, 4)]


@pytest.mark.parametrize(
    ("tp", "partitions", "name", "expected"),
    [
        (2, 2, "ep_size_2", False),  # each tensor-parallel rank has slices of all experts: four ranks, two of each
        (2, 4, "ep_size_2", True),  # eight ranks, four of each
        (2, 2, "ep_size_4", True),
        (1, 2, "ep_size_2", False),
        (2, 4, "head", False),
    ],
)
def test_experts_are_on_all_tensor_parallel_ranks_unless_these_slice_them(
    tp: int, partitions: int, name: str, expected: bool
) -> None:
    model, shards = run([["head"], [f"{LAYER}0.w"]], (4,), (4, partitions))
    groups = ({"name": "head"}, {"name": name, "moe": name != "head"})
    shards = [SimpleNamespace(**vars(shards[0]), groups=groups, flat_groups=(0, 1))] * 4
    assert not is_across(model, shards, 0, tp)
    assert is_across(model, shards, 1, tp) is expected
    model.stacked = {f"{LAYER}0.w": ((0, 1), (2, 3))}
    assert is_across(model, shards, 1, tp) is (tp > 1)


def test_experts_of_a_layer_are_counted_over_all_its_param_groups() -> None:
    model, shards = run([[f"{LAYER}0.w"], [f"{LAYER}1.w"]], (4,), (2, 2))
    assert [each.shapes[0][0] for each in partition_groups(model, shards, 1)] == [f"{LAYER}1.w", f"{LAYER}3.w"]


@pytest.mark.parametrize(
    ("experts", "counts", "problem"),
    [
        ([(0, 0), (0, 1), (0, 3)], (4,), "the file of an expert is missing.*layer_0_expert_2_"),
        ([(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)], (4,), "the file of an expert is one too many.*layer_1_expert_0_"),
        ([(0, 0), (0, 1), (0, 2)], (3,), "not as many as the model's.*3 experts.*2 experts on each of 2"),
    ],
)
def test_files_that_do_not_fit_the_model_are_named(
    experts: list[tuple[int, int]], counts: tuple[int, ...], problem: str
) -> None:
    model, shards = run([[f"{LAYER}0.w", f"{LAYER}1.w"]], counts, (2,))
    found = SimpleNamespace(path=str)
    with pytest.raises(LayoutError, match=f"(?s){problem}"):
        check_experts(found, model, shards, [expert(*each) for each in experts])  # type: ignore[arg-type]


def test_experts_of_different_layers_in_the_files_of_one_are_refused() -> None:
    model, shards = run([[f"{LAYER}0.w"]], (2,), (2,))
    with pytest.raises(LayoutError, match="files of two saves are mixed"):
        check_experts(SimpleNamespace(path=str), model, shards, [expert(0, 0), expert(0, 1, "other.")])  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [{f"{LAYER}1.w": torch.ones(2)}, {"head": torch.ones(2)}, {}])
def test_a_file_with_other_weights_than_its_name_says_is_refused(tmp_path: Path, weights: Any) -> None:
    with pytest.raises(LayoutError, match="the expert that its name says"):
        index_expert(saved(tmp_path, weights, "layer_0_expert_0_mp_rank_00_model_states.pt"))


def test_an_optimizer_file_without_states_is_no_optimizers(tmp_path: Path) -> None:
    """DeepSpeed before 0.19.8 writes one beside the shards of ZeRO-1 and 2."""
    assert index_unpartitioned(saved(tmp_path, {"optimizer": None}), StateOptions()) is None


def test_members_of_a_group_are_named_as_on_the_rank_that_saved_them() -> None:
    live = ["gate", f"{LAYER}4.a", f"{LAYER}4.b", f"{LAYER}5.a", f"{LAYER}5.b"]
    mine = ["gate", f"{LAYER}1.a", f"{LAYER}1.b"]
    weights = {name: (number,) for number, name in enumerate(reversed(mine))}
    experts = ExpertRank(1, {"layers.0.": 1}, frozenset())
    numbered = NumberedStates("", ({},), [[weights[name] for name in mine]], False, weights, experts=experts)
    named = name_states(numbered, [LiveGroup(tuple(live), {})])
    assert named is not None and named[0] == [mine]


def optimizers(*ep_ranks: int, name: str = "ep_size_2") -> list[Any]:
    groups = ({"moe": True, "name": name}, {"name": "dense"})
    return [SimpleNamespace(ep_rank=rank, groups=groups, path=f"expp_rank_{rank}.pt") for rank in ep_ranks]


def test_the_expert_parallel_degree_is_that_of_the_param_groups() -> None:
    found = SimpleNamespace(path=str)
    assert _degree(found, None, [], optimizers(0, 1)) == 2  # type: ignore[arg-type]
    assert _degree(found, None, [], optimizers(0, 1, 2, name="mine")) == 3  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"(?s)is missing.*expp_rank_1_mp"):
        _degree(found, None, [], optimizers(0))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="different expert-parallel degrees"):
        _degree(found, None, [], [*optimizers(0), *optimizers(1, name="ep_size_4")])  # type: ignore[arg-type]


def test_experts_that_are_trained_differently_on_other_ranks_are_named() -> None:
    model, _ = run([["head"], [f"{LAYER}0.w", f"{LAYER}1.w"]], (4,), (4, 2))
    mine = (("head",), (f"{LAYER}0.w", f"{LAYER}1.w"))
    both: dict[str, Any] = {"partition_count": (4, 2), "data_before_experts": False}
    shards = [SimpleNamespace(**both, slice_names=mine, path=f"{rank}.pt") for rank in range(4)]
    _refuse_different_experts(model, shards, [0, 1])
    for rank in (1, 3):
        shards[rank].slice_names = (("head",), (f"{LAYER}0.w",))
    with pytest.raises(UnsupportedError, match="train different parameters of their experts") as raised:
        _refuse_different_experts(model, shards, [0, 1])
    assert (raised.value.file, raised.value.parameter) == ("1.pt", f"{LAYER}1.w")
    shards[3].slice_names = ()  # a version that does not record them
    _refuse_different_experts(model, shards, [0, 1])


def placed(*experts: tuple[int, ...], **more: Any) -> Any:
    """A model-states file of AutoEP that lists these experts on these ranks, in descending order of ranks."""
    ranks = [{"rank": rank, "experts": list(each)} for rank, each in reversed([*enumerate(experts)])]
    layer = {"expert_key_prefix": "moe.experts", "num_experts": 4, "num_local_experts": 2, "ep_size": 2} | more
    return SimpleNamespace(tree={"ds_autoep_layers": [layer | {"expert_placement": {"ranks": ranks}}]}, path="model.pt")


def test_stacked_experts_are_on_the_ranks_that_the_file_lists() -> None:
    every = [f"moe.experts.{weight}" for weight in ("w1", "w2", "w3")]
    assert stacked_experts(placed((3, 0), (1, 2))) == dict.fromkeys(every, ((3, 0), (1, 2)))
    without = placed()
    without.tree["ds_autoep_layers"][0]["expert_placement"] = None
    assert stacked_experts(without) == dict.fromkeys(every, ((0, 1), (2, 3)))
    assert stacked_experts(SimpleNamespace(tree={})) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("experts", [[(0, 1), (1, 2)], [(0, 1), (2,)], [(0, 1, 2), (3,)], [(0, 1), (2, 4)], [(0, 1)]])
def test_stacked_experts_that_are_replicated_missing_or_in_unequal_numbers_are_refused(experts: Any) -> None:
    with pytest.raises(LayoutError, match=r"(?s)one expert-parallel rank each, in equal numbers.*moe\.experts"):
        stacked_experts(placed(*experts))


def test_checksums_of_weights_are_stated_beside_experts_where_records_are_whole_tensors() -> None:
    """DeepSpeed then saves a copy for each name of tied weights, and lists no ties."""
    weights = {name: TensorRef("float32", (2,), (1,), at) for at, name in ((0, "gate"), (64, "alias"), (96, "view"))}
    records = Records.of([(0, 8, 11), (64, 8, 11), (92, 16, 11), (128, 8, 0)])
    model: Any = SimpleNamespace(features=SimpleNamespace(experts=(4,)), records=records, weights=weights)
    assert weights_crc32s([model]) == {"gate": (11,), "alias": (11,)}
    other: Any = SimpleNamespace(**{**vars(model), "weights": {"gate": weights["gate"]}})
    assert weights_crc32s([model, other]) == {"gate": (11, 11)}
    assert weights_crc32s([SimpleNamespace(**{**vars(model), "features": SimpleNamespace(experts=())})]) == {}  # type: ignore[list-item]


def test_experts_that_the_expert_parallel_ranks_do_not_divide_are_refused() -> None:
    """They would be restored without their states."""
    model = SimpleNamespace(features=SimpleNamespace(experts=(3,)), path="model.pt", nbytes=9, records=Records())
    for each in (every := optimizers(0, 1)):
        each.states, each.nbytes, each.records = {}, 9, Records()
    files: Any = [SimpleNamespace(**vars(expert(0, number)), nbytes=9, records=Records()) for number in range(3)]
    found: Any = SimpleNamespace(path=str, notes=(), files=SimpleNamespace(layers={}))
    with pytest.raises(LayoutError, match=r"(?s)so many expert-parallel ranks.*3 experts"):
        unpartitioned_metadata(found, model, MetadataOptions(), name_states, files, every)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [7, {1}, None, [], "text"])
def test_an_entry_of_an_experts_file_that_is_no_tensor_is_damage(entry: Any, tmp_path: Path) -> None:
    name = "layer_0_expert_1_mp_rank_00_model_states.pt"
    weights = {f"{LAYER}1.w": torch.ones(2), f"{LAYER}1.b": torch.ones(2)}
    assert set(index_expert(saved(tmp_path, weights, name)).weights) == set(weights)
    with pytest.raises(DamagedError, match="an entry of this file is not what DeepSpeed writes") as caught:
        index_expert(saved(tmp_path, {**weights, f"{LAYER}1.b": entry}, name))
    assert caught.value.parameters == (f"{LAYER}1.b",)
    extra = {**weights, f"{LAYER}1._extra_state": entry}
    assert set(index_expert(saved(tmp_path, extra, name)).weights) == set(weights)
