"""What kind each saved optimizer state is: the user's word, then known optimizers, then shapes. Pure.

Decided over all ranks at once, since one rank's file cannot tell a quantization map from a small moment. What stays
uncertain is *opaque*: it is refused by name, with the config line that would settle it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_ckpt.core.state_kinds import COMPANIONS, ELEMENTWISE, REPLICATED, TOUCHED, StateOptions, block_numel_of
from elastic_ckpt.errors import MismatchError

OPAQUE = "opaque"
#: A tensor that belongs to it is missing or too short.
DAMAGED = "damaged"
FRESH = "fresh"
#: Names under which known optimizers keep elementwise states.
ELEMENTWISE_NAMES = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "sum"}
    | {"acc_delta", "variance", "prev", "step_size", "state1", "state2"}
)
_CODES_DTYPES = frozenset({"uint8", "int8"})


@dataclass(frozen=True, slots=True)
class Digest:
    """What is known of the values of a small tensor.

    Attributes:
        crc32: of its bytes.
        ascending: whether each value is greater than the one before.
        constant: whether all its values are one, of which there are several: no evidence that ranks must agree.
    """

    crc32: int
    ascending: bool
    constant: bool = False


class Tensor(Protocol):
    """What classification needs of a saved tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Held:
    """What one rank saved for one flat partition.

    Attributes:
        path: its file.
        numel: elements of the partition, padding included.
        touched_numel: elements of all parameters that have some in it.
        tensors: its tensor states.
        digests: of the small ones.
    """

    path: str
    numel: int
    touched_numel: int
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, Digest]


@dataclass(frozen=True)
class SavedKind:
    """The kind of one saved state.

    Attributes:
        kind: one of :mod:`elastic_ckpt.core.state_kinds`, :data:`OPAQUE`, :data:`DAMAGED`, or :data:`FRESH` (left
            alone, as the user says).
        rows: leading dimension of an elementwise state.
        block_numel: of a state in 8-bit codes, elements in a block; 0: not quantized.
        why: of an opaque state, what it looks like; of a replicated one, by which guess, where it was one.
    """

    kind: str
    rows: int = 1
    block_numel: int = 0
    why: str = ""


def classify(ranks: Sequence[Held], options: StateOptions) -> dict[str, SavedKind]:
    """The kinds of all tensor states of one flat partition.

    Scales and quantization maps of quantized states are left out: they belong to the codes.

    Args:
        ranks: what each rank saved for it; the same keys on all.
        options: the user's word.

    Raises:
        MismatchError: the user's word contradicts the tensors.
    """
    kinds: dict[str, SavedKind] = {}
    companions: set[str] = set()
    for key, tensor in ranks[0].tensors.items():
        if key in COMPANIONS and tensor.dtype == "uint8":
            kinds[key] = _declared_codes(ranks, key, options)
            companions |= set(COMPANIONS[key])
    _refuse_declared_companions(ranks, companions, options)
    for key in ranks[0].tensors:
        if key not in kinds and key not in companions:
            kinds[key] = _declared(ranks, key, options) or _by_shape(ranks, key, options)
    return kinds


def _declared_codes(ranks: Sequence[Held], key: str, options: StateOptions) -> SavedKind:
    """Codes are elementwise, whether the user says so or not."""
    word = options.schema.get(key)
    if word == FRESH:
        return SavedKind(FRESH)
    if options.says_replicated(key):
        raise _contradiction(ranks, key, REPLICATED, f"8-bit codes of {ranks[0].numel} elements")
    return _codes(ranks, key)


