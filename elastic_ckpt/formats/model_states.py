"""``*_model_states.pt``: weights, buffers, shapes, counters, scheduler and client state.

ZeRO-1/2 writes one per job (``mp_rank_00``), ZeRO-3 one per data-parallel rank. Source:
``DeepSpeedEngine._common_checkpoint_state`` (engine.py).

Without ZeRO partitions (stage 0) the optimizer's state is in it too. Of its three layouts, *plain* (fp32) is the state
dict alone: the weights in ``module`` are the masters. *Unfused* (``FP16_UnfusedOptimizer``, fp16 and bf16) adds
``fp32_groups``, one master per parameter, and *fused* (``FP16_Optimizer``) ``fp32_groups_flat``, one flat master per
param group. All number their parameters. Sources: ``fp16/unfused_optimizer.py``, ``fp16/fused_optimizer.py``.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

from elastic_ckpt.config import CONFIG_KEY
from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.core.flat_ranges import checked_tensor_shape
from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.core.shard_specs import DeclaredSpecs, declared_by
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import Features, RecordedCounts
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    WITHOUT_STATES,
    DamagedError,
    Remedy,
    UnknownLayoutError,
    UnsupportedError,
)
from elastic_ckpt.formats.base import refuse_other_saves
from elastic_ckpt.formats.extra_states import digests, extra_states_in
from elastic_ckpt.formats.own_entries import (
    check_base_state,
    check_masters,
    check_own_entries,
    checked_tree,
    module_entries,
    text_of,
)
from elastic_ckpt.formats.pickled import PickledFile, named_errors, opened_once
from elastic_ckpt.formats.saved_config import (
    COUNTERS,
    StatedDegrees,
    config_section,
    counts_ahead,
    features_in,
    positive_int,
    read_counters,
    run_arguments,
    saved_config,
    stated_degrees,
)
from elastic_ckpt.formats.saved_schedules import Fact, schedule_facts
from elastic_ckpt.formats.saved_states import StatesOfOne, read_groups, sort_states, with_strangers
from elastic_ckpt.formats.stacked_experts import stacked_experts
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import read_bytes

PLAIN = "plain"
UNFUSED = "unfused"
FUSED = "fused"
#: Entry with the masters, which is also the live optimizer's attribute -> layout.
MASTER_ENTRIES = {"fp32_groups": UNFUSED, "fp32_groups_flat": FUSED}
#: Entries that DeepSpeed leaves out before 0.19.4 if there are experts (``_save_moe_checkpoint``, engine.py), and
#: DeeperSpeed 0.3.15 always.
_ADDED_IN_0_19_4 = frozenset({"buffer_names", "param_shapes", "ds_config", "ds_version"})
Shape = tuple[int, ...]
_DEFAULTS = StateOptions()


@dataclass(frozen=True)
class UnpartitionedState(SourceFile):
    """An optimizer that is not partitioned, of a model-states file or ``expp_rank_E_mp_rank_00_optim_states.pt``."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "ep_rank")

    kind: str  # :data:`PLAIN`, :data:`UNFUSED` or :data:`FUSED`
    # by param group
    groups: tuple[Mapping[str, Any], ...]  # hyperparameters
    members: tuple[tuple[int, ...], ...]  # numbers of its tensors: parameters, or the one flat tensor (fused)
    names: tuple[tuple[str, ...], ...] | None  # of the parameters, if the optimizer was given named ones
    masters: tuple[tuple[TensorRef, ...], ...]  # fp32; empty if plain
    states: Mapping[int, StatesOfOne]  # by number
    scaler: Mapping[str, Any]  # entries about loss scaling
    ep_rank: int = 0


