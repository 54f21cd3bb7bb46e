"""Optimizer states of universal checkpoints: their files, what all parameters share, and the kind of each state.

DeepSpeed's converter writes elementwise states and the step. ``elastic-ckpt convert`` writes more, all of which is read
without its marks too, as anybody may save it:

- ``zero/<parameter>/state1.pt`` has 8-bit codes in the parameter's shape, and ``absmax1.pt`` their scales, in blocks of
  256 or 2048 elements counted from the parameter's first. Blocks of ZeRO's flat tensors have their borders elsewhere,
  and some are shared by neighbours: ``quantized_runs`` beside the scales then has a row for each
  :class:`~elastic_ckpt.core.chunks.QuantizedRun`. Nothing is quantized again.
- ``elastic_ckpt_shared_states`` in ``zero/optimizer_state.pt`` has what is one for every parameter with states, whole:
  codebooks, tables, and scalars beside the step. A file of that name in a parameter's folder counts more.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.chunks import QuantizedChunks, QuantizedRun
from elastic_ckpt.core.counts import in_proportion
from elastic_ckpt.core.metadata import MASTER, ReplicatedState, SourceFile, TensorMetadata, is_floating
from elastic_ckpt.core.name_patterns import LONGEST
from elastic_ckpt.core.shard_specs import COLUMN, ROW, VOCABULARY, ShardSpec
from elastic_ckpt.core.state_kinds import (
    COMPANIONS,
    ELEMENTWISE,
    REPLICATED,
    BlockFormat,
    Codebook,
    StateOptions,
)
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.errors import DamagedError, errors_of_file
from elastic_ckpt.formats.base import CONVERT_AGAIN, CheckpointInfo
from elastic_ckpt.formats.classification import (
    FRESH,
    MOST_VALUES,
    RankStates,
    SavedKind,
    classify,
    compare_lengths,
)
from elastic_ckpt.formats.known_states import check_tensor, check_value
from elastic_ckpt.formats.metadata_builder import MetadataBuilder, dense_tensor
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER
from elastic_ckpt.formats.own_entries import text_of
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import (
    ELEMENTWISE_NAMES,
    Digest,
    StatesOfOne,
    sort_states,
)
from elastic_ckpt.formats.torch_archive.charges import limit_error
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.universal_blocks import QuantizedLayout, layout_of
from elastic_ckpt.formats.universal_shapes import shape_error

#: Entry of ``zero/optimizer_state.pt``.
SHARED_STATES = "elastic_ckpt_shared_states"
#: Fused parts of a parameter, of which a file may claim any number.
_MOST_SUB_PARAMETERS = 1 << 10
_SCALES = {scales: codes for codes, (scales, _) in COMPANIONS.items()}
_CODEBOOKS = {codebook: codes for codes, (_, codebook) in COMPANIONS.items()}
#: What every optimizer keeps as a value for each element.
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "state1", "state2"})
NO_STATES = StatesOfOne({})


class StateFile(NamedTuple):
    """One ``zero/<name>/<key>.pt``: a parameter's whole tensor or scalar. Without its path, as ranks exchange many."""

    key: str
    nbytes: int
    tensor: TensorRef | None
    scalar: float | None  # ``None`` of a tensor, and of a state that the optimizer does not use
    #: Of a small tensor that others may have too, its values; of scales, the layout of their codes, if recorded; of a
    #: scalar, its dtype if it is a tensor.
    noted: Digest | Codebook | QuantizedLayout | str | None = None
    rule: ShardSpec | None = None  # how it is sharded, if known
    is_concatenated: bool = False  # for want of a rule, DeepSpeed's converter concatenated the shards (dimension 0)
    records: Records = Records()

    def __reduce__(self) -> tuple[Any, ...]:  # without trailing defaults: each is some bytes of a message
        fields = list(self)
        defaults = list(self._field_defaults.values())
        while defaults and fields[-1] == defaults[-1]:
            fields.pop()
            defaults.pop()
        return StateFile, tuple(fields)

    @property
    def layout(self) -> QuantizedLayout | None:
        return self.noted if isinstance(self.noted, QuantizedLayout) else None

    @property
    def value(self) -> float | TensorValue | None:
        """The scalar as it was saved."""
        return TensorValue(self.noted, (), (self.scalar,)) if isinstance(self.noted, str) else self.scalar


