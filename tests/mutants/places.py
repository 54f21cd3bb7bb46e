"""Where a module can be changed, and how: one operator, comparison, constant, condition or result each. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
#: What has no effect on what a program does, or no positions of its own.
_LEFT_OUT = (ast.JoinedStr, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        module: path of its file in the repository.
        line, column: where the change begins; the column in bytes of UTF-8, from 0.
        end_line, end_column: where it ends.
        before, after: the code there.
    """

    module: str
    line: int
    column: int
    end_line: int
    end_column: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  ->  {self.after}"

    def applied_to(self, code: str) -> str:
        """The code of the module with the change."""
        lines = code.encode().splitlines(keepends=True)
        head = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        tail = lines[self.end_line - 1][self.end_column :] + b"".join(lines[self.end_line :])
        return (head + self.after.encode() + tail).decode()


def mutants_of(module: str, code: str) -> list[Mutant]:
    """All changes of functions of a module, in the order of the code."""
    found = []
    for function in _functions(ast.parse(code)):
        for statement in _statements(function):
            for node in _nodes(statement):
                for after in _changed(node):
                    before = ast.get_source_segment(code, node)
                    assert before is not None and node.end_lineno is not None and node.end_col_offset is not None
                    place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
                    found.append(Mutant(module, *place, " ".join(before.split()), after))
    return found


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Outermost ones, and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif not isinstance(node, ast.expr):
            yield from _functions(node)


def _statements(function: ast.FunctionDef) -> list[ast.stmt]:
    """Its body without the docstring, decorators and signature."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """What may be changed below a node, itself included."""
    if isinstance(node, _LEFT_OUT):
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    if isinstance(node, ast.FunctionDef):
        for statement in _statements(node):
            yield from _nodes(statement)
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.pattern):
            yield from _nodes(child)


def _changed(node: ast.expr | ast.stmt) -> list[str]:
    """The code of each change of one node, without what is below it."""
    if isinstance(node, ast.Constant):
        return _other_constants(node.value)
    if isinstance(node, ast.Return):
        return ["return None"] if node.value is not None and not isinstance(node.value, ast.Constant) else []
    other = _other_operator(node)
    return [f"({ast.unparse(other)})"] if other is not None else []


def _other_operator(node: ast.expr | ast.stmt) -> ast.expr | None:
    """The same expression with another operator."""
    if isinstance(node, ast.Compare):
        return _with_other_comparison(node)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node):
        return ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return ast.BoolOp(other, node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return None


def _with_other_comparison(node: ast.Compare) -> ast.Compare:
    """The last of a chain is another one."""
    return ast.Compare(node.left, [*node.ops[:-1], _COMPARISONS[type(node.ops[-1])]()], node.comparators)


def _other_constants(value: object) -> list[str]:
    if isinstance(value, bool):
        return [repr(not value)]
    if isinstance(value, int):
        return [repr(value + 1)]
    if isinstance(value, float):
        return [repr(value + 1.0)]
    return []  # texts are read by people, and names of others' attributes fail at once


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(each, ast.JoinedStr) or _is_string(each) for each in (node.left, node.right))


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
