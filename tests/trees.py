"""Trees of files in a form that ``==`` compares: types, structure, attributes, and every bit of every tensor."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().to_dense().resolve_conj().clone(memory_format=torch.contiguous_format)
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


def spelled_out(node: Any) -> Any:
    """Types, structure and every bit of every tensor and array, in a form that ``==`` compares."""
    if type(node) in (torch.Tensor, torch.nn.Parameter):
        return type(node), node.dtype, node.layout, tuple(node.shape), bits(node)
    if isinstance(node, np.ndarray):
        return type(node), node.dtype, node.shape, node.tolist()
    if isinstance(node, dict):
        return type(node), [(key, spelled_out(value)) for key, value in node.items()]
    if type(node) in (list, tuple):
        return type(node), [spelled_out(value) for value in node]
    if isinstance(node, argparse.Namespace):
        return type(node), spelled_out(vars(node))
    return type(node), repr(node)


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
