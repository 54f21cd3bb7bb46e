"""Compares how a restored weight was quantized with how the live one is. Pure.

Its bytes are of no use without what describes them. Scales are restored with it; entries that a module makes anew for
each state dict cannot be, and have to be the saved ones already.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic_ckpt.core.local_state import LocalState, QuantizationEntry
from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata
from elastic_ckpt.core.quantized_weights import weight_of
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, MismatchError, Remedy, UnsupportedError, listed

_AS_SAVED = Remedy(
    "quantize the base as the saved run did (quant_type, block size, double quantization), of the same weights, as "
    "from_pretrained gives them"
)
_EXCLUDE = Remedy("save with exclude_frozen_parameters=True: such checkpoints load over the base that the model has")


def compare_quantization(metadata: CheckpointMetadata, local_state: LocalState, restored: Collection[str]) -> None:
    """Refuse ``restored`` frozen weights that were quantized in another way than the live ones are.

    Raises :class:`MismatchError` that names the entries, or :class:`UnsupportedError` if they cannot be compared.
    """
    live = {entry.name: entry for entry in local_state.quantization if entry.weight in restored}
    if not live:
        return
    weights = {entry.weight for entry in live.values()}
    saved = {name for name in (*metadata.names(FROZEN), *metadata.names(BUFFER)) if weight_of(name) in weights}
    if saved != live.keys():
        problem = "a frozen weight was quantized in another way than the live one"
        expected = "what describes the live weights: " + listed(live.keys() - saved or live)
        found = "what describes the saved ones: " + listed(saved - live.keys() or saved)
        raise metadata.error(MismatchError, problem, saved ^ live.keys(), expected, found, _AS_SAVED)
    fixed = {name: entry for name, entry in live.items() if entry.crc32 is not None}
    unknown = [name for name in fixed if name not in metadata.crc32s]
    if unknown:
        problem = "the file has no checksum of what describes a quantized weight, by which it is compared"
        with_checksums = "a zip archive with checksums, as torch.save writes it"
        raise metadata.error(UnsupportedError, problem, unknown, with_checksums, listed(unknown), _EXCLUDE)
    differing = [name for name, entry in fixed.items() if not _is_equal(metadata, entry)]
    if differing:
        problem = "a frozen weight was quantized in another way, or of other values, than the live one"
        expected = "the live model's own, which a load cannot replace: " + listed(differing)
        raise metadata.error(MismatchError, problem, differing, expected, "others in the checkpoint", _AS_SAVED)


def without_their_weights(
    metadata: CheckpointMetadata,
    local_state: LocalState,
    saved: Collection[str],
    restored: Collection[str],
    excluded: Collection[str],
) -> set[str]:
    """Of ``saved`` entries that modules load in a way of their own, those whose frozen weights were left out.

    Raises :class:`UnsupportedError` for those whose weights are ``restored``: only the module knows what they mean, and
    without them the weights have other values. Those of modules without frozen weights are left to the caller.
    """
    of_module: dict[str, set[str]] = {}
    for whole in local_state.wholes:
        if whole.key == FROZEN:
            of_module.setdefault(whole.name.rpartition(".")[0], set()).add(whole.name)
    own = {name: of_module.get(name.rpartition(".")[0], set()) for name in local_state.own_entries.intersection(saved)}
    needed = sorted(name for name, weights in own.items() if not weights.isdisjoint(restored))
    if needed:
        problem = "frozen weights were saved of a module that keeps what describes them in entries of its own, which "
        problem += "only the module can load"
        expected = "frozen weights of parameters and buffers alone, or a save without frozen weights"
        raise metadata.error(UnsupportedError, problem, needed, expected, listed(needed), (_EXCLUDE, AT_ITS_TOPOLOGY))
    return {name for name, weights in own.items() if weights and weights.issubset(excluded)}


def _is_equal(metadata: CheckpointMetadata, entry: QuantizationEntry) -> bool:
    """Whether the saved entry is the live one."""
    tensor = metadata.tensors.get((entry.name, FROZEN)) or metadata.tensors[entry.name, BUFFER]
    is_alike = (tensor.dtype, tensor.shape) == (entry.dtype, entry.shape)
    return is_alike and set(metadata.crc32s[entry.name]) == {entry.crc32}
