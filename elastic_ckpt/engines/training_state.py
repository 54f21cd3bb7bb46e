"""The training state of a live engine: lr scheduler, counters, loss scale and client state. Local.

Arguments mean what they mean in ``DeepSpeedEngine._load_checkpoint`` (engine.py).
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from elastic_ckpt import distributed
from elastic_ckpt.core.kinds import is_count
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.read_plan import LoadPlan, Outcome, SchedulerPlan
from elastic_ckpt.core.values import BatchSizes, TrainingState
from elastic_ckpt.data.position import refuse_strange_position
from elastic_ckpt.engines.compat import is_dynamic, loss_scaler
from elastic_ckpt.engines.coordinates import follow_topology
from elastic_ckpt.engines.data_efficiency import load_own_state, own_schedulers, refuse_strange_state
from elastic_ckpt.engines.data_position import POSITION_KEY, counted_samples, position_of, registered, take_position
from elastic_ckpt.engines.schedule_kinds import refuse_strange_entries
from elastic_ckpt.engines.schedule_states import (
    BEGIN_ANEW,
    fit_scheduler,
    lacking_entries,
    refuse_other_scheduler,
    schedule_states,
)
from elastic_ckpt.engines.schedule_undo import state_and_undo
from elastic_ckpt.engines.schedules import apply_schedule, keys_of_start, keys_set_by, sets_first_beta_alone
from elastic_ckpt.errors import ElasticCkptError, MismatchError, Remedy, errors_of_file, shortened
from elastic_ckpt.report import DATA_POSITION

logger = logger_of(__name__)
#: Keys of random states in training scripts (Megatron's, torch's, numpy's).
_RANDOM = re.compile(r"(^|_)rng(_|$)|random_state", re.IGNORECASE)
#: An attribute of an object of the engine, and its new value.
Change = tuple[Any, str, Any]


@dataclass(frozen=True)
class LoadArguments:
    """Arguments of ``DeepSpeedEngine.load_checkpoint``, by their DeepSpeed names."""

    load_dir: str
    tag: str | None = None
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    others: tuple[str, ...] = ()  # names of those given that only DeepSpeed's own loader knows what to do with
    has_optimizer: bool = field(default=True, kw_only=True)  # of the engine

    @classmethod
    def of(cls, given: inspect.BoundArguments, has_optimizer: bool) -> LoadArguments:
        """The arguments of a call, bound by the signature of the installed DeepSpeed."""
        parameters = given.signature.parameters
        known = cls.__dataclass_fields__.keys() - {"others", "has_optimizer"}
        values = {name: value for name, value in given.arguments.items() if name in known}
        more = list(given.arguments.items())[1:]  # without the engine
        others = (name for name, value in more if name not in known and value is not parameters[name].default)
        return cls(**values, others=tuple(others), has_optimizer=has_optimizer)

    @property
    def restores_states(self) -> bool:
        """Whether optimizer states and hyperparameters are requested, and there is an optimizer for them."""
        return self.has_optimizer and self.load_optimizer_states and not self.load_module_only


class TrainingStateCommit:
    """A checkpoint's training state, ready to be set: whatever depends on its data is computed here, and can fail here.

    ``restored``: lr schedulers that have been restored otherwise, before the load.

    Then :meth:`load_schedulers` runs code of DeepSpeed and of the user, undone until every rank has succeeded; and
    :meth:`finish`, after tensors were overwritten, assigns attributes.
    """

    def __init__(
        self,
        engine: Any,
        saved: TrainingState,
        arguments: LoadArguments,
        at: RankCoordinates,
        restored: Sequence[Any] = (),
    ) -> None:
        self._engine = engine
        self._saved = saved
        self._arguments = arguments
        self._restored = restored
        self.scheduler = _scheduler_plan(engine.lr_scheduler, saved, arguments, restored)
        own = {} if arguments.load_module_only else own_schedulers(engine)
        self._own_schedulers = {key: each for key, each in own.items() if saved.checkpoint.get(key) is not None}
        for key, each in self._own_schedulers.items():
            with errors_of_file(saved.file):
                refuse_strange_state(key, each, saved.checkpoint[key])
        #: Whether :meth:`load_schedulers` has any to load.
        self.runs_code = self.scheduler.is_restored or bool(self._own_schedulers)
        self._undo = ExitStack()
        scale, changes = loss_scale_changes(engine, saved, wanted=arguments.restores_states)
        counters = saved.counters
        values = {"loaded_checkpoint_dp_world_size": counters["dp_world_size"]}
        if not arguments.load_module_only:
            steps = counters["global_steps"]
            samples = counters.get("global_samples")
            if samples is None:
                saved_batch = saved.batch.global_batch
                samples = steps * (engine.train_batch_size() if saved_batch is None else saved_batch)
            values |= {"global_steps": steps, "global_samples": samples, "skipped_steps": counters["skipped_steps"]}
            values["loaded_checkpoint_mp_world_size"] = counters["mp_world_size"]
        self._changes = [*((engine, name, value) for name, value in values.items()), *changes]
        self.outcomes = scale if arguments.load_module_only else [Outcome("counters", "restored"), *scale]
        none = "the checkpoint holds none"
        self.outcomes += [Outcome(key, "fresh", (), none) for key in own if key not in self._own_schedulers]
        self._position = None if arguments.load_module_only else saved.checkpoint.get(POSITION_KEY)
        self._position_before = position_of(engine)
        if self._position is not None:  # also without a sampler: one may be registered later, or a Trainer takes it
            with errors_of_file(saved.file):
                refuse_strange_position(self._position)
        if not arguments.load_module_only and (sampler := registered(engine)) is not None:
            if self._position is not None:
                with errors_of_file(saved.file):
                    sampler.check(self._position)
                    sampler.refuse_uncounted(self._position, samples or 0)
                self.outcomes.append(Outcome(DATA_POSITION, "restored"))
            else:
                stays = f"{none}; the sampler continues after {self._position_before} samples"
                self.outcomes.append(Outcome(DATA_POSITION, "fresh", (), stays))
        if saved.left_out:
            why = "cannot be read: see the notes"
            self.outcomes.append(Outcome("client state", "skipped", tuple(saved.left_out), why))
        #: What DeepSpeed's own loader returns, and the states of its schedulers that the engine lacks.
        self.client_state = self._client_state(at)

    def load_schedulers(self, plan: LoadPlan) -> None:
        """Load the lr scheduler, a user's class, and those of DeepSpeed: random layerwise token dropping, data sampler.

        What fails may be half loaded: :meth:`undo_schedulers`.
        """
        with errors_of_file(self._saved.file):
            self.outcomes[:0] = self._load_lr_scheduler(plan)
        for key, own in self._own_schedulers.items():
            before = {key: each.copy() if isinstance(each, (dict, list)) else each for key, each in vars(own).items()}
            self._undo.callback(vars(own).update, before)
            self._undo.callback(np.random.set_state, np.random.get_state())  # which the sampler sets
            with errors_of_file(self._saved.file):
                load_own_state(key, own, self._saved.checkpoint[key])

    def _load_lr_scheduler(self, plan: LoadPlan) -> list[Outcome]:
        scheduler = self._engine.lr_scheduler
        saved = self._saved.lr_scheduler
        if scheduler is None:
            return [] if saved is None else [Outcome("lr scheduler", "ignored", (), "the live engine has none")]
        if not self.scheduler.is_restored:
            what, why = ("fresh", "the checkpoint holds none") if saved is None else ("skipped", "not asked for")
            if self.scheduler.kept_live and plan.restores_states:
                why += "; the live one restarts from the live lr"
            elif _is_among(scheduler, self._restored):
                why += "; the live one was restored before the load, and continues"
            return [Outcome("lr scheduler", what, (), why)]
        groups = self._engine.optimizer.param_groups
        before, undo = state_and_undo(scheduler, groups)
        state = fit_scheduler(copy.deepcopy(saved), before, plan.group_sources, plan.saved_groups)
        self._undo.callback(undo)
        _load_state(scheduler, state)
        why = "" if plan.saved_groups else "by the order of param groups, which the checkpoint does not record"
        why = "; ".join(filter(None, (why, lacking_entries(before, saved))))
        outcomes = [Outcome("lr scheduler", "restored", (), why)]
        without = [number for number, source in enumerate(plan.group_sources) if not source]
        if without and plan.restores_states:
            without = apply_schedule(scheduler, groups, without, (saved, before), plan.saved_rates)
        if without:
            rates = ", ".join(f"{groups[number]['lr']:g}" for number in without)
            kept = f"the schedule so far was not applied to these param groups, which continue from lr {rates}"
            outcomes.append(Outcome("lr scheduler", "fresh", tuple(map(str, without)), kept))
        return outcomes

    def undo_schedulers(self) -> None:
        """Undo :meth:`load_schedulers`, because a rank failed."""
        self._undo.close()

    def finish(self) -> None:
        """Set counters and loss scaler; cannot fail."""
        for target, name, value in self._changes:
            setattr(target, name, value)
        take_position(self._engine, self._position, self._position_before)

    def _client_state(self, at: RankCoordinates) -> dict[str, Any]:
        arguments = self._arguments
        saved = {**self._saved.checkpoint, "lr_scheduler": self._saved.lr_scheduler, "optimizer": None}
        own = {"module"}
        if not arguments.load_module_only:
            own |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size"}
            own |= {k for k in ("random_ltd", "data_sampler") if k in self._own_schedulers or saved.get(k) is None}
        own |= {"lr_scheduler"} if arguments.load_lr_scheduler_states else set()
        own |= {"optimizer"} if arguments.load_optimizer_states else set()
        reseeds = hasattr(saved.get("args"), "universal_checkpoint") and self._engine.load_universal_checkpoint()
        if "args" in saved and not reseeds:  # Megatron-DeepSpeed seeds anew if the saved degrees are not the live ones
            saved["args"] = follow_topology(saved["args"], at, distributed.rank())
        random = tuple(sorted(key for key in saved if isinstance(key, str) and _RANDOM.search(key)))
        if random and not (self._saved.same_ranks and self._saved.degrees == (at.tp, at.pp)):
            reason = "the topology differs from the saved one: generators keep their state, and the client state holds "
            reason += "rank 0's entries. Give each rank its own seed instead of these"
            self.outcomes.append(Outcome("random state", "skipped", random, reason))
        return {key: value for key, value in saved.items() if key not in own}


def _scheduler_plan(
    live: Any, saved: TrainingState, arguments: LoadArguments, restored: Sequence[Any]
) -> SchedulerPlan:
    """What becomes of an engine's lr scheduler; :class:`MismatchError` if the saved one is of another class."""
    wanted = live is not None and arguments.load_lr_scheduler_states and not arguments.load_module_only
    is_saved = saved.lr_scheduler is not None
    # ``None`` is the state of some
    is_restored = wanted and (is_saved or (hasattr(live, "state_dict") and live.state_dict() is None))
    if is_restored and is_saved:
        own_state = live.state_dict() if hasattr(live, "state_dict") else None
        with errors_of_file(saved.file):
            refuse_other_scheduler(live, own_state, saved.lr_scheduler)
            refuse_strange_entries(live, own_state, saved.lr_scheduler)
    # a framework that passes load_lr_scheduler_states=False has it in the client state, and restores it itself
    restored_later = any(schedule_states(saved.checkpoint))
    begins_anew = live is not None and not is_restored and not _is_among(live, restored)
    is_first = begins_anew and not restored_later
    first_beta = is_restored and sets_first_beta_alone(live)
    sets = keys_set_by(live) if is_restored else frozenset[str]()
    return SchedulerPlan(
        is_restored,
        sets - {"betas"} if first_beta else sets,
        first_beta,
        begins_anew,
        keys_of_start(live, saved.lr_scheduler) if is_first else frozenset(),
        live is None and not restored_later and not restored,
    )


