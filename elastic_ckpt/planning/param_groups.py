"""Param groups: whose hyperparameters live ones get, what these tell of the optimizer, and values of each rank. Pure.

Groups get the hyperparameters of saved ones by membership, not by position. DeepSpeed saves neither class nor name of
an optimizer: states and hyperparameters tell its kind.

Scalar states and hyperparameters in which the ranks of a save differ were computed of what each rank owned. A rank that
holds just that again gets them back. Of another partition they say nothing: they are left out if each step computes
them before it uses them, else refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.chunks import ChunkSource
from elastic_ckpt.core.local_state import SAVED_OPTIMIZER, FlatPartition, LiveGroup, LocalState
from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import NO_SCHEDULER, Outcome, SavedRate, SchedulerPlan
from elastic_ckpt.core.state_kinds import SCRATCH
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import PerRank, common, differing, left_in_file, of_rank, refuse_left_in_file
from elastic_ckpt.errors import BY_DEEPSPEED, ITS_OPTIMIZER, MADE_ANEW, MismatchError, Remedy, UnsupportedError, listed
from elastic_ckpt.planning.hyperparameters import refuse_strange_hyperparameters

_INITIAL_LR = "initial_lr"
_DECOUPLED = "decoupled_weight_decay"
_DECAYS = ("L2 (Adam)", "decoupled (AdamW)")
#: Members, display names, and implementation choices, which do not affect training: the live run's are kept. So is the
#: kind of weight decay, which has to be the same.
_LIVE_KEYS = {"params", "param_names", "name", "foreach", "fused", "capturable", "differentiable", _DECOUPLED}
#: Family -> the names its members give to the same states.
_FAMILIES: Mapping[str, tuple[tuple[str, ...], ...]] = {"adam": (("exp_avg", "exp_avg_sq"), ("state1", "state2"))}
#: Hyperparameters that distinguish kinds of optimizers.
_MARKS = frozenset(
    {"betas", "momentum", "dampening", "nesterov", "rho", "centered", "lr_decay", "etas", "lambd"}
    | {"beta2_decay", "ns_steps", "ns_method", "momentum_decay", "initial_accumulator_value", "eps", "use_muon", "d"}
)
#: Values that an optimizer without these hyperparameters implies.
_USUAL = {"maximize": False, "bias_correction": True}
_ADAM_MARKS = frozenset({"amsgrad", "bias_correction"})
#: State of bitsandbytes' LAMB and LARS only: the norm of an update.
UPDATE_NORM = "unorm_vec"
#: Scalar states that each step of an optimizer computes before it uses them, by its class.
_RECOMPUTED: Mapping[str, Collection[str]] = {
    "transformers.optimization.Adafactor": {"RMS"},
    "galore_torch.adafactor.Adafactor": {"RMS"},
    "came_pytorch.CAME.CAME": {"RMS"},
    "pytorch_optimizer.optimizer.adafactor.AdaFactor": {"RMS"},
    "pytorch_optimizer.optimizer.came.CAME": {"RMS"},
    "pytorch_optimizer.optimizer.lamb.Lamb": {"weight_norm", "adam_norm", "trust_ratio"},
}
_FRESH = '"states" says so'
_ANEW = "each step computes it of what the rank holds, before it uses it"
#: Per live group, the saved groups that its values come from, and the values; empty if the live ones stay.
#: Of one param group; optimizers have a dozen.
_MOST_HYPERPARAMETERS = 1 << 12
Groups = tuple[tuple[tuple[int, ...], ...], tuple[Mapping[str, Any], ...]]
NO_GROUPS: Groups = ((), ())


def match_groups(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    keep_live: bool,
    with_states: bool = True,
    converted: bool = False,
    kept_live: Collection[str] = (),
    scheduled: Collection[str] = (),
) -> Groups:
    """Find hyperparameters for every live group, which keeps its own if ``keep_live``, else those of ``kept_live``.

    ``scheduled``: those that a restored lr scheduler sets, whatever a group has.
    ``with_states``: states are restored too, so that both optimizers must be of one kind; ``converted``: another
    optimizer saved them, so that only common hyperparameters are restored. Raises :class:`MismatchError` if members of
    one live group have different saved hyperparameters, or weight decay is of another kind, and
    :class:`UnsupportedError` if a hyperparameter that is restored was not read as a whole.
    """
    if not metadata.groups and not with_states and not keep_live:  # a scheduler's lists are in the order of groups
        return tuple((number,) for number in range(len(local_state.groups))), ()
    sources: list[tuple[int, ...]] = []
    hyperparameters: list[Mapping[str, Any]] = []
    members = groups_of_members(metadata, local_state)
    if not keep_live:
        _refuse_many(metadata, members)
    for number, group in enumerate(local_state.groups):
        found = list(members[number])
        live = group.hyperparameters.get(_DECOUPLED)
        for source in found if with_states and live is not None else ():
            # Adam and AdamW keep the same states; one flag decides what their weight decay means
            if (was := metadata.groups[source].get(_DECOUPLED, live)) != live:
                problem = f"weight decay of param group {number} is of another kind"
                both = f"{_DECAYS[bool(live)]} in the live optimizer", f"{_DECAYS[bool(was)]} in the checkpoint"
                raise MismatchError(problem, None, *both, parameter=group.names, remedy=ITS_OPTIMIZER)
        if keep_live or not all(metadata.groups[source] for source in found):
            found = []  # by the user's choice, or because there are none (BLOOM's universal checkpoint)
        every = [transferable(metadata.groups[source]) for source in found]
        values = [{key: value for key, value in each.items() if key not in kept_live} for each in every]
        if any(value != values[0] for value in values):
            raise _mixed(metadata, number, group, dict(zip(found, values, strict=True)), scheduled)
        taken = values[0] if values else {}
        if converted:
            known = {*group.hyperparameters, _INITIAL_LR}
            taken = {key: value for key, value in taken.items() if key in known}
        sources.append(tuple(found))
        hyperparameters.append(taken)
    if with_states:
        _refuse_hyperparameters(metadata, local_state.groups, hyperparameters)
    return tuple(sources), tuple(hyperparameters)


def _refuse_many(metadata: CheckpointMetadata, members: Iterable[Iterable[int]]) -> None:
    """Refuse saved groups with more hyperparameters than optimizers have: each live group takes them."""
    for source in sorted({*chain.from_iterable(members)}):
        if (count := len(metadata.groups[source])) > _MOST_HYPERPARAMETERS:
            problem = f"saved param group {source} has more hyperparameters than any optimizer"
            expected = f"at most {_MOST_HYPERPARAMETERS}"
            remedy = Remedy("keeps the live ones", config={"param_groups": "keep_live"})
            raise UnsupportedError(problem, metadata.source.folder, expected, str(count), remedy=remedy)


def _refuse_hyperparameters(
    metadata: CheckpointMetadata, groups: Sequence[LiveGroup], hyperparameters: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse what no optimizer takes, and then what this version does not read: DeepSpeed's loader might get that."""
    for number, (group, taken) in enumerate(zip(groups, hyperparameters, strict=True)):
        refuse_strange_hyperparameters(metadata, number, group, taken)
    for group, taken in zip(groups, hyperparameters, strict=True):
        refuse_left_in_file(taken, group.names, metadata.source.folder)


