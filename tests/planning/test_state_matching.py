"""Which saved state each live one takes: other optimizers, unknown ones, and tensors that are never cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import BlockCode, chunks_of
from elastic_ckpt.core.local_state import LiveGroup, LocalState
from elastic_ckpt.core.metadata import CheckpointMetadata, ReplicatedState, StateFacts
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.core.state_kinds import ELEMENTWISE, PER_PARAMETER, REPLICATED, SCRATCH, BlockFormat, LiveState
from elastic_ckpt.engines.optimizers import OptimizerParam, schema_of
from elastic_ckpt.errors import BY_DEEPSPEED, WITHOUT_STATES, DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.planning.matching import match_parameters
from elastic_ckpt.planning.param_groups import match_groups, transferable
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.planning.state_matching import StateLink, StateMatching, match_states
from tests.quantization import own_maps
from tests.simulation import ADAM, TWO, live, saved, unpartitioned

MOMENTS = ("exp_avg", "exp_avg_sq")
CODED = ("state1", "state2")
BLOCKS = [BlockFormat(256, f"absmax{number}", own_maps()[f"qmap{number}"]) for number in (1, 2)]
CODES = tuple(LiveState(key, "uint8", blocks=blocks) for key, blocks in zip(CODED, BLOCKS, strict=True))
NORM = LiveState("unorm_vec", "float32", SCRATCH, shape=(1,))
PARAM = torch.nn.Parameter(torch.zeros(8))


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The first param group of a real optimizer, as a checkpoint holds it."""
    values = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return {**values, "decoupled_weight_decay": True} if schema_of(optimizer).decoupled else values


BNB_GROUP = hyperparameters(bnb.optim.AdamW8bit([PARAM]))
ADAMW_GROUP = hyperparameters(torch.optim.AdamW([PARAM]))


def engine(
    states: Sequence[LiveState] | None = None,
    *,
    scalars: Sequence[str] | None = ("step",),
    group: Mapping[str, Any] = ADAM,
    shapes: Mapping[str, tuple[int, ...]] = TWO,
    apart: bool = False,
    **more: Any,
) -> LocalState:
    """A live engine with these states for every flat tensor."""
    made = live(shapes, groups=[[name] for name in shapes] if apart else None)
    kinds = None if states is None else tuple(states)
    counted = None if scalars is None else tuple(scalars)
    flats = tuple(replace(flat, states=kinds, scalars=counted) for flat in made.flats)
    groups = tuple(LiveGroup(found.names, dict(group)) for found in made.groups)
    return replace(made, flats=flats, groups=groups, **more)


def bnb_engine(states: Sequence[LiveState] = CODES, **more: Any) -> LocalState:
    facts = {"optimizer": "bitsandbytes.optim.adamw.AdamW8bit", "family": "adam", "group": BNB_GROUP, **more}
    return engine(states, **facts)


def adam_engine(**more: Any) -> LocalState:
    facts = {"optimizer": "torch.optim.adamw.AdamW", "family": "adam", "group": ADAMW_GROUP, **more}
    return engine([LiveState(key, "float32") for key in MOMENTS], **facts)


def bnb_saved(**more: Any) -> CheckpointMetadata:
    return saved(TWO, states=CODED, hyperparameters=(BNB_GROUP,), **more)


def adam_saved(**more: Any) -> CheckpointMetadata:
    return saved(TWO, hyperparameters=(ADAMW_GROUP,), **more)


def matched(metadata: CheckpointMetadata, local_state: LocalState, convert: bool = False) -> StateMatching:
    return match_states(metadata, local_state, match_parameters(metadata, local_state, strict=True), convert)


def sources(matching: StateMatching) -> dict[str, str]:
    """Live state -> saved state, the same for all flat tensors."""
    (found,) = {tuple((link.live.key, link.source) for link in links) for links in matching.links.values()}
    return dict(found)


def with_replicated(metadata: CheckpointMetadata, name: str, *states: ReplicatedState) -> CheckpointMetadata:
    parameters = {**metadata.parameters, name: replace(metadata.parameters[name], replicated=tuple(states))}
    return replace(metadata, parameters=parameters)


def table(key: str = "table", **more: Any) -> ReplicatedState:
    return ReplicatedState(
        **{"key": key, "dtype": "float32", "shape": (5,), "file": 0, "byte_offset": 9, "crc32": 1} | more
    )


def everywhere(metadata: CheckpointMetadata, *states: ReplicatedState) -> CheckpointMetadata:
    for name in metadata.parameters:
        metadata = with_replicated(metadata, name, *states)
    return metadata


