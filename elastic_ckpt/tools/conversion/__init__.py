"""Converts a native checkpoint to DeepSpeed's universal format, in parallel; the folder appears when it is whole.

The layout is that of ``ds_to_universal.py`` (DeepSpeed 0.19.8): ``zero/<parameter>/<key>.pt`` with the whole tensor and
its tensor-parallel layout, ``step.pt`` beside them, ``zero/optimizer_state.pt`` with the rest of the optimizer's state,
and the model-states files, written anew. Unlike there, parameters keep their shapes after stage 3 too, and nothing of
rank 0's partitions is copied.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.core.fqn import expert_name, with_stacks
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.shard_specs import VOCABULARY, ShardSpec
from elastic_ckpt.core.values import differing, left_in_file
from elastic_ckpt.errors import Remedy, UnsupportedError, listed
from elastic_ckpt.formats.detect import LATEST_UNIVERSAL
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER, plain_name
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.torch_archive.archive import Trees
from elastic_ckpt.formats.torch_archive.calls import Call, Global
from elastic_ckpt.formats.universal_contents import CONTENTS, content_of, note_contents
from elastic_ckpt.formats.universal_files import FILES, list_files
from elastic_ckpt.formats.universal_optimizer import common_optimizer_state
from elastic_ckpt.formats.universal_states import SHARED_STATES
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.planning.state_errors import refuse_damaged_states
from elastic_ckpt.report import progress_bar
from elastic_ckpt.sharding.specs import known_specs
from elastic_ckpt.storage import inherited, medium_of
from elastic_ckpt.tools.conversion.rewriting import rewrite, save
from elastic_ckpt.tools.conversion.states import (
    dotted_states,
    quantized_states,
    read_quantized,
    refusals,
    shared_states,
)
from elastic_ckpt.tools.logical import LogicalReader, LogicalTensor, refuse_without_masters, scalars_of
from elastic_ckpt.tools.module_files import refuse_lost_entries
from elastic_ckpt.tools.opened import OpenedCheckpoint
from elastic_ckpt.tools.output_folder import WriteReport, is_for_checkpoints, output_folder

#: DeepSpeed's note of parts of unequal widths. Its other notes are entries of ``deepspeed/checkpoint/constants.py``.
_SUBPARAM_SHAPE = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
#: States of which a message says what they look like.
_MOST_SHOWN = 8
#: The only states that DeepSpeed's stage 3 loads.
_ADAM = frozenset({MASTER, "exp_avg", "exp_avg_sq"})


def convert(opened: OpenedCheckpoint, target: Path, threads: int = 4, progress: bool | None = None) -> WriteReport:
    """Write a universal checkpoint, which ``latest_universal`` beside it names if that folder is for checkpoints.

    Memory beside metadata: one tensor for each thread. Raises :class:`ElasticCkptError` if the checkpoint cannot be
    converted exactly, or the target exists. Nothing is left of it.
    """
    target = target.absolute()
    started = time.monotonic()
    metadata = opened.metadata
    found = opened.found
    refuse_unconvertible(metadata)
    refuse_lost_entries(opened)
    models = _model_files(opened)
    metadata = with_stacks(metadata)
    options = read_options(opened.config, medium_of(found.folder, opened.config.reading.storage))
    reader = LogicalReader(metadata, opened.config, replace(options, threads=1))
    rules = known_specs(metadata, metadata.parameters, reader.rules)
    tensors = [tensor for tensor in reader.tensors.values() if tensor.name in metadata.parameters]
    tensors.sort(key=lambda tensor: -tensor.nbytes)  # so that no thread is left with a large one at the end
    quantized = quantized_states(reader, tensors)
    sizes = {(each.name, each.key): quantized.get((each.name, each.key), each).nbytes for each in tensors}
    nbytes = sum(sizes.values())
    with (
        output_folder(target, found.folder, metadata.files, LATEST_UNIVERSAL) as place,
        progress_bar("converting", nbytes, progress) as bar,
        ThreadPoolExecutor(threads, "elastic_ckpt", *inherited()) as pool,
    ):
        notes = (*metadata.notes, *reader.notes, *reader.compare_copies(), *notes_on(metadata, rules))
        zero = place / UNIVERSAL_FOLDER
        shared = shared_states(metadata, reader.options)
        folders = _folders_in(zero, metadata)
        written = _write_values(metadata, folders, shared.own)

        def write(tensor: LogicalTensor) -> int:
            entries = tp_entries(rules.get(tensor.name), tensor)
            if tensor.name in metadata.stacked:
                entries |= {"is_expert_param": True, "ep_num_experts": metadata.stacked[tensor.name]}
            path = folders[tensor.name] / f"{_checked(tensor.key, found.folder)}.pt"
            state = quantized.get((tensor.name, tensor.key))
            if state is None:
                values = reader.tensor(tensor)
            else:
                values, scales = read_quantized(state, reader)
                save(scales, path.with_name(f"{state.blocks.scales}.pt"))
            save({**entries, "param": values}, path)
            return sizes[tensor.name, tensor.key]

        notes += _write_model_files(opened, models, place)
        for tensor in tensors:
            state = quantized.get((tensor.name, tensor.key))
            written[tensor.name] += [tensor.key] if state is None else [tensor.key, state.blocks.scales]
        for done in pool.map(write, tensors):  # an error cancels the others
            bar.update(done)
        first = found.path(found.files.optimizer[min(found.files.optimizer)])
        common = common_optimizer_state(open_pickled(first, opened.config.trust_pickle))
        common |= {SHARED_STATES: dict(shared.for_all), FILES: list_files(written)}
        common |= {CONTENTS: _contents(folders, written)}
        save(common, zero / UNIVERSAL_OPTIMIZER)
    files = sum(len(names) for _, _, names in os.walk(target))  # asks the system: counts what was written
    seconds = time.monotonic() - started
    to_load = _call_that_loads(target, found.folder)
    return WriteReport(str(target), len(tensors), files, nbytes, seconds, notes, to_load)


def _folders_in(zero: Path, metadata: CheckpointMetadata) -> dict[str, Path]:
    """The folder of each parameter. DeepSpeed's loader looks for the name that it has with hidden parts of wrappers."""
    names = {name: metadata.hidden_names.get(name, name) for name in metadata.parameters}
    return {name: zero / _checked(hidden, metadata.source.folder) for name, hidden in names.items()}


