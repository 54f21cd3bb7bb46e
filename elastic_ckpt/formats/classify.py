"""The kind of each saved optimizer state: as the user declares it, else by known optimizers, else by its shape.

Decided over all ranks at once, since one rank's file cannot distinguish a quantization map from a small moment. What
stays uncertain is *opaque*: refused by name, with the config line that settles it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic_ckpt.core.state_kinds import COMPANIONS, ELEMENTWISE, REPLICATED, TOUCHED, StateOptions, block_numel_of
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

OPAQUE = "opaque"
#: A tensor of the state is missing or too short.
DAMAGED = "damaged"
FRESH = "fresh"
#: Names under which known optimizers keep elementwise states.
ELEMENTWISE_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"}
    | {"acc_delta", "variance", "prev", "step_size", "state1", "state2"}
)
_CODES_DTYPES = frozenset({"uint8", "int8"})


class Digest(NamedTuple):
    """A small tensor's values: ``ascending`` strictly, or ``constant``, which is no evidence that ranks must agree."""

    crc32: int
    ascending: bool
    constant: bool = False


class RankStates(NamedTuple):
    """What one rank saved for one flat partition: its tensor states, and digests of the small ones.

    ``numel`` counts padding; ``touched_numel`` counts all elements of the parameters that have any in the partition.
    """

    path: str
    numel: int
    touched_numel: int
    tensors: Mapping[str, TensorRef]
    digests: Mapping[str, Digest]


#: Values per element, at most: AdEMAMix has two in one state.
_MOST_ROWS = 8


@dataclass(frozen=True)
class SavedKind:
    """The kind of one saved state.

    Attributes:
        kind: one of :mod:`elastic_ckpt.core.state_kinds`, :data:`OPAQUE`, :data:`DAMAGED`, or :data:`FRESH` (not
            restored, as the user asks).
        rows: leading dimension of an elementwise state.
        block_numel: elements per quantization block; 0: not quantized.
        why: what an opaque or damaged state looks like, or by which guess a state is replicated.
    """

    kind: str
    rows: int = 1
    block_numel: int = 0
    why: str = ""


