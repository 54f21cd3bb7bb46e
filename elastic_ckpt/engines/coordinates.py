"""A rank's coordinates in a live job, its experts, and the tensor-parallel layouts of live parameters. Local.

Coordinates come from DeepSpeed's pipeline grid or the engine's ``mpu``; layouts from the attributes of Megatron's
parallel layers (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``) or from AutoTP's records on
parameters (``ds_autotp_universal_checkpoint_meta``).
"""

from __future__ import annotations

import argparse
import copy
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import bwc, groups

from elastic_ckpt.core.extra_states import extra_state_name
from elastic_ckpt.core.fqn import ExpertName, slices
from elastic_ckpt.core.local_state import LiveShards, ModelLayout, RankCoordinates, SequenceParallel
from elastic_ckpt.core.shard_specs import CannotSplit, layout_of_affine
from elastic_ckpt.core.strided import fused
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.engines.compat import AFFINE_MAP, autotp_record
from elastic_ckpt.errors import UnsupportedError

#: Largest buffer, in elements, whose values are compared: a rank's own bounds and offsets are small.
_MOST_COMPARED = 1 << 16


def model_of(engine: Any, dp_group: Any, fqns: LiveFQNs, stacked: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    """The live model as far as this rank knows it, with its own shapes only.

    ZeRO partitions over ``dp_group``; ``fqns``: of its names; ``stacked``: :func:`stacked_experts`.
    """
    coordinates = coordinates_of(engine, dp_group)
    layouts = _layouts_of(engine, coordinates.tp)
    if engine.mp_world_size > 1:  # whose ranks may leave experts unsliced
        whole = [name for layer, name, _ in _expert_tensors(engine) if not layer.enable_expert_tensor_parallelism]
        unsliced = layouts.keys() & {*stacked, *whole}  # of a tensor that experts share, one name is known
        layouts |= {name: replace(layouts[name], is_unsliced=True) for name in unsliced}
    for name, experts in stacked.items():
        layout = layouts.pop(name)
        parts = slices(name, layout.shapes[0], experts)
        layouts |= {part.name: replace(layout, shapes=(part.shape,)) for part in parts}
    names: dict[int, list[str]] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(fqns.of(name))
    tied = {fqns.of(name): names.get(id(param), []) for param, name in engine.param_names.items()}
    return ModelLayout(
        coordinates,
        {fqns.of(name): layout for name, layout in layouts.items()},
        ties={name: tuple(other for other in every if other != name) for name, every in tied.items() if every[1:]},
        run=_arguments(engine),
        unsynchronized=dict.fromkeys(_unsynchronized(engine.module), (coordinates.pp_rank,)),
    )


def _arguments(engine: Any) -> dict[str, Any]:
    """Plain values among the arguments of the live run; empty unless its code base keeps them where it is known to."""
    variables = sys.modules.get("megatron.global_vars")  # Megatron-DeepSpeed, bigscience's too; or gpt-neox's args
    args = getattr(engine.module, "neox_args", None) or getattr(variables, "_GLOBAL_ARGS", None)
    values = dict(vars(args)) if args is not None else {}
    for layer in engine.module.modules():
        if hasattr(layer, "gqa_project"):  # until commit 96c242eb gpt-neox took q, k and v from each head
            values["gqa_contiguous"] = "new_query_shape" in layer.gqa_project.__code__.co_varnames
    return {key: value for key, value in values.items() if isinstance(value, (str, int, float, bool, type(None)))}


def follow_topology(args: Any, coordinates: RankCoordinates, rank: int) -> Any:
    """A copy of saved arguments (of Megatron or gpt-neox) with the live topology; anything else is returned as is."""
    if not isinstance(args, (argparse.Namespace, dict)):
        return args
    changed = copy.copy(args)
    tp = coordinates.tp
    pp = coordinates.pp
    values = vars(changed) if isinstance(changed, argparse.Namespace) else changed
    of_pp = ("pipeline_model_parallel_size", "pipe_parallel_size", "transformer_pipeline_model_parallel_size")
    live = dict.fromkeys(("tensor_model_parallel_size", "model_parallel_size"), tp) | dict.fromkeys(of_pp, pp)
    live |= {"tensor_model_parallel_rank": coordinates.tp_rank, "pipeline_model_parallel_rank": coordinates.pp_rank}
    dp = coordinates.partition_degree
    live |= {"data_parallel_size": dp, "world_size": dp * tp * pp, "rank": rank}
    values.update({key: value for key, value in live.items() if isinstance(values.get(key), int)})
    return changed


def model_of_all(mine: ModelLayout, everybody: Sequence[ModelLayout]) -> ModelLayout:
    """The live model with the shapes of all ranks of this stage, and the names of all stages.

    ``everybody``: :func:`model_of` of all ranks, unused without tensor, pipeline and expert parallelism.
    """
    at = mine.coordinates
    layouts = dict(mine.layouts)
    stage = [
        other
        for other in sorted(everybody, key=lambda other: other.coordinates.tp_rank)
        if (other.coordinates.pp_rank, other.coordinates.partition_rank) == (at.pp_rank, at.partition_rank)
    ]
    elsewhere = frozenset(name for other in everybody for name in other.layouts).difference(layouts)
    for name, layout in mine.layouts.items() if len(stage) > 1 else ():
        if not layout.is_unsliced:
            shards = [other.layouts[name] for other in stage if name in other.layouts]
            values = tuple(value for shard in shards for value in shard.values)
            layouts[name] = replace(layout, shapes=tuple(shard.shapes[0] for shard in shards), values=values)
    extra = frozenset(name for other in everybody for name in other.extra_states).difference(mine.extra_states)
    stages: dict[str, tuple[int, ...]] = {}
    for name, copies in sorted({each for other in everybody or [mine] for each in other.unsynchronized.items()}):
        stages[name] = stages.get(name, ()) + copies
    return replace(mine, layouts=layouts, elsewhere=elsewhere, unsynchronized=stages, extra_states_elsewhere=extra)


def coordinates_of(engine: Any, dp_group: Any) -> RankCoordinates:
    """A rank's coordinates, where ZeRO partitions over ``dp_group``."""
    dp = dist.get_world_size(group=dp_group)
    dp_rank = dist.get_rank(group=dp_group)
    if isinstance(engine, PipelineEngine):
        grid = engine.grid
        tp = grid.get_slice_parallel_world_size()
        tp_rank = grid.get_slice_parallel_rank()
        return RankCoordinates(dp, dp_rank, tp, tp_rank, grid.pipe_parallel_size, grid.get_stage_id())
    coordinates = RankCoordinates(dp, dp_rank)
    if (degree := int(engine.sequence_parallel_size)) > 1:
        data = engine.dp_world_size  # None with ``parallel_state_sp``, which always partitions over sequence ranks
        members = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
        ranks = dist.get_process_group_ranks(engine.seq_data_parallel_group)
        # with a device mesh that group lacks the other sequence-parallel ranks; the job has no others then
        positions = [ranks.index(member) for member in members] if {*members} <= {*ranks} else members
        strided = positions != list(range(positions[0], positions[0] + degree))
        sequence = SequenceParallel(degree, data is None or dp == data * degree, strided)
        coordinates = replace(coordinates, sequence=sequence, sp_rank=groups._get_sequence_parallel_rank())
    if engine.has_moe_layers:
        largest = groups._get_max_expert_size_name()
        ep = groups._get_expert_parallel_world_size(largest)
        ep_rank = groups._get_expert_parallel_rank(largest)
        coordinates = replace(coordinates, ep=ep, ep_rank=ep_rank)
    if engine.mpu is None:
        return coordinates
    if bwc.bwc_pipeline_parallel_world_size(engine.mpu) > 1:
        found = f"{type(engine.module).__name__}, and an mpu of several stages"
        raise UnsupportedError("only DeepSpeed's PipelineModule is supported for pipeline parallelism", found=found)
    if engine.mp_world_size == 1:
        return coordinates
    tp = bwc.bwc_tensor_model_parallel_world_size(engine.mpu)
    tp_rank = bwc.bwc_tensor_model_parallel_rank(engine.mpu)
    return replace(coordinates, tp=tp, tp_rank=tp_rank)


def layers_with_files(module: Any) -> frozenset[int]:
    """The numbers of the layers of which DeepSpeed's loader reads a file each on this rank; none but of a pipeline."""
    if not isinstance(module, PipelineModule):
        return frozenset()
    stages = [(module._local_start, module.forward_funcs)]
    if hasattr(module, "phase_funcs"):  # DualPipeVModule has two, of which it exposes one at a time
        starts = [start for start, _ in module.phase_bounds]
        stages = [*zip(starts, module.phase_funcs, strict=True)]
    return frozenset(
        start + at
        for start, layers in stages
        for at, layer in enumerate(layers)
        if hasattr(layer, "load_state_dict")  # functions have no file
    )


def _unsynchronized(module: Any) -> Iterator[str]:
    """Parameters of tied modules whose gradients pipeline stages do not reduce: all but the ``tied_weight_attr``."""
    if not isinstance(module, PipelineModule):
        return
    for key, tied in module.tied_modules.items():
        names = [attribute.split(".") for attribute in module.tied_weight_attrs[key]]
        weights = [reduce(lambda owner, name: getattr(owner, name, None), parts, tied) for parts in names]
        for name, param in tied.named_parameters():
            if all(param is not weight for weight in weights):
                yield f"tied_modules.{key}.{without_hidden(name)}"


def _layouts_of(engine: Any, tp: int) -> dict[str, LiveShards]:
    """Each parameter, by DeepSpeed's name, and buffer, with this rank's shape, and of small buffers a checksum."""
    owners = {
        id(tensor): type(module).__module__
        for module in engine.module.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
    }
    named = {without_hidden(name): param for param, name in engine.param_names.items()}
    buffers = {without_hidden(name): each for name, each in engine.module.named_buffers(remove_duplicate=False)}
    layouts = {name: _layout(tensor, owners.get(id(tensor), ""), tp) for name, tensor in {**buffers, **named}.items()}
    if tp > 1:
        for name, buffer in buffers.items():
            if buffer.numel() <= _MOST_COMPARED:
                flat = buffer.detach().cpu().contiguous().reshape(-1)
                checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
                layouts[name] = replace(layouts[name], values=(checksum,))
    unrecorded = {name for name, param in named.items() if not autotp_record(param)}
    if len(unrecorded) < len(named):  # AutoTP replicates what it has no record of
        layouts |= {name: replace(layouts[name], dim=-1) for name in unrecorded}
    return layouts


def _layout(tensor: torch.Tensor, owner: str, tp: int) -> LiveShards:
    """How a tensor is cut: by Megatron's attributes, and by AutoTP's record, if that cuts along one dimension.

    From 0.18 to 0.19.6, AutoTP records the sizes of sub-parameters, each of which ``tp`` divides; then a map.
    """
    shape: tuple[int, ...] = tuple(getattr(tensor, "ds_shape", tensor.shape))
    is_cut = getattr(tensor, "tensor_model_parallel", None)
    if is_cut is False:  # a default, which Megatron gives T5's lm_head.bias too, beside the attribute's older name
        is_cut = bool(getattr(tensor, "model_parallel", False))
    dim = -1 if is_cut is False else getattr(tensor, "partition_dim", None) if is_cut else None
    stride = max(int(getattr(tensor, "partition_stride", 1) or 1), 1) if is_cut else 1
    record = autotp_record(tensor)
    recorded = None
    entry = (record.get("conversion") or {}).get(AFFINE_MAP)
    whole = tuple(record.get("logical_shape") or ())
    sizes = record.get("sub_param_sizes") or ()
    if entry is not None:
        with suppress(CannotSplit):
            recorded = layout_of_affine(entry)
    elif sizes and len(whole) == len(shape):
        recorded = fused(whole, record["partition_dim"], [[size // tp] * tp for size in sizes])
    return LiveShards((shape,), dim, stride, owner, recorded)


class LiveFQNs:
    """The FQNs of a live module's tensors, given their names in ``named_parameters`` or ``named_buffers``.

    Both differ for experts of ``MoE`` layers, which each rank numbers from 0, and within wrappers whose hooks take
    their part out of the state dict.
    """

    def __init__(self, engine: Any) -> None:
        #: Name in the state dict -> FQN, of each tensor of an expert.
        self.experts = {name: fqn for _, name, fqn in _expert_tensors(engine)}

    def of(self, name: str) -> str:
        """The FQN of a tensor with this name."""
        entry = without_hidden(name)
        return self.experts.get(entry, entry)


def _expert_tensors(engine: Any) -> Iterator[tuple[Any, str, str]]:
    """Each ``MoE`` layer with each tensor of its experts: the name in the live state dict, and the FQN.

    With them, the names that extra states of the experts' modules have.
    """
    for path, layer in engine.module.named_modules() if engine.has_moe_layers else ():
        experts = layer.deepspeed_moe.experts.deepspeed_experts if isinstance(layer, MoE) else ()
        for number, expert in enumerate(experts):
            ep_rank = groups._get_expert_parallel_rank(layer.expert_group_name)
            tensors = (name for name, _ in chain(expert.named_parameters(), expert.named_buffers()))
            states = (extra_state_name(name) for name, _ in expert.named_modules(remove_duplicate=False))
            for name in chain(tensors, states):
                live = ExpertName(without_hidden(f"{path}.") if path else "", number, without_hidden(name))
                yield layer, str(live), str(live.on(ep_rank, layer.num_local_experts))


def stacked_experts(engine: Any) -> Mapping[str, tuple[int, ...]]:
    """Stacked parameter of AutoEP -> the numbers of the experts in it, in order (``AutoEPMoELayer``)."""
    if not engine.has_moe_layers:
        return {}
    records = ((name, getattr(param, "ds_autoep_uc_meta", None)) for param, name in engine.param_names.items())
    found = {without_hidden(name): tuple(record["local_experts"]) for name, record in records if record}
    if not found and not any(isinstance(module, MoE) for module in engine.module.modules()):
        problem = "AutoEP of this version of DeepSpeed does not record which rank holds which experts"
        raise UnsupportedError(problem, expected="DeepSpeed 0.19.8 or later")
    return found
