"""Checkpoints without ZeRO, written by torch.save from real optimizers, against the optimizers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.core.read_plan import names_with
from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    WITHOUT_STATES,
    DamagedError,
    LayoutError,
    MismatchError,
    UnsupportedError,
)
from elastic_ckpt.formats import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.model_states import FUSED, PLAIN, UNFUSED, model_indexer
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.pickled import Trees, open_pickled
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.tools.verification import verify
from tests.formats.zero0_states import NAMES, adamw, with_masters
from tests.simulation import live
from tests.unpartitioned import FILE, STATES, Model, catalog_of, check_states, contents, indexed, trained

# --- plain ------------------------------------------------------------------------------------------------------


def test_named_parameters_are_found_by_their_names_whatever_the_live_groups(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())), lr=0.1)
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    assert shard.optimizer is not None
    assert (shard.optimizer.kind, shard.optimizer.names) == (PLAIN, (("c", "b", "scale", "a"),))
    for live_groups in ([], [["a", "c", "b", "scale"]], [["nobody"]]):
        metadata = catalog_of(tmp_path, shard, live_groups)
        check_states(metadata, model, optimizer)
        assert not [note for note in metadata.notes if "without names" in note]
    assert metadata.source.zero_stage == 0
    assert metadata.source.partition_degree == 2
    assert metadata.groups[0]["lr"] == 0.1
    assert not {"params", "param_names"} & set(metadata.groups[0])
    assert contents(metadata, "mask", BUFFER).tolist() == [1, 0]
    assert metadata.states.opaque == {}


def test_named_parameters_in_several_groups_keep_their_groups(tmp_path: Path) -> None:
    model = Model()
    params = dict(model.named_parameters())
    groups = [{"params": [(name, params[name]) for name in names], "lr": lr} for names, lr in (("bc", 0.1), ("a", 0.2))]
    groups.append({"params": [("scale", params["scale"])]})
    optimizer = torch.optim.AdamW(groups)
    metadata = catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), trained(model, optimizer)))
    check_states(metadata, model, optimizer)
    assert [group["lr"] for group in metadata.groups] == [0.1, 0.2, 0.001]


@pytest.mark.parametrize("missing", ["foreign", "left out"])
def test_names_that_are_not_the_modules_are_passed_over(tmp_path: Path, missing: str) -> None:
    """Names of the user's own, or of frozen weights that were left out of the save."""
    model = Model()
    pairs = [(f"my.{name}" if missing == "foreign" else name, param) for name, param in model.named_parameters()]
    optimizer = torch.optim.AdamW(pairs)
    model.b.requires_grad_(missing == "foreign")
    module = {name: value for name, value in model.state_dict().items() if missing == "foreign" or name != "b"}
    shard = indexed(tmp_path, module, trained(model, optimizer))
    if missing == "foreign":
        check_states(catalog_of(tmp_path, shard, [NAMES]), model, optimizer)
        return
    metadata = catalog_of(tmp_path, shard, [["a", "scale", "c"]])
    assert set(metadata.parameters) == {"a", "scale", "c"}


def test_numbered_parameters_are_taken_in_the_order_of_the_live_groups(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model, "c b", "scale a")
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    assert shard.optimizer is not None
    assert shard.optimizer.names is None
    metadata = catalog_of(tmp_path, shard, [["c", "b"], ["scale", "a"]])
    check_states(metadata, model, optimizer)
    (note,) = metadata.notes
    assert "the live param groups" in note
    assert "shapes agree" in note


def test_numbered_parameters_of_a_single_group_are_taken_in_the_order_of_the_model(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer))
    for live_groups in ([["a"], ["scale", "b", "c"]], [["b", "a", "scale", "c"]], []):
        metadata = catalog_of(tmp_path, shard, live_groups)
        check_states(metadata, model, optimizer)
        (note,) = metadata.notes
        assert "the model" in note


