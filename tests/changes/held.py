"""What a script holds, and what of it is not right by names. Read through DeepSpeed's public getters; collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.changes.draw import Change
from tests.changes.scripts import NAMES, Live, canonical
from tests.distributed import truth as oracle
from tests.distributed.facts import on_all_ranks


@dataclass(frozen=True)
class Held:
    """What a job holds, by canonical name.

    Attributes:
        weights: as the forward pass sees them.
        masters: of what trains.
        states: by name and key.
        rates: learning rate and weight decay of what trains.
        base: a quantized base, as it is computed with.
        extra: a module's own state.
        ties: names of weights that have others, too.
    """

    weights: Mapping[str, torch.Tensor]
    masters: Mapping[str, torch.Tensor]
    states: Mapping[tuple[str, str], torch.Tensor]
    rates: Mapping[str, tuple[float, float]]
    buffers: Mapping[str, torch.Tensor]
    base: torch.Tensor | None
    extra: torch.Tensor | None
    steps: int
    ties: frozenset[str] = frozenset()


def held_by(run: Live) -> Held:
    """What a script holds. Collective."""
    engine = run.engine
    found: dict[str, Any] = {"masters": {}, "states": {}}
    if run.script.optimizer != "none":
        keys = oracle.state_keys(engine) if any(oracle.base_of(engine).state.values()) else []
        if keys:
            oracle.relink(engine)
        found = oracle.gather(engine, keys, may_lack=True)
    weights = oracle.low_precision(engine)
    extra = [module for module in engine.module.modules() if hasattr(module, "note")]
    aliases = _aliases(engine.module)
    return Held(
        _under_all_names(weights, aliases),
        _under_all_names(found["masters"], aliases),
        {(name, key): value for (at, key), value in found["states"].items() for name in aliases[at]},
        rates_of(run),
        {canonical(name): buffer.clone() for name, buffer in engine.module.named_buffers() if "base." not in name},
        _base_of(engine.module),
        extra[0].note.clone() if extra else None,
        engine.global_steps,
        frozenset(name for names in aliases.values() for name in names if len(names) > 1),
    )


def _aliases(module: torch.nn.Module) -> dict[str, list[str]]:
    """By the first name of a parameter, all of its canonical ones."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(param), name), []).append(canonical(name))
    return found


def _under_all_names(values: Mapping[str, Any], aliases: Mapping[str, list[str]]) -> dict[str, Any]:
    return {name: value.clone() for at, value in values.items() for name in aliases[at]}


def _base_of(module: torch.nn.Module) -> torch.Tensor | None:
    """The quantized base, as it multiplies."""
    for name, child in module.named_modules():
        if name.endswith("base") and hasattr(child, "weight"):
            with torch.no_grad():
                return child(torch.eye(64)).float().clone()  # type: ignore[no-any-return]
    return None


