"""What each entry of a ``torch.distributed.checkpoint`` folder is, by its path in the state dict that was saved.

The layouts are those of ``get_state_dict`` (``torch/distributed/checkpoint/state_dict.py``): a model's state dict by
FQN, and an optimizer's with ``state`` and ``param_groups`` by FQN, nested or flattened to one level (torchtitan), below
keys of the user's choice (``{"model": ..., "optim": ...}``, ``{"app": {...}}``). An optimizer's state dict is
recognized by these two words, the model's by the names in the optimizer's.

Megatron Core has a layout of its own (``dist_checkpointing``, ``torch_dist``): layers of one kind are stacked in one
tensor (``decoder.layers.mlp.linear_fc2.weight``), states are named ``optimizer.state.<key>.<name>``, and ``common.pt``
has what is not sharded: step and hyperparameters, without the members of param groups. Source: ``mapping.py``,
``optimizer.py`` and ``strategies/torch.py`` of ``megatron/core/dist_checkpointing``, and
``optimizer/distrib_optimizer.py``, 0.16.1.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ckpt.core.metadata import is_floating
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.wrappers import unwrapped
from elastic_ckpt.errors import WITHOUT_STATES, DamagedError, MismatchError, Remedy, UnsupportedError, listed
from elastic_ckpt.formats.dcp_metadata import DcpContents, Path, Shape, StoredItem
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import named_errors, open_pickled, unreadable
from elastic_ckpt.formats.values import hyperparameters
from elastic_ckpt.formats.work_budget import WorkBudget
from elastic_ckpt.storage import exists

_STATE = "state"
_GROUPS = "param_groups"
#: Usual last keys of a model's state dict, by which it is recognized where there is no optimizer.
_MODEL_KEYS = frozenset({"model", "module", "state_dict", "model_state_dict"})
_COLLECTION = "an item of a hyperparameter that is a dictionary, or has tensors in it"
_STATE_COLLECTION = "an item of a state that is a dictionary, or has tensors in it"
SAVE_ALONE = Remedy("save the optimizer that is to be resumed alone"), WITHOUT_STATES
COMMON = "common.pt"
#: States of one parameter; of the optimizer's flat buffers, which only Megatron's own loader takes apart.
_MEGATRON_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_STACKED = re.compile(r"((?:.+\.)?layers)\.(?!\d)(.+)")
_MASTER = "fp32_param"
_FLAT = "the distributed optimizer's flat buffers; save with --dist-ckpt-optim-fully-reshardable"
#: The keys that lead to a state dict, all as text.
Root = tuple[str, ...]
#: A param group: its number if it was saved as one, or the parameter that it was saved for.
GroupKey = tuple[Root, int | str]


@dataclass(frozen=True)
class Entries:
    """The entries of a folder by what they are."""

    weights: Mapping[str, str]  # by FQN
    states: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by FQN and key of the state
    groups: Mapping[GroupKey, Mapping[str, str]] = field(default_factory=dict)  # by hyperparameter
    others: tuple[str, ...] = ()  # of neither model nor optimizer
    opaque: Mapping[str, str] = field(default_factory=dict)  # states of unknown layout: key -> description


def sort_entries(contents: DcpContents, folder: str, with_states: bool = True) -> Entries:
    """Sort the entries; :class:`UnsupportedError` if they are in none of the known layouts.

    Without ``with_states``, optimizers that cannot be sorted are left out.
    """
    optimizers = _optimizers(contents)
    try:
        return _sorted(contents, optimizers, folder)
    except (UnsupportedError, MismatchError):
        contents.budget.refuse_if_used_up()
        if with_states or not optimizers:
            raise
    rest: list[str] = []
    for entry, path in contents.paths.items():
        root = _root(path)
        if not any(root[:stop] in optimizers for stop in range(len(root) + 1)):
            rest.append(entry)
    weights = _model(contents, rest, set(), {}, folder)
    return Entries(weights, others=tuple(sorted(set(rest) - set(weights.values()))))


def _root(path: Path) -> Root:
    """A path, or the beginning of one, as text: hashes of numbers can be made to collide."""
    return tuple(map(str, path))


def _optimizers(contents: DcpContents) -> set[Root]:
    """The places of optimizers: wherever there are param groups."""
    found: set[Root] = set()
    for path in contents.paths.values():
        root = _root(path)
        for at in _places(path, _GROUPS):
            contents.budget.charge_objects(at)  # each is a tuple of so many keys
            found.add(root[:at])
    return found


def _sorted(contents: DcpContents, optimizers: set[Root], folder: str) -> Entries:
    states: dict[tuple[str, str], str] = {}
    groups: dict[GroupKey, dict[str, str]] = {}
    rest: list[str] = []
    flattened: list[tuple[Root, str, str]] = []
    charge_text = contents.budget.charge_nbytes  # many entries may share one long key
    for entry, path in contents.paths.items():
        keys_above = _root(path)
        roots = (keys_above[:at] for word in (_STATE, _GROUPS) for at in _places(path, word))
        root = next((root for root in roots if root in optimizers), None)
        if root is None:
            # of a hyperparameter or a state in a flattened state dict
            above = [key for at, key in enumerate(keys_above[:-1]) if keys_above[:at] in optimizers]
            for beginning, what in ((_GROUPS, _COLLECTION), (_STATE, _STATE_COLLECTION)):
                if any(key.startswith(f"{beginning}.") for key in above):
                    raise _unknown_layout(folder, f"{entry}, {what}", WITHOUT_STATES)
            rest.append(entry)
            continue
        word, *keys = path[len(root) :]
        if word == _GROUPS and len(keys) == 2:
            groups.setdefault((root, keys[0]), {})[str(keys[1])] = entry
        elif word == _STATE and len(keys) >= 2 and type(keys[0]) is str:
            state = ".".join(map(str, keys[1:]))
            charge_text(len(state))
            add_state(states, (keys[0], state), entry, folder)
        elif not keys and word not in (_STATE, _GROUPS):
            flattened.append((root, str(word), entry))
        else:
            raise _unknown_layout(folder, f"{entry}, {_COLLECTION}", WITHOUT_STATES)
    trained = {name for name, _ in states}
    weights = _model(contents, rest, trained, dict.fromkeys(name for _, name, _ in flattened), folder)
    owners = Owners(weights, contents.budget)
    for root, word, entry in flattened:
        kind, _, key = word.partition(".")
        name = owners.of(word)
        if name is None:
            raise _unknown_layout(folder, f"{entry}, of no tensor of the model", WITHOUT_STATES)
        key = key.removeprefix(f"{name}.")
        charge_text(len(key))
        if kind == _STATE:
            add_state(states, (name, key), entry, folder)
        else:
            groups.setdefault((root, name), {})[key] = entry
    taken = set(weights.values())
    others = tuple(entry for entry in rest if entry not in taken)
    return Entries(weights, states, groups, others, _unrecognized(contents, owners, others, bool(optimizers)))


def _unrecognized(contents: DcpContents, owners: Owners, others: Iterable[str], has_optimizer: bool) -> dict[str, str]:
    """Tensors that may be optimizer states: under a parameter's ``state``, or any array beside no optimizer."""
    found: dict[str, list[str]] = {}
    for entry in others:
        dtype, shape = contents.tensors.get(entry, ("", ()))
        path = contents.paths[entry]
        inside = (path[at : at + 2] for at in _places(path, _STATE))
        is_state = any(keys[-1] in owners.names or owners.of(str(keys[0])) for keys in inside)
        if shape and is_floating(dtype) and (is_state or not has_optimizer):
            found.setdefault(str(path[0]), []).append(entry)
    why = "tensors beside the model without the param_groups that an optimizer has: "
    return {key: why + listed(entries) for key, entries in found.items()}


