"""Bounds on what a pickle built, and walks through it."""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace as replaced
from typing import Any

from elastic_ckpt.core.extra_states import is_extra_state
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.torch_archive.calls import LARGEST_KEY, Call, Global, refuse_errors
from elastic_ckpt.formats.torch_archive.charges import COPIED_NBYTES, STEP_NBYTES, items_nbytes
from elastic_ckpt.formats.torch_archive.tensors import OTHER_FORM, StorageRef, TensorRef, kind_error

#: Deepest nesting of containers.
_MOST_DEPTH = 128
#: How many objects a walk may meet per object: a few dozen lists can hold each other 2 ** 60 times.
_MOST_REPEATED = 64
#: Most objects that a key is made of: hashing recurses into them.
_MOST_IN_KEY = 512
#: Most keys of one hash.
_MOST_OF_ONE_HASH = 128
_HASHED_WITH_SEED = frozenset({str, bytes, bool, type(None)})
_PLAIN = frozenset({str, bool, int, float, complex, bytes, type(None)})
_LEAVES = _PLAIN | {TensorRef, bytearray, StorageRef}
#: What may contain itself: it is made empty, and filled behind its parts.
_FILLED = (list, dict, set, argparse.Namespace)
#: Entries of a model-states file that this package reads; the others are the client state, and that of schedulers.
_OWN_ENTRIES = frozenset(
    (
        *("module", "optimizer", "param_shapes", "buffer_names", "shared_params", "frozen_param_shapes", "ds_config"),
        *("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version", "args"),
        *("universal_checkpoint_info", "checkpoint_parallel_dimensions", "num_experts", "frozen_param_fragments"),
        *("ds_autoep_layers", "autoep_layers"),
    )
)


def own_entries(tree: Any) -> Any:
    """What of a file's tree is read piece by piece: all but the client state, and extra states of modules."""
    if type(tree) is not dict or "module" not in tree:
        return _without_extra_states(tree)
    own = {key: value for key, value in tree.items() if key in _OWN_ENTRIES}
    return {**own, "module": _without_extra_states(own["module"])}


def _without_extra_states(entries: Any) -> Any:
    """A state dict without what ``get_extra_state`` of modules returned: it is made whole, as the client state is."""
    if not isinstance(entries, dict) or not any(type(key) is str and is_extra_state(key) for key in entries):
        return entries
    kept = OrderedDict((key, each) for key, each in entries.items() if type(key) is not str or not is_extra_state(key))
    vars(kept).update(getattr(entries, "__dict__", {}))
    return kept


def check_tree(tree: Any) -> None:
    """Raise an error for a tree that is too deep, contains itself, shares a lot, or has parts that cannot be read."""
    sizes: dict[int, int] = {}
    kept: list[Any] = []  # so that no id is used twice

    def size_of(node: Any, depth: int) -> int:
        """Objects that a walk through a container meets."""
        if (known := sizes.get(id(node))) is not None:
            if not known:
                raise _too_entangled(f"a {type(node).__name__} that contains itself")
            return known
        if depth > _MOST_DEPTH:
            raise _too_entangled(f"objects {depth} deep in each other")
        refuse_errors(node, node.function if type(node) is Call else None)
        if type(node) is Call and node.how in ("tensor", "subclass", "wrapper"):
            raise kind_error(str(node) if node.how == "tensor" else f"{node}, a tensor of a class of its own")
        children = _children(node)
        sizes[id(node)] = 0
        kept.append(children)
        sizes[id(node)] = size = (
            1 + len(children) + sum(size_of(child, depth + 1) for child in children if type(child) not in _LEAVES)
        )
        return size

    met = 0 if type(tree) in _LEAVES else size_of(tree, 0)
    if met > 1000 + _MOST_REPEATED * sum(1 + len(each) for each in kept):
        raise _too_entangled(f"{met} objects, most of them again and again")


def _children(node: Any) -> list[Any] | tuple[Any, ...]:
    """All objects in a container, keys that are strings excepted."""
    needed, given = _parts(node)
    return [*needed, *given] if needed and given else needed or given


def _parts(node: Any) -> tuple[Any, Any]:
    """What must be there before an object is made, and what it gets then; both without keys that are strings."""
    needed: Any = ()
    given: Any = ()
    if type(node) is Call:  # first what there are most of
        needed = (node.function, *node.args) if type(node.function) is Call else node.args
        given = [*vars(node).values(), *(value for _, values in node.steps for value in values)]
    elif isinstance(node, (tuple, frozenset)):
        needed = list(node)
    elif isinstance(node, (list, set)):
        given = list(node)
    elif isinstance(node, (dict, argparse.Namespace)):
        given = [key for key in node if type(key) is not str] + [*node.values()] if isinstance(node, dict) else []
        given += vars(node).values() if hasattr(node, "__dict__") else ()
    elif type(node) is TensorRef:
        needed = (node.attributes,)
    return needed, given


def refusals(tree: Any) -> Iterator[ElasticCkptError]:
    """Why parts of a tree, of whatever depth, are not made."""
    met: set[int] = set()
    kept = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        name = node.function if type(node) is Call else node
        if type(name) is Global and name.error is not None:
            yield name.error
        if type(node) not in _LEAVES and id(node) not in met:
            met.add(id(node))
            kept.append(children := _children(node))
            waiting += children


