"""Where elastic_ckpt makes remedies that a program can follow, found in its source, and which of them ran."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import elastic_ckpt
from elastic_ckpt.errors import Remedy

ROOT = Path(elastic_ckpt.__file__).parent
#: Fields of a remedy that a program can follow.
_DATA = ("config", "arguments", "command")
#: The keys of each remedy in a constant, by its module and its name; and those that one module knows.
Constants = dict[tuple[Path, str], frozenset[frozenset[str]]]
Names = dict[str, frozenset[frozenset[str]]]


@dataclass(frozen=True)
class Site:
    """A remedy in the source.

    Attributes:
        function: of the module, with its path below the package.
        keys: of the config and the arguments, as far as the source has them; else the fields that have some.
        file, lines: where it is.
    """

    function: str
    keys: frozenset[str]
    file: str
    lines: range

    @property
    def name(self) -> str:
        """For the table of reasons: free of line numbers."""
        return f"{self.function}: {', '.join(sorted(self.keys))}"

    def is_among(self, remedies: Iterable[Remedy]) -> bool:
        """Whether one of some remedies has its keys."""
        return any(self.keys <= _keys_of(remedy) for remedy in remedies)


def _keys_of(remedy: Remedy) -> set[str]:
    filled = {field for field in _DATA if getattr(remedy, field)}
    return {*remedy.config, *remedy.arguments, *filled}


@cache
def sites() -> tuple[Site, ...]:
    """All of the package."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    constants: Constants = {}
    before = -1
    while before != len(constants):  # one may be made of others
        before = len(constants)
        for path, tree in trees.items():
            names = _names_of(path, tree, constants)
            for node in (node for node in tree.body if isinstance(node, ast.Assign)):
                found = frozenset(keys for each in ast.walk(node.value) for keys in _data_of(each, names))
                if found:
                    constants |= {(path, t.id): found for t in node.targets if isinstance(t, ast.Name)}
    return tuple(
        site for path, tree in trees.items() for site in _sites_of(path, tree, (), _names_of(path, tree, constants))
    )


def _names_of(path: Path, tree: ast.Module, constants: Constants) -> Names:
    """The constants that a module has or imports, by its names for them."""
    found = {name: keys for (where, name), keys in constants.items() if where == path}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("elastic_ckpt"):
            continue
        folder = ROOT.joinpath(*str(node.module).split(".")[1:])
        for alias in node.names:
            if (keys := constants.get((folder.with_suffix(".py"), alias.name))) is not None:
                found[alias.asname or alias.name] = keys
            of_module = folder / f"{alias.name}.py"
            found |= {f"{alias.name}.{name}": keys for (where, name), keys in constants.items() if where == of_module}
    return found


def _sites_of(path: Path, node: ast.AST, scope: tuple[str, ...], names: Names) -> Iterator[Site]:
    for child in ast.iter_child_nodes(node):
        for keys in _data_of(child, names) if scope else ():
            function = f"{path.relative_to(ROOT)} {'.'.join(scope)}"
            yield Site(function, keys, str(path), range(child.lineno, child.end_lineno + 1))
        is_scope = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        yield from _sites_of(path, child, (*scope, child.name) if is_scope else scope, names)


def _data_of(node: ast.AST, names: Names) -> Iterator[frozenset[str]]:
    """The keys of each remedy that an expression makes, or names; nothing for one that only a person can follow."""
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        yield from names.get(ast.unparse(node), ())
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "Remedy":
        return
    given = {each.arg: each.value for each in node.keywords if each.arg in _DATA}
    keys = set[str]()
    for field, value in given.items():
        written = [key.value for key in getattr(value, "keys", ()) if isinstance(key, ast.Constant)]
        keys |= set(written) or {field}
    if keys:
        yield frozenset(keys)


@contextmanager
def noted() -> Iterator[set[Site]]:
    """The sites whose lines run in the body, on any thread."""
    found: set[Site] = set()
    by_file: dict[str, list[Site]] = {}
    for site in sites():
        by_file.setdefault(site.file, []).append(site)

    def enter(frame: FrameType, _event: str, _arg: Any) -> Any:
        return run if frame.f_code.co_filename in by_file else None

    def run(frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            found.update(site for site in by_file[frame.f_code.co_filename] if frame.f_lineno in site.lines)
        return run

    before = sys.gettrace()
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(None)
