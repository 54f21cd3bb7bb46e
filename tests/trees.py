"""Trees of files in a form that ``==`` compares: types, structure, attributes, and every bit of every tensor."""

from __future__ import annotations

from typing import Any

import torch

from tests.formats.test_pickled import spelled_out


def described(node: Any) -> Any:
    """The form of a tree."""
    if isinstance(node, dict):
        return type(node), [(described(key), described(value)) for key, value in node.items()], _attributes(node)
    if isinstance(node, (list, tuple)):
        return type(node), [described(value) for value in node]
    if isinstance(node, (torch.Tensor, set, type)) or not _attributes(node):
        return spelled_out(node)
    return type(node), _attributes(node)


def _attributes(node: Any) -> list[Any]:
    return [(key, described(value)) for key, value in sorted(getattr(node, "__dict__", {}).items())]