def groups_of_members(metadata: CheckpointMetadata, local_state: LocalState) -> tuple[tuple[int, ...], ...]:
    """Per live group, the saved groups that its members were in; empty if they were in none."""
    every: list[tuple[int, ...]] = []
    for number, group in enumerate(local_state.groups):
        found = sorted({metadata.parameters[name].group for name in group.names if name in metadata.parameters})
        if not metadata.parameters and len(metadata.groups) == 1:  # of weights alone, which has no members
            found = [0]
        elif not group.names and len(metadata.groups) == len(local_state.groups):
            has_members = any(saved.group == number for saved in metadata.parameters.values())
            found = [] if has_members else [number]  # all its members are frozen, saved and live
        every.append(tuple(found))
    return tuple(every)


def keys_of_new_scheduler(metadata: CheckpointMetadata, local_state: LocalState) -> frozenset[str]:
    """What an lr scheduler begins with that the engine does not have, and that no saved run had; none if there is none.

    torch's mark the param groups of their optimizer, which are saved with them.
    """
    live = set[str]().union(*(group.hyperparameters for group in local_state.groups))
    saved = set[str]().union(*metadata.groups)
    if _INITIAL_LR not in live or _INITIAL_LR in saved or "lr" not in saved:
        return frozenset()
    momenta = {"momentum", "betas"} if "max_momentum" in live else set()
    return frozenset({"lr", *momenta})


