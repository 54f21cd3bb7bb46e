"""``docs/getting-started.md`` lists what ``install()`` wraps, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import elastic_ckpt.load.hook  # noqa: F401
from elastic_ckpt import install, uninstall
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.patches import wrap
from tests.blocks import REPO

PAGE = (REPO / "docs" / "getting-started.md").read_text(encoding="utf-8")
SECTION, _, SWITCHES = PAGE.partition("\n## What `install()` changes\n")[2].partition("\n### Turn it off\n")
#: How the table names what it does not name as ``Class.method``.
NAMED_OTHERWISE = {
    "Init.__init__": "`deepspeed.zero.Init`",
    "Init.__enter__": "`deepspeed.zero.Init`",
    "load_state_dict": "`load_state_dict` of torch's lr schedulers",
}


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of all that an ``install()`` wraps, by their class or module."""
    found: set[str] = set()

    def record(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        found.add(f"{owner.__name__}.{name}")
        wrap(owner, name, wrapper)

    uninstall()
    for name, module in list(sys.modules.items()):
        if name.startswith("elastic_ckpt.") and getattr(module, "wrap", None) is wrap and name != wrap.__module__:
            monkeypatch.setattr(module, "wrap", record)
    install()
    yield found
    uninstall()


def test_the_table_has_all_that_is_wrapped_at_once(wrapped: set[str]) -> None:
    assert len(wrapped) > 10
    for name in wrapped:
        shown = NAMED_OTHERWISE.get(name) or NAMED_OTHERWISE.get(name.rpartition(".")[2]) or f"`{name}`"
        assert shown in SECTION, name


def test_switches_are_options_that_exist() -> None:
    for option in ("mode", "pretrained", "sheet", "verify"):
        assert f'`"{option}": ' in SWITCHES and option in ElasticConfig.model_fields
