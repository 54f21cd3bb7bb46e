"""``"align_partitions"``: ZeRO partitions that are whole numbers of 8-bit blocks, from the start of training.

With them, every data-parallel degree cuts a parameter, or a group's flat buffer, between the same blocks, so 8-bit
states move between degrees bit by bit for good. DeepSpeed has no option for it (``parameter_alignment`` is 16 bytes,
and only where a parameter starts), so :func:`install_alignment` wraps these of its privates (0.19):

- ZeRO-1/2: ``DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned`` and
  ``BF16_Optimizer._flatten_dense_tensors_aligned``, which pad a group's flat buffer. ``nccl_start_alignment_factor``
  keeps its value, since asserts about addresses and bucket sizes hang on it.
- ZeRO-3: ``Init._padding_size``, which pads each parameter; ``Init._partition_param``, which leaves padding as memory
  happens to be, and would so scale the last real elements' 8-bit block by garbage; ``reduce_scatter_coalesced`` in
  ``stage3``, which cuts gradients at the unpadded places; ``_dist_allgather_fn``, ``NoGatherHandle`` and
  ``NoGatherCoalescedHandle`` in ``partition_parameters``, which take a gathered parameter to be no longer than it has
  to be.

Without the option, each wrapper calls what it wraps.
"""

from __future__ import annotations

import functools
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from elastic_ckpt import distributed
from elastic_ckpt.config import CONFIG_KEY, read_config
from elastic_ckpt.core.flat_ranges import per_parameter_numel
from elastic_ckpt.errors import ConfigError

#: Elements to which the engine that is being built, or reduces gradients, pads its partitions; 0: as DeepSpeed does.
_numel: ContextVar[int] = ContextVar("align_partitions", default=0)
_ATTRIBUTE = "_elastic_ckpt_alignment"
_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
#: Optimizers whose partitions are padded.
_aligned: weakref.WeakSet[Any] = weakref.WeakSet()
#: (owner, name, original) of everything that is wrapped.
_replaced: list[tuple[Any, str, Any]] = []


