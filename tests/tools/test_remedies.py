"""Remedies of errors as commands give them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_ckpt.errors import (
    AT_ITS_TOPOLOGY,
    ITS_OPTIMIZER,
    WEIGHTS_ALONE,
    WITHOUT_STATES,
    Remedy,
    UnsupportedError,
    remedy_text,
)
from elastic_ckpt.formats.torch_archive.calls import unsafe_error
from elastic_ckpt.tools.inspection import of_error
from elastic_ckpt.tools.remedies import EXPORT, of_command

TAG, WAIT = Remedy("use another tag"), Remedy("wait")
FRESH = Remedy(config={"states": {"a": "fresh"}})


@pytest.mark.parametrize(
    ("remedies", "expected"),
    [
        ((TAG,), "use another tag"),
        ((TAG, WITHOUT_STATES), f"use another tag; or {EXPORT}"),
        ((WITHOUT_STATES, WEIGHTS_ALONE), EXPORT),
        (ITS_OPTIMIZER, f"resume with the optimizer that saved it; or {EXPORT}"),
        ((WITHOUT_STATES, AT_ITS_TOPOLOGY), f"{AT_ITS_TOPOLOGY}; or {EXPORT}"),
        ((FRESH, WITHOUT_STATES), f"{FRESH}; or {EXPORT}"),
        ((Remedy(config={"tp_preset": "megatron-core"}), WAIT), "--preset megatron-core; or wait"),
        (unsafe_error("x").remedies, "if you trust whoever wrote the file: --trust-pickle"),
        ((WAIT, Remedy(code="torch.serialization.add_safe_globals([TheClass])")), "wait"),
        ((Remedy(arguments={"load_module_strict": False}),), "use another tag"),
        (
            (Remedy(arguments={"load_dir": "/my run", "tag": "step2"}),),
            "give the folder of a tag, which needs no --tag: '/my run/step2'",
        ),
    ],
)
def test_they_are_of_the_command_line(remedies: Sequence[Remedy], expected: str) -> None:
    found = of_command(remedies)
    assert remedy_text(found) == expected
    assert not any(each.arguments or each.code for each in found)


def test_a_command_that_has_nothing_instead_says_nothing_of_it() -> None:
    assert of_command([WEIGHTS_ALONE], "") == (TAG,)
    assert of_command([WAIT, WEIGHTS_ALONE], "--weights-only") == (WAIT, Remedy("--weights-only"))


def test_findings_have_them_too() -> None:
    error = UnsupportedError("it is not supported", remedy=(WAIT, WITHOUT_STATES))
    assert of_error(error).remedy == f"wait; or {EXPORT}"
    assert of_error(UnsupportedError("it is not supported", remedy=(WITHOUT_STATES,))).remedy == EXPORT