def _write_values(
    metadata: CheckpointMetadata, folders: Mapping[str, Path], own: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Write what is no tensor of each parameter's elements: its step, and its ``own`` values; returns their keys."""
    written: dict[str, list[str]] = {}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        values = {key: value for key, value in scalars_of(metadata, name).items() if key == "step"}
        values |= own.get(name, {})
        written[name] = list(values)
        for key, value in values.items():
            save(value, folder / f"{_checked(key, metadata.source.folder)}.pt")
    return written


def _contents(folders: Mapping[str, Path], written: Mapping[str, Iterable[str]]) -> dict[str, dict[str, int]]:
    """What tells each of the written files from others, by the directories of their archives."""
    known = Trees()

    def read(name: str, key: str) -> int | None:
        return content_of(open_pickled(str(folders[name] / f"{key}.pt"), known=known).records)

    return note_contents((name, key, read(name, key)) for name, keys in written.items() for key in keys)


def _call_that_loads(target: Path, source: str) -> str:
    """The call with which DeepSpeed alone loads a universal checkpoint, and the config that it needs."""
    needs = 'with "checkpoint": {"load_universal": true}'
    if is_for_checkpoints(target.parent, source):
        return f"engine.load_checkpoint({str(target.parent)!r}) {needs}; {LATEST_UNIVERSAL} there names it"
    call = f"engine.load_checkpoint({str(target.parent)!r}, tag={target.name!r}) {needs}"
    return f"{call}; no {LATEST_UNIVERSAL} is written there, since {target.parent} has other files"


def _model_files(opened: OpenedCheckpoint) -> list[str]:
    """The model-states files; :class:`UnsupportedError` if they do not list what the optimizer updates."""
    found = opened.found
    read = {file.path for file in opened.metadata.files}
    names = (*found.files.model.values(), *found.files.model_zero3.values())
    models = [path for path in map(found.path, names) if path in read]
    if open_pickled(models[0], opened.config.trust_pickle).tree.get("param_shapes") is None:
        why = "its model-states files do not list the parameters of the optimizer"
        raise _unconvertible(why, "universal", models[0])
    return models


def _write_model_files(opened: OpenedCheckpoint, models: Sequence[str], place: Path) -> tuple[str, ...]:
    """Write the model-states files anew; returns notes on what is left out."""
    skips = opened.config.on_unreadable_entry == "skip"
    notes = list[str]()
    for path in models:
        written = place / plain_name(os.path.basename(path))
        unread = rewrite(path, written, trust_pickle=opened.config.trust_pickle, skip_unreadable=skips)
        notes += [f"left out, since it cannot be read: {key}" for key in unread]
    return tuple(dict.fromkeys(notes))


def refuse_unconvertible(metadata: CheckpointMetadata, to: str = "universal") -> None:
    """Raise :class:`UnsupportedError`, naming the reason, if a format cannot express a checkpoint that is whole.

    Raises :class:`DamagedError` if it is not.
    """
    refuse_damaged_states(metadata)
    refuse_without_masters(metadata)
    source = metadata.source
    tensors = metadata.tensors.items()
    is_universal = to == "universal"
    if metadata.states.opaque:
        raise _unknown_states(metadata, to)
    reasons: dict[str, Collection[str]] = {
        "it has experts, whose names are those of DeepSpeed's own layers": [*filter(expert_name, metadata.parameters)],
    }
    if not is_universal:
        unread = {str(key) for group in metadata.groups for key, value in group.items() if any(left_in_file(value))}
        reasons["it has hyperparameters that hold tensors, arrays or objects"] = unread
        reasons["it has states whose names have a dot, which is between keys in this layout"] = dotted_states(metadata)
        reasons["it has 8-bit states"] = {key for (_, key), tensor in tensors if tensor.is_quantized}
        reasons |= refusals(metadata)
    else:
        reasons |= {
            "it is a universal checkpoint already": [source.tag] * source.is_universal,
            "it has no files of DeepSpeed's to copy": [source.tag] * bool(source.foreign),
            "it was saved without ZeRO, and DeepSpeed loads universal checkpoints with ZeRO only": [source.tag]
            * (source.zero_stage == 0),
            '"rename" changes names, and model-states files are copied as they are': [
                name for name, saved in metadata.saved_names.items() if name != saved
            ],
            "it has parameters that are named as what modules keep in their extra state": list(
                filter(is_extra_state, metadata.parameters)
            ),
            "it has states with a shape of their own": {key for (_, key), tensor in tensors if tensor.has_own_shape},
            "it has hyperparameters of which each rank has its own": differing(metadata.groups),
            **refusals(metadata),
        }
    for what, names in reasons.items():
        if names:
            raise _unconvertible(f"{what} ({listed(names)})", to, source.folder)


def _unknown_states(metadata: CheckpointMetadata, to: str) -> UnsupportedError:
    """The error for states of unknown layout, with the lines of a config that settle what each is."""
    opaque = metadata.states.opaque
    error = _unconvertible(f"it has states of unknown layout ({listed(opaque)})", to, metadata.source.folder)
    in_file = "in the file of --config"
    error.found = "; ".join(f"{key}: {why}" for key, why in list(opaque.items())[:_MOST_SHOWN])
    ways = []
    for kind, when in (
        ("replicated", "if each is one tensor for all parameters"),
        ("elementwise", "if each has a value for each element"),
        ("fresh", "to leave them out"),
    ):
        ways.append(Remedy(in_file, when=when, config={"states": dict.fromkeys(sorted(opaque), kind)}))
    error.remedies = (*ways, *error.remedies)
    return error


def _unconvertible(why: str, to: str, file: str) -> UnsupportedError:
    called = {"universal": "DeepSpeed's universal format", "dcp": "torch.distributed.checkpoint's format"}[to]
    remedy = "load it as it is: elastic_ckpt needs no conversion"
    return UnsupportedError(f"this checkpoint cannot be converted to {called}: {why}", file, remedy=remedy)


def _checked(name: str, folder: str) -> str:
    """A name, if it is safe as that of a folder or file; :class:`UnsupportedError` otherwise."""
    is_path = name.startswith(".") or not {"/", "\\"}.isdisjoint(name)
    if not name or is_path or name == UNIVERSAL_OPTIMIZER or not name.isprintable() or len(name.encode()) > 255:
        problem = "a name in the checkpoint cannot be the name of a folder"
        expected = "a name without path separators and control characters, of at most 255 bytes, and not "
        expected += f"{UNIVERSAL_OPTIMIZER}, which a file of the format has"
        raise UnsupportedError(problem, folder, expected, parameter=repr(name)[:300])
    return name


def tp_entries(rule: ShardSpec | None, tensor: LogicalTensor) -> dict[str, Any]:
    """The entries from which DeepSpeed shards a tensor for another tensor-parallel degree."""
    if rule is None:
        return {"cat_dim": 0}
    if rule.is_replicated:
        return {}
    if rule.kind == VOCABULARY:
        return {"cat_dim": 0, "vocab_tensor": True}
    parts = rule.sub_parameters
    dim = rule.cut_dim
    if not isinstance(parts, list) or len(parts) == 1:
        return {"cat_dim": dim}
    if parts == [1, 1] and dim == 0:
        return {"cat_dim": 0, "param_n_sub_params": 2}
    shape = tensor.shape[1:] if tensor.planes > 1 else tensor.shape
    sizes = tuple(shape[dim] // sum(parts) * part for part in parts)
    widths = (*shape[:dim], sizes, *shape[dim + 1 :])
    noted = Call(Global(_SUBPARAM_SHAPE), (), "new")
    vars(noted).update(patterns=[re.escape(tensor.name)], shape=widths, partition_dim=dim)
    return {"sub_param_shape": noted}


def notes_on(metadata: CheckpointMetadata, rules: Mapping[str, ShardSpec | None]) -> Iterator[str]:
    """What DeepSpeed's own loader does not restore exactly from the conversion."""
    kept = {name: tensor for (name, key), tensor in metadata.tensors.items() if key in (BUFFER, FROZEN)}
    in_layers = [
        name
        for name, tensor in kept.items()
        if any(os.path.basename(metadata.files[chunk.file].path).startswith("layer_") for chunk in tensor.chunks)
    ]
    if in_layers:
        yield f"buffers and frozen weights of pipeline layers are lost: {listed(in_layers)}"
    if len(in_layers) < len(kept):
        yield "buffers and frozen weights are in the model-states files, from which only elastic_ckpt restores them"
    if any(tensor.is_quantized for tensor in metadata.tensors.values()):
        yield "only elastic_ckpt restores 8-bit states: DeepSpeed's universal format knows no scales"
    of_all = {state.key for saved in metadata.parameters.values() for state in saved.replicated}
    of_all |= {key for saved in metadata.parameters.values() for key, _ in saved.scalars} - {"step"}
    if of_all:
        yield f"DeepSpeed's own loader leaves out what is one for all parameters: {listed(of_all)}"
    if metadata.source.zero_stage == 3:
        saved_names = (metadata.saved_names.get(name, name) for name in metadata.parameters)
        if metadata.source.tp > 1 and not all(map(metadata.declared.is_recorded, saved_names)):
            yield "DeepSpeed's ZeRO-3 loads this wrongly: it cuts tensors of universal checkpoints only for AutoTP"
        lost = set(metadata.state_keys) - _ADAM
        if lost:
            yield f"DeepSpeed's ZeRO-3 loads only Adam's states from universal checkpoints, not {listed(lost)}"
        if len({repr(sorted(group.items(), key=str)) for group in metadata.groups}) > 1:
            yield "DeepSpeed's ZeRO-3 gives every param group the first one's hyperparameters"
