"""Text of a checkpoint with control characters, wherever a checkpoint has text: no command and no load prints any."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.hostile_text import controls_in

#: Escape sequences of 7 and 8 bits, a backspace, writing from right to left, another line, half a character, markup.
ODD = "\x1b]0;x\x07\x9b2J\x08\u202e\u2028\rx\ud800[red]"
#: The same as the name of a file.
ODD_NAME = ODD.replace("\ud800", "\udcff")
#: More than one line of output may have.
LONG = "x" * 1_500_000
MODEL = "mp_rank_00_model_states.pt"
COMMANDS = ("inspect --params", "plan --dp 3", "plan --rank 0", "verify --full", "latest", "diff", "export")
COMMANDS += ("convert", "convert --to dcp", "export --optimizer", "plan --tp 2", "inspect --json", "plan --json")


def renamed(node: Any) -> Any:
    """A tree in which names of parameters, and those that scripts and users choose, are odd."""
    if isinstance(node, dict):
        own = {"module", "param_shapes", "client", "lr_scheduler"}
        return {key: odd(value) if key in own else renamed(value) for key, value in node.items()}
    return node


def odd(node: Any) -> Any:
    if isinstance(node, dict):
        return {key + ODD if isinstance(key, str) else key: odd(value) for key, value in node.items()}
    return [odd(each) for each in node] if isinstance(node, list) else node + ODD if isinstance(node, str) else node


def of_parameters(folder: Path) -> Path:
    tree = torch.load(folder / "step4" / MODEL, weights_only=False)
    tree["buffer_names"] = [name + ODD for name in tree["buffer_names"]]
    torch.save({**renamed(tree), ODD: ODD, "ds_version": tree["ds_version"] + ODD}, folder / "step4" / MODEL)
    return folder


def of_groups(folder: Path) -> Path:
    for path in (folder / "step4").glob("*optim*"):
        tree = torch.load(path, weights_only=False)
        for group in tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
            group |= {ODD: ODD, "name": ODD}
        torch.save(tree, path)
    return folder


def of_tag(folder: Path) -> Path:
    tag = ODD.replace("\ud800", "")
    (folder / "step4").rename(folder / tag)
    (folder / "latest").write_text(tag)
    return folder


def of_a_tag_that_is_not_there(folder: Path) -> Path:
    (folder / "latest").write_text(ODD.replace("\ud800", ""))
    return folder


def of_folder(folder: Path) -> Path:
    return folder.rename(folder.with_name(ODD_NAME))


def of_files(folder: Path) -> Path:
    (folder / "step4" / ODD_NAME).touch()
    (folder / "step4" / f"zero_pp_rank_7_mp_rank_00{ODD_NAME}_optim_states.pt").touch()
    return folder


def of_damage(folder: Path) -> Path:
    torch.save({ODD: Path(ODD), "dp_world_size": ODD, "ds_version": [ODD]}, folder / "step4" / MODEL)
    return folder


TEXTS = [of_parameters, of_groups, of_tag, of_a_tag_that_is_not_there, of_folder, of_files, of_damage]


@pytest.mark.parametrize("change", TEXTS)
def test_no_control_character_reaches_the_terminal(
    native: Path, tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    whole = native / "z1-fp32-adamw-dp2"
    folder = change(Path(shutil.copytree(whole, tmp_path / "folder")))
    shown = ""
    for number, command in enumerate(COMMANDS):
        name, *options = command.split()
        more = {"diff": [str(whole)], "export": [f"{tmp_path}/out{number}"], "convert": [f"{tmp_path}/out{number}"]}
        result = CliRunner().invoke(app, [name, *options, str(folder), *more.get(name, [])])
        assert isinstance(result.exception, SystemExit | None), (command, result.exception)
        assert result.output.replace("\n", "").isprintable(), (command, result.output)
        shown += result.output
    assert r"\x1b" in shown or r"\u001b" in shown


def with_long_names(node: Any, key: str = "") -> Any:
    """A tree in which the names of parameters and the text of the client state are long."""
    if isinstance(node, dict):
        has_names = key in ("module", "param_shapes", "0", "client")
        return {
            name + LONG if has_names and isinstance(name, str) else name: with_long_names(value, str(name))
            for name, value in node.items()
        }
    return [with_long_names(each, "0") for each in node] if isinstance(node, list) else node


def test_json_has_no_text_without_end(native: Path, tmp_path: Path) -> None:
    whole = native / "z1-fp32-adamw-dp2"
    folder = Path(shutil.copytree(whole, tmp_path / "folder"))
    path = folder / "step4" / MODEL
    torch.save({**with_long_names(torch.load(path, weights_only=False)), "client": {"note": LONG, LONG: 1}}, path)
    printed = 0
    for command in ("inspect --params", "inspect", "plan --dp 3", "verify", "latest", "diff", "export", "convert"):
        name, *options = command.split()
        more = {"diff": [str(whole)], "export": [f"{tmp_path}/out"], "convert": [f"{tmp_path}/out"]}
        result = CliRunner().invoke(app, [name, *options, str(folder), *more.get(name, []), "--json"])
        assert isinstance(result.exception, SystemExit | None), (command, result.exception)
        assert len(result.stdout) < len(LONG), command
        json.loads(result.stdout)
        printed += "... and " in result.stdout
    assert printed > 0, "nothing was cut"


def of_client_state(folder: Path) -> Path:
    path = folder / "step4" / MODEL
    tree = torch.load(path, weights_only=False)
    torch.save({**tree, ODD: ODD, "client": {ODD: [ODD]}, "ds_version": tree["ds_version"] + ODD}, path)
    return of_tag(folder)


def test_no_control_character_is_printed_by_a_load(launch: Launch, native: Path, tmp_path: Path) -> None:
    changes = [*TEXTS, of_client_state]
    whole = native / "z1-fp32-adamw-dp2"
    folders = [str(change(Path(shutil.copytree(whole, tmp_path / change.__name__)))) for change in changes]
    printed = launch(3, "hostile_jobs.load", {"setup": Setup(1), "folders": folders})
    names = [change.__name__ for change in changes]
    for number, (text, _) in enumerate(printed):
        assert controls_in(text, but="\n") == [], names[number % len(names)]
    of_rank_0 = dict(zip(names, printed, strict=False))
    loaded = {name for name, (_, is_loaded) in of_rank_0.items() if is_loaded}
    assert loaded == {*names} - {"of_parameters", "of_damage"}, "of a tag that is not there, another"
    shown = {name for name, (text, _) in of_rank_0.items() if r"\x1b" in text}
    assert shown == {*names} - {"of_groups", "of_files"}, "what no live group and no rank has is of no concern"