def classify(ranks: Sequence[RankStates], options: StateOptions) -> dict[str, SavedKind]:
    """The kinds of all states of one flat partition that are tensors on any of the ``ranks``.

    Scales and quantization maps belong to their quantized states and have no kind. Raises :class:`MismatchError` if the
    user's declaration contradicts the tensors.
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
    return kinds | {key: _kind(ranks, key, options) for key in tensors if key not in codes | companions}


def _kind_of_codes(ranks: Sequence[RankStates], key: str, options: StateOptions) -> SavedKind:
    """bitsandbytes: codes as long as the partition, elementwise whatever is declared, and one scale per block."""
    if options.schema.get(key) == FRESH:
        return SavedKind(FRESH)
    if options.layout(key) == REPLICATED:
        raise _contradiction(ranks, key, REPLICATED, f"8-bit codes of {ranks[0].numel} elements")
    scales_key, rows = COMPANIONS[key][0], _rows(ranks, key)
    if rows is not None:
        block_numels = {_block_numel(states, scales_key, rows) for states in ranks}
        if len(block_numels) == 1 and (block_numel := block_numels.pop()) is not None:
            return SavedKind(ELEMENTWISE, rows, block_numel)
    shapes = [
        {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in states.tensors.items() if name in (key, scales_key)}
        for states in ranks
    ]
    what = f"8-bit codes and scales of shapes {shapes[0]} for a partition of {ranks[0].numel} elements"
    if f"max{key[-1]}" in ranks[0].tensors:
        return SavedKind(OPAQUE, why=f"{what}: quantized tensor-wise (block_wise=False)")
    different = next((f", {shape} on another rank" for shape in shapes if shape != shapes[0]), "")
    return SavedKind(DAMAGED, why=f"{what}{different}")


def _block_numel(states: RankStates, scales_key: str, rows: int) -> int | None:
    """Elements per block, by the number of scales; ``None``: the scales do not fit the codes."""
    scales = states.tensors.get(scales_key)
    count = scales.numel if scales is not None and scales.dtype == "float32" else 0
    return None if count % rows else block_numel_of(states.numel, count // rows)


def _kind(ranks: Sequence[RankStates], key: str, options: StateOptions) -> SavedKind:
    """The kind of a state that is not quantized: as declared, else by its shape."""
    word, rows = options.schema.get(key), _rows(ranks, key)
    if word == FRESH:
        return SavedKind(FRESH)
    if word == ELEMENTWISE:
        if rows is None:
            raise _contradiction(ranks, key, word, f"of shape {ranks[0].tensors[key].shape}")
        if _is_one_table(ranks, key):
            raise _contradiction(ranks, key, word, "the same ascending values on every rank, as a quantization map")
        return SavedKind(ELEMENTWISE, rows)
    if options.layout(key) != REPLICATED:
        return _by_shape(ranks, key, rows, options)
    is_partitioned = rows is not None and not _is_one_table(ranks, key)
    is_named = word is not None or key in ELEMENTWISE_NAMES
    if not _same_shape(ranks, key) or (is_partitioned and is_named):
        raise _contradiction(ranks, key, REPLICATED, f"exactly as long as its partition ({ranks[0].numel} elements)")
    return SavedKind(REPLICATED)


def _by_shape(ranks: Sequence[RankStates], key: str, rows: int | None, options: StateOptions) -> SavedKind:
    tensor = ranks[0].tensors[key]
    looks = f"{tensor.dtype} of shape {tensor.shape} for a partition of {ranks[0].numel}"
    if rows is not None:
        if len(ranks) > 1 and _is_one_table(ranks, key) and key not in ELEMENTWISE_NAMES:
            why = "as long as its partition, yet with the same ascending values on every rank"
            return SavedKind(OPAQUE, why=f"{looks}, {why}")
        return SavedKind(ELEMENTWISE, rows)
    if key == "momentum_buffer" and all(states.tensors[key].shape == (states.touched_numel,) for states in ranks):
        return SavedKind(TOUCHED)
    if key in ELEMENTWISE_NAMES or not _same_shape(ranks, key):
        return SavedKind(OPAQUE, why=looks)
    return _of_fixed_size(ranks, key, looks, options)


def _of_fixed_size(ranks: Sequence[RankStates], key: str, looks: str, options: StateOptions) -> SavedKind:
    """The kind of a state that has one shape on all ranks, and not the partition's length."""
    if ranks[0].tensors[key].numel <= options.max_numel:
        return SavedKind(REPLICATED, why=f'"numel<={options.max_numel}" under "states"')
    if any(tensor.dtype in _CODES_DTYPES for tensor in ranks[0].tensors.values()):
        return SavedKind(OPAQUE, why=f"{looks}, beside 8-bit codes: it may be their scales")
    digest = _same_digest(ranks, key)
    if len(ranks) > 1 and digest is not None and not digest.constant:
        return SavedKind(REPLICATED, why="the same values on all ranks")
    return SavedKind(OPAQUE, why=looks)


def _rows(ranks: Sequence[RankStates], key: str) -> int | None:
    """How many values a state has per element; ``None``: it is not elementwise, or ranks differ.

    A matrix of one row or of many is no such state: preconditioners have a row and a column for each element.
    """
    found = set()
    for states in ranks:
        *leading, last = states.tensors[key].shape or (-1,)
        if len(leading) > 1 or last != states.numel or (leading and not 1 < leading[0] <= _MOST_ROWS):
            return None
        found.add(leading[0] if leading else 1)
    return found.pop() if len(found) == 1 else None


def _same_shape(ranks: Sequence[RankStates], key: str) -> bool:
    return len({states.tensors[key].shape for states in ranks}) == 1


def _same_digest(ranks: Sequence[RankStates], key: str) -> Digest | None:
    """The digest of a tensor that has the same values on all ranks."""
    digests = {states.digests.get(key) for states in ranks}
    return digests.pop() if len(digests) == 1 else None


def _is_one_table(ranks: Sequence[RankStates], key: str) -> bool:
    digest = _same_digest(ranks, key)
    return digest is not None and digest.ascending


def _contradiction(ranks: Sequence[RankStates], key: str, word: str, what: str) -> MismatchError:
    tensor = ranks[0].tensors[key]
    problem = f'optimizer state {key!r} is no {word} state, although "elastic_checkpoint" says so'
    expected = f"an {word} state" if word == ELEMENTWISE else f"a {word} state"
    found = f"{tensor.dtype} of shape {tensor.shape}: {what}"
    remedy = f'take "{key}" out of "states", or give it the layout that it has'
    return MismatchError(problem, ranks[0].path, expected, found, parameter=key, remedy=remedy)