def with_tensor(metadata: CheckpointMetadata, name: str, key: str, **changes: Any) -> CheckpointMetadata:
    return replace(metadata, tensors={**metadata.tensors, (name, key): replace(metadata.tensors[name, key], **changes)})


def two_rows(metadata: CheckpointMetadata, key: str) -> CheckpointMetadata:
    for name, shape in TWO.items():
        metadata = with_tensor(metadata, name, key, shape=(2, *shape))
    return metadata


# --- another optimizer of the family ----------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("states", [CODES, tuple(LiveState(key, "float32") for key in CODED)], ids=["8", "32"])
def test_states_of_adam_become_those_of_bitsandbytes(states: Sequence[LiveState], apart: bool) -> None:
    matching = matched(adam_saved(), bnb_engine(states, apart=apart), convert=True)
    assert matching.converted
    assert sources(matching) == {"state1": "exp_avg", "state2": "exp_avg_sq"}
    assert [link.live for link in matching.links[0]] == list(states)
    assert len(matching.links) == (2 if apart else 1)
    assert matching.scalars == ({"step": 4.0},) * len(matching.links)
    assert matching.restored == dict.fromkeys(CODED, ("a.weight", "b.weight"))
    note = "optimizer states converted from torch.optim.AdamW to bitsandbytes.optim.adamw.AdamW8bit"
    assert matching.notes == (note,)
    assert matching.outcomes == ()


def test_states_of_bitsandbytes_become_those_of_adam() -> None:
    matching = matched(bnb_saved(), adam_engine(), convert=True)
    assert matching.converted
    assert sources(matching) == {"exp_avg": "state1", "exp_avg_sq": "state2"}
    assert "a bitsandbytes optimizer with state1, state2 to torch.optim.adamw.AdamW" in matching.notes[0]


@pytest.mark.parametrize("convert", [True, False])
def test_states_of_the_same_names_are_not_converted(convert: bool) -> None:
    for matching in (matched(bnb_saved(), bnb_engine(), convert), matched(adam_saved(), adam_engine(), convert)):
        assert not matching.converted
        assert matching.notes == ()
        assert {key: source for key, source in sources(matching).items() if key != source} == {}


