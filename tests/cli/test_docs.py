"""``elastic-ckpt docs``: pages as a terminal, a pipe and a program see them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.tools.documentation import page_titles, topic_text
from tests.hostile_text import controls_in
from tests.source import texts_in

WIDTH = 80
PACKAGE = Path(elastic_ckpt.__file__).parent


def docs(*arguments: str, columns: str | None = None) -> Result:
    return CliRunner().invoke(app, ["docs", *arguments], env={"COLUMNS": columns, "FORCE_COLOR": None})


def test_without_a_topic_it_lists_the_pages_with_a_line_each() -> None:
    shown = docs()
    assert shown.exit_code == 0
    heading, columns, *lines = shown.stdout.splitlines()
    assert "elastic-ckpt docs TOPIC" in heading and columns.split() == ["topic", "title"]
    assert [line.split()[0] for line in lines] == list(page_titles())
    assert [line.split()[1] for line in lines if "troubleshooting" in line] == ["Troubleshooting"]
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("topic", page_titles())
def test_a_page_fits_the_width_and_keeps_lines_of_code_whole(topic: str) -> None:
    shown = docs(topic)
    assert shown.exit_code == 0 and controls_in(shown.stdout, but="\n") == [] and "…" not in shown.stdout
    code = re.findall(r"^```\w*\n(.*?)^```$", topic_text(topic), re.MULTILINE | re.DOTALL)
    written = {f"    {line}" if line.strip() else line for block in code for line in block.splitlines()}
    printed = set(shown.stdout.splitlines())
    assert written <= printed
    assert [line for line in printed - written if len(line) > WIDTH] == []


def test_a_terminal_has_its_own_width() -> None:
    lines = docs("troubleshooting", columns="120").stdout.splitlines()
    assert WIDTH < max(map(len, lines)) <= 120


def test_long_words_in_tables_are_folded_and_not_cut() -> None:
    assert "…" not in docs("commands", columns="40").stdout


def test_a_section_is_shown_alone_as_json_too() -> None:
    shown = docs("troubleshooting#layouterror").stdout
    assert shown.lstrip().startswith("LayoutError") and "Troubleshooting" not in shown
    told = json.loads(docs("troubleshooting#layouterror", "--json").stdout)
    assert told["text"].startswith("### LayoutError\n")
    assert json.loads(docs("--json").stdout)["pages"]["troubleshooting"] == "Troubleshooting"


def test_a_note_says_its_kind() -> None:
    assert "> **Warning:** The engine is partly overwritten." in topic_text("troubleshooting#partialloaderror")


def test_an_unknown_topic_is_wrong_usage_and_names_the_nearest() -> None:
    found = docs("trouble\x1b[31mshooting")
    assert found.exit_code == 2 and controls_in(found.output, but="\n") == []
    told = json.loads(docs("trubleshooting", "--json").stdout)
    assert told["error"] == "UsageError" and "The nearest: troubleshooting" in told["problem"]
    assert "All pages: elastic-ckpt docs" in json.loads(docs("xyzzyqq", "--json").stdout)["problem"]


def test_every_topic_that_the_package_names_can_be_opened() -> None:
    """Errors are read where the package is installed, and the repository is not at hand."""
    texts = [text for path in PACKAGE.rglob("*.py") for text in texts_in(path.read_text(encoding="utf-8"))]
    topics = {topic for text in texts for topic in re.findall(r"elastic-ckpt docs ([a-z][\w#-]*)", text)}
    assert {"troubleshooting", "compatibility"} <= topics
    for topic in topics:
        assert docs(topic).exit_code == 0, topic
    assert [text for text in texts if re.search(r"\bdocs/[\w-]+\.md\b", text)] == []
