"""README and docs/ say what the code does."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from elastic_ckpt import ElasticConfig, add_arguments
from elastic_ckpt.cli import COMMANDS
from elastic_ckpt.config import CONFIG_KEY, clear_flags, read_config
from elastic_ckpt.engines.versions import REQUIREMENTS

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
GETTING_STARTED = (REPO / "docs" / "getting-started.md").read_text(encoding="utf-8")
PAGES = [path for folder in (".", "docs", "benchmarks") for path in sorted((REPO / folder).glob("*.md"))]


def reference() -> Any:
    """The script docs/reference.py, as a module."""
    spec = importlib.util.spec_from_file_location("reference", REPO / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_that_of_the_model() -> None:
    written = (REPO / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == reference().page(), "run python docs/reference.py"
    for key, field in ElasticConfig.model_fields.items():
        assert f"| `{key}` | `{json.dumps(field.default)}` |" in written


def test_the_page_of_commands_is_that_of_the_app() -> None:
    written = (REPO / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == reference().commands_page(), "run python docs/reference.py"
    assert all(f"## {name}\n" in written for name in COMMANDS)


def test_the_readme_is_short_and_begins_with_what_people_look_for() -> None:
    assert len(README.splitlines()) <= 170
    top = README[: README.index("## Install")]
    assert "bash launch/demo.sh" in top and "bash launch/test.sh" in top
    for requirement in REQUIREMENTS:
        assert f"![{requirement.supported}](" in top


def test_every_flag_is_listed() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    for action in (one for one in parser._actions if one.help != argparse.SUPPRESS):
        assert f"`{action.option_strings[0]}" in GETTING_STARTED


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.json")), ids=lambda path: path.name)
def test_the_ready_configs_are_understood(path: Path) -> None:
    clear_flags()
    config = json.loads(path.read_text(encoding="utf-8"))
    assert CONFIG_KEY in config
    assert read_config(config).mode == "auto"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8")):
        if target and "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_are_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([\w-]*)\)", page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