@dataclass(frozen=True)
class ModelShard(SourceFile):
    """What one model-states file holds."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "buffers_crc32", "extra_states")

    #: Per group (ZeRO-3: per sub-group), names and logical shapes in flat-buffer order.
    param_shapes: tuple[tuple[tuple[str, Shape], ...], ...]
    weights: Mapping[str, TensorRef]  # module entries with data
    buffer_names: tuple[str, ...]  # of all module buffers, with those in files of pipeline layers
    buffers_crc32: int  # of the bytes of those in this file, to see whether ranks differ
    # of parameters that no optimizer owned
    frozen_shapes: tuple[tuple[str, Shape], ...]  # logical
    frozen_fragments: Mapping[str, TensorRef]  # this file's data
    frozen_recorded: bool  # whether the file lists them, even none (ZeRO-2 and 3 do, unless excluded)
    shared: Mapping[str, str]  # tied name -> name with the data
    counters: Mapping[str, Any]
    ds_version: str
    zero: Mapping[str, Any]  # the DeepSpeed config's ``zero_optimization`` section
    alignment: int  # declared padding: the multiple that ZeRO-3's partitions were padded to, in elements; 1: none
    features: Features  # what only DeepSpeed's own loader restores
    optimizer: UnpartitionedState | None  # if it was not partitioned (ZeRO stage 0)
    micro_batches: int | None = None  # per step, as the config says
    without_states: bool = False  # whether no file has any (:func:`saved_without_states`)
    lacks_names: bool = False  # lacks :data:`_ADDED_IN_0_19_4`, which assembling.py finds
    stated: StatedDegrees = field(default_factory=StatedDegrees)
    declared: DeclaredSpecs = field(default_factory=DeclaredSpecs)
    #: Parameter in which AutoEP stacks experts -> the experts on each expert-parallel rank.
    stacked: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)  # plain values among the run's arguments
    counts: RecordedCounts = field(default_factory=RecordedCounts)
    #: Module entries that are no tensors, without extra state, and what each is.
    other_entries: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)  # FQN -> name in the file, with what wrappers add to it
    #: Digests of what modules keep beside parameters and buffers, by name.
    extra_states: Mapping[str, bytes] = field(default_factory=dict)
    schedule: tuple[Fact, ...] | None = None  # of the lr scheduler, which ``engine.step`` steps, if the engine had one

    def may_be_folded(self, stages: int) -> bool:
        """Whether a ``DualPipeVModule`` of so many ranks may have saved it.

        DeepSpeed has it since 0.19.8, and refuses to run it on less than two micro-batches a stage.
        """
        release = tuple(int(number) for number in re.findall(r"\d{1,9}", self.ds_version)[:3])
        is_new = not release or release >= (0, 19, 8)
        return is_new and (self.micro_batches is None or self.micro_batches >= 2 * stages)

    @property
    def has_schedule(self) -> bool:
        return self.schedule is not None

    @property
    def buffers(self) -> list[str]:
        """Module buffers with data in this file."""
        return [name for name in self.buffer_names if name in self.weights]


def index_model_states(file: PickledFile, options: StateOptions = _DEFAULTS, weights_alone: bool = False) -> ModelShard:
    """Read one model-states file; :class:`DamagedError` if it lacks an entry that DeepSpeed always writes.

    ``weights_alone``: whether no optimizer-states file is needed, in which alone DeepSpeed before 0.6.2 differs in
    what cannot be read.
    """
    check_own_entries(file)
    is_old = "ds_version" not in file.tree and "csr_tensor_module_names" in file.tree
    if is_old and not weights_alone:
        refuse_old(file, ["csr_tensor_module_names"])
    lacks_names = is_old or ("num_experts" in file.tree and not _ADDED_IN_0_19_4 & file.tree.keys())
    buffer_names = () if lacks_names else tuple(map(without_hidden, map(str, file.section("buffer_names"))))
    module = module_entries(file.section("module"), file.path)
    extra = {name: module.pop(name) for name in [*module] if is_extra_state(name)}
    weights = {name: ref for name, ref in module.items() if isinstance(ref, TensorRef)}
    others = {name: text_of(each) for name, each in module.items() if name not in weights}
    buffers = [name for name in buffer_names if name in weights]
    tree = file.tree
    run = run_arguments(tree.get("args"), os.path.dirname(file.path))
    param_shapes = tuple(_named_shapes(file, group) for group in tree.get("param_shapes") or ())
    _refuse_other_shapes(file, chain.from_iterable(param_shapes), weights)
    return ModelShard(
        **file.facts,
        param_shapes=param_shapes,
        weights=weights,
        buffer_names=buffer_names,
        buffers_crc32=_checksum(file, [weights[name] for name in buffers]),
        frozen_shapes=_named_shapes(file, tree.get("frozen_param_shapes") or {}),
        frozen_fragments={
            without_hidden(name): ref for name, ref in (tree.get("frozen_param_fragments") or {}).items()
        },
        frozen_recorded=tree.get("frozen_param_shapes") is not None,
        shared=_tied_names(file, {name: ref for name, ref in weights.items() if name not in buffers}),
        counters={key: file.section(key) for key in COUNTERS[:1] + COUNTERS[2:]} | read_counters(file),
        ds_version="" if lacks_names else str(file.section("ds_version")),
        zero=dict(config_section(file, "zero_optimization")),
        micro_batches=positive_int(saved_config(file) or {}, "gradient_accumulation_steps"),
        alignment=positive_int(config_section(file, CONFIG_KEY), "align_partitions") or 1,
        features=features_in(file),
        optimizer=index_unpartitioned(file, options),
        without_states=saved_without_states(file),
        lacks_names=lacks_names,
        stated=stated_degrees(tree, saved_config(file) or {}, run),
        declared=declared_by(tree.get("universal_checkpoint_info")),
        stacked=stacked_experts(file),
        run=run,
        counts=counts_ahead(file),
        other_entries=others,
        extra_states=digests(file, extra),
        hidden=_hidden_names(tree),
        schedule=schedule_facts(tree.get("lr_scheduler")),
    )


def model_indexer(
    options: StateOptions = _DEFAULTS, weights_alone: bool = False
) -> Callable[[PickledFile], ModelShard]:
    """:func:`index_model_states`, which looks once at a tree that several files share."""
    known: dict[int, tuple[Any, ModelShard]] = {}  # with the tree, so that its id stays unique

    def index(file: PickledFile) -> ModelShard:
        if id(file.tree) not in known:
            known[id(file.tree)] = file.tree, index_model_states(file, options, weights_alone)
            return known[id(file.tree)][1]
        same = known[id(file.tree)][1]
        # what follows from bytes behind the tree is each file's own
        optimizer = index_unpartitioned(file, options) if same.optimizer is not None else None
        crc32 = _checksum(file, map(same.weights.__getitem__, same.buffers))
        extra = digests(file, extra_states_in(file)) if same.extra_states else {}
        return replace(same, **file.facts, buffers_crc32=crc32, extra_states=extra, optimizer=optimizer)

    return index


def _refuse_other_shapes(
    file: PickledFile, listed_shapes: Iterable[tuple[str, Shape]], weights: Mapping[str, TensorRef]
) -> None:
    """Raise :class:`DamagedError` where a listed parameter has another shape than its weight in the same file.

    ZeRO-3 leaves weights without elements there, or none.
    """
    for name, shape in listed_shapes:
        weight = weights.get(name)
        if weight is not None and weight.numel and weight.shape != shape:
            problem = "this file lists a parameter with another shape than its weight has there"
            expected = f"param_shapes / {name}: {weight.shape}, as module / {name}"
            remedy = Remedy("use another tag")
            raise DamagedError(problem, file.path, expected, str(shape), parameter=name, remedy=remedy)


def _tied_names(file: PickledFile, params: Mapping[str, TensorRef]) -> dict[str, str]:
    """Later name -> first, by the bytes: DeepSpeed's list lacks some and, below ZeRO-3, has all that are empty."""
    shared_params: Mapping[str, str] = file.tree.get("shared_params") or {}
    listed = {without_hidden(name): without_hidden(first) for name, first in shared_params.items()}
    is_zero3 = os.path.basename(file.path).startswith("zero_pp_rank_")
    shared = {name: first for name, first in listed.items() if is_zero3 or name not in params or params[name].numel}
    first: dict[TensorRef, str] = {}
    for name, ref in params.items():
        if ref.numel and first.setdefault(ref, name) != name:
            shared[name] = first[ref]
    return shared


