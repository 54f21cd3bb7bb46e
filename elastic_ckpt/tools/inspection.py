"""What a checkpoint's metadata says, as plain data, and what is wrong with it."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import ChunkSource, PartitionedChunks
from elastic_ckpt.core.extra_states import kept_in
from elastic_ckpt.core.fqn import expert_name
from elastic_ckpt.core.metadata import BUFFER, FROZEN, ITEMSIZE, MASTER, WEIGHTS, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.text import one_line
from elastic_ckpt.core.values import PerRank, TensorValue, TrainingState, numbers
from elastic_ckpt.errors import (
    DamagedError,
    ElasticCkptError,
    LayoutError,
    MismatchError,
    MissingFilesError,
    UnsafePickleError,
    UnsupportedError,
    listed,
    remedy_text,
)
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.planning.param_groups import saved_optimizer
from elastic_ckpt.planning.read_items import check_tiling, shared_bytes_error
from elastic_ckpt.planning.state_errors import state_errors
from elastic_ckpt.report import saved_topology, source_dict
from elastic_ckpt.sharding.rules import ShardingRules, tensor_of
from elastic_ckpt.sharding.specs import virtual_layouts
from elastic_ckpt.storage import VIEW, copies_of
from elastic_ckpt.tools.frozen_weights import frozen_left_out
from elastic_ckpt.tools.incomplete import TRAINED, missing_paths, remains_of
from elastic_ckpt.tools.opened import locate, open_checkpoint
from elastic_ckpt.tools.remedies import of_command

Level = Literal["error", "unchecked", "note"]
ERROR: Level = "error"
UNCHECKED: Level = "unchecked"
NOTE: Level = "note"
#: Roles of a parameter; buffers and frozen weights have their key. ``WEIGHT``: it is unknown whether it was trained.
WEIGHT = "weight"
SCALAR = "scalar"
#: Keys that a finding names: each of many parameters may lack thousands.
_MOST_KEYS = 8


@dataclass(frozen=True)
class Finding:
    """A problem of a checkpoint, or a fact worth knowing, with details as far as they are known."""

    level: Level  # ``"error"`` if a load would be refused or lose something, ``"unchecked"`` if that cannot be told
    kind: str  # one word for programs, stable; "extra-state", "frozen", "no-checksum" and "reader" are notes alone
    text: str
    parameter: str | None = None  # or buffer, or state
    file: str | None = None  # its path
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None
    suspected: bool = False  # whether something else than damage may explain it, and a load may restore it all the same

    @property
    def message(self) -> str:
        """Text and details on one line, without control characters."""
        details = {"expected": self.expected, "found": self.found, "remedy": self.remedy}
        known = (f"{name}: {value}" for name, value in details.items() if value is not None)
        return one_line("; ".join([self.text, *known]))

    def line(self, folder: str) -> str:
        """The whole finding on one line, the file relative to ``folder``, without control characters."""
        parts = [self.kind]
        if self.file is not None:
            inside = os.path.relpath(self.file, folder)
            parts.append(self.file if inside.startswith("..") else inside)
        if self.parameter is not None:
            parts.append(self.parameter)
        return one_line(": ".join([*parts, self.message]))

    def placed(self) -> Finding:
        """With the path of the file that was read, where those of several folders are seen together."""
        return self if self.file is None else replace(self, file=copies_of(self.file)[0])


def of_folders(folder: str) -> list[Finding]:
    """Notes on the folders of which files are seen together; none if there is but one."""
    view = VIEW.get()
    texts = () if view is None else (f"files: {view.summary(folder)}", *view.notes)
    return [Finding(NOTE, "folders", text) for text in texts]


def of_missing(path: str) -> Finding:
    """The finding for a file that should be there."""
    where = "no such file" if VIEW.get() is None else "no such file in any of these folders"
    return Finding(ERROR, "missing", f"{where}; restore it, or use another tag", file=path)


def of_error(error: ElasticCkptError, kind: str | None = None, level: Level = ERROR) -> Finding:
    """The finding for an error; ``kind``: :func:`kind_of` it, if not given."""
    known = {name: getattr(error, name) for name in ("file", "expected", "found", "remedy")}
    if error.remedies:
        known["remedy"] = remedy_text(of_command(error.remedies), error.remarks)
    parameter = None if error.parameter == listed(()) else error.parameter
    suspected = isinstance(error, (DamagedError, MismatchError)) and not error.proves_damage
    return Finding(level, kind or kind_of(error), error.problem, parameter, **known, suspected=suspected)


def of_unreadable(error: ElasticCkptError, kind: str | None = None) -> Finding:
    """The finding for a file that the reader refuses; what it does not support may be whole, but was not checked."""
    kind = kind or ("unreadable" if kind_of(error) == "damaged" else kind_of(error))
    return of_error(error, kind, UNCHECKED if isinstance(error, UnsupportedError) else ERROR)


def kind_of(error: ElasticCkptError) -> str:
    """The kind of ``verify``'s finding for an error of the reader."""
    if isinstance(error, UnsafePickleError):
        return "unsafe-pickle"
    if isinstance(error, UnsupportedError):
        return "not-checked"
    return "mismatch" if isinstance(error, MismatchError) else "damaged"


