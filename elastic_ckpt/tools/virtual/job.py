"""CheckpointMetadata and topology -> what every rank of a job would hold, and the plan by which it would read it. Pure.

The partitions are those of the engine adapters (:mod:`elastic_ckpt.engines`), cut by the same geometry; a test compares
the two. What only a live engine knows is taken as usual: without ZeRO the optimizer steps on each parameter alone (as
all but DeepSpeed's ``FP16_Optimizer`` do), and it keeps the states that the checkpoint holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from elastic_ckpt.core.flat_ranges import (
    FlatRange,
    contiguous_partition,
    group_offsets,
    per_parameter_numel,
    per_parameter_partition,
)
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.local_state import (
    FlatPartition,
    Fragment,
    LiveGroup,
    LiveLayout,
    LocalState,
    RankCoordinates,
    WholeTensor,
)
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import ReadPlan
from elastic_ckpt.planning.planner import LoadOptions, plan_load, resharding_of
from elastic_ckpt.sharding.book import tensor_of
from elastic_ckpt.sharding.offline import virtual_layouts
from elastic_ckpt.sharding.resolve import Resharding
from elastic_ckpt.tools.virtual.stages import stages_of
from elastic_ckpt.tools.virtual.states import SavedStates
from elastic_ckpt.tools.virtual.topology import Topology

#: Stages 1 and 2 pad each group to a multiple of so many elements a rank (``nccl_start_alignment_factor``).
_START_ALIGNMENT = 2
_MASTER_DTYPE = "float32"


class VirtualJob:
    """A job of some topology that would resume a checkpoint.

    Args:
        metadata: what the checkpoint holds.
        topology: of the job.
        options: as for a load; its rules say how tensor-parallel ranks hold parameters. Renames are done here: the
            model is taken to have the new names.

    Raises:
        ElasticCkptError: such a job could not be.
    """

    def __init__(self, metadata: CheckpointMetadata, topology: Topology, options: LoadOptions) -> None:
        metadata = rename_saved(metadata, options.rename)
        saved = metadata.source
        unchanged = (topology.dp, topology.tp, topology.pp) == (saved.dp, saved.tp, saved.pp)
        if unchanged and saved.format == "native" and saved.zero_stage == 3:
            # then each rank reads buffers from a file of its own; here all from the first one, which is as long
            metadata = replace(metadata, buffers_of_this_rank=True)
        self.metadata = metadata
        self.topology = topology
        self.options = replace(options, rename=())
        self._states = SavedStates(metadata)
        self._resharding: dict[tuple[int, int], Resharding] = {}
        self._keys = dict.fromkeys(metadata.parameters, MASTER)
        self._keys |= {
            name: key for name, key in metadata.tensors if key in (BUFFER, FROZEN) and name not in self._keys
        }
        self.layouts: Mapping[str, LiveLayout] = virtual_layouts(metadata, self._keys, topology.tp, options.rules)
        numels = {name: math.prod(layout.shapes[0]) for name, layout in self.layouts.items()}
        self.stages = stages_of(numels, topology.pp, metadata)

    def plan(self, place: RankCoordinates) -> ReadPlan:
        """The plan of one rank: the one that a load would make."""
        return self.planned(place)[1]

    def planned(self, place: RankCoordinates) -> tuple[LocalState, ReadPlan]:
        """What the engine of one rank would hold, and its plan."""
        local_state = self.local_state(place)
        at = (place.pp_rank, place.tp_rank)
        if at not in self._resharding:
            self._resharding[at] = resharding_of(self.metadata, local_state, self.options)
        return local_state, plan_load(self.metadata, local_state, self.options, self._resharding[at])

    def local_state(self, place: RankCoordinates) -> LocalState:
        """What the engine of one rank would hold."""
        mine = [name for name in self._keys if place.pp_rank in self.stages[name]]
        flats, fragments = self._partitions(mine, place)
        return LocalState(
            zero_stage=self.topology.zero_stage,
            dp=place.dp,
            dp_rank=place.dp_rank,
            optimizer="the optimizer that saved it",
            flats=tuple(flats),
            fragments=tuple(fragments),
            wholes=tuple(self._wholes(mine, place)),
            groups=tuple(
                LiveGroup(tuple(self._of_group(mine, number)), dict(group))
                for number, group in enumerate(self.metadata.groups)
            ),
            tp=place.tp,
            tp_rank=place.tp_rank,
            pp=place.pp,
            pp_rank=place.pp_rank,
            elsewhere=frozenset(self._keys) - frozenset(mine),
            layouts={name: self.layouts[name] for name in mine},
        )

    def _of_group(self, names: Sequence[str], number: int) -> list[str]:
        parameters = self.metadata.parameters
        return [name for name in names if name in parameters and parameters[name].group == number]

    def _shape(self, name: str, place: RankCoordinates) -> tuple[int, ...]:
        return self.layouts[name].shapes[place.tp_rank]

    def _partitions(self, names: Sequence[str], place: RankCoordinates) -> tuple[list[FlatPartition], list[Fragment]]:
        flats: list[FlatPartition] = []
        fragments: list[Fragment] = []
        for number in range(len(self.metadata.groups)):
            for members in self._sub_groups(self._of_group(names, number), place):
                flat, mine = self._flat(len(flats), number, members, place)
                flats.append(flat)
                fragments += mine
        return flats, fragments

    def _sub_groups(self, names: list[str], place: RankCoordinates) -> Iterator[list[str]]:
        """What becomes one flat partition: a group; without ZeRO a parameter; with ZeRO-3 a sub-group.

        ZeRO-3 cuts a group where the partitions gathered so far reach ``sub_group_size``. Source:
        ``_create_fp16_sub_groups`` (stage3.py).
        """
        if not names:
            return
        if self.topology.zero_stage == 0:
            yield from ([name] for name in names)
            return
        if self.topology.zero_stage < 3:
            yield names
            return
        gathered: list[str] = []
        numel = 0
        for name in names:
            gathered.append(name)
            numel += self._step(name, place)
            if numel >= self.topology.sub_group_numel or name is names[-1]:
                yield gathered
                gathered, numel = [], 0

    def _step(self, name: str, place: RankCoordinates) -> int:
        """Elements of a rank's partition of one parameter in ZeRO-3."""
        return per_parameter_numel(math.prod(self._shape(name, place)), place.dp, self.topology.alignment)

    def _flat(
        self, index: int, group: int, members: Sequence[str], place: RankCoordinates
    ) -> tuple[FlatPartition, list[Fragment]]:
        shapes = [self._shape(name, place) for name in members]
        numels = list(map(math.prod, shapes))
        if self.topology.zero_stage == 3:
            steps = [self._step(name, place) for name in members]
            numel, placed = sum(steps), per_parameter_partition(numels, steps, place.dp_rank)
        elif self.topology.zero_stage:
            unit = place.dp * math.lcm(_START_ALIGNMENT, self.topology.alignment)
            numel = -(-sum(numels) // unit) * unit // place.dp
            placed = contiguous_partition(numels, group_offsets(numels), numel, place.dp_rank)
        else:
            numel = sum(numels)
            placed = contiguous_partition(numels, group_offsets(numels), numel, 0)
        everywhere = self.topology.zero_stage == 0 and place.dp > 1
        states = self._states.of(members, is_partitioned=self.topology.zero_stage > 0)
        flat = FlatPartition(index, group, numel, _MASTER_DTYPE, tuple(members), everywhere, states, None)
        fragments = [
            Fragment(members[part.index], shapes[part.index], part.range, index, part.flat_offset) for part in placed
        ]
        return flat, fragments

    def _wholes(self, names: Sequence[str], place: RankCoordinates) -> Iterator[WholeTensor]:
        for name in names:
            key = self._keys[name]
            tensor = tensor_of(self.metadata, name)
            if key == MASTER or tensor is None:
                continue
            shape = self._shape(name, place)
            whole = WholeTensor(name, key, shape, FlatRange(0, math.prod(shape)), tensor.dtype, place.dp > 1)
            if key == FROZEN and self.topology.zero_stage == 3:
                steps = [self._step(name, place)]
                held = [part.range for part in per_parameter_partition([math.prod(shape)], steps, place.dp_rank)]
                whole = replace(whole, range=held[0] if held else FlatRange(0, 0), replicated=False)
            yield whole
