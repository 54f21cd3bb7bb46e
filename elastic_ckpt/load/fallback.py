"""Decides whether DeepSpeed's own loader restores a folder correctly that elastic_ckpt does not.

It assigns files to ranks by position and checks next to nothing. It is correct for

- native checkpoints of one save, at the topology, layout and ZeRO stage of the save, and with an optimizer of the
  same hyperparameters;
- weights alone below ZeRO-3, at any data-parallel degree, if one file holds them whole;

and never for optimizer states on NVMe, of which DeepSpeed 0.19 restores only the masters of large sub-groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from elastic_ckpt import distributed
from elastic_ckpt.engines.compat import (
    base_optimizer,
    dp_group_of,
    flat_master_numels,
    has_optimizer,
    keeps_own_masters,
    numbered_params,
    swaps_states,
    zero_param_shapes,
)
from elastic_ckpt.engines.select import same_features
from elastic_ckpt.engines.training_state import LoadArguments, restores_states
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.model_states import MASTER_ENTRIES, PLAIN, module_entries
from elastic_ckpt.formats.naming import SWAPPED_FOLDER, sort_names
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.same_save import Counts, explained_counts, scaled_steps
from elastic_ckpt.formats.saved_config import (
    COUNTERS,
    base_groups,
    config_section,
    counts_ahead,
    features_in,
    saved_config,
)
from elastic_ckpt.formats.saved_states import read_groups, settings
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.values import plain_numbers
from elastic_ckpt.storage.local import file_names

#: Entries of a param group that do not depend on the kind of optimizer.
_NOT_COMPARED = frozenset({"params", "param_names", "step"})
_LAYOUTS = {0: "whole", 1: "zero12", 2: "zero12", 3: "zero3"}


def deepspeed_loads_it_right(
    engine: Any, found: CheckpointInfo, arguments: LoadArguments, check_steps: bool, own_files: bool = False
) -> bool:
    """Whether DeepSpeed's own loader restores a folder correctly, all its files being of one save. Collective.

    Args:
        engine, found, arguments: the live engine, the checkpoint, and arguments of ``load_checkpoint``.
        check_steps: whether states must have the step of the counters: if elastic_ckpt did not understand the files.
        own_files: whether each rank looks at its own files only: if each node saves to its own disk.
    """

    def save() -> tuple[Any, ...] | None:
        try:
            return _save_of(engine, found, arguments, check_steps, own_files)
        except Exception:  # files that cannot be read are not known to load correctly
            return None

    doing = "compare the checkpoint with the live engine"
    each_has_files = own_files or len(found.files.mp_ranks) > 1 or isinstance(engine, PipelineEngine)
    saves = distributed.all_gather(doing, save) if each_has_files else [distributed.broadcast(doing, save)]
    return saves[0] is not None and all(other == saves[0] for other in saves)


def on_own_disks(engine: Any, found: CheckpointInfo) -> bool:
    """Whether nodes save different files to their own disks (``use_node_local_storage``). Collective."""
    if not engine.use_node_local_storage() or not found.by_rank:
        return False

    def list_files() -> list[tuple[str, int, int, int]]:
        try:
            entries = [(entry.name, entry.stat()) for entry in os.scandir(found.folder) if entry.is_file()]
        except OSError:  # there is no such folder
            return []
        return sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in entries)

    everybody = distributed.all_gather("list the checkpoint's files", list_files)
    return any(other != everybody[0] for other in everybody)


def _save_of(
    engine: Any, found: CheckpointInfo, arguments: LoadArguments, check_steps: bool, own_files: bool
) -> tuple[Any, ...] | None:
    """The save that DeepSpeed's loader would read; ``None`` if it is not known to be restored correctly. Local."""
    if not found.by_rank or found.files.by_fast_writer:
        return None  # DeepSpeed looks for other names than the "fast" writer's
    if own_files:
        found = _own_part(engine, found)
    comparison = _Comparison(engine, found, arguments, own_files)
    if not comparison.fits():
        return None
    if not own_files and comparison.whole_weights:
        return ()
    return comparison.one_save(1 if own_files else engine.seq_dp_world_size, check_steps)


