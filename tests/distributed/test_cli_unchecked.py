"""What ``inspect`` refuses, neither ``verify`` nor ``latest`` calls whole: "could not be checked" is not "ok"."""

from __future__ import annotations

import builtins
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import Result
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats import work_budget
from tests.distributed import damage

MODEL, RANK1 = "mp_rank_00_model_states.pt", damage.OPTIMIZER.format(1)
Change = Callable[[Path], object]


def run(command: str, folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [command, str(folder), *words])


def in_tree(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Change a file's tree, and save it as ``torch.save`` does."""

    def apply(copy: Path) -> None:
        path = damage.tag(copy) / name
        tree = torch.load(path, weights_only=False)
        change(tree)
        torch.save(tree, path)

    return apply


def weight(value: Any) -> Change:
    return in_tree(MODEL, lambda tree: tree["module"].update(odd=value))


def of_optimizer(change: Callable[[dict[str, Any]], object]) -> Change:
    return in_tree(RANK1, lambda tree: change(tree["optimizer_state_dict"]))


def experts_in_a_pipeline(copy: Path) -> None:
    for name in ("layer_00-model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"):
        torch.save({}, damage.tag(copy) / name)


def another_format(copy: Path) -> None:
    (damage.tag(copy) / RANK1).write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(600))


#: What this version does not support, but may be whole; and what is damaged, unsafe or missing.
UNSUPPORTED: dict[str, Change] = {
    "a sparse weight": weight(torch.eye(3).to_sparse()),
    "a quantized weight": weight(torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8)),
    "a view of another stride": weight(torch.rand(4, 4).t()),
    "states of its own kind": of_optimizer(lambda state: state.update(base_optimizer_state={"mine": 1, "own": 2})),
    "legacy elastic states": of_optimizer(lambda state: state.update(base_optimizer_state=[])),
    "a sparse state": of_optimizer(lambda state: state["base_optimizer_state"].update(odd=torch.eye(3).to_sparse())),
    "experts in a pipeline": experts_in_a_pipeline,
    "another format": another_format,
}
BROKEN: dict[str, Change] = {
    "an unsafe pickle": weight(builtins.exec),
    "a missing part": damage.remove(RANK1),
    "no model states": damage.remove(MODEL),
    "a truncated part": damage.truncate(RANK1, 0.7),
    "an empty part": lambda copy: (damage.tag(copy) / MODEL).write_bytes(b""),
    "no zip archive": lambda copy: (damage.tag(copy) / RANK1).write_bytes(b"x" * 5000),
}
FOLDERS = ["z1-fp32-adamw-dp2", "z1-fp32-adam_amsgrad-dp2"]


def assert_not_ok(folder: Path, expected: int | None = None) -> None:
    """Neither command says that all is well, in words or by its status, with and without ``--full``."""
    assert run("inspect", folder).exit_code != 0, "this is no case of this test"
    for words in ((), ("--full",)):
        found, printed = run("verify", folder, "--json", *words), run("verify", folder, *words)
        answer = json.loads(found.stdout)
        assert found.exit_code == printed.exit_code != 0, printed.output
        assert "ok:" not in printed.stdout and answer.get("ok") is not True
        if "ok" in answer:
            assert answer["findings"] or answer["unchecked"], answer
            assert found.exit_code == (1 if answer["findings"] else 3)
            assert printed.stdout.strip() or not answer["unchecked"]
        if expected is not None:
            assert found.exit_code == expected, printed.output
        newest = run("latest", folder, *words)
        assert newest.exit_code != 0 and not newest.stdout.strip(), newest.output
        with pytest.raises(ElasticCkptError):
            elastic_ckpt.find_latest(folder, full=bool(words))


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_supported_is_not_checked_and_says_so(what: str, native: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(native / FOLDERS[0], tmp_path / "run"))
    UNSUPPORTED[what](folder)
    assert_not_ok(folder, expected=3)
    assert "not-checked: " in run("verify", folder).stdout
    assert "not checked: " in run("latest", folder).stderr
    with pytest.raises(UnsupportedError, match="cannot check"):
        elastic_ckpt.find_latest(folder)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_inspect_refuses_is_never_ok(seed: int, native: Path, tmp_path: Path) -> None:
    """Folders with one or two of all these, in a random order."""
    draw, every = random.Random(seed), {**UNSUPPORTED, **BROKEN}
    folder = Path(shutil.copytree(native / draw.choice(FOLDERS), tmp_path / "run"))
    for what in draw.sample(sorted(every), draw.choice([1, 2])):
        try:
            every[what](folder)
        except (FileNotFoundError, RuntimeError):  # the first has removed or broken what the second changes
            continue
    assert_not_ok(folder)


def test_what_takes_more_work_than_it_may_is_not_ok(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MOST_TIMES", "_MORE_NBYTES", "_MORE_OBJECTS"):
        monkeypatch.setattr(work_budget, name, 0)
    assert_not_ok(Path(shutil.copytree(native / FOLDERS[0], tmp_path / "run")), expected=3)


def test_an_older_checkpoint_that_is_whole_is_taken_instead(native: Path, tmp_path: Path) -> None:
    shutil.copytree(native / FOLDERS[0] / "step4", tmp_path / "global_step9")
    weight(torch.eye(3).to_sparse())(tmp_path)
    shutil.copytree(native / FOLDERS[0] / "step4", tmp_path / "global_step4")
    found = run("latest", tmp_path)
    assert found.exit_code == 0 and found.stdout.strip() == str(tmp_path / "global_step4")
    assert "not checked: " in found.stderr and "global_step9" in found.stderr


@pytest.mark.parametrize("what", ["no tensors", "numbered states", "a shared range"])
def test_folders_of_other_writers_are_not_ok_either(what: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": {"w": torch.ones(3)}}
    if what == "numbered states":
        tree["optim"] = {"state": {"0": {"step": torch.ones(3)}}, "param_groups": [{"params": [0]}]}
    dcp.save({"x": 1} if what == "no tensors" else tree, checkpoint_id=tmp_path / "step-1")
    if what == "a shared range":
        path = tmp_path / "step-1" / "__0_0.distcp"
        path.write_bytes(path.read_bytes()[:-600])
    assert_not_ok(tmp_path / "step-1")
