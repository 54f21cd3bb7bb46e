"""DeepSpeed's own loader: whether it restores a folder correctly that elastic_ckpt does not, and how it is called.

It assigns files to ranks by position and checks next to nothing. It is correct for

- native checkpoints of one save, at the topology, layout and ZeRO stage of the save, and with an optimizer of the
  same hyperparameters;
- weights alone below ZeRO-3, at any data-parallel degree, if one file holds them whole;

and never for optimizer states on NVMe, of which DeepSpeed 0.19 restores only the masters of large sub-groups.

It would run whatever code the pickles of its files name. So it unpickles nothing: it gets objects that this package's
reader has made. Whether they can be made is known before anything is loaded, on all ranks together.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from elastic_ckpt import distributed
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.kept_apart import kept_apart
from elastic_ckpt.engines.schedule_kinds import strange_entry
from elastic_ckpt.engines.schedule_states import is_of_another_scheduler
from elastic_ckpt.errors import (
    UnforeseenError,
    UnknownLayoutError,
    UnsafePickleError,
    UnsupportedError,
)
from elastic_ckpt.formats import CheckpointInfo, MetadataOptions, saved_config
from elastic_ckpt.formats.extra_states import made_extra_states
from elastic_ckpt.formats.flat_facts import counted_steps, partition_numels, steps_of_flats
from elastic_ckpt.formats.model_states import MASTER_ENTRIES
from elastic_ckpt.formats.naming import SWAPPED_FOLDER, sort_names
from elastic_ckpt.formats.own_entries import check_own_entries, module_entries
from elastic_ckpt.formats.pickled import PickledFile, named_errors, open_pickled
from elastic_ckpt.formats.same_save import compare_counts
from elastic_ckpt.formats.saved_schedules import schedule_facts
from elastic_ckpt.formats.saved_states import read_groups, settings
from elastic_ckpt.formats.torch_archive.archive import screen
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.load.entries_read import can_read_layers, can_read_model, can_read_partition, can_take_scaler
from elastic_ckpt.load.flow import LoadCall
from elastic_ckpt.load.metadata import read_checkpoint
from elastic_ckpt.planning.hyperparameters import strange_hyperparameter
from elastic_ckpt.storage import VIEW, file_names, is_folder, is_url, open_stream

#: What DeepSpeed's loader opens in the folder of a tag, with what its ``fast`` writer appends.
_OPENED = re.compile(r".*(?:model|optim)_states\.pt(?:-\d+\.\d+)?")
#: Entries of a param group that do not depend on the kind of optimizer.
_NOT_COMPARED = frozenset({"params", "param_names", "step"})
_LAYOUTS = {0: "unpartitioned", 1: "zero12", 2: "zero12", 3: "zero3"}


def check_objects(found: CheckpointInfo, own_files: bool) -> None:
    """Read the files of a folder for DeepSpeed's loader; ``own_files``: each rank sees files of its own. Collective.

    Raises the same error on every rank, which names the file: :class:`UnsafePickleError` for code,
    :class:`DamagedError` or :class:`UnsupportedError` for what cannot be made.
    """

    def check_mine() -> None:
        names = sorted(filter(_OPENED.fullmatch, file_names(found.folder)))
        for name in names if own_files else names[distributed.rank() :: distributed.world_size()]:
            path = found.path(name)
            with named_errors(path), open_stream(path) as stream:
                screen(stream)
            if name.endswith("model_states.pt"):
                _refuse_unsafe_extra_states(open_pickled(path))

    distributed.all_gather("read the files for DeepSpeed's own loader", check_mine)


def _refuse_unsafe_extra_states(file: PickledFile) -> None:
    """Raise what stands in the way of a value that DeepSpeed's loader would give to a module."""
    for value in made_extra_states(file).values():
        if isinstance(value, UnsafePickleError):
            raise value