def index_state(file: PickledFile, options: StateOptions = StateOptions()) -> StateFile:  # noqa: B008  frozen
    """Read one parameter's file; a :class:`DamagedError` if it contains neither a dense tensor nor a number."""
    folder, base = os.path.split(file.path)
    is_parameters = isinstance(file.tree, dict) and "param" in file.tree
    value = file.tree["param"] if is_parameters else file.tree
    name = os.path.basename(folder)
    key = base.removesuffix(".pt")
    if key == MASTER and not (isinstance(value, TensorRef) and is_floating(value.dtype)):
        problem = "the master of this parameter is no tensor of real numbers"
        found = text_of(value)
        raise DamagedError(problem, file.path, "fp32 values", found, parameter=name, remedy=CONVERT_AGAIN)
    if isinstance(value, TensorRef) and (value.shape or is_parameters):  # of a parameter that may have no dimension
        check_tensor(file.path, key, value.dtype, value.shape, options, name)
        if not value.is_contiguous:
            problem = f"{key} of this parameter was saved as a view that is not contiguous"
            raise DamagedError(problem, file.path, parameter=name)
        with errors_of_file(file.path):
            rule = _rule_of(name, file.tree)
        is_concatenated = is_parameters and rule is None and file.tree.get("cat_dim") == 0
        layout = layout_of(file, name, value) if is_parameters and key in _SCALES else None
        noted = layout or _small(file, key, value, options)
        return StateFile(key, file.nbytes, value, None, noted, rule, is_concatenated, file.records)
    if not isinstance(value, TensorRef):
        check_value(file.path, key, value, options, name)
    scalars = dict(sort_states(file, {key: value}, options).scalars)
    is_moment = key in _MOMENTS and value is not None
    if key not in scalars or is_moment or is_parameters:
        problem = f"{key} of this parameter is neither a tensor nor a number"
        found = text_of(value)
        problem = f"{key} of this parameter is no tensor" if is_moment or is_parameters else problem
        expected = "a tensor, or a dict with 'param'"
        raise DamagedError(problem, file.path, expected, found, parameter=name, remedy=CONVERT_AGAIN)
    scalar = scalars[key]
    dtype = None
    if isinstance(scalar, TensorValue):
        dtype = scalar.dtype
        scalar = scalar.elements[0]
    return StateFile(key, file.nbytes, None, scalar, dtype)


def _small(file: PickledFile, key: str, ref: TensorRef, options: StateOptions) -> Digest | Codebook | None:
    """The values of a small tensor, in short, unless it has the name of what is elementwise."""
    if key == MASTER or (key in ELEMENTWISE_NAMES and options.layout(key) is None):
        return None
    found = sort_states(file, {key: ref}, options)
    return found.codebooks.get(key) or found.digests.get(key)


def _rule_of(name: str, tree: Any) -> ShardSpec | None:
    """The rule that DeepSpeed's converter notes beside a tensor; its default, dimension 0, means nothing."""
    if not isinstance(tree, dict):
        return None
    if tree.get("vocab_tensor") or "vocab_divisibility_padding_tensor" in tree:
        return ShardSpec(pattern=_pattern_of(name), kind=VOCABULARY)
    if isinstance(count := tree.get("param_n_sub_params"), int) and 0 < count <= _MOST_SUB_PARAMETERS:
        return ShardSpec(pattern=_pattern_of(name), kind=COLUMN, dim=0, sub_parameters=[1] * count)
    noted = tree.get("sub_param_shape")
    dim = getattr(noted, "partition_dim", None)
    shape = getattr(noted, "shape", None)
    widths = shape[dim] if isinstance(shape, list | tuple) and isinstance(dim, int) and 0 <= dim < len(shape) else None
    if isinstance(widths, list | tuple) and widths and all(isinstance(width, int) and width > 0 for width in widths):
        return ShardSpec(pattern=_pattern_of(name), kind=COLUMN, dim=dim, sub_parameters=in_proportion(widths))
    return ShardSpec(pattern=_pattern_of(name), kind=ROW) if tree.get("cat_dim") == 1 else None


