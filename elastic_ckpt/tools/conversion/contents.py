"""What a universal checkpoint of some metadata consists of. Pure, but for the small trees of the first files.

The layout is that of ``ds_to_universal.py`` (DeepSpeed 0.19.8): ``zero/<parameter>/<key>.pt`` with the whole tensor and
a word on how tensor-parallel ranks cut it, ``step.pt`` beside them, ``zero/optimizer_state.pt`` with what belongs to no
parameter, and the model-states files as they were. Other than there, each parameter has its shape after stage 3 too,
and nothing of rank 0's partitions is carried along.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.checkpoint.constants import CAT_DIM, PARAM_N_SUB_PARAMS, PARAM_SHAPES, SUB_PARAM_SHAPE, VOCAB_TENSOR
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.tp_rules import VOCABULARY, WHOLE_KINDS, Rule
from elastic_ckpt.errors import DamagedError, UnsupportedError, listed
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.tools.logical import LogicalReader, Whole

_STEP = "step"
_UNSAFE = re.compile(r"[/\\\x00]|^\.{0,2}$|^\.")
_LONGEST_NAME = 255
#: How the files of pipeline layers are called.
_LAYER = "layer_"
#: What stage 3 of DeepSpeed loads, whatever else there is.
_ADAM = frozenset({MASTER, "exp_avg", "exp_avg_sq"})


@dataclass(frozen=True)
class TensorFile:
    """A file with one tensor: its path below the checkpoint, the tensor, and what is noted beside it."""

    path: str
    whole: Whole
    beside: Mapping[str, Any]


@dataclass(frozen=True)
class ScalarFile:
    """A file with one number, or a tensor without dimensions."""

    path: str
    value: Any


def refuse_unconvertible(metadata: CheckpointMetadata) -> None:
    """Refuse by name what the universal format has no place for.

    Raises:
        UnsupportedError: naming the states, and what to do instead.
    """
    source = metadata.source
    coded = {key for (_, key), tensor in metadata.tensors.items() if any(chunk.code for chunk in tensor.chunks)}
    scalars = {key for saved in metadata.parameters.values() for key, _ in saved.scalars}
    replicated = {state.key for saved in metadata.parameters.values() for state in saved.replicated}
    of_their_own = {key for (_, key), tensor in metadata.tensors.items() if tensor.is_whole}
    reasons = (
        (source.format == "universal", "it is a universal checkpoint already"),
        (source.zero_stage == 0, "it was saved without ZeRO, and DeepSpeed loads universal checkpoints with ZeRO only"),
        (bool(coded), f"8-bit states ({listed(coded)}), which DeepSpeed would take for values"),
        (bool(replicated), f"states of whole partitions ({listed(replicated)})"),
        (bool(of_their_own), f"states with a shape of their own ({listed(of_their_own)})"),
        (bool(scalars - {_STEP}), f"scalar states beside the step ({listed(scalars - {_STEP})})"),
        (bool(metadata.opaque_states), f"states of unknown layout ({listed(metadata.opaque_states)})"),
        (bool(metadata.damaged_states), f"damaged states ({listed(metadata.damaged_states)})"),
    )
    for applies, why in reasons:
        if applies:
            raise UnsupportedError(
                f"this checkpoint cannot be converted to DeepSpeed's universal format: {why}",
                file=source.folder,
                expected="a native ZeRO checkpoint whose optimizer keeps one value an element, and a step",
                found=why,
                remedy="load it as it is: elastic_ckpt needs no conversion",
            )


def refuse_without_shapes(model: PickledFile) -> None:
    """Refuse model-states files that do not list the parameters, as ``BF16_Optimizer``'s without ZeRO.

    Raises:
        UnsupportedError: neither DeepSpeed's loader nor any other would find the parameters in the conversion.
    """
    if model.tree.get(PARAM_SHAPES) is None:
        raise UnsupportedError(
            "this checkpoint cannot be converted to DeepSpeed's universal format: its model-states files do not list "
            "the parameters of the optimizer",
            file=model.path,
            expected=f"{PARAM_SHAPES}, as runs with ZeRO save them",
            found="none",
            remedy="load it as it is: elastic_ckpt needs no conversion",
        )


def parameter_files(reader: LogicalReader, rules: Mapping[str, Rule | None]) -> Iterator[TensorFile | ScalarFile]:
    """The files below ``zero/``, in metadata order.

    Raises:
        DamagedError: a parameter has no master weights.
        UnsupportedError: a parameter's name cannot be the name of a folder.
    """
    metadata = reader.metadata
    for name in metadata.parameters:
        if (name, MASTER) not in metadata.tensors:
            raise _without_master(name, metadata.source.folder)
    for whole in reader.tensors():
        if whole.name in metadata.parameters:
            folder = f"zero/{checked_name(whole.name, metadata.source.folder)}"
            beside = _beside(rules.get(whole.name), whole)
            yield TensorFile(f"{folder}/{checked_name(whole.key, metadata.source.folder)}.pt", whole, beside)
    for name, saved in metadata.parameters.items():
        for key, value in saved.scalars:
            folder = f"zero/{checked_name(name, metadata.source.folder)}"
            yield ScalarFile(f"{folder}/{key}.pt", _scalar(value, metadata.scalar_forms.get(key, "float")))


def _without_master(name: str, folder: str) -> DamagedError:
    return DamagedError(
        "the checkpoint knows this parameter but holds no master weights of it",
        parameter=name,
        file=folder,
        remedy="the save is incomplete: take another tag",
    )


def checked_name(name: str, folder: str) -> str:
    """A name from the checkpoint, fit to be that of a folder or file.

    Raises:
        UnsupportedError: it would lead elsewhere, or is too long.
    """
    if _UNSAFE.search(name) or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        raise UnsupportedError(
            "a name in the checkpoint cannot be the name of a folder",
            parameter=repr(name)[:300],
            file=folder,
            expected="a name without path separators and control characters, of at most 255 bytes",
        )
    return name


def _scalar(value: float, form: str) -> Any:
    if form in ("int", "float"):
        return int(value) if form == "int" else float(value)
    return torch.tensor(value, dtype=getattr(torch, form))


def _beside(rule: Rule | None, whole: Whole) -> dict[str, Any]:
    """What DeepSpeed reads beside a tensor to cut it for another tensor-parallel degree."""
    if rule is None:
        return {CAT_DIM: 0}
    if rule.kind in WHOLE_KINDS or rule.slices:
        return {}
    dim = rule.cut_dim
    if rule.kind == VOCABULARY:
        return {CAT_DIM: 0, VOCAB_TENSOR: True}
    if isinstance(rule.sub_parameters, list) and len(rule.sub_parameters) > 1:
        if rule.sub_parameters == [1, 1] and dim == 0:
            return {CAT_DIM: 0, PARAM_N_SUB_PARAMS: 2}
        return {SUB_PARAM_SHAPE: _sub_parameters(rule.sub_parameters, whole.name, whole.shape[-_rank(whole) :], dim)}
    return {CAT_DIM: dim}


def _rank(whole: Whole) -> int:
    return len(whole.shape) - (whole.rows > 1)


def _sub_parameters(parts: list[int], name: str, shape: Shape, dim: int) -> SubparamShape:
    sizes = tuple(shape[dim] // sum(parts) * part for part in parts)
    return SubparamShape([re.escape(name)], (*shape[:dim], sizes, *shape[dim + 1 :]), dim)


def notes_on(metadata: CheckpointMetadata, rules: Mapping[str, Rule | None]) -> tuple[str, ...]:
    """What DeepSpeed's own loader will not restore from the conversion, or not as it was."""
    notes = [*_notes_on_modules(metadata), *_notes_on_cuts(metadata, rules)]
    keys = set(metadata.state_keys)
    if metadata.source.zero_stage == 3:
        lost = keys - _ADAM
        if lost:
            notes.append(f"DeepSpeed's ZeRO-3 loads only Adam's states from universal checkpoints, not {listed(lost)}")
        if len({repr(sorted(group.items(), key=str)) for group in metadata.groups}) > 1:
            notes.append("DeepSpeed's ZeRO-3 gives every param group the first one's hyperparameters")
    real = metadata.declared.vocabulary
    padded = [
        name
        for name, rule in rules.items()
        if rule is not None and rule.kind == VOCABULARY and real and _rows(metadata, name) > real
    ]
    if padded:
        notes.append(f"padding rows of the vocabulary are kept ({listed(padded)}): rows from {real} on")
    return tuple(notes)