def _is_among(scheduler: Any, others: Sequence[Any]) -> bool:
    return any(scheduler is other for other in others)


def _load_state(scheduler: Any, state: Any) -> None:
    """Let a scheduler load its state; what its class raises is a :class:`MismatchError`."""
    try:
        scheduler.load_state_dict(state)
    except ElasticCkptError:
        raise
    except Exception as error:
        keys = shortened(map(str, state)) if isinstance(state, Mapping) else f"the type {type(state).__name__}"
        problem = f"the live lr scheduler could not load the saved state, which has {keys}"
        expected = f"a state that {type(scheduler).__name__} loads"
        found = f"{type(error).__name__}: {error}"[:200]
        name = "lr_scheduler"
        raise MismatchError(problem, None, expected, found, parameter=name, remedy=BEGIN_ANEW) from error


def loss_scale_changes(engine: Any, saved: TrainingState, wanted: bool) -> tuple[list[Outcome], list[Change]]:
    """The outcome of the fp16 loss scaler, if a side has one, and its changes if ``wanted`` and both are of a kind."""
    scale = saved.loss_scale
    live = loss_scaler(engine)
    changes: list[Change] = []
    if wanted and hasattr(engine.optimizer, "overflow"):
        changes.append((engine.optimizer, "overflow", saved.overflow))
    if scale is None and (live is None or not wanted):
        return [], changes
    kind = "dynamic" if is_dynamic(live) else "static"
    shown = "" if scale is None else f"{scale.kind} scale of {scale.values['cur_scale']:g}"
    if scale is None:
        what = "fresh"
        why = f"the checkpoint was not trained in fp16; the config's {kind} scale"
    elif not wanted:
        what = "skipped"
        why = "not asked for"
    elif live is None:
        what = "ignored"
        why = f"the live engine does not train in fp16; saved: {shown}"
    elif scale.kind != kind:
        what = "fresh"
        why = f"the checkpoint has a {shown}, the config a {kind} one of {live.cur_scale:g}, which is used"
    else:
        what = "restored"
        why = shown
        changes += [(live, key, copy.deepcopy(value)) for key, value in scale.values.items() if hasattr(live, key)]
    return [Outcome("loss scale", what, (), why)], changes


