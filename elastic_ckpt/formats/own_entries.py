"""Types of the entries that DeepSpeed writes, checked where a file is read.

A file of another kind, or one that somebody has made, may have anything under these names. What is found here is a
:class:`DamagedError` on every path: of a load, of DeepSpeed's own loader, and of each command. Entries of the user's,
and those that are read with a default for whatever else is there, are not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import is_number
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.errors import DamagedError, listed
from elastic_ckpt.formats.known_states import is_real, value_text
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.stacked_experts import AUTOEP_LAYERS, refuse_many_experts
from elastic_ckpt.formats.torch_archive.calls import Call
from elastic_ckpt.formats.torch_archive.charges import limit_error
from elastic_ckpt.formats.torch_archive.tensors import StorageRef, TensorRef

_PROBLEM = "an entry of this file is not what DeepSpeed writes there"
_MOST_STAGE = 3
_MOST_UNROLLED = 1 << 20
#: Of all names of nested modules, which few bytes can share.
_MOST_CHARACTERS = 1 << 26
_NO_CONTAINERS = (bool, int, float, complex, str, bytes, bytearray, TensorRef, StorageRef)


class Kind(NamedTuple):
    """What an entry may be."""

    expected: str
    fits: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """The same for an entry that DeepSpeed may leave empty."""
        return Kind(f"{self.expected}, or None", lambda value: value is None or self.fits(value))


def is_count(value: Any) -> bool:
    """Whether a value is an integer that counts something."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0  # type: ignore[operator]


def is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    """Whether a value is a list or tuple of such items."""
    return isinstance(value, (list, tuple)) and all(map(of, value))


def _is_real_number(value: Any) -> bool:
    return is_real(value.dtype) if isinstance(value, TensorRef) else is_number(value)


def _is_mapping(value: Any, of: Callable[[Any], bool], keys: type = str) -> bool:
    return isinstance(value, Mapping) and all(type(key) is keys for key in value) and all(map(of, value.values()))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(is_count, value))


def _is_stage(value: Any) -> bool:
    is_enum = type(value) is Call and value.name.endswith(".ZeroStageEnum")
    return is_enum or (is_count(value) and value <= _MOST_STAGE)


def _is_fragment(value: Any) -> bool:
    return is_count(getattr(value, "start", None)) and is_count(getattr(value, "numel", None))


def _is_autoep(layer: Any) -> bool:
    """Whether this places the experts of one layer, as DeepSpeed's AutoEP notes them."""
    if not isinstance(layer, Mapping) or type(layer.get("expert_key_prefix")) is not str:
        return False
    if not all(is_count(layer.get(key)) for key in ("num_local_experts", "ep_size", "num_experts")):
        return False
    placement = layer.get("expert_placement")
    return placement is None or (isinstance(placement, Mapping) and is_list(placement.get("ranks"), _is_placed))


def _is_placed(rank: Any) -> bool:
    """Whether this lists the experts of one expert-parallel rank."""
    return isinstance(rank, Mapping) and is_count(rank.get("rank")) and is_list(rank.get("experts"), is_count)


def _is_any(_: Any) -> bool:
    return True


def _is_scaler(value: Any) -> bool:
    """An object of one of DeepSpeed's classes, or of one that the user allowed."""
    return type(value) is Call and (value.is_users or value.name.endswith("LossScaler"))


