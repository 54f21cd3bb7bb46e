"""Accessors of a live ``DeepSpeedEngine``'s private attributes, its tensors apart. All but the last are local.

What differs between the supported versions of DeepSpeed has a function here, whose docstring names the versions;
nothing else depends on the version.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from packaging.version import Version

from elastic_ckpt import distributed
from elastic_ckpt.config import CONFIG_KEY
from elastic_ckpt.core.flat_ranges import group_offsets
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.values import AHEAD, AT_SAVE, ONE_BIT_OPTIMIZERS, WITHIN_STEP, Features
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.errors import DamagedError, UnsupportedError

try:
    from deepspeed.runtime import torch_autocast
except ImportError:  # before 0.17.2
    torch_autocast = None

logger = logger_of(__name__)
#: Key of the map of all ranks' shards in the ``conversion`` of AutoTP's record (since 0.19.7).
AFFINE_MAP = getattr(constants, "AFFINE_MAP", None)
#: Lists of the flat fp32 masters of ZeRO-3, 1 and 2, one of which an optimizer has.
_FLAT_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
#: Optimizers that step once, on gradients of zeros, when they are built.
_STEP_WHEN_BUILT = frozenset({"FP16_Optimizer", "FP16_UnfusedOptimizer"})


def base_optimizer(engine: Any) -> Any:
    """The user's optimizer, inside DeepSpeed's or by itself; ``None`` if there is none."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def has_optimizer(engine: Any) -> bool:
    """Whether a live engine has an optimizer; ``trainer.validate`` and the like create it without one."""
    base = base_optimizer(engine)
    return base is not None and not isinstance(base, (DummyOptim, DeepSpeedZeRoOffload))


def live_features(engine: Any) -> Features:
    """Features of a live engine that decide who restores it."""
    base = base_optimizer(engine)
    groups = getattr(base, "param_groups", ())
    # DeepSpeed 0.19 dropped MiCS; older engines are a subclass of ZeRO-3's
    mics = type(engine.optimizer).__name__ == "MiCS_Optimizer"
    return Features(
        experts=tuple(engine.num_experts) if engine.has_moe_layers else (),
        expert_groups=tuple(sorted({str(group.get("name")) for group in groups if group.get("moe")})),
        one_bit=type(base).__name__.lower() in ONE_BIT_OPTIMIZERS,
        mics=engine.seq_dp_world_size if mics else 0,
    )


def same_features(engine: Any, saved: Features) -> bool:
    """Whether a checkpoint has the features of the live engine, as DeepSpeed's own loader expects."""
    live = live_features(engine)
    dp = engine.seq_dp_world_size
    # the files of a MiCS group that spans the job are those of ZeRO-3
    return replace(live, mics=live.mics or dp) == replace(saved, mics=saved.mics or dp)


def _first(owner: Any, *names: str) -> Any:
    """The first of some attributes that there is, if any."""
    return next((getattr(owner, name) for name in names if getattr(owner, name, None) is not None), None)


def flat_master_numels(engine: Any) -> list[int]:
    """Elements of each flat fp32 master of this rank, padding included, in ZeRO-3, 1 and 2; none without ZeRO."""
    return [master.numel() for master in _first(engine.optimizer, *_FLAT_MASTERS) or ()]


def partition_group(engine: Any) -> Any:
    """The process group over which ZeRO-3 partitions parameters but AutoEP's experts; of a device mesh, all ranks."""
    dense = (param.ds_process_group for param in engine.param_names if not hasattr(param, "ds_autoep_uc_meta"))
    return next(dense, engine.seq_data_parallel_group)


def dp_group_of(engine: Any) -> Any:
    """The process group over which the optimizer is partitioned, else the data-parallel group."""
    return _first(engine.optimizer, "dp_process_group") or engine.seq_data_parallel_group


def sharded_base_weights(engine: Any) -> dict[str, int]:
    """Degree of sharding by name, of the frozen weights of ``deepspeed.linear.OptimizedLinear`` that ranks share out.

    Each rank holds other values under one name, beside what ZeRO partitions.
    """
    found: dict[str, int] = {}
    for name, module in engine.module.named_modules():
        of_deepspeed = type(module).__module__.startswith("deepspeed.linear.")
        degree = getattr(module, "zero_shards", 1) if of_deepspeed and not getattr(module, "disabled", False) else 1
        if degree > 1:
            found[without_hidden(f"{name}.weight") if name else "weight"] = degree
    return found


def keeps_own_masters(engine: Any) -> bool:
    """Whether an optimizer without ZeRO keeps fp32 masters beside fp16 or bf16 weights."""
    return hasattr(engine.optimizer, "refresh_fp32_params")


