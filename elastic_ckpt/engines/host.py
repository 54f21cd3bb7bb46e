"""The engine's own Python state: counters, scheduler, loss scaler, client state. All functions are local.

Follows ``DeepSpeedEngine._load_checkpoint`` (engine.py), whose meaning of every argument is kept.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ckpt import distributed
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.read_plan import Outcome, ReadPlan
from elastic_ckpt.core.training_state import TrainingState
from elastic_ckpt.engines.base import base_optimizer
from elastic_ckpt.engines.loss_scale import set_loss_scale
from elastic_ckpt.engines.megatron_runs import follow_topology, reseed
from elastic_ckpt.engines.schedulers import fit_scheduler
from elastic_ckpt.errors import MismatchError

logger = logging.getLogger(__name__)
#: Names under which training scripts keep the state of random number generators (Megatron's, torch's, numpy's).
_RANDOM = re.compile(r"(^|_)rng(_|$)|random_state", re.IGNORECASE)


@dataclass(frozen=True)
class LoadArguments:
    """Arguments of ``DeepSpeedEngine.load_checkpoint``, by their DeepSpeed names; and whether it has an optimizer."""

    load_dir: str
    tag: str | None = None
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Any = None
    has_optimizer: bool = True


def ds_config(engine: Any) -> Mapping[str, Any]:
    """The engine's DeepSpeed config as a dict, unknown top-level keys included."""
    return engine._config._param_dict or {}


def zero_param_shapes(engine: Any) -> Sequence[Mapping[str, Any]]:
    """Names and shapes in each flat buffer of a ZeRO optimizer, as DeepSpeed saves them (``param_shapes``). Local."""
    shapes: Sequence[Mapping[str, Any]] = engine._get_zero_param_shapes()
    return shapes


def load_universal_flag(engine: Any) -> bool:
    """``"checkpoint": {"load_universal": true}`` in the DeepSpeed config."""
    return bool(engine.load_universal_checkpoint())


@contextmanager
def universal_flag(engine: Any, value: bool) -> Iterator[None]:
    """Let DeepSpeed's own loader read what the folder holds, whatever ``load_universal`` says."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = value
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


def separate_steps(engine: Any) -> None:
    """Give every flat tensor a ``step`` of its own. Local.

    DeepSpeed's universal load of ZeRO-3 (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``) puts the same tensor
    into all of them, which torch's optimizers then advance once for each.
    """
    for state in getattr(base_optimizer(engine), "state", {}).values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def restores_scheduler(engine: Any, host: TrainingState, arguments: LoadArguments) -> bool:
    """Whether a load will restore the state of an lr scheduler."""
    wanted = arguments.load_lr_scheduler_states and not arguments.load_module_only
    return wanted and engine.lr_scheduler is not None and host.lr_scheduler is not None


def restores_states(arguments: LoadArguments) -> bool:
    """Whether optimizer states and hyperparameters are asked for, and there is an optimizer for them."""
    return arguments.has_optimizer and arguments.load_optimizer_states and not arguments.load_module_only


def refuse_pending_gradients(engine: Any) -> None:
    """Gradients of the old weights that wait for a step would be mixed into the first step after the load.

    Raises:
        MismatchError: the engine is between backward and step.
    """
    if _holds_gradients(engine) or engine.micro_steps % engine.gradient_accumulation_steps():
        raise MismatchError(
            "the engine holds gradients that no step has used yet; they would be mixed into the restored run",
            expected="a load right after engine.step(), or before the first backward",
            found=f"micro step {engine.micro_steps} of {engine.gradient_accumulation_steps()} accumulation steps",
            remedy="finish the step with engine.step() (its result is overwritten), then load",
        )


def _holds_gradients(engine: Any) -> bool:
    """Each optimizer keeps what backward made in a place of its own, and empties it in step."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        return any(param.grad is not None for param in engine.module.parameters())
    partitions = getattr(optimizer, "averaged_gradients", None) or {}
    in_bf16 = getattr(optimizer, "fp32_groups_has_gradients", ())  # BF16_Optimizer
    return any(gradient is not None for gradient in partitions.values()) or any(any(group) for group in in_bf16)