def test_one_converted_flat_tensor_among_others_makes_a_conversion() -> None:
    local_state = bnb_engine(apart=True)
    plain = tuple(LiveState(key, "float32") for key in MOMENTS)
    for number in (0, 1):
        flats = tuple(replace(flat, states=plain) if flat.index == number else flat for flat in local_state.flats)
        mixed = replace(local_state, flats=flats, groups=adam_engine(apart=True).groups)
        assert matched(adam_saved(), mixed, convert=True).converted


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (ADAMW_GROUP, "torch.optim.AdamW"),
        (hyperparameters(torch.optim.Adam([PARAM])), "torch.optim.Adam"),
        ({**ADAM, "bias_correction": True}, "DeepSpeed's or apex's Adam"),
    ],
)
def test_a_conversion_that_nobody_asked_for_is_refused_with_both_names_and_the_key(
    group: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(MismatchError, match="can be converted") as caught:
        matched(saved(TWO, hyperparameters=(group,)), bnb_engine())
    error = caught.value
    assert error.found == f"states of {words}"
    assert error.expected == "states of the live optimizer bitsandbytes.optim.adamw.AdamW8bit"
    assert {"convert_optimizer": True} in [each.config for each in error.remedies]
    assert error.parameter == "a.weight, b.weight"
    assert error.file == "/ckpt/tag"


def test_a_conversion_to_adam_that_nobody_asked_for_is_refused_too() -> None:
    with pytest.raises(MismatchError, match="can be converted") as caught:
        matched(bnb_saved(), adam_engine())
    assert caught.value.found == "states of a bitsandbytes optimizer with state1, state2"
    assert caught.value.expected == "states of the live optimizer torch.optim.adamw.AdamW"


def without(metadata: CheckpointMetadata, *places: tuple[str, str]) -> CheckpointMetadata:
    """The same checkpoint without some tensors."""
    tensors = {place: tensor for place, tensor in metadata.tensors.items() if place not in places}
    return replace(metadata, tensors=tensors)


def test_a_state_that_one_member_lacks_is_damage_in_a_conversion_too() -> None:
    metadata = without(adam_saved(), ("a.weight", "exp_avg_sq"))
    assert matched(metadata, bnb_engine(), convert=True).converted
    options = LoadOptions(ElasticConfig(convert_optimizer=True))
    with pytest.raises(DamagedError, match="holds no exp_avg_sq for it") as caught:
        plan_load(metadata, bnb_engine(), options)
    assert caught.value.parameter == "a.weight"


REFUSED = {
    "Adafactor": (  # of vectors and matrices, other states
        without(saved(TWO, states=("row_var", "variance")), ("a.weight", "variance"), ("b.weight", "row_var")),
        adam_engine(),
    ),
    "LAMB": (everywhere(bnb_saved(), table("unorm_vec", shape=(1,))), adam_engine()),
    "LAMB of one": (with_replicated(bnb_saved(), "a.weight", table("unorm_vec", shape=(1,))), adam_engine()),
    "AdEMAMix": (two_rows(bnb_saved(), "state1"), adam_engine()),
    "one state": (saved(TWO, states=("state1",)), adam_engine()),
    "amsgrad": (saved(TWO, states=(*MOMENTS, "max_exp_avg_sq")), bnb_engine()),
    "other names": (saved(TWO, states=("exp_avg", "exp_inf")), bnb_engine()),
    "live family": (adam_saved(), bnb_engine(family=None)),
    "live one state": (adam_saved(), bnb_engine(CODES[:1])),
    "live amsgrad": (bnb_saved(), engine([LiveState(k, "float32") for k in (*MOMENTS, "max")], family="adam")),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("convert", [True, False])
def test_other_states_are_not_converted(case: str, convert: bool) -> None:
    metadata, local_state = REFUSED[case]
    with pytest.raises(MismatchError, match="keeps other states") as caught:
        matched(metadata, local_state, convert)
    assert local_state.optimizer in str(caught.value.expected)
    assert "step" in str(caught.value.expected)
    assert "step" in str(caught.value.found)
    for key in metadata.state_keys:
        assert key in str(caught.value.found)


def test_a_live_lamb_takes_no_states_of_adam() -> None:
    with pytest.raises(MismatchError):
        matched(adam_saved(), bnb_engine((*CODES, NORM), family=None, optimizer="LAMB8bit"), convert=True)
    with pytest.raises(MismatchError, match="another kind"):
        matched(bnb_saved(), bnb_engine((*CODES, NORM), family=None, optimizer="LAMB8bit"), convert=True)


@pytest.mark.parametrize("group", [hyperparameters(torch.optim.RAdam([PARAM])), {"lr": 0.1, "betas": (0.9, 0.99)}])
def test_states_of_the_names_of_adam_that_another_optimizer_keeps_are_not_converted(group: dict[str, Any]) -> None:
    """RAdam's, and those of DeepSpeed's CPULion."""
    with pytest.raises(MismatchError):
        matched(saved(TWO, hyperparameters=(group,)), bnb_engine(), convert=True)


def test_states_of_a_bitsandbytes_that_knew_no_ademamix_are_those_of_the_installed_one() -> None:
    """Its groups lacked alpha, t_alpha and t_beta3 until 0.44; 2048-element blocks are older still."""
    old = {key: value for key, value in BNB_GROUP.items() if key not in ("alpha", "t_alpha", "t_beta3")}
    matched(saved(TWO, states=CODED, hyperparameters=(old,)), bnb_engine(defaults=frozenset(BNB_GROUP)))


@pytest.mark.parametrize("keep_live", [True, False])
def test_a_converted_group_takes_only_what_both_optimizers_know(keep_live: bool) -> None:
    theirs = {**ADAMW_GROUP, "lr": 0.5, "initial_lr": 0.7, "mine": 1}
    metadata = saved(TWO, hyperparameters=(theirs,))
    _, (values,) = match_groups(metadata, bnb_engine(), keep_live, converted=True)
    shared = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "initial_lr": 0.7}
    assert values == ({} if keep_live else shared)
    _, (values,) = match_groups(metadata, bnb_engine(), keep_live)
    assert ("mine" in values) == (not keep_live)


def test_a_group_that_was_converted_back_loses_what_only_bitsandbytes_knows() -> None:
    _, (values,) = match_groups(bnb_saved(), adam_engine(), keep_live=False, converted=True)
    assert set(values) == {"lr", "betas", "eps", "weight_decay"}


def test_each_converted_group_takes_what_its_own_optimizer_group_knows() -> None:
    local_state = bnb_engine(apart=True)
    first, second = local_state.groups
    more = LiveGroup(second.names, {**second.hyperparameters, "amsgrad": True})
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=(ADAMW_GROUP, ADAMW_GROUP))
    _, values = match_groups(metadata, replace(local_state, groups=(first, more)), keep_live=False, converted=True)
    assert ["amsgrad" in taken for taken in values] == [False, True]