def install_alignment() -> None:
    """Wrap what DeepSpeed pads partitions with; a second call changes nothing."""
    if _replaced:
        return
    for owner, name, wrapper in (
        (DeepSpeedEngine, "_configure_zero_optimizer", _configure),
        (DeepSpeedEngine, "_configure_bf16_optimizer", _configure),
        (DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", _flatten),
        (BF16_Optimizer, "_flatten_dense_tensors_aligned", _flatten),
        (Init, "__init__", _init),
        (Init, "_padding_size", _padding_size),
        (Init, "_partition_param", _partition_param),
        (DeepSpeedZeroOptimizer_Stage3, _SCATTER, _scatter),
        (stage3, "reduce_scatter_coalesced", _reduce_scatter),
        (partition_parameters, "_dist_allgather_fn", _allgather),
        (partition_parameters.NoGatherHandle, "__init__", _no_gather),
        (partition_parameters.NoGatherCoalescedHandle, "__init__", _no_gather_coalesced),
    ):
        original = getattr(owner, name)
        _replaced.append((owner, name, original))
        setattr(owner, name, _wrap(original, wrapper))


def alignment_of(optimizer: Any) -> int:
    """Elements to which the partitions of a live optimizer are padded; 0: as DeepSpeed pads them."""
    return int(getattr(optimizer, _ATTRIBUTE, 0))


def uninstall_alignment() -> None:
    """Undo :func:`install_alignment`, unless an engine that was built with the option still trains on it."""
    if _aligned:
        return
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def _wrap(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


@contextmanager
def _aligned_to(numel: int) -> Iterator[None]:
    token = _numel.set(numel)
    try:
        yield
    finally:
        _numel.reset(token)


def _configure(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    numel = _asked_for(engine._config._param_dict or {})
    if not numel:
        made = original(engine, optimizer)
        _check_parameters(made, 0)
        return made
    _refuse_other_paths(engine, numel)
    with _aligned_to(numel):
        made = original(engine, optimizer)
    setattr(made, _ATTRIBUTE, numel)
    _aligned.add(made)
    with distributed.agreement("align the partitions"):
        _check(made, numel)
    return made


def _asked_for(config: Mapping[str, Any]) -> int:
    """``"align_partitions"`` of a DeepSpeed config; what else is wrong with our section is found when it is needed."""
    section = config.get(CONFIG_KEY)
    asked = isinstance(section, Mapping) and section.get("align_partitions")
    return read_config(config).align_partitions if asked else 0


def _refuse_other_paths(engine: Any, numel: int) -> None:
    """What cuts gradients or gathers parameters on a way of its own.

    Raises:
        ConfigError: naming the option.
    """
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
            raise ConfigError(
                f'"align_partitions" cannot be used together with {option}',
                expected=f'"{CONFIG_KEY}": {{"align_partitions": 0}}, or ZeRO-3 without that option',
                found=f'"align_partitions": {numel}',
            )


def _check(optimizer: Any, numel: int) -> None:
    """Every partition has to be aligned."""
    _check_parameters(optimizer, numel)
    flats = [*getattr(optimizer, "single_partition_of_fp32_groups", ())]
    flats += getattr(optimizer, "fp32_groups_flat_partition", ())
    for number, flat in enumerate(flats):
        if flat.numel() % numel:
            raise _not_reached(f"param group {number}", f"a partition of a multiple of {numel} elements", flat.numel())


def _check_parameters(optimizer: Any, numel: int) -> None:
    """ZeRO-3: gradients are cut where the engine's option says, parameters where that of ``deepspeed.zero.Init`` said.

    Raises:
        ConfigError: these are different places, and training would be wrong.
    """
    for param in (param for group in getattr(optimizer, "fp16_groups", ()) for param in group):
        if not hasattr(param, "ds_process_group"):
            return
        world_size = dist.get_world_size(param.ds_process_group)
        expected = per_parameter_numel(param.ds_numel, world_size, numel or 1)
        if param.ds_tensor.ds_numel != expected:
            what = f"parameter {param.ds_id} of shape {tuple(param.ds_shape)}"
            raise _not_reached(what, f"a partition of {expected} elements", param.ds_tensor.ds_numel)


def _not_reached(what: str, expected: str, found: Any) -> ConfigError:
    return ConfigError(
        '"align_partitions" of the engine is not what the model was partitioned with',
        parameter=what,
        expected=expected,
        found=found,
        remedy="call elastic_ckpt.install() first, and give deepspeed.zero.Init the engine's config: "
        "zero.Init(config_dict_or_path=ds_config)",
    )


def _flatten(
    original: Callable[..., Any], optimizer: Any, tensors: Any, alignment: int, *args: Any, **kwargs: Any
) -> Any:
    """Built with 2 elements for each rank: pad to a multiple of as many times ours. Gradients take the size that is."""
    numel = _numel.get()
    padded = alignment * numel // math.gcd(numel, 2) if numel else alignment
    return original(optimizer, tensors, padded, *args, **kwargs)


def _init(original: Callable[..., Any], init: Any, *args: Any, **kwargs: Any) -> None:
    numel = _numel.get()
    given = kwargs.get("config_dict_or_path", kwargs.get("config"))
    if isinstance(given, (str, os.PathLike)) and os.path.isfile(given):
        with open(given, encoding="utf-8") as stream:
            given = json.load(stream)
    if not numel and isinstance(given, Mapping):
        numel = _asked_for(given)
    setattr(init, _ATTRIBUTE, numel)
    original(init, *args, **kwargs)


def _padding_size(original: Callable[..., Any], init: Any, param: Any) -> int:
    numel = getattr(init, _ATTRIBUTE, 0)
    if not numel:
        return int(original(init, param))
    world_size = init._partition_world_size(param)
    return per_parameter_numel(param.ds_numel, world_size, numel) * world_size - int(param.ds_numel)


def _partition_param(original: Callable[..., Any], init: Any, param: Any, *args: Any, **kwargs: Any) -> None:
    is_new = param.ds_tensor is None
    original(init, param, *args, **kwargs)
    held = param.ds_tensor
    if getattr(init, _ATTRIBUTE, 0) and is_new and held.numel():  # none held: it went to NVMe
        start = init._partition_rank(param) * held.numel()
        held[max(0, min(param.ds_numel - start, held.numel())) :] = 0


def _scatter(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    with _aligned_to(getattr(optimizer, _ATTRIBUTE, 0)):
        return original(optimizer, *args, **kwargs)


def _reduce_scatter(original: Callable[..., Any], tensors: Sequence[torch.Tensor], group: Any = None) -> Any:
    """Mean gradients of this rank's pieces: padded to whole pieces, so that DeepSpeed cuts them where we do."""
    numel = _numel.get()
    if not numel:
        return original(tensors, group)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    padded, held = [], []
    for tensor in tensors:
        piece = per_parameter_numel(tensor.numel(), world_size, numel)
        whole = tensor.new_zeros(piece * world_size)
        whole[: tensor.numel()] = tensor.reshape(-1)
        padded.append(whole)
        held.append(max(0, min(piece, tensor.numel() - rank * piece)))
    return [part[:size] for part, size in zip(original(padded, group), held, strict=True)]


class _CopyAfter:
    """A handle whose result goes into a shorter buffer once it is there."""

    def __init__(self, handle: Any, whole: torch.Tensor, output: torch.Tensor) -> None:
        self._handle, self._whole, self._output = handle, whole, output

    def wait(self) -> None:
        self._handle.wait()
        self._output.copy_(self._whole[: self._output.numel()])


def _allgather(original: Callable[..., Any], piece: torch.Tensor, output: torch.Tensor, group: Any = None) -> Any:
    needed = piece.numel() * dist.get_world_size(group)
    if output.numel() >= needed:
        return original(piece, output, group)
    whole = output.new_empty(needed)
    return _CopyAfter(original(piece, whole, group), whole, output)


def _fits(param: Any) -> bool:
    return bool(param.ds_tensor.numel() == param.ds_numel) or hasattr(param.ds_tensor, "ds_quant_scale")


def _show_whole(param: Any) -> None:
    """On one rank, the partition is the parameter, and here padding behind it."""
    device = get_accelerator().current_device_name()
    held = param.ds_tensor.data.narrow(0, 0, param.ds_numel).to(device=device, non_blocking=True)
    param.data = held.view(param.ds_shape)


def _no_gather(original: Callable[..., Any], handle: Any, param: Any) -> None:
    if _fits(param):
        original(handle, param)
        return
    _show_whole(param)
    handle._NoGatherHandle__param = param
    handle._NoGatherHandle__complete = False


def _no_gather_coalesced(original: Callable[..., Any], handle: Any, params: Sequence[Any]) -> None:
    if all(map(_fits, params)):
        original(handle, params)
        return
    handle._NoGatherCoalescedHandle__params = params
    handle._NoGatherCoalescedHandle__complete = False
    for param in params:
        _show_whole(param)