def _own_part(engine: Any, found: CheckpointInfo) -> CheckpointInfo:
    """The folder as this rank sees it, without other data-parallel ranks' files."""
    files = sort_names(file_names(found.folder), is_universal=False)
    rank = dist.get_rank(group=dp_group_of(engine))
    mine = replace(
        files,
        optimizer={at: name for at, name in files.optimizer.items() if at[0] == rank},
        model_zero3={at: name for at, name in files.model_zero3.items() if at[0] == rank},
    )
    return replace(found, files=mine)


class _Comparison:
    """Compares a live engine with the files that DeepSpeed's loader would give to its model-parallel rank. Local.

    DeepSpeed's loader trusts pickles in any case; this comparison needs no trust.
    """

    def __init__(self, engine: Any, found: CheckpointInfo, arguments: LoadArguments, own_files: bool) -> None:
        self.engine = engine
        self.own_files = own_files
        self.found = found
        self.arguments = arguments
        self.stage: int = engine.zero_optimization_stage()
        self.with_states = restores_states(arguments)
        mp, files = engine.checkpoint_mp_rank, found.files
        self._models = [name for at, name in files.model.items() if at == mp]
        self._models += [name for (_, at), name in sorted(files.model_zero3.items()) if at == mp]
        self._optimizers = [name for (_, at), name in sorted(files.optimizer.items()) if at == mp]
        self._opened: dict[str, PickledFile] = {}

    def fits(self) -> bool:
        """Whether topology, layout, names and optimizer are those of the live engine."""
        engine = self.engine
        without_zero = isinstance(engine, PipelineEngine) and not self.found.files.optimizer
        if self.with_states and not self.arguments.load_module_strict and without_zero:
            return False  # unknown which parameters the states belong to
        if swaps_states(engine) or os.path.isdir(self.found.path(SWAPPED_FOLDER)):
            return False
        # DeepSpeed 0.19 calls methods of ZeRO-3's optimizer, which an engine made without one lacks
        if self.stage == 3 and not self.arguments.has_optimizer:
            return False
        # without ZeRO in fp16 or bf16, DeepSpeed keeps old masters, which undo the loaded weights at the next step
        without_states = not (self.arguments.load_module_only or self.arguments.load_optimizer_states)
        if self.stage == 0 and without_states and keeps_own_masters(engine):
            return False
        return self._pipeline_fits() if without_zero else self.whole_weights or self._native_fits()

    @cached_property
    def whole_weights(self) -> bool:
        files, engine = self.found.files, self.engine
        whole_here = set(files.model) == {0} and not (files.layers or files.of_experts)
        plain = engine.mp_world_size == 1 and not engine.has_moe_layers
        return not self.with_states and whole_here and self.stage < 3 and plain

    def one_save(self, partitions: int, check_steps: bool) -> tuple[Any, ...] | None:
        """The counters and DeepSpeed version of all files; ``None`` if some are missing, or of another save or size.

        Args:
            partitions: number of data-parallel ranks that must have files.
            check_steps: see :func:`deepspeed_loads_it_right`; without it, states must still be of one step.
        """
        with_optimizer = has_optimizer(self.engine)
        needed = partitions if self.stage and with_optimizer else len(self._optimizers)
        if self.found.files.clashes or len(self._optimizers) != needed or not self._models:
            return None
        models, optimizers = ([self._open(name) for name in names] for names in (self._models, self._optimizers))
        incomplete = self.found.files.model_zero3 and len(models) != len(optimizers)
        if incomplete or any(map(_is_legacy, optimizers)):
            return None
        counters = {tuple(file.tree.get(key) for key in COUNTERS) for file in models}
        versions = {file.tree["ds_version"] for file in (*models, *optimizers) if "ds_version" in file.tree}
        facts = {(_steps(file), repr(settings(read_groups(file, base_groups(file))))) for file in optimizers}
        if len(counters) > 1 or len(versions) > 1 or len(facts) > 1:
            return None
        counted = counters.pop()
        if counted[0] is None or (optimizers and self._is_mixed(models[0], optimizers)):
            return None
        if optimizers and with_optimizer:
            # DeepSpeed's loader zero-pads masters of another size, and shifts what follows
            step, live = counted[0] - (counted[2] or 0), flat_master_numels(self.engine)
            for file in optimizers:
                same_sizes = list(_partition_numels(file, self.stage == 3)) == live
                if not same_sizes or (check_steps and not _steps(file) <= {step}):
                    return None
        return (*counted, *versions)

    def _is_mixed(self, model: PickledFile, optimizers: Sequence[PickledFile]) -> bool:
        """Whether counters and optimizer states may be of two saves."""
        tree = model.tree
        counts = Counts(
            tree["global_steps"],
            tree.get("skipped_steps") or 0,
            frozenset(chain.from_iterable(map(_steps, optimizers))),
            scaled_steps(file.section("optimizer_state_dict").get("loss_scaler") for file in optimizers),
            explained_counts(PLAIN, str(tree.get("ds_version")), counts_ahead(model), elsewhere=True),
        )
        return self.with_states and counts.contradiction(exact=self.stage == 3) is not None

    def _open(self, name: str) -> PickledFile:
        if name not in self._opened:
            self._opened[name] = open_pickled(self.found.path(name))
        return self._opened[name]

    def _pipeline_fits(self) -> bool:
        """A pipeline without ZeRO: whether this rank's file holds states of exactly its stage's parameters.

        With ZeRO, elastic_ckpt restores pipelines itself, and what it refuses DeepSpeed cannot restore either.
        """
        if self.stage:
            return False
        model = self._open(self.found.files.model[self.engine.checkpoint_mp_rank])
        groups, live = base_groups(model), base_optimizer(self.engine).param_groups
        saved = [[_shape_of(model, number) for number in group["params"]] for group in groups]
        here = [[tuple(param.shape) for param in group["params"]] for group in live]
        same_shapes = len(saved) == len(here) and all(map(_same_shapes, saved, here))
        plain = not any(key in model.tree["optimizer"] for key in MASTER_ENTRIES)
        return same_shapes and _same_hyperparameters(groups, live) and plain and self._same_topology(model)

    def _native_fits(self) -> bool:
        engine, model = self.engine, self._open(self._models[0])
        optimizer = self._open(self._optimizers[0]) if self._optimizers else model
        same = self._same_topology(model) and same_features(engine, features_in(model) | features_in(optimizer))
        if not self.arguments.load_module_strict:
            names = module_entries(model.tree["module"]).keys()
            trained = {name for name, param in engine.module.named_parameters() if param.requires_grad}
            if self.with_states and not self.own_files:  # what does not match would have to be listed
                same = same and names == engine.module.state_dict().keys()
            elif self.stage == 0:
                same = same and names >= trained
        return same and (not self.with_states or self._same_optimizer(model, optimizer))

    def _same_topology(self, model: PickledFile) -> bool:
        engine, files = self.engine, self.found.files
        # file names show which stages' loader reads them: the saved config may be only a path
        layout = "zero3" if files.model_zero3 else "zero12" if files.optimizer else "whole"
        return (
            model.tree.get("dp_world_size") == engine.seq_dp_world_size
            and model.tree.get("mp_world_size") == engine.mp_world_size
            and len(files.mp_ranks) == dist.get_world_size() // max(engine.seq_dp_world_size, 1)
            and layout == _LAYOUTS.get(self.stage)
        )

    def _same_optimizer(self, model: PickledFile, optimizer: PickledFile) -> bool:
        """Whether the saved optimizer is of the live one's kind and updates the same tensors in the same order.

        DeepSpeed's own loader assigns states by position, between any two optimizers; the names of hyperparameters
        distinguish most kinds.
        """
        engine, files = self.engine, self.found.files
        in_bf16 = any(name.startswith("bf16_") for name in files.optimizer.values())
        if files.optimizer and in_bf16 != engine.bfloat16_enabled():
            return False
        in_fp16 = bool(config_section(model, "fp16").get("enabled"))
        if in_fp16 != engine.fp16_enabled() and saved_config(model) is not None:
            return False
        if not _same_hyperparameters(base_groups(optimizer), base_optimizer(engine).param_groups):
            return False
        if self.stage == 0:
            return self._same_module_order(model, optimizer)
        saved = [[(str(k), tuple(v)) for k, v in group.items()] for group in model.tree.get("param_shapes") or ()]
        return saved == [[(k, tuple(v)) for k, v in group.items()] for group in zero_param_shapes(engine)]

    def _same_module_order(self, model: PickledFile, optimizer: PickledFile) -> bool:
        """Without ZeRO: the order of the model, the members of the groups, and how masters are kept."""
        engine, module, state = self.engine, module_entries(model.tree["module"]), optimizer.tree["optimizer"]
        in_both = [name for name in engine.module.state_dict() if name in module]
        saved, live = base_groups(optimizer), numbered_params(engine)
        return (
            in_both == [name for name in module if name in in_both]
            and [len(group["params"]) for group in saved] == list(map(len, live))
            and all(_same_members(engine, optimizer, *each) for each in zip(saved, live, strict=True))
            and all((key in state) == hasattr(engine.optimizer, key) for key in MASTER_ENTRIES)
        )