def add_state(states: dict[tuple[str, str], str], place: tuple[str, str], entry: str, folder: str) -> None:
    """Note the entry of a state; :class:`MismatchError` if there is one already."""
    other = states.setdefault(place, entry)
    if other != entry:
        problem = f"two optimizers of this torch.distributed.checkpoint folder have {place[1]} of one parameter"
        both = "each parameter in one optimizer", f"{other} and {entry}"
        raise MismatchError(problem, folder, *both, parameter=place[0], remedy=SAVE_ALONE)


def _places(path: Path, word: str) -> Iterator[int]:
    """Where a path enters ``state`` or ``param_groups``, nested or flattened."""
    for at, key in enumerate(path):
        if key == word or (at == len(path) - 1 and type(key) is str and key.startswith(f"{word}.")):
            yield at


def _model(
    contents: DcpContents, entries: list[str], trained: set[str], flattened: Collection[str], folder: str
) -> dict[str, str]:
    """The model's tensors, by FQN."""
    dicts: dict[Root, dict[str, str]] = {}
    for entry in entries:
        if entry in contents.tensors:
            *root, name = _root(contents.paths[entry])
            dicts.setdefault(tuple(root), {})[name] = entry
    if trained:
        fitting = [root for root, names in dicts.items() if trained <= names.keys()]
    elif flattened:
        owners = Owners((name for names in dicts.values() for name in names), contents.budget)
        fitting = owners.fitting(flattened, dicts)
    else:
        called = [root for root in dicts if root and root[-1] in _MODEL_KEYS]
        fitting = list(dicts) if len(dicts) == 1 else called
    if not fitting:
        if trained and all(name.isdecimal() for name in trained):
            raise _unknown_layout(folder, "an optimizer whose parameters are numbered", WITHOUT_STATES)
        raise _unknown_layout(folder, f"tensors under {_shown(dicts)}" if dicts else "no tensors")
    _refuse_copies(contents, dicts, fitting, folder)
    return dicts[fitting[0]]