def numbered_params(engine: Any) -> list[list[torch.nn.Parameter]]:
    """Parameters by param group, as an optimizer without ZeRO numbers them."""
    groups = getattr(engine.optimizer, "fp16_groups", None)
    return [list(group) for group in groups or (group["params"] for group in base_optimizer(engine).param_groups)]


def member_counts(engine: Any) -> list[int]:
    """Members of each param group in the base optimizer's state dict: flat tensors with ZeRO, else parameters."""
    groups = base_optimizer(engine).param_groups
    owners = getattr(engine.optimizer, "sub_group_to_group_id", None)  # ZeRO-3's groups have members while it saves
    if owners is None:
        return [len(group["params"]) for group in groups]
    counted = Counter(owners.values())
    return [counted[index] for index in range(len(groups))]


def holds_gradients(engine: Any) -> bool:
    """Whether the next step would use gradients that are there now. ``engine.micro_steps`` may count steps alone.

    ZeRO keeps buffers from step to step, and tells by a number whether the next backward adds to them. ZeRO-3 raises it
    when the next forward begins, before 0.18.5 when the backward ends. Zeros add nothing.
    """
    optimizer = engine.optimizer
    stage = engine.zero_optimization_stage()
    accumulated = False
    if not has_optimizer(engine):
        return False
    if hasattr(optimizer, "fp32_groups_has_gradients"):  # BF16_Optimizer
        accumulated = any(map(any, optimizer.fp32_groups_has_gradients))
    elif stage == 3:
        accumulated = optimizer.micro_step_id > 0 or getattr(optimizer, "_epilogue_ran_this_backward", False)
    elif stage:
        # until 0.15.1, it begins with 0 and is reset to -1
        initial = -1 if engine.micro_steps else getattr(stage_1_and_2, "INITIAL_MICRO_STEP_ID", 0)
        averaged = (*optimizer.averaged_gradients.values(), *getattr(optimizer, "all_grad_tensors", {}).values())
        accumulated = optimizer.micro_step_id > initial or any(each is not None for each in averaged)
    params = chain(*(_first(optimizer, "bit16_groups", "bf16_groups") or numbered_params(engine)))
    return accumulated or any(param.grad is not None and bool(param.grad.count_nonzero()) for param in params)


def loss_scaler(engine: Any) -> Any:
    """The object that scales the loss; ``None`` if the engine does not train in fp16.

    A ``LossScaler`` or ``DynamicLossScaler`` of the partitioned optimizers; of the others, a ``LossScaleConfig``
    (loss_scaler.py), or before DeepSpeed 0.18.6 the optimizer itself. All have the same fields.
    """
    if not engine.fp16_enabled():
        return None
    itself = engine.optimizer if hasattr(engine.optimizer, "cur_scale") else None
    return _first(engine.optimizer, "loss_scale_config", "loss_scaler") or itself


def fields_of_loss_scaler(engine: Any) -> frozenset[str]:
    """The attributes of the object that partitioned optimizers pickle in every precision; empty if there is none."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return frozenset(getattr(scaler, "__dict__", ()))


def flat_offsets(optimizer: Any, members: Sequence[Sequence[torch.nn.Parameter]]) -> list[list[int]]:
    """Offsets of parameters in flat buffers, by group: one after the other, unless ZeRO-1/2 (0.19.7) records others."""
    recorded: list[list[int]] | None = getattr(optimizer, "round_robin_bit16_offsets", None)
    return recorded or [group_offsets([param.numel() for param in params]) for params in members]


def has_comm_dtype(param: Any) -> bool:
    """Whether a ZeRO-3 parameter travels in a dtype of ``torch_autocast``; until 0.17.6, by the function's old name."""
    names = ("has_comm_dtype", "has_autocast_dtype")
    return any(getattr(torch_autocast, name)(param) for name in names if hasattr(torch_autocast, name))


def swaps_states(engine: Any) -> bool:
    """Whether optimizer states are swapped to NVMe."""
    return bool(getattr(engine.optimizer, "swap_optimizer", False))


def swaps_to_nvme(engine: Any) -> bool:
    """Whether a ZeRO-3 optimizer swaps states or parameters to NVMe. Before 0.19.7, an :class:`UnsupportedError`.

    Until then they are swapped from pinned memory alone. A CPU has none, so that no test of them could run.
    """
    swaps = any(getattr(engine.optimizer, name, False) for name in ("swap_optimizer", "params_in_nvme_and_cpu"))
    if swaps and Version(deepspeed.__version__) < Version("0.19.7"):
        problem = "the live engine swaps to NVMe, which is not tested before DeepSpeed 0.19.7"
        remedy = '"offload_optimizer": {"device": "cpu"} and "offload_param": {"device": "cpu"}'
        raise UnsupportedError(problem, found=f"DeepSpeed {deepspeed.__version__}", remedy=remedy)
    return swaps


