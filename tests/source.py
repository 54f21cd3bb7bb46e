"""Source as Python reads it: a guard that searches for a word must not be satisfied by a comment."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from elastic_ckpt.engines.versions import Privates


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


@cache
def parameters_in(code: str) -> dict[str, list[list[str]]]:
    """Parameters of each function that code defines, without ``self``; more than one if the name is reused."""
    found: dict[str, list[list[str]]] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef):
            names = [each.arg for each in node.args.args]
            found.setdefault(node.name, []).append(names[1:] if names[:1] == ["self"] else names)
    return found


def missing(listed: Privates) -> list[str]:
    """Private names of DeepSpeed that the sources of the installed version lack, or that take other parameters."""
    try:
        module = importlib.import_module(f"deepspeed.{listed.module}")
        code = code_of(getattr(module, listed.owner) if listed.owner else module)
    except (ImportError, AttributeError):
        return [f"deepspeed.{listed.module}{listed.owner and '.'}{listed.owner}"]
    found, functions, lacking = names_in(code), parameters_in(code), []
    for name in listed.names:
        plain, is_function, asked = name.removesuffix(")").partition("(")
        wanted = [each for each in asked.split(",") if each]
        fits = not is_function or any(has[: len(wanted)] == wanted for has in functions.get(plain, ()))
        if plain not in found or not fits:
            lacking.append(f"{listed.owner or listed.module}.{name}")
    return lacking