def refuse_other_saves(call: LoadCall, found: CheckpointInfo) -> None:
    """Compare the files of all nodes as a load would, before each node's DeepSpeed opens its own alone. Collective.

    Raises the same :class:`DamagedError` or :class:`MismatchError` on every rank.
    """
    options = MetadataOptions.of(call.config, with_states=call.arguments.restores_states, with_client_state=False)
    with suppress(UnsupportedError, UnknownLayoutError, UnforeseenError):  # which DeepSpeed's own loader restores
        read_checkpoint(found, options, rename=call.config.rename)


def at_saved_topology(engine: Any, found: CheckpointInfo) -> bool:
    """Whether the live degrees, and ZeRO-3 or not, are those that the names of a folder's files show. Local."""
    files = found.files
    stage = engine.zero_optimization_stage()
    if not found.by_rank or files.of_experts or bool(files.model_zero3) != (stage == 3):
        return False
    if not stage:
        return not files.optimizer and len(files.model) == dist.get_world_size() // engine.seq_dp_world_size
    partitions = {rank for rank, _ in files.optimizer}
    return len(files.optimizer) == dist.get_world_size() and len(partitions) == engine.seq_dp_world_size


def on_own_disks(engine: Any, found: CheckpointInfo) -> bool:
    """Whether nodes save different files to their own disks (``use_node_local_storage``)."""
    return engine.use_node_local_storage() and found.by_rank and VIEW.get() is not None and not is_url(found.folder)


def deepspeed_loads_it_right(call: LoadCall, found: CheckpointInfo, check_steps: bool, own_files: bool = False) -> bool:
    """Whether DeepSpeed's own loader restores a folder correctly, all its files being of one save. Collective.

    ``check_steps``: whether states must have the step of the counters, not just one: if elastic_ckpt did not understand
    the files; ``own_files``: whether each rank looks at its own files only, where each node saves to its own disk.
    """

    def save() -> tuple[Any, ...] | None:
        """The save that DeepSpeed's loader would read; ``None`` if it is not known to be restored correctly."""
        try:
            comparison = _Comparison(call, found, own_files)
            # DeepSpeed looks for other names than the "fast" writer's
            if not found.by_rank or found.files.by_fast_writer or not comparison.fits():
                return None
            return comparison.one_save(check_steps) if own_files or not comparison.weights_alone else ()
        except Exception:  # of files that cannot be read
            return None

    doing = "compare the checkpoint with the live engine"
    each_has_files = own_files or len(found.files.mp_ranks) > 1 or isinstance(call.engine, PipelineEngine)
    saves = distributed.all_gather(doing, save) if each_has_files else [distributed.broadcast(doing, save)]
    return saves[0] is not None and all(other == saves[0] for other in saves)