def _codes(ranks: Sequence[Held], key: str) -> SavedKind:
    """bitsandbytes: codes as long as the partition, and scales as long as it has blocks."""
    scales_key = COMPANIONS[key][0]
    rows = _rows(ranks[0].tensors[key].shape, ranks[0].numel)
    found = set()
    for held in ranks:
        scales = held.tensors.get(scales_key)
        count = math.prod(scales.shape) if scales is not None and scales.dtype == "float32" else 0
        fits = rows is not None and _rows(held.tensors[key].shape, held.numel) == rows and count % rows == 0
        found.add(block_numel_of(held.numel, count // rows) if fits and rows else None)
    if len(found) > 1 or None in found or rows is None:
        both = [[(name, held.tensors[name]) for name in (key, scales_key) if name in held.tensors] for held in ranks]
        shapes = [{name: f"{tensor.dtype} {tensor.shape}" for name, tensor in pair} for pair in both]
        what = f"8-bit codes and scales of shapes {shapes[0]} for a partition of {ranks[0].numel} elements"
        if f"max{key[-1]}" in ranks[0].tensors:
            return SavedKind(OPAQUE, why=f"{what}: quantized tensor-wise (block_wise=False)")
        different = next((shape for shape in shapes if shape != shapes[0]), None)
        return SavedKind(DAMAGED, why=f"{what}{f', {different} on another rank' if different else ''}")
    return SavedKind(ELEMENTWISE, rows, found.pop() or 0)


def _refuse_declared_companions(ranks: Sequence[Held], companions: set[str], options: StateOptions) -> None:
    for key in companions & set(options.schema):
        if key.startswith("absmax") or options.schema[key] != REPLICATED:
            raise _contradiction(
                ranks,
                key,
                options.schema[key],
                "a quantization map" if key.startswith("qmap") else "scales of 8-bit blocks",
            )
    for key in companions & set(options.non_shard_keys):
        if key.startswith("absmax"):
            raise _contradiction(ranks, key, REPLICATED, "scales of 8-bit blocks")


def _declared(ranks: Sequence[Held], key: str, options: StateOptions) -> SavedKind | None:
    """What the user, or the default list, says of a state; ``None``: nothing."""
    word = options.schema.get(key)
    if word == FRESH:
        return SavedKind(FRESH)
    shapes = {held.tensors[key].shape for held in ranks}
    as_long = [_rows(held.tensors[key].shape, held.numel) for held in ranks]
    if word == ELEMENTWISE:
        if None in as_long or len(set(as_long)) > 1:
            raise _contradiction(ranks, key, word, f"of shape {ranks[0].tensors[key].shape}")
        if _is_one_table(ranks, key):
            raise _contradiction(ranks, key, word, "the same ascending values on every rank, as a quantization map")
        return SavedKind(ELEMENTWISE, as_long[0] or 1)
    if not options.says_replicated(key):
        return None
    looks_cut = None not in as_long and not _is_one_table(ranks, key)
    if len(shapes) > 1 or (looks_cut and (word is not None or key in ELEMENTWISE_NAMES or key in options.named)):
        raise _contradiction(ranks, key, REPLICATED, f"exactly as long as its partition ({ranks[0].numel} elements)")
    return SavedKind(REPLICATED)


def _is_one_table(ranks: Sequence[Held], key: str) -> bool:
    """Whether a tensor has the same ascending values on all ranks."""
    digests = [held.digests.get(key) for held in ranks]
    return digests[0] is not None and digests[0].ascending and len(set(digests)) == 1


def _by_shape(ranks: Sequence[Held], key: str, options: StateOptions) -> SavedKind:
    as_long = [_rows(held.tensors[key].shape, held.numel) for held in ranks]
    if None not in as_long and len(set(as_long)) == 1:
        if len(ranks) > 1 and _is_one_table(ranks, key) and key not in ELEMENTWISE_NAMES:
            return _opaque(ranks, key, "as long as its partition, yet with the same ascending values on every rank")
        return SavedKind(ELEMENTWISE, as_long[0] or 1)
    if key == "momentum_buffer" and all(held.tensors[key].shape == (held.touched_numel,) for held in ranks):
        return SavedKind(TOUCHED)
    if key in ELEMENTWISE_NAMES or len({held.tensors[key].shape for held in ranks}) > 1:
        return _opaque(ranks, key, "")
    return _of_fixed_size(ranks, key, options)


def _of_fixed_size(ranks: Sequence[Held], key: str, options: StateOptions) -> SavedKind:
    """A tensor of one shape on all ranks that is not as long as the partition."""
    if math.prod(ranks[0].tensors[key].shape) <= options.non_shard_max_numel:
        return SavedKind(REPLICATED, why=f'"non_shard_max_numel": {options.non_shard_max_numel}')
    if any(tensor.dtype in _CODES_DTYPES for tensor in ranks[0].tensors.values()):
        return _opaque(ranks, key, "beside 8-bit codes: it may be their scales")
    digests = [held.digests.get(key) for held in ranks]
    if len(ranks) > 1 and digests[0] is not None and len(set(digests)) == 1 and not digests[0].constant:
        return SavedKind(REPLICATED, why="the same values on all ranks")
    return _opaque(ranks, key, "")


def _rows(shape: tuple[int, ...], numel: int) -> int | None:
    """How many values an element has in a tensor of this shape; ``None``: it is not elementwise."""
    if not shape or shape[-1] != numel or len(shape) > 2:
        return None
    return 1 if len(shape) == 1 else shape[0]


def _opaque(ranks: Sequence[Held], key: str, more: str) -> SavedKind:
    tensor = ranks[0].tensors[key]
    what = f"{tensor.dtype} of shape {tensor.shape} for a partition of {ranks[0].numel}"
    return SavedKind(OPAQUE, why=f"{what}{', ' if more else ''}{more}")


def _contradiction(ranks: Sequence[Held], key: str, word: str, what: str) -> MismatchError:
    return MismatchError(
        f'optimizer state {key!r} is no {word} state, although "elastic_checkpoint" says so',
        parameter=key,
        file=ranks[0].path,
        expected=f"an {word} state" if word == ELEMENTWISE else f"a {word} state",
        found=f"{ranks[0].tensors[key].dtype} of shape {ranks[0].tensors[key].shape}: {what}",
        remedy=f'take "{key}" out of "state_schema" and "non_shard_state_keys"',
    )
