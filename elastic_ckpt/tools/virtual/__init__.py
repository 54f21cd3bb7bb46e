"""Virtual jobs: CheckpointMetadata and topology -> LocalState and LoadPlan of every rank, and what it reads. Pure.

Partitions follow the arithmetic of the engine adapters (:mod:`elastic_ckpt.engines`); a test compares the two. Without
a live engine, the optimizer is assumed to have the checkpoint's states and, without ZeRO, to step on each parameter
alone, as all but DeepSpeed's ``FP16_Optimizer`` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product

from elastic_ckpt.core.chunks import PartitionRule, group_rules, parameter_rules, placements
from elastic_ckpt.core.flat_ranges import FlatRange, group_offsets, per_parameter_numel
from elastic_ckpt.core.fqn import expert_name, rename_saved
from elastic_ckpt.core.local_state import (
    NO_SEQUENCE_PARALLEL,
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
from elastic_ckpt.core.state_kinds import (
    BLOCK_NUMELS,
    NON_SHARD_KEYS,
    PER_PARAMETER,
    REPLICATED,
    BlockFormat,
    LiveState,
)
from elastic_ckpt.errors import UnsupportedError, listed
from elastic_ckpt.io.coalesce import ReadOptions, staged_reads
from elastic_ckpt.planning.planner import LoadOptions, Matched, match, plan_load
from elastic_ckpt.report import topology_text
from elastic_ckpt.sharding.rules import tensor_of
from elastic_ckpt.sharding.specs import virtual_layouts
from elastic_ckpt.tools.virtual.stages import stages_of

#: Stages 1 and 2 pad each group to a multiple of this many elements per rank (``nccl_start_alignment_factor``).
START_ALIGNMENT = 2


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
        return topology_text(self.zero_stage, self.dp, self.tp, self.pp, NO_SEQUENCE_PARALLEL, self.ep)


class VirtualJob:
    """A job that would resume a checkpoint, renamed by ``rename``; :class:`ElasticCkptError` if it cannot exist."""

    def __init__(self, metadata: CheckpointMetadata, topology: Topology, options: LoadOptions) -> None:
        metadata = rename_saved(metadata, options.config.rename)
        saved = metadata.source
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
        self._names = self._by_rank()

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
        return replace(
            common,
            fragments=tuple(self._fragments(common.flats, rules, at)),
            wholes=tuple(self._wholes(common.model.layouts, at)),
            model=replace(common.model, coordinates=at),
        )

    def _first(self, rank: int) -> RankCoordinates:
        """The first rank with the partitions of this one: it differs in its data-parallel rank alone."""
        at = self.topology.coordinates(rank)
        return replace(at, partition_rank=at.ep_rank)

    def _common(self, at: RankCoordinates) -> tuple[LocalState, list[Sequence[PartitionRule]]]:
        """What all data-parallel ranks have in common, and where the members of each flat partition are."""
        mine = self._names.get((at.pp_rank, at.ep_rank), [])
        groups: list[list[str]] = [[] for _ in self.metadata.groups]
        for name in mine:
            if name in self.metadata.parameters:
                groups[self.metadata.parameters[name].group].append(name)
        groups = list(map(self._in_module_order, groups))
        partitions = list(self._partitions(groups, at))
        state = LocalState(
            zero_stage=self.topology.zero_stage,
            optimizer=SAVED_OPTIMIZER,
            flats=tuple(flat for flat, _ in partitions),
            fragments=(),
            wholes=(),
            groups=tuple(LiveGroup(tuple(n), dict(own)) for n, own in zip(groups, self.metadata.groups, strict=True)),
            model=ModelLayout(at, {name: self.layouts[name] for name in mine}, frozenset(self._keys).difference(mine)),
        )
        return state, [rules for _, rules in partitions]

    def _refuse_uneven_experts(self) -> None:
        ep = self.topology.ep
        uneven = [layer for layer, count in self._counts.items() if count % ep]
        is_other = (self.topology.zero_stage == 3) if self._experts else ep > 1
        if uneven or is_other or self.topology.dp % ep:
            raise UnsupportedError(
                "there is no such job with MoE layers",
                parameter=listed(uneven) if uneven else None,
                file=self.metadata.source.folder,
                expected="ZeRO-0, 1 or 2, and an expert-parallel degree that divides experts and data-parallel ranks",
                found=f"{self.topology}, {listed(set(map(str, self._counts.values())))} experts in a layer",
                remedy="other degrees, or another stage",
            )

    def _by_rank(self) -> dict[tuple[int, int], list[str]]:
        """What each expert-parallel rank of each pipeline stage has: all of them have what is of no expert."""
        found: dict[tuple[int, int], list[str]] = {}
        ep_ranks = range(self.topology.ep)
        for name in self._keys:
            expert = self._experts.get(name)
            mine = ep_ranks if expert is None else (expert.number * len(ep_ranks) // self._counts[expert.layer],)
            for at in product(self.stages[name], mine):
                found.setdefault(at, []).append(name)
        return found

    def _in_module_order(self, names: list[str]) -> list[str]:
        """The members of a group: a checkpoint has those of one expert-parallel rank after those of another."""
        experts, layers = self._experts, {layer: number for number, layer in enumerate(self._counts)}
        if not experts.keys() >= set(names):
            return names
        return sorted(names, key=lambda name: (layers[experts[name].layer], experts[name].number))

    def _partitions(
        self, groups: Sequence[Sequence[str]], at: RankCoordinates
    ) -> Iterator[tuple[FlatPartition, Sequence[PartitionRule]]]:
        """The flat partitions of one coordinate's ranks, and where each member of one is."""
        is_everywhere = self.topology.zero_stage == 0 and at.partition_degree > 1
        every = ((number, members) for number, names in enumerate(groups) for members in self._sub_groups(names, at))
        for index, (number, names) in enumerate(every):
            key, of_expert = tuple(names), names[0] in self._experts
            numels = [math.prod(self.layouts[name].shapes[at.tp_rank]) for name in names]
            numel, rules = self._rules(numels, at.partition_degree // at.ep if of_expert else at.partition_degree)
            in_all = is_everywhere and not of_expert
            yield FlatPartition(index, number, numel, "float32", key, in_all, self._states_of(key), None), rules

    def _fragments(
        self, flats: Sequence[FlatPartition], rules: Sequence[Sequence[PartitionRule]], at: RankCoordinates
    ) -> Iterator[Fragment]:
        for flat, mine in zip(flats, rules, strict=True):
            rank = at.partition_rank // at.ep if flat.members[0] in self._experts else at.partition_rank
            for part in placements(mine, rank if self.topology.zero_stage else 0):
                name = flat.members[part.index]
                yield Fragment(name, self.layouts[name].shapes[at.tp_rank], part.range, flat.index, part.flat_offset)

    def _sub_groups(self, names: Sequence[str], at: RankCoordinates) -> Iterator[Sequence[str]]:
        """Members of each flat partition: a group; without ZeRO a parameter; with ZeRO-3 a sub-group.

        ZeRO-3 ends a sub-group once its partitions reach ``sub_group_size``: ``_create_fp16_sub_groups`` (stage3.py).
        """
        gathered: list[str] = []
        numel, stage = 0, self.topology.zero_stage
        for name in names:
            gathered.append(name)
            numel += self._step(math.prod(self.layouts[name].shapes[at.tp_rank]))
            is_full = stage == 0 or (stage == 3 and numel >= self.topology.sub_group_numel)
            if is_full or name is names[-1]:
                yield gathered
                gathered, numel = [], 0

    def _step(self, numel: int) -> int:
        return per_parameter_numel(numel, self.topology.dp, self.topology.alignment)

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
                    blocks = None if code is None else BlockFormat(min(BLOCK_NUMELS), code.scales, code.codebook)
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
            key, tensor = self._keys[name], tensor_of(self.metadata, name)
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


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What one rank reads, and the memory that it fills.

    Attributes:
        nbytes_read, reads: bytes of tensors from files, and system calls, as :mod:`elastic_ckpt.io.reader` makes them.
        nbytes_compared, nbytes_received: of replicas that are compared before the load; from other ranks' broadcasts.
        by_file: bytes read of each file, by its index in the metadata.
        filled: (key, dtype) -> tensors, elements, and elements among them that no read fills.
        notes: of its plan.
    """

    rank: int
    nbytes_read: int
    reads: int
    nbytes_compared: int
    nbytes_received: int
    by_file: Mapping[int, int]
    filled: Mapping[tuple[str, str], tuple[int, int, int]]
    notes: tuple[str, ...]

    @property
    def files(self) -> int:
        """Number of files that it reads."""
        return len(self.by_file)

    @property
    def memory(self) -> int:
        """Bytes of masters, optimizer states, buffers and frozen weights."""
        return sum(numel * ITEMSIZE[dtype] for (_, dtype), (_, numel, _) in self.filled.items())


def forecast(rank: int, local_state: LocalState, plan: LoadPlan, options: ReadOptions) -> RankForecast:
    """The forecast of a rank whose tensors are on an accelerator."""
    reads = plan.reads
    nbytes_read, calls = staged_reads(reads, options)
    replicas = (replica for check in plan.replica_checks for replica in check.replicas)
    received = (share for share in reads.shares if share.owner != local_state.model.coordinates.partition_rank)
    filled: dict[tuple[str, str], tuple[int, int, int]] = {}
    for target in reads.targets:
        tensors, numel, left = filled.get((target.key, target.dtype), (0, 0, 0))
        gaps = sum(gap.numel for gap in target.gaps)
        filled[target.key, target.dtype] = tensors + 1, numel + target.numel, left + gaps
    return RankForecast(
        rank,
        nbytes_read=nbytes_read,
        reads=calls,
        nbytes_compared=sum(item.nbytes for replica in replicas for item in replica),
        nbytes_received=sum(share.range.numel * ITEMSIZE[reads.targets[share.target].dtype] for share in received),
        by_file=bytes_by_file(reads),
        filled=filled,
        notes=plan.notes,
    )


def bytes_by_file(reads: ReadPlan) -> dict[int, int]:
    """Bytes of tensors that a plan reads from each file, without scales of requantized blocks."""
    found: dict[int, int] = {}
    for item in chain(reads.items, *(item.sources for item in reads.requantize_items)):
        found[item.file] = found.get(item.file, 0) + item.rows * item.numel * ITEMSIZE[item.dtype]
    return found