def _notes_on_modules(metadata: CheckpointMetadata) -> Iterator[str]:
    """DeepSpeed does not read what lies in the model-states files; layer files are no part of the format."""
    held = {place: tensor for place, tensor in metadata.tensors.items() if place[1] in (BUFFER, FROZEN)}
    in_layers = [
        name
        for (name, _), tensor in held.items()
        if any(os.path.basename(metadata.files[chunk.file].path).startswith(_LAYER) for chunk in tensor.chunks)
    ]
    if in_layers:
        lost = "buffers and frozen weights of pipeline layers have no place in this format, and are lost"
        yield f"{lost}: {listed(in_layers)}"
    if len(in_layers) < len(held):
        yield (
            "DeepSpeed's own loader restores neither buffers nor frozen weights from universal checkpoints; they are "
            "in the model-states files, and elastic_ckpt restores them"
        )


def _notes_on_cuts(metadata: CheckpointMetadata, rules: Mapping[str, Rule | None]) -> Iterator[str]:
    """What DeepSpeed's own loader cannot cut as it was."""
    custom = [name for name, rule in rules.items() if rule is not None and rule.slices]
    if custom:
        yield f"slices of {listed(custom)} have no words in this format: DeepSpeed would cut them in equal chunks"
    elsewhere = [name for name in metadata.parameters if not metadata.declared.is_recorded(_saved_name(metadata, name))]
    if metadata.source.zero_stage == 3 and metadata.source.tp > 1 and elsewhere:
        yield (
            "DeepSpeed's ZeRO-3 cuts tensors of universal checkpoints for AutoTP alone; with other tensor parallelism "
            "it loads this one wrongly, elastic_ckpt rightly"
        )


def _saved_name(metadata: CheckpointMetadata, name: str) -> str:
    return metadata.saved_names.get(name, name)


def _rows(metadata: CheckpointMetadata, name: str) -> int:
    tensor = metadata.tensors.get((name, MASTER))
    return 0 if tensor is None else sum(shape[0] for shape in tensor.shard_shapes if math.prod(shape))
