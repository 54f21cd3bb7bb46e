"""Which files a universal checkpoint should have.

``elastic-ckpt convert`` lists them in ``zero/optimizer_state.pt``. In other folders, the parameters of one param group
have the same files, since ZeRO keeps the same states of them. Where no parameter has a file, it is known to be missing
only if DeepSpeed's converter made the folder, which writes Adam's states alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from elastic_ckpt.core.metadata import MASTER, SavedParameter
from elastic_ckpt.core.state_kinds import COMPANIONS
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.errors import DamagedError, listed
from elastic_ckpt.formats.base import CONVERT_AGAIN, CheckpointInfo
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.torch_archive.charges import limit_error
from elastic_ckpt.formats.universal_states import StateFile

#: Entry of ``zero/optimizer_state.pt``: pairs of keys and the parameters with these files (``None``: all others).
FILES = "elastic_ckpt_files"
#: Releases of DeepSpeed whose universal checkpoints (BLOOM's) have no file of the optimizer.
_WITHOUT_OPTIMIZER_FILE = re.compile(r"0\.\d\.")
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_STEP = "step"
#: Keys of one parameter's files, or of those of a param group: an optimizer has few states.
_MOST_KEYS = 64
#: Keys of one parameter's files -> parameters; ``None``: all that no other entry names.
FileList = tuple[tuple[tuple[str, ...], tuple[str, ...] | None], ...]


def folders_of(
    found: CheckpointInfo, states: Mapping[str, Sequence[StateFile]], models: Iterable[ModelShard]
) -> dict[str, str]:
    """FQN -> folder below ``zero``, given the states in each folder.

    DeepSpeed's converter names a folder as ``param_shapes`` lists the parameter. Under the name of the state dict, it
    then adds the module's own entry, a copy without states. Raises :class:`DamagedError` for two with states.
    """
    hidden_names = dict(chain.from_iterable(model.hidden.items() for model in models))
    folders: dict[str, str] = {}
    twice: list[str] = []
    for name, present in states.items():
        fqn = without_hidden(name)
        if name == hidden_names.get(fqn, fqn):
            folders[fqn] = name
        elif [state.key for state in present] != [MASTER]:
            twice.append(name)
    if twice:
        folder = found.path(UNIVERSAL_FOLDER)
        problem = "a universal checkpoint has two folders of a parameter"
        expected = "one with states, under the name that the model-states files list"
        raise DamagedError(problem, folder, expected, listed(twice), parameter=twice, remedy=CONVERT_AGAIN)
    return folders


def list_files(present: Mapping[str, Iterable[str]]) -> list[list[Any]]:
    """The entry :data:`FILES`, given the keys of each parameter's files."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, keys in present.items():
        alike.setdefault(tuple(sorted(keys)), []).append(name)
    most = max(alike, key=lambda keys: len(alike[keys]), default=())
    return [[list(keys), None if keys == most else names] for keys, names in alike.items()]


def read_file_list(entry: Any, path: str) -> FileList | None:
    """What :func:`list_files` made, ``None`` without it; :class:`DamagedError` if it is anything else."""
    if entry is None:
        return None
    pairs: list[tuple[tuple[str, ...], tuple[str, ...] | None]] = []
    for pair in entry if isinstance(entry, list) else [entry]:
        keys: Any
        keys, names = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        if not _are_words(keys) or not (names is None or _are_words(names)):
            problem = f"the entry {FILES!r} is no list of files"
            expected = "pairs of keys and names of parameters"
            raise DamagedError(problem, path, expected, type(pair).__name__, remedy=CONVERT_AGAIN)
        if len(keys) > _MOST_KEYS:
            raise limit_error(f"{FILES!r}: at most {_MOST_KEYS} files of a parameter", str(len(keys)), path)
        pairs.append((tuple(keys), None if names is None else tuple(names)))
    return tuple(pairs)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(type(word) is str for word in value)