def _refuse_copies(
    contents: DcpContents, dicts: Mapping[Root, Mapping[str, str]], fitting: list[Root], folder: str
) -> None:
    """Refuse copies of the model, as averaged weights are, unless keys side by side call the model one alone of them.

    The optimizer's names do not tell: a wrapped model (``torch.compile``) has others than its average, which has them.
    """
    model = fitting[0]
    arrays: dict[Root, dict[str, Shape]] = {root: {} for root in dicts}
    bare = {name: unwrapped(name) for name in {name for names in dicts.values() for name in names}}
    for root, entries in dicts.items():
        for name, entry in entries.items():
            if (shape := contents.tensors[entry][1]) and type(contents.paths[entry][-1]) is str:  # no item of a list
                arrays[root][bare[name]] = shape
    names = arrays[model].keys()
    shapes = sorted(arrays[model].values())

    def is_copy(other: Mapping[str, Shape]) -> bool:  # or of the parameters alone
        return bool(other) and (names <= other.keys() or other.keys() <= names or sorted(other.values()) == shapes)

    candidates = set(fitting)
    copies = [root for root in dicts if root != model and (root in candidates or is_copy(arrays[root]))]
    above = model[:-1]
    is_called = not model or model[-1] in _MODEL_KEYS
    others = [root[len(above)] for root in copies if root[: len(above)] == above and len(root) > len(above)]
    if len(fitting) == 1 and (is_called and len(others) == len(copies) and not _MODEL_KEYS & set(others)):
        return
    if copies:
        problem = "more than one state dict of this torch.distributed.checkpoint folder may be the model's"
        expected = "the model's alone, or under 'model' beside copies of it"
        found = f"tensors of the same names or shapes under {_shown([model, *copies])}"
        remedy = "dcp.load of {'model': ..., 'optim': ...} without averages of the model, then dcp.save"
        raise UnsupportedError(problem, folder, expected, found, remedy=remedy)


def _shown(roots: Iterable[Root]) -> str:
    return listed("/".join(root) or "the top level" for root in roots)


