"""Remedies of errors as commands give them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import elastic_ckpt
from elastic_ckpt.formats.torch_archive.calls import unsafe_error
from elastic_ckpt.tools.remedies import EXPORT, of_command

TRUST = "if you trust whoever wrote the file: --trust-pickle"


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        ("take another tag", "take another tag"),
        ("restore it, take another tag, or load with load_optimizer_states=False", f"restore it, take another tag; {EXPORT}"),
        ("load its weights alone: load_optimizer_states=False, or load_module_only=True", EXPORT),
        ("load_optimizer_states=False, or load at its topology", f"load at its topology; {EXPORT}"),
        ('"states": {"a": "fresh"}; load_optimizer_states=False does; or wait', f'"states": {{"a": "fresh"}}; or wait; {EXPORT}'),
        ('"elastic_checkpoint": {"tp_preset": "megatron-core"}, or wait', "--preset megatron-core, or wait"),
        (str(unsafe_error("x").remedy), TRUST),
        ("use another; a class: torch.serialization.add_safe_globals([TheClass])", "use another"),
    ],
)  # fmt: skip
def test_they_are_of_the_command_line(remedy: str, expected: str) -> None:
    assert of_command(remedy) == expected


def test_a_command_that_has_nothing_instead_says_nothing_of_it() -> None:
    assert of_command("load_module_only=True", "") == "take another tag"
    assert of_command("wait; load_module_only=True", "--weights-only") == "wait; --weights-only"


def test_no_remedy_of_the_package_keeps_an_argument_of_a_load() -> None:
    """Every text in the code that may be a remedy or part of one."""
    texts = {
        node.value
        for path in Path(elastic_ckpt.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "load_" in node.value
    }
    assert len([text for text in texts if "load_optimizer_states=" in text]) > 10
    for text in texts:
        found = of_command(text)
        assert "load_optimizer_states=" not in found and "load_module_only=" not in found, text
