"""Numbers that a folder claims, in its files or in their names, are compared with what is there, never counted up to.

Work is counted in calls and in bytes of memory, of whole folders that each are whole without the claim.
"""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from hypothesis import given
from hypothesis import strategies as st

import elastic_ckpt
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.counts import first_apart, gaps
from elastic_ckpt.core.fqn import EXPERTS, expert_name
from elastic_ckpt.core.shard_specs import CannotSplit, declared_by
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.merging import LayerShard
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.native import native_reading
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.tools.verification import Verification, verify
from elastic_ckpt.tools.virtual import stages_of
from tests.attacks.guard import counted
from tests.attacks.seeds import TREES
from tests.tools.sharded_models import sharded

MOST_CALLS, MOST_NBYTES = 1_500_000, 24 << 20
LARGE = 10**12
PREFIX = f"moe.{EXPERTS}"
Tree = dict[str, Any]


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the body takes more calls, or memory, than a few small files justify."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        with counted(MOST_CALLS):
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not was_tracing:
            tracemalloc.stop()
    assert peak - before <= MOST_NBYTES, f"{peak - before} bytes"


def model_states(**more: Any) -> Tree:
    tree = {
        key: value
        for key, value in TREES["model"].items()
        if key not in ("args", "client", "rng_states", "data_sampler")
    }
    own = {"module": OrderedDict(a=torch.arange(6.0)), "buffer_names": [], "shared_params": {}, "lr_scheduler": None}
    shapes = {"param_shapes": [OrderedDict(a=torch.Size((6,)))], "dp_world_size": 1}
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    return {**tree, **own, **shapes, "ds_config": config, **more}


def partition(
    names: list[str], numels: list[int], **group: Any
) -> tuple[Tree, Tree, torch.Tensor, OrderedDict[str, Any]]:
    """Of one param group on a single rank: hyperparameters, states, masters and slices."""
    flat, start, slices = torch.arange(float(sum(numels))), 0, OrderedDict()
    for name, numel in zip(names, numels, strict=True):
        slices[name] = fragment_address(numel=numel, start=start)
        start += numel
    states = {"step": torch.tensor(4.0), "exp_avg": flat * 2, "exp_avg_sq": flat * 3}
    return {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **group}, states, flat, slices


def optimizer_states(*partitions: Any, **more: Any) -> Tree:
    groups, states, masters, slices = zip(*partitions, strict=True)
    numbered = [{**group, "params": [number]} for number, group in enumerate(groups)]
    base = {"state": dict(enumerate(states)), "param_groups": numbered}
    own = {
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [*masters],
        "group_paddings": [0] * len(masters),
        "partition_count": [1] * len(masters),
        "param_slice_mappings": [*slices],
    }
    return {"optimizer_state_dict": {**TREES["zero1"]["optimizer_state_dict"], **own, **more}, "ds_version": "0.19.8"}


MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
Folder = dict[str, Tree]


def partitioned() -> Folder:
    """ZeRO-1 of one rank."""
    return {MODEL: model_states(), OPTIMIZER: optimizer_states(partition(["a"], [6]))}


def of_experts() -> Folder:
    """ZeRO-1 of one rank, with two experts."""
    names = [f"{PREFIX}{number}.w" for number in range(2)]
    shapes = [OrderedDict(a=torch.Size((6,))), OrderedDict((name, torch.Size((4,))) for name in names)]
    experts = partition(names, [4, 4], name="ep_size_1", moe=True)
    files = {
        f"layer_0_expert_{number}_mp_rank_00_model_states.pt": {name: experts[2][4 * number :][:4].clone()}
        for number, name in enumerate(names)
    }
    model = model_states(param_shapes=shapes, num_experts=[2])
    return {MODEL: model, OPTIMIZER: optimizer_states(partition(["a"], [6]), experts), **files}


def without_zero(degree: str = "ep_size_1") -> Folder:
    """Two experts of a run without ZeRO: optimizer states of an expert-parallel rank are in a file of their own."""
    files = of_experts()
    del files[OPTIMIZER]
    states = [{"step": torch.tensor(4.0), "exp_avg": torch.ones(n), "exp_avg_sq": torch.ones(n)} for n in (6, 4, 4)]
    groups = [{**partition([], [])[0], "params": [0]}]
    groups += [{**partition([], [])[0], "params": [1, 2], "name": degree, "moe": True}]
    files["expp_rank_0_mp_rank_00_optim_states.pt"] = {
        "optimizer": {"state": dict(enumerate(states)), "param_groups": groups}
    }
    files[MODEL] |= {"ds_config": {"train_batch_size": 8}}
    return files


