"""What is known of each optimizer's states, against the states that the real optimizers make when they step."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

from elastic_ckpt.core.read_plan import TargetTensor
from elastic_ckpt.core.state_kinds import (
    ELEMENTWISE,
    PER_PARAMETER,
    REPLICATED,
    SCRATCH,
    TOUCHED,
    LiveState,
    block_numel_of,
)
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.engines.optimizers import (
    KNOWN,
    BitsAndBytesSchema,
    OptimizerParam,
    StateSchema,
    is_bitsandbytes,
    schema_of,
)
from elastic_ckpt.errors import UnsupportedError
from tests.quantization import own_maps
from tests.source import code_of

Shape = tuple[int, ...]
Make = Callable[[Any], torch.optim.Optimizer]
State = dict[str, Any]
#: key -> dtype and shape.
Described = dict[str, tuple[str, Shape]]

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers")
optim = torch.optim
MAKERS: dict[str, Make] = {
    "Adam": partial(optim.Adam, lr=0.1),
    "Adam amsgrad": partial(optim.Adam, lr=0.1, amsgrad=True, weight_decay=0.1),
    "Adam fused": partial(optim.Adam, lr=0.1, fused=True),
    "Adam tensor lr": partial(optim.Adam, lr=torch.tensor(0.1)),
    "AdamW": partial(optim.AdamW, lr=0.1),
    "AdamW amsgrad foreach": partial(optim.AdamW, lr=0.1, amsgrad=True, foreach=True),
    "NAdam": partial(optim.NAdam, lr=0.1),
    "NAdam decoupled": partial(optim.NAdam, lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": partial(optim.RAdam, lr=0.1),
    "Adamax": partial(optim.Adamax, lr=0.1),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "SGD nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "Adagrad initial": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1),
    "Adagrad fused": partial(optim.Adagrad, lr=0.1, fused=True),
    "RMSprop": partial(optim.RMSprop, lr=0.1),
    "RMSprop momentum": partial(optim.RMSprop, lr=0.1, momentum=0.9),
    "RMSprop centered": partial(optim.RMSprop, lr=0.1, centered=True),
    "RMSprop both": partial(optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "Adadelta": partial(optim.Adadelta, lr=0.1),
    "Rprop": partial(optim.Rprop, lr=0.1),
    "Adafactor": partial(optim.Adafactor, lr=0.1),
    "Adafactor relative": partial(optim.Adafactor, lr=0.1, beta2_decay=-0.5, weight_decay=0.1),
    "MuonWithAuxAdam": lambda params: MuonWithAuxAdam([{"params": list(params), "use_muon": False, "lr": 0.1}]),
}
#: They step on matrices only.
MATRIX_MAKERS: dict[str, Make] = {
    "Muon": partial(optim.Muon, lr=0.1),
    "Muon plain": partial(optim.Muon, lr=0.1, nesterov=False, momentum=0.5),
    "MuonWithAuxAdam muon": lambda params: MuonWithAuxAdam([{"params": list(params), "use_muon": True, "lr": 0.1}]),
}
CASES = [(name, shape) for name in MAKERS for shape in ((12,), (3, 4), (2, 3, 4), ())]
CASES += [(name, (3, 4)) for name in MATRIX_MAKERS]
EVERY: dict[str, Make] = {**MAKERS, **MATRIX_MAKERS}


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def gradients(shape: Shape, count: int = 3, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for _ in range(count)]


def step(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, grads: Sequence[torch.Tensor]) -> None:
    for grad in grads:
        param.grad = grad.clone()
        with torch.compiler.set_stance("force_eager"):  # DeepSpeed's Muon compiles itself
            optimizer.step()


def parameter(shape: Shape, seed: int = 1) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32))


def stepped_of(param: torch.Tensor, group: int = 0, position: int = 0) -> OptimizerParam:
    return OptimizerParam(param, param.numel(), group, position)


def shape_of(state: LiveState, master: Shape) -> Shape:
    """The shape that a described state has beside its master."""
    if state.layout != ELEMENTWISE:
        return state.shape
    return (state.planes, *master) if state.planes > 1 else master


def described(schema: StateSchema, stepped: OptimizerParam, shape: Shape) -> Described:
    """What a schema says, scales included, which go with codes."""
    states = schema.states(stepped)
    assert states is not None
    found: Described = {}
    for state in states:
        assert state.key not in found
        found[state.key] = (state.dtype, shape_of(state, shape))
        if state.blocks is not None:
            rows = (state.planes,) if state.planes > 1 else ()
            found[state.blocks.scales] = ("float32", (*rows, state.blocks.blocks(stepped.numel)))
    return found


def held(state: Mapping[str, Any], scalar_keys: Sequence[str]) -> Described:
    """The tensors of a real optimizer's state, but for its scalars and quantization maps."""
    return {
        key: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key not in scalar_keys and not key.startswith("qmap")
    }