class _Comparison:
    """Compares a live engine with the files that DeepSpeed's loader would give to its model-parallel rank. Local."""

    def __init__(self, call: LoadCall, found: CheckpointInfo, own_files: bool) -> None:
        self.engine = call.engine
        self.arguments = call.arguments
        self.found = found
        self.own_files = own_files
        self.stage: int = call.engine.zero_optimization_stage()
        self.with_states = call.arguments.restores_states
        self.files = files = sort_names(file_names(found.folder), is_universal=False) if own_files else found.files
        mp = call.engine.checkpoint_mp_rank
        dp = dist.get_rank(group=compat.dp_group_of(call.engine)) if own_files else None

        def mine(names: Mapping[tuple[int, int], str]) -> list[str]:
            return [name for at, name in sorted(names.items()) if at[1] == mp and dp in (None, at[0])]

        self._models = [files.model[mp]] if mp in files.model else []
        self._models = self._models + mine(files.model_zero3)
        self._optimizers = mine(files.optimizer)
        self._open = cache(self._opened)

    def _opened(self, name: str) -> PickledFile:
        file = open_pickled(self.found.path(name))
        check_own_entries(file)
        return file

    def fits(self) -> bool:
        """Whether topology, layout, names and optimizer are those of the live engine."""
        engine = self.engine
        arguments = self.arguments
        without_zero = isinstance(engine, PipelineEngine) and not self.files.optimizer
        without_states = not (arguments.load_module_only or arguments.load_optimizer_states)
        if (
            # unknown which parameters the states belong to
            (self.with_states and not arguments.load_module_strict and without_zero)
            or compat.swaps_states(engine)
            or kept_apart(engine) is not None
            or (self.stage < 3 and compat.sharded_base_weights(engine))  # one rank's shard, on every rank
            or is_folder(self.found.path(SWAPPED_FOLDER))
            # DeepSpeed 0.19 calls methods of ZeRO-3's optimizer, which an engine made without one lacks
            or (self.stage == 3 and not arguments.has_optimizer)
            # without ZeRO in fp16 or bf16, DeepSpeed keeps old masters, which undo the loaded weights at the next step
            or (self.stage == 0 and without_states and compat.keeps_own_masters(engine))
        ):
            return False
        if not (self._has_all_entries() and self._scheduler_fits() and can_read_layers(self.files, self._open, engine)):
            return False
        if without_zero:
            return self._pipeline_fits()
        return self._has_a_trained_weight() if self.weights_alone else self._native_fits()

    def _has_all_entries(self) -> bool:
        """Whether DeepSpeed's loader finds all that it asks the files for."""
        models, optimizers = (list(map(self._open, names)) for names in (self._models, self._optimizers))
        with_counters = not self.arguments.load_module_only
        with_states = self.with_states
        has_models = all(can_read_model(file, self.engine, with_counters, with_states) for file in models)
        if not has_models or not with_states:
            return has_models
        fields = compat.fields_of_loss_scaler(self.engine)
        has_scalers = all(can_take_scaler(file, fields) for file in optimizers or models)
        return has_scalers and all(can_read_partition(file, self.engine) for file in optimizers)

    def _has_a_trained_weight(self) -> bool:
        """Whether the file with all weights has one that trains; else DeepSpeed's own loads nothing, and is silent."""
        if self.arguments.load_module_strict or not self._models:
            return True
        model = self._open(self._models[0])
        names = module_entries(model.tree["module"], model.path).keys()
        params = dict(self.engine.module.named_parameters())
        trained = {name for name, param in params.items() if param.requires_grad}
        return not names.isdisjoint(trained or params)

    @property
    def weights_alone(self) -> bool:
        """Whether weights alone are asked for, of which one file holds all."""
        files = self.files
        engine = self.engine
        in_one_file = set(files.model) == {0} and not (files.layers or files.of_experts)
        plain = engine.mp_world_size == 1 and not engine.has_moe_layers
        return not self.with_states and in_one_file and self.stage < 3 and plain

    def one_save(self, check_steps: bool) -> tuple[Any, ...] | None:
        """The counters and DeepSpeed version of all files; ``None`` if some are missing, or of another save or size."""
        with_optimizer = self.arguments.has_optimizer
        partitions = 1 if self.own_files else self.engine.seq_dp_world_size
        needed = partitions if self.stage and with_optimizer else len(self._optimizers)
        if self.files.clashes or len(self._optimizers) != needed or not self._models:
            return None
        models, optimizers = (list(map(self._open, names)) for names in (self._models, self._optimizers))
        # legacy zero_optimization.elastic_checkpoint: states without names
        states = (file.section("optimizer_state_dict") for file in optimizers)
        is_legacy = any(isinstance(state.get("base_optimizer_state"), list) for state in states)
        # of whose files another node may have a whole copy
        is_changed = self.own_files and any(file.changed_record() is not None for file in (*models, *optimizers))
        if is_legacy or is_changed or (self.files.model_zero3 and len(models) != len(optimizers)):
            return None
        counters = {tuple(file.tree.get(key) for key in saved_config.COUNTERS) for file in models}
        versions = {file.tree["ds_version"] for file in (*models, *optimizers) if "ds_version" in file.tree}
        facts = {
            (counted_steps(file), repr(settings(read_groups(file, saved_config.base_groups(file)))))
            for file in optimizers
        }
        schedules = {repr(schedule_facts(file.tree.get("lr_scheduler"))) for file in models}
        if any(len(each) > 1 for each in (counters, versions, facts, schedules)):
            return None
        counted = counters.pop()
        is_counted = counted[0] is not None and {int, type(None)}.issuperset(map(type, counted))
        if not is_counted or (optimizers and self._is_mixed(models[0], optimizers)):
            return None
        if optimizers and with_optimizer:
            # DeepSpeed's loader zero-pads masters of another size, and shifts what follows
            step = counted[0] - (counted[2] or 0)
            live = compat.flat_master_numels(self.engine)
            for file in optimizers:
                same_sizes = partition_numels(file, self.stage == 3) == live
                if not same_sizes or (check_steps and not counted_steps(file) <= {step}):
                    return None
        copies_weights = self.own_files and self.stage < 3 and self.engine.mp_world_size == 1
        return (*counted, *versions, *schedules, _weights_digest(models[0]) if copies_weights else "")

    def _is_mixed(self, model: PickledFile, optimizers: Sequence[PickledFile]) -> bool:
        """Whether counters and optimizer states may be of two saves."""
        tree = model.tree
        flats = defaultdict[Any, set[float]](set)
        for file in optimizers:
            for number, step in steps_of_flats(file).items():
                flats[number].add(step)
        _, why = compare_counts(
            tree["global_steps"],
            tree.get("skipped_steps") or 0,
            list(flats.values()),
            [file.section("optimizer_state_dict").get("loss_scaler") for file in optimizers],
            str(tree.get("ds_version")),
            saved_config.counts_ahead(model),
            exact=self.stage == 3,
            has_schedule=tree.get("lr_scheduler") is not None,
        )
        return self.with_states and why is not None

    def _scheduler_fits(self) -> bool:
        """Whether the state that the lr scheduler would be given is of its class; DeepSpeed also gives it ``None``."""
        scheduler = self.engine.lr_scheduler
        arguments = self.arguments
        if scheduler is None or arguments.load_module_only or not arguments.load_lr_scheduler_states:
            return True
        live = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
        saved = self._open(self._models[0]).tree.get("lr_scheduler")
        if saved is None:
            return live is None
        return not is_of_another_scheduler(scheduler, live, saved) and strange_entry(scheduler, live, saved) is None

    def _pipeline_fits(self) -> bool:
        """Whether this rank's file holds states of exactly its stage's parameters; with ZeRO, DeepSpeed's fails too."""
        if self.stage:
            return False
        model = self._open(self.files.model[self.engine.checkpoint_mp_rank])
        groups = saved_config.base_groups(model)
        live = compat.base_optimizer(self.engine).param_groups
        here = len(groups) == len(live) and all(
            _same_shapes(model, saved["params"], group["params"]) for saved, group in zip(groups, live, strict=True)
        )
        plain = not any(key in model.tree["optimizer"] for key in MASTER_ENTRIES)
        return here and _takes_hyperparameters(model, live) and plain and self._same_topology(model)

    def _native_fits(self) -> bool:
        engine = self.engine
        model = self._open(self._models[0])
        optimizer = self._open(self._optimizers[0]) if self._optimizers else model
        features = saved_config.features_in(model) | saved_config.features_in(optimizer)
        same = self._same_topology(model) and compat.same_features(engine, features)
        if not self.arguments.load_module_strict:
            names = module_entries(model.tree["module"], model.path).keys()
            trained = {name for name, param in engine.module.named_parameters() if param.requires_grad}
            if self.with_states and not self.own_files:  # what does not match would have to be listed
                same = same and names == engine.module.state_dict().keys()
            elif self.stage == 0:
                same = same and names >= trained
        return same and (not self.with_states or self._same_optimizer(model, optimizer))

    def _same_topology(self, model: PickledFile) -> bool:
        engine = self.engine
        files = self.files
        # file names show which stages' loader reads them: the saved config may be only a path
        layout = "zero3" if files.model_zero3 else "zero12" if files.optimizer else "unpartitioned"
        return (
            model.tree.get("dp_world_size") == engine.seq_dp_world_size
            and model.tree.get("mp_world_size") == engine.mp_world_size
            and len(files.mp_ranks) == dist.get_world_size() // max(engine.seq_dp_world_size, 1)
            and layout == _LAYOUTS.get(self.stage)
        )

    def _same_optimizer(self, model: PickledFile, optimizer: PickledFile) -> bool:
        """Whether the saved optimizer, told by its hyperparameters' names, updates the same tensors in this order."""
        engine = self.engine
        files = self.files
        in_bf16 = any(name.startswith("bf16_") for name in files.optimizer.values())
        if files.optimizer and in_bf16 != engine.bfloat16_enabled():
            return False
        in_fp16 = bool(saved_config.config_section(model, "fp16").get("enabled"))
        if in_fp16 != engine.fp16_enabled() and saved_config.saved_config(model) is not None:
            return False
        if not _takes_hyperparameters(optimizer, compat.base_optimizer(engine).param_groups):
            return False
        if self.stage == 0:
            return self._same_module_order(model, optimizer)
        saved = [[(str(k), tuple(v)) for k, v in group.items()] for group in model.tree.get("param_shapes") or ()]
        return saved == [[(k, tuple(v)) for k, v in group.items()] for group in compat.zero_param_shapes(engine)]

    def _same_module_order(self, model: PickledFile, optimizer: PickledFile) -> bool:
        """Without ZeRO: the order of the model, the members of the groups, and how masters are kept."""
        engine = self.engine
        module = module_entries(model.tree["module"], model.path)
        state = optimizer.tree["optimizer"]
        in_both = [name for name in engine.module.state_dict() if name in module]
        saved = saved_config.base_groups(optimizer)
        live = compat.numbered_params(engine)
        return (
            in_both == [name for name in module if name in in_both]
            and [len(group["params"]) for group in saved] == list(map(len, live))
            and all(_same_members(engine, optimizer, *each) for each in zip(saved, live, strict=True))
            and all((key in state) == hasattr(engine.optimizer, key) for key in MASTER_ENTRIES)
        )


