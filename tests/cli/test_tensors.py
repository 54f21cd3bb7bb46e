"""What ``elastic-ckpt explain`` says in words of what it has found."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app, tensors
from elastic_ckpt.tools.explain import Explanation


@pytest.mark.parametrize(("steps", "words"), [((60,), "at step 60"), ((20, 40), "at steps 20, 40")])
def test_steps_are_counted(steps: tuple[int, ...], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensors, "explain_runs", lambda *_: Explanation(steps))
    result = CliRunner().invoke(app, ["explain", str(tmp_path), str(tmp_path)])
    assert result.stdout.splitlines()[0] == f"nothing deviates {words}"
