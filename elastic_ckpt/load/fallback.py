"""Would DeepSpeed's own loader restore this folder right?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from elastic_ckpt import distributed
from elastic_ckpt.config import CONFIG_KEY
from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.engines.compat import base_optimizer, zero_param_shapes
from elastic_ckpt.engines.select import same_features, schema_of
from elastic_ckpt.engines.training_state import LoadArguments, restores_states
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.features import base_groups, features_in
from elastic_ckpt.formats.legacy import is_legacy_with_step
from elastic_ckpt.formats.naming import SWAPPED_FOLDER, UNIVERSAL_FOLDER
from elastic_ckpt.formats.pickled import PickledFile, TensorRef
from elastic_ckpt.formats.saved_config import config_section, saved_config
from elastic_ckpt.formats.zero0_index import MASTER_ENTRIES
from elastic_ckpt.load.own_files import open_any, own_part
from elastic_ckpt.load.saved_whole import one_save
from elastic_ckpt.patches.aligned_partitions import alignment_of

#: Entries of a param group that say nothing about the optimizer's kind.
_NOT_COMPARED = frozenset({"params", "param_names", "step"})
_LAYOUTS = {0: "whole", 1: "zero12", 2: "zero12", 3: "zero3"}


def deepspeed_loads_it_right(engine: Any, found: Found, arguments: LoadArguments, known: bool) -> bool:
    """Whether DeepSpeed's own loader is known to restore a folder that elastic_ckpt does not. Collective.

    That is so for native checkpoints at the topology, layout and ZeRO stage they were saved with, and with an optimizer
    of the same hyperparameters; and at any data-parallel degree, where only weights are asked for and they lie whole in
    one file, which is so below ZeRO-3. It is never so for optimizer states on NVMe, of which DeepSpeed 0.19 restores
    the masters of big sub-groups alone. Of universal checkpoints it is so for those of AutoEP.

    Args:
        engine: the live engine.
        found: the checkpoint.
        arguments: of ``load_checkpoint``.
        known: whether it is known what elastic_ckpt cannot restore. If not, it did not understand the files: they must
            then have the sizes that the live engine has, and be of one save.
    """
    save: tuple[Any, ...] | None = None
    staged = len(found.files.mp_ranks) > 1 or isinstance(engine, PipelineEngine)  # each rank has files of its own
    if distributed.rank() == 0 or staged:
        try:
            if _fits_here(engine, found, arguments):
                save = _save_of(engine, found, arguments, known)
        except Exception:  # files that cannot be read are not ones that DeepSpeed is known to load right
            save = None
    everybody = distributed.share(save) if staged else [distributed.broadcast(save, src=0)]
    return all(each is not None and each == everybody[0] for each in everybody)


def _save_of(engine: Any, found: Found, arguments: LoadArguments, known: bool) -> tuple[Any, ...] | None:
    """Which save the files that DeepSpeed's loader would read are of; ``None``: they are not whole, or of several."""
    if found.format == "universal" or _whole_weights(engine, found, arguments):
        return ()
    return one_save(engine, found, engine.seq_dp_world_size, check_sizes=not known)


