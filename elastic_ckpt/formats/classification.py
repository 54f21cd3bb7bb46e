"""The kind of each saved optimizer state, told by all ranks and flat tensors together.

A kind is as the user declares it, else by known optimizers, else by the tensors' shapes and values. One rank's file
cannot distinguish a quantization map from a small moment, nor can one flat tensor that happens to be as long as the
map. What stays uncertain is *opaque*: refused by name, with the config line that settles it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ckpt.core.state_kinds import (
    COMPANIONS,
    ELEMENTWISE,
    MOMENTS,
    REPLICATED,
    TOUCHED,
    StateOptions,
    block_numel_of,
)
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats.saved_states import ELEMENTWISE_NAMES, Digest, StatesOfOne
from elastic_ckpt.formats.torch_archive.tensors import TensorRef

OPAQUE = "opaque"
DAMAGED = "damaged"  # a tensor of the state is missing or too short
FRESH = "fresh"  # not restored, as the user asks
MOST_VALUES = 8  # values per element, at most: AdEMAMix has two in one state
_CODES_DTYPES = frozenset({"uint8", "int8"})
#: So many values that are the same on all ranks, and not all one value, are no chance.
_TELLING_NUMEL = 16


@dataclass(frozen=True)
class SavedKind:
    """The kind of one saved state."""

    kind: str  # one of :mod:`elastic_ckpt.core.state_kinds`, :data:`OPAQUE`, :data:`DAMAGED`, or :data:`FRESH`
    planes: int = 1  # values per element: the leading dimension of an elementwise state
    block_numel: int = 0  # elements per quantization block; 0: not quantized
    why: str = ""  # what an opaque or damaged state looks like, or by which guess a state is replicated


class RankStates(NamedTuple):
    """What one rank saved for one flat partition, or for a parameter that is not in one."""

    path: str
    shape: tuple[int, ...]  # of the partition with its padding, or of the parameter
    touched_numel: int  # all elements of the parameters that have any in the partition
    states: StatesOfOne

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        return self.states.tensors

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def notes_and_warnings(
    kinds: Mapping[str, SavedKind], options: StateOptions, values: frozenset[str] = frozenset()
) -> tuple[list[str], list[str]]:
    """About guessed kinds, and names in the user's options that neither ``kinds`` nor ``values`` beside them have."""
    guesses = {key: kind.why for key, kind in kinds.items() if kind.kind == REPLICATED and kind.why}
    companions = {name for key, kind in kinds.items() if kind.block_numel for name in COMPANIONS[key]}
    unmatched = ", ".join(sorted(options.schema.keys() - {*kinds, *companions, *values})) if kinds else ""
    warning = f'the checkpoint holds no optimizer state named {unmatched}, which "states" names'
    notes = [f"optimizer state {key} was taken as replicated: {why}" for key, why in guesses.items()]
    return notes, [warning] if unmatched else []


class Lengths(NamedTuple):
    """What the shapes of all partitions together tell of states of unknown names."""

    tables: frozenset[str] = frozenset()  # of one shape, which is not that of each partition: not elementwise
    elementwise: frozenset[str] = frozenset()  # as long as each partition, and these are of several lengths


UNKNOWN_LENGTHS = Lengths()


def compare_lengths(partitions: Iterable[RankStates]) -> Lengths:
    """Compare each state with the partition beside it, over all flat tensors and ranks of a checkpoint.

    Beside one partition alone, a table of 256 values looks like a state of 256 elements if the partition has as many.
    """
    shapes: dict[str, set[tuple[int, ...]]] = {}
    misfits: set[str] = set()
    for partition in partitions:
        for key, tensor in partition.tensors.items():
            shapes.setdefault(key, set()).add(tensor.shape)
            if _planes_of(partition, key) is None:
                misfits.add(key)
    unknown = shapes.keys() - ELEMENTWISE_NAMES
    return Lengths(
        frozenset(key for key in unknown & misfits if len(shapes[key]) == 1),
        frozenset(key for key in unknown - misfits if len(shapes[key]) > 1),
    )