def test_two_orders_that_both_fit_are_refused(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad():
        model.c = torch.nn.Parameter(torch.randn(2, 3))
    shard = indexed(tmp_path, model.state_dict(), trained(model, torch.optim.AdamW(model.parameters())))
    with pytest.raises(MismatchError, match="which parameter is which") as caught:
        catalog_of(tmp_path, shard, [["c", "scale", "b", "a"]])
    assert "both fit" in str(caught.value.found)
    check_order = catalog_of(tmp_path, shard, [NAMES])
    assert list(check_order.parameters) == NAMES


@pytest.mark.parametrize("live_groups", [[["b", "c"], ["a", "scale"]], [["c", "b", "scale", "a"]], [["c"], ["b"], []]])
def test_an_order_that_does_not_fit_is_refused_with_the_sizes(tmp_path: Path, live_groups: list[list[str]]) -> None:
    model = Model()
    shard = indexed(tmp_path, model.state_dict(), trained(model, adamw(model, "c b", "scale a")))
    with pytest.raises(MismatchError, match="which parameter is which") as caught:
        catalog_of(tmp_path, shard, live_groups)
    assert caught.value.found == f"[2, 2] tensors in the saved groups, {[len(g) for g in live_groups]} in the live ones"
    assert WITHOUT_STATES in caught.value.remedies


@pytest.mark.parametrize("named", [True, False])
def test_a_parameter_that_never_got_a_gradient_has_weights_and_no_state(tmp_path: Path, named: bool) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer, idle=["b", "scale"]))
    check_states(catalog_of(tmp_path, shard, [NAMES]), model, optimizer, idle=["b", "scale"])


def test_a_frozen_parameter_inside_a_group_is_trained_as_far_as_the_optimizer_tells(tmp_path: Path) -> None:
    model = Model()
    model.b.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    shard = indexed(tmp_path, model.state_dict(), trained(model, optimizer, idle=["b"]))
    metadata = catalog_of(tmp_path, shard, [NAMES])
    check_states(metadata, model, optimizer, idle=["b"])
    assert not metadata.names(FROZEN)
    engine = live(
        {"a": (2, 3), "scale": (), "c": (3, 2)},
        wholes={("mask", BUFFER): ((2,), "int64"), ("b", FROZEN): ((5,), "float32")},
    )
    plan = plan_load(metadata, engine, LoadOptions())
    assert names_with(plan.outcomes, "fresh") == ()
    assert plan.scalars == ({"step": 3.0},)


def test_a_frozen_parameter_outside_the_groups_is_frozen(tmp_path: Path) -> None:
    model = Model()
    model.b.requires_grad_(False)
    optimizer = adamw(model, "a c", "scale")
    metadata = catalog_of(
        tmp_path, indexed(tmp_path, model.state_dict(), trained(model, optimizer)), [["a", "c"], ["scale"]]
    )
    assert metadata.names(FROZEN) == ["b"]
    assert torch.equal(contents(metadata, "b", FROZEN), model.b.detach())
    assert set(metadata.parameters) == {"a", "scale", "c"}


def test_states_of_a_parameter_without_dimensions_are_states_and_its_step_is_a_count(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    metadata = catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), trained(model, optimizer)), [NAMES])
    assert metadata.parameters["scale"].scalars == (("step", 3.0),)
    for key in (*STATES, "max_exp_avg_sq"):
        assert metadata.tensors["scale", key].shape == ()
        assert torch.equal(contents(metadata, "scale", key), optimizer.state[model.scale][key])
    assert metadata.state_keys == (*STATES, "max_exp_avg_sq")


def test_an_empty_parameter_has_no_extents(tmp_path: Path) -> None:
    model = Model()
    model.b = torch.nn.Parameter(torch.zeros(0, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    metadata = catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), trained(model, optimizer)), [NAMES])
    assert metadata.parameters["b"].shape == (0, 4)
    assert metadata.tensors["b", "exp_avg"].chunks == ()
    check_states(metadata, model, optimizer)


def fused_adam_group(**more: Any) -> dict[str, Any]:
    return {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "step": 0,
        **more,
    }


@pytest.mark.parametrize(
    ("extra", "expected"),
    [({}, [7, 7, 9]), ({"amsgrad": False}, [1, 7, 9]), ({"max_coeff": 10.0}, [1, 7, 9]), ({"step": 9}, [1, 7, 9])],
    ids=["FusedAdam", "another", "FusedLamb", "a step of its own"],
)
def test_fused_adam_counts_the_steps_of_a_group_in_its_last_tensor(
    tmp_path: Path, extra: dict[str, Any], expected: list[int]
) -> None:
    model = Model()

    def state(name: str, step: int) -> dict[str, Any]:
        value = getattr(model, name).detach()
        return {"step": step, "exp_avg": value * 2, "exp_avg_sq": value * 3}

    optimizer = {
        "state": {0: state("a", 1), 2: state("b", 7), 3: state("c", 9)},
        "param_groups": [fused_adam_group(params=[0, 1, 2], **extra), fused_adam_group(params=[3], **extra)],
    }
    metadata = catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), optimizer), [["a", "scale", "b"], ["c"]])
    steps = {name: dict(parameter.scalars).get("step") for name, parameter in metadata.parameters.items()}
    assert steps == {"a": expected[0], "scale": None, "b": expected[1], "c": expected[2]}


