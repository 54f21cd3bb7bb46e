"""The files of a universal checkpoint, written from metadata.

The layout is that of ``ds_to_universal.py`` (DeepSpeed 0.19.8): ``zero/<parameter>/<key>.pt`` with the whole tensor and
its tensor-parallel layout, ``step.pt`` beside them, ``zero/optimizer_state.pt`` with the rest of the optimizer's state,
and copies of the model-states files. Unlike there, parameters keep their shapes after stage 3 too, and nothing of rank
0's partitions is copied.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic_ckpt.core.experts import expert_name
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.tp_rules import VOCABULARY, WHOLE_KINDS, Rule
from elastic_ckpt.core.values import differing
from elastic_ckpt.errors import UnsupportedError, listed
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.stand_ins import StandIn
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.tools.conversion.pickling import save
from elastic_ckpt.tools.conversion.torch_file import write_tensor_file
from elastic_ckpt.tools.logical import LogicalReader, Whole, refuse_without_masters, scalars_of
from elastic_ckpt.tools.workplace import scratch

_UNSAFE = re.compile(r"[/\\\x00]|^\.{0,2}$|^\.")
#: DeepSpeed's note of parts of unequal widths. Its other notes are entries of ``deepspeed/checkpoint/constants.py``.
_SUBPARAM_SHAPE = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
#: The only states that DeepSpeed's stage 3 loads.
_ADAM = frozenset({MASTER, "exp_avg", "exp_avg_sq"})


@dataclass(frozen=True)
class OutputFile:
    """A file to write: path relative to the checkpoint, approximate size, and function that writes it to a path."""

    path: str
    nbytes: int
    write: Callable[[Path], object]


def refuse_unconvertible(metadata: CheckpointMetadata, to: str = "universal") -> None:
    """Raise :class:`UnsupportedError`, naming the reason, if a format cannot express a checkpoint."""
    source, parameters, tensors = metadata.source, metadata.parameters.values(), metadata.tensors.items()
    scalars = {key for saved in parameters for key, value in saved.scalars if value is not None} - {"step"}
    own = differing(metadata.groups)
    experts = sum(expert_name(name) is not None for name in metadata.parameters)
    coded = {key for (_, key), tensor in tensors if tensor.is_quantized}
    replicated = {state.key for saved in parameters for state in saved.replicated}
    of_their_own = {key for (_, key), tensor in tensors if tensor.is_whole}
    is_universal = to == "universal"
    renamed = is_universal and [name for name, saved in metadata.saved_names.items() if name != saved]
    reasons = (
        (is_universal and source.format == to, "it is a universal checkpoint already"),
        (renamed, f'"rename" changes names ({listed(renamed or ())}), and model-states files are copied as they are'),
        (is_universal and source.format in ("dcp", "safetensors"), "it has no files of DeepSpeed's to copy"),
        (
            is_universal and source.zero_stage == 0,
            "it was saved without ZeRO, and DeepSpeed loads universal checkpoints with ZeRO only",
        ),
        (
            is_universal and experts,
            f"{experts} tensors of experts, which DeepSpeed would look up by their numbers on each rank",
        ),
        (experts, f"{experts} tensors of experts, whose names are those of DeepSpeed's own layers"),
        (
            coded,
            f"8-bit states ({listed(coded)}), which {'DeepSpeed' if is_universal else 'torch'} would take for values",
        ),
        (replicated, f"states of whole partitions ({listed(replicated)})"),
        (is_universal and of_their_own, f"states with a shape of their own ({listed(of_their_own)})"),
        (is_universal and scalars, f"scalar states beside the step ({listed(scalars)})"),
        (is_universal and own, f"hyperparameters of which each rank has its own ({listed(own)})"),
        (metadata.states.opaque, f"states of unknown layout ({listed(metadata.states.opaque)})"),
        (metadata.states.damaged, f"damaged states ({listed(metadata.states.damaged)})"),
    )
    for applies, why in reasons:
        if applies:
            expected = "a native ZeRO checkpoint whose optimizer keeps one value an element, and a step"
            raise _unconvertible(why, source.folder, expected, why, to)


def refuse_without_shapes(model: PickledFile) -> None:
    """Raise :class:`UnsupportedError` if ``model`` lists no parameters, as ``BF16_Optimizer``'s without ZeRO."""
    if model.tree.get("param_shapes") is None:
        why = "its model-states files do not list the parameters of the optimizer"
        raise _unconvertible(why, model.path, "param_shapes, as runs with ZeRO save them", "none")


def _unconvertible(why: str, file: str, expected: str, found: str, to: str = "universal") -> UnsupportedError:
    called = {"universal": "DeepSpeed's universal format", "dcp": "torch.distributed.checkpoint's format"}[to]
    return UnsupportedError(
        f"this checkpoint cannot be converted to {called}: {why}",
        file=file,
        expected=expected,
        found=found,
        remedy="load it as it is: elastic_ckpt needs no conversion",
    )


