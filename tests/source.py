"""Source as Python reads it: a guard that searches for a word must not be satisfied by a comment."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from elastic_ckpt.engines.privates import names_in

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