def test_tied_names_are_one_parameter_under_the_first(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    state = trained(model, optimizer)
    metadata = catalog_of(tmp_path, indexed(tmp_path, {**model.state_dict(), "tied": model.a.data}, state), [NAMES])
    assert metadata.aliases == {"tied": "a"}
    check_states(metadata, model, optimizer)
    assert not metadata.names(FROZEN)
    tied = [["tied", "scale", "b", "c"]]
    assert (
        catalog_of(tmp_path, indexed(tmp_path, {**model.state_dict(), "tied": model.a.data}, state), tied) == metadata
    )


def test_a_weight_saved_as_a_view_is_refused_by_name(tmp_path: Path) -> None:
    model = Model()
    state = trained(model, torch.optim.AdamW(model.parameters()))
    module = {**model.state_dict(), "c": torch.randn(2, 3).t()}
    with pytest.raises(UnsupportedError, match="not contiguous") as caught:
        catalog_of(tmp_path, indexed(tmp_path, module, state), [NAMES])
    assert caught.value.parameter == "c"


def test_states_of_another_shape_belong_to_whole_parameters_and_those_of_no_tensor_are_not_understood(
    tmp_path: Path,
) -> None:
    model = Model()
    state = trained(model, torch.optim.AdamW(model.parameters()))
    for number in state["state"]:
        state["state"][number]["row"] = torch.zeros(7)
        state["state"][number]["history"] = [1, 2]
        state["state"][number] = dict(sorted(state["state"][number].items()))
    metadata = catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), state), [NAMES])
    assert set(metadata.states.opaque) == {"history"}
    assert metadata.tensors["a", "row"].has_own_shape and metadata.tensors["a", "row"].shape == (7,)
    assert not metadata.tensors["a", "exp_avg"].has_own_shape
    assert "list" in metadata.states.opaque["history"]


# --- with masters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UNFUSED, FUSED])
@pytest.mark.parametrize("groups", [[NAMES], [["c", "b"], ["scale", "a"]]], ids=["one group", "two groups"])
def test_masters_and_states_of_a_wrapped_optimizer_are_found(
    tmp_path: Path, kind: str, groups: list[list[str]]
) -> None:
    model = Model()
    entry, optimizer = with_masters(model, kind, groups)
    module = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in model.state_dict().items()
    }
    shard = indexed(tmp_path, module, entry)
    assert shard.optimizer is not None
    assert shard.optimizer.kind == kind
    assert shard.optimizer.scaler["cur_scale"] == 256.0
    metadata = catalog_of(tmp_path, shard, groups)
    assert [set(group) >= {"lr", "betas"} for group in metadata.groups] == [True] * len(groups)
    for number, names in enumerate(groups):
        tensors = optimizer.param_groups[number]["params"]
        for key in (MASTER, *STATES):
            values = [tensor.detach() if key == MASTER else optimizer.state[tensor][key] for tensor in tensors]
            flat = torch.cat([value.view(-1) for value in values])
            read = [contents(metadata, name, key).view(-1) for name in names]
            assert torch.equal(torch.cat(read), flat)
        for name in names:
            assert metadata.parameters[name].group == number
            assert metadata.parameters[name].scalars == (("step", 1.0),)
            assert metadata.tensors[name, MASTER].dtype == "float32"
            assert metadata.tensors[name, MASTER].shape == tuple(model.state_dict()[name].shape)
    assert "shapes and values agree" in metadata.notes[0]


@pytest.mark.parametrize("kind", [UNFUSED, FUSED])
def test_masters_that_do_not_fit_any_order_are_refused(tmp_path: Path, kind: str) -> None:
    model = Model()
    entry, _ = with_masters(model, kind, [["c", "b"], ["scale", "a"]])
    with pytest.raises(MismatchError, match="which parameter is which") as caught:
        catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), entry), [["b", "scale"], ["c", "a"]])
    sizes = "[1, 1]" if kind == FUSED else "[2, 2]"
    assert caught.value.found == f"{sizes} tensors in the saved groups, [2, 2] in the live ones"


def test_of_two_orders_that_fit_the_live_one_is_taken_where_values_are_compared(tmp_path: Path) -> None:
    model = Model()
    model.c = torch.nn.Parameter(torch.randn(2, 3))
    entry, _ = with_masters(model, UNFUSED, [["c", "scale", "b", "a"]])
    metadata = catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), entry), [["c", "scale", "b", "a"]])
    assert torch.equal(contents(metadata, "c", MASTER).view(-1), entry["fp32_groups"][0][0].view(-1))


