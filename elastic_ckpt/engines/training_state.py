"""The training state of a live engine: lr scheduler, counters, loss scale and client state. Local.

Arguments mean what they mean in ``DeepSpeedEngine._load_checkpoint`` (engine.py).
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from elastic_ckpt import distributed
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.read_plan import LoadPlan, Outcome
from elastic_ckpt.core.training_state import TrainingState
from elastic_ckpt.engines.compat import is_dynamic, loss_scaler
from elastic_ckpt.engines.megatron_runs import follow_topology
from elastic_ckpt.errors import MismatchError

logger = logging.getLogger(__name__)
#: Keys of random states in training scripts (Megatron's, torch's, numpy's).
_RANDOM = re.compile(r"(^|_)rng(_|$)|random_state", re.IGNORECASE)
#: Lists with one entry per param group, in state dicts of ``torch.optim.lr_scheduler`` and of DeepSpeed; other lists;
#: and lists of inner schedulers' state dicts.
_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "eta_mins"}
)
_NOT_PER_GROUP = frozenset({"_milestones", "milestones", "_schedule_phases"})
_NESTED = "_schedulers"
#: Entries of the checkpoint with states of DeepSpeed's own schedulers.
_OWN_SCHEDULERS = ("random_ltd", "data_sampler")


@dataclass(frozen=True)
class LoadArguments:
    """Arguments of ``DeepSpeedEngine.load_checkpoint``, by their DeepSpeed names.

    Attributes:
        others: names of those given that only DeepSpeed's own loader knows what to do with.
        has_optimizer: whether the engine has one.
    """

    load_dir: str
    tag: str | None = None
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    others: tuple[str, ...] = ()
    has_optimizer: bool = field(default=True, kw_only=True)

    @classmethod
    def of(cls, given: inspect.BoundArguments, has_optimizer: bool) -> LoadArguments:
        """The arguments of a call, bound by the signature of the installed DeepSpeed."""
        parameters, known = given.signature.parameters, cls.__dataclass_fields__.keys() - {"others", "has_optimizer"}
        values = {name: value for name, value in given.arguments.items() if name in known}
        more = list(given.arguments.items())[1:]  # without the engine
        others = (name for name, value in more if name not in known and value is not parameters[name].default)
        return cls(**values, others=tuple(others), has_optimizer=has_optimizer)


def restores_scheduler(engine: Any, saved: TrainingState, arguments: LoadArguments) -> bool:
    """Whether a load restores the state of an lr scheduler; ``None`` is the state of some."""
    scheduler = engine.lr_scheduler
    if scheduler is None or arguments.load_module_only or not arguments.load_lr_scheduler_states:
        return False
    return saved.lr_scheduler is not None or (hasattr(scheduler, "state_dict") and scheduler.state_dict() is None)


def restores_states(arguments: LoadArguments) -> bool:
    """Whether optimizer states and hyperparameters are requested, and there is an optimizer for them."""
    return arguments.has_optimizer and arguments.load_optimizer_states and not arguments.load_module_only


#: An attribute of an object of the engine, and its new value.
Change = tuple[Any, str, Any]


class TrainingStateCommit:
    """A checkpoint's training state, ready to be set: whatever depends on its data is computed here, and can fail here.

    Then :meth:`load_schedulers` runs code of DeepSpeed and of the user, undone until every rank has succeeded; and
    :meth:`finish`, after tensors were overwritten, assigns attributes.

    Attributes:
        client_state: what DeepSpeed's own loader returns, and the states of its schedulers that the engine lacks.
        loads_scheduler: whether the lr scheduler's state is restored.
    """

    def __init__(
        self, engine: Any, saved: TrainingState, arguments: LoadArguments, coordinates: RankCoordinates | None = None
    ) -> None:
        self._engine, self._saved, self._arguments = engine, saved, arguments
        self._coordinates = coordinates or RankCoordinates()
        self.loads_scheduler = restores_scheduler(engine, saved, arguments)
        live = {} if arguments.load_module_only else _own_schedulers(engine)
        self._own_schedulers = {key: own for key, own in live.items() if saved.checkpoint.get(key) is not None}
        self._undo: list[Callable[[], None]] = []
        self._of_schedulers: list[Outcome] = []
        scale, changes = loss_scale_changes(engine, saved, wanted=restores_states(arguments))
        self._changes: list[Change] = [*self._counters(), *changes]
        self._others = [] if arguments.load_module_only else [Outcome("counters", "restored", ())]
        none = "the checkpoint holds none"
        self._others += [*scale, *(Outcome(key, "fresh", (), none) for key in live if key not in self._own_schedulers)]
        if saved.left_out:
            why = "cannot be read: see the notes"
            self._others.append(Outcome("client state", "skipped", tuple(saved.left_out), why))
        self.client_state = self._client_state()

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return (*self._of_schedulers, *self._others)

    @property
    def runs_code(self) -> bool:
        """Whether :meth:`load_schedulers` has any to load."""
        return self.loads_scheduler or bool(self._own_schedulers)

    def load_schedulers(self, plan: LoadPlan) -> None:
        """Load the lr scheduler, a user's class, and those of DeepSpeed: random layerwise token dropping, data sampler.

        What fails may be half loaded: :meth:`undo_schedulers`.
        """
        self._load_lr_scheduler(plan)
        for key, own in self._own_schedulers.items():
            self._undo.append(_restoring(own))
            own.load_state_dict(copy.deepcopy(self._saved.checkpoint[key]))

    def _load_lr_scheduler(self, plan: LoadPlan) -> None:
        scheduler, saved = self._engine.lr_scheduler, self._saved.lr_scheduler
        what, reason = "restored", ""
        if scheduler is None and saved is None:
            return
        if scheduler is None:
            what, reason = "ignored", "the live engine has none"
        elif not self.loads_scheduler:
            what, reason = ("fresh", "the checkpoint holds none") if saved is None else ("skipped", "not asked for")
        else:
            groups = self._engine.optimizer.param_groups
            before, restore = _kept(scheduler.state_dict() if hasattr(scheduler, "state_dict") else None)
            state = fit_scheduler(copy.deepcopy(saved), before, plan.group_sources, plan.saved_groups)
            self._undo.append(_reloading(scheduler, before, groups, restore))
            scheduler.load_state_dict(state)
            if not plan.saved_groups:
                reason = "by the order of param groups, which the checkpoint does not record"
            if without := [number for number, source in enumerate(plan.group_sources) if not source]:
                rates = ", ".join(f"{groups[number]['lr']:g}" for number in without)
                kept = f"the schedule so far was not applied to these param groups, which go on from lr {rates}"
                self._of_schedulers.append(Outcome("lr scheduler", "fresh", tuple(map(str, without)), kept))
        self._of_schedulers.insert(0, Outcome("lr scheduler", what, (), reason))

    def undo_schedulers(self) -> None:
        """Undo :meth:`load_schedulers`, because a rank failed."""
        for undo in reversed(self._undo):
            undo()

    def finish(self) -> None:
        """Set counters and loss scaler; cannot fail."""
        for target, name, value in self._changes:
            setattr(target, name, value)

    def _counters(self) -> Iterator[Change]:
        engine, counters = self._engine, self._saved.counters
        yield engine, "loaded_checkpoint_dp_world_size", counters["dp_world_size"]
        if not self._arguments.load_module_only:
            steps = counters["global_steps"]
            yield engine, "global_steps", steps
            samples = counters["global_samples"] if "global_samples" in counters else steps * engine.train_batch_size()
            yield engine, "global_samples", samples
            yield engine, "skipped_steps", counters["skipped_steps"]
            yield engine, "loaded_checkpoint_mp_world_size", counters["mp_world_size"]

    def _client_state(self) -> dict[str, Any]:
        arguments = self._arguments
        saved = {**self._saved.checkpoint, "lr_scheduler": self._saved.lr_scheduler, "optimizer": None}
        own = {"module"}
        if not arguments.load_module_only:
            own |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size"}
            own |= {key for key in _OWN_SCHEDULERS if key in self._own_schedulers or saved.get(key) is None}
        own |= {"lr_scheduler"} if arguments.load_lr_scheduler_states else set()
        own |= {"optimizer"} if arguments.load_optimizer_states else set()
        if "args" in saved:
            saved["args"] = follow_topology(saved["args"], self._coordinates, distributed.rank())
        random = tuple(sorted(key for key in saved if isinstance(key, str) and _RANDOM.search(key)))
        at = self._coordinates
        if random and not (self._saved.same_ranks and self._saved.degrees == (at.tp, at.pp)):
            reason = (
                "the job has other ranks than the save; no generator is touched, and the client state holds rank 0's "
                "entries: give each rank a seed of its own rather than these"
            )
            self._others.append(Outcome("random state", "skipped", random, reason))
        return {key: value for key, value in saved.items() if key not in own}


def _own_schedulers(engine: Any) -> dict[str, Any]:
    """DeepSpeed's own schedulers that the engine has, by their keys in a checkpoint."""
    found = {}
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None:
        found["random_ltd"] = engine.random_ltd_scheduler
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    return found