def check_metadata(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Findings on coverage and states, from metadata alone."""
    yield from _of_tensors(metadata)
    if (shared := shared_bytes_error(metadata)) is not None:
        yield of_error(shared, "shared")
    for name in metadata.parameters:
        if (name, MASTER) not in metadata.tensors and not metadata.states.missing:
            yield Finding(ERROR, "incomplete", "no fp32 master of this parameter", name, metadata.source.folder)
    yield from _state_findings(metadata)
    for name, saved in metadata.parameters.items():
        for key, value in saved.scalars:
            if not all(map(math.isfinite, numbers(value))):
                yield Finding(ERROR, "damaged", f"{key} is not a finite number: {value}", name)
    for error in state_errors(metadata):
        kind = "missing" if metadata.states.missing else None
        yield of_error(error, kind, ERROR if isinstance(error, DamagedError) else UNCHECKED)
    for note in dict.fromkeys((*metadata.notes, *metadata.warnings)):
        yield Finding(NOTE, "reader", note)
    if (left_out := frozen_left_out(metadata)) is not None:
        yield Finding(NOTE, "frozen", str(left_out))
    yield from _extra_state_findings(metadata)


def _extra_state_findings(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """What modules kept beside parameters and buffers, of which ranks may have saved several values."""
    names = kept_in(metadata.extra_states)
    if names:
        text = "modules' own state (get_extra_state), which a load gives back to them by set_extra_state"
        yield Finding(NOTE, "extra-state", text, listed(names), metadata.source.folder)
    for name in names:
        saved = metadata.extra_states[name]
        if saved.other is not None:
            text = 'ranks saved different values: a load on other ranks needs "replicated_params": "first"'
            same = f"the value in {os.path.basename(saved.path)}"
            other = f"another in {os.path.basename(saved.other)}"
            yield Finding(NOTE, "extra-state", text, name, metadata.source.folder, same, other)


def _state_findings(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Members of a param group have the same states; without ZeRO, as in DCP, those without gradients have none."""
    may_lack_all = metadata.source.format == "dcp" or (metadata.source.zero_stage == 0 and metadata.source.by_rank)
    named = set(chain.from_iterable(metadata.states.missing.values()))
    groups: dict[int, dict[str, set[str]]] = {}
    for name, saved in metadata.parameters.items():
        if (name, MASTER) in metadata.tensors:  # the others are reported above
            groups.setdefault(saved.group, {})[name] = {
                *metadata.keys_by_name.get(name, ()),
                *(key for key, value in saved.scalars if value is not None),  # as some optimizers leave one unused
            }
    for _, states in sorted(groups.items()):
        every = sorted(set().union(*states.values()))
        for name, present in states.items():
            lost = len(every) - len(present)
            if lost and (present or not may_lack_all) and name not in named:
                first = islice((key for key in every if key not in present), _MOST_KEYS)
                more = f" and {lost - _MOST_KEYS} more" if lost > _MOST_KEYS else ""
                text = f"no {', '.join(first)}{more} of this parameter, but of others in its param group"
                yield Finding(ERROR, "state-missing", text, name, metadata.source.folder)


def _of_tensors(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Tensors with elements in no file or in two, or beyond the end of a file."""
    known: dict[tuple[int, int], bool] = {}
    for tensor in chain(metadata.tensors.values(), *metadata.replicas.values()):
        try:
            check_tiling(metadata, tensor)
        except DamagedError as error:
            yield of_error(error, "incomplete")
        sources = (source for source in tensor.sources if not _ends_inside(source, metadata, known))
        for chunk in chain.from_iterable(sources):
            file = metadata.files[chunk.file]
            end = chunk.byte_offset + chunk.range.numel * ITEMSIZE[tensor.dtype]
            if end > file.nbytes:
                text = f"{tensor.key} of this parameter reaches beyond the end of its file"
                sizes = f"{end} bytes or more", f"{file.nbytes} bytes"
                yield Finding(ERROR, "unreadable", text, tensor.name, file.path, *sizes)


def _ends_inside(source: ChunkSource, metadata: CheckpointMetadata, known: dict[tuple[int, int], bool]) -> bool:
    """Whether all flat tensors with a parameter end inside their files, which is computed once for each."""
    if not isinstance(source, PartitionedChunks):
        return False
    flat = source.flat
    key = (id(source.flat), source.files_before)
    if key not in known:
        # offsets: one number for all, or each its own
        nbytes = flat.planes * flat.numel * flat.itemsize
        begins = flat.byte_offsets
        ends = [begin + nbytes for begin in begins * (len(flat.files) // len(begins))]
        sizes = (metadata.files[source.files_before + file].nbytes for file in flat.files)
        known[key] = all(end <= size for end, size in zip(ends, sizes, strict=True))
    return known[key]


def inspect_folder(folder: str, tag: str | None, config: ElasticConfig) -> dict[str, Any]:
    """Inspect the latest checkpoint of a folder, its ``tag``, or the one whose folder it is.

    Optimizer states that only a live model could name, or of which no file is there, are left out, with a finding.
    Where missing files leave no metadata, it is what the other files show, with a finding for each missing one.
    Raises :class:`ElasticCkptError` if there is no such checkpoint, or its metadata cannot be read.
    """
    rules = ShardingRules.of(config)
    found = locate(folder, tag, config.trust_pickle)
    try:
        return _inspected_whole(found, config, rules)
    except MissingFilesError as error:
        return _inspected_rest(found, config, rules, error)


def _inspected_rest(
    found: CheckpointInfo, config: ElasticConfig, rules: ShardingRules, error: MissingFilesError
) -> dict[str, Any]:
    """What a checkpoint shows of itself without the files that it lacks: no tensors, but shapes."""
    rest = remains_of(found, config.trust_pickle)
    missing = [of_error(error, "missing"), *(of_missing(path) for path in rest.missing if path != error.file)]
    shown = inspected(rest.metadata, rest.state, rules, missing)
    topology = shown["topology"] if rest.is_topology_known else "topology not known"
    return shown | {"topology": topology, "contents": rest.contents, "parameters": rest.parameters}


def _inspected_whole(found: CheckpointInfo, config: ElasticConfig, rules: ShardingRules) -> dict[str, Any]:
    """What a checkpoint holds, maybe without its optimizer states."""
    refused: list[Finding] = []
    try:
        checkpoint = open_checkpoint(found, config).checkpoint
    except (MismatchError, UnsupportedError, LayoutError) as error:
        if isinstance(error, LayoutError) and found.files.model_zero3:
            raise
        try:
            checkpoint = open_checkpoint(found, config, with_states=False).checkpoint
        except LayoutError as without:
            raise (without if found.files.of_weights_alone else error) from None
        refused = [of_error(error, "states", NOTE if isinstance(error, MismatchError) else ERROR)]
        if isinstance(error, MissingFilesError):
            others = missing_paths(found, config.trust_pickle)
            refused += [of_missing(path) for path in others if path != error.file]
    return inspected(checkpoint.metadata, checkpoint.training_state, rules, refused)


def inspected(
    metadata: CheckpointMetadata, state: TrainingState, rules: ShardingRules, refused: list[Finding]
) -> dict[str, Any]:
    """The inspection of a checkpoint; ``refused``: why its optimizer states are not in the metadata."""
    scale = state.loss_scale
    unknown = dict[str, ElasticCkptError]()
    keys: dict[str, list[str]] = {name: [] for name in metadata.parameters}
    for name, key in metadata.tensors:
        keys.setdefault(name, []).append(key)
    with_data = [name for name in keys if tensor_of(metadata, name) is not None]
    layouts = virtual_layouts(metadata, with_data, 1, rules, unknown)
    shapes = {name: layout.shapes[0] for name, layout in layouts.items()}
    parameters = [
        _entry(metadata, name, mine, bool(refused))
        | {"shape": shapes.get(name), "tied": list(metadata.aliases_of.get(name, ()))}
        for name, mine in keys.items()
    ]
    by_problem: dict[str, list[str]] = defaultdict(list)  # at the saved degree, a load needs no layout
    for name, error in unknown.items():
        by_problem[error.problem].append(name)
    layout_notes = (
        replace(of_error(unknown[names[0]], "layout", NOTE), parameter=listed(names)) for names in by_problem.values()
    )
    every = [*refused, *check_metadata(metadata), *layout_notes, *of_folders(metadata.source.folder)]
    findings = dict.fromkeys(finding.placed() for finding in every)
    experts = {(each.layer, each.number) for name in keys if (each := expert_name(name)) is not None}
    return {
        "ok": not any(finding.level == ERROR for finding in findings),
        "source": source_dict(metadata.source),
        "topology": saved_topology(metadata.source),
        "run": {
            **state.counters,
            **asdict(state.batch),
            "optimizer": saved_optimizer(metadata) if metadata.parameters else None,
            "lr_scheduler": state.lr_scheduler,
            "loss_scale": None if scale is None else {"kind": scale.kind, **scale.values},
            "overflow": state.overflow,
            "arguments": metadata.run,
        },
        "experts": dict(Counter(layer for layer, _ in sorted(experts))),
        "contents": list(_contents(metadata)),
        "groups": _groups(metadata),
        "parameters": parameters,
        "aliases": metadata.aliases,
        "files": [{"path": copies_of(file.path)[0], "nbytes": file.nbytes} for file in metadata.files],
        "findings": sorted(findings, key=lambda finding: finding.level != ERROR),
    }


def _sizes(tensor: TensorMetadata) -> tuple[int, int]:
    """Elements and bytes of all shards, without the scales of a quantized state."""
    numel = sum(map(math.prod, tensor.shard_shapes))
    return numel, numel * ITEMSIZE[tensor.dtype]


def _contents(metadata: CheckpointMetadata) -> Iterator[dict[str, Any]]:
    """Weights, states and scalars by kind: number, elements, bytes, and least and greatest value of a scalar."""
    rows: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    values: dict[tuple[str, str, str], set[float]] = defaultdict(set)
    for (name, key), tensor in metadata.tensors.items():
        rows[key, _kind_of(metadata, name, tensor), tensor.dtype].append(_sizes(tensor))
    every = chain.from_iterable(saved.replicated for saved in metadata.parameters.values())
    for state in {(each.file, each.byte_offset): each for each in every}.values():
        numel = math.prod(state.shape)
        rows[state.key, "replicated", state.dtype].append((numel, numel * ITEMSIZE.get(state.dtype, 0)))
    for key, value in chain.from_iterable(saved.scalars for saved in metadata.parameters.values()):
        rows[key, SCALAR, _form(value)].append((0, 0))
        values[key, SCALAR, _form(value)].update(numbers(value))
    first = {MASTER: 0, FROZEN: 1, BUFFER: 2}
    for kind in sorted(rows, key=lambda kind: (first.get(kind[0], 3), kind[1] == SCALAR, kind)):
        numel, nbytes = map(sum, zip(*rows[kind], strict=True))
        yield {
            **dict(zip(("key", "kind", "dtype"), kind, strict=True)),
            "tensors": len(rows[kind]),
            "numel": numel,
            "nbytes": nbytes,
            "values": sorted({min(values[kind]), max(values[kind])}) if values[kind] else [],
        }


def _kind_of(metadata: CheckpointMetadata, name: str, tensor: TensorMetadata) -> str:
    saved = metadata.parameters.get(name)
    if tensor.key in WEIGHTS or saved is None:
        return "weights"
    if tensor.has_own_shape:
        return "whole"
    if tensor.blocks is not None:
        return f"blocks of {tensor.blocks.numel}"
    return "elementwise" if len(tensor.shape) == len(saved.shape) else f"{tensor.shape[0]} values per element"


def _form(value: Any) -> str:
    """How a scalar state was saved."""
    if isinstance(value, PerRank):
        return ", ".join(sorted({_form(each) for each in value.values}))
    return value.dtype if isinstance(value, TensorValue) else type(value).__name__


def _groups(metadata: CheckpointMetadata) -> list[dict[str, Any]]:
    """Members of each param group, elements of their masters (of all shards), and hyperparameters."""
    numels: list[list[int]] = [[] for _ in metadata.groups]
    for saved in metadata.parameters.values():
        numels[saved.group].append(sum(map(math.prod, saved.shards or (saved.shape,))))
    return [
        {"members": len(mine), "numel": sum(mine), "hyperparameters": values}
        for mine, values in zip(numels, metadata.groups, strict=True)
    ]


def _entry(metadata: CheckpointMetadata, name: str, keys: list[str], weights_only: bool) -> dict[str, Any]:
    """A parameter or buffer, but for its logical shape (``None`` if the layout of its shards is unknown) and ties."""
    saved = metadata.parameters.get(name)
    own = tensor_of(metadata, name)
    replicas = [replica for key in keys for replica in metadata.replicas.get((name, key), ())]
    states = sorted(set(keys) - WEIGHTS)
    shards: tuple[tuple[int, ...], ...] = () if own is None else own.shard_shapes
    if saved is not None:
        states += [state.key for state in saved.replicated] + [key for key, _ in saved.scalars]
        shards = shards or saved.shards or (saved.shape,)
    return {
        "name": name,
        "role": TRAINED if saved is not None else WEIGHT if weights_only and FROZEN in keys else keys[0],
        "shards": shards,
        "dtype": "" if own is None else own.dtype,
        "group": None if saved is None else saved.group,
        "states": states,
        "numel": sum(map(math.prod, shards)),
        "nbytes": sum(_sizes(each)[1] for each in (*(metadata.tensors[name, key] for key in keys), *replicas)),
        "copies": 1 + sum(own is not None and replica.key == own.key for replica in replicas),
    }