def scalars_in(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[str]:
    """Numbers, and tensors without dimensions that count something, in a real state."""
    counts = {"step", "mu_product"}
    numbers = {key for key, value in state.items() if isinstance(value, (int, float))}
    return sorted(numbers | (counts & set(state)))


def targets_of(schema: StateSchema, stepped: OptimizerParam, shape: Shape) -> list[TargetTensor]:
    """A target for every state, as the planner makes them, scratch left out."""
    targets = []
    for state in schema.states(stepped) or ():
        if state.layout == SCRATCH:
            continue
        numel = torch.Size(shape_of(state, shape)).numel()
        targets.append(
            TargetTensor(
                state.key, 0, "", numel, state.dtype, layout=state.layout, planes=state.planes, shape=state.shape
            )
        )
        if state.blocks is not None:
            scales = state.planes * state.blocks.blocks(stepped.numel)
            targets.append(TargetTensor(state.blocks.scales, 0, "", scales, "float32", planes=state.planes))
    return targets


def same(ours: Mapping[str, Any], theirs: Mapping[str, Any], values: bool = True) -> None:
    """Two states have the same entries, of the same types, dtypes and shapes, and of the same values if asked."""
    ours, theirs = ({key: value for key, value in state.items() if value is not None} for state in (ours, theirs))
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert type(ours[key]) is type(value), key
        if not isinstance(value, torch.Tensor):
            assert not values or ours[key] == value
            continue
        assert (ours[key].dtype, ours[key].shape, ours[key].device) == (value.dtype, value.shape, value.device), key
        assert ours[key].stride() == value.stride(), key
        assert not values or torch.equal(ours[key], value), key


def restore(
    make: Make, saved: torch.optim.Optimizer, param: torch.nn.Parameter
) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """A fresh optimizer that got the states of another one through its schema, and nothing else."""
    copied = torch.nn.Parameter(param.detach().clone())
    fresh = make([copied])
    schema, stepped = schema_of(fresh), stepped_of(copied)
    shape, state = tuple(param.shape), saved.state[param]
    targets = targets_of(schema, stepped, shape)
    schema.allocate(stepped, targets)
    for target in targets:
        tensor = fresh.state[copied][target.key]
        assert tensor.numel() == target.numel
        tensor.view(-1).copy_(state[target.key].reshape(-1))
    keys = schema.scalars(stepped) or ()
    schema.set_scalars(stepped, {key: float(state[key]) for key in keys})
    return fresh, copied


@pytest.fixture
def wide() -> Iterator[None]:
    """A process whose default dtype is float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# --- known optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_states_and_scalars_are_those_that_the_optimizer_makes(name: str, shape: Shape) -> None:
    param = parameter(shape)
    optimizer = EVERY[name]([param])
    before = schema_of(optimizer)
    stepped = stepped_of(param)
    made = set(optimizer.state.get(param, {}))  # Adagrad makes its states at once
    foretold, counted = described(before, stepped, shape), before.scalars(stepped)
    assert set(optimizer.state.get(param, {})) == made
    step(optimizer, param, gradients(shape, 2))
    assert foretold == described(schema_of(optimizer), stepped, shape)
    state = optimizer.state[param]
    scalars = scalars_in(optimizer, state)
    assert counted == tuple(scalars)
    assert foretold == held(state, scalars)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_an_optimizer_that_got_its_states_goes_on_as_the_one_that_had_them(name: str, shape: Shape) -> None:
    param = parameter(shape)
    optimizer = EVERY[name]([param])
    step(optimizer, param, gradients(shape))
    other, copied = restore(EVERY[name], optimizer, param)
    same(other.state[copied], optimizer.state[param])
    for trained, engine in ((param, optimizer), (copied, other)):
        step(engine, trained, gradients(shape, 2, seed=6))
    assert torch.equal(copied, param)
    same(other.state[copied], optimizer.state[param])


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("name", "shape"), [case for case in CASES if len(case[1]) == 2])
def test_scalars_have_the_dtype_that_the_default_dtype_asks_for(name: str, shape: Shape) -> None:
    param = parameter(shape)
    optimizer = EVERY[name]([param])
    step(optimizer, param, gradients(shape))
    other, copied = restore(EVERY[name], optimizer, param)
    same(other.state[copied], optimizer.state[param])


@pytest.mark.parametrize("capturable", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Rprop"])
def test_scalars_of_a_capturable_optimizer_lie_beside_the_parameter(capturable: str) -> None:
    param = torch.nn.Parameter(torch.empty(3, device="meta"))
    for asked, device in ((True, "meta"), (False, "cpu")):
        optimizer = getattr(optim, capturable)([param], capturable=asked)
        schema_of(optimizer).set_scalars(stepped_of(param), {"step": 3.0})
        assert optimizer.state[param]["step"].device.type == device


@pytest.mark.parametrize(("name", "shape"), [case for case in CASES if case[1] in ((12,), (3, 4))])
def test_the_initial_value_is_that_of_an_element_that_never_got_a_gradient(name: str, shape: Shape) -> None:
    param = parameter(shape)
    with torch.no_grad():
        param.view(-1)[0] = 0.0
    optimizer = EVERY[name]([param])
    grads = gradients(shape)
    for grad in grads:
        grad.view(-1)[0] = 0.0
    step(optimizer, param, grads)
    for state in schema_of(optimizer).states(stepped_of(param)) or ():
        if state.layout == ELEMENTWISE:
            # Adamax adds its eps to every gradient
            assert optimizer.state[param][state.key].view(-1)[0] == pytest.approx(state.initial, abs=1e-7)


def test_scalars_are_objects_of_their_own() -> None:
    params = [parameter((2,)), parameter((3,))]
    optimizer = optim.AdamW(params)
    values = {"step": 3.0}
    for position, param in enumerate(params):
        schema, stepped = schema_of(optimizer), stepped_of(param, position=position)
        schema.allocate(stepped, targets_of(schema, stepped, tuple(param.shape)))
        schema.set_scalars(stepped, values)
    step(optimizer, params[0], gradients((2,), 1))
    assert [float(optimizer.state[param]["step"]) for param in params] == [4.0, 3.0]


def test_options_are_those_of_the_params_own_group() -> None:
    params = [parameter((2,)), parameter((2,))]
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:], "amsgrad": True}])
    schema = schema_of(optimizer)
    for group, keys in enumerate((["exp_avg", "exp_avg_sq"], ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"])):
        states = schema.states(stepped_of(params[group], group)) or ()
        assert [state.key for state in states] == keys


def test_allocation_keeps_what_fits_makes_what_is_missing_and_drops_the_rest() -> None:
    param = parameter((3, 4))
    optimizer = optim.Adam([param], amsgrad=True)
    step(optimizer, param, gradients((3, 4)))
    schema, stepped = schema_of(optimizer), stepped_of(param)
    targets = [target for target in targets_of(schema, stepped, (3, 4)) if target.key != "max_exp_avg_sq"]
    state = optimizer.state[param]
    kept = state["exp_avg"]
    values = kept.clone()
    state["exp_avg_sq"] = state["exp_avg_sq"].double()
    schema.allocate(stepped, targets)
    assert set(state) == {"exp_avg", "exp_avg_sq"}
    assert state["exp_avg"] is kept
    assert torch.equal(kept, values)
    assert (state["exp_avg_sq"].dtype, state["exp_avg_sq"].shape) == (torch.float32, (3, 4))
    state["exp_avg"] = torch.ones(12)
    schema.allocate(stepped, targets)
    assert state["exp_avg"].shape == (3, 4)


def test_plain_states_take_the_strides_of_their_parameter() -> None:
    param = torch.nn.Parameter(torch.randn(4, 3).t())
    optimizer = optim.AdamW([param])
    stepped = stepped_of(param)
    schema_of(optimizer).allocate(stepped, targets_of(schema_of(optimizer), stepped, (3, 4)))
    assert optimizer.state[param]["exp_avg"].stride() == param.stride() == (1, 3)


def test_adafactor_keeps_whole_factors_of_a_matrix_and_one_variance_of_a_flat_tensor() -> None:
    for shape, layouts in (((3, 4), {PER_PARAMETER}), ((12,), {ELEMENTWISE})):
        optimizer = optim.Adafactor([parameter(shape)])
        stepped = stepped_of(optimizer.param_groups[0]["params"][0])
        assert {state.layout for state in schema_of(optimizer).states(stepped) or ()} == layouts


def test_muon_keeps_whole_parameters_where_deepspeed_does() -> None:
    param = parameter((12,))
    optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": True}])
    schema = schema_of(optimizer)
    (whole,) = schema.states(OptimizerParam(param, 12, 0, 0, keeps_touched=True)) or ()
    assert (whole.key, whole.layout) == ("momentum_buffer", TOUCHED)
    (cut,) = schema.states(OptimizerParam(param, 12, 0, 0)) or ()
    assert cut == LiveState("momentum_buffer", "float32")
    assert schema.scalars(stepped_of(param)) == ()


def test_a_swapped_out_tensor_is_described_by_its_size() -> None:
    empty = torch.nn.Parameter(torch.empty(0))
    stepped = OptimizerParam(empty, 5000, 0, 0)
    states = schema_of(optim.AdamW([empty])).states(stepped) or ()
    assert [state.key for state in states] == ["exp_avg", "exp_avg_sq"]
    (codes, _) = schema_of(bnb.optim.Adam8bit([empty])).states(stepped) or ()
    assert codes.dtype == "uint8"
    assert (codes.planes, codes.blocks is not None and codes.blocks.blocks(5000)) == (1, 20)


def test_families_are_those_whose_states_mean_the_same() -> None:
    param = parameter((4,))
    families = {name: schema_of(make([param])).family for name, make in MAKERS.items()}
    assert {name for name, family in families.items() if family is not None} == {
        name for name in MAKERS if name.startswith("Adam") and name != "Adamax" and "=" not in name
    } - {"Adamax"}
    assert set(families.values()) == {"adam", None}


def test_the_schema_names_the_class_and_tells_the_kind_of_weight_decay_where_the_groups_do_not() -> None:
    param = parameter((4,))
    schema = schema_of(optim.AdamW([param]))
    assert (schema.optimizer, schema.decoupled) == ("torch.optim.adamw.AdamW", None)
    for decoupled in (True, False):
        optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": False}], adam_w_mode=decoupled)
        assert schema_of(optimizer).decoupled is decoupled


@pytest.mark.parametrize("auxiliary", [None, "Adam", "AdamW"])
def test_muons_auxiliary_adam_keeps_its_steps_as_it_does_elsewhere(auxiliary: str | None) -> None:
    """An int in Muon's own code, a tensor in torch's Adam, which raises at the next step if it is none."""
    param = parameter((12,))
    adam = None if auxiliary is None else getattr(optim, auxiliary)
    optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": False, "lr": 0.1, "amsgrad": True}], adam)
    step(optimizer, param, gradients((12,)))
    before, stepped = dict(optimizer.state[param]), stepped_of(param)
    schema = schema_of(optimizer)
    assert set(described(schema, stepped, (12,))) == before.keys() - {"step"}
    optimizer.state.clear()
    schema.allocate(stepped, targets_of(schema, stepped, (12,)))
    schema.set_scalars(stepped, {"step": 3.0})
    assert type(optimizer.state[param]["step"]) is type(before["step"]) and optimizer.state[param]["step"] == 3
    step(optimizer, param, gradients((12,)))


def test_muon_with_an_unknown_auxiliary_optimizer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="auxiliary") as caught:
        schema_of(MuonWithAuxAdam([{"params": [parameter((4,))], "use_muon": False, "lr": 0.1}], Lion))
    assert "Lion" in str(caught.value.found)


@pytest.mark.parametrize("saved", [7, 7.0, TensorValue("float32", (), (7.0,)), TensorValue("int64", (), (7,))])
@pytest.mark.parametrize("live", [3, 3.0, torch.tensor(3.0), torch.tensor(3), torch.tensor(3, dtype=torch.float64)])
@pytest.mark.parametrize("make", [Lion, optim.AdamW])
def test_a_scalar_state_has_the_type_of_the_live_one(make: Any, live: Any, saved: Any) -> None:
    param = parameter((3,))
    optimizer = make([param])
    optimizer.state[param] = {"step": live, "old": 1}
    schema = schema_of(optimizer)
    schema.allocate(stepped_of(param), ())
    schema.set_scalars(stepped_of(param), {"step": saved})
    found = optimizer.state[param]["step"]
    assert type(found) is type(live) and found == 7 and optimizer.state[param].keys() == {"step"}
    assert getattr(found, "dtype", None) == getattr(live, "dtype", None)


def test_what_the_live_type_cannot_hold_is_as_saved() -> None:
    param = parameter((3,))
    for live, saved in ((3, 0.5), (torch.tensor(3), 0.5), (3, float("inf")), (3, TensorValue("int64", (1,), (7,)))):
        optimizer = Lion([param])
        optimizer.state[param]["k"] = live
        schema_of(optimizer).set_scalars(stepped_of(param), {"k": saved})
        assert type(optimizer.state[param]["k"]) is (torch.Tensor if isinstance(saved, TensorValue) else float)


@pytest.mark.parametrize("name", sorted(name for name in KNOWN if name.startswith("deepspeed.ops.")))
def test_deepspeeds_own_optimizers_keep_what_their_source_says(name: str) -> None:
    """They compile an extension before they step: their ``step`` is read instead."""
    module, _, class_name = name.rpartition(".")
    code = code_of(getattr(importlib.import_module(module), class_name).step)
    assigned = set(re.findall(r"state\['(\w+)'\] =(?!=)", code))
    stand_in = type(class_name, (optim.Optimizer,), {"__module__": module, "adam_w_mode": True})
    param = parameter((12,))
    optimizer = stand_in([param], {"lr": 0.1})
    schema, stepped = schema_of(optimizer), stepped_of(param)
    assert set(described(schema, stepped, (12,))) | set(schema.scalars(stepped) or ()) == assigned
    schema.set_scalars(stepped, {"step": 3.0})
    assert type(optimizer.state[param]["step"]) is int


class ApexFusedAdam(torch.optim.Optimizer):
    """NVIDIA apex's layout: the step count lives in the param group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True})
        self.adam_w_mode = 1


ApexFusedAdam.__module__, ApexFusedAdam.__qualname__ = "apex.optimizers.fused_adam", "FusedAdam"


def test_apex_gets_its_step_count_in_the_param_group() -> None:
    params = [parameter((4,)), parameter((5,))]
    optimizer = ApexFusedAdam([{"params": params[:1]}, {"params": params[1:]}])
    schema, stepped = schema_of(optimizer), stepped_of(params[1], group=1)
    assert described(schema, stepped, (5,)) == dict.fromkeys(("exp_avg", "exp_avg_sq"), ("float32", (5,)))
    assert (schema.scalars(stepped), schema.family, schema.decoupled) == (("step",), "adam", True)
    schema.allocate(stepped, targets_of(schema, stepped, (5,)))
    schema.set_scalars(stepped, {"step": 7.0})
    assert optimizer.param_groups[1]["step"] == 7
    assert type(optimizer.param_groups[1]["step"]) is int
    assert "step" not in optimizer.param_groups[0]
    assert set(optimizer.state[params[1]]) == {"exp_avg", "exp_avg_sq"}


# --- bitsandbytes -----------------------------------------------------------------------------------------------


def bitsandbytes_classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Every optimizer class that bitsandbytes exports and that steps on a CPU."""
    found = {}
    for name, cls in vars(bnb.optim).items():
        # AdEMAMix32bit makes one row of its two, and fails at its first step (bitsandbytes 0.50)
        if not inspect.isclass(cls) or not issubclass(cls, Optimizer8bit) or "AdEMAMix32bit" in name:
            continue
        needs = inspect.signature(cls).parameters
        options = {key: value for key, value in (("lr", 1e-2), ("momentum", 0.9)) if key in needs}
        found[name] = partial(cls, **options)
    return found


BNB = bitsandbytes_classes()
EIGHT = [name for name in BNB if name.endswith("8bit")]


def snapshot(optimizer: Any) -> Any:
    """Everything in a live optimizer that probing might touch."""
    state = {
        id(param): [(key, id(v), v.sum().item() if isinstance(v, torch.Tensor) else v) for key, v in found.items()]
        for param, found in optimizer.state.items()
    }
    groups = [{**group, "params": [id(param) for param in group["params"]]} for group in optimizer.param_groups]
    attributes = {key: id(value) for key, value in vars(optimizer).items()}
    maps = {key: (id(value), value.sum().item()) for key, value in optimizer.name2qmap.items()}
    paged = (optimizer.is_paged, len(optimizer.page_mng.paged_tensors))
    return state, groups, attributes, maps, dict(vars(optimizer.args)), paged


def check_probe(optimizer: Any, param: torch.nn.Parameter) -> None:
    """What the schema foretells is what one real step makes, and asking changes nothing."""
    shape, stepped = tuple(param.shape), stepped_of(param)
    before = snapshot(optimizer)
    schema = schema_of(optimizer)
    foretold = described(schema, stepped, shape)
    codebooks = {state.key: state.blocks.codebook for state in schema.states(stepped) or () if state.blocks}
    assert schema.scalars(stepped) == ("step",)
    assert snapshot(optimizer) == before
    step(optimizer, param, gradients(shape, 1))
    state = optimizer.state[param]
    assert foretold == held(state, ["step"])
    assert scalars_in(optimizer, state) == ["step"]
    for key, codebook in codebooks.items():
        assert list(codebook.values) == state[f"qmap{key[-1]}"].tolist()
        assert codebook.problem is None
    assert {f"qmap{key[-1]}" for key in codebooks} == {key for key in state if key.startswith("qmap")}
    after = snapshot(optimizer)
    assert described(schema_of(optimizer), stepped, shape) == foretold
    assert snapshot(optimizer) == after


def test_all_the_classes_of_bitsandbytes_are_tested() -> None:
    for expected in ("Adam8bit", "PagedAdamW8bit", "LAMB8bit", "LARS8bit", "AdEMAMix8bit", "Lion", "SGD32bit"):
        assert expected in BNB
    assert len(BNB) >= 35
    assert len(EIGHT) >= 12


@pytest.mark.parametrize("shape", [(100,), (4095,), (4096,), (4097,), (70, 90)], ids=str)
@pytest.mark.parametrize("name", BNB)
def test_bitsandbytes_makes_what_was_foretold(name: str, shape: Shape) -> None:
    param = parameter(shape)
    check_probe(BNB[name]([param]), param)


@pytest.mark.parametrize("least", [0, 1, 100, 10000])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "LARS8bit"])
def test_a_changed_smallest_size_is_heeded(name: str, least: int) -> None:
    for numel in (99, 100, 5000):
        param = parameter((numel,))
        optimizer: Any = BNB[name]([param], min_8bit_size=least)
        check_probe(optimizer, param)
        assert (optimizer.state[param]["state1"].dtype == torch.uint8) == (numel >= least)


@pytest.fixture
def manager() -> Iterator[Any]:
    """bitsandbytes' one manager of overrides, empty before and after."""
    found = bnb.optim.GlobalOptimManager.get_instance()
    found.initialize()
    yield found
    found.initialize()


@pytest.mark.parametrize("early", [True, False])
def test_an_override_of_one_parameter_is_heeded(manager: Any, early: bool) -> None:
    params = [parameter((5000,)), parameter((6000,))]
    if early:
        manager.override_config(params[1], "optim_bits", 32)
        manager.register_parameters(params)
    optimizer = bnb.optim.Adam8bit(params)
    if not early:
        manager.override_config(params[1], "optim_bits", 32)
    schema = schema_of(optimizer)
    for position, dtype in enumerate(("uint8", "float32")):
        states = schema.states(stepped_of(params[position], position=position)) or ()
        assert {state.dtype for state in states} == {dtype}
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [optimizer.state[param]["state1"].dtype for param in params] == [torch.uint8, torch.float32]


def test_an_override_by_position_is_that_of_the_params_own_place(manager: Any) -> None:
    manager.index2config[1, 1] = {"optim_bits": 32}
    params = [parameter((5000,)) for _ in range(3)]
    optimizer = bnb.optim.Adam8bit([{"params": params[:1]}, {"params": params[1:]}])
    schema = schema_of(optimizer)
    places = [(0, 0), (1, 0), (1, 1)]
    for param, (group, position) in zip(params, places, strict=True):
        (state, *_) = schema.states(stepped_of(param, group, position)) or ()
        assert (state.dtype == "float32") == ((group, position) == (1, 1))


def test_an_override_that_makes_8_bits_of_32_is_heeded(manager: Any) -> None:
    param = parameter((5000,))
    manager.override_config(param, "optim_bits", 8)
    optimizer = bnb.optim.AdamW32bit([param])
    check_probe(optimizer, param)
    assert optimizer.state[param]["state1"].dtype == torch.uint8


def test_an_override_of_the_smallest_size_is_heeded(manager: Any) -> None:
    param = parameter((500,))
    manager.override_config(param, key_value_dict={"min_8bit_size": 400})
    optimizer = bnb.optim.Adam8bit([param])
    check_probe(optimizer, param)
    assert optimizer.state[param]["state1"].dtype == torch.uint8


def test_an_override_that_a_module_registered_is_heeded_before_the_first_step(manager: Any) -> None:
    """As ``bitsandbytes.nn.StableEmbedding`` does."""
    module = torch.nn.Linear(100, 100, bias=False)
    manager.register_module_override(module, "weight", {"optim_bits": 32})
    check_probe(bnb.optim.Adam8bit(module.parameters()), module.weight)


@pytest.mark.parametrize("shape", [(100,), (5000,), (70, 90)], ids=str)
@pytest.mark.parametrize("name", BNB)
def test_bitsandbytes_goes_on_with_restored_states(name: str, shape: Shape) -> None:
    param = parameter(shape)
    optimizer = BNB[name]([param])
    step(optimizer, param, gradients(shape, 2))
    other, copied = restore(BNB[name], optimizer, param)
    mine = {key: value for key, value in other.state[copied].items() if key != "unorm_vec"}
    theirs = {key: value for key, value in optimizer.state[param].items() if key != "unorm_vec"}
    same(mine, theirs)
    assert ("unorm_vec" in other.state[copied]) == ("unorm_vec" in optimizer.state[param])
    for trained, engine in ((param, optimizer), (copied, other)):
        step(engine, trained, gradients(shape, 1, seed=6))
    assert torch.equal(copied, param)
    same(other.state[copied], optimizer.state[param])


def test_the_norm_of_an_update_is_scratch() -> None:
    for name in ("LAMB", "LARS8bit"):
        param = parameter((5000,))
        states = schema_of(BNB[name]([param])).states(stepped_of(param)) or ()
        assert [(state.key, state.shape) for state in states if state.layout == SCRATCH] == [("unorm_vec", (1,))]
        assert not [state for state in states if state.layout == REPLICATED]


@pytest.mark.parametrize("name", ["Adam8bit", "AdEMAMix8bit", "LAMB32bit"])
def test_allocation_of_bitsandbytes_keeps_what_fits_with_its_values(name: str) -> None:
    param = parameter((5000,))
    optimizer = BNB[name]([param])
    step(optimizer, param, gradients((5000,)))
    schema, stepped = schema_of(optimizer), stepped_of(param)
    before, copied = dict(optimizer.state[param]), copy.deepcopy(dict(optimizer.state[param]))
    schema.allocate(stepped, targets_of(schema, stepped, (5000,)))
    after = optimizer.state[param]
    assert {key: id(value) for key, value in after.items()} == {key: id(value) for key, value in before.items()}
    same(after, copied)


@pytest.mark.parametrize("damage", ["size", "dtype", "missing", "scales"])
def test_allocation_of_bitsandbytes_replaces_what_does_not_fit(damage: str) -> None:
    param = parameter((5000,))
    optimizer = bnb.optim.Adam8bit([param])
    step(optimizer, param, gradients((5000,)))
    state = optimizer.state[param]
    if damage == "size":
        state["state1"] = torch.zeros(4999, dtype=torch.uint8)
    elif damage == "dtype":
        state["state2"] = torch.zeros(5000)
    elif damage == "missing":
        del state["state2"]
    else:
        state["absmax1"] = torch.zeros(19)
    state["foreign"] = torch.zeros(3)
    schema, stepped = schema_of(optimizer), stepped_of(param)
    schema.allocate(stepped, targets_of(schema, stepped, (5000,)))
    fresh = bnb.optim.Adam8bit([parameter((5000,))])
    fresh_param = fresh.param_groups[0]["params"][0]
    fresh.init_state(fresh.param_groups[0], fresh_param, 0, 0)
    same(optimizer.state[param], fresh.state[fresh_param])


def test_parameters_share_their_quantization_maps() -> None:
    params = [parameter((5000,)), parameter((6000,))]
    optimizer = bnb.optim.Adam8bit(params)
    schema = schema_of(optimizer)
    for position, param in enumerate(params):
        stepped = stepped_of(param, position=position)
        schema.allocate(stepped, targets_of(schema, stepped, tuple(param.shape)))
    for qmap in ("qmap1", "qmap2"):
        assert optimizer.state[params[0]][qmap] is optimizer.state[params[1]][qmap]


def test_allocation_works_while_the_group_is_empty_and_leaves_it_so() -> None:
    """ZeRO-3 puts one sub-group there at a time, and none between two steps."""
    param = parameter((5000,))
    optimizer = bnb.optim.Adam8bit([param])
    optimizer.param_groups[0]["params"] = []
    schema, stepped = schema_of(optimizer), stepped_of(param)
    targets = targets_of(schema, stepped, (5000,))
    schema.allocate(stepped, targets)
    assert optimizer.param_groups[0]["params"] == []
    assert optimizer.state[param]["state1"].dtype == torch.uint8
    assert {target.key for target in targets} == {"state1", "state2", "absmax1", "absmax2"}


def test_the_group_has_its_params_again_when_allocation_fails() -> None:
    param = parameter((5000,))
    optimizer = bnb.optim.Adam8bit([param])
    schema, stepped = schema_of(optimizer), stepped_of(param)
    targets = targets_of(schema, stepped, (5000,))
    optimizer.args.optim_bits = 5
    with pytest.raises(NotImplementedError):
        schema.allocate(stepped, targets)
    assert [id(found) for found in optimizer.param_groups[0]["params"]] == [id(param)]


def test_8_bit_states_of_a_parameter_that_is_not_contiguous_are_refused() -> None:
    param = torch.nn.Parameter(torch.randn(100, 70).t())
    with pytest.raises(UnsupportedError, match="8-bit states") as caught:
        schema_of(bnb.optim.Adam8bit([param])).states(stepped_of(param))
    assert "(1, 70)" in str(caught.value.found)
    for optimizer in (bnb.optim.Adam32bit([param]), bnb.optim.Adam8bit([param], min_8bit_size=10000)):
        assert len(schema_of(optimizer).states(stepped_of(param)) or ()) == 2


def test_bitsandbytes_adam_is_of_the_family_of_adam_and_the_others_are_not() -> None:
    for name, make in BNB.items():
        schema = schema_of(make([parameter((10,))]))
        assert isinstance(schema, BitsAndBytesSchema)
        is_adam = re.fullmatch(r"(Paged)?AdamW?(8bit|32bit)?", name) is not None
        assert schema.family == ("adam" if is_adam else None), name
        assert schema.optimizer.endswith(f".{name}")
        assert schema.decoupled is True


def test_bitsandbytes_is_told_by_its_base_class() -> None:
    param = parameter((4,))
    assert is_bitsandbytes(bnb.optim.Lion([param]))
    assert not is_bitsandbytes(optim.AdamW([param]))
    assert schema_of(bnb.optim.PytorchLARS([param], momentum=0.9)).states(stepped_of(param)) is None
    mine = type("Mine", (bnb.optim.Adam8bit,), {})
    assert isinstance(schema_of(mine([param])), BitsAndBytesSchema)


def test_step_counts_of_bitsandbytes_are_whole_numbers() -> None:
    param = parameter((10,))
    optimizer = bnb.optim.Adam([param])
    schema_of(optimizer).set_scalars(stepped_of(param), {"step": 7.0})
    assert optimizer.state[param]["step"] == 7
    assert type(optimizer.state[param]["step"]) is int


def test_the_own_maps_are_those_of_a_new_optimizer() -> None:
    made = bnb.optim.Adam8bit([parameter((4,))]).name2qmap
    assert {key: list(codebook.values) for key, codebook in own_maps().items()} == {
        "qmap1": made["dynamic"].tolist(),
        "qmap2": made["udynamic"].tolist(),
    }
    assert [own_maps()[key].signed for key in ("qmap1", "qmap2")] == [True, False]


def test_a_number_of_scales_tells_the_size_of_blocks() -> None:
    for numel in (1, 255, 256, 257, 2048, 2049, 5000):
        for block in (256, 2048):
            found = block_numel_of(numel, -(-numel // block))
            assert found is not None
            assert -(-numel // found) == -(-numel // block)
    assert block_numel_of(5000, 19) is None
    assert block_numel_of(5000, 0) is None


# --- unknown optimizers, and those that are refused -------------------------------------------------------------


def test_an_unknown_optimizer_takes_what_the_checkpoint_has() -> None:
    param = parameter((3, 4))
    optimizer = Lion([param])
    schema, stepped = schema_of(optimizer), stepped_of(param)
    assert schema.states(stepped) is None
    assert schema.scalars(stepped) is None
    assert (schema.family, schema.decoupled, schema.optimizer) == (None, None, f"{__name__}.Lion")
    targets = [
        TargetTensor("m", 0, "", 12, "bfloat16"),
        TargetTensor("two", 0, "", 24, "float32", planes=2),
        TargetTensor("factor", 0, "", 3, "float64", layout=PER_PARAMETER, shape=(3, 1)),
        TargetTensor("table", 0, "", 5, "uint8", layout=REPLICATED, shape=(5,)),
    ]
    optimizer.state[param]["stale"] = torch.ones(2)
    schema.allocate(stepped, targets)
    assert held(optimizer.state[param], []) == {
        "m": ("bfloat16", (3, 4)),
        "two": ("float32", (2, 3, 4)),
        "factor": ("float64", (3, 1)),
        "table": ("uint8", (5,)),
    }
    before = dict(optimizer.state[param])
    before["two"].fill_(3.0)
    schema.allocate(stepped, targets)
    assert all(optimizer.state[param][key] is value for key, value in before.items())
    assert (optimizer.state[param]["two"] == 3.0).all()


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (7, 7),
        (7.0, 7.0),
        (True, True),
        (None, None),
        (TensorValue("float32", (), (7.0,)), torch.tensor(7.0)),
        (TensorValue("float64", (), (0.1,)), torch.tensor(0.1, dtype=torch.float64)),
        (TensorValue("int64", (), (7,)), torch.tensor(7)),
        (TensorValue("bfloat16", (1,), (0.5,)), torch.tensor([0.5], dtype=torch.bfloat16)),
    ],
)
def test_scalars_of_an_unknown_optimizer_come_back_as_they_were_saved(saved: Any, expected: Any) -> None:
    params = [parameter((3,)), parameter((3,))]
    optimizer = Lion(params)
    for param in params:
        schema_of(optimizer).set_scalars(stepped_of(param), {"k": saved})
    found = [optimizer.state[param]["k"] for param in params]
    assert type(found[0]) is type(expected)
    assert found[0] == expected
    if isinstance(expected, torch.Tensor):
        assert (found[0].dtype, found[0].shape) == (expected.dtype, expected.shape)
        assert found[0] is not found[1]


def test_a_class_that_is_derived_from_a_known_one_is_not_known() -> None:
    """It may keep anything beside what its base keeps."""
    param = parameter((3,))
    assert schema_of(type("Mine", (optim.AdamW,), {})([param])).states(stepped_of(param)) is None


def test_torchao_is_refused_by_name() -> None:
    cls = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.fake"})
    with pytest.raises(UnsupportedError, match="torchao") as caught:
        schema_of(cls([parameter((3,))]))
    assert caught.value.found == "torchao.optim.fake.AdamW8bit"
    other = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchaotic.optim"})
    param = parameter((3,))
    assert schema_of(other([param])).states(stepped_of(param)) is None


def test_where_states_are_left_alone_there_are_none() -> None:
    param = parameter((3,))
    schema = StateSchema(optim.AdamW([param]), known=())
    assert schema.states(stepped_of(param)) == ()
    assert schema.scalars(stepped_of(param)) == ()