def own_files_fit(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    """Whether the same is known where each rank can look at no files but its own: all are of one save. Collective."""
    save = None
    try:
        part = own_part(engine, found)
        if found.format == "native" and _fits_here(engine, part, arguments):
            save = one_save(engine, part, partitions=1, check_sizes=True)
    except Exception:  # as above
        save = None
    everybody = distributed.share(save)
    return save is not None and all(other == save for other in everybody)


def _fits_here(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    without_zero = isinstance(engine, PipelineEngine) and not found.files.optimizer
    names_told = found.format == "native" and not without_zero  # which parameters the states are of
    if restores_states(arguments) and not arguments.load_module_strict and not names_told:
        return False
    fits = _universal_fits if found.format == "universal" else _stage_fits if without_zero else _fits
    return not _is_swapped(engine, found) and fits(engine, found, arguments)


def _is_swapped(engine: Any, found: Found) -> bool:
    return bool(engine.zero_nvme_offload_optimizer()) or os.path.isdir(found.path(SWAPPED_FOLDER))


def _fits(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    if _leaves_old_masters(engine, arguments) or _fails_without_optimizer(engine, arguments):
        return False
    if _whole_weights(engine, found, arguments):
        return True
    model, optimizer = _representatives(found, engine.checkpoint_mp_rank)
    features = features_in(model) | features_in(optimizer)
    alike = _same_topology(engine, found, model) and same_features(engine, features) and _same_padding(engine, model)
    if engine.zero_optimization_stage() == 0 and not arguments.load_module_strict:
        trained = [name for name, param in engine.module.named_parameters() if param.requires_grad]
        alike = alike and all(name in model.tree["module"] for name in trained)
    return alike and (not restores_states(arguments) or _same_optimizer(engine, found, model, optimizer))


def _universal_fits(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    """AutoEP: whether every live parameter has what DeepSpeed reads, at any degree of data and experts.

    It alone knows how experts are cut (``_resolve_autoep_partition``, universal_checkpoint.py); sizes that do not fit
    are its own error. In ZeRO-3 it reads no states but Adam's, whatever the optimizer.
    """
    name = next(iter([*found.files.model.values(), *found.files.model_zero3.values()]))
    tree = open_any(found.path(name)).tree
    layers = tree.get("ds_autoep_layers") or tree.get("autoep_layers")
    if not (layers and engine.has_moe_layers) or _fails_without_optimizer(engine, arguments):
        return False
    adam = {MASTER, "exp_avg", "exp_avg_sq"}
    names = [name for param, name in engine.param_names.items() if param.requires_grad]
    states = [
        {entry.removesuffix(".pt") for entry in os.listdir(found.path(f"{UNIVERSAL_FOLDER}/{name}"))} - {"step"}
        for name in names
    ]
    is_adam = not restores_states(arguments) or schema_of(base_optimizer(engine)).family == "adam"
    return is_adam and all(found_here == adam for found_here in states)


def _stage_fits(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    """A pipeline without ZeRO: whether this rank's file holds states of the very parameters of its stage.

    With ZeRO elastic_ckpt restores them itself, or what it refuses DeepSpeed cannot restore either.
    """
    if engine.zero_optimization_stage() or found.files.optimizer or _leaves_old_masters(engine, arguments):
        return False
    model = open_any(found.path(found.files.model[engine.checkpoint_mp_rank]))
    groups, live = base_groups(model), base_optimizer(engine).param_groups
    saved = [[_shape_of(model, number) for number in group["params"]] for group in groups]
    here = [[tuple(param.shape) for param in group["params"]] for group in live]
    same_shapes = len(saved) == len(here) and all(
        len(mine) == len(other) and all(a in (None, b) for a, b in zip(mine, other, strict=True))
        for mine, other in zip(saved, here, strict=True)
    )
    same_names = [set(group) - _NOT_COMPARED for group in groups] == [set(group) - _NOT_COMPARED for group in live]
    plain = not any(key in model.tree["optimizer"] for key in MASTER_ENTRIES)
    return same_shapes and same_names and plain and _same_topology(engine, found, model)


def _shape_of(model: PickledFile, number: int) -> tuple[int, ...] | None:
    """Shape of a parameter by its states; ``None``: it has none."""
    state = model.tree["optimizer"]["state"].get(number, {})
    return next((ref.shape for ref in state.values() if isinstance(ref, TensorRef) and ref.shape), None)


def _representatives(found: Found, mp_rank: int) -> tuple[PickledFile, PickledFile]:
    """A model-states file and a file with the optimizer's state, of one model-parallel rank.

    Without ZeRO they are the same; experts have one of their own.

    DeepSpeed's loader trusts pickles anyhow; what is looked at here, the safe way gives too.
    """
    files = found.files
    zero3 = [name for (_, mp), name in files.model_zero3.items() if mp == mp_rank]
    whole = [name for mp, name in files.model.items() if mp == mp_rank]
    model = open_any(found.path([*whole, *zero3][0]))
    own = [name for name in files.experts if name.startswith("expp_rank_0_")]
    own += [name for (_, mp), name in files.optimizer.items() if mp == mp_rank]
    return model, open_any(found.path(own[0])) if own else model


def _same_padding(engine: Any, model: PickledFile) -> bool:
    """DeepSpeed's loader pads masters of another size with zeros, and shifts what follows."""
    return (config_section(model, CONFIG_KEY).get("align_partitions") or 0) == alignment_of(engine.optimizer)


def _leaves_old_masters(engine: Any, arguments: LoadArguments) -> bool:
    """Without ZeRO in fp16 or bf16, DeepSpeed leaves masters behind that undo the loaded weights at the next step."""
    low_precision = hasattr(engine.optimizer, "refresh_fp32_params")
    without_states = not (arguments.load_module_only or arguments.load_optimizer_states)
    return engine.zero_optimization_stage() == 0 and low_precision and without_states


def _fails_without_optimizer(engine: Any, arguments: LoadArguments) -> bool:
    """DeepSpeed 0.19 calls methods of ZeRO-3's optimizer, which an engine made without one does not have."""
    return engine.zero_optimization_stage() == 3 and not arguments.has_optimizer


def _whole_weights(engine: Any, found: Found, arguments: LoadArguments) -> bool:
    whole_here = set(found.files.model) == {0} and not (found.files.layers or found.files.experts)
    plain = engine.mp_world_size == 1 and not engine.has_moe_layers
    return not restores_states(arguments) and whole_here and engine.zero_optimization_stage() < 3 and plain


def _same_topology(engine: Any, found: Found, model: PickledFile) -> bool:
    return (
        model.tree.get("dp_world_size") == engine.seq_dp_world_size
        and model.tree.get("mp_world_size") == engine.mp_world_size
        and len(found.files.mp_ranks) == dist.get_world_size() // max(engine.seq_dp_world_size, 1)
        and _saved_layout(found) == _LAYOUTS.get(engine.zero_optimization_stage())
    )


def _same_optimizer(engine: Any, found: Found, model: PickledFile, optimizer: PickledFile) -> bool:
    """Whether the saved optimizer is of the live one's kind and steps on the same tensors in the same order.

    DeepSpeed's own loader gives states by position, and the states of any optimizer to any other; the names of their
    hyperparameters tell most kinds apart.
    """
    in_bf16 = any(name.startswith("bf16_") for name in found.files.optimizer.values())
    if found.files.optimizer and in_bf16 != engine.bfloat16_enabled():
        return False
    if bool(config_section(model, "fp16").get("enabled")) != engine.fp16_enabled() and saved_config(model) is not None:
        return False
    if is_legacy_with_step(optimizer):  # saves no hyperparameters: those of the live param groups stay
        return _same_flat_order(engine, model, optimizer)
    saved = [set(group) - _NOT_COMPARED for group in base_groups(optimizer)]
    live = [set(group) - _NOT_COMPARED for group in base_optimizer(engine).param_groups]
    same_order = _same_flat_order if engine.zero_optimization_stage() > 0 else _same_module_order
    return saved == live and same_order(engine, model, optimizer)


def _same_flat_order(engine: Any, model: PickledFile, optimizer: PickledFile) -> bool:
    """ZeRO: names and shapes in each flat buffer, as DeepSpeed itself lists them."""
    saved = [[(str(k), tuple(v)) for k, v in group.items()] for group in model.tree["param_shapes"]]
    return saved == [[(k, tuple(v)) for k, v in group.items()] for group in zero_param_shapes(engine)]


def _same_module_order(engine: Any, model: PickledFile, optimizer: PickledFile) -> bool:
    """Without ZeRO: the order of the model, the members of the groups, and how masters are kept."""
    module, state = model.tree["module"], optimizer.tree["optimizer"]
    in_both = [name for name in engine.module.state_dict() if name in module]
    saved, live = base_groups(optimizer), _live_members(engine)
    return (
        in_both == [name for name in module if name in in_both]
        and [len(group["params"]) for group in saved] == list(map(len, live))
        and all(_same_members(engine, optimizer, *each) for each in zip(saved, live, strict=True))
        and all((key in state) == hasattr(engine.optimizer, key) for key in MASTER_ENTRIES)
    )


def _live_members(engine: Any) -> list[list[Any]]:
    """Parameters of the model, by param group, in the order in which the optimizer numbers them."""
    groups = getattr(engine.optimizer, "fp16_groups", None)
    return [list(group) for group in groups or (group["params"] for group in base_optimizer(engine).param_groups)]


def _same_members(engine: Any, optimizer: PickledFile, saved: Mapping[str, Any], live: Sequence[Any]) -> bool:
    """Whether a saved group has the names of the live one; without names, whether order and shapes say nothing else."""
    names = [engine.param_names.get(param) for param in live]
    if saved.get("param_names"):
        return list(saved["param_names"]) == names
    order = {name: place for place, name in enumerate(engine.module.state_dict())}
    places = [order.get(name, -1) for name in names]
    if places != sorted(places):
        return False
    if any(key in optimizer.tree["optimizer"] for key in MASTER_ENTRIES):
        return True  # states of flat tensors
    shapes = [_shape_of(optimizer, number) for number in saved["params"]]
    return all(shape in (None, tuple(param.shape)) for shape, param in zip(shapes, live, strict=True))


def _saved_layout(found: Found) -> str:
    """Which stages' loader reads the files, told by their names: the saved config may be no more than a path."""
    if found.files.model_zero3:
        return "zero3"
    return "zero12" if found.files.optimizer else "whole"
