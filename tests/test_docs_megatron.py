"""The code that ``docs/megatron.md`` shows does what it says there."""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ckpt import uninstall
from elastic_ckpt.config import CONFIG_KEY, ElasticConfig, flags, read_config

PAGE = (Path(__file__).parents[1] / "docs" / "megatron.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    flags.clear()
    yield
    flags.clear()
    uninstall()


def block(language: str, number: int = 0) -> str:
    return PAGE.split(f"```{language}\n")[number + 1].split("```")[0]


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_the_config_of_megatron_deepspeed_keeps_its_checkpoint_section(
    given: bool, as_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {"train_batch_size": 8, "checkpoint": {"tag_validation": "Fail"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    held = str(tmp_path / "ds.json") if as_file else config
    args = argparse.Namespace(deepspeed_config=held, universal_checkpoint=given)
    megatron = types.ModuleType("megatron")
    megatron.get_args = lambda: args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", megatron)
    shown: dict[str, Any] = {}
    exec(block("python"), shown)
    made = shown["_create_ds_config_dict"]()
    asked = {"checkpoint": {"tag_validation": "Fail", "load_universal": True}}
    assert made == ({**config, **asked} if given else config)
    assert args.deepspeed_config is None


def test_the_options_shown_are_those_of_the_ready_config() -> None:
    ready = json.loads((Path(__file__).parents[1] / "configs" / "megatron_3d.json").read_text())
    assert json.loads(block("json"))[CONFIG_KEY] == ready[CONFIG_KEY]
    assert isinstance(read_config(ready), ElasticConfig)