def rates_of_members(metadata: CheckpointMetadata, local_state: LocalState) -> tuple[SavedRate | None, ...]:
    """Per live group, the learning rate with which its members were saved; ``None`` if none was."""
    rates: list[SavedRate | None] = []
    for live in local_state.groups:
        sources = sorted({metadata.parameters[name].group for name in live.names if name in metadata.parameters})
        found = [metadata.groups[source].get("lr") for source in sources]
        is_one = bool(found) and isinstance(found[0], (int, float)) and all(rate == found[0] for rate in found)
        rates.append(SavedRate(sources[0], found[0] if is_one else None) if sources else None)
    return tuple(rates)


def saved_values(
    metadata: CheckpointMetadata, local_state: LocalState, sources: Sequence[Sequence[int]], keys: Set[str]
) -> tuple[Mapping[str, Any], ...]:
    """Per live group, the saved values of some hyperparameters, without those that differ or that it cannot have."""
    every: list[Mapping[str, Any]] = []
    for number, found in enumerate(sources):
        of_sources = [metadata.groups[source] for source in found]
        first = of_sources[0] if of_sources else {}
        values = {}
        for key in keys & first.keys():
            is_common = all(each.get(key) == first[key] for each in of_sources)
            if not is_common or any(left_in_file(first[key])):
                continue
            with suppress(MismatchError):
                refuse_strange_hyperparameters(metadata, number, local_state.groups[number], {key: first[key]})
                values[key] = first[key]
        every.append(values)
    return tuple(every)


def _mixed(
    metadata: CheckpointMetadata,
    number: int,
    group: LiveGroup,
    saved: Mapping[int, Mapping[str, Any]],
    scheduled: Collection[str],
) -> MismatchError:
    """The error for a live group whose members were saved with different values.

    ``saved``: those of each group; ``scheduled``: what a restored lr scheduler sets.
    """
    keys = sorted(set().union(*saved.values()))
    first = next(iter(saved.values()))
    differ = [key for key in keys if any(values.get(key) != first.get(key) for values in saved.values())]
    shown = {source: {key: values.get(key) for key in differ} for source, values in saved.items()}
    live = {key: group.hyperparameters.get(key) for key in differ}
    group_of = {name: metadata.parameters[name].group for name in group.names if name in metadata.parameters}
    members = {source: [name for name in group_of if group_of[name] == source] for source in saved}
    changed = [name for source, names in members.items() if shown[source] != live for name in names]
    found = "; ".join(
        f"saved group {source}, {counted(len(members[source]), 'parameter')} such as {members[source][0]}: {values}"
        for source, values in shown.items()
    )
    rebuild = (
        "build the param groups as they were when the checkpoint was saved (a rule that looks at param.shape sees "
    )
    rebuild += "[0] under ZeRO-3: look at param.ds_shape)"
    kept = _as_kept(live, scheduled, len(group.names), len(changed))
    remedy = Remedy(rebuild), Remedy(kept, config={"param_groups": "keep_live"})
    problem = f"param group {number} now mixes parameters whose saved groups had different hyperparameters"
    expected = "one set of hyperparameters for the group"
    return MismatchError(problem, None, expected, found, parameter=changed or group.names, remedy=remedy)