def _pattern_of(name: str) -> str:
    """The pattern of this name alone; names of objects in stores may be longer than a pattern can be."""
    pattern = f"^{re.escape(name)}$"
    if len(pattern) > LONGEST:
        raise limit_error(f"a name of at most {LONGEST} characters as a pattern", str(len(pattern)))
    return pattern


@dataclass(frozen=True)
class ParameterStates:
    """The tensor states of one parameter, those that it shares with others included."""

    states: StatesOfOne
    shared: frozenset[str]  # keys of those

    def in_shape(self, shape: Shape, options: StateOptions) -> ParameterStates:
        """The same with elementwise states in the parameter's shape; from stage 3, DeepSpeed writes flat ones.

        What is one for all parameters keeps its own shape, though it may have as many elements as this one.
        """
        tensors = {
            key: ref if self._is_whole(key, ref, options) else _in_shape(ref, shape)
            for key, ref in self.states.tensors.items()
        }
        return replace(self, states=replace(self.states, tensors=tensors))

    def _is_whole(self, key: str, ref: TensorRef, options: StateOptions) -> bool:
        """Whether the checkpoint or the user says that a state is one for all parameters."""
        if key in self.shared:
            return True
        word = options.layout(key)
        is_small = key not in ELEMENTWISE_NAMES and ref.numel <= options.max_numel
        return is_small if word is None else word == REPLICATED


def _in_shape(ref: TensorRef, shape: Shape) -> TensorRef:
    if ref.shape != (math.prod(shape),):
        return ref
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorRef(ref.dtype, shape, stride, ref.byte_offset)


def states_by_name(
    files: Mapping[tuple[str, str], StateFile], shared: StatesOfOne = NO_STATES
) -> dict[str, ParameterStates]:
    """The states of every parameter that has any file beside that of its master; ``shared``: those of all of them."""
    own: dict[str, dict[str, StateFile]] = {}
    for (name, key), file in files.items():
        if key != MASTER:
            own.setdefault(name, {})[key] = file
    return {name: _with_shared(of_one, shared) for name, of_one in own.items()}


def _with_shared(files: Mapping[str, StateFile], shared: StatesOfOne) -> ParameterStates:
    tensors = {key: file.tensor for key, file in files.items() if file.tensor is not None}
    # a codebook is nothing to a parameter whose values are plain
    codes = {key for key in COMPANIONS if key in tensors and tensors[key].dtype == "uint8"}
    useless = {codebook for codebook, of in _CODEBOOKS.items() if of not in codes}
    useless = useless.union(files, _SCALES, ELEMENTWISE_NAMES)
    added = {key: ref for key, ref in shared.tensors.items() if key not in useless}
    digests = {key: shared.digests[key] for key in added if key in shared.digests}
    codebooks = {key: shared.codebooks[key] for key in added if key in shared.codebooks}
    digests |= {key: file.noted for key, file in files.items() if isinstance(file.noted, Digest)}
    codebooks |= {key: file.noted for key, file in files.items() if isinstance(file.noted, Codebook)}
    noted = {codes: files[scales].layout for scales, codes in _SCALES.items() if scales in files}
    block_numels = {key: layout.block_numel for key, layout in noted.items() if layout is not None}
    states = StatesOfOne(tensors | added, digests=digests, codebooks=codebooks, block_numels=block_numels)
    return ParameterStates(states, frozenset(added))