def refuse_old(file: PickledFile, signs: Sequence[str]) -> None:
    """Refuse what DeepSpeed before 0.6.2 leaves: parameters without shapes, groups or paddings."""
    if signs:
        problem = "checkpoints of DeepSpeed before 0.6.2, or gpt-neox's DeeperSpeed 0.3.15, are not supported"
        remedy = "resume it once with the code that wrote it, on a DeepSpeed of 0.6.2 or later, and save it there"
        raise UnsupportedError(problem, file.path, "files of 0.6.2 or later", ", ".join(signs), remedy=remedy)


def refuse_own_kind(file: PickledFile, state: Any) -> None:
    """Refuse the state dict of an optimizer that has nothing of torch's, nor of what DeepSpeed wraps around it."""
    of_optimizers = {"state", "param_groups", "optimizer_state_dict", "base_optimizer_state"}
    if isinstance(state, Mapping) and len(state) > 1 and state.keys().isdisjoint(of_optimizers):
        problem = "the saved optimizer has a state dict of its own kind, which is not supported"
        expected = "'state' and 'param_groups', as torch's optimizers have them"
        remedy = WITHOUT_STATES, AT_ITS_TOPOLOGY
        raise UnsupportedError(problem, file.path, expected, sorted(map(str, state))[:8], remedy=remedy)