def rates_of(run: Live) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter that trains."""
    if run.script.optimizer == "none":
        return {}
    groups = oracle.base_of(run.engine).param_groups
    return {
        name: (float(group["lr"]), float(group["weight_decay"]))
        for group, names in zip(groups, run.names, strict=False)
        for name in names
    }


def wrong_of(
    change: Change, run: Live, truth: Held, before: Held, arguments: Mapping[str, Any], is_renamed: bool
) -> list[str]:
    """What is not right by names after a load.

    Args:
        truth, before: what the script held that saved, and what this one did before the load.
        arguments: of the load.
        is_renamed: whether saved names were given others, as an option says.
    """
    now = held_by(run)
    truth = _of_live_ties(truth, now, run)
    if change.files == "without frozen":
        # DeepSpeed leaves out the first name of what is tied, and saves it under the others
        lost = truth.weights.keys() - truth.masters.keys()
        lost = {name for name in lost if name not in truth.ties or not _is_as_saved(now.weights[name], name, truth)}
        truth = replace(truth, weights={name: truth.weights[name] for name in truth.weights.keys() - lost})
    # without states, masters are rounded through the weights, as DeepSpeed does it
    is_rounded = not _restores_states(arguments) or change.files == "without states"
    wrong = _wrong_weights(now, truth, before, is_rounded, is_renamed)
    if keeps_states(change, arguments):
        wrong += _wrong_states(now, truth, is_renamed)
    for name, buffer in now.buffers.items():
        if name in truth.buffers and not torch.equal(buffer, truth.buffers[name]):
            wrong.append(f"buffer {name} is not as saved")
    has_base = truth.base is not None and change.files != "without frozen"
    if has_base and now.base is not None and not torch.equal(now.base, truth.base):
        wrong.append("the quantized base is another")
    if now.extra is not None and truth.extra is not None and not torch.equal(now.extra, truth.extra):
        wrong.append("the module's own state is not as saved")
    return wrong


def in_names_of(truth: Held, change: Change) -> Held:
    """What was saved, as the live script names it."""
    pairs = list(zip(NAMES[change.saves.names], NAMES[change.loads.names], strict=True))

    def renamed(name: str) -> str:
        for old, new in pairs:
            name = name.replace(f".{old}.", f".{new}.")
        return name

    return replace(
        truth,
        weights={renamed(name): value for name, value in truth.weights.items()},
        masters={renamed(name): value for name, value in truth.masters.items()},
        states={(renamed(name), key): value for (name, key), value in truth.states.items()},
        rates={renamed(name): value for name, value in truth.rates.items()},
    )


def _wrong_weights(now: Held, truth: Held, before: Held, is_rounded: bool, is_renamed: bool) -> list[str]:
    wrong = []
    for name, weight in now.weights.items():
        if name.startswith("base."):
            continue
        has = now.masters.get(name, weight)
        if not torch.equal(weight, has.to(weight.dtype)):
            wrong.append(f"{name} is not its master")
        if name not in truth.weights:
            initial = before.masters.get(name, before.weights[name])
            as_it_was = [initial, initial.to(weight.dtype).to(has.dtype)] if is_rounded else [initial]
            if not any(torch.equal(has, one) for one in as_it_was) and not (is_renamed and _is_some(has, truth)):
                by = (has.float() - initial.float()).abs().max()
                wrong.append(f"{name} is neither saved nor as it was, by {by}")
            continue
        saved = truth.masters.get(name, truth.weights[name])
        if saved.shape != has.shape:
            rows = min(len(saved), len(has))
            dtype = weight.dtype if is_rounded else has.dtype
            if not torch.equal(has[:rows].to(dtype), saved[:rows].to(dtype)):
                wrong.append(f"{name} has not its rows")
        elif not _is_as_saved(has, name, truth, weight.dtype if is_rounded else None):
            wrong.append(f"{name} is not as saved")
    return wrong


def _wrong_states(now: Held, truth: Held, is_renamed: bool) -> list[str]:
    wrong = []
    # a weight that was tied is one more now: it has the weights of the tie, and its states begin
    new = {name for name in truth.ties if name not in now.ties}
    for at, value in now.states.items():
        saved = truth.states.get(at)
        is_zero = not value.count_nonzero()
        if saved is None:
            if not is_zero and not is_renamed:
                wrong.append(f"{at} is left over")
        elif saved.shape == value.shape and not torch.equal(value, saved) and not (at[0] in new and is_zero):
            wrong.append(f"{at} is not as saved")
    missing = {name for name, _ in truth.states} & now.masters.keys() - {name for name, _ in now.states} - new
    wrong += [f"{name} has no states" for name in sorted(missing)]
    if now.steps != truth.steps:
        wrong.append(f"{now.steps} steps in place of {truth.steps}")
    return wrong


def _of_live_ties(truth: Held, now: Held, run: Live) -> Held:
    """Where live names are tied and saved ones were not: all have the values of the one that the load took."""
    weights = dict(truth.weights)
    masters = dict(truth.masters)
    states = dict(truth.states)
    for names in _aliases(run.engine.module).values():
        known = [name for name in names if name in weights]
        taken = [name for name in known if _is_as_saved(now.masters.get(name, now.weights[name]), name, truth)]
        for name in known if taken else ():
            weights[name] = weights[taken[0]]
            masters |= {name: masters[taken[0]]} if taken[0] in masters else {}
            states |= {(name, key): value for (at, key), value in truth.states.items() if at == taken[0]}
    return replace(truth, weights=weights, masters=masters, states=states)


def _is_as_saved(value: torch.Tensor, name: str, truth: Held, rounded: torch.dtype | None = None) -> bool:
    """Whether it is the saved master, or the saved weight, which is all that some loads restore, in a live dtype."""
    weight = truth.weights[name]
    saved = [truth.masters.get(name, weight), weight]
    saved += [] if rounded is None else [one.to(rounded) for one in saved]
    return any(torch.equal(value, one.to(value.dtype)) for one in saved)


def _is_some(value: torch.Tensor, truth: Held) -> bool:
    """Whether it is any parameter's that was saved."""
    return any(one.shape == value.shape and torch.equal(one, value) for one in truth.masters.values())