def stacked(ranks: int = 2, prefix: str = "moe.experts") -> Folder:
    """Two experts that AutoEP stacks, of a run without ZeRO on two ranks, as the model-states file places them."""
    names = [f"moe.experts.{weight}" for weight in ("w1", "w2", "w3")]
    files = {
        f"layer_0_expert_{number}_mp_rank_00_model_states.pt": {f"{name}.{number}": torch.ones(4) for name in names}
        for number in range(2)
    }
    layer = {"expert_key_prefix": prefix, "num_local_experts": 2 // ranks, "ep_size": ranks, "num_experts": 2}
    model = model_states(
        ds_autoep_layers=[layer], num_experts=[2], param_shapes=None, ds_config={"train_batch_size": 8}
    )
    of_numbers = [(6,), *[(1, 4)] * 3]
    states = [{"step": torch.tensor(4.0), "exp_avg": torch.ones(n), "exp_avg_sq": torch.ones(n)} for n in of_numbers]
    groups = [{**partition([], [])[0], "params": [0]}]
    groups += [{**partition([], [])[0], "params": [1, 2, 3], "name": "ep_size_2", "moe": True}]
    optimizer = {"optimizer": {"state": dict(enumerate(states)), "param_groups": groups}}
    return {MODEL: model, **files, **{f"expp_rank_{rank}_mp_rank_00_optim_states.pt": optimizer for rank in range(2)}}


def of_layers(*numbers: int) -> Folder:
    """Weights of a pipeline, whose layers have files of their own."""
    model = model_states(module=OrderedDict(), param_shapes=None, ds_config={"train_batch_size": 8})
    files = {f"layer_{number:02d}-model_states.pt": {"w": torch.ones(3)} for number in numbers}
    return {MODEL: model, **files}


def of_stages(count: int) -> Folder:
    """ZeRO-1 of pipeline stages that have a layer each."""
    folder: Folder = {}
    for stage in range(count):
        more = {"module": None, "param_shapes": [OrderedDict({f"{stage}.a": torch.Size((6,))})]}
        model = model_states(**more, checkpoint_parallel_dimensions={"tp_degree": 1, "pp_degree": count})
        folder[MODEL.replace("rank_00", f"rank_{stage:02d}")] = model
        folder[OPTIMIZER.replace("mp_rank_00", f"mp_rank_{stage:02d}")] = partitioned()[OPTIMIZER]
        folder[f"layer_{stage:02d}-model_states.pt"] = {"a": torch.arange(6.0)}
    return folder


def changed(folder: Folder, name: str, **more: Any) -> Folder:
    return {**folder, name: {**folder[name], **more}}


def of_states(folder: Folder, **more: Any) -> Folder:
    state = {**folder[OPTIMIZER]["optimizer_state_dict"], **more}
    return changed(folder, OPTIMIZER, optimizer_state_dict=state)


def renamed(folder: Folder, before: str, after: str) -> Folder:
    return {after if name == before else name: tree for name, tree in folder.items()}


def many_ranks() -> Folder:
    """Files of many model-parallel ranks, each of which claims many data-parallel ones."""
    folder = partitioned()
    one = changed(folder, MODEL, dp_world_size=1 << 17, mp_world_size=64)
    return {name.replace("mp_rank_00", f"mp_rank_{mp:02d}"): tree for mp in range(64) for name, tree in one.items()}


WHOLE: dict[str, Callable[[], Folder]] = {
    "partitioned": partitioned,
    "experts": of_experts,
    "experts without ZeRO": without_zero,
    "stacked experts without ZeRO": stacked,
    "stages": lambda: of_stages(3),
}


def fused(numbers: Iterable[int], patterns: int = 1, shape: Any = (9000, 3)) -> list[Tree]:
    """Sub-parameters, of which a file has the number alone."""
    entry = {"shape": shape, "partition_dim": 0}
    return [{**entry, "patterns": [f"p{number}.{n}" for n in range(patterns)]} for number in numbers]


CLAIMS: dict[str, Callable[[], Folder]] = {
    "experts of layers": lambda: changed(of_experts(), MODEL, num_experts=[1 << 17] * 200),
    "experts of a layer": lambda: changed(of_experts(), MODEL, num_experts=[LARGE]),
    "experts of no layer": lambda: changed(partitioned(), MODEL, num_experts=[1 << 17] * 200),
    "expert-parallel ranks": lambda: without_zero("ep_size_900000000"),
    "more expert-parallel ranks": lambda: without_zero(f"ep_size_{'9' * 5000}"),
    "rank of an optimizer of experts": lambda: renamed(
        without_zero(), "expp_rank_0_mp_rank_00_optim_states.pt", f"expp_rank_{LARGE}_mp_rank_00_optim_states.pt"
    ),
    "expert in a name": lambda: renamed(
        of_experts(),
        "layer_0_expert_1_mp_rank_00_model_states.pt",
        f"layer_0_expert_{LARGE}_mp_rank_00_model_states.pt",
    ),
    "rank in a name": lambda: renamed(partitioned(), OPTIMIZER, f"zero_pp_rank_{LARGE}_mp_rank_00_optim_states.pt"),
    "data-parallel ranks": lambda: changed(partitioned(), MODEL, dp_world_size=LARGE),
    "ranks of each of many": many_ranks,
    "partitions": lambda: of_states(partitioned(), partition_count=[LARGE]),
    "partitions in turn": lambda: of_states(
        changed(
            partitioned(),
            MODEL,
            param_shapes=None,
            ds_config={"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
        ),
        partition_count=[LARGE],
    ),
    "sub-parameters": lambda: changed(
        partitioned(), MODEL, universal_checkpoint_info={"parameter_with_sub_params": fused(range(1000))}
    ),
}


def written(folder: Folder, path: Path) -> str:
    for name, tree in folder.items():
        torch.save(tree, path / name)
    return str(path)


def read(path: str) -> Verification:
    """What is found of a folder, which is opened for its weights, too."""
    with suppress(ElasticCkptError):
        len(elastic_ckpt.open(path))
    return verify(path, None, ElasticConfig())


@pytest.mark.parametrize("what", WHOLE)
def test_folders_are_whole_without_a_claim(tmp_path: Path, what: str) -> None:
    found = read(written(WHOLE[what](), tmp_path))
    assert found.ok, found.problems


def test_a_layer_is_not_looked_at_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    named = LayerShard.named

    def noted(self: LayerShard, known: frozenset[str]) -> dict[str, TensorRef]:
        calls.append(self.layer)
        return named(self, known)

    monkeypatch.setattr(LayerShard, "named", noted)
    count = 24
    assert verify(written(of_stages(count), tmp_path), None, ElasticConfig()).ok
    assert set(calls) == set(range(count)) and len(calls) <= 6 * count


def test_names_of_files_are_not_looked_through_for_each_rank() -> None:
    seen = list[int]()

    class Listed(dict[Any, str]):
        def items(self) -> Any:
            for item in super().items():
                seen.append(1)
                yield item

    count = 400
    names = [OPTIMIZER.replace("mp_rank_00", f"mp_rank_{mp:02d}") for mp in range(count)]
    files = sort_names([*names, *(MODEL.replace("rank_00", f"rank_{mp:02d}") for mp in range(count))], False)
    files = replace(files, optimizer=Listed(files.optimizer), model_zero3=Listed())
    found = CheckpointInfo("native", "/ckpt/tag", "tag", files)
    reading = native_reading(found, MetadataOptions(), lambda work: work())
    assert reading.count == 2 * count and len(seen) <= 4 * count


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (stacked(ranks=1), "experts of AutoEP are not placed as their optimizer states are divided"),
        (stacked(prefix="x"), "the weights of stacked experts are in no file"),
    ],
    ids=["ranks", "names"],
)
def test_stacked_experts_are_where_the_files_have_them(tmp_path: Path, folder: Folder, words: str) -> None:
    found = read(written(folder, tmp_path))
    assert words in str(found.problems)