def _named_shapes(file: PickledFile, shapes: Mapping[str, Any]) -> tuple[tuple[str, Shape], ...]:
    with named_errors(file.path):
        return tuple(
            (without_hidden(str(name)), checked_tensor_shape(shape, str(name))) for name, shape in shapes.items()
        )


def _hidden_names(tree: Mapping[str, Any]) -> dict[str, str]:
    listed = chain.from_iterable(tree.get("param_shapes") or ())
    return {fqn: name for name in listed if (fqn := without_hidden(name)) != name}


def _checksum(file: PickledFile, refs: Iterable[TensorRef]) -> int:
    """The CRC32 of the CRC32s of some tensors, each of which is read once, however often it is named."""
    every = list(refs)
    distinct = dict.fromkeys(every)
    crc32s = dict(zip(distinct, map(zlib.crc32, read_bytes(file, distinct)), strict=True))
    return zlib.crc32(b"".join(crc32s[ref].to_bytes(4, "little") for ref in every))


def check_same_save(shards: Sequence[ModelShard], one_rank: bool = True) -> None:
    """Raise :class:`DamagedError` for a file of another save; ``one_rank``: all are of one model-parallel rank."""
    whats = ("counters", "ds_version", *(("param_shapes", "frozen_shapes", "buffers", "schedule") if one_rank else ()))
    words = {"schedule": "facts of the lr scheduler"}
    refuse_other_saves(
        shards, lambda shard: {f"{words.get(what, what)} differ": getattr(shard, what) for what in whats}
    )


@opened_once
def index_unpartitioned(file: PickledFile, options: StateOptions, ep_rank: int = 0) -> UnpartitionedState | None:
    """The optimizer entry of a file, ``None`` without one (under ZeRO, where DeepSpeed may write the file without)."""
    saved = checked_tree(file).get("optimizer")
    if saved is None or (isinstance(saved, Mapping) and "base_optimizer_state" in saved):
        return None  # BF16_Optimizer of a pipeline writes a partition here, beside the files of all of them
    if not isinstance(saved, Mapping):
        raise _damaged(file, "a dict", type(saved).__name__)
    kind = next((kind for key, kind in MASTER_ENTRIES.items() if key in saved), PLAIN)
    state = saved if kind == PLAIN else saved.get("optimizer_state_dict")
    if not isinstance(state, Mapping) or "state" not in state or "param_groups" not in state:
        refuse_own_kind(file, state)
        raise _damaged(file, "'state' and 'param_groups' of a torch optimizer", sorted(map(str, saved))[:8])
    check_base_state(file, state)
    masters: tuple[tuple[TensorRef, ...], ...] = ()
    if kind != PLAIN:
        entry = next(key for key in MASTER_ENTRIES if key in saved)
        raw = saved[entry]
        check_masters(file, entry, raw, [group["params"] for group in state["param_groups"]], kind == FUSED)
        masters = tuple(tuple(group) if kind == UNFUSED else (group,) for group in raw)
    for master in chain.from_iterable(masters):
        if not master.is_contiguous:
            raise _damaged(file, "dense fp32 masters", str(master)[:200])
    groups = state["param_groups"]
    numbered = {n: one for n, one in state["state"].items() if isinstance(n, int)}
    names = tuple(tuple(map(without_hidden, map(str, group.get("param_names") or ()))) for group in groups)
    return UnpartitionedState(
        **file.facts,
        kind=kind,
        groups=read_groups(file, groups),
        members=tuple(tuple(group["params"]) for group in groups),
        names=names if kind != FUSED and all(names) else None,
        masters=masters,
        states=with_strangers({n: sort_states(file, one, options) for n, one in numbered.items()}, state),
        scaler={key: value for key, value in saved.items() if isinstance(value, (int, float, bool))},
        ep_rank=ep_rank,
    )


def saved_without_states(file: PickledFile) -> bool:
    """Whether DeepSpeed 0.17 saved none: bf16 without ZeRO, stage 1 with fp32 gradients (``_configure_optimizer``)."""
    stage = config_section(file, "zero_optimization").get("stage")
    in_fp32 = config_section(file, "data_types").get("grad_accum_dtype") == "fp32"
    of_version = str(file.tree.get("ds_version") or "").startswith("0.17.")
    return of_version and file.tree.get("optimizer") is None and (not stage or (stage == 1 and in_fp32))


def _damaged(file: PickledFile, expected: str, found: Any) -> DamagedError:
    problem = "the optimizer entry of this file is not one that DeepSpeed writes"
    remedy = Remedy("the file is of another kind of run: use another tag"), WITHOUT_STATES
    return UnknownLayoutError(problem, file.path, expected, found, remedy=remedy)
