"""``"align_partitions"``: ZeRO partitions of whole 8-bit blocks, from the start of training.

Every data-parallel degree then cuts a parameter, or a group's flat buffer, between the same blocks, so that 8-bit
states move between degrees bit-exactly. DeepSpeed has no such option (``parameter_alignment`` is 16 bytes, and only for
the start of a parameter), so its private functions (0.19) are wrapped once a ``deepspeed.zero.Init`` or an engine is
built with the option:

- ZeRO-1/2: ``flatten_dense_tensors_aligned``, which pads a group's flat buffer. ``nccl_start_alignment_factor`` keeps
  its value, which asserts about addresses and bucket sizes depend on.
- ZeRO-3: ``Init._padding_size`` pads each parameter; ``Init._partition_param`` leaves padding uninitialized, and
  garbage would scale the last real elements' 8-bit block; ``reduce_scatter_coalesced`` cuts gradients without padding;
  ``_dist_allgather_fn``, ``NoGatherHandle`` and ``NoGatherCoalescedHandle`` expect gathered parameters without it.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import Init

from elastic_ckpt import distributed
from elastic_ckpt.config import CONFIG_KEY, read_config
from elastic_ckpt.core.flat_ranges import per_parameter_numel
from elastic_ckpt.errors import ConfigError, UnsupportedError
from elastic_ckpt.patches import unwrap, wrap

#: Alignment of the engine that is being built or reduces gradients, in elements; 0 for DeepSpeed's own.
_numel: ContextVar[int] = ContextVar("align_partitions", default=0)
#: Of a live optimizer or ``deepspeed.zero.Init``: the alignment of its partitions.
_ATTRIBUTE = "_elastic_ckpt_alignment"
#: Optimizers with aligned partitions.
_aligned: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_alignment() -> None:
    """Watch for a ``deepspeed.zero.Init`` with the option; :func:`align_engine` is for engines. Idempotent."""
    wrap(Init, "__init__", _init)


def unwatch_alignment() -> None:
    """Undo :func:`watch_alignment`, and all wrappers unless an engine built with the option still trains."""
    if not _aligned:
        unwrap(Init, "__init__")
        for owner, name, _ in _wrapped():
            unwrap(owner, name)


def align_engine(config: Any) -> int:
    """Wrap what pads partitions if a DeepSpeed config, or its dict, has the option; returns it, or 0. Idempotent."""
    values = getattr(config, "_param_dict", config)
    section = values.get(CONFIG_KEY) if isinstance(values, Mapping) else None
    asked = isinstance(section, Mapping) and section.get("align_partitions")
    numel = read_config(values).align_partitions if asked else 0  # other errors in it are raised when it is used
    if numel:
        try:
            for owner, name, wrapper in _wrapped():
                wrap(owner, name, wrapper)
        except AttributeError as error:
            problem = '"align_partitions" needs private names of DeepSpeed that this version does not have'
            raise UnsupportedError(problem, found=str(error), remedy="install a version that is tested") from error
    return numel


@contextmanager
def _aligned_to(numel: int) -> Iterator[None]:
    token = _numel.set(numel)
    try:
        yield
    finally:
        _numel.reset(token)


def _configure(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    numel = align_engine(engine._config)
    if numel:
        _refuse_other_paths(engine, numel)
    with _aligned_to(numel):
        made = original(engine, optimizer)
    if numel:
        setattr(made, _ATTRIBUTE, numel)
        _aligned.add(made)
    with distributed.agree("align the partitions") if numel else nullcontext():
        _check_partitions(made, numel)
    return made


def _refuse_other_paths(engine: Any, numel: int) -> None:
    """Refuse options that cut gradients or gather parameters in code that is not wrapped (:class:`ConfigError`)."""
    zero = engine._config.zero_config
    flat = ((zero.round_robin_gradients, '"round_robin_gradients", whose order of parameters depends on the degree'),)
    each = (
        (not zero.reduce_scatter, '"reduce_scatter": false (which Muon needs)'),
        (zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights, '"zero_quantized_weights"'),
        (zero.zero_quantized_gradients, '"zero_quantized_gradients"'),
        (zero.zero_hpz_partition_size > 1, '"zero_hpz_partition_size"'),
        (zero.use_all_reduce_for_fetch_params, '"use_all_reduce_for_fetch_params"'),
    )
    for present, option in each if engine.zero_optimization_stage() == 3 else flat:
        if present:
            expected = f'"{CONFIG_KEY}": {{"align_partitions": 0}}, or ZeRO-3 without that option'
            problem = f'"align_partitions" cannot be used together with {option}'
            found = f'"align_partitions": {numel}'
            raise ConfigError(problem, expected=expected, found=found)


def _check_partitions(optimizer: Any, numel: int) -> None:
    """Refuse different options of engine and ``deepspeed.zero.Init``: training would be wrong (:class:`ConfigError`).

    ZeRO-3 cuts gradients by the engine's option, parameters by that of ``Init``.
    """
    flats = getattr(optimizer, "single_partition_of_fp32_groups", getattr(optimizer, "fp32_groups_flat_partition", ()))
    other = [
        (f"param group {number}", f"a partition of a multiple of {numel} elements", flat.numel())
        for number, flat in enumerate(flats if numel else ())
        if flat.numel() % numel
    ]
    params = (param for group in getattr(optimizer, "fp16_groups", ()) for param in group)
    for param in (param for param in params if hasattr(param, "ds_process_group")):
        size = per_parameter_numel(param.ds_numel, dist.get_world_size(param.ds_process_group), numel or 1)
        if param.ds_tensor.ds_numel != size:
            what = f"parameter {param.ds_id} of shape {tuple(param.ds_shape)}"
            other.append((what, f"a partition of {size} elements", param.ds_tensor.ds_numel))
    for what, expected, found in other:
        problem = '"align_partitions" of the engine is not what the model was partitioned with'
        remedy = "call elastic_ckpt.install() first, and give deepspeed.zero.Init the engine's config: "
        remedy += "zero.Init(config_dict_or_path=ds_config)"
        raise ConfigError(problem, parameter=what, expected=expected, found=found, remedy=remedy)


def _flatten(original: Callable[..., Any], optimizer: Any, tensors: Any, alignment: int, *args: Any, **kw: Any) -> Any:
    """Raise DeepSpeed's ``alignment``, 2 elements per rank, to a common multiple with ours. Gradients follow."""
    numel = _numel.get()
    return original(optimizer, tensors, alignment * numel // math.gcd(numel, 2) if numel else alignment, *args, **kw)


def _init(original: Callable[..., Any], init: Any, *args: Any, **kwargs: Any) -> None:
    given = kwargs.get("config_dict_or_path", kwargs.get("config"))
    if isinstance(given, (str, os.PathLike)) and os.path.isfile(given):  # asks the system: a DeepSpeed config
        with open(given, encoding="utf-8") as stream:  # asks the system: a DeepSpeed config
            given = json.load(stream)
    if numel := _numel.get() or align_engine(given):
        setattr(init, _ATTRIBUTE, numel)
    original(init, *args, **kwargs)


def _padding_size(original: Callable[..., Any], init: Any, param: Any) -> int:
    if not (numel := getattr(init, _ATTRIBUTE, 0)):
        return int(original(init, param))
    world_size = dist.get_world_size(param.ds_process_group)
    return per_parameter_numel(param.ds_numel, world_size, numel) * world_size - int(param.ds_numel)


def _partition_param(original: Callable[..., Any], init: Any, param: Any, *args: Any, **kwargs: Any) -> None:
    is_new = param.ds_tensor is None
    original(init, param, *args, **kwargs)
    partition = param.ds_tensor
    if getattr(init, _ATTRIBUTE, 0) and is_new and partition.numel():  # empty: it is on NVMe
        start = dist.get_rank(param.ds_process_group) * partition.numel()
        partition[max(0, min(param.ds_numel - start, partition.numel())) :] = 0


def _scatter(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    with _aligned_to(getattr(optimizer, _ATTRIBUTE, 0)):
        return original(optimizer, *args, **kwargs)


def _reduce_scatter(original: Callable[..., Any], tensors: Sequence[torch.Tensor], group: Any = None) -> Any:
    """Mean gradients of this rank's partitions, padded so that DeepSpeed cuts them where parameters are cut."""
    numel = _numel.get()
    if not numel:
        return original(tensors, group)
    world_size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    padded = []
    sizes = []
    for tensor in tensors:
        size = per_parameter_numel(tensor.numel(), world_size, numel)
        whole = tensor.new_zeros(size * world_size)
        whole[: tensor.numel()] = tensor.reshape(-1)
        padded.append(whole)
        sizes.append(max(0, min(size, tensor.numel() - rank * size)))
    return [partition[:size] for partition, size in zip(original(padded, group), sizes, strict=True)]


def _allgather(original: Callable[..., Any], partition: torch.Tensor, output: torch.Tensor, group: Any = None) -> Any:
    """Gather into a longer buffer; the handle's ``wait`` copies it without padding."""
    needed = partition.numel() * dist.get_world_size(group)
    if output.numel() >= needed:
        return original(partition, output, group)
    whole = output.new_empty(needed)
    handle = original(partition, whole, group)

    def wait() -> None:
        handle.wait()
        output.copy_(whole[: output.numel()])

    return SimpleNamespace(wait=wait)


def _no_gather(original: Callable[..., Any], handle: Any, params: Any) -> None:
    """On one rank a partition is its parameter, here with padding behind it: give DeepSpeed one without."""
    partitions = []
    for param in [params] if isinstance(handle, partition_parameters.NoGatherHandle) else params:
        if param.ds_tensor.numel() > param.ds_numel and not hasattr(param.ds_tensor, "ds_quant_scale"):
            partitions.append((param.ds_tensor, param.ds_tensor.data))
            param.ds_tensor.data = param.ds_tensor.data.narrow(0, 0, param.ds_numel)
    try:
        original(handle, params)
    finally:
        for partition, data in partitions:
            partition.data = data


def _wrapped() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(owner, name, wrapper) of everything that is wrapped."""
    yield DeepSpeedEngine, "_configure_zero_optimizer", _configure
    yield DeepSpeedEngine, "_configure_bf16_optimizer", _configure
    yield stage_1_and_2.DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", _flatten
    yield bf16_optimizer.BF16_Optimizer, "_flatten_dense_tensors_aligned", _flatten
    yield Init, "_padding_size", _padding_size
    yield Init, "_partition_param", _partition_param
    name = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
    yield stage3.DeepSpeedZeroOptimizer_Stage3, name, _scatter
    yield stage3, "reduce_scatter_coalesced", _reduce_scatter
    yield partition_parameters, "_dist_allgather_fn", _allgather
    yield partition_parameters.NoGatherHandle, "__init__", _no_gather
    yield partition_parameters.NoGatherCoalescedHandle, "__init__", _no_gather
