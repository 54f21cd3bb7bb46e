"""Bounds on what a pickle built, and walks through it."""

from __future__ import annotations

import argparse
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive.stand_ins import ArrayStandIn, DtypeStandIn, StandIn
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.torch_archive.tensors import StorageRef
from elastic_ckpt.formats.torch_archive.unpickler import Global

#: Deepest nesting of containers, and how many objects a walk may meet per object that there is: shared objects are met
#: again and again, and a few dozen lists can hold each other 2 ** 60 times.
_MOST_DEPTH, _MOST_REPEATED = 128, 64
_PLAIN = frozenset({str, bool, int, float, complex, bytes, type(None)})
_LEAVES = _PLAIN | {TensorRef, bytearray, Global, ArrayStandIn, DtypeStandIn, StorageRef}


def check_tree(tree: Any) -> None:
    """Raise :class:`UnsupportedError` for a tree that is too deep, contains itself, shares a lot, or hides tensors."""
    if type(tree) in _LEAVES:
        return
    sizes: dict[int, int] = {}
    kept: list[Any] = []  # so that no id is used twice
    met = _size(tree, sizes, kept, 0)
    if met > 1000 + _MOST_REPEATED * sum(1 + len(each) for each in kept):
        raise _too_entangled(f"{met} objects, most of them again and again")


def _size(node: Any, sizes: dict[int, int], kept: list[Any], depth: int) -> int:
    """Objects that a walk through a container meets."""
    known = sizes.get(id(node))
    if known is not None:
        if not known:
            raise _too_entangled(f"a {type(node).__name__} that contains itself")
        return known
    if depth > _MOST_DEPTH:
        raise _too_entangled(f"objects {depth} deep in each other")
    children = _children(node)
    sizes[id(node)] = 0
    kept.append(children)
    size = 1 + len(children)
    for child in children:
        if type(child) not in _LEAVES:
            size += _size(child, sizes, kept, depth + 1)
    sizes[id(node)] = size
    return size


def _children(node: Any) -> list[Any] | tuple[Any, ...]:
    if type(node) is StandIn:  # first what there are most of
        return [*node.args, *vars(node).values()]
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, dict):
        keys = [key for key in node if type(key) is not str]
        return [*keys, *node.values(), *(vars(node).values() if hasattr(node, "__dict__") else ())]
    if isinstance(node, argparse.Namespace):
        return list(vars(node).values())
    _refuse_hidden_tensors(node)
    return list(node) if isinstance(node, (set, frozenset)) else ()


def replace_leaves(node: Any, replace: Callable[[Any], Any], copies: dict[int, Any] | None = None) -> Any:
    """Copy a tree that :func:`check_tree` accepted, passing every leaf through ``replace``.

    What was shared is shared again. Keys and attributes are copied too; a stand-in passes through ``replace`` with its
    own parts replaced. ``copies``: of the nodes that were met, by ``id``.
    """
    copies = {} if copies is None else copies
    if type(node) in _PLAIN:
        return replace(node)
    if id(node) not in copies:
        copies[id(node)] = _copied(node, replace, lambda child: replace_leaves(child, replace, copies))
    return copies[id(node)]


def _copied(node: Any, replace: Callable[[Any], Any], child: Callable[[Any], Any]) -> Any:
    if isinstance(node, dict):
        new = copy.copy(node)  # keeps what a subclass adds: an order, a default factory
        new.clear()
        for key, value in node.items():
            new[key if type(key) in _PLAIN else child(key)] = child(value)
        if hasattr(node, "__dict__"):
            vars(new).update((key, child(value)) for key, value in vars(node).items())
        return new
    if type(node) in (list, tuple, set, frozenset):
        return type(node)(map(child, node))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*map(child, node))
    if isinstance(node, argparse.Namespace):
        return type(node)(**{key: child(value) for key, value in vars(node).items()})
    if isinstance(node, StandIn):
        stand_in = StandIn(node.name, tuple(map(child, node.args)), node.is_by_name)
        vars(stand_in).update((key, child(value)) for key, value in vars(node).items())
        return replace(stand_in)
    return replace(node)


class _TensorSeeker(pickle.Pickler):
    """Pickles an object to nowhere, to find out whether it contains a tensor."""

    found = False

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, TensorRef):
            return None
        self.found = True
        return 0  # stands for the tensor, which need not be pickled then


def _refuse_hidden_tensors(leaf: Any) -> None:
    """Refuse a tensor inside an object of an unknown class, which would stay without data."""
    seeker, failure = _TensorSeeker(io.BytesIO()), None
    try:
        seeker.dump(leaf)
    except Exception as error:
        failure = error
    if seeker.found:
        raise UnsupportedError(
            "this file holds a tensor inside an object that cannot be read piece by piece",
            expected="tensors in dicts, lists, tuples, or argparse.Namespace",
            found=type(leaf).__name__,
            remedy="keep the tensor in a dict, or load at the topology it was saved with",
        ) from failure
    if failure is not None:
        raise UnsupportedError(
            "this file holds an object that cannot be looked into for tensors",
            found=f"{type(leaf).__name__}; {type(failure).__name__}: {failure}",
            remedy="leave it out of the client state, or load at the topology it was saved with",
        ) from failure


def _too_entangled(found: str) -> UnsupportedError:
    return UnsupportedError(
        "this file holds objects whose nesting cannot be walked through",
        expected=f"a tree of containers, at most {_MOST_DEPTH} deep",
        found=found,
        remedy="leave such objects out of the client state, or load at the topology it was saved with",
    )