def autotp_record(param: Any) -> Mapping[str, Any]:
    """AutoTP's record of how a parameter is cut (since 0.18); empty without one."""
    return getattr(param, getattr(constants, "DS_AUTOTP_UC_META", ""), None) or {}


def separate_steps(engine: Any) -> None:
    """Give every flat tensor its own ``step``: after DeepSpeed's universal load of ZeRO-3, all advance the same one."""
    for state in getattr(base_optimizer(engine), "state", {}).values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def ds_config(engine: Any) -> Mapping[str, Any]:
    """The engine's DeepSpeed config as a dict, unknown top-level keys included."""
    return engine._config._param_dict or {}


def _updated(engine: Any) -> Sequence[torch.Tensor]:
    """The tensors that the base optimizer updates: flat masters, which ZeRO-3 keeps out of the param groups."""
    in_groups = chain(*(group["params"] for group in base_optimizer(engine).param_groups))
    return _first(engine.optimizer, *_FLAT_MASTERS) or [param for param in in_groups if param.requires_grad]


def record_counts(engine: Any) -> None:
    """Let later saves state by how many steps the optimizer's counts are ahead of the counters now.

    DeepSpeed puts ``engine.config``, if it is a dict, into each file that it saves.
    """
    if has_optimizer(engine) and isinstance(getattr(engine, "config", None), dict):
        _write_record(engine, _counts_ahead(engine))


@contextmanager
def recorded_counts(engine: Any, within_step: bool) -> Iterator[None]:
    """Let a save state by how many steps the optimizer's counts are ahead of the counters at that save.

    They drift apart where something else than ``engine.step`` steps, as in Lightning Fabric, and after a reset.
    ``within_step``: whether the optimizer is in the middle of a step, which is recorded unless none has been counted.
    """
    before = getattr(engine, "config", None)
    if not has_optimizer(engine) or not isinstance(before, dict):
        yield
        return
    try:
        ahead = _counts_ahead(engine)
        record: dict[str, Any] = {**ahead, AT_SAVE: True} if ahead else {}
        if within_step and _has_moved(engine, ahead):
            record[WITHIN_STEP] = True
            text = "this save is made within a step of the optimizer, as by a signal handler: some parameters may have "
            text += "stepped and others not, so that loads will refuse it. Save after engine.step() has returned"
            logger.error(f"elastic_ckpt: {text}")
        _write_record(engine, record)
    except Exception as error:  # of an optimizer that counts otherwise; a save without it is better than none
        logger.warning("elastic_ckpt does not record in this save what the optimizer has counted: %s", error)
    try:
        yield
    finally:
        engine.config = before


def _has_moved(engine: Any, ahead: Mapping[str, Sequence[int]]) -> bool:
    """Whether a parameter may have stepped since the last step that was counted: by its count, if it has one."""
    base = base_optimizer(engine)
    states = [state for state in getattr(base, "state", {}).values() if isinstance(state, dict) and state]
    counts = any("step" in each for each in chain(states, base.param_groups))
    if states and not counts:
        return True  # as of SGD with momentum: nothing tells
    if not states and not counts and not any("betas" in group for group in base.param_groups):
        return True
    before = (engine.config.get(CONFIG_KEY) or {}).get(AHEAD, {})
    return ahead.get("step", []) != before.get("step", [])


def steps_beside(engine: Any) -> int:
    """Steps that the optimizer has taken without ``engine.step``, since the last load or the beginning."""
    if not has_optimizer(engine) or not isinstance(getattr(engine, "config", None), dict):
        return 0
    new = [int(type(engine.optimizer).__name__ in _STEP_WHEN_BUILT)]
    at_load = (engine.config.get(CONFIG_KEY) or {}).get(AHEAD, {})
    return max(0, max(_counts_ahead(engine).get("step", new)) - max(at_load.get("step", new)))


def _write_record(engine: Any, record: Mapping[str, Any]) -> None:
    section = dict(engine.config.get(CONFIG_KEY) or {})
    if section.pop(AHEAD, {}) != record:
        engine.config = {**engine.config, CONFIG_KEY: {**section, **({AHEAD: record} if record else {})}}