# --- damaged entries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param([1, 2], id="no dict"),
        pytest.param({}, id="empty"),
        pytest.param({"state": {}}, id="no groups"),
        pytest.param({"param_groups": []}, id="no state"),
        pytest.param({"fp32_groups": []}, id="masters without an optimizer"),
        pytest.param({"fp32_groups": [], "optimizer_state_dict": {"state": {}}}, id="half an optimizer"),
        pytest.param({"fp32_groups_flat": [], "state": {}, "param_groups": []}, id="state dict in the wrong place"),
    ],
)
def test_an_entry_that_is_no_optimizers_is_damage(tmp_path: Path, optimizer: Any) -> None:
    with pytest.raises(DamagedError, match="optimizer entry") as caught:
        indexed(tmp_path, Model().state_dict(), optimizer)
    assert str(caught.value.file).endswith("mp_rank_00_model_states.pt")


@pytest.mark.parametrize("masters", [{}, {"fp32_groups": []}, {"fp32_groups_flat": []}], ids=["", UNFUSED, FUSED])
def test_a_state_dict_of_an_optimizers_own_kind_is_not_called_damage(tmp_path: Path, masters: dict[str, Any]) -> None:
    own = {"opt1_state_dict": {}, "opt2_state_dict": {}}
    with pytest.raises(UnsupportedError, match="of its own kind") as caught:
        indexed(tmp_path, Model().state_dict(), {**masters, "optimizer_state_dict": own} if masters else own)
    assert caught.value.remedies == (WITHOUT_STATES, AT_ITS_TOPOLOGY)


@pytest.mark.parametrize("master", [None, 3, "text", torch.randn(3, 2).t()])
def test_masters_that_are_no_dense_tensors_are_damage(tmp_path: Path, master: Any) -> None:
    entry, _ = with_masters(Model(), UNFUSED, [NAMES])
    entry["fp32_groups"][0][3] = master
    with pytest.raises(DamagedError, match=r"an entry of this file|optimizer entry"):
        indexed(tmp_path, Model().state_dict(), entry)


def test_a_file_without_an_optimizer_entry_has_none(tmp_path: Path) -> None:
    assert indexed(tmp_path, Model().state_dict(), None).optimizer is None


def test_hyperparameters_that_are_tensors_stay_tensors(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    metadata = catalog_of(tmp_path, indexed(tmp_path, model.state_dict(), trained(model, optimizer)), [NAMES])
    assert repr(metadata.groups[0]["lr"]) == "tensor(0.25, float32)"


def test_files_that_share_their_tree_have_numbers_of_their_own(tmp_path: Path) -> None:
    """As those of tensor-parallel ranks, which differ in the bytes of their tensors alone."""
    trees, index, found = Trees(), model_indexer(), []
    for rate in (0.25, 0.5):
        (folder := tmp_path / str(rate)).mkdir()
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(rate), foreach=False)
        indexed(folder, model.state_dict(), trained(model, optimizer))
        file = open_pickled(str(folder / FILE), known=trees)
        found.append((file.tree, index(file).optimizer))
    (first, one), (second, other) = found
    assert first is second and one is not None and other is not None
    assert [one.groups[0]["lr"], other.groups[0]["lr"]] == [0.25, 0.5]


# --- without states ---------------------------------------------------------------------------------------------


IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


@pytest.mark.parametrize(
    ("version", "stage", "more", "is_bug"),
    [
        ("0.17.6", 0, {}, True),
        ("0.19.8", 0, {}, False),
        ("0.17.6", 1, IN_FP32, True),
        ("0.17.6", 1, {}, False),
        ("0.17.6", 2, IN_FP32, False),
        ("0.18.9", 1, IN_FP32, False),
    ],
)
def test_bf16_of_deepspeed_0_17_has_weights_alone(
    tmp_path: Path, version: str, stage: int, more: dict[str, Any], is_bug: bool
) -> None:
    """Neither its model-states file nor any other has its optimizer's states; of other runs, files are lost."""
    model = Model()
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **more}
    indexed(tmp_path, model.state_dict(), None, ds_version=version, ds_config=config)
    found = CheckpointInfo("native", str(tmp_path), tmp_path.name, sort_names([FILE], is_universal=False))
    says = "saved without optimizer states" if is_bug else "has no optimizer-states files"
    with pytest.raises(LayoutError, match=says) as caught:
        read_checkpoint(found, MetadataOptions())
    assert "load_module_only=True" in str(caught.value.remedy)
    assert str(caught.value.problem) in verify(str(tmp_path), None, ElasticConfig()).findings[0].text
    metadata = read_checkpoint(found, MetadataOptions(with_states=False)).metadata
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "mask"}
    keys = dict(metadata.tensors.keys())
    assert all(torch.equal(contents(metadata, name, keys[name]), weights[name]) for name in weights)