def keeps_states(change: Change, arguments: Mapping[str, Any]) -> bool:
    """Whether a load restores optimizer states."""
    has_files = change.files != "without states"
    return has_files and _restores_states(arguments) and change.saves.optimizer == change.loads.optimizer


def _restores_states(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("load_optimizer_states") is not False and not arguments.get("load_module_only")


def keeps_schedule(change: Change, arguments: Mapping[str, Any]) -> bool:
    """Whether a load restores the schedule."""
    is_same = change.saves.scheduler == change.loads.scheduler and change.saves.scheduler != "none"
    return is_same and keeps_states(change, arguments) and arguments.get("load_lr_scheduler_states") is not False


def other_rates(now: Mapping[str, Any], saved: Mapping[str, Any], when: str = "") -> list[str]:
    """Parameters with another learning rate or weight decay than saved."""
    return [
        f"{name} has lr and weight decay {rates} in place of {saved[name]} {when}"
        for name, rates in now.items()
        if name in saved and any(abs(a - b) > 1e-12 for a, b in zip(rates, saved[name], strict=True))
    ]


def unsaid_by(change: Change, run: Live, truth: Held, report: Any) -> list[str]:
    """Parameters of one side alone that the report does not name. Collective."""
    told = {name for each in report.outcomes if each.what != "restored" for name in each.names}
    said = {canonical(name) for names in on_all_ranks(told) for name in names}
    is_weight = {name for name in truth.weights if not name.startswith("base.")}
    mine = {name for names in _aliases(run.engine.module).values() for name in names if not name.startswith("base.")}
    live_names = set().union(*on_all_ranks(mine))
    unsaid = [f"{name} is not restored, and the report does not say so" for name in live_names - is_weight - said]
    in_files = is_weight & truth.masters.keys() if change.files == "without frozen" else is_weight
    return unsaid + [f"{name} is not taken, and the report does not say so" for name in in_files - live_names - said]


def of_all_stages(mine: Held) -> Held:
    """What all ranks hold: those of a pipeline's stages have other layers. Collective."""
    everyone = on_all_ranks(mine)
    united = {
        name: {at: value for held in everyone for at, value in getattr(held, name).items()}
        for name in ("weights", "masters", "states", "rates", "buffers")
    }
    return replace(mine, **united)


def spoiled(truth: Held) -> Held:
    """With another element in one weight, so that a comparison can be seen to fail."""
    masters = {name: value.clone() for name, value in truth.masters.items()}
    weights = {name: value.clone() for name, value in truth.weights.items()}
    name = max(masters)
    masters[name].view(-1)[-1:] += 1
    weights[name].view(-1)[-1:] += 1
    return replace(truth, masters=masters, weights=weights)


def differences(now: Held, before: Held) -> tuple[str, ...]:
    """What of an engine is not as it was."""
    found = []
    for kind in ("weights", "masters", "states", "buffers"):
        then = getattr(before, kind)
        here = getattr(now, kind)
        found += [f"{kind} {at}" for at in then if at not in here or not torch.equal(then[at], here[at])]
    if now.rates != before.rates:
        found.append("rates")
    return tuple(found)
