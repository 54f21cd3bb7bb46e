"""The README says what the code does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from elastic_ckpt import ElasticConfig, add_arguments
from elastic_ckpt.config import CONFIG_KEY, clear_flags, read_config

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", ElasticConfig.model_fields)
def test_every_option_is_listed_with_its_default(key: str) -> None:
    default = json.dumps(ElasticConfig.model_fields[key].default)
    assert f"| `{key}` | `{default}` |" in README


def test_no_option_is_listed_that_does_not_exist() -> None:
    table = README.split("| key | default | meaning |")[1].split("\n\n")[0]
    listed = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert listed == list(ElasticConfig.model_fields)


def test_every_flag_is_listed() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    for action in parser._actions:
        assert f"`{action.option_strings[0]}" in README


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.json")), ids=lambda path: path.name)
def test_the_ready_configs_are_understood(path: Path) -> None:
    clear_flags()
    config = json.loads(path.read_text(encoding="utf-8"))
    assert CONFIG_KEY in config
    assert read_config(config).mode == "auto"