#: What happens to a node of a tree that is copied once its parts were met, in this order.
_MAKE, _FILL = range(2)


def replace_leaves(
    root: Any,
    replace: Callable[[Any], Any],
    give: Callable[[Call, Any, dict[str, Any], list[tuple[str, list[Any]]]], None] | None = None,
    charge: Callable[[int, int], object] | None = None,
) -> Any:
    """Copy a tree, passing leaves through ``replace``; what was shared, or contains itself, does so again.

    Keys and attributes are copied too. A call is a leaf whose arguments are replaced; what it became is given its
    attributes and steps by ``give``. Each object is met once, and nothing recurses: containers that may contain
    themselves are made empty, and filled behind their parts. ``charge`` is called with how many parts are met, and how
    many bytes of memory their copies take.
    """
    done: dict[int, Any] = {}
    met: set[int] = set()

    def new(part: Any) -> Any:
        return part if type(part) in _PLAIN else done[id(part)]

    def parts_of(node: Any, stage: int) -> Iterator[Any]:
        parts = _parts(node)[stage]
        if charge is not None:
            container = node if stage == _FILL or type(node) is frozenset else ()
            count = len(container) if isinstance(container, dict) else len(parts)
            nbytes = items_nbytes(container, count) + (COPIED_NBYTES if stage == _MAKE else 0)
            if type(node) is Call and stage == _FILL:
                nbytes += STEP_NBYTES * len(node.steps)
            charge(1 + len(parts), nbytes)
        return iter(parts)

    late: list[Any] = []  # what contains a tuple that contains it
    if type(root) in _PLAIN:
        return root
    met.add(id(root))
    waiting = [(root, _MAKE, parts_of(root, _MAKE))]
    while waiting:
        node, stage, parts = waiting[-1]
        for part in parts:
            if type(part) not in _PLAIN and id(part) not in met:
                met.add(id(part))
                waiting.append((part, _MAKE, parts_of(part, _MAKE)))
                break
        else:
            waiting.pop()
            if stage == _MAKE:
                done[id(node)] = _made(node, new, replace)
                waiting.append((node, _FILL, parts_of(node, _FILL)))
            elif all(id(part) in done for part in _parts(node)[1] if type(part) not in _PLAIN):
                _fill(node, done[id(node)], new, give)
            else:
                late.append(node)
    for node in late:
        _fill(node, done[id(node)], new, give)
    return new(root)


def _made(node: Any, new: Callable[[Any], Any], replace: Callable[[Any], Any]) -> Any:
    if isinstance(node, _FILLED):
        return type(node)()
    if type(node) is frozenset:
        _check_keys(node, new)
    if type(node) in (tuple, frozenset):
        return type(node)(map(new, node))
    if type(node) is Call:
        function = new(node.function) if type(node.function) is Call else node.function
        node = Call(function, tuple(map(new, node.args)), node.how)
    elif type(node) is TensorRef and node.attributes is not None:
        node = replaced(node, attributes=new(node.attributes))
    return replace(node)


def _check_keys(keys: Iterable[Any], new: Callable[[Any], Any]) -> None:
    """Refuse keys of which what they became takes long to hash, or to find among the others."""
    hashes: Counter[int] = Counter()
    for key in keys:
        if type(key) in _HASHED_WITH_SEED or (type(key) is int and -LARGEST_KEY < key < LARGEST_KEY):
            continue
        left = _MOST_IN_KEY
        waiting = [key]
        while waiting:
            left -= 1
            parts = _children(waiting.pop())
            if len(parts) > left:
                raise ValueError(f"a key of type {type(key).__name__} with more than {_MOST_IN_KEY} parts")
            waiting += parts
        found = hash(new(key))
        hashes[found] += 1
        if hashes[found] > _MOST_OF_ONE_HASH:
            raise ValueError(f"more than {_MOST_OF_ONE_HASH} keys with the same hash")


def _fill(node: Any, target: Any, new: Callable[[Any], Any], give: Any) -> None:
    if type(node) is Call:
        keys = {"pairs": slice(None, None, 2), "members": slice(None)}
        _check_keys([key for kind, values in node.steps if kind in keys for key in values[keys[kind]]], new)
        steps = [(kind, list(map(new, values))) for kind, values in node.steps]
        attributes = {key: new(value) for key, value in vars(node).items()}
        if type(target) is Call:
            target.steps += steps
            vars(target).update(attributes)
        elif give is not None:
            give(node, target, attributes, steps)
    elif isinstance(node, list):
        target.extend(map(new, node))
    elif isinstance(node, dict):
        _check_keys(node, new)
        if _PLAIN.issuperset(map(type, node)) and _PLAIN.issuperset(map(type, node.values())):
            target.update(node)
        else:
            for key, value in node.items():
                target[new(key)] = new(value)
    elif isinstance(node, set):
        _check_keys(node, new)
        target.update(map(new, node))
    if isinstance(node, (dict, argparse.Namespace)) and hasattr(node, "__dict__"):
        vars(target).update((key, new(value)) for key, value in vars(node).items())


def _too_entangled(found: str) -> UnsupportedError:
    problem = "this file holds objects whose nesting cannot be walked through"
    expected = f"a tree of containers, at most {_MOST_DEPTH} deep"
    return UnsupportedError(problem, expected=expected, found=found, remedy=OTHER_FORM)