_DICT = Kind("a dictionary", lambda value: isinstance(value, Mapping))
_SHAPES = Kind("a dictionary of shapes by name", lambda value: _is_mapping(value, _is_shape))
_NAMES = Kind("a list of names", lambda value: is_list(value, lambda each: type(each) is str))
_COUNTS = Kind("a list of integers >= 0", lambda value: is_list(value, is_count))
_LISTED_SHAPES = Kind("a list of dictionaries of shapes by name", lambda value: is_list(value, _SHAPES.fits))
_TENSORS = Kind(
    "a dictionary of tensors by name", lambda value: _is_mapping(value, lambda each: isinstance(each, TensorRef))
)
_STAGE = Kind(f"a ZeRO stage from 0 to {_MOST_STAGE}", _is_stage)
_FLAG = Kind("True or False", lambda value: is_number(value) or isinstance(value, TensorRef))
_TEXT = Kind("text", lambda value: isinstance(value, str))
_SCALER = Kind("DeepSpeed's loss scaler", _is_scaler)
_AUTOEP = Kind("a list with the places of the experts of each AutoEP layer", lambda value: is_list(value, _is_autoep))
_MODEL_STATES: Mapping[str, Kind] = {
    **dict.fromkeys(AUTOEP_LAYERS, _AUTOEP.or_none()),
    "module": Kind("a dictionary of weights by name", lambda value: _is_mapping(value, _is_any)).or_none(),
    "buffer_names": _NAMES,
    "param_shapes": _LISTED_SHAPES.or_none(),
    "frozen_param_shapes": _SHAPES.or_none(),
    "frozen_param_fragments": _TENSORS.or_none(),
    "shared_params": Kind(
        "a dictionary of names by name", lambda value: _is_mapping(value, lambda each: type(each) is str)
    ).or_none(),
    "ds_version": _TEXT,
    "num_experts": Kind("numbers of experts", lambda value: is_count(value) or _COUNTS.fits(value)).or_none(),
}
_PARTITIONS: Mapping[str, Kind] = {
    "zero_stage": _STAGE,
    "loss_scaler": _SCALER.or_none(),
    "overflow": _FLAG.or_none(),
    "partition_count": Kind("numbers of partitions", lambda value: is_count(value) or _COUNTS.fits(value)).or_none(),
    "group_paddings": _COUNTS,
    "param_alignment_paddings": Kind(
        "a list of integers >= 0 for each param group", lambda value: is_list(value, _COUNTS.or_none().fits)
    ).or_none(),
    "param_slice_mappings": Kind(
        "for each param group, a dictionary of fragments by parameter",
        lambda value: is_list(value, lambda each: _is_mapping(each, _is_fragment)),
    ).or_none(),
    "single_partition_of_fp32_groups": Kind("a list of tensors", lambda value: is_list(value, _is_any)),
    "fp32_flat_groups": Kind("a list of tensors", lambda value: is_list(value, _is_any)),
    "ds_zero_partition_groups": Kind(
        "a list of numbers of partitions",
        lambda value: is_list(value, lambda each: isinstance(each, Mapping) and is_count(each.get("partition_count"))),
    ).or_none(),
}
_UNIVERSAL_OPTIMIZER: Mapping[str, Kind] = {
    "zero_stage": _STAGE,
    "loss_scaler": _SCALER.or_none(),
    "overflow": _FLAG.or_none(),
    "optimizer_state_dict": _DICT,
}
_SETTING = Kind("True or False", lambda value: isinstance(value, int) and is_number(value)).or_none()
_REAL = Kind("a real number", _is_real_number).or_none()
_REALS = Kind("a real number, or some", lambda value: _REAL.fits(value) or is_list(value, _REAL.fits))
#: Those of torch's own optimizers, and what bitsandbytes is told from torch by.
_HYPERPARAMETERS: Mapping[str, Kind] = {
    **dict.fromkeys(("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "nesterov"), _SETTING),
    "decoupled_weight_decay": _SETTING,
    **dict.fromkeys(("lr", "initial_lr", "weight_decay", "momentum", "dampening"), _REAL),
    **dict.fromkeys(("betas", "eps"), _REALS),
    "name": _TEXT.or_none(),
    # of some fused optimizers a count, and of others their own
    "step": Kind("an integer of 64 bits, if one", lambda value: not isinstance(value, int) or is_number(value)),
}
#: Lists of which each has an item for each flat tensor of :data:`_PARTITIONS`.
_PER_FLAT = ("group_paddings", "param_alignment_paddings", "param_slice_mappings")


def check_own_entries(file: PickledFile) -> None:
    """Raise :class:`DamagedError` for an entry of a model-states or optimizer-states file that is of another type."""
    tree = checked_tree(file)
    if "module" in tree:
        _check_all(file, tree, _MODEL_STATES)
        _check_weights(file, tree)
        for key in ("lr_scheduler", "param_shapes", "frozen_param_shapes"):
            _check_unrolled(key, tree.get(key))
        counts: Any = tree.get("num_experts") or ()
        refuse_many_experts(file, [counts] if is_count(counts) else counts)
    if "optimizer_state_dict" in tree:
        state = tree["optimizer_state_dict"]
        if not isinstance(state, Mapping):
            raise malformed(file, "optimizer_state_dict", "a dictionary", state)
        _check_all(file, state, _PARTITIONS, "optimizer_state_dict / ")
        _check_lengths(file, state)


def _check_unrolled(entry: str, value: Any) -> None:
    """Raise :class:`UnsupportedError` for containers that, written out, have more items than are reasonable.

    A few that hold each other twice stand for as many as 2 to the power of their number, which reports write out.
    """
    counts: dict[int, int] = {}  # items of each container, and of all in it
    waiting = [value]
    while waiting:
        each = waiting[-1]
        inner = [*each.values()] if isinstance(each, Mapping) else each if isinstance(each, (list, tuple)) else ()
        known = counts.get(id(each))
        if known is None and inner:
            counts[id(each)] = 0  # until all in it are known; of one that holds itself, too
            waiting += [one for one in inner if id(one) not in counts]
            continue
        waiting.pop()
        if not known and inner:
            counts[id(each)] = len(inner) + sum(counts.get(id(one), 0) for one in inner)
            if counts[id(each)] > _MOST_UNROLLED:
                raise limit_error(f"{entry}: at most {_MOST_UNROLLED} items, written out", "more")


def check_optimizer_file(file: PickledFile) -> None:
    """Raise :class:`DamagedError` for an entry of ``zero/optimizer_state.pt`` that is of another type."""
    tree = checked_tree(file)
    _check_all(file, tree, _UNIVERSAL_OPTIMIZER)
    for key, value in tree.items():
        _check_unrolled(str(key), value)


def checked_tree(file: PickledFile) -> Mapping[Any, Any]:
    """The tree of a file, which must be a dictionary."""
    if not isinstance(file.tree, Mapping):
        raise DamagedError("this file is none that DeepSpeed writes", file.path, "a dictionary", text_of(file.tree))
    return file.tree


def check_base_state(file: PickledFile, base: Mapping[str, Any]) -> None:
    """Raise :class:`DamagedError` unless a base optimizer's ``state_dict`` has states and param groups."""
    if "state" not in base or not isinstance(base["state"], Mapping):
        raise malformed(file, "state", "a dictionary of states", base.get("state"))
    for number, states in base["state"].items():
        if is_count(number):  # others are of no parameter, and the optimizer's own
            check_states(file, f"state / {number}", states)
    _check_numbers(file, base["state"], check_groups(file, base.get("param_groups")))


def _check_numbers(file: PickledFile, states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`DamagedError` unless each numbered state is of a tensor that one param group lists.

    Where no group did, the tensor in its place would count as one that never had a gradient.
    """
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for number in group["params"]:  # a group may list one twice
            if group_of.setdefault(number, index) != index:
                found = f"{number} in groups {group_of[number]} and {index}"
                raise DamagedError(_PROBLEM, file.path, "params of a param group: numbers of its own", found)
    for number in states:
        if isinstance(number, int) and number not in group_of:
            expected = "state: states of tensors that the param groups list in params"
            raise DamagedError(_PROBLEM, file.path, expected, f"states of {number}, which no group lists")


def check_numbered(file: PickledFile, states: Any) -> None:
    """Raise :class:`DamagedError` unless these are states of flat tensors, by their numbers."""
    if not isinstance(states, Mapping) or not all(map(is_count, states)):
        raise malformed(file, "state", "a dictionary of states by the numbers of flat tensors", states)
    for number, of_one in states.items():
        check_states(file, f"state / {number}", of_one)


def check_states(file: PickledFile, entry: str, states: Any) -> None:
    """Raise :class:`DamagedError` unless these are the states of one tensor, by name."""
    if not isinstance(states, Mapping) or not all(type(key) is str for key in states):
        raise malformed(file, entry, "a dictionary of states by name", states)


def check_groups(file: PickledFile, groups: Any, with_members: bool = True) -> Sequence[Mapping[str, Any]]:
    """The param groups of an optimizer, with the numbers of their members; :class:`DamagedError` if these are none."""
    if not isinstance(groups, (list, tuple)) or not groups:
        raise malformed(file, "param_groups", "a list of at least one param group", groups)
    _check_unrolled("param_groups", groups)
    for group in groups:
        if not isinstance(group, Mapping):
            raise malformed(file, "param_groups", "a dictionary for each param group", group)
        if unnamed := [key for key in group if type(key) is not str]:
            problem = "a param group has an entry that is no hyperparameter of any optimizer"
            raise DamagedError(problem, file.path, "names as keys", f"a key of type {type(unnamed[0]).__name__}")
        if with_members and not is_list(group.get("params"), is_count):
            raise malformed(file, "params of a param group", "a list of numbers of parameters", group.get("params"))
        _check_all(file, group, _HYPERPARAMETERS, "a param group / ")
        names = group.get("param_names")
        if names is not None and not _NAMES.fits(names):
            raise malformed(file, "param_names of a param group", _NAMES.expected, names)
    return groups


def _check_all(file: PickledFile, entries: Mapping[Any, Any], kinds: Mapping[str, Kind], above: str = "") -> None:
    for key, kind in kinds.items():
        if key in entries and not kind.fits(entries[key]):
            raise malformed(file, above + key, kind.expected, entries[key])


def _check_weights(file: PickledFile, tree: Mapping[Any, Any]) -> None:
    """Parameters and buffers are tensors; other entries of a module may be what it makes of itself."""
    module = tree["module"] or {}
    names = {name for shapes in tree.get("param_shapes") or () for name in shapes}
    names |= {*(tree.get("frozen_param_shapes") or ()), *(tree.get("buffer_names") or ())}
    names = set(map(without_hidden, names))
    others = {
        name: text_of(module[name]) for name in module if name in names and not isinstance(module[name], TensorRef)
    }
    if others:
        raise not_tensors(file.path, others)


def not_tensors(path: str, entries: Mapping[str, str]) -> DamagedError:
    """The error for weights and buffers of a module that are something else: name -> what it is."""
    expected = "module / " + listed(entries) + (": a tensor" if len(entries) == 1 else ": tensors")
    found = entries[next(iter(entries))]
    return DamagedError(_PROBLEM, path, expected, found, parameter=list(entries))


def module_entries(module: Any, path: str | None = None) -> dict[str, Any]:
    """The entries of ``module``, in the file at ``path``, by FQN; Megatron-DeepSpeed's without a pipeline are nested.

    Raises :class:`UnsupportedError` if nested names are many times longer than is reasonable: each has those above it;
    :class:`DamagedError` for two entries of one name, of which no reader takes the same.
    """
    characters = 0

    def below(prefix: str, text: str) -> str:
        nonlocal characters
        characters += len(prefix) + len(text) if prefix else 0
        if characters > _MOST_CHARACTERS:
            raise limit_error(f"names of at most {_MOST_CHARACTERS} characters in nested modules", "more", path)
        return prefix + text

    def named(prefix: str, entries: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in entries.items():
            name = str(key)
            if isinstance(value, Mapping) and not is_extra_state(name):
                yield from named(below(prefix, f"{name}."), value)
            else:
                yield below(prefix, name), value

    entries = dict[str, Any]()
    for name, value in named("", module) if isinstance(module, Mapping) else ():
        if name in entries:
            raise DamagedError(_PROBLEM, path, f"module / {name}: one entry of this name", "two", parameter=name)
        entries[name] = value
    return entries


def _check_lengths(file: PickledFile, state: Mapping[str, Any]) -> None:
    flats = state.get("single_partition_of_fp32_groups")
    if flats is None:
        return
    for key in _PER_FLAT:
        values = state.get(key) or ()
        # BF16_Optimizer, which notes no stage, keeps the padding in its masters
        is_needed = key == "group_paddings" and key in state and "zero_stage" in state
        if (values or is_needed) and len(values) != len(flats):
            text = f"{counted(len(flats), 'item')}, as single_partition_of_fp32_groups has"
            raise malformed(file, f"optimizer_state_dict / {key}", text, values)


def check_masters(file: PickledFile, entry: str, masters: Any, members: Sequence[Sequence[int]], is_flat: bool) -> None:
    """Raise :class:`DamagedError` unless each param group has a master of each member, or a flat one of all."""
    if not isinstance(masters, (list, tuple)) or len(masters) != len(members):
        raise malformed(file, entry, f"masters of {counted(len(members), 'param group')}", masters)
    for mine, numbers in zip(masters, members, strict=True):
        count = 1 if is_flat else len(numbers)
        every = [mine] if is_flat else mine
        if not is_list(every, lambda each: isinstance(each, TensorRef)) or len(every) != count or not numbers:
            raise malformed(file, f"{entry} of a param group of {len(numbers)}", f"{counted(count, 'tensor')}", mine)


def malformed(file: PickledFile, entry: str, expected: str, found: Any) -> DamagedError:
    """The error for an entry of another type."""
    return DamagedError(_PROBLEM, file.path, f"{entry}: {expected}", text_of(found))


def text_of(value: Any) -> str:
    """What a malformed value is, in short."""
    if isinstance(value, TensorRef):
        return f"a tensor of {value.dtype}, shape {value.shape}"
    if isinstance(value, Mapping):
        return f"a dictionary of {listed(str(key)[:40] for key in value)}"
    if isinstance(value, (list, tuple)):
        kinds = listed({type(each).__name__ for each in value[:100]})
        return f"a {type(value).__name__} of {counted(len(value), 'item')}: {kinds}"
    return value_text(value)
