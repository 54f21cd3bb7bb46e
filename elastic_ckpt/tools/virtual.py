"""Virtual jobs: CheckpointMetadata and topology -> LocalState and LoadPlan of every rank, and what it reads. Pure.

Partitions follow the arithmetic of the engine adapters (:mod:`elastic_ckpt.engines`); a test compares the two. Without
a live engine, the optimizer is assumed to have the checkpoint's states and, without ZeRO, to step on each parameter
alone, as all but DeepSpeed's ``FP16_Optimizer`` do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain, product
from typing import Any

import numpy as np

from elastic_ckpt.core.chunks import PartitionRule, group_rules, parameter_rules, placements
from elastic_ckpt.core.counts import MOST_DIGITS
from elastic_ckpt.core.flat_ranges import FlatRange, group_offsets, per_parameter_numel
from elastic_ckpt.core.fqn import expert_name, rename_saved
from elastic_ckpt.core.local_state import (
    SAVED_OPTIMIZER,
    FlatPartition,
    Fragment,
    LiveGroup,
    LocalState,
    ModelLayout,
    RankCoordinates,
    WholeTensor,
)
from elastic_ckpt.core.metadata import BUFFER, FROZEN, ITEMSIZE, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import LoadPlan, ReadPlan
from elastic_ckpt.core.state_kinds import BLOCK_NUMELS, NON_SHARD_KEYS, PER_PARAMETER, REPLICATED, LiveState
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import UnsupportedError, listed
from elastic_ckpt.io.coalesce import ReadOptions, staged_reads
from elastic_ckpt.planning.planner import LoadOptions, Matched, match, plan_load
from elastic_ckpt.report import topology_text
from elastic_ckpt.sharding.rules import tensor_of
from elastic_ckpt.sharding.specs import virtual_layouts

#: Stages 1 and 2 pad each group to a multiple of this many elements per rank (``nccl_start_alignment_factor``).
START_ALIGNMENT = 2
_LAYER = re.compile(rf"^(\d{{1,{MOST_DIGITS}}})\.")
_TIED = "tied_modules."
#: Numbers of layers that are balanced one by one: names may have any.
_MOST_LAYERS = 1 << 14


@dataclass(frozen=True, slots=True)
class Topology:
    """Parallel degrees, ZeRO stage (0 to 3), and the options that determine ZeRO's partitions.

    ``sub_group_numel`` is ZeRO-3's ``sub_group_size``, which DeepSpeed counts in elements of a rank's partition;
    ``alignment`` is ``"align_partitions"``, or 1 for DeepSpeed's own padding.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 1
    sub_group_numel: int = 1_000_000_000
    alignment: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    def coordinates(self, rank: int) -> RankCoordinates:
        """Coordinates of a global rank; tp varies fastest, then dp: ``PipeModelDataParallelTopology`` (topology.py)."""
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        at = RankCoordinates(self.dp, dp_rank, self.tp, tp_rank, self.pp, pp_rank)
        return replace(at, ep=self.ep, ep_rank=dp_rank % self.ep)

    def __str__(self) -> str:
        return topology_text(self.zero_stage, self.coordinates(0))