def _takes_hyperparameters(file: PickledFile, live: Sequence[Mapping[str, Any]]) -> bool:
    """Whether saved param groups have the live ones' hyperparameters, with values that the optimizer can have."""
    saved = saved_config.base_groups(file)
    if [set(group) - _NOT_COMPARED for group in saved] != [set(group) - _NOT_COMPARED for group in live]:
        return False
    values = read_groups(file, saved)
    return all(strange_hyperparameter(now, was) is None for now, was in zip(live, values, strict=True))


def _same_shapes(file: PickledFile, numbers: Sequence[int], live: Sequence[torch.Tensor]) -> bool:
    """Whether saved parameters, by their states if they have any, have the live ones' shapes."""
    states = [saved_config.base_state(file)["state"].get(number, {}).values() for number in numbers]
    shapes = [next((ref.shape for ref in each if isinstance(ref, TensorRef) and ref.shape), None) for each in states]
    return len(shapes) == len(live) and all(a in (None, tuple(b.shape)) for a, b in zip(shapes, live, strict=True))


def _weights_digest(model: PickledFile) -> str:
    """Equal for copies of a file in which weights are, whose client states may differ."""
    entries = module_entries(model.section("module"), model.path).items()
    numbers = {name: model.records.index(ref.byte_offset) for name, ref in entries if isinstance(ref, TensorRef)}
    sums = [(name, number is not None and model.records.crc32s[number]) for name, number in sorted(numbers.items())]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


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
    # else states of flat tensors
    is_plain = not any(key in optimizer.tree["optimizer"] for key in MASTER_ENTRIES)
    return not is_plain or _same_shapes(optimizer, saved["params"], live)
