"""README and docs/ say what the code does."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.utils import get_params_from_function

import elastic_ckpt
from elastic_ckpt import ElasticConfig, add_arguments
from elastic_ckpt.cli import COMMANDS
from elastic_ckpt.config import CONFIG_KEY, flags, read_config
from elastic_ckpt.engines.versions import REQUIREMENTS
from tests.blocks import PAGES, REPO, Block, blocks
from tests.source import texts_in

PACKAGE = REPO / "elastic_ckpt"
README = (REPO / "README.md").read_text(encoding="utf-8")
GETTING_STARTED = (REPO / "docs" / "getting-started.md").read_text(encoding="utf-8")


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
        default = "{}" if key == "reading" else json.dumps(field.default)
        assert written.count(f"\n### `{key}`\n\nDefault: `{default}`. ") == 1, (
            f"{key} is in no group of docs/reference.py"
        )


def test_the_page_of_commands_is_that_of_the_app() -> None:
    written = (REPO / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == reference().commands_page(), "run python docs/reference.py"
    assert all(f"## {name}\n" in written for name in COMMANDS)


def test_the_readme_is_short_and_begins_with_what_people_look_for() -> None:
    assert len(README.splitlines()) <= 120
    parts = (
        "Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported",
        "elastic_ckpt.install()",
        "**Maturity:**",
        "## Install",
        "pip install",
        "## Quickstart",
        "launch/demo.sh",
        "## Before and after",
    )
    assert [README.index(part) for part in parts] == sorted(README.index(part) for part in parts)
    for requirement in REQUIREMENTS:
        assert f"![{requirement}](" in README[: README.index("## Install")]
    assert f"**Maturity:** version {elastic_ckpt.__version__}." in README


def test_the_seconds_of_the_readme_are_those_that_were_measured() -> None:
    """The table of benchmarks is written from the results; the sentence in the README is not."""
    table = (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([\d.]+) \|", table, re.MULTILINE))
    loaders = ("elastic_ckpt, native", "DeepSpeed, universal", "DeepSpeed, conversion + universal")
    shown = re.search(r"loads on 4 in ([\d.]+) s\. DeepSpeed takes ([\d.]+) s .*? ([\d.]+) s with", README)
    assert shown is not None
    assert [float(seconds) for seconds in shown.groups()] == [round(float(rows[name]), 1) for name in loaders]


def test_the_error_that_is_shown_has_the_words_of_the_code() -> None:
    shown = README.split("```\nMixedSavesError: ")[1].split("```")[0]
    texts = "".join(text for path in PACKAGE.rglob("*.py") for text in texts_in(path.read_text(encoding="utf-8")))
    problem, remedy = shown.split("\n")[0], shown.split("remedy:    ")[1].split(': "elastic')[0]
    assert problem in texts and all(part in texts for part in re.split("; or |: ", remedy))


def test_every_flag_is_listed() -> None:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    for action in (one for one in parser._actions if one.help != argparse.SUPPRESS):
        assert f"`{action.option_strings[0]}" in GETTING_STARTED


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.json")), ids=lambda path: path.name)
def test_the_ready_configs_are_understood(path: Path) -> None:
    flags.clear()
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


PYTHON = [pytest.param(block, id=block.where) for block in blocks("python")]
SHELL = [pytest.param(block, id=block.where) for block in blocks("bash")]


def test_every_block_is_found_and_says_its_language() -> None:
    """What is printed, or drawn with letters, has none."""
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    found = blocks("python", "bash", "json", "")
    assert len(found) * 2 == fences
    assert [block.where for block in found if not block.language and block.text.startswith("$ ")] == []


@pytest.mark.parametrize("block", PYTHON)
def test_python_compiles_and_uses_public_names(block: Block) -> None:
    tree = ast.parse(textwrap.indent(block.text, "    ").join(("while True:\n", "\n")))  # for "break"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "elastic_ckpt":
            assert node.attr in (*elastic_ckpt.__all__, "megatron"), f"elastic_ckpt.{node.attr}"


@pytest.mark.parametrize("block", [pytest.param(block, id=block.where) for block in blocks("json")])
def test_json_is_a_config_that_is_understood(block: Block) -> None:
    flags.clear()
    assert read_config(json.loads(block.text))


@pytest.mark.parametrize("block", SHELL)
def test_scripts_and_options_of_shell_blocks_exist(block: Block) -> None:
    """Those that are not run too. What is run is in tests/distributed/test_docs.py."""
    for command in block.commands():
        words = shlex.split(command, comments=True)
        for script in (word for word in words if word.startswith(("launch/", "configs/"))):
            assert (REPO / script).is_file(), script
        if "elastic-ckpt" in words:
            words = words[words.index("elastic-ckpt") :]
            name = words[1]
            if name == "exec":
                words = words[: words.index("--")]  # then comes another command
            page = reference().commands_page().split(f"\n## {name}\n")[1].split("\n## ")[0]
            assert [word for word in words if word.startswith("--") and f"`{word.split('=')[0]}`" not in page] == []
        if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
            parameters = get_params_from_function(importlib.import_module(words[2]).main)
            options = {f"--{name.replace('_', '-')}" for name in parameters}
            assert {word for word in words if word.startswith("--")} <= options


def test_reasons_are_given_in_full() -> None:
    for block in blocks("python", "bash"):
        if block.not_run is not None:
            assert len(block.not_run) > 15
            for path in re.findall(r"tests/[\w/]+\.py", block.not_run):
                assert (REPO / path).is_file(), f"{block.where}: {path}"