def _as_kept(live: Mapping[str, Any], scheduled: Collection[str], members: int, changed: int) -> str:
    """What a group has that keeps its ``live`` values, of those in which its saved groups differ."""
    set_anyway = [key for key in live if key in scheduled]
    values = {key: value for key, value in live.items() if key not in scheduled}
    text = "is a different training: it "
    if not set_anyway:
        return f"{text}keeps {values} for all {counted(members, 'parameter')}, which changes {changed} of them"
    if values:
        text += f"keeps {values} for all {counted(members, 'parameter')}, and "
    text += f"gives them one {listed(set_anyway)}, that of the restored lr scheduler for this group"
    return f"{text}, where the saved groups have several"


def transferable(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a saved group that a live group takes."""
    return {key: value for key, value in saved.items() if key not in _LIVE_KEYS and not key.startswith("_ds_")}


def renamed_states(
    metadata: CheckpointMetadata, local_state: LocalState, name: str, saved: frozenset[str], live: frozenset[str]
) -> Mapping[str, str] | None:
    """Live state -> saved state, if both optimizers are of one family and name states differently; else ``None``."""
    parameter = metadata.parameters[name]
    tensors = [metadata.tensors.get((name, key)) for key in saved]  # members of one flat tensor may differ in states
    plain = all(tensor is None or tensor.shape == parameter.shape for tensor in tensors)
    if not plain or any(state.key == UPDATE_NORM for state in parameter.replicated):
        return None
    if saved == set(_FAMILIES["adam"][0]) and not _is_adam(metadata.groups[parameter.group]):
        return None  # another optimizer with states of these names
    of_family = {frozenset(names): names for names in _FAMILIES.get(local_state.family or "", ())}
    return dict(zip(of_family[live], of_family[saved], strict=True)) if {live, saved} <= of_family.keys() else None


def saved_optimizer(metadata: CheckpointMetadata) -> str:
    """The optimizer that saved a checkpoint, for messages: its tensor states and hyperparameters tell."""
    keys = metadata.state_keys
    group = metadata.groups[0] if metadata.groups else {}
    if "state1" in keys:
        return f"a bitsandbytes optimizer with {listed(keys)}"
    if set(keys) == {"exp_avg", "exp_avg_sq"} and _is_adam(group):
        if "bias_correction" in group:
            return "DeepSpeed's or apex's Adam"
        return "torch.optim.AdamW" if group.get("decoupled_weight_decay") else "torch.optim.Adam"
    return f"an optimizer with {listed(keys) or 'no tensor states'}"


def refuse_other_kind(
    metadata: CheckpointMetadata, local_state: LocalState, flat: FlatPartition, names: Sequence[str], converted: bool
) -> None:
    """Refuse states that, by the hyperparameters, another kind of optimizer saved, unless they are ``converted``.

    Also a hyperparameter that only one Adam has, unless its value is the other's. Raises :class:`MismatchError`.
    """

    def other_kind(live: Iterable[str], saved: Iterable[str]) -> MismatchError:
        problem = "the checkpoint was saved by another kind of optimizer, whose states have the same names"
        expected = (listed(live) if live else "nothing") + f" (live optimizer {local_state.optimizer})"
        found = listed(saved) if saved else "nothing"
        return metadata.error(MismatchError, problem, names, expected, found, ITS_OPTIMIZER)

    own = local_state.groups[flat.group].hyperparameters if flat.group < len(local_state.groups) else {}
    live = {key: value for key, value in own.items() if key in local_state.defaults or not local_state.defaults}
    for number in sorted({metadata.parameters[name].group for name in names}):
        saved = metadata.groups[number]
        if not saved:  # as in BLOOM's universal checkpoint, which a note reports
            continue
        # the Adam half of Muon takes over what its helper optimizer knows
        if not converted and not ("use_muon" in own and "use_muon" in saved):
            # a user may have added entries that the optimizer does not know
            adams = _is_adam(saved) and (_is_adam(live) or bool(_ADAM_MARKS & (set(saved) - set(live))))
            unlike = not _MARKS & set(live) <= set(saved) or ("eps" in saved and "eps" not in live)
            if adams != _is_adam(live) or (unlike and not adams):
                raise other_kind(live, list(map(str, saved)))
        for key, usual in _USUAL.items():
            if own and (key in saved) != (key in own) and bool({**own, **saved}[key]) != usual:
                problem = f'"{key}" of param group {number} cannot be expressed in the other optimizer'
                expected, found = (group.get(key, f"{usual}, always") for group in (own, saved))
                both = f"{expected} (live optimizer {local_state.optimizer})", f"{found} in the checkpoint"
                raise metadata.error(MismatchError, problem, names, *both, ITS_OPTIMIZER)
    replicated = {state.key for state in metadata.parameters[names[0]].replicated}
    scratch = {state.key for state in flat.states or () if state.layout == SCRATCH}
    if (UPDATE_NORM in replicated) != (UPDATE_NORM in scratch) and flat.states is not None and not converted:
        raise other_kind(scratch, replicated)


def _is_adam(group: Mapping[str, Any]) -> bool:
    return "betas" in group and "eps" in group and bool(_ADAM_MARKS & set(group))


def with_own_values(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    config: ElasticConfig,
    scheduler: SchedulerPlan = NO_SCHEDULER,
) -> tuple[CheckpointMetadata, tuple[Outcome, ...]]:
    """The metadata with this rank's values alone, and those that are left out.

    What a restored lr ``scheduler`` sets is restored whatever the user leaves out: the live values are those of its
    beginning, where a warm-up's rate is 0.

    Raises :class:`UnsupportedError` for a value of ranks that owned something else, unless it is computed anew or the
    user leaves it out.
    """
    shared = {id(saved.scalars): saved.scalars for saved in metadata.parameters.values()}  # by those of a flat tensor
    states = {number: dict(scalars) for number, scalars in shared.items()}
    own = differing(chain(states.values(), metadata.groups))
    fresh = frozenset(key for key, word in state_options(config).schema.items() if word == "fresh")
    named = fresh.intersection(chain.from_iterable(chain(states.values(), metadata.groups)))
    if of_schedule := named & scheduler.sets:
        note = (
            f'"states" names {listed(of_schedule)}, which the restored lr scheduler sets: the first step has the saved '
        )
        note += 'one; with "param_groups": "keep_live", it has what the live scheduler has at the restored step'
        metadata = replace(metadata, notes=(*metadata.notes, note))
        named = named - of_schedule
    may_be = _RECOMPUTED if local_state.optimizer == SAVED_OPTIMIZER else (local_state.optimizer,)
    recomputed = frozenset(key for optimizer in may_be for key in _RECOMPUTED.get(optimizer, ()))
    anew = recomputed.intersection(chain.from_iterable(states.values())) - fresh
    if not (own or named or anew):
        return metadata, ()
    file = own_file(metadata, local_state)
    notes = metadata.notes
    left_out = named if file is not None else named | anew
    if file is None:
        _refuse(metadata, "optimizer state", states.values(), left_out)
        if config.param_groups == "match":
            _refuse(metadata, "hyperparameter", metadata.groups, named)
    elif own:
        notes += (f"ranks were saved with values of their own, and each has them again: {listed(own)}",)
    taken = {number: tuple(_taken(values, left_out, file).items()) for number, values in states.items()}
    parameters = {name: replace(saved, scalars=taken[id(saved.scalars)]) for name, saved in metadata.parameters.items()}
    of_live = {name: each.hyperparameters for each in local_state.groups for name in each.names}
    live = {saved.group: of_live[name] for name, saved in metadata.parameters.items() if name in of_live}
    groups = []
    for number, group in enumerate(metadata.groups):
        taken_here = _taken(group, named, file)
        own_now = live.get(number, {})
        known = own_now.keys() | taken_here.keys()
        values = {key: taken_here.get(key, own_now.get(key)) for key in group if key in known}
        if scheduler.sets_first_beta and "betas" in named and "betas" in values:
            values["betas"] = with_first_beta(group["betas"], values["betas"])
        groups.append(values)
    outcomes = tuple(Outcome(key, "fresh", (), _FRESH if key in named else _ANEW) for key in sorted(left_out))
    return replace(metadata, parameters=parameters, groups=tuple(groups), notes=notes), outcomes


def with_first_beta(of_first: Any, others: Any) -> Any:
    """``others`` with the first momentum of ``of_first``, where both are momenta."""
    are_momenta = all(isinstance(each, (list, tuple)) and len(each) > 1 for each in (of_first, others))
    return (of_first[0], *others[1:]) if are_momenta else others


def _taken(values: Mapping[str, Any], left_out: Collection[str], file: int | None) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in left_out}
    return common(kept) if file is None else of_rank(kept, file)


def _refuse(
    metadata: CheckpointMetadata, what: str, values: Collection[Mapping[str, Any]], left_out: Collection[str]
) -> None:
    """Refuse values in which ranks differ and that are not left out."""
    keys = [key for key in differing(values) if key not in left_out]
    if not keys:
        return
    source = metadata.source
    key = keys[0]
    problem = f"{what} {key!r} differs between ranks: each computed it of its own partition, and partitions differ "
    expected = f"the save's {counted(source.partition_degree, 'partition')} (ZeRO-{source.zero_stage}, TP={source.tp})"
    found = str(next(value for each in values if isinstance(value := each.get(key), PerRank)))[:200]
    fresh = {"states": dict.fromkeys(keys, "fresh")}
    way = Remedy(when=MADE_ANEW, config=fresh)
    if what == "hyperparameter":
        way = Remedy("leaves them as a new optimizer has them", config=fresh)
    raise metadata.error(UnsupportedError, f"{problem}now", keys, expected, found, (way, BY_DEEPSPEED))


def own_file(metadata: CheckpointMetadata, local_state: LocalState) -> int | None:
    """The file of the rank that owned just what this rank owns, in the same flat tensors; ``None``: there is none."""
    at = local_state.model.coordinates
    fragments = local_state.fragments
    if not metadata.source.by_rank:
        return None

    def masters(name: str) -> Iterator[tuple[ChunkSource, int]]:
        tensor = metadata.tensors.get((name, MASTER))
        for copy in () if tensor is None else (tensor, *metadata.replicas.get((name, MASTER), ())):
            if len(copy.sources) == at.tp:
                yield copy.sources[at.tp_rank], ITEMSIZE[copy.dtype]

    begins: dict[int, list[tuple[int, int]]] = {}  # by file: of each fragment, its flat tensor and where that begins
    for each in fragments:
        for source, itemsize in masters(each.name):
            for chunk in source.within(each.range.start, each.range.stop):
                if chunk.range == each.range:
                    begin = chunk.byte_offset - each.flat_offset * itemsize
                    begins.setdefault(chunk.file, []).append((each.flat, begin))
    for file, found in begins.items():
        flats = set(found)
        if len(found) == len(fragments) and len(flats) == len(dict(flats)) == len({begin for _, begin in flats}):
            every = (source.in_files({file}) for name in metadata.parameters for source, _ in masters(name))
            return file if sum(map(len, map(list, every))) == len(fragments) else None
    return None