def test_l2_weight_decay_is_not_converted_into_that_of_bitsandbytes() -> None:
    metadata = saved(TWO, hyperparameters=(hyperparameters(torch.optim.Adam([PARAM])),))
    with pytest.raises(MismatchError, match="weight decay"):
        match_groups(metadata, bnb_engine(), keep_live=False, converted=True)
    match_groups(adam_saved(), bnb_engine(), keep_live=False, converted=True)


# --- hyperparameters of the live run ----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["fused", "capturable", "differentiable"])
def test_choices_of_implementation_stay_those_of_the_live_run(key: str) -> None:
    assert transferable({**ADAM, key: True}) == ADAM


def test_foreach_stays_that_of_the_live_run() -> None:
    assert transferable({**ADAM, "foreach": True}) == ADAM


def test_groups_that_differ_in_foreach_alone_may_be_merged() -> None:
    groups = [{**ADAM, "foreach": value} for value in (True, False)]
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=groups)
    match_groups(metadata, live(TWO), keep_live=False)


# --- other kinds of optimizers with states of the same names ----------------------------------------------------

LION = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}
CPU_ADAM = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
#: name -> kind, states, scalars, group
KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "CPULion": ("lion", MOMENTS, ("step",), LION),
    "CPUAdam": ("adam", MOMENTS, ("step",), {**CPU_ADAM, "amsgrad": False}),
    "FusedAdam": ("adam", MOMENTS, ("step",), CPU_ADAM),
}


def add_torch_kinds() -> None:
    for kind, optimizer in {
        "adam": torch.optim.Adam([PARAM]),
        "adamw": torch.optim.AdamW([PARAM]),
        "adam amsgrad": torch.optim.Adam([PARAM], amsgrad=True),
        "nadam": torch.optim.NAdam([PARAM]),
        "radam": torch.optim.RAdam([PARAM]),
        "adamax": torch.optim.Adamax([PARAM]),
        "sgd": torch.optim.SGD([PARAM], momentum=0.9),
        "adagrad": torch.optim.Adagrad([PARAM]),
        "rmsprop": torch.optim.RMSprop([PARAM]),
        "rmsprop momentum": torch.optim.RMSprop([PARAM], momentum=0.9),
        "rmsprop centered": torch.optim.RMSprop([PARAM], centered=True),
        "adadelta": torch.optim.Adadelta([PARAM]),
        "rprop": torch.optim.Rprop([PARAM]),
        "muon": torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 4))]),
        "bnb adam": bnb.optim.Adam([PARAM]),
        "bnb lion": bnb.optim.Lion([PARAM]),
    }.items():
        schema = schema_of(optimizer)
        stepped = OptimizerParam(optimizer.param_groups[0]["params"][0], 8, 0, 0)
        keys = tuple(state.key for state in schema.states(stepped) or ())
        KINDS[type(optimizer).__name__ + f" ({kind})"] = (
            kind.replace("adamw", "adam"),
            keys,
            schema.scalars(stepped) or (),
            hyperparameters(optimizer),
        )


add_torch_kinds()
#: Pairs that the hyperparameters would tell apart, and that pass all the same.
PASSED_OVER = [("RAdam (radam)", "CPULion")]


def from_one_to_the_other(was: str, now: str, with_defaults: bool) -> tuple[CheckpointMetadata, LocalState]:
    _, states, scalars, group = KINDS[was]
    _, live_states, live_scalars, live_group = KINDS[now]
    values = dict.fromkeys(TWO, tuple((key, 4.0) for key in sorted(scalars)))
    metadata = saved(TWO, states=states, scalars=values, hyperparameters=(group,))
    return metadata, engine(
        [LiveState(key, "float32") for key in live_states],
        scalars=live_scalars,
        group=live_group,
        optimizer=now,
        defaults=frozenset(live_group) - {"decoupled_weight_decay"} if with_defaults else frozenset(),
    )