def parameter_files(
    reader: LogicalReader, rules: Mapping[str, Rule | None], options: ReadOptions
) -> Iterator[OutputFile]:
    """The files below ``zero/``, in metadata order.

    Raises :class:`DamagedError` for a parameter without master weights, :class:`UnsupportedError` for an unsafe name.
    """
    metadata = reader.metadata
    refuse_without_masters(metadata)
    for whole in reader.tensors():
        if whole.name in metadata.parameters:
            entries = tp_entries(rules.get(whole.name), whole)
            if whole.name in metadata.stacked:
                entries |= {"is_expert_param": True, "ep_num_experts": metadata.stacked[whole.name]}
            write = partial(_write_tensor, reader, whole, entries, options)
            yield OutputFile(_path_of(whole.name, whole.key, metadata), whole.nbytes, write)
    for name in metadata.parameters:
        for key, scalar in scalars_of(metadata, name).items():
            yield OutputFile(_path_of(name, key, metadata), 0, partial(save, scalar))


def _path_of(name: str, key: str, metadata: CheckpointMetadata) -> str:
    folder = metadata.source.folder
    return f"{UNIVERSAL_FOLDER}/{checked_name(name, folder)}/{checked_name(key, folder)}.pt"


def checked_name(name: str, folder: str) -> str:
    """A name, if it is safe as that of a folder or file; :class:`UnsupportedError` otherwise."""
    if _UNSAFE.search(name) or not name.isprintable() or len(name.encode()) > 255:
        raise UnsupportedError(
            "a name in the checkpoint cannot be the name of a folder",
            parameter=repr(name)[:300],
            file=folder,
            expected="a name without path separators and control characters, of at most 255 bytes",
        )
    return name


def _write_tensor(
    reader: LogicalReader, whole: Whole, entries: Mapping[str, Any], options: ReadOptions, path: Path
) -> None:
    write_tensor_file(
        str(path),
        lambda tensor: {**entries, "param": tensor},
        whole.shape,
        whole.dtype,
        lambda wanted, out: reader.read(whole, wanted, out, options),
        scratch(options.chunk_nbytes),
    )


def tp_entries(rule: Rule | None, whole: Whole) -> dict[str, Any]:
    """The entries from which DeepSpeed shards a tensor for another tensor-parallel degree."""
    if rule is None:
        return {"cat_dim": 0}
    if rule.kind in WHOLE_KINDS or rule.slices:
        return {}
    if rule.kind == VOCABULARY:
        return {"cat_dim": 0, "vocab_tensor": True}
    parts, dim = rule.sub_parameters, rule.cut_dim
    if not isinstance(parts, list) or len(parts) == 1:
        return {"cat_dim": dim}
    if parts == [1, 1] and dim == 0:
        return {"cat_dim": 0, "param_n_sub_params": 2}
    shape = whole.shape[1:] if whole.rows > 1 else whole.shape
    sizes = tuple(shape[dim] // sum(parts) * part for part in parts)
    noted = StandIn(_SUBPARAM_SHAPE)
    widths = (*shape[:dim], sizes, *shape[dim + 1 :])
    vars(noted).update(patterns=[re.escape(whole.name)], shape=widths, partition_dim=dim)
    return {"sub_param_shape": noted}


def notes_on(metadata: CheckpointMetadata, rules: Mapping[str, Rule | None]) -> Iterator[str]:
    """What DeepSpeed's own loader does not restore exactly from the conversion."""
    kept = {name: tensor for (name, key), tensor in metadata.tensors.items() if key in (BUFFER, FROZEN)}
    in_layers = [
        name
        for name, tensor in kept.items()
        if any(os.path.basename(metadata.files[chunk.file].path).startswith("layer_") for chunk in tensor.chunks)
    ]
    if in_layers:
        what = "buffers and frozen weights of pipeline layers"
        yield f"{what} have no place in this format, and are lost: {listed(in_layers)}"
    if len(in_layers) < len(kept):
        yield (
            "DeepSpeed's own loader restores neither buffers nor frozen weights from universal checkpoints; they are "
            "in the model-states files, and elastic_ckpt restores them"
        )
    known = {name: rule for name, rule in rules.items() if rule is not None}
    custom = [name for name, rule in known.items() if rule.slices]
    if custom:
        yield f"slices of {listed(custom)} have no words in this format: DeepSpeed would cut them in equal chunks"
    if metadata.source.zero_stage == 3:
        saved_names = (metadata.saved_names.get(name, name) for name in metadata.parameters)
        if metadata.source.tp > 1 and not all(map(metadata.declared.is_recorded, saved_names)):
            yield (
                "DeepSpeed's ZeRO-3 cuts tensors of universal checkpoints for AutoTP alone; with other tensor "
                "parallelism it loads this one wrongly, elastic_ckpt rightly"
            )
        lost = set(metadata.state_keys) - _ADAM
        if lost:
            yield f"DeepSpeed's ZeRO-3 loads only Adam's states from universal checkpoints, not {listed(lost)}"
        if len({repr(sorted(group.items(), key=str)) for group in metadata.groups}) > 1:
            yield "DeepSpeed's ZeRO-3 gives every param group the first one's hyperparameters"
    real = metadata.declared.vocabulary
    rows = {
        name: sum(shape[0] for shape in tensor.shard_shapes if math.prod(shape))
        for name, rule in known.items()
        if rule.kind == VOCABULARY and (tensor := metadata.tensors.get((name, MASTER))) is not None
    }
    padded = [name for name in rows if real and rows[name] > real]
    if padded:
        yield f"padding rows of the vocabulary are kept ({listed(padded)}): rows from {real} on"
