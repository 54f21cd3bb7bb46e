"""Exports a checkpoint's weights as safetensors of Hugging Face's layout: a shard at a time, atomic."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.extra_states import left_out_note
from elastic_ckpt.core.metadata import (
    BUFFER,
    FROZEN,
    ITEMSIZE,
    MASTER,
    WEIGHTS,
    CheckpointMetadata,
    converts_exactly,
    is_floating,
)
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import common
from elastic_ckpt.errors import (
    ConfigError,
    MismatchError,
    NotFoundError,
    Remedy,
    UnsupportedError,
    listed,
    printable_errors,
)
from elastic_ckpt.formats.safetensors import DTYPES, METADATA, SUFFIX
from elastic_ckpt.planning.state_errors import refuse_unreadable_states
from elastic_ckpt.report import progress_bar
from elastic_ckpt.tools.frozen_weights import frozen_left_out
from elastic_ckpt.tools.logical import LogicalReader, LogicalTensor, plain, scalars_of, weights_by_name
from elastic_ckpt.tools.module_files import refuse_lost_entries
from elastic_ckpt.tools.opened import Folders, config_of, open_folder, seen_together
from elastic_ckpt.tools.output_folder import WriteReport, output_folder

Dtype = Literal["fp32", "bf16", "fp16"]
_TORCH_NAMES: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: By name in the files, a tensor and the dtype to write it in.
_Tensors = dict[str, tuple[LogicalTensor, str]]
_EXCLUDE = "leave it out with --exclude"
#: How names of parameters that PEFT adds begin: ``BaseTuner.prefix`` of its methods, version 0.21.
_METHODS = (
    "adamss|beft|boft|c3a|deft|delora|fourierft|frod|glora|gralora|hada|hira|hra|ia3|lily|ln_tuning|lokr|lora|miss|oft|"
    "osf|peanut|poly|psoft|pvera|randlora|road|shadow|shira|supertuning|tinylora|trainable_tokens|unilora|vblora|vera|"
    "waveft"
)
#: What is before an adapter's name; the group is what stays of it in PEFT's files.
_PLACE = rf"(?:\.modules_to_save|((?:^|\.)(?:{_METHODS})_\w+))"


@printable_errors()
def export(
    folder: Folders,
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: Dtype | None = None,
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    adapter: str | None = None,
    optimizer: bool = False,
    config: ElasticConfig | None = None,
    progress: bool | None = None,
) -> WriteReport:
    """Write a checkpoint's parameters and buffers as safetensors of Hugging Face's layout. No engine, no GPU.

    Parameters are fp32 master weights. Frozen parameters and buffers are as the module had them. Tied parameters are
    written once, and the file's metadata has their other names. Memory: one shard, and one tensor as it is saved.

    Args:
        folder: folder with a ``latest`` file, or the folder of one tag. A list, if nodes saved to their own disks.
        tag: which checkpoint of the folder; ``None``: the latest.
        out: folder to create.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``, for all parameters with floating-point values, frozen ones too.
            ``None``: masters and frozen parameters as they were saved.
        max_shard_size: largest file: bytes, ``"5GB"`` or ``"500MB"``. A larger tensor has its own file.
        include: regular expressions. Names that none of them matches are left out.
        exclude: regular expressions. Names that one of them matches are left out.
        adapter: a PEFT adapter (``"default"``). Only this is written, in the one file that PEFT loads.
        optimizer: whether to write the optimizer states of the exported parameters too, as ``optimizer.safetensors``.
            State ``exp_avg`` of ``w`` is ``exp_avg.w``. Scalar states and hyperparameters are metadata.
        config: options of the load, such as rules of tensor parallelism.
        progress: whether to show a progress bar. ``None``: if standard error is a terminal.

    Raises:
        ConfigError: an argument is wrong, or a pattern matches nothing.
        ElasticCkptError: the checkpoint cannot be read or exported exactly, the disk is full, or ``out`` exists.
    """
    started = time.monotonic()
    options = config or config_of(None)
    if dtype is not None and dtype not in _TORCH_NAMES:
        raise ConfigError("an export cannot have this dtype", expected=listed(_TORCH_NAMES), found=repr(dtype))
    with seen_together(folder, options, tag) as path:
        try:
            opened = open_folder(path, tag, options, with_states=optimizer)
        except MismatchError as error:  # only live param groups could name the states
            if optimizer:
                error.remedies = (Remedy("export without --optimizer exports only the weights"), *error.remedies)
            raise
        metadata = opened.metadata
        source = opened.found.folder
        if not optimizer:
            of_weights = {at: tensor for at, tensor in metadata.tensors.items() if at[1] in WEIGHTS}
            copies = {at: replicas for at, replicas in metadata.replicas.items() if at[1] in WEIGHTS}
            metadata = replace(metadata, tensors=of_weights, replicas=copies)
        reader = LogicalReader(metadata, options)
        weights = selected(metadata, weights_by_name(reader), include, exclude)
        if adapter is None:
            refuse_lost_entries(opened, lambda name: _matches(name, include or [""]) and not _matches(name, exclude))
        # dcp and safetensors do not tell buffers from frozen parameters, or from any if there are no masters
        kept = {BUFFER, FROZEN} if opened.found.foreign and metadata.parameters else {BUFFER}
        of_set = weights if adapter is None else of_adapter(weights, adapter, source)
        tensors = {name: (tensor, _dtype_of(tensor, dtype, kept)) for name, tensor in of_set.items()}
        sets = {"model" if adapter is None else "adapter_model": tensors}
        notes = (*metadata.notes, *metadata.warnings, *reader.notes, *_notes(metadata, tensors, kept))
        notes += left_out_note(metadata.extra_states)
        facts: dict[str, str] = {}
        if optimizer:
            names = {tensor.name for tensor in of_set.values()}
            refuse_unreadable_states(metadata)
            if not metadata.keys_by_name:
                problem = "the checkpoint holds no optimizer states to export"
                remedy = "leave out --optimizer; it was saved before the first step, or without them"
                raise NotFoundError(problem, source, remedy=remedy)
            states = (each for each in reader.tensors.values() if each.key not in WEIGHTS and each.name in names)
            sets["optimizer"] = {f"{state.key}.{state.name}": (state, state.dtype) for state in states}
            facts = optimizer_facts(metadata, names)
        limit = max_shard_size if adapter is None else sys.maxsize
        nbytes = sum(_nbytes(tensor) for tensors in sets.values() for tensor in tensors.values())
        files = 0
        target = Path(out).absolute()
        with output_folder(target, source, metadata.files) as place, progress_bar("export", nbytes, progress) as bar:
            notes += reader.compare_copies()
            for stem, tensors in sets.items():
                files += _write(place, reader, bar.update, stem, tensors, limit, facts if stem == "optimizer" else {})
        count = sum(map(len, sets.values()))
        return WriteReport(str(target), count, files, nbytes, time.monotonic() - started, notes)


def _dtype_of(tensor: LogicalTensor, dtype: str | None, kept: Collection[str]) -> str:
    is_converted = tensor.key not in kept and is_floating(tensor.dtype)
    return _TORCH_NAMES[dtype] if dtype is not None and is_converted else tensor.dtype


def _nbytes(tensor: tuple[LogicalTensor, str]) -> int:
    logical, dtype = tensor
    return logical.numel * ITEMSIZE[dtype]


def _write(
    place: Path,
    reader: LogicalReader,
    advance: Callable[[int], object],
    stem: str,
    tensors: _Tensors,
    limit: int | str,
    facts: Mapping[str, str],
) -> int:
    """Write tensors as ``<stem>.safetensors``, or several shards and an index; returns the number of files.

    ``facts`` are metadata of the first; ``advance`` is called with the bytes that were written.
    """
    for name, (tensor, dtype) in tensors.items():
        if dtype not in DTYPES or name == METADATA:
            problem = "safetensors files cannot hold this tensor"
            found = f"{dtype} of shape {tensor.shape}"
            wanted = "a dtype of " + listed(DTYPES) + f", and a name other than {METADATA}"
            raise UnsupportedError(problem, None, wanted, found, parameter=name, remedy=_EXCLUDE)
    try:
        plan = split_state_dict_into_shards_factory(
            tensors, get_storage_size=_nbytes, filename_pattern=f"{stem}{{suffix}}{SUFFIX}", max_shard_size=limit
        )
    except ValueError as error:
        expected = "5GB, 500MB, or a number of bytes"
        raise ConfigError("this is not a shard size", expected=expected, found=repr(limit)) from error
    for file, names in plan.filename_to_tensors.items():
        tied = {alias: name for name in names for alias in reader.metadata.aliases_of.get(name, ())}
        shard = {name: tensors[name] for name in names}
        _save(place / file, reader, shard, {**tied, **facts, "format": "pt"})
        advance(sum(map(_nbytes, shard.values())))
        facts = {}
    if plan.is_sharded:
        index = json.dumps({"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}, indent=2)
        (place / f"{stem}{SUFFIX}.index.json").write_text(f"{index}\n", encoding="utf-8")
    return len(plan.filename_to_tensors)


def _save(path: Path, reader: LogicalReader, tensors: _Tensors, metadata: dict[str, str]) -> None:
    try:
        values = {name: converted(reader.tensor(tensor), dtype, name) for name, (tensor, dtype) in tensors.items()}
        save_file(values, path, metadata)
        # asks the system: permissions of what is written
        path.chmod(path.parent.stat().st_mode & 0o666)  # the library makes files for their owner alone
    except UnicodeEncodeError as error:
        name = f"{error.object!r:.300}"
        raise UnsupportedError("this name is not UTF-8 text", parameter=name, remedy=_EXCLUDE) from error
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def converted(values: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """Values in another dtype, rounded to nearest. Raises :class:`MismatchError` if a finite one becomes infinite."""
    result = values.to(getattr(torch, dtype))
    saved = str(values.dtype).removeprefix("torch.")
    if converts_exactly(saved, dtype) or not bool(result.isinf().any()):
        return result
    lost = values[result.isinf() & values.isfinite()]
    if lost.numel():
        problem = f"values of this parameter are too large for {dtype}"
        expected = torch.finfo(result.dtype).max
        both = f"magnitudes up to {expected:g}", f"{lost.double().abs().max().item():g}, saved in {saved}"
        raise MismatchError(problem, None, *both, parameter=name, remedy="export it as fp32")
    return result


def _notes(metadata: CheckpointMetadata, tensors: _Tensors, kept: Collection[str]) -> Iterator[str]:
    source = metadata.source
    if not metadata.parameters and source.foreign:  # of native checkpoints, their reader says so
        dtypes = listed({tensor.dtype for tensor, _ in tensors.values() if tensor.key != BUFFER})
        yield f"no master weights could be named: parameters are the module's own weights, saved in {dtypes}"
    elif (left_out := frozen_left_out(metadata)) is not None:
        yield str(left_out)
    if not source.buffers_recorded:
        yield "the checkpoint holds no buffers"
    if source.foreign and any(tensor.dtype != dtype for tensor, dtype in tensors.values()):
        how = "keep their dtype" if FROZEN in kept else "are rounded too"
        names = listed(name for name, (tensor, _) in tensors.items() if tensor.key in (BUFFER, FROZEN))
        yield f"the checkpoint does not tell buffers from frozen parameters, which {how}: {names}"
    pairs = {(tensor.dtype, dtype) for tensor, dtype in tensors.values()}
    yield from (f"{saved} is rounded to {new}" for saved, new in sorted(pairs) if not converts_exactly(saved, new))
    exported = {tensor.name for tensor, _ in tensors.values()}
    tied = [f"{alias} = {name}" for alias, name in metadata.aliases.items() if name in exported]
    if tied:
        yield f"tied parameters are written once: {listed(tied)}"
    coded = {key for (_, key), tensor in metadata.tensors.items() if tensor.is_quantized}
    if coded:
        yield f"8-bit optimizer states are written dequantized, as fp32: {listed(coded)}"


def of_adapter(weights: Mapping[str, LogicalTensor], adapter: str, folder: str) -> dict[str, LogicalTensor]:
    """The tensors of a PEFT adapter, as PEFT names them in its files: without the adapter's name; and trained biases.

    Raises :class:`ConfigError` if there are none, or if other parameters without an adapter's name were trained.
    """
    own = re.compile(rf"{_PLACE}\.{re.escape(adapter)}(?=\.|$)")
    any_adapter = re.compile(_PLACE)
    of_peft = {own.sub(r"\1", name): tensor for name, tensor in weights.items() if own.search(name)}
    if not of_peft:
        problem = "the checkpoint has no tensors of this PEFT adapter"
        expected = f"....lora_A.{adapter}.weight"
        remedy = 'name the adapter as PEFT does: "default", unless you gave get_peft_model another name'
        raise ConfigError(problem, folder, f"names such as {expected}", remedy=remedy)
    trained = {name for name, tensor in weights.items() if tensor.key == MASTER and not any_adapter.search(name)}
    biases = {name for name in trained if name.endswith(".bias")}  # as PEFT saves them with bias="all" or "lora_only"
    if others := trained - biases:
        problem = "parameters without the name of a PEFT adapter were trained too, and would be missing from its file"
        expected = "the adapter's parameters, and biases"
        remedy = "export without --adapter, or --exclude them"
        raise ConfigError(problem, folder, expected, parameter=others, remedy=remedy)
    return of_peft | {name: weights[name] for name in weights if name in biases}


def optimizer_facts(metadata: CheckpointMetadata, names: Collection[str]) -> dict[str, str]:
    """Metadata of the optimizer states' first file, each JSON.

    ``scalars``: FQN -> scalar states (``{"w": {"step": 3}}``); ``param_groups``: hyperparameters of each param group,
    and under ``params`` the FQNs of its parameters, of those that are exported.
    """
    owned = [name for name in metadata.parameters if name in names]
    scalars = {name: found for name in owned if (found := scalars_of(metadata, name))}
    members: dict[int, list[str]] = {}
    for name in owned:
        members.setdefault(metadata.parameters[name].group, []).append(name)
    groups = [
        {**_as_json(plain(common(group))), "params": members.get(number, [])}
        for number, group in enumerate(metadata.groups)
    ]
    return {"scalars": json.dumps(_as_json(scalars)), "param_groups": json.dumps(groups)}


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_as_json, value))
    if isinstance(value, torch.Tensor):
        return _as_json(value.tolist())  # whose numbers may be complex
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def selected(
    metadata: CheckpointMetadata, weights: Mapping[str, LogicalTensor], include: Sequence[str], exclude: Sequence[str]
) -> dict[str, LogicalTensor]:
    """Weights of which a name, or a tied one, matches a pattern of ``include``, if any, and none matches ``exclude``.

    Patterns are regular expressions, searched for anywhere in the name. Raises :class:`ConfigError` for one that is
    invalid or matches nothing, or if nothing is selected.
    """
    names = {name: [name, *metadata.aliases_of.get(name, ())] for name in weights}

    def matching(pattern: str) -> set[str]:
        try:
            found = {name for name, known in names.items() if any(map(re.compile(pattern).search, known))}
        except re.error as error:
            raise ConfigError("a pattern is not a regular expression", expected=pattern, found=str(error)) from error
        if not found:
            problem = "a pattern matches no tensor of the checkpoint"
            folder = metadata.source.folder
            remedy = Remedy("lists the names", command=("elastic-ckpt", "inspect", folder, "--params"))
            raise ConfigError(problem, folder, pattern, listed(names), remedy=remedy)
        return found

    keep = set().union(*map(matching, include)) if include else set(names)
    keep -= set().union(*map(matching, exclude))
    if not keep:
        found = f"{counted(len(names), 'tensor')}, none of which is selected"
        raise ConfigError("there is nothing to export", file=metadata.source.folder, found=found)
    return {name: tensor for name, tensor in weights.items() if name in keep}