def _same_hyperparameters(saved: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> bool:
    return [set(group) - _NOT_COMPARED for group in saved] == [set(group) - _NOT_COMPARED for group in live]


def _shape_of(model: PickledFile, number: int) -> tuple[int, ...] | None:
    """Shape of a parameter by its states; ``None`` if it has none."""
    state = model.tree["optimizer"]["state"].get(number, {})
    return next((ref.shape for ref in state.values() if isinstance(ref, TensorRef) and ref.shape), None)


def _same_shapes(saved: Sequence[tuple[int, ...] | None], live: Sequence[tuple[int, ...]]) -> bool:
    return len(saved) == len(live) and all(a in (None, b) for a, b in zip(saved, live, strict=True))


def _same_members(engine: Any, optimizer: PickledFile, saved: Mapping[str, Any], live: Sequence[Any]) -> bool:
    """Whether a saved group has the live one's names; without names, whether order and shapes agree."""
    names = [engine.param_names.get(param) for param in live]
    if saved.get("param_names"):
        return list(saved["param_names"]) == names
    # of the module, whose hooks may rename entries of its state dict
    named = engine.module.named_parameters(remove_duplicate=False)
    order = {name: position for position, (name, _) in enumerate(named)}
    positions = [order.get(name, -1) for name in names]
    if positions != sorted(positions):
        return False
    if any(key in optimizer.tree["optimizer"] for key in MASTER_ENTRIES):
        return True  # states of flat tensors
    return _same_shapes([_shape_of(optimizer, number) for number in saved["params"]], [tuple(p.shape) for p in live])


def _partition_numels(file: PickledFile, zero3: bool) -> Iterator[int]:
    """Elements of each partition, with the padding that ZeRO-1 and 2 cut off the masters."""
    state = file.section("optimizer_state_dict")
    refs: Sequence[TensorRef] = state["fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups"]
    paddings = [0] * len(refs) if zero3 else state["group_paddings"]
    base = [
        state[key] for key in ("base_optimizer_state", "optimizer_state_dict") if isinstance(state.get(key), Mapping)
    ]
    for index, (ref, padding) in enumerate(zip(refs, paddings, strict=True)):
        values = base[0]["state"].get(index, {}).values() if base else ()
        # a flat state keeps its padding
        yield next((v.numel for v in values if isinstance(v, TensorRef) and v.shape), ref.numel + padding)


def _is_legacy(file: PickledFile) -> bool:
    """Whether the base optimizer's state has no names (legacy ``zero_optimization.elastic_checkpoint``)."""
    return isinstance(file.section("optimizer_state_dict").get("base_optimizer_state"), list)


def _steps(file: PickledFile) -> frozenset[int]:
    state = file.section("optimizer_state_dict")
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    values = base["state"].values() if isinstance(base, Mapping) else ()
    counted = (value for value in values if isinstance(value, Mapping) and "step" in value)
    return frozenset(int(plain_numbers(file, {"step": value["step"]})["step"]) for value in counted)
