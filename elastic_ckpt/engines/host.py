"""The engine's own Python state: counters, scheduler, loss scaler, client state. All functions are local.

Follows ``DeepSpeedEngine._load_checkpoint`` (engine.py), whose meaning of every argument is kept.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.catalog import HostState
from elastic_ckpt.errors import MismatchError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadArguments:
    """Arguments of ``DeepSpeedEngine.load_checkpoint``, by their DeepSpeed names."""

    load_dir: str
    tag: str | None = None
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Any = None


def ds_config(engine: Any) -> Mapping[str, Any]:
    """The engine's DeepSpeed config as a dict, unknown top-level keys included."""
    return engine._config._param_dict or {}


def load_universal_flag(engine: Any) -> bool:
    """``"checkpoint": {"load_universal": true}`` in the DeepSpeed config."""
    return bool(engine.load_universal_checkpoint())


@contextmanager
def universal_flag_off(engine: Any) -> Iterator[None]:
    """Let DeepSpeed's own loader read a native checkpoint although ``load_universal`` was left on."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = False
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


def restores_scheduler(engine: Any, host: HostState, arguments: LoadArguments) -> bool:
    """Whether a load will restore the state of an lr scheduler."""
    wanted = arguments.load_lr_scheduler_states and not arguments.load_module_only
    return wanted and engine.lr_scheduler is not None and host.lr_scheduler is not None


def refuse_pending_gradients(engine: Any) -> None:
    """Gradients of the old weights that wait for a step would be mixed into the first step after the load.

    Raises:
        MismatchError: the engine is between backward and step.
    """
    partitions = getattr(engine.optimizer, "averaged_gradients", None)
    waiting = engine.zero_optimization_stage() == 3 and partitions and any(g is not None for g in partitions.values())
    if waiting or engine.micro_steps % engine.gradient_accumulation_steps():
        raise MismatchError(
            "the engine holds gradients that no step has used yet; they would be mixed into the restored run",
            expected="a load right after engine.step(), or before the first backward",
            found=f"micro step {engine.micro_steps} of {engine.gradient_accumulation_steps()} accumulation steps",
            remedy="finish the step with engine.step() (its result is overwritten), then load",
        )


class HostCommit:
    """Sets the engine's Python state, and can take it back until every rank is sure.

    Args:
        engine: the live engine.
        host: what the checkpoint holds.
        arguments: what the caller of ``load_checkpoint`` asked for.
    """

    def __init__(self, engine: Any, host: HostState, arguments: LoadArguments) -> None:
        self._engine = engine
        self._host = host
        self._arguments = arguments
        self._scheduler_before: Any = None
        self._groups_before: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def load_scheduler(self) -> None:
        """Load the learning-rate scheduler: a user's class, and so the one step of a commit that may fail."""
        scheduler, saved = self._engine.lr_scheduler, self._host.lr_scheduler
        if not restores_scheduler(self._engine, self._host, self._arguments):
            if self._arguments.load_lr_scheduler_states and (scheduler is None) != (saved is None):
                there, not_there = ("live engine", "checkpoint") if saved is None else ("checkpoint", "live engine")
                self.notes.append(f"lr scheduler: the {there} has one, the {not_there} has none; nothing is restored")
            return
        self._groups_before = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._engine.optimizer.param_groups
        ]
        self._scheduler_before = copy.deepcopy(scheduler.state_dict())
        scheduler.load_state_dict(copy.deepcopy(self._host.lr_scheduler))

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
            self._load_deepspeed_schedulers()
            if arguments.load_optimizer_states:
                self._load_loss_scaler()
        return self._client_state()

    def _load_deepspeed_schedulers(self) -> None:
        engine, saved = self._engine, self._host.checkpoint
        if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None and "random_ltd" in saved:
            engine.random_ltd_scheduler.load_state_dict(saved["random_ltd"])
        if engine.training_dataloader is not None and engine.curriculum_learning_enabled() and "data_sampler" in saved:
            engine.training_dataloader.data_sampler.load_state_dict(saved["data_sampler"])

    def _load_loss_scaler(self) -> None:
        optimizer, saved = self._engine.optimizer, self._host.loss_scaler
        optimizer.overflow = self._host.overflow
        if saved is None:
            return
        if type(saved) is not type(optimizer.loss_scaler):
            self.notes.append(
                f"loss scaler: the checkpoint has a {type(saved).__name__}, the config a "
                f"{type(optimizer.loss_scaler).__name__}, which is kept"
            )
            return
        if not getattr(saved, "dynamic", False):
            if saved.cur_scale != optimizer.loss_scaler.cur_scale:
                self.notes.append(
                    f"static loss scale: {saved.cur_scale} in the checkpoint, {optimizer.loss_scaler.cur_scale} in the "
                    "config, which is kept"
                )
            return
        values = {key: value for key, value in vars(saved).items() if key != "dtype"}
        vars(optimizer.loss_scaler).update(copy.deepcopy(values))

    def _client_state(self) -> dict[str, Any]:
        arguments = self._arguments
        own = {"module"}
        if not arguments.load_module_only:
            own |= {"skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler", "random_ltd"}
        if arguments.load_lr_scheduler_states:
            own.add("lr_scheduler")
        if arguments.load_optimizer_states:
            own.add("optimizer")
        saved = dict(self._host.checkpoint)
        saved["lr_scheduler"] = self._host.lr_scheduler
        saved["optimizer"] = None
        return {key: value for key, value in saved.items() if key not in own}