def _restoring(own: Any) -> Callable[[], None]:
    """What gives one of DeepSpeed's schedulers, and numpy's generator that the sampler sets, their state back."""
    before = {key: value.copy() if isinstance(value, (dict, list)) else value for key, value in vars(own).items()}
    random = np.random.get_state()

    def restore() -> None:
        vars(own).update(before)
        np.random.set_state(random)

    return restore


def _kept(values: Any) -> tuple[Any, Callable[[], None]]:
    """A deep copy in which tensors are the live ones, and what gives these their elements back."""
    tensors = list(_tensors_in(values))
    copies = [tensor.detach().clone() for tensor in tensors]

    def restore() -> None:
        for tensor, before in zip(tensors, copies, strict=True):
            tensor.detach().copy_(before)

    return copy.deepcopy(values, {id(tensor): tensor for tensor in tensors}), restore


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors_in(value)


def _reloading(
    scheduler: Any, before: Any, groups: Sequence[dict[str, Any]], restore_state: Callable[[], None]
) -> Callable[[], None]:
    """What gives an lr scheduler and the param groups their state back, live tensors in place."""
    kept = [_kept({key: value for key, value in group.items() if key != "params"}) for group in groups]

    def reload() -> None:
        try:
            scheduler.load_state_dict(before)
        except Exception:  # a scheduler that cannot load even its own state; the first error is the one to show
            logger.exception("elastic_ckpt could not give the lr scheduler its state back")
        restore_state()
        for group, (values, restore) in zip(groups, kept, strict=True):
            restore()
            group.update(values)

    return reload


