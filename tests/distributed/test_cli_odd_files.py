"""Every command on folders in which something else is in the place of a file: an error that names it, at once."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.model import Setup
from tests.privileges import without_privileges

#: Seconds that a command may take on a busy machine: one that waits for a pipe waits for ever.
_MOST_SECONDS = 60
_SOURCES = {
    "ZeRO-1": "native/z1-fp32-adamw-dp2",
    "ZeRO-3": "native/z3-fp32-adamw-dp2",
    "without ZeRO": f"unpartitioned/{Setup(0, 'bf16').name}-dp2",
    "universal": "universal/z1-fp32-adamw-dp2",
}
FORMATS = (*_SOURCES, "dcp", "safetensors")


def bind(path: Path) -> None:
    """Make a socket; its path may be too long for one."""
    before = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(before)


#: What takes the place of a file, or of the tag's folder.
ODD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": bind,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a loop of links": lambda path: path.symlink_to(path.name),
    "no permission": lambda path: path.touch(0),
    "an empty file": Path.touch,
    "what is no text": lambda path: path.write_bytes(b"\xff\0" * 40),
}
COMMANDS = {
    "inspect": ("--params",),
    "plan": ("--dp", "3"),
    "verify": (),
    "verify --full": (),
    "latest": (),
    "diff": ("{whole}",),
    "export": ("{out}",),
    "export --optimizer": ("{out}",),
    "convert": ("{out}",),
    "convert --to dcp": ("{out}",),
}


@contextmanager
def alarm() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(command: str, folder: Path, whole: Path) -> Result:
    """Run a command in this process, as a user without privileges; what it writes is removed."""
    out = folder.with_name("out")
    name, *options = command.split()
    with alarm(), without_privileges():
        words = [word.format(whole=whole, out=out) for word in COMMANDS[command]]
        result = CliRunner().invoke(app, [name, *options, str(folder), *words])
    for path in (out, out.with_name(".out.partial")):
        shutil.rmtree(path, ignore_errors=True)
    assert isinstance(result.exception, SystemExit | None), (command, result.exception)
    return result


@pytest.fixture(scope="module")
def sources(
    native: Path, universal: Path, unpartitioned: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A small checkpoint of each format."""
    made, made_by = tmp_path_factory.mktemp("formats"), {"native": native, "universal": universal}
    made_by["unpartitioned"] = unpartitioned
    found = {name: made_by[path.split("/")[0]] / path.split("/")[1] for name, path in _SOURCES.items()}
    for name, words in {"dcp": ["convert", "--to", "dcp"], "safetensors": ["export", "--optimizer"]}.items():
        found[name] = made / name
        result = CliRunner().invoke(app, [*words, str(found["ZeRO-1"]), str(found[name])])
        assert result.exit_code == 0, result.output
    return found


def files_of(folder: Path) -> list[Path]:
    """The files and folders of a checkpoint; of a universal one those of one parameter, which is tied to no other."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    others = {name.parent for name in names if name.name == "fp32.pt" and name.parent.name != "norm.weight"}
    left_out = (*map(str, others), "truth.pt", "zero_to")
    return [name for name in names if not str(name).startswith(left_out)]


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_no_file_is_named_and_never_waited_for(sources: dict[str, Path], tmp_path: Path, format: str) -> None:
    folder, whole = tmp_path / "folder", sources[format]
    files = files_of(whole)
    for number, (what, make) in enumerate(ODD.items()):
        for other, command in enumerate(COMMANDS):
            place = folder / files[(number + other) % len(files)]
            shutil.copytree(whole, folder)
            (shutil.rmtree if place.is_dir() else Path.unlink)(place)
            make(place)
            result = run(command, folder, whole)
            does_not_matter = command == "latest" and place.name.startswith("latest")
            assert result.exit_code in (1, 2, 3) or does_not_matter, (what, place, command, result.output)
            shutil.rmtree(folder)


@pytest.mark.parametrize("format", FORMATS)
def test_links_that_lead_out_of_the_folder_are_followed(sources: dict[str, Path], tmp_path: Path, format: str) -> None:
    """As the cache of huggingface_hub keeps its files, and as many a cluster keeps checkpoints."""
    folder, whole = tmp_path / "folder", sources[format]
    shutil.copytree(whole, folder)
    for place in files_of(whole):
        if (whole / place).is_file():
            (folder / place).unlink()
            (folder / place).symlink_to(whole / place)
    for command in COMMANDS:
        result, expected = (run(command, each, whole) for each in (folder, whole))
        assert result.exit_code == expected.exit_code, (command, result.output)


@pytest.mark.parametrize("what", ODD)
def test_the_newest_whole_checkpoint_is_found_whatever_latest_is(
    sources: dict[str, Path], tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(sources["ZeRO-1"], folder)
    for odd in ("latest", "latest_universal", "step9", "global_step12"):
        (folder / odd).unlink(missing_ok=True)
        ODD[what](folder / odd)
    result = run("latest", folder, folder)
    assert result.exit_code == 0 and result.stdout.strip() == str(folder / "step4"), result.output
    (folder / "latest_universal").rmdir() if what == "a folder" else (folder / "latest_universal").unlink()
    (folder / "latest").rmdir() if what == "a folder" else (folder / "latest").unlink()
    (folder / "latest").write_text("global_step7")  # which was damaged, and removed
    assert run("latest", folder, folder).exit_code == 0