class HostCommit:
    """Sets the engine's Python state, and can take it back until every rank is sure.

    Args:
        engine: the live engine.
        host: what the checkpoint holds.
        arguments: what the caller of ``load_checkpoint`` asked for.
        place: where this rank stands.
    """

    def __init__(
        self, engine: Any, host: TrainingState, arguments: LoadArguments, place: RankCoordinates | None = None
    ) -> None:
        self._place = place or RankCoordinates()
        self._engine = engine
        self._host = host
        self._arguments = arguments
        self._consumed: set[str] = set()
        self._scheduler_before: Any = None
        self._groups_before: list[dict[str, Any]] = []
        self.outcomes: list[Outcome] = []

    def load_scheduler(self, plan: ReadPlan) -> None:
        """Load the learning-rate scheduler: a user's class, and so the one step of a commit that may fail."""
        scheduler, saved = self._engine.lr_scheduler, self._host.lr_scheduler
        if not restores_scheduler(self._engine, self._host, self._arguments):
            self._say_why_not(scheduler, saved)
            return
        self._groups_before = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._engine.optimizer.param_groups
        ]
        self._scheduler_before = copy.deepcopy(scheduler.state_dict())
        state = copy.deepcopy(saved)
        state = fit_scheduler(state, self._scheduler_before, plan.group_sources, plan.saved_groups)
        scheduler.load_state_dict(state)
        self.outcomes.append(Outcome("lr scheduler", "restored"))
        without = [number for number, source in enumerate(plan.group_sources) if not source]
        if without:
            rates = ", ".join(f"{self._engine.optimizer.param_groups[number]['lr']:g}" for number in without)
            reason = f"the schedule so far was not applied to these param groups, which go on from lr {rates}"
            self.outcomes.append(Outcome("lr scheduler", "fresh", tuple(map(str, without)), reason))

    def _say_why_not(self, scheduler: Any, saved: Any) -> None:
        if scheduler is None and saved is None:
            return
        if saved is None:
            outcome = Outcome("lr scheduler", "fresh", (), "the checkpoint holds none")
        elif scheduler is None:
            outcome = Outcome("lr scheduler", "ignored", (), "the live engine has none")
        else:
            outcome = Outcome("lr scheduler", "skipped", (), "not asked for")
        self.outcomes.append(outcome)

    def undo_scheduler(self) -> None:
        """Take :meth:`load_scheduler` back: another rank could not do it."""
        if self._scheduler_before is None:
            return
        try:
            self._engine.lr_scheduler.load_state_dict(self._scheduler_before)
        except Exception:  # a scheduler that cannot load even its own state; the error to show is the first one
            logger.exception("elastic_ckpt could not give the lr scheduler its state back")
        for group, before in zip(self._engine.optimizer.param_groups, self._groups_before, strict=True):
            group.update(before)

    def finish(self) -> dict[str, Any]:
        """Set counters, loss scaler and schedulers of DeepSpeed's own; cannot fail.

        Returns:
            The client state that ``load_checkpoint`` returns.
        """
        engine, host, arguments = self._engine, self._host, self._arguments
        engine.loaded_checkpoint_dp_world_size = host.counters["dp_world_size"]
        if not arguments.load_module_only:
            steps = host.counters["global_steps"]
            engine.global_steps = steps
            engine.global_samples = host.counters.get("global_samples", steps * engine.train_batch_size())
            engine.skipped_steps = host.counters["skipped_steps"]
            engine.loaded_checkpoint_mp_world_size = host.counters["mp_world_size"]
            self.outcomes.append(Outcome("counters", "restored"))
            self._load_deepspeed_schedulers()
        self.outcomes += set_loss_scale(engine, host, wanted=restores_states(arguments))
        return self._client_state()

    def _load_deepspeed_schedulers(self) -> None:
        engine, saved = self._engine, self._host.checkpoint
        if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and "random_ltd" in saved:
            engine.random_ltd_scheduler.load_state_dict(saved["random_ltd"])
            self._consumed.add("random_ltd")
        if engine.training_dataloader is not None and engine.curriculum_learning_enabled() and "data_sampler" in saved:
            engine.training_dataloader.data_sampler.load_state_dict(saved["data_sampler"])
            self._consumed.add("data_sampler")

    def _client_state(self) -> dict[str, Any]:
        """What the caller gets back: as DeepSpeed's own loader gives it, and the states of a data sampler that no
        part of this engine has taken."""
        arguments = self._arguments
        own = {"module"}
        if not arguments.load_module_only:
            own |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size"}
            own |= {key for key in ("data_sampler", "random_ltd") if key in self._consumed or not self._saved(key)}
        if arguments.load_lr_scheduler_states:
            own.add("lr_scheduler")
        if arguments.load_optimizer_states:
            own.add("optimizer")
        saved = dict(self._host.checkpoint)
        saved["lr_scheduler"] = self._host.lr_scheduler
        saved["optimizer"] = None
        if "args" in saved:
            saved["args"] = follow_topology(saved["args"], self._place, distributed.rank())
        reseeded, seed = self._reseed(saved)
        saved |= reseeded
        if seed is None:
            self._say_whose_random_state(saved)
        return {key: value for key, value in saved.items() if key not in own}

    def _reseed(self, saved: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Random states of a Megatron run whose ranks of the model are others now."""
        if self._host.degrees == (self._place.tp, self._place.pp):
            return {}, None
        entries, seed = reseed(saved, self._place)
        if seed is not None:
            reason = (
                f"the model-parallel topology changed: seeded anew from args.seed ({seed}), as Megatron seeds a new run"
            )
            self.outcomes.append(Outcome("random state", "fresh", tuple(sorted(entries)), reason))
        return entries, seed

    def _saved(self, key: str) -> Any:
        return self._host.checkpoint.get(key)

    def _say_whose_random_state(self, saved: Mapping[str, Any]) -> None:
        """Random number generators differ between ranks; after a change of topology there is only rank 0's state."""
        random = tuple(sorted(key for key in saved if _RANDOM.search(key)))
        if random and not self._host.same_ranks:
            reason = (
                "the job has other ranks than the save; no generator is touched, and the client state holds rank 0's "
                "entries: give each rank a seed of its own rather than these"
            )
            self.outcomes.append(Outcome("random state", "skipped", random, reason))