class Owners:
    """Finds the parameter in ``state.<parameter>.<key>``: the longest name that fits.

    A file chooses the words, the names, and how many parts each has, so each step is charged to its budget.
    """

    def __init__(self, names: Iterable[str], budget: WorkBudget) -> None:
        self.names = {name: name for name in names}
        self._budget = budget
        self._longest = max(map(len, self.names), default=0)
        self._found: dict[str, tuple[str, ...]] = {}

    def of(self, word: str) -> str | None:
        """The parameter of a word, if it has one."""
        return next(iter(self._candidates(word)), None)

    def fitting(self, words: Iterable[str], dicts: Mapping[Root, Collection[str]]) -> list[Root]:
        """The state dicts, of some of the names each, that have a parameter for each word."""
        distinct = dict.fromkeys(map(self._candidates, words))

        def has_all(names: Collection[str]) -> bool:
            for candidates in distinct:
                self._budget.charge_objects(1 + len(candidates))
                if not any(name in names for name in candidates):
                    return False
            return True

        return [root for root, names in dicts.items() if has_all(names)]

    def _candidates(self, word: str) -> tuple[str, ...]:
        """The names that a word may be of, the longest first."""
        if word not in self._found:
            found: list[str] = []
            start = word.find(".") + 1
            stop = word.find(".", start) if start else -1
            while 0 <= stop <= start + self._longest:
                self._budget.charge_objects(1)
                name = self.names.get(word[start:stop])
                if name is not None:
                    found.append(name)
                stop = word.find(".", stop + 1)
            self._found[word] = tuple(reversed(found))
        return self._found[word]


def _unknown_layout(folder: str, found: str, *others: Remedy) -> UnsupportedError:
    problem = "the entries of this torch.distributed.checkpoint folder are in an unknown layout"
    expected = "state dicts of torch.distributed.checkpoint.state_dict.get_state_dict, under keys of any names"
    remedy = Remedy("save {'model': ..., 'optim': ...} of get_state_dict(model, optimizer)"), *others
    return UnsupportedError(problem, folder, expected, found, remedy=remedy)


@dataclass(frozen=True)
class CommonState:
    """What of ``common.pt`` has a meaning here."""

    groups: Sequence[Mapping[str, Any]] = ()  # distinct ones, whose members are not recorded
    step: float | None = None  # the optimizer's, one for all parameters
    iteration: int | None = None
    samples: int | None = None
    run: Mapping[str, Any] = field(default_factory=dict)  # Megatron's arguments
    others: Mapping[str, Any] = field(default_factory=dict)  # all entries but the optimizer's


def read_common_state(folder: str, trust_pickle: bool) -> CommonState | None:
    """Read ``common.pt``; ``None`` where there is none, as in folders of other writers. Local."""
    path = os.path.join(folder, COMMON)
    if not exists(path):
        return None
    file = open_pickled(path, trust_pickle)
    with named_errors(path):
        rest = materialise(file, {key: value for key, value in file.tree.items() if key != "optimizer"})
        others = {str(key): value for key, value in rest.items()}
        optimizer = hyperparameters(file, {"": file.tree.get("optimizer", {})})[""]
        chained = list(optimizer.values()) if set(map(type, optimizer)) == {int} else [optimizer]
        parts = [part.get("optimizer", part) for part in chained]  # of mixed precision
        groups = [group for part in parts for group in part.get("param_groups", ())]
        by_text: dict[str, dict[str, Any]] = {}  # what is equal has one text: not each is compared with all
        for group in groups:
            values = {key: value for key, value in group.items() if key not in ("params", "step")}
            by_text.setdefault(repr(values), values)
        distinct = list(by_text.values())
        steps = [part["state"]["common_step"] for part in parts if "common_step" in part.get("state", {})]
        steps += [group["step"] for group in groups if "step" in group]  # as the distributed optimizer keeps it
        run = vars(others["args"]) if isinstance(others.get("args"), Namespace) else {}
        iteration = others.get("iteration")
        samples = run.get("consumed_train_samples")
        return CommonState(
            distinct,
            max(map(float, steps), default=None),
            iteration if isinstance(iteration, int) else None,
            samples if isinstance(samples, int) else None,
            run,
            others,
        )


