"""Source as Python reads it: a guard that searches for a word must not be satisfied by a comment."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

__all__ = ["code_of", "names_in", "texts_in"]


@cache
def code_of(owner: Any) -> str:
    """The code of a class, function or module, without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_text(line)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def texts_in(code: str) -> list[str]:
    """Its strings, with those that are put together put together; what is formatted into them is left out."""
    tree = ast.parse(code)
    joined = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = []
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if id(node) not in joined else []
        texts.append(
            "".join(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        )
    return texts


@cache
def names_in(code: str) -> frozenset[str]:
    """What code defines, calls and touches: functions, fields, attributes, and their ends: ``b.c`` of ``a.b.c``."""
    return frozenset(name for node in ast.walk(ast.parse(code)) for name in _names_of(node))


def _names_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        parts = ast.unparse(node).split(".")
        yield from (".".join(parts[start:]) for start in range(len(parts)))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id
    elif isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