@dataclass(frozen=True)
class PresentFiles:
    """The files of a folder, and what tells which others there should be."""

    keys: Mapping[str, frozenset[str]]  # of the files of each parameter
    codes: Mapping[str, frozenset[str]]  # of those, 8-bit codes
    shared: frozenset[str]  # what the optimizer's file has for all parameters
    has_optimizer_file: bool
    ds_version: str
    zero_stage: int  # of the run that saved the native checkpoint
    steps: int  # that this run has done
    file_list: FileList | None = None
    #: Hyperparameters as saved; of DeepSpeed's and apex's Adam, the step is among them.
    groups: tuple[Mapping[str, Any], ...] = ()
    parameters: Mapping[str, SavedParameter] = field(default_factory=dict)

    def missing(self) -> dict[str, tuple[str, ...]]:
        """Path below the tag, with a star for a parameter -> those that lack it; none: it is of no parameter."""
        alone: dict[str, tuple[str, ...]] = {}
        if not self.has_optimizer_file and not _WITHOUT_OPTIMIZER_FILE.match(self.ds_version):
            alone = {f"{UNIVERSAL_FOLDER}/{UNIVERSAL_OPTIMIZER}": ()}
        lacking: dict[str, list[str]] = {}
        expected = self._listed() if self.file_list is not None else self._inferred()
        for name, keys in expected.items():
            for key in sorted(keys - self.keys.get(name, frozenset()), key=lambda key: (key != MASTER, key)):
                lacking.setdefault(f"{UNIVERSAL_FOLDER}/*/{key}.pt", []).append(name)
        return alone | {file: tuple(names) for file, names in lacking.items()}

    def _listed(self) -> dict[str, frozenset[str]]:
        """The files that the folder's own list has."""
        others = frozenset[str]()
        named = dict[str, frozenset[str]]()
        for keys, names in self.file_list or ():
            if names is None:
                others = frozenset(keys)
            else:
                named |= dict.fromkeys(names, frozenset(keys))
        return dict.fromkeys(self.parameters, others) | named

    def _inferred(self) -> dict[str, frozenset[str]]:
        """The files that others of the same param group have, and those without which others are of no use."""
        of_all = self._of_all()
        beside = frozenset(key for companions in COMPANIONS.values() for key in companions)
        by_group: dict[int, set[str]] = {}
        for name, saved in self.parameters.items():
            # under ZeRO-3, small sub-groups have no 8-bit states
            alike = self.keys.get(name, frozenset()) - (beside if self.zero_stage == 3 else frozenset())
            by_group.setdefault(saved.group, set()).update(alike)
            if len(by_group[saved.group]) > _MOST_KEYS:  # each of which every parameter may lack
                expected_kinds = f"at most {_MOST_KEYS} kinds of files of the parameters of a param group"
                raise limit_error(expected_kinds, "more", UNIVERSAL_FOLDER)
        expected: dict[str, frozenset[str]] = {}
        for name, saved in self.parameters.items():
            wanted = {MASTER, *by_group[saved.group], *of_all}
            for codes in self.codes.get(name, frozenset()):
                scales, codebook = COMPANIONS[codes]
                wanted |= {scales} if codebook in self.shared or not self.has_optimizer_file else {scales, codebook}
            for codes, (scales, _) in COMPANIONS.items():
                wanted |= {codes} if scales in self.keys.get(name, frozenset()) else set()
            expected[name] = frozenset(wanted)
        return expected

    def _of_all(self) -> frozenset[str]:
        """What DeepSpeed's converter writes of every parameter, where it made this folder and Adam saved it."""
        present = frozenset[str]().union(*self.keys.values()) - {MASTER}
        if self.steps <= 0 or not self.has_optimizer_file or not present - {_STEP} <= _MOMENTS:
            return frozenset()
        are_adams = all({"betas", "eps"} <= group.keys() for group in self.groups)
        if present - {_STEP} and not are_adams:
            return frozenset()
        counts_per_group = any(_STEP in group or "bias_correction" in group for group in self.groups)
        return _MOMENTS if self.zero_stage == 3 or counts_per_group else _MOMENTS | {_STEP}