@pytest.mark.parametrize("with_defaults", [True, False])
@pytest.mark.parametrize("was", KINDS)
def test_states_go_to_an_optimizer_of_the_same_kind_alone(was: str, with_defaults: bool) -> None:
    for now in KINDS:
        metadata, local_state = from_one_to_the_other(was, now, with_defaults)
        if KINDS[was][0] == KINDS[now][0]:
            assert matched(metadata, local_state).stateful == set(TWO)
        elif (was, now) not in PASSED_OVER:
            with pytest.raises(MismatchError) as caught:
                matched(metadata, local_state)
            assert now in str(caught.value.expected)
            assert WITHOUT_STATES in caught.value.remedies


@pytest.mark.parametrize(("was", "now"), PASSED_OVER)
def test_states_of_another_kind_whose_hyperparameters_are_more_are_refused(was: str, now: str) -> None:
    with pytest.raises(MismatchError):
        matched(*from_one_to_the_other(was, now, with_defaults=True))


def test_another_kind_is_refused_with_the_hyperparameters_of_both() -> None:
    radam = hyperparameters(torch.optim.RAdam([PARAM]))
    with pytest.raises(MismatchError, match="another kind of optimizer") as caught:
        matched(adam_saved(), engine([LiveState(key, "float32") for key in MOMENTS], group=radam, optimizer="RAdam"))
    assert "(live optimizer RAdam)" in str(caught.value.expected)
    assert "amsgrad" in str(caught.value.found)
    assert "amsgrad" not in str(caught.value.expected)


def test_hyperparameters_that_the_user_added_tell_nothing() -> None:
    added = {"mine": 1, "momentum": 0.9, "rho": 1, "initial_lr": 0.1}
    known = frozenset(ADAMW_GROUP)
    matched(saved(TWO, hyperparameters=({**ADAMW_GROUP, **added},)), adam_engine(defaults=known))
    matched(adam_saved(), adam_engine(group={**ADAMW_GROUP, **added}, defaults=known))
    sgd = hyperparameters(torch.optim.SGD([PARAM], momentum=0.9))
    for was, now in (({**sgd, "rho": 1}, sgd), (sgd, {**sgd, "rho": 1})):
        metadata = saved(TWO, states=("momentum_buffer",), scalars=dict.fromkeys(TWO, ()), hyperparameters=(was,))
        # without a scalar state and without a step, a parameter with a tensor state still has states
        local_state = engine(
            [LiveState("momentum_buffer", "float32")], scalars=(), group=now, defaults=frozenset(sgd), optimizer="SGD"
        )
        assert matched(metadata, local_state).stateful == set(TWO)


def test_every_saved_group_whose_members_take_part_is_looked_at() -> None:
    radam = hyperparameters(torch.optim.RAdam([PARAM]))
    metadata = saved(TWO, groups={"a.weight": 0, "b.weight": 1}, hyperparameters=(ADAMW_GROUP, radam))
    with pytest.raises(MismatchError, match="another kind") as caught:
        matched(metadata, adam_engine())
    assert "amsgrad" not in str(caught.value.found)
    matched(replace(metadata, groups=(ADAMW_GROUP, ADAMW_GROUP)), adam_engine())


