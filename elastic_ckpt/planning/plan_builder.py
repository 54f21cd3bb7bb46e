"""Collects the targets of one rank's plan, and the items that fill them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from elastic_ckpt.core.chunks import PartitionedChunks
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import FlatPartition, Fragment, LocalState, WholeTensor
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    ITEMSIZE,
    MASTER,
    WHOLE_KINDS,
    CheckpointMetadata,
    ReplicatedState,
    TensorMetadata,
    converts_exactly,
    is_floating,
)
from elastic_ckpt.core.read_plan import SCALE_DTYPE, ReadItem, ReadPlan, RequantizeItem, TargetTensor, in_file_order
from elastic_ckpt.core.shard_specs import VOCABULARY
from elastic_ckpt.core.state_kinds import ELEMENTWISE, PER_PARAMETER, REPLICATED, SCRATCH, TOUCHED, LiveState
from elastic_ckpt.core.strided import ShardSources, copied
from elastic_ckpt.errors import AT_ITS_DTYPE, ITS_OPTIMIZER, WITHOUT_STATES, DamagedError, MismatchError, Remedy, listed
from elastic_ckpt.planning.matching import Matching
from elastic_ckpt.planning.read_items import (
    BroadcastRanges,
    FragmentSource,
    check_tiling,
    gaps_of,
    read_items,
    requantized_blocks,
    rows_in_order,
    split_plane,
)
from elastic_ckpt.planning.state_matching import StateLink, StateMatching

#: Dtype of decoded values.
_VALUES_DTYPE = "float32"


@dataclass
class PlanBuilder:
    """Collects targets and the items that fill them."""

    metadata: CheckpointMetadata  # under live names
    local_state: LocalState
    resharding: Mapping[tuple[str, str], ShardSources]  # all others come from the shard of this tensor-parallel rank
    may_change: bool  # 8-bit blocks may be requantized, and masters and states rounded to the live dtype
    added: frozenset[str] = frozenset()  # parameters with rows that the checkpoint lacks
    blocks: int = 0
    _tiled: set[tuple[str, str]] = field(default_factory=set)
    _targets: list[TargetTensor] = field(default_factory=list)
    _items: list[ReadItem] = field(default_factory=list)
    _requantize_items: list[RequantizeItem] = field(default_factory=list)
    #: (key, saved dtype, live dtype) of rounded masters and states
    _rounded: dict[tuple[str, str, str], None] = field(default_factory=dict)
    #: the same for buffers and frozen parameters, with their names
    _converted: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at = self.local_state.model.coordinates
        self._sharing = BroadcastRanges(at.partition_degree, at.partition_rank)
        self._tp_rank = at.tp_rank

    def build(self, matching: Matching, states: StateMatching) -> ReadPlan:
        """The plan of everything that is restored.

        Raises :class:`MismatchError` if shapes or dtypes do not fit, :class:`DamagedError` if chunks do not tile.
        """
        by_flat: dict[int, list[Fragment]] = {flat.index: [] for flat in self.local_state.flats}
        for fragment in self.local_state.fragments:
            by_flat[fragment.flat].append(fragment)
        for flat in self.local_state.flats:
            fragments = by_flat[flat.index]
            link = StateLink(LiveState(MASTER, flat.dtype), MASTER)
            first = len(self._targets)
            self._add_state(flat, link, fragments, [each for each in fragments if each.name in matching.restored])
            stateful = [fragment for fragment in fragments if fragment.name in states.stateful]
            for link in states.links.get(flat.index, ()):
                self._add_state(flat, link, fragments, stateful)
            if flat.states is None:
                self._add_padding(first, stateful)
        for whole in self.local_state.wholes:
            if (whole.name, whole.key) in matching.wholes:
                self._add_whole(whole)
        targets = tuple(self._targets)
        items = in_file_order(self._items)
        requantize = tuple(self._requantize_items)
        shares = tuple(self._sharing.shares)
        return ReadPlan(self.metadata.files, targets, items, requantize, shares)

    def notes(self) -> Iterator[str]:
        """Dtype changes, for the report."""
        kinds = {BUFFER: "buffers", FROZEN: "frozen parameters", MASTER: "masters"}
        for (key, saved, live), names in self._converted.items():
            yield f"{kinds[key]} converted from {saved} to {live}: {listed(names)}"
        for key, saved, live in self._rounded:
            yield f"{kinds.get(key, key)} rounded from {saved} to {live}, in which the live engine keeps them"

    def _add_state(
        self, flat: FlatPartition, link: StateLink, fragments: Sequence[Fragment], restored: Sequence[Fragment]
    ) -> None:
        """Masters or a state of one flat partition; the ``restored`` fragments have it. Both are in flat order."""
        live = link.live
        numel = flat.numel
        shape: tuple[int, ...] = ()
        restored = restored if link.source else ()
        if live.layout == SCRATCH:
            return
        if live.layout == REPLICATED:
            self._add_replicated(flat, live, link.replicated)
            return
        if live.layout == PER_PARAMETER:
            numel = math.prod(live.shape)
            shape = live.shape
            with_state = [each.name for each in restored] or flat.members  # one without elements has no fragment
            whole = FlatRange(0, numel)
            restored = [Fragment(name, shape, whole, flat.index, 0) for name in with_state if link.source]
        elif live.layout == TOUCHED:
            names = {each.name for each in restored}
            numels = [math.prod(each.shape) for each in fragments]
            starts = accumulate(numels, initial=0)
            numel = sum(numels)
            restored = [  # whole and concatenated
                replace(each, range=FlatRange(0, own), flat_offset=start)
                for each, own, start in zip(fragments, numels, starts, strict=False)
                if each.name in names
            ]
            shape = (numel,)
        parts = [self._part(fragment, link.source) for fragment in restored]
        dtype = live.dtype or (parts[0].tensor.dtype if parts else flat.dtype)
        is_quantized = live.blocks is not None or any(part.tensor.is_quantized for part in parts)
        if flat.states is None and live.key != MASTER:
            self._refuse_unknown_beginnings(parts)
        for part in parts:
            # of added rows, momenta of whole parameters are sharded as these are
            is_touched = live.layout == TOUCHED and part.fragment.name not in self.added
            self._check_shape(part, live.planes, live.layout == PER_PARAMETER or is_touched)
            self._check_values(part, live.key, dtype if live.blocks is None else _VALUES_DTYPE, is_quantized)
        fill = live.initial if live.blocks is None else live.blocks.codebook.zero
        what = live.key, flat.index, "", live.planes * numel, dtype
        target = TargetTensor(*what, (), flat.replicated, live.layout, live.planes, shape, fill)
        self._fill(target, parts, live if is_quantized else None)

    def _add_padding(self, first: int, fragments: Sequence[Fragment]) -> None:
        """Have the targets from one on filled to their ends, if one rank of the save owned just these fragments."""
        # what an unknown optimizer has in padding is not known, and norms of partitions count it
        for number, target in enumerate(self._targets[first:], start=first):
            # below ZeRO-3, masters are saved without it
            if target.layout != ELEMENTWISE or (target.key == MASTER and self.metadata.source.zero_stage < 3):
                continue
            if (place := self._flat_tensor_of(target, fragments)) is not None:
                self._targets[number] = replace(target, gaps=())
                for gap in target.gaps:
                    begin = place[1] + gap.start * ITEMSIZE[target.dtype]
                    self._items.append(ReadItem(place[0], begin, number, gap.start, gap.numel, target.dtype))

    def _flat_tensor_of(self, target: TargetTensor, fragments: Sequence[Fragment]) -> tuple[int, int] | None:
        """File and byte offset of the one saved flat tensor that is just a target, padding included."""
        places: set[tuple[int, int, int]] = set()
        for fragment in fragments:
            tensor = self.metadata.tensors.get((fragment.name, target.key))
            is_resharded = (fragment.name, "") in self.resharding
            if is_resharded or tensor is None or target.planes > 1 or target.dtype != tensor.dtype:
                return None
            source = tensor.sources[self._tp_rank if tensor.shards else 0]
            chunks = source.within(fragment.range.start, fragment.range.stop)
            if not isinstance(source, PartitionedChunks) or [chunk.range for chunk in chunks] != [fragment.range]:
                return None
            begin = chunks[0].byte_offset - fragment.flat_offset * ITEMSIZE[target.dtype]
            places.add((chunks[0].file, begin, source.flat.numel))
        (file, begin, numel) = places.pop() if len(places) == 1 else (0, 0, -1)
        return (file, begin) if numel == target.numel else None

    def _add_whole(self, whole: WholeTensor) -> None:
        part = self._part(Fragment(whole.name, whole.shape, whole.range, -1, 0), whole.key)
        saved = part.tensor.dtype
        self._check_shape(part)
        if saved != whole.dtype and not (is_floating(saved) and is_floating(whole.dtype)):
            raise self._other_dtype(whole, part.tensor)
        replicated = whole.replicated and not (whole.key == BUFFER and self.metadata.buffers_of_this_rank)
        target = TargetTensor(whole.key, -1, whole.name, whole.range.numel, whole.dtype, (), replicated)
        self._fill(target, [part])
        if saved != whole.dtype:
            self._converted.setdefault((whole.key, saved, whole.dtype), []).append(whole.name)

    def _other_dtype(self, whole: WholeTensor, tensor: TensorMetadata) -> MismatchError:
        """The error for a buffer or weight whose values are of another kind, which no conversion would keep."""
        problem = f"dtype of this {WHOLE_KINDS[whole.key]} differs"
        both = f"{whole.dtype} in the live model", f"{tensor.dtype} saved"
        ways = (
            Remedy("build the model with the dtype it was saved with"),
            Remedy(f"save it again, converted to {whole.dtype}", when="if its values are the right ones"),
        )
        return MismatchError(problem, self._file_of(tensor), *both, parameter=whole.name, remedy=ways)

    def _file_of(self, tensor: TensorMetadata) -> str:
        """The first file that has some of a tensor; of one without elements, the folder."""
        files = (self.metadata.files[chunk.file].path for chunk in tensor.chunks)
        return next(files, self.metadata.source.folder)

    def _part(self, fragment: Fragment, key: str) -> FragmentSource:
        name = fragment.name
        if key in (MASTER, FROZEN):  # it may have been frozen at save time
            key = MASTER if name in self.metadata.parameters else FROZEN
        tensor = self.metadata.tensors.get((name, key))
        if tensor is None:
            problem = f"the checkpoint knows this parameter but holds no {key} for it"
            remedy = [Remedy("the save is incomplete: use another tag"), *([] if key == MASTER else [WITHOUT_STATES])]
            raise self.metadata.error(DamagedError, problem, name, f"a tensor for {key}", "none", remedy)
        if (name, key) not in self._tiled:
            check_tiling(self.metadata, tensor)
            self._tiled.add((name, key))
        resharded = self.resharding.get((name, tensor.key)) or self.resharding.get((name, ""))
        own = copied(self._tp_rank if tensor.shards else 0, math.prod(fragment.shape))
        return FragmentSource(fragment, tensor, resharded or own)

    def _fill(self, target: TargetTensor, parts: Sequence[FragmentSource], quantized: LiveState | None = None) -> None:
        """Add a target, with that of its scales, and what fills it; ``quantized``: the state, if either side is."""
        live_blocks = None if quantized is None else quantized.blocks
        number = len(self._targets)
        planes = target.planes
        plane_numel = target.numel // target.planes
        self._targets.append(replace(target, gaps=gaps_of(parts, planes, plane_numel)))
        blocks = 0
        scales_target = -1
        if live_blocks is not None:
            blocks = live_blocks.blocks(plane_numel)
            scales_target = number + 1
            every = (FlatRange(0, planes * blocks),)  # scales of blocks without saved elements
            what = live_blocks.scales, target.flat, "", planes * blocks, SCALE_DTYPE
            self._targets.append(TargetTensor(*what, every, target.replicated, planes=planes))
            self.blocks += planes * blocks
        mine = self._sharing.mine(number, self._targets[number:]) if target.replicated else None
        if quantized is not None and mine is not None and not mine.numel:
            return
        for plane in range(planes):
            coded: list[ReadItem] = []
            for part in parts:
                to_target = part.to_target(plane, plane_numel)
                wanted = part.fragment.range
                if mine is not None:
                    inside = FlatRange(wanted.start + to_target, wanted.stop + to_target).intersect(mine)
                    if inside is None:
                        continue
                    wanted = FlatRange(inside.start - to_target, inside.stop - to_target)
                items = read_items(part.tensor, part.sources, wanted, number, to_target, plane, planes)
                if quantized is not None:
                    coded += rows_in_order(items)
                elif part.sources.scale is not None:
                    start = wanted.start + to_target
                    sources = rows_in_order(items)
                    summed = RequantizeItem(number, start, wanted.numel, None, -1, 0, sources, part.sources.scale)
                    self._requantize_items.append(summed)
                else:  # chunks tile their shard, so that each element is written once
                    self._items += items
            if quantized is not None:
                to_scales = scales_target, plane * blocks
                whole = RequantizeItem(number, plane * plane_numel, plane_numel, live_blocks, *to_scales, tuple(coded))
                copies, requantize = split_plane(whole)
                self._items += copies
                self._requantize_items += requantize
                if not self.may_change and (changed := sum(map(requantized_blocks, requantize))):
                    raise self._requantized(target.key, parts[0].fragment.name, f"{changed} of {blocks}")

    def _requantized(self, key: str, name: str, changed: str) -> MismatchError:
        problem = f"8-bit blocks of {key} would have to be requantized (lossy)"
        expected = 'blocks that are whole on both sides, since "on_change" is "error"'
        found = f"{changed} blocks of this partition mix elements of several saved blocks"
        remedy = (
            Remedy("requantizes them, within a bound that the report states", config={"on_change": "warn"}),
            Remedy("load at the topology it was saved with", at_saved_topology=True),
            Remedy('save with "align_partitions", under which another data-parallel degree alone never needs it'),
        )
        return self.metadata.error(MismatchError, problem, name, expected, found, remedy)

    def _add_replicated(self, flat: FlatPartition, live: LiveState, saved: ReplicatedState | None) -> None:
        """Every rank reads it: it is small. Without a saved one, it begins anew."""
        if saved is None:
            numel = math.prod(live.shape)
            what = live.key, flat.index, "", numel, live.dtype or flat.dtype
            every = (FlatRange(0, numel),)
            self._targets.append(TargetTensor(*what, every, False, REPLICATED, 1, live.shape, live.initial))
            return
        if (live.dtype, live.shape) != (saved.dtype, saved.shape):
            problem = f"optimizer state {live.key!r}, which is one for all partitions, is of another kind"
            live_side, saved_side = (f"{each.dtype} of shape {each.shape}" for each in (live, saved))
            both = f"{live_side} in the live optimizer", f"{saved_side} in the checkpoint"
            raise MismatchError(problem, self.metadata.files[saved.file].path, *both, remedy=ITS_OPTIMIZER)
        numel = math.prod(saved.shape)
        self._items.append(ReadItem(saved.file, saved.byte_offset, len(self._targets), 0, numel, saved.dtype))
        what = live.key, flat.index, "", numel, saved.dtype
        self._targets.append(TargetTensor(*what, (), False, REPLICATED, 1, saved.shape))

    def _check_shape(self, part: FragmentSource, planes: int = 1, of_whole: bool = False) -> None:
        """Refuse another shape; and if it is ``of_whole`` parameters, without a shape for each shard, to reshard it."""
        tensor = part.tensor
        name = part.fragment.name
        shape = part.fragment.shape
        if (name, "") in self.resharding:
            if of_whole:
                is_grown = name in self.added
                what = f"{tensor.key} is of a whole parameter, and cannot be"
                problem = f"{what} {'extended by rows' if is_grown else 'cut for another tensor-parallel degree'}"
                both = "a state with one value for each element", f"{tensor.key}, of a shape of its own"
                its_degree = Remedy("load at the tensor-parallel degree it was saved with", at_saved_topology=True)
                remedy = [WITHOUT_STATES] if is_grown else [its_degree, WITHOUT_STATES]
                raise self.metadata.error(MismatchError, problem, name, *both, remedy)
            return
        live = shape if planes == 1 else (planes, *shape)
        saved = tensor.shard_shapes[self._tp_rank if tensor.shards else 0]
        if saved != live:
            what = f"this {WHOLE_KINDS[tensor.key]}" if tensor.key in WHOLE_KINDS else tensor.key
            problem = f"shape of {what} differs"
            both = f"{live} in the live model", f"{saved} in the checkpoint"
            remedy = [Remedy("build the model with the sizes it was saved with")]
            if tensor.shards and saved[1:] == live[1:]:
                rule = {"pattern": re.escape(name), "kind": VOCABULARY}
                when = "if rows at the end of a vocabulary are all that differs"
                remedy.append(Remedy(when=when, config={"tp_rules": [rule]}))
            raise self.metadata.error(MismatchError, problem, name, *both, remedy)

    def _refuse_unknown_beginnings(self, parts: Sequence[FragmentSource]) -> None:
        """Refuse to extend a state by rows if it is not known what the optimizer begins it with."""
        if grown := [part.fragment.name for part in parts if part.fragment.name in self.added]:
            problem = f"{self.local_state.optimizer} is not known, nor what its states start with where none is saved"
            both = "a saved state for each row", "rows that were added since the save"
            raise self.metadata.error(MismatchError, problem, grown, *both, WITHOUT_STATES)

    def _check_values(self, part: FragmentSource, key: str, dtype: str, is_quantized: bool) -> None:
        """Refuse to lose precision; and of a state that is quantized on either side, to sum."""
        tensor = part.tensor
        name = part.fragment.name
        saved = part.tensor.dtype
        if is_quantized:
            if part.sources.scale is not None:
                problem = f"{key} is quantized, and would have to be averaged or added up over ranks"
                first = Remedy("takes the first rank's", config={"replicated_params": "first"})
                both = "a state of plain values", "8-bit codes"
                raise self.metadata.error(MismatchError, problem, name, *both, (first, WITHOUT_STATES))
            if tensor.is_empty:  # which does not show whether it was quantized
                return
            saved = _VALUES_DTYPE if tensor.is_quantized else saved
        if converts_exactly(saved, dtype):
            return
        # bfloat16 has their exponents: nothing overflows or vanishes
        rounds = saved in ("float32", "float16") and dtype == "bfloat16" and not tensor.is_quantized
        if rounds and self.may_change:
            self._rounded[key, saved, dtype] = None
            return
        ways = [AT_ITS_DTYPE]
        if rounds:
            ways.append(Remedy("rounds them", config={"on_change": "warn"}))
        problem = f"{key} of this parameter would lose precision"
        file = next((self.metadata.files[chunk.file].path for chunk in tensor.chunks), None)
        both = f"{dtype}, which the live optimizer keeps", f"{tensor.dtype} in the checkpoint"
        raise MismatchError(problem, file, *both, parameter=name, remedy=ways)