class VirtualJob:
    """A job that would resume a checkpoint, renamed by ``rename``; :class:`ElasticCkptError` if it cannot exist."""

    def __init__(self, metadata: CheckpointMetadata, topology: Topology, options: LoadOptions) -> None:
        metadata = rename_saved(metadata, options.config.rename)
        saved = metadata.source
        ep = topology.ep
        unchanged = (topology.dp, topology.tp, topology.pp) == (saved.partition_degree, saved.tp, saved.pp)
        if unchanged and saved.by_rank and saved.zero_stage == 3:
            # each rank would read buffers from its own file; here all read the first one, which has the same size
            metadata = replace(metadata, buffers_of_this_rank=True)
        self.metadata = metadata
        self.topology = topology
        self.options = replace(options, config=options.config.model_copy(update={"rename": []}))
        self._matched: dict[RankCoordinates, Matched] = {}
        self._of_stage = cache(self._common)
        self._states_of = cache(self.states_of)
        self._step = partial(per_parameter_numel, world_size=topology.dp, multiple=topology.alignment)
        self._keys = dict.fromkeys(metadata.parameters, MASTER)
        for name, key in metadata.tensors:
            if key in (BUFFER, FROZEN):
                self._keys.setdefault(name, key)
        self._experts = {name: expert for name in self._keys if (expert := expert_name(name)) is not None}
        self._counts: dict[str, int] = {}
        for expert in self._experts.values():
            self._counts[expert.layer] = max(self._counts.get(expert.layer, 0), expert.number + 1)
        self._refuse_uneven_experts()
        self.layouts = virtual_layouts(metadata, self._keys, topology.tp, options.rules)
        numels = {name: math.prod(layout.shapes[0]) for name, layout in self.layouts.items()}
        self.stages = stages_of(numels, topology.pp, metadata)
        #: Of each stage and expert-parallel rank: all such ranks have what is of no expert.
        self._names: dict[tuple[int, int], list[str]] = {}
        for name in self._keys:
            expert = self._experts.get(name)
            mine = range(ep) if expert is None else (expert.number * ep // self._counts[expert.layer],)
            for at in product(self.stages[name], mine):
                self._names.setdefault(at, []).append(name)

    def planned(self, rank: int) -> tuple[LocalState, LoadPlan]:
        """LocalState of one rank, and its LoadPlan."""
        local_state = self.local_state(rank)
        first = self._first(rank)
        if first not in self._matched:
            self._matched[first] = match(self.metadata, local_state, self.options)
        return local_state, plan_load(self.metadata, local_state, self.options, self._matched[first])

    def local_state(self, rank: int) -> LocalState:
        """LocalState of one rank."""
        at = self.topology.coordinates(rank)
        common, rules = self._of_stage(self._first(rank))
        fragments = []
        for flat, mine in zip(common.flats, rules, strict=True):
            part_of = at.partition_rank // at.ep if flat.members[0] in self._experts else at.partition_rank
            for part in placements(mine, part_of if self.topology.zero_stage else 0):
                name = flat.members[part.index]
                shape = self.layouts[name].shapes[at.tp_rank]
                fragments.append(Fragment(name, shape, part.range, flat.index, part.flat_offset))
        return replace(
            common,
            fragments=tuple(fragments),
            wholes=tuple(self._wholes(common.model.layouts, at)),
            model=replace(common.model, coordinates=at),
        )

    def _first(self, rank: int) -> RankCoordinates:
        """The first rank with the partitions of this one: it differs in its data-parallel rank alone."""
        at = self.topology.coordinates(rank)
        return replace(at, partition_rank=at.ep_rank)

    def _common(self, at: RankCoordinates) -> tuple[LocalState, list[Sequence[PartitionRule]]]:
        """What all data-parallel ranks have in common, and where the members of each flat partition are."""
        held = self._names.get((at.pp_rank, at.ep_rank), [])
        groups: list[list[str]] = [[] for _ in self.metadata.groups]
        for name in held:
            if name in self.metadata.parameters:
                groups[self.metadata.parameters[name].group].append(name)
        layers = {layer: number for number, layer in enumerate(self._counts)}
        for names in groups:  # a checkpoint has the members of one expert-parallel rank after those of another
            if all(name in self._experts for name in names):
                names.sort(key=lambda name: (layers[self._experts[name].layer], self._experts[name].number))
        flats = list[FlatPartition]()
        rules = list[Sequence[PartitionRule]]()
        every = ((number, tuple(key)) for number, names in enumerate(groups) for key in self._sub_groups(names, at))
        for number, key in every:
            of_expert = key[0] in self._experts
            numels = [math.prod(self.layouts[name].shapes[at.tp_rank]) for name in key]
            numel, mine = self._rules(numels, at.partition_degree // at.ep if of_expert else at.partition_degree)
            in_all = self.topology.zero_stage == 0 and at.partition_degree > 1 and not of_expert
            flats.append(FlatPartition(len(flats), number, numel, "float32", key, in_all, self._states_of(key), None))
            rules.append(mine)
        state = LocalState(
            zero_stage=self.topology.zero_stage,
            optimizer=SAVED_OPTIMIZER,
            flats=tuple(flats),
            fragments=(),
            wholes=(),
            groups=tuple(LiveGroup(tuple(n), dict(own)) for n, own in zip(groups, self.metadata.groups, strict=True)),
            model=ModelLayout(at, {name: self.layouts[name] for name in held}, frozenset(self._keys).difference(held)),
        )
        return state, rules

    def _refuse_uneven_experts(self) -> None:
        ep = self.topology.ep
        uneven = [layer for layer, count in self._counts.items() if count % ep]
        is_other = (self.topology.zero_stage == 3) if self._experts else ep > 1
        if uneven or is_other or self.topology.dp % ep:
            problem = "there is no such job with MoE layers"
            remedy = "other degrees, or another stage"
            expected = "ZeRO-0, 1 or 2, and an expert-parallel degree that divides experts and data-parallel ranks"
            both = expected, f"{self.topology}, {listed(set(map(str, self._counts.values())))} experts in a layer"
            layers = listed(uneven) if uneven else None
            raise UnsupportedError(problem, self.metadata.source.folder, *both, parameter=layers, remedy=remedy)

    def _sub_groups(self, names: Sequence[str], at: RankCoordinates) -> Iterator[Sequence[str]]:
        """Members of each flat partition: a group; without ZeRO a parameter; with ZeRO-3 a sub-group.

        ZeRO-3 ends a sub-group once its partitions reach ``sub_group_size``: ``_create_fp16_sub_groups`` (stage3.py).
        """
        gathered: list[str] = []
        numel = 0
        stage = self.topology.zero_stage
        for name in names:
            gathered.append(name)
            numel += self._step(math.prod(self.layouts[name].shapes[at.tp_rank]))
            is_full = stage == 0 or (stage == 3 and numel >= self.topology.sub_group_numel)
            if is_full or name is names[-1]:
                yield gathered
                gathered = []
                numel = 0

    def _rules(self, numels: Sequence[int], dp: int) -> tuple[int, Sequence[PartitionRule]]:
        """Elements of a rank's flat partition, and where its members are."""
        if self.topology.zero_stage == 3:
            steps = [self._step(numel) for numel in numels]
            return sum(steps), parameter_rules(numels, steps)
        numel = sum(numels)
        if self.topology.zero_stage:
            unit = dp * math.lcm(START_ALIGNMENT, self.topology.alignment)
            numel = -(-numel // unit) * unit // dp
        return numel, group_rules(numels, group_offsets(numels), numel)

    def states_of(self, members: tuple[str, ...]) -> tuple[LiveState, ...] | None:
        """The tensor states of one flat partition, without the codebooks that bitsandbytes creates by itself.

        Returns ``None`` if no partition can have one of the saved states; planning then refuses it.
        """
        found: dict[str, LiveState] = {}
        for name in members:
            saved = self.metadata.parameters[name]
            for key in sorted(self.metadata.keys_by_name.get(name, ())):
                tensor = self.metadata.tensors[name, key]
                if tensor.has_own_shape:
                    if self.topology.zero_stage or len(members) > 1:
                        return None
                    live = LiveState(key, tensor.dtype, PER_PARAMETER, shape=tensor.shape)
                else:
                    planes = 1 if len(tensor.shape) == len(saved.shape) else tensor.shape[0]
                    code = tensor.blocks
                    # today's version uses the smaller block size, whichever version saved it
                    blocks = None if code is None else replace(code, numel=min(BLOCK_NUMELS))
                    live = LiveState(key, tensor.dtype, planes=planes, blocks=blocks)
                # bitsandbytes keeps states of small partitions unquantized
                if key not in found or (live.blocks is not None and found[key].blocks is None):
                    found[key] = live
            for state in saved.replicated:
                if state.key not in NON_SHARD_KEYS:
                    found[state.key] = LiveState(state.key, state.dtype, REPLICATED, shape=state.shape)
        return tuple(found[key] for key in sorted(found))

    def _wholes(self, names: Iterable[str], at: RankCoordinates) -> Iterator[WholeTensor]:
        for name in names:
            key = self._keys[name]
            tensor = tensor_of(self.metadata, name)
            if key == MASTER or tensor is None:
                continue
            shape = self.layouts[name].shapes[at.tp_rank]
            numel = math.prod(shape)
            in_all = at.partition_degree > 1 and name not in self._experts
            whole = WholeTensor(name, key, shape, FlatRange(0, numel), tensor.dtype, in_all)
            if key == FROZEN and self.topology.zero_stage == 3:
                part = next(iter(placements(parameter_rules([numel], [self._step(numel)]), at.partition_rank)), None)
                whole = replace(whole, range=part.range if part else FlatRange(0, 0), replicated=False)
            yield whole


def forecast(local_state: LocalState, plan: LoadPlan, options: ReadOptions) -> dict[str, Any]:
    """What a rank whose tensors are on an accelerator reads, and the memory that it fills.

    ``nbytes_read``, ``reads``: bytes of tensors from files, and system calls, as :mod:`elastic_ckpt.io.reader` makes
    them. ``nbytes_compared``: of replicas that are compared before the load. ``nbytes_received``: of other ranks'
    broadcasts. ``files``: path -> bytes. ``memory``: bytes of masters, optimizer states, buffers and frozen weights.
    ``filled``: their tensors and elements, and elements among them that no read fills.
    """
    reads = plan.reads
    coordinates = local_state.model.coordinates
    nbytes_read, calls = staged_reads(reads, options)
    replicas = (replica for check in plan.replica_checks for replica in check.replicas)
    received = (share for share in reads.shares if share.owner != coordinates.partition_rank)
    filled: dict[tuple[str, str], dict[str, Any]] = {}
    for target in reads.targets:
        new = {"key": target.key, "dtype": target.dtype, "tensors": 0, "numel": 0, "padding": 0}
        entry = filled.setdefault((target.key, target.dtype), new)
        entry["tensors"] += 1
        entry["numel"] += target.numel
        entry["padding"] += sum(gap.numel for gap in target.gaps)
    return {
        "coordinates": asdict(coordinates),
        "nbytes_read": nbytes_read,
        "nbytes_compared": sum(item.nbytes for replica in replicas for item in replica),
        "nbytes_received": sum(share.range.numel * ITEMSIZE[reads.targets[share.target].dtype] for share in received),
        "reads": calls,
        "files": {reads.files[file].path: nbytes for file, nbytes in sorted(bytes_by_file(reads).items())},
        "memory": sum(target.numel * ITEMSIZE[target.dtype] for target in reads.targets),
        "filled": list(filled.values()),
        "notes": plan.notes,
    }


def bytes_by_file(reads: ReadPlan) -> dict[int, int]:
    """Bytes of tensors that a plan reads from each file, without scales of requantized blocks."""
    found: dict[int, int] = {}
    for item in chain(reads.items, *(item.sources for item in reads.requantize_items)):
        found[item.file] = found.get(item.file, 0) + item.nbytes
    return found


def stages_of(numels: Mapping[str, int], pp: int, metadata: CheckpointMetadata) -> dict[str, tuple[int, ...]]:
    """The stages of each parameter or buffer of a ``PipelineModule``, given the elements of each.

    At the saved degree, stages are as saved, and a buffer is where its layer's parameters are. At another, layers are
    balanced by parameters (``partition_method="parameters"``, DeepSpeed's default), and tied modules are on the first
    and last stage, except those that only one stage saved (BLOOM's norm behind the embedding).

    Raises :class:`UnsupportedError` if names do not show their layer, or a stage would have no parameter.
    """
    if pp == 1:
        return dict.fromkeys(numels, (0,))
    layer_of = {name: int(match[1]) for name in numels if (match := _LAYER.match(name))}
    tied = [name for name in numels if name.startswith(_TIED)]
    others = set(numels) - set(layer_of) - set(tied)
    if others or not layer_of:
        problem = "a pipeline of several stages needs a model built of numbered layers (DeepSpeed's PipelineModule)"
        both = "names such as 3.self_attention.dense.weight", "a model that is no PipelineModule"
        raise metadata.error(UnsupportedError, problem, others, *both, "a pipeline-parallel degree of 1")
    saved = metadata.stages
    if metadata.source.pp == pp:
        of_layer = {layer_of[name]: stages for name, stages in saved.items() if name in layer_of}
        as_saved = {name: saved.get(name) or of_layer.get(layer_of.get(name, -1), ()) for name in numels}
        if all(as_saved.values()):
            return as_saved
    if max(layer_of.values()) >= _MOST_LAYERS:
        problem = f"a pipeline of more than {_MOST_LAYERS} layers is not divided into stages here"
        furthest = max(layer_of, key=layer_of.__getitem__)
        both = f"numbers of layers below {_MOST_LAYERS}", f"layer {layer_of[furthest]}"
        raise metadata.error(UnsupportedError, problem, furthest, *both, "a pipeline-parallel degree of 1")
    stages = _balanced(numels, layer_of, tied, pp)
    stages |= {name: (0,) if len(saved.get(name, ())) == 1 else (0, pp - 1) for name in tied}
    if empty := set(range(pp)).difference(*stages.values()):
        problem = "this pipeline would have stages without a parameter, for which no optimizer can be made"
        expected = f"at most as many stages as layers have parameters: {len(set(layer_of.values()))}"
        both = (expected, f"{counted(pp, 'stage')}, of which {len(empty)} are empty")
        remedy = "a lower pipeline-parallel degree"
        raise UnsupportedError(problem, metadata.source.folder, *both, remedy=remedy)
    return stages


def _balanced(
    numels: Mapping[str, int], layer_of: Mapping[str, int], tied: Sequence[str], pp: int
) -> dict[str, tuple[int, ...]]:
    weights = [0] * (max(layer_of.values()) + 1)
    for name, layer in layer_of.items():
        weights[layer] += numels[name]
    shift = 0
    if tied:  # a tied layer is both first and last, and both occurrences count
        ends = sum(numels[name] for name in tied)
        first = min(layer_of.values())
        shift = 0 if first else 1
        weights = [0] * shift + weights + [ends]
        weights[first + shift - 1] = ends
    bounds = [bound - shift for bound in _partition(tuple(weights), pp)]
    stage_of_layer = {layer: stage for stage in range(pp) for layer in range(bounds[stage], bounds[stage + 1])}
    return {name: (stage_of_layer[layer],) for name, layer in layer_of.items()}


@lru_cache(maxsize=32)
def _partition(weights: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """The layers at which stages begin, and the last one's end.

    As DeepSpeed's ``partition_balanced`` (``deepspeed/runtime/utils.py``): the difference of the heaviest and the
    lightest stage is least, of equal choices the last. Its dynamic program, with all choices at once.
    """
    count = len(weights)
    if count <= pp:
        return tuple(min(stage, count) for stage in range(pp + 1))
    until = np.concatenate([[0.0], np.cumsum(weights)])
    heaviest, lightest = np.full((2, count + 1), np.inf)
    heaviest[0] = 0.0  # no layers on no stages
    begins = np.zeros((pp + 1, count + 1), dtype=int)
    for stages in range(1, pp + 1):
        before = heaviest
        heaviest = np.full(count + 1, np.inf)
        lightest_before = lightest
        lightest = np.full(count + 1, np.inf)
        for stop in range(stages, count + 1):
            last = until[stop] - until[:stop]
            most = np.maximum(before[:stop], last)
            least = np.minimum(lightest_before[:stop], last)
            start = stop - 1 - int((most - least)[::-1].argmin())
            heaviest[stop] = most[start]
            lightest[stop] = least[start]
            begins[stages, stop] = start
    bounds = [count]
    for stages in range(pp, 0, -1):
        bounds.append(int(begins[stages, bounds[-1]]))
    return tuple(reversed(bounds))