def _counts_ahead(engine: Any) -> dict[str, list[int]]:
    """By how many steps the optimizer's counts are ahead of the counters; none where they are as in a new run."""
    base = base_optimizer(engine)
    scaler = loss_scaler(engine)
    # some keep entries of no parameter, which are numbers or tensors
    states = [state for state in getattr(base, "state", {}).values() if isinstance(state, dict) and state]
    counted = [each["step"] for each in states if "step" in each]
    counted = counted or [group["step"] for group in base.param_groups if "step" in group]
    if states:
        has_waiting = any(not base.state.get(each) for each in _updated(engine))  # a param group that was added
    else:
        has_waiting = not counted and any("betas" in group for group in base.param_groups)
    if has_waiting and (counted or not states):
        counted = [*counted, 0]
    numbers = (each.item() if isinstance(each, torch.Tensor) and each.numel() == 1 else each for each in counted)
    steps = {int(number) for number in numbers if isinstance(number, (int, float)) and math.isfinite(number)}
    new = {"step": {int(type(engine.optimizer).__name__ in _STEP_WHEN_BUILT)}, "cur_iter": {0}}
    ahead = {"step": {step - engine.global_steps + engine.skipped_steps for step in steps}}
    if is_dynamic(scaler):
        ahead["cur_iter"] = {scaler.cur_iter - engine.global_steps}
    return {key: sorted(counts) for key, counts in ahead.items() if counts and counts != new[key]}


def is_dynamic(scaler: Any) -> bool:
    """Whether a loss scaler of any class adapts its scale."""
    return getattr(scaler, "dynamic_loss_scale", False) or getattr(scaler, "dynamic", False)


def zero_param_shapes(engine: Any) -> Sequence[Mapping[str, Any]]:
    """Names and shapes in each flat buffer of a ZeRO optimizer, as DeepSpeed saves them (``param_shapes``)."""
    return list(engine._get_zero_param_shapes())


@contextmanager
def universal_flag(engine: Any, value: bool) -> Iterator[None]:
    """Set ``load_universal`` to what the folder holds while DeepSpeed's own loader runs."""
    before = engine._config.load_universal_checkpoint
    engine._config.load_universal_checkpoint = value
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = before


@contextmanager
def replaced_loads(engine: Any, folder: str, read: Callable[[str], Any]) -> Iterator[None]:
    """Lets DeepSpeed's loader have what ``read`` makes of each file that it asks for, whatever its checkpoint engine.

    That engine's own ``load``, which unpickles, is not called; without an optimizer, ZeRO-3 has no checkpoint engine.
    Parts of DeepSpeed call :func:`torch.load`, which is replaced for files below ``folder``, on this thread.
    """
    files = engine.checkpoint_engine
    original = torch.load
    thread = threading.get_ident()
    root = os.path.join(os.path.realpath(folder), "")

    def load(path: Any, *_args: Any, **_kwargs: Any) -> Any:
        return read(os.fspath(path))

    def load_by_torch(file: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(file, (str, os.PathLike)) and threading.get_ident() == thread
        if is_path and os.path.realpath(file).startswith(root):
            return read(os.fspath(file))
        return original(file, *args, **kwargs)

    if files is not None:
        files.load = load
    torch.load = load_by_torch  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = original
        if files is not None:
            del files.load


def saves_in_foreground(engine: Any) -> bool:
    """Whether ``save_checkpoint`` returns when its files are whole: with torch's writer. Others may write on."""
    return type(getattr(engine, "checkpoint_engine", None)).__name__ == "TorchCheckpointEngine"


def commit_pending_save(engine: Any) -> None:
    """Commit a save of this engine that is still being written in the background, as the next step would. Collective.

    Until then files are incomplete, ``latest`` names an older save, and a load would overwrite what is written. Raises
    :class:`DamagedError` on every rank if the process that writes it is no longer there.
    """
    writer = getattr(engine, "checkpoint_engine", None)
    if writer is None or not getattr(writer, "is_decoupled", bool)():  # DeepSpeed before 0.17.1 has no such method
        return

    def is_pending() -> bool:
        info = writer.commit_info
        process = getattr(writer, "ckpt_process", None)
        if info is not None and process is not None and not process.is_alive():
            problem = "the last save of this engine is incomplete: the process that wrote it in the background has died"
            file = os.path.join(info.save_dir, info.tag)
            found = f"exit code {process.exitcode}"
            remedy = "start the job again and load an older tag; the process's output says why it died"
            raise DamagedError(problem, file, found=found, remedy=remedy)
        return info is not None

    if any(distributed.all_gather("look for a save that is still being written", is_pending)):
        engine._commit_decoupled_checkpoint()
        if writer.commit_info is not None:  # DataStates' engine, whose get_commit_info() DeepSpeed does not define
            writer.commit(writer.commit_info)
