"""What README and documentation show runs as it is shown, and prints what their pictures show."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.blocks import REPO, blocks

IMAGES = REPO / "docs" / "images"
#: Commands that end with something else than 0 say so: ``# ends with 1``.
_ENDS_WITH = re.compile(r"# ends with (\d)")
SHELL = [block for block in blocks("bash") if block.not_run is None]
PYTHON = [block for block in blocks("python") if block.not_run is None]


def terminal() -> Any:
    """The script docs/terminal.py, as a module."""
    spec = importlib.util.spec_from_file_location("terminal", REPO / "docs" / "terminal.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def environment(extensions_dir: str) -> dict[str, str]:
    return terminal().terminal_environment(TORCH_EXTENSIONS_DIR=extensions_dir)


@pytest.fixture(scope="module")
def drawn(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder in which docs/terminal.py has run, and its pictures."""
    folder = tmp_path_factory.mktemp("docs")
    return folder, terminal().pictures(folder, environment)


@pytest.fixture
def folder(drawn: tuple[Path, dict[str, str]], tmp_path: Path) -> Path:
    """A folder with ``checkpoints`` and ``damaged``, as the pages speak of."""
    for name in ("checkpoints", "damaged"):
        shutil.copytree(drawn[0] / name, tmp_path / name)
    return tmp_path


def words_of(picture: str, folder: str) -> str:
    """What can be read in a picture, without what differs from run to run: folders, seconds, checksums, blanks."""
    text = "".join(each.text or "" for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("}text"))
    text = re.sub(r"[\s│┃─━┏┓┗┛┌┐└┘├┤┬┴┼┡┩╇┳┻]", "", text)
    return re.sub(r"0x[0-9a-f]{8}|\d+\.\d+", "#", text.replace(folder, ""))


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(path.stem for path in IMAGES.glob("*.svg")))
def test_pictures_show_what_is_printed(name: str, drawn: tuple[Path, dict[str, str]]) -> None:
    """``python docs/terminal.py`` draws them anew."""
    folder, pictures = drawn
    shown = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert words_of(shown, "/tmp/demo") == words_of(pictures[name], str(folder))


def test_every_picture_is_shown() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (REPO / "docs").glob("*.md"))
    assert {path.stem for path in IMAGES.glob("*.svg")} == set(re.findall(r"\(images/(\w+)\.svg\)", pages))


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL}), ids=lambda page: page.stem)
def test_commands_run(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """One after the other: some use what others have written."""
    for command in (command for block in SHELL if block.page == page for command in block.commands()):
        ends_with = int(match[1]) if (match := _ENDS_WITH.search(command)) else 0
        code, printed = run(shlex.split(command, comments=True), folder, environment)
        assert code == ends_with, f"{command}\n{printed}"


def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_python_runs(folder: Path, environment: dict[str, str]) -> None:
    """In one job, each beside a live engine that has just loaded a checkpoint."""
    (folder / "blocks.json").write_text(json.dumps([[block.where, block.text] for block in PYTHON]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    script = str(Path(__file__).with_name("docs_script.py"))
    code, printed = run([*launcher, script, "blocks.json"], folder, environment)
    assert code == 0, printed[-6000:]
    assert f"executed {len(PYTHON)} blocks" in printed and len(PYTHON) >= 6
