"""Remedies that name arguments of ``load_checkpoint`` are in the words of the framework that makes the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastic_ckpt.errors import NOT_STRICT, WEIGHTS_ALONE, WITHOUT_STATES, Remedy
from elastic_ckpt.load.framework_arguments import calling_framework, in_words_of

STRICT, STATES, ALONE = NOT_STRICT, WITHOUT_STATES, WEIGHTS_ALONE


def caller_in(module: str, function: Callable[[], Any] = calling_framework) -> Callable[[], Any]:
    """A function of a module of that name, which calls another and returns what it returns."""
    namespace: dict[str, Any] = {"__name__": module, "function": function}
    exec("def call():\n    return function()", namespace)
    call: Callable[[], Any] = namespace["call"]
    return call


@pytest.mark.parametrize(
    ("module", "remedy", "words"),
    [
        ("lightning.fabric.strategies.deepspeed", STRICT, "fabric.load(path, state, strict=False)"),
        ("lightning_fabric.strategies.deepspeed", STATES, "a state that lacks the optimizer"),
        ("lightning.fabric.strategies.deepspeed", ALONE, "fabric.strategy.model.load_checkpoint"),
        ("lightning.pytorch.strategies.deepspeed", STRICT, "strict_loading = False"),
        ("pytorch_lightning.strategies.deepspeed", STATES, "deepspeed_engine.load_checkpoint(path, ...)"),
        ("transformers.integrations.deepspeed", STATES, "trainer.deepspeed.load_checkpoint(folder, ...)"),
        ("accelerate.accelerator", STATES, "accelerator.load_state(folder, ...)"),
    ],
)
def test_arguments_are_given_as_the_framework_takes_them(module: str, remedy: Remedy, words: str) -> None:
    between = caller_in("deepspeed.utils.nvtx", caller_in("contextlib"))
    for framework in (caller_in(module)(), caller_in(module, between)()):
        assert words in in_words_of(framework, [remedy])
        assert in_words_of(framework, [Remedy(config={"verify": "bytes"})]) == ""


@pytest.mark.parametrize("module", ["__main__", "train", "lightning.fabricated"])
def test_a_users_own_call_needs_no_other_words(module: str) -> None:
    """Also in a callback that a framework's loop calls."""
    assert caller_in(module)() is None
    assert caller_in("lightning.pytorch.trainer", caller_in(module))() is None