def classify(
    ranks: Sequence[RankStates],
    options: StateOptions,
    shared: frozenset[str] = frozenset(),
    lengths: Lengths = UNKNOWN_LENGTHS,
) -> dict[str, SavedKind]:
    """The kinds of all states of one flat partition that are tensors on any of the ``ranks``.

    ``shared``: states that the checkpoint itself records as replicated; ``lengths``: what all its partitions tell.
    Scales and quantization maps belong to their quantized states and have no kind. Raises :class:`MismatchError` if
    the user's declaration contradicts the tensors.
    """
    tensors = {key: ref for key, ref in ranks[0].tensors.items() if all(key in rank.tensors for rank in ranks)}
    others = {key for rank in ranks for key in rank.tensors} - tensors.keys()
    codes = {key for key in COMPANIONS if key in tensors and tensors[key].dtype == "uint8"}
    companions = {companion for key in codes for companion in COMPANIONS[key]}
    kinds = {key: _kind_of_codes(ranks, key, options) for key in tensors if key in codes}
    for key in sorted(companions & tensors.keys()):  # they belong to their codes, but a map may be declared as such
        word = options.layout(key)
        is_map = key.startswith("qmap")
        if word is not None and not (is_map and word == REPLICATED):
            raise _contradiction(ranks, key, word, "a quantization map" if is_map else "scales of 8-bit blocks")
    kinds |= {key: SavedKind(OPAQUE, why="a tensor on some ranks, and none on others") for key in others - companions}
    looks_quantized = any(each.dtype in _CODES_DTYPES for each in ranks[0].tensors.values())
    known = codes | companions
    for key in (key for key in tensors if key not in known):
        if key not in shared or options.schema.get(key) == FRESH:
            kinds[key] = _kind(ranks, key, options, lengths, looks_quantized)
        elif options.schema.get(key) == ELEMENTWISE:
            raise _contradiction(ranks, key, ELEMENTWISE, "recorded as one tensor for all")
        else:
            is_declared = options.layout(key) == REPLICATED
            kinds[key] = SavedKind(REPLICATED, why="" if is_declared else "the checkpoint records it as such")
    return kinds


def _kind_of_codes(ranks: Sequence[RankStates], key: str, options: StateOptions) -> SavedKind:
    """bitsandbytes: codes as long as the partition, elementwise whatever is declared, and one scale per block."""
    if options.schema.get(key) == FRESH:
        return SavedKind(FRESH)
    if options.layout(key) == REPLICATED:
        raise _contradiction(ranks, key, REPLICATED, f"8-bit codes of {ranks[0].numel} elements")
    scales_key = COMPANIONS[key][0]
    planes = _planes(ranks, key)
    if planes is not None:
        block_numels = {_block_numel(states, key, planes) for states in ranks}
        if len(block_numels) == 1 and (block_numel := block_numels.pop()) is not None:
            return SavedKind(ELEMENTWISE, planes, block_numel)
    shapes = [
        {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in states.tensors.items() if name in (key, scales_key)}
        for states in ranks
    ]
    what = f"8-bit codes and scales of shapes {shapes[0]} for a partition of {ranks[0].numel} elements"
    if f"max{key[-1]}" in ranks[0].tensors:
        return SavedKind(OPAQUE, why=f"{what}: quantized tensor-wise (block_wise=False)")
    different = next((f", {shape} on another rank" for shape in shapes if shape != shapes[0]), "")
    return SavedKind(DAMAGED, why=f"{what}{different}")