@pytest.mark.parametrize("what", CLAIMS)
def test_nothing_is_counted_up_to_what_a_folder_claims(tmp_path: Path, what: str) -> None:
    path = written(CLAIMS[what](), tmp_path)
    with bounded():
        found = read(path)
    assert found.ok == (what in ("sub-parameters", "more expert-parallel ranks")), found.problems


@pytest.mark.parametrize("step", [4, -1, True, 1 << 70, 10**400], ids=["4", "-1", "True", "2 ** 70", "10 ** 400"])
def test_a_step_that_a_param_group_counts_is_one(tmp_path: Path, step: int) -> None:
    """As NVIDIA apex's FusedAdam keeps it."""
    group, states, *others = partition(["a"], [6], bias_correction=True, step=step)
    del states["step"]
    folder = {MODEL: model_states(), OPTIMIZER: optimizer_states((group, states, *others))}
    found = read(written(folder, tmp_path))
    assert found.ok == (step == 4), found.problems
    assert found.ok or "step: " in str(found.findings[0])


@pytest.mark.parametrize("numbers", [(0, 1, 3), (0, LARGE)])
def test_layers_are_not_counted_up_to_that_of_a_name(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    path = written(of_layers(*numbers), tmp_path)
    with bounded():
        assert list(elastic_ckpt.open(path)) == [f"{number}.w" for number in numbers]


@given(count=st.integers(0, 12), present=st.sets(st.integers(-2, 14)))
def test_the_first_number_apart_is_that_of_the_symmetric_difference(count: int, present: set[int]) -> None:
    assert first_apart(count, present) == min(set(range(count)) ^ present, default=None)
    assert list(gaps(count, present)) == sorted(set(range(count)) - present)


@given(number=st.integers(0, 40), digits=st.integers(1, 6000))
def test_a_number_that_no_expert_has_is_part_of_a_name(number: int, digits: int) -> None:
    name = f"{PREFIX}{str(number)[:1] * digits}.w"
    found = expert_name(name)
    assert (found is None) == (digits > 9)
    if found is not None and name[len(PREFIX)] != "0":
        assert str(found) == name


def test_layers_are_not_balanced_up_to_any_number() -> None:
    metadata = sharded(1)
    with bounded(), pytest.raises(UnsupportedError, match="more than 16384 layers") as caught:
        stages_of({"0.w": 1, f"{LARGE // 10**4}.w": 1}, 2, metadata)
    assert caught.value.parameter == f"{LARGE // 10**4}.w"
    assert stages_of({"0.w": 1, "16383.w": 1}, 2, metadata) == {"0.w": (0,), "16383.w": (1,)}


PIECE = {"shape": (1,), "source": (0, (1,)), "dest": (0, (1,))}
FUSED: dict[str, list[Tree]] = {
    "of many entries": fused(range(9000)),
    "of many patterns": fused(range(1), patterns=1500),
    "of none": fused(range(9000), patterns=0),
    "of many widths": fused(range(1), patterns=1500, shape=([1] * 9000, 3)),
}


@pytest.mark.parametrize("what", FUSED)
def test_sub_parameters_are_not_written_out_for_any_number_of_patterns(what: str) -> None:
    with bounded():
        declared = declared_by({"parameter_with_sub_params": FUSED[what]})
    assert "more than 262144 sub-parameters" in declared.unreadable
    with pytest.raises(CannotSplit, match="cannot be understood"):
        declared.spec("a")


def test_an_affine_map_is_read_once_for_all_names() -> None:
    pieces = {
        rank: {"pieces": [{**PIECE, "shape": (4,), "dest": (0, (1,)), "source": (4 * rank, (1,))}]} for rank in range(2)
    }
    good = {"logical_shape": (8,), "ranks": pieces}
    bad = {"logical_shape": (8,), "ranks": {0: {"pieces": [PIECE] * 100_000}}}
    declared = declared_by({"affine_map": {"version": 1, "params": {"good": good, "bad": bad}}})
    with bounded():
        for number in range(300):
            layout = declared.layout(f"good{number}", [(4,), (4,)])
            assert layout is not None and layout.ranges == (((0, 4),), ((4, 8),))
            with pytest.raises(CannotSplit):
                declared.layout(f"bad{number}", [(4,), (4,)])
