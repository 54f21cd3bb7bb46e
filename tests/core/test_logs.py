"""Records of the package's loggers are printable, whoever handles them."""

from __future__ import annotations

import ast
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import elastic_ckpt
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.errors import DamagedError
from tests.hostile_text import HOSTILE, controls_in, hostile_texts

PACKAGE = Path(elastic_ckpt.__file__).parent
LOGGER = logger_of("elastic_ckpt.tests")


def logged(message: str, *arguments: Any, **options: Any) -> str:
    """What a handler of the root logger prints of a record, with its traceback."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    logging.getLogger().addHandler(handler)
    try:
        LOGGER.warning(message, *arguments, **options)
    finally:
        logging.getLogger().removeHandler(handler)
    return out.getvalue()


class Odd:
    """What prints itself with control characters, and has no other text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


@given(hostile_texts)
def test_no_record_has_control_characters(text: str) -> None:
    for message, arguments in (
        ("%s and %r", (text, text)),
        ("%s of %d, %g s", (Odd(text), 3, 0.5)),
        ("%(name)s", ({"name": text},)),
        ("%s", (Path(text.replace("\0", "")),)),
        ("%s", (ValueError(text),)),
        ("%s", ([text, Odd(text)],)),
    ):
        shown = logged(message, *arguments)
        assert controls_in(shown.removesuffix("\n")) == [], message
        assert shown.count("\n") == 1


def test_arguments_that_are_numbers_and_errors_of_this_package_stay_what_they_are() -> None:
    assert logged("%05.1f of %d, %s: %s", 2.5, 7, True, None) == "002.5 of 7, True: None\n"
    error = DamagedError(f"torn{HOSTILE}", "/x", "whole")
    assert logged("elastic_ckpt: %s", error) == f"elastic_ckpt: {error}\n" and str(error).count("\n") == 4
    assert logged("no arguments, 100 %") == "no arguments, 100 %\n"


@given(hostile_texts)
def test_tracebacks_of_records_have_none_down_to_their_first_cause(text: str) -> None:
    try:
        try:
            raise OSError(5, text, text)
        except OSError as error:
            raise RuntimeError(f"{text}\n    and more") from error
    except RuntimeError:
        shown = logged("failed", exc_info=True)
    assert controls_in(shown, but="\n") == [] and "OSError" in shown and "RuntimeError" in shown


def test_a_logger_has_one_filter_however_often_it_is_asked_for() -> None:
    assert logger_of(LOGGER.name) is LOGGER and len(LOGGER.filters) == 1


def calls_of(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_all_loggers_and_consoles_are_those_that_make_text_printable() -> None:
    """And ``print`` is given what this file names: JSON, or what :func:`printable` has made."""
    wanted = {"logging.getLogger", "getLogger", "Console", "print", "sys.stderr.write", "sys.stdout.write", "warn"}
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in calls_of(path.read_text())
        if name in wanted or name.endswith("warnings.warn")
    }
    assert found == {
        "core/logs.py: logging.getLogger",
        "load/installation/_elastic_ckpt_startup.py: logging.getLogger",  # before any checkpoint, and importing nothing
        "load/publishing.py: Console",  # prints the report, whose text is printable
        "report.py: Console",  # the same
        "load/pretrained.py: print",  # of what printable() has made
        "ds_to_universal/__init__.py: print",  # the same
        "cli/__init__.py: print",  # the version, and JSON
        "cli/environment.py: print",  # paths of this installation
        "cli/output.py: print",  # JSON
        "run.py: print",  # usage
    }


def test_python_prints_an_uncaught_error_of_the_package_as_it_prints_itself(capsys: pytest.CaptureFixture[str]) -> None:
    error = DamagedError(f"torn{HOSTILE}", f"/x{HOSTILE}")
    sys.__excepthook__(type(error), error, None)
    assert controls_in(capsys.readouterr().err, but="\n") == []