def unstacked(contents: DcpContents, folder: str) -> DcpContents:
    """The contents with a tensor for each layer.

    Raises :class:`UnsupportedError` for a chunk of several layers, :class:`DamagedError` if a layer has none, or is in
    two entries.
    """
    tensors = {name: entry for name, entry in contents.tensors.items() if not _STACKED.fullmatch(name)}
    layers: dict[str, set[int]] = {name: set() for name in contents.tensors.keys() - tensors.keys()}
    stacks: dict[str, str] = {}  # of which each layer's entry is

    def of_layer(item: StoredItem) -> StoredItem:
        if item.name not in layers or item.sizes is None:
            return item
        dtype, shape = contents.tensors[item.name]
        if item.sizes[:1] != (1,):
            problem = "a chunk of a torch.distributed.checkpoint folder has not one layer, as Megatron Core saves them"
            both = "one layer of a stack of them, by the name: layers without a number", f"{item.sizes} of {shape}"
            remedy = "save with --ckpt-format torch_dist; a module that is no stack of layers needs another name"
            raise UnsupportedError(problem, folder, *both, parameter=item.name, remedy=remedy)
        layers[item.name].add(item.offsets[0])
        name = _STACKED.sub(rf"\g<1>.{item.offsets[0]}.\g<2>", item.name)
        other = name if name in contents.paths else stacks.setdefault(name, item.name)
        if other != item.name:
            problem = "two entries of this torch.distributed.checkpoint folder are one layer's parameter"
            both = "one entry that has this layer", f"{item.name} and {other}"
            remedy = "save the checkpoint again, or use another tag: no save of Megatron Core writes it so"
            raise DamagedError(problem, folder, *both, parameter=name, remedy=remedy)
        contents.budget.charge_nbytes(len(name))  # the layers of a stack share a name in the file
        tensors[name] = dtype, shape[1:]
        return replace(item, name=name, offsets=item.offsets[1:], sizes=item.sizes[1:])

    files = {file: tuple(map(of_layer, items)) for file, items in contents.files.items()}
    for name, found in layers.items():
        if len(found) != contents.tensors[name][1][0]:
            raise unreadable(folder, f"{counted(len(found), 'layer')} of {name}, of shape {contents.tensors[name][1]}")
    objects = [name for name in contents.paths if name not in contents.tensors]
    paths = {name: (name,) for name in (*tensors, *objects)}
    return replace(contents, tensors=tensors, paths=paths, files=files)


def sort_megatron_entries(contents: DcpContents, folder: str) -> Entries:
    """Sort the entries of Megatron Core. Masters in fp32 take the place of weights of lower precision."""
    weights: dict[str, str] = {}
    states: dict[tuple[str, str], str] = {}
    opaque: dict[str, str] = {}
    for entry in contents.tensors:
        state = _MEGATRON_STATE.fullmatch(entry)
        if state is not None:
            add_state(states, (state[2], state[1]), entry, folder)
        elif _BUFFERS.match(entry):
            opaque["optimizer.distributed"] = _FLAT
        else:
            weights[entry] = entry
    for (name, key), entry in states.items():
        if name not in weights or contents.tensors[entry][1] != contents.tensors[weights[name]][1]:
            opaque[key] = f"{entry} of shape {contents.tensors[entry][1]}: not that of its parameter ({_FLAT})"
    others = [entry for entry in contents.paths if entry not in contents.tensors]
    weights |= {name: entry for (name, key), entry in states.items() if key == _MASTER and key not in opaque}
    states = {place: entry for place, entry in states.items() if place[0] in weights and place[1] != _MASTER}
    return Entries(weights, states, others=tuple(others), opaque=opaque)
