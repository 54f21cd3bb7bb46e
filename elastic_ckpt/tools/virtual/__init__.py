"""Virtual jobs: CheckpointMetadata and topology -> LocalState and LoadPlan of every rank. Pure.

Partitions follow the arithmetic of the engine adapters (:mod:`elastic_ckpt.engines`); a test compares the two. Without
a live engine, the optimizer is assumed to have the checkpoint's states and, without ZeRO, to step on each parameter
alone, as all but DeepSpeed's ``FP16_Optimizer`` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.core.chunks import group_rules, parameter_rules, placements
from elastic_ckpt.core.experts import expert_name, numbers_of_experts
from elastic_ckpt.core.flat_ranges import (
    FlatRange,
    Placement,
    group_offsets,
    per_parameter_numel,
)
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import (
    FlatPartition,
    Fragment,
    LiveGroup,
    LocalState,
    ModelLayout,
    RankCoordinates,
    WholeTensor,
)
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import LoadPlan
from elastic_ckpt.core.state_kinds import BLOCK_NUMELS, NON_SHARD_KEYS, REPLICATED, WHOLE, BlockFormat, LiveState
from elastic_ckpt.errors import UnsupportedError, listed
from elastic_ckpt.planning.planner import LoadOptions, plan_load, resharding_of
from elastic_ckpt.planning.state_matching import keys_by_name
from elastic_ckpt.sharding.book import tensor_of
from elastic_ckpt.sharding.decide import virtual_layouts
from elastic_ckpt.sharding.resolve import Resharding
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
        ep = f", EP={self.ep}" if self.ep > 1 else ""
        return f"ZeRO-{self.zero_stage}, DP={self.dp}, TP={self.tp}, PP={self.pp}{ep}"


class VirtualJob:
    """A job that would resume a checkpoint, renamed by ``rename``; :class:`ElasticCkptError` if it cannot exist."""

    def __init__(self, metadata: CheckpointMetadata, topology: Topology, options: LoadOptions) -> None:
        metadata = rename_saved(metadata, options.config.rename)
        saved = metadata.source
        unchanged = (topology.dp, topology.tp, topology.pp) == (saved.dp, saved.tp, saved.pp)
        if unchanged and saved.format == "native" and saved.zero_stage == 3:
            # each rank would read buffers from its own file; here all read the first one, which has the same size
            metadata = replace(metadata, buffers_of_this_rank=True)
        self.metadata = metadata
        self.topology = topology
        self.options = replace(options, config=options.config.model_copy(update={"rename": []}))
        self._state_keys = keys_by_name(metadata)
        self._resharding: dict[tuple[int, int, int], Resharding] = {}
        self._states: dict[tuple[str, ...], tuple[LiveState, ...] | None] = {}
        self._keys = dict.fromkeys(metadata.parameters, MASTER)
        for name, key in metadata.tensors:
            if key in (BUFFER, FROZEN):
                self._keys.setdefault(name, key)
        self._experts = {layer: max(numbers) + 1 for layer, numbers in numbers_of_experts(self._keys).items()}
        self._refuse_uneven_experts()
        self.layouts = virtual_layouts(metadata, self._keys, topology.tp, options.rules)
        numels = {name: math.prod(layout.shapes[0]) for name, layout in self.layouts.items()}
        self.stages = stages_of(numels, topology.pp, metadata)

    def planned(self, rank: int) -> tuple[LocalState, LoadPlan]:
        """LocalState of one rank, and its LoadPlan."""
        local_state = self.local_state(rank)
        coordinates = local_state.model.coordinates
        at = coordinates.pp_rank, coordinates.tp_rank, coordinates.ep_rank
        if at not in self._resharding:
            self._resharding[at] = resharding_of(self.metadata, local_state, self.options)
        return local_state, plan_load(self.metadata, local_state, self.options, self._resharding[at])

    def local_state(self, rank: int) -> LocalState:
        """LocalState of one rank."""
        at = self.topology.coordinates(rank)
        mine = [name for name in self._keys if at.pp_rank in self.stages[name] and self._holds(at, name)]
        groups: list[list[str]] = [[] for _ in self.metadata.groups]
        for name in mine:
            if name in self.metadata.parameters:
                groups[self.metadata.parameters[name].group].append(name)
        groups = list(map(self._in_module_order, groups))
        flats, fragments = self._partitions(groups, at)
        return LocalState(
            zero_stage=self.topology.zero_stage,
            optimizer="the optimizer that saved it",
            flats=tuple(flats),
            fragments=tuple(fragments),
            wholes=tuple(self._wholes(mine, at)),
            groups=tuple(
                LiveGroup(tuple(names), dict(group)) for names, group in zip(groups, self.metadata.groups, strict=True)
            ),
            model=ModelLayout(at, {name: self.layouts[name] for name in mine}, frozenset(self._keys) - frozenset(mine)),
        )

    def _refuse_uneven_experts(self) -> None:
        ep = self.topology.ep
        uneven = {layer: count for layer, count in self._experts.items() if count % ep}
        is_other = (self.topology.zero_stage == 3) if self._experts else ep > 1
        if uneven or is_other or self.topology.dp % ep:
            raise UnsupportedError(
                "there is no such job with MoE layers",
                parameter=listed(uneven) if uneven else None,
                file=self.metadata.source.folder,
                expected="ZeRO-0, 1 or 2, and an expert-parallel degree that divides experts and data-parallel ranks",
                found=f"{self.topology}, {listed(set(map(str, self._experts.values())))} experts in a layer",
                remedy="other degrees, or another stage",
            )

    def _holds(self, at: RankCoordinates, name: str) -> bool:
        """Whether an expert-parallel rank has a parameter: all have those of no expert."""
        expert = expert_name(name)
        return expert is None or expert.number * at.ep // self._experts[expert.layer] == at.ep_rank

    def _in_module_order(self, names: list[str]) -> list[str]:
        """The members of a group: a checkpoint has those of one expert-parallel rank after those of another."""
        experts = list(map(expert_name, names))
        if None in experts:
            return names
        layers = {layer: number for number, layer in enumerate(self._experts)}
        order = [(layers[each.layer], each.number) for each in experts if each is not None]
        return [names[at] for at in sorted(range(len(names)), key=order.__getitem__)]

    def _partitions(
        self, groups: Sequence[Sequence[str]], at: RankCoordinates
    ) -> tuple[list[FlatPartition], list[Fragment]]:
        flats: list[FlatPartition] = []
        fragments: list[Fragment] = []
        is_everywhere = self.topology.zero_stage == 0 and at.dp > 1
        for number, names in enumerate(groups):
            for members in self._sub_groups(names, at):
                of_expert = expert_name(members[0]) is not None
                shapes = [self.layouts[name].shapes[at.tp_rank] for name in members]
                ranks = replace(at, dp=at.dp // at.ep, dp_rank=at.dp_rank // at.ep) if of_expert else at
                numel, placed = self._placed(list(map(math.prod, shapes)), ranks)
                index, key, in_all = len(flats), tuple(members), is_everywhere and not of_expert
                if key not in self._states:  # the same on all ranks of a stage
                    self._states[key] = self.states_of(members)
                flats.append(FlatPartition(index, number, numel, "float32", key, in_all, self._states[key], None))
                fragments += [
                    Fragment(members[part.index], shapes[part.index], part.range, index, part.flat_offset)
                    for part in placed
                ]
        return flats, fragments

    def _sub_groups(self, names: Sequence[str], at: RankCoordinates) -> Iterator[Sequence[str]]:
        """Members of each flat partition: a group; without ZeRO a parameter; with ZeRO-3 a sub-group.

        ZeRO-3 ends a sub-group once its partitions reach ``sub_group_size``: ``_create_fp16_sub_groups`` (stage3.py).
        """
        if self.topology.zero_stage == 0:
            yield from ([name] for name in names)
        elif self.topology.zero_stage < 3:
            yield from [names] if names else []
        else:
            gathered: list[str] = []
            numel = 0
            for name in names:
                gathered.append(name)
                numel += self._step(math.prod(self.layouts[name].shapes[at.tp_rank]))
                if numel >= self.topology.sub_group_numel or name is names[-1]:
                    yield gathered
                    gathered, numel = [], 0

    def _step(self, numel: int) -> int:
        return per_parameter_numel(numel, self.topology.dp, self.topology.alignment)

    def _placed(self, numels: Sequence[int], at: RankCoordinates) -> tuple[int, Iterator[Placement]]:
        """Elements of a rank's flat partition, and the placement of its members."""
        if self.topology.zero_stage == 3:
            steps = [self._step(numel) for numel in numels]
            return sum(steps), placements(parameter_rules(numels, steps), at.dp_rank)
        numel, rank = sum(numels), 0
        if self.topology.zero_stage:
            unit = at.dp * math.lcm(START_ALIGNMENT, self.topology.alignment)
            numel, rank = -(-numel // unit) * unit // at.dp, at.dp_rank
        return numel, placements(group_rules(numels, group_offsets(numels), numel), rank)

    def states_of(self, members: Sequence[str]) -> tuple[LiveState, ...] | None:
        """The tensor states of one flat partition, without the codebooks that bitsandbytes creates by itself.

        Returns ``None`` if no partition can have one of the saved states; planning then refuses it.
        """
        found: dict[str, LiveState] = {}
        for name in members:
            saved = self.metadata.parameters[name]
            for key in sorted(self._state_keys.get(name, ())):
                tensor = self.metadata.tensors[name, key]
                if tensor.is_whole:
                    if self.topology.zero_stage or len(members) > 1:
                        return None
                    live = LiveState(key, tensor.dtype, WHOLE, shape=tensor.shape)
                else:
                    rows = 1 if len(tensor.shape) == len(saved.shape) else tensor.shape[0]
                    code = tensor.blocks
                    # today's version uses the smaller block size, whichever version saved it
                    blocks = None if code is None else BlockFormat(min(BLOCK_NUMELS), code.scales, code.codebook)
                    live = LiveState(key, tensor.dtype, rows=rows, blocks=blocks)
                # bitsandbytes keeps states of small partitions unquantized
                if key not in found or (live.blocks is not None and found[key].blocks is None):
                    found[key] = live
            for state in saved.replicated:
                if state.key not in NON_SHARD_KEYS:
                    found[state.key] = LiveState(state.key, state.dtype, REPLICATED, shape=state.shape)
        return tuple(found[key] for key in sorted(found))

    def _wholes(self, names: Sequence[str], at: RankCoordinates) -> Iterator[WholeTensor]:
        for name in names:
            key, tensor = self._keys[name], tensor_of(self.metadata, name)
            if key == MASTER or tensor is None:
                continue
            shape = self.layouts[name].shapes[at.tp_rank]
            numel = math.prod(shape)
            whole = WholeTensor(
                name, key, shape, FlatRange(0, numel), tensor.dtype, at.dp > 1 and expert_name(name) is None
            )
            if key == FROZEN and self.topology.zero_stage == 3:
                part = next(iter(placements(parameter_rules([numel], [self._step(numel)]), at.dp_rank)), None)
                whole = replace(whole, range=part.range if part else FlatRange(0, 0), replicated=False)
            yield whole