class _Given(NamedTuple):
    """What is to be classified of one parameter."""

    path: str  # of its folder
    shape: Shape
    states: ParameterStates


def kinds_of(parameters: Mapping[str, _Given], options: StateOptions) -> list[tuple[list[str], dict[str, SavedKind]]]:
    """Parameters that keep the same states, and these states' kinds.

    A parameter's shape alone does not tell: a table of 256 elements looks like a state of a bias that has as many.
    """
    alike: dict[frozenset[tuple[str, ...]], list[str]] = {}
    partitions: dict[str, RankStates] = {}
    for name, (path, shape, each) in parameters.items():
        signature = ((key, "codes" if ref.dtype == "uint8" else "values") for key, ref in each.states.tensors.items())
        noted = ((key, "noted") for key in each.states.block_numels)
        alike.setdefault(frozenset((*signature, *noted)), []).append(name)
        partitions[name] = RankStates(path, shape, -1, each.states)
    lengths = compare_lengths(partitions.values())
    found: list[tuple[list[str], dict[str, SavedKind]]] = []
    for names in alike.values():
        every = [partitions[name] for name in names]
        shared = parameters[names[0]].states.shared
        found.append((names, classify(every, options, shared, lengths) if every[0].tensors else {}))
    return found


class StatesBuilder(MetadataBuilder):
    """Builds the metadata of masters and states, given files by parameter and key, and what the optimizer's has.

    ``folders``: parameter -> name of the folder with its files.

    Files of the model come first, then these, then that of the optimizer.
    """

    def __init__(
        self,
        found: CheckpointInfo,
        models: Sequence[SourceFile],
        states: Mapping[tuple[str, str], StateFile],
        of_optimizer: tuple[StatesOfOne, SourceFile | None],
        options: StateOptions,
        folders: Mapping[str, str],
    ) -> None:
        shared, optimizer = of_optimizer
        self._folders = {name: found.path(f"{UNIVERSAL_FOLDER}/{folder}") for name, folder in folders.items()}
        paths = ((f"{self._folders[name]}/{key}.pt", file) for (name, key), file in states.items())
        files = [*models, *(SourceFile(path, file.nbytes, records=file.records) for path, file in paths)]
        self._by_name = states_by_name(states, shared)
        self._state_files = states
        #: What the model-states files list of each parameter: the shape of a shard, and how many there are.
        self.listed_shapes: dict[str, tuple[Shape, int]] = {}
        self._shared = shared
        pairs = ((self._folders[name], each.states) for name, each in self._by_name.items())
        super().__init__(found, files if optimizer is None else [*files, optimizer], options, pairs)
        self.file_of = {place: number for number, place in enumerate(states, start=len(models))}
        self.opaque |= {key: why for key, why in shared.opaque.items() if options.schema.get(key) != FRESH}

    def scalars_by_name(self) -> dict[str, dict[str, Any]]:
        """The scalar states in files, those of all parameters included."""
        found: dict[str, dict[str, Any]] = {name: dict(self._shared.scalars) for name in self._by_name}
        for (name, key), file in self._state_files.items():
            if file.tensor is None:
                found.setdefault(name, {})[key] = file.value
        return found

    def add_masters_and_states(self) -> None:
        """Add the masters and states of the parameters, by their kinds."""
        for (name, key), file in self._state_files.items():
            if key == MASTER and file.tensor is not None and name in self.parameters:
                shape = self._checked(name, key, file.tensor)
                self.add_tensor(dense_tensor(name, key, file.tensor, self.file_of[name, key], shape), file)
        known = ((name, each) for name, each in self._by_name.items() if name in self.parameters)
        given = {name: self._given(name, each) for name, each in known}
        for names, found in kinds_of(given, self._options):
            kinds = self._with_damaged_maps(found)
            self.record(kinds)
            elementwise = {key: kind for key, kind in kinds.items() if kind.kind == ELEMENTWISE}
            replicated = [key for key, kind in kinds.items() if kind.kind == REPLICATED]
            for name in names:
                for key, kind in elementwise.items():
                    self._add_elementwise(name, key, kind, given[name].states.states)
                if replicated:
                    whole = tuple(self._replicated(name, key, given[name].states) for key in replicated)
                    self.parameters[name] = replace(self.parameters[name], replicated=whole)

    def add_tensor(self, tensor: TensorMetadata, _: StateFile) -> None:
        """Add the tensor that is in a file."""
        self.tensors.add({(tensor.name, tensor.key): tensor})

    def _are_elementwise(self, key: str) -> bool:
        """Whether states of this key are known to be values of each element, and the user says nothing else."""
        return key in ELEMENTWISE_NAMES and self._options.layout(key) is None

    def shapes_by_name(self) -> dict[str, dict[str, Shape]]:
        """The shapes of the master and of what is known to be elementwise of each parameter, by key."""
        found: dict[str, dict[str, Shape]] = {}
        for (name, key), file in self._state_files.items():
            if file.tensor is not None and (key == MASTER or self._are_elementwise(key)):
                found.setdefault(name, {})[key] = file.tensor.shape
        return found

    def _given(self, name: str, each: ParameterStates) -> _Given:
        """What is to be classified. Raises :class:`MismatchError` for what is known to be elementwise, and is not."""
        shape = self.parameters[name].shape
        for key, ref in each.states.tensors.items():
            if self._are_elementwise(key):
                is_planes = len(ref.shape) == len(shape) + 1 and 1 < ref.shape[0] <= MOST_VALUES
                self._checked(name, key, ref, ref.shape[0] if is_planes else 1)
        return _Given(self._folders[name], shape, each.in_shape(shape, self._options))

    def _checked(self, name: str, key: str, ref: TensorRef, planes: int = 1) -> Shape:
        """The shape of a tensor, which is the parameter's in each plane; in the file, it may be flat (from stage 3)."""
        shape = self.parameters[name].shape
        whole = (planes, *shape) if planes > 1 else shape
        if ref.numel != math.prod(whole) or (len(ref.shape) > 1 and ref.shape != whole):
            path = self._files[self.file_of[name, key]].path
            (listed, tp) = self.listed_shapes[name]
            raise shape_error(name, key, path, (whole, listed, ref.shape), tp)
        return whole

    def _replicated(self, name: str, key: str, each: ParameterStates) -> ReplicatedState:
        ref = each.states.tensors[key]
        digest = each.states.digests.get(key)
        file = len(self._files) - 1 if key in each.shared else self.file_of[name, key]
        crc32, differs = (0, True) if digest is None else (digest.crc32, False)
        return ReplicatedState(key, ref.dtype, ref.shape, file, ref.byte_offset, crc32, differs)

    def _add_elementwise(self, name: str, key: str, kind: SavedKind, states: StatesOfOne) -> None:
        ref = states.tensors[key]
        file = self.file_of[name, key]
        item = self._state_files[name, key]
        shape = self._checked(name, key, ref, kind.planes)
        if not kind.block_numel:
            self.add_tensor(dense_tensor(name, key, ref, file, shape), item)
            return
        scales, codebook = COMPANIONS[key]
        blocks = BlockFormat(kind.block_numel, scales, self._codebooks[codebook])
        numel = math.prod(self.parameters[name].shape)
        layout = self._state_files[name, scales].layout
        planes = range(kind.planes if numel else 0)
        runs = tuple(QuantizedRun(plane * numel, numel, 1, numel, -1, 0) for plane in planes)
        of_scales = self.file_of[name, scales], states.tensors[scales].byte_offset
        source = QuantizedChunks(runs if layout is None else layout.runs, blocks, file, ref.byte_offset, *of_scales)
        self.add_tensor(TensorMetadata(name, key, shape, ref.dtype, (source,)), item)
