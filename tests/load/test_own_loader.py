"""What DeepSpeed's own loader raises is named as that, and its cause is kept."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ckpt.engines import compat
from elastic_ckpt.errors import DamagedError, PartialLoadError
from elastic_ckpt.load.own_loader import load_by_deepspeed


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compat, "universal_flag", lambda *_: nullcontext())
    monkeypatch.setattr(compat, "replaced_loads", lambda *_: nullcontext())
    config = SimpleNamespace(trust_pickle=False)
    return SimpleNamespace(engine=None, config=config, arguments=SimpleNamespace(load_dir="folder"))


def test_what_it_returns_is_returned(call: Any) -> None:
    assert load_by_deepspeed(call, False, lambda: ("path", {})) == ("path", {})


def test_what_it_raises_is_its_failure_and_no_collectives(call: Any) -> None:
    raised = KeyError("a name")

    def own() -> None:
        raise raised

    with pytest.raises(PartialLoadError, match="DeepSpeed's own loader failed: KeyError: 'a name'") as caught:
        load_by_deepspeed(call, False, own)
    assert caught.value.__cause__ is raised and caught.value.file == "folder"
    assert "collective" not in str(caught.value)


def test_an_error_of_the_reader_stays_what_it_is(call: Any) -> None:
    def own() -> None:
        raise DamagedError("the file is cut", "folder/file")

    with pytest.raises(DamagedError, match="the file is cut"):
        load_by_deepspeed(call, False, own)