def test_the_two_halves_of_deepspeeds_muon_are_not_compared() -> None:
    inline = {"use_muon": False, "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    with_helper = {**inline, "bias_correction": True, "amsgrad": False}
    for was, now in ((inline, with_helper), (with_helper, inline)):
        states = [LiveState(key, "float32") for key in MOMENTS]
        matched(saved(TWO, hyperparameters=(was,)), engine(states, group=now))
    for was, now in ((ADAMW_GROUP, inline), (inline, ADAMW_GROUP)):
        with pytest.raises(MismatchError, match="another kind"):
            matched(saved(TWO, hyperparameters=(was,)), engine(states, group=now))


def test_other_scalars_are_those_of_another_optimizer() -> None:
    values = dict.fromkeys(TWO, (("mu_product", 0.5), ("step", 4.0)))
    with pytest.raises(MismatchError, match="keeps other states") as caught:
        matched(adam_saved(scalars=values), adam_engine())
    assert "mu_product" in str(caught.value.found)
    some = {"a.weight": [("mu_product", 0.5), ("step", 4.0)], "b.weight": [("step", 4.0)]}
    with pytest.raises(DamagedError, match="not all of their scalar states"):
        matched(unpartitioned(adam_saved(scalars=some)), nadam())


def nadam() -> LocalState:
    states = [LiveState(key, "float32") for key in MOMENTS]
    return engine(states, scalars=("mu_product", "step"), apart=True)


# --- optimizers that are not known ------------------------------------------------------------------------------


def unknown(**more: Any) -> LocalState:
    return engine(None, scalars=None, **{"optimizer": "mine.Lion", **more})


def test_an_unknown_optimizer_adopts_elementwise_states_and_says_so() -> None:
    metadata = two_rows(saved(TWO, states=("m", "two")), "two")
    metadata = with_tensor(metadata, "a.weight", "m", dtype="bfloat16")
    matching = matched(metadata, unknown())
    m, two = matching.links[0]
    assert (m.live.key, m.live.layout, m.live.planes, m.live.dtype) == ("m", ELEMENTWISE, 1, "bfloat16")
    assert (two.live.key, two.live.layout, two.live.planes, two.live.blocks) == ("two", ELEMENTWISE, 2, None)
    assert sources(matching) == {"m": "m", "two": "two"}
    assert matching.scalars == ({"step": 4.0},)
    assert matching.restored == dict.fromkeys(("m", "two"), ("a.weight", "b.weight"))
    (note,) = matching.notes
    assert note == (
        "mine.Lion is not known: its states were taken as the checkpoint has them: m (elementwise), two (elementwise)"
    )


def test_an_unknown_optimizer_adopts_whatever_scalars_there_are() -> None:
    values = dict.fromkeys(TWO, (("d", 0.5), ("k", 2.0)))
    assert matched(saved(TWO, states=("m",), scalars=values), unknown()).scalars == ({"d": 0.5, "k": 2.0},)
    only_scalars = replace(saved(TWO, scalars=values), tensors=saved(TWO, states=()).tensors)
    matching = matched(only_scalars, unknown())
    assert matching.links == {0: ()}
    assert matching.scalars == ({"d": 0.5, "k": 2.0},)


def test_an_unknown_optimizer_adopts_replicated_states() -> None:
    matching = matched(everywhere(saved(TWO, states=("m",)), table()), unknown())
    _, link = matching.links[0]
    assert link == StateLink(LiveState("table", "float32", REPLICATED, shape=(5,)), "table", table())
    assert matching.outcomes == ()
    assert "m (elementwise), table (replicated)" in matching.notes[0]


def whole_states(shapes: Mapping[str, tuple[int, ...]] = TWO) -> CheckpointMetadata:
    metadata = unpartitioned(saved(shapes, states=("factor",)))
    for name in shapes:
        metadata = with_tensor(metadata, name, "factor", shape=(2, 1), has_own_shape=True)
    return metadata


def test_an_unknown_optimizer_adopts_whole_states_only_beside_whole_parameters() -> None:
    matching = matched(whole_states(), unknown(zero_stage=0, apart=True))
    for links in matching.links.values():
        assert [link.live for link in links] == [LiveState("factor", "float32", PER_PARAMETER, shape=(2, 1))]
    assert "factor (per-parameter)" in matching.notes[0]
    for stage, apart in ((0, False), (1, True), (3, True), (2, False)):
        with pytest.raises(UnsupportedError, match="a tensor for each parameter") as caught:
            matched(whole_states(), unknown(zero_stage=stage, apart=apart))
        assert '{"states": {"factor": "replicated"}}' in str(caught.value.remedy)  # of one shape, it may be a table


def test_an_unknown_optimizer_adopts_no_codes() -> None:
    metadata = saved(TWO, states=("state1",))
    chunk = replace(metadata.tensors["b.weight", "state1"].chunks[0], code=BlockCode(BLOCKS[0], 0, 0))
    coded = with_tensor(metadata, "b.weight", "state1", sources=chunks_of(chunk))
    with pytest.raises(MismatchError, match="keeps other states") as caught:
        matched(coded, unknown(apart=True))
    assert caught.value.parameter == "b.weight"
    matched(metadata, unknown(apart=True))


def test_an_unknown_optimizer_is_still_told_apart_by_its_hyperparameters() -> None:
    with pytest.raises(MismatchError, match="another kind"):
        matched(adam_saved(), unknown(group={"lr": 0.1, "momentum": 0.9}, defaults=frozenset({"lr", "momentum"})))
    matched(saved(TWO, hyperparameters=({"lr": 0.1, "mine": 1},)), unknown(group={"lr": 0.2}))


# --- states that are never cut ----------------------------------------------------------------------------------

TABLE = LiveState("table", "float32", REPLICATED, shape=(5,))
WITH_TABLE = (*(LiveState(key, "float32") for key in MOMENTS), TABLE)


def test_a_replicated_state_is_taken_from_one_of_its_copies() -> None:
    metadata = with_replicated(adam_saved(), "a.weight", table(file=0, byte_offset=1))
    metadata = with_replicated(metadata, "b.weight", table(file=3, byte_offset=7))
    matching = matched(metadata, engine(WITH_TABLE))
    assert matching.links[0][-1] == StateLink(TABLE, "table", table(file=0, byte_offset=1))
    assert matching.restored["table"] == ("a.weight", "b.weight")
    assert matching.outcomes == ()


@pytest.mark.parametrize(
    "other",
    [
        table(crc32=2),
        table(shape=(6,)),
        table(dtype="float64"),
        table(differs=True),
    ],
)
@pytest.mark.parametrize("name", list(TWO))
@pytest.mark.parametrize("known", [True, False])
def test_replicated_states_that_differ_are_refused_with_the_line_that_settles_it(
    other: ReplicatedState, name: str, known: bool
) -> None:
    metadata = with_replicated(everywhere(adam_saved(), table()), name, other)
    local_state = engine(WITH_TABLE) if known else unknown(group=ADAMW_GROUP)
    with pytest.raises(UnsupportedError, match="should be one for all partitions") as caught:
        matched(metadata, local_state)
    assert WITHOUT_STATES in caught.value.remedies
    configs = [each.config for each in caught.value.remedies if each.config]
    assert configs == ([{"states": {"table": "fresh"}}] if known else [])  # elementwise, its shape would have told
    assert caught.value.parameters == ("a.weight", "b.weight")
    assert caught.value.parameter == "a.weight, b.weight"


def test_a_replicated_state_that_is_declared_fresh_has_no_source() -> None:
    metadata = replace(adam_saved(), states=StateFacts(fresh=frozenset({"table"})))
    matching = matched(metadata, engine(WITH_TABLE))
    assert matching.links[0][-1] == StateLink(TABLE, "") and "table" not in matching.restored
    assert Outcome("table", "fresh", (), '"states" says so') in matching.outcomes


def test_replicated_states_of_flat_tensors_of_their_own_may_differ() -> None:
    metadata = with_replicated(everywhere(adam_saved(), table()), "b.weight", table(crc32=2))
    matching = matched(metadata, engine(WITH_TABLE, apart=True))
    assert [matching.links[flat][-1].replicated for flat in (0, 1)] == [table(), table(crc32=2)]


def test_what_bitsandbytes_kept_beside_its_states_and_keeps_no_more_is_told_of() -> None:
    metadata = everywhere(adam_saved(), table("gnorm_vec", differs=True), table("new_max1"))
    reason = "the live optimizer keeps no such state"
    expected = (Outcome("gnorm_vec", "ignored", (), reason), Outcome("new_max1", "ignored", (), reason))
    assert matched(metadata, adam_engine()).outcomes == expected


def test_any_other_replicated_state_that_the_live_optimizer_lacks_is_another_optimizers() -> None:
    for local_state in (adam_engine(), engine(WITH_TABLE)):
        with pytest.raises(MismatchError, match="keeps other states") as caught:
            matched(everywhere(adam_saved(), table(), table("another")), local_state)
        assert "another" in str(caught.value.found)


def lamb(**more: Any) -> LocalState:
    return bnb_engine((*CODES, NORM), **{"family": None, "optimizer": "LAMB8bit", **more})


def lamb_saved(dp: int = 1, stage: int = 1) -> CheckpointMetadata:
    metadata = everywhere(bnb_saved(), table("unorm_vec", shape=(1,), differs=True))
    return replace(metadata, source=replace(metadata.source, partition_degree=dp, zero_stage=stage))


def test_the_norm_of_an_update_starts_fresh_however_it_was_saved() -> None:
    matching = matched(lamb_saved(), lamb())
    assert matching.outcomes == (Outcome("unorm_vec", "fresh", (), "each step writes it before it reads it"),)
    assert matching.links[0][-1] == StateLink(NORM, "unorm_vec")
    assert set(matching.restored) == set(CODED)


@pytest.mark.parametrize(("dp", "stage"), [(1, 1), (2, 1), (1, 2), (4, 3)])
def test_lamb_at_another_topology_goes_on_a_little_differently_and_says_so(dp: int, stage: int) -> None:
    notes = matched(lamb_saved(dp, stage), lamb()).notes
    if (dp, stage) == (1, 1):
        assert notes == ()
        return
    (note,) = notes
    assert "LAMB8bit" in note
    assert "norm of each flat partition" in note
    assert matched(replace(bnb_saved(), source=lamb_saved(dp, stage).source), bnb_engine()).notes == ()


def test_lamb_and_adam_are_told_apart_by_the_norm() -> None:
    for metadata, local_state in ((lamb_saved(), bnb_engine()), (bnb_saved(), lamb())):
        with pytest.raises(MismatchError, match="another kind") as caught:
            matched(metadata, local_state)
        assert "unorm_vec" in f"{caught.value.expected} {caught.value.found}"


# --- opaque -----------------------------------------------------------------------------------------------------


def test_a_state_of_unknown_layout_is_refused_with_the_line_that_settles_it() -> None:
    metadata = replace(adam_saved(), states=StateFacts(opaque={"mine": "a list"}))
    with pytest.raises(UnsupportedError, match="'mine'") as caught:
        matched(metadata, adam_engine())
    assert caught.value.found == "a list"
    words = [each.config["states"]["mine"] for each in caught.value.remedies if each.config]
    assert words == ["replicated", "elementwise", "fresh"]
    assert WITHOUT_STATES in caught.value.remedies and BY_DEEPSPEED in caught.value.remedies
    metadata = replace(
        metadata, source=replace(metadata.source, format="dcp", by_rank=False, foreign="torch.distributed.checkpoint")
    )
    with pytest.raises(UnsupportedError, match="'mine'") as caught:
        matched(metadata, adam_engine())
    assert [each.config for each in caught.value.remedies if each.config] == [{"states": {"mine": "fresh"}}]


def test_codes_without_their_scales_are_damage() -> None:
    metadata = replace(bnb_saved(), states=StateFacts({"mine": "a list"}, {"state1": "12 scales"}))
    with pytest.raises(DamagedError, match="'state1'") as caught:
        matched(metadata, bnb_engine())
    assert (caught.value.parameter, caught.value.found) == ("state1", "12 scales")
    assert WITHOUT_STATES in caught.value.remedies


def test_codes_that_lost_their_scales_on_the_way_are_never_taken_for_values() -> None:
    """As "states" makes them."""
    metadata = bnb_saved()
    for name in TWO:
        for key in CODED:
            metadata = with_tensor(metadata, name, key, dtype="uint8")
    with pytest.raises(MismatchError):
        plan_load(metadata, bnb_engine(), LoadOptions())


def test_what_an_unknown_optimizers_states_start_with_is_not_guessed() -> None:
    metadata = replace(saved({"a.weight": (2, 5)}, states=("m",)), states=StateFacts())
    local_state = unknown()
    matching = match_parameters(metadata, local_state, strict=False)
    with pytest.raises(MismatchError, match="nor what its states start with") as caught:
        match_states(metadata, local_state, matching)
    assert caught.value.parameter == "b.weight"
    apart = unknown(apart=True)
    assert match_states(metadata, apart, match_parameters(metadata, apart, strict=False)).stateful == {"a.weight"}
    with pytest.raises(MismatchError, match="nor what its states start with"):
        matched(replace(saved(TWO, states=("m",)), states=StateFacts(fresh=frozenset({"n"}))), local_state)


def test_a_state_that_the_user_wants_left_starts_fresh_and_is_told_of() -> None:
    metadata = replace(saved(TWO, states=("exp_avg",)), states=StateFacts(fresh=frozenset({"exp_avg_sq"})))
    matching = matched(replace(metadata, groups=(ADAMW_GROUP,)), adam_engine())
    assert sources(matching) == {"exp_avg": "exp_avg", "exp_avg_sq": ""}
    assert matching.restored == {"exp_avg": ("a.weight", "b.weight")}
    assert Outcome("exp_avg_sq", "fresh", (), '"states" says so') in matching.outcomes


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({"maximize": True}, {}),
        ({"bias_correction": False}, {}),
        ({}, {"bias_correction": False}),
        ({}, {"maximize": True}),
    ],
)
def test_a_choice_that_the_other_adam_has_no_word_for_is_not_lost(was: dict[str, bool], now: dict[str, bool]) -> None:
    plain = {**ADAM, "amsgrad": False}
    usual = {"maximize": False, "bias_correction": True}
    for unusual in (True, False):
        kinds = [{key: values[key] if unusual else usual[key] for key in values} for values in (was, now)]
        metadata = replace(adam_saved(), groups=({**plain, **kinds[0]},))
        local_state = adam_engine(group={**plain, **kinds[1]})
        if unusual:
            with pytest.raises(MismatchError, match="cannot be expressed"):
                matched(metadata, local_state)
        else:
            assert matched(metadata, local_state).stateful == set(TWO)