def loss_scale_changes(engine: Any, saved: TrainingState, wanted: bool) -> tuple[list[Outcome], list[Change]]:
    """How the fp16 loss scaler and overflow flag are restored, if ``wanted`` and if both sides have one of a kind.

    Returns the outcome, or none if neither side trains in fp16, and what is to be set.
    """
    scale, live = saved.loss_scale, loss_scaler(engine)
    changes: list[Change] = []
    if wanted and hasattr(engine.optimizer, "overflow"):
        changes.append((engine.optimizer, "overflow", saved.overflow))
    if scale is None and (live is None or not wanted):
        return [], changes
    kind = "dynamic" if is_dynamic(live) else "static"
    shown = "" if scale is None else f"{scale.kind} scale of {scale.values['cur_scale']:g}"
    if scale is None:
        what, reason = "fresh", f"the checkpoint was not trained in fp16; the config's {kind} scale"
    elif not wanted:
        what, reason = "skipped", "not asked for"
    elif live is None:
        what, reason = "ignored", f"the live engine does not train in fp16; saved: {shown}"
    elif scale.kind != kind:
        what, reason = (
            "fresh",
            f"the checkpoint has a {shown}, the config a {kind} one of {live.cur_scale:g}, which counts",
        )
    else:
        what, reason = "restored", shown
        changes += [(live, key, copy.deepcopy(value)) for key, value in scale.values.items() if hasattr(live, key)]
    return [Outcome("loss scale", what, (), reason)], changes


def fit_scheduler(saved: Any, live: Any, sources: Sequence[Sequence[int]], saved_groups: int) -> Any:
    """The saved state of a scheduler, with its lists in the order of the live param groups.

    Args:
        saved, live: states, most often dicts; the live one gives the entries of groups without a source.
        sources: per live group, the saved groups that its hyperparameters come from.
        saved_groups: number of param groups in the checkpoint; 0 if it records none, which are then as the live ones.

    Raises:
        MismatchError: a list may or may not be per param group, or the scheduler treated merged groups differently.
    """
    count = saved_groups or len(sources)
    in_order = [tuple(source) for source in sources] == [(number,) for number in range(count)]
    if in_order and saved_groups:
        return saved
    if not isinstance(saved, Mapping):
        if not in_order and _may_go_by_group(saved, count):
            raise _unknown("its state", saved, "a state that has not as many entries as there were groups")
        return saved
    live = live if isinstance(live, Mapping) else {}
    fitted: dict[str, Any] = {}
    for key, value in saved.items():
        if key == _NESTED:
            inner = zip(value, [*(live.get(key) or ()), *({} for _ in value)], strict=False)
            fitted[key] = [fit_scheduler(state, now, sources, saved_groups) for state, now in inner]
        elif key in _PER_GROUP and isinstance(value, (list, tuple)):
            fitted[key] = _reorder(key, value, live.get(key), sources, count)
        elif not in_order and key not in _NOT_PER_GROUP and _may_go_by_group(value, count):
            raise _unknown(key, value, f"{key!r} has as many entries as there were groups")
        else:
            fitted[key] = value
    return fitted


def _may_go_by_group(value: Any, saved_groups: int) -> bool:
    """Whether anything in a value, at any depth, has as many entries as there were groups."""
    if isinstance(value, Mapping):
        numbered = len(value) == saved_groups and all(isinstance(key, int) for key in value)
        return numbered or any(_may_go_by_group(inner, saved_groups) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return len(value) == saved_groups or any(_may_go_by_group(inner, saved_groups) for inner in value)
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))  # of a tensor or an array
    return bool(shape) and shape[0] == saved_groups


def _reorder(key: str, saved: Sequence[Any], live: Any, sources: Sequence[Sequence[int]], count: int) -> list[Any]:
    if len(saved) != count:
        raise _unknown(key, saved, f"{count} entries, one for each saved group")
    if not all(sources) and (not isinstance(live, (list, tuple)) or len(live) != len(sources)):
        raise _unknown(key, live, f"the live scheduler has {len(sources)} entries, one for each live group")
    for merged in sources:
        if any(saved[source] != saved[merged[0]] for source in merged):
            raise _unknown(key, [saved[source] for source in merged], f"one value for merged groups {list(merged)}")
    return [saved[source[0]] if source else live[number] for number, source in enumerate(sources)]


def _unknown(key: str, value: Any, expected: str) -> MismatchError:
    return MismatchError(
        "param groups were rebuilt since the save, and it is not known how this lr scheduler keeps its state by group",
        expected=expected,
        found=f"{key}: {value!r}"[:200],
        remedy="build the groups as they were saved, or load with load_lr_scheduler_states=False",
    )