def compare_batches(
    engine: Any, data_degree: int, saved: BatchSizes, refuse: bool, is_split: bool = False
) -> tuple[str, ...]:
    """Warnings about changes of the global batch and of the micro-batches per step.

    ``engine.train_batch_size()`` counts the tensor-parallel ranks of AutoTP too, each of which has the same samples.
    ``is_split``: a batch of the live loader is that of all ranks together, as it may have been in the saved run. Raises
    :class:`MismatchError` if something changed and ``refuse`` is set.
    """
    micro = engine.train_micro_batch_size_per_gpu()
    steps = engine.gradient_accumulation_steps()
    live = BatchSizes(micro * steps * (1 if is_split else data_degree), micro, steps)
    changes: list[str] = []
    if is_split and saved.global_batch != live.global_batch and None not in vars(saved).values():
        saved = replace(saved, global_batch=(saved.micro_batch or 0) * (saved.accumulation_steps or 0))
    if saved.global_batch not in (None, live.global_batch):
        sizes = f"{saved.global_batch} -> {live.global_batch} samples"
        changes.append(f"global batch: {sizes}; steps and learning rate no longer mean the same")
    if saved.accumulation_steps not in (None, live.accumulation_steps):
        of_steps = f"gradient_accumulation_steps: {saved.accumulation_steps} -> {live.accumulation_steps}"
        changes.append(f"{of_steps}, micro-batch: {saved.micro_batch} -> {live.micro_batch}")
    if changes and refuse:
        expected = f"{_as_config(saved)}, as in the checkpoint"
        found = f"{_as_config(live)} in the live engine"
        goes_on = Remedy("continues with a warning", config={"on_change": "warn"})
        remedy = Remedy("set them to fit the number of ranks"), goes_on
        raise MismatchError("; ".join(changes), expected=expected, found=found, remedy=remedy)
    return tuple(changes)