def _block_numel(rank: RankStates, key: str, planes: int) -> int | None:
    """Elements of the blocks of quantized codes, as recorded or by the number of scales; ``None`` if that fits none."""
    scales = rank.tensors.get(COMPANIONS[key][0])
    count = scales.numel if scales is not None and scales.dtype == "float32" else 0
    if key in rank.states.block_numels:
        return rank.states.block_numels[key]
    return None if count % planes else block_numel_of(rank.numel, count // planes)


def _kind(
    ranks: Sequence[RankStates], key: str, options: StateOptions, lengths: Lengths, looks_quantized: bool
) -> SavedKind:
    """The kind of a state that is not quantized: as declared, else by its shape."""
    word = options.schema.get(key)
    planes = _planes(ranks, key)
    if word == FRESH:
        return SavedKind(FRESH)
    if word == ELEMENTWISE:
        if planes is None:
            raise _contradiction(ranks, key, word, f"of shape {ranks[0].tensors[key].shape}")
        if _is_one_table(ranks, key):
            raise _contradiction(ranks, key, word, "the same ascending values on every rank, as a quantization map")
        return SavedKind(ELEMENTWISE, planes)
    if options.layout(key) != REPLICATED:
        if key in MOMENTS and planes is None and ranks[0].touched_numel >= 0:  # of a flat partition
            odd = next((rank for rank in ranks if rank.tensors[key].shape != rank.shape), ranks[0])
            found = f"{key} of shape {odd.tensors[key].shape} for a partition of {odd.numel} elements in {odd.path}"
            return SavedKind(DAMAGED, why=found)
        return _by_shape(ranks, key, options, lengths, looks_quantized)
    if word is not None and planes is not None and (key in ELEMENTWISE_NAMES or key in lengths.elementwise):
        raise _contradiction(ranks, key, REPLICATED, f"exactly as long as its partition ({ranks[0].numel} elements)")
    if len({states.tensors[key].shape for states in ranks}) > 1:
        raise _contradiction(ranks, key, REPLICATED, "of another shape on other ranks")
    if word is not None and planes is not None and len(ranks) > 1 and _same_digest(ranks, key) is None:
        what = f"as long as its partition ({ranks[0].numel} elements), and of other values on other ranks"
        raise _contradiction(ranks, key, REPLICATED, what)
    return SavedKind(REPLICATED)


def _by_shape(
    ranks: Sequence[RankStates], key: str, options: StateOptions, lengths: Lengths, looks_quantized: bool
) -> SavedKind:
    """The kind of a state that nobody declared; ``looks_quantized``: there may be 8-bit codes beside it."""
    planes = None if key in lengths.tables else _planes(ranks, key)
    tensor = ranks[0].tensors[key]
    looks = f"{tensor.dtype} of shape {tensor.shape} for a partition of {ranks[0].numel}"
    if planes is not None:
        is_elementwise = key in ELEMENTWISE_NAMES or key in lengths.elementwise
        why = "" if is_elementwise else _why_a_table(ranks, key, options)
        return SavedKind(OPAQUE, why=f"{looks}, {why}") if why else SavedKind(ELEMENTWISE, planes)
    if key == "momentum_buffer" and all(states.tensors[key].shape == (states.touched_numel,) for states in ranks):
        return SavedKind(TOUCHED)
    digest = _same_digest(ranks, key)
    if key in ELEMENTWISE_NAMES or len({states.tensors[key].shape for states in ranks}) > 1:
        pass
    elif tensor.numel <= options.max_numel:
        why = f'"numel<={options.max_numel}" under "states"' if tensor.numel else "it has no elements"
        return SavedKind(REPLICATED, why=why)
    elif looks_quantized:
        looks += ", beside 8-bit codes: it may be their scales"
    elif len(ranks) > 1 and digest is not None and not digest.constant:
        return SavedKind(REPLICATED, why="the same values on all ranks")
    return SavedKind(OPAQUE, why=looks)


def _why_a_table(ranks: Sequence[RankStates], key: str, options: StateOptions) -> str:
    """Why a state as long as its partition may be a table all the same; empty if nothing suggests that."""
    numel = ranks[0].tensors[key].numel
    digest = _same_digest(ranks, key)
    if len(ranks) > 1 and digest is None:
        return ""
    if len(ranks) > 1 and _is_one_table(ranks, key):
        return "as long as its partition, yet with the same ascending values on every rank"
    if len(ranks) > 1 and digest is not None and not digest.constant and numel >= _TELLING_NUMEL:
        return "as long as its partition, yet with the same values on every rank"
    if numel <= options.max_numel:
        return f'as long as its partition, yet small enough for "numel<={options.max_numel}": it may be either'
    return ""


def _planes(ranks: Sequence[RankStates], key: str) -> int | None:
    """A state's values per element; ``None``: ranks differ, or it is not elementwise, like preconditioners."""
    found = {_planes_of(states, key) for states in ranks}
    return found.pop() if len(found) == 1 else None


def _planes_of(states: RankStates, key: str) -> int | None:
    """Values per element of one rank's partition; ``None`` if its shape is not the partition's."""
    shape = states.tensors[key].shape
    own = states.shape
    leading = shape[: len(shape) - len(own)]
    if leading + own != shape or len(leading) > 1 or (leading and not 1 < leading[0] <= MOST_VALUES):
        return None
    return leading[0] if leading else 1


def _same_digest(ranks: Sequence[RankStates], key: str) -> Digest | None:
    """The digest of a tensor that has the same values on all ranks."""
    digests = {rank.states.digests.get(key) for rank in ranks}
    return digests.pop() if len(digests) == 1 else None


def _is_one_table(ranks: Sequence[RankStates], key: str) -> bool:
    """Whether all ranks have the same ascending values, as of a quantization map."""
    digest = _same_digest(ranks, key)
    return digest is not None and digest.ascending


def _contradiction(ranks: Sequence[RankStates], key: str, word: str, what: str) -> MismatchError:
    tensor = ranks[0].tensors[key]
    problem = f'optimizer state {key!r} is not a state of the kind "{word}" that "elastic_checkpoint" names'
    expected = f"an {word} state" if word == ELEMENTWISE else f"a {word} state"
    found = f"{tensor.dtype} of shape {tensor.shape}: {what}"
    remedy = f'take "{key}" out of "states", or give it the layout that it has'
    return MismatchError(problem, ranks[0].path, expected, found, parameter=key, remedy=remedy)
