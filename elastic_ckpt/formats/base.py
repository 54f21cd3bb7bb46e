"""What every format provides: a reader from a folder to a :class:`Checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.fqn import NameStates
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFacts, SourceFile
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import TrainingState
from elastic_ckpt.errors import DamagedError, Remedy, UnsupportedError
from elastic_ckpt.formats.naming import FolderFiles, is_another_file
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.storage import exists

FileT = TypeVar("FileT", bound=SourceFile)
#: Class attribute: the fields of a dataclass in which files differ, whatever they have in common.
OWN_FIELDS = "OWN_FIELDS"
CONVERT_AGAIN = "convert the native checkpoint again"
REMOVE_FOREIGN = "remove the foreign file and restore the right one, or use another tag"


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint folder as detected; the same on every rank."""

    format: str  # ``"native"``, ``"universal"``, ``"dcp"``, or of tools alone ``"safetensors"``
    folder: str  # absolute path of the tag's folder
    tag: str
    files: FolderFiles
    notes: tuple[str, ...] = ()  # what the user should know about the choice

    @property
    def by_rank(self) -> bool:
        """Whether each file is what one rank has saved."""
        return self.format == "native"

    @property
    def foreign(self) -> str:
        """Whose files of whole tensors these are, if not DeepSpeed's."""
        return {"dcp": "torch.distributed.checkpoint", "safetensors": "safetensors"}.get(self.format, "")

    def source(self, zero_stage: int, partition_degree: int, ds_version: str = "", **more: Any) -> SourceFacts:
        """Where metadata comes from that is read of this checkpoint."""
        facts = {"by_rank": self.by_rank, "foreign": self.foreign, **more}
        return SourceFacts(self.format, self.folder, self.tag, zero_stage, partition_degree, ds_version, **facts)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


@dataclass(frozen=True)
class MetadataOptions:
    """How to read metadata."""

    trust_pickle: bool = False  # as the config says
    check_shards: bool = True  # with ``"verify": "load"``
    states: StateOptions = field(default_factory=StateOptions)  # the user's declarations about optimizer states
    with_states: bool = True  # whether optimizer states are restored
    coordinates: RankCoordinates = field(default_factory=RankCoordinates)  # of this rank in the live topology
    #: Live names of parameters and buffers, which tell what of a pipeline layer's file is a tied module's.
    live_names: frozenset[str] = frozenset()
    with_client_state: bool = True  # whether the client's state is read, for which torch is needed
    skip_unreadable: bool = False  # whether entries of it that cannot be read are left out
    with_unmade: bool = True  # whether files may have such entries where the client's state is not read

    @classmethod
    def of(cls, config: ElasticConfig, **more: Any) -> MetadataOptions:
        """The options of a configuration, and ``more`` that do not depend on it."""
        options = cls(config.trust_pickle, config.verify == "load", state_options(config), **more)
        return replace(options, states=replace(options.states, are_restored=options.with_states))

    @property
    def counting_states(self) -> StateOptions:
        """Of formats without counters, where steps of the optimizer count: states are judged for every load."""
        return replace(self.states, are_restored=True)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: metadata of its tensors, and its training state."""

    metadata: CheckpointMetadata
    training_state: TrainingState
    model_path: str  # the model-states file that ``load_checkpoint`` returns
    files_opened: int  # files whose metadata this rank read


OpenFile = Callable[[str], PickledFile]  # opens a file of the checkpoint
#: Returns on every rank what a function returns that one rank alone has to call, as it looks at the folder.
Once = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Fitted:
    """What the files of a checkpoint hold together, as one rank knows it."""

    metadata: CheckpointMetadata
    model_path: str  # as in :class:`Checkpoint`
    state: TrainingState | None = None  # where all ranks know it
    #: Else what has been read at this position tells it to this rank, or to all.
    position: int = 0
    for_all: bool = True
    #: Position -> training state, on the rank that has read what is there.
    read_state: Callable[[int], TrainingState] | None = None


@dataclass(frozen=True)
class FolderReading:
    """How to read a folder of which each rank reads a share."""

    count: int  # of things to read
    path: Callable[[int], str]  # of the file that is read at a position below ``count``, or of one of several
    #: Reduces what is at a position below ``count`` to something small, or returns the error that ``fit`` may raise.
    read: Callable[[int, OpenFile], Any]
    #: Puts together what all ranks have read, in order, given the files that this rank has opened, by path, and what
    #: names numbered states.
    fit: Callable[[Sequence[Any], Mapping[str, PickledFile], NameStates], Fitted]


#: Reads a folder by itself, or says how ranks do together; the same on every rank.
FormatReader = Callable[[CheckpointInfo, MetadataOptions, Once], FolderReading | Checkpoint]


def refuse_unsupported_folder(found: CheckpointInfo) -> None:
    """Raise :class:`UnsupportedError` for some experts, :class:`DamagedError` for two files of one rank."""
    files = found.files
    if files.clashes:
        problem = "duplicate shard for one rank: two saves are mixed in one folder"
        other = files.clashes[0]
        expected = "files of one save: bf16_zero_pp_rank_* or zero_pp_rank_*, layer_NN-model_MM-* or layer_NN-*"
        raise DamagedError(problem, found.path(other), expected, f"{other} beside its counterpart")
    if files.of_experts and (files.layers or any(layer < 0 for layer, _, _ in files.experts)):
        how = "together with pipeline parallelism" if files.layers else "as DeepSpeed before 0.5 saves it"
        problem = f"mixture of experts {how} is not supported yet"
        raise UnsupportedError(problem, found.path(files.of_experts[0]))


def refuse_other_saves(files: Sequence[FileT], facts_of: Callable[[FileT], Mapping[str, Any]]) -> None:
    """Raise :class:`DamagedError` for the first file whose facts, by words for a difference, are not ``files[0]``'s."""
    own = getattr(files[0], OWN_FIELDS, ())
    names = [name for name in vars(files[0]) if name not in own]
    distinct: dict[tuple[int, ...], FileT] = {}  # where files were exchanged, they share what they have in common
    for file in files:
        distinct.setdefault(tuple(map(id, map(vars(file).__getitem__, names))), file)
    first, *others = distinct.values()
    first_facts = facts_of(first)
    for file in others:
        facts = facts_of(file)
        for what, expected in first_facts.items():
            if facts[what] != expected and repr(facts[what]) != repr(expected):  # NaN is no number's equal
                shown = (None if each is None else str(each)[:300] for each in (expected, facts[what]))
                problem = f"this file belongs to another save than {first.path}: {what}"
                raise DamagedError(problem, file.path, *shown, remedy=REMOVE_FOREIGN)


def refuse_swapped(file: PickledFile) -> None:
    """Raise :class:`DamagedError` for a file that was saved as another of the checkpoint, by its archive's own name.

    torch names the top folder of an archive after the file. A file of any other name, as of a stream, is not refused:
    users rename checkpoints and save them again.
    """
    folder, name = os.path.split(file.path)
    stem = name.removesuffix(".pt")
    if file.root in (None, stem):
        return
    if is_another_file(file.root, stem) or exists(os.path.join(folder, f"{file.root}.pt")):
        problem = "this file was saved under the name of another one: files changed places, or one was copied"
        expected = f"an archive that was saved as {name}"
        found = f"one that was saved as {file.root}.pt"
        restore = Remedy("give the file its own name back, or restore the right one")
        remedy = restore, Remedy(when="if it was renamed on purpose", config={"verify": "bytes"})
        raise DamagedError(problem, file.path, expected, found, remedy=remedy)