def _as_config(sizes: BatchSizes) -> str:
    return ", ".join(f'"{key}": {value}' for key, value in sizes.config.items())


def warn_of_data(saved: TrainingState) -> tuple[str, ...]:
    """Warnings about the data that a saved run had been fed: where it is not as the config and the counters say."""
    warnings = []
    samples = counted_samples(saved)
    steps = saved.counters["global_steps"]
    batch = saved.batch.global_batch
    if samples is not None and batch is not None and samples != steps * batch:
        text = f"the saved run's {steps} steps used {samples} samples, not {batch} each as in its config"
        warnings.append(f"{text}: a batch that set_train_batch_size ramps up is not restored; the config's is used")
    sampler = saved.checkpoint.get("data_sampler")
    fetched = sampler.get("consumed_samples") if isinstance(sampler, Mapping) else None
    if is_count(fetched) and samples is not None:
        text = f"DeepSpeed's data sampler continues after {fetched} samples that its loader had fetched, {samples} of"
        warnings.append(f"{text} them trained on; its own generator is in no checkpoint, so it draws different ones")
    return tuple(warnings)


def warn_of_unscaled_gradients(engine: Any, saved: TrainingState, saved_zero_stage: int) -> tuple[str, ...]:
    """A warning if a load crosses into or out of fp16 without ZeRO, where Adam's moments have another unit.

    In DeepSpeed 0.19 ``engine.backward`` scales the loss only for ``ZeROOptimizer``, but the step of ``FP16_Optimizer``
    and ``FP16_UnfusedOptimizer`` divides gradients by the scale regardless.
    """
    was_unscaled = saved.loss_scale is not None and saved_zero_stage == 0
    is_unscaled = engine.fp16_enabled() and engine.zero_optimization_stage() == 0
    this, other = ("the saved", "the live") if was_unscaled else ("the live", "the saved")
    warning = (
        "DeepSpeed's fp16 without ZeRO divides gradients by a loss scale that the loss was not multiplied with: "
        f"{this} run's gradients and Adam moments are that much smaller than {other} run's, and do not fit together"
    )
    return () if was_unscaled == is_unscaled else (warning,)
