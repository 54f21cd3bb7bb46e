"""Optimizers that elastic_ckpt does not know: what DeepSpeed alone restores of them, it restores too.

Those of packages run where these are installed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.model import INSTALLED
from tests.distributed.unchanged_configurations import Configuration, configurations

HERE = [name for name, (module, *_) in INSTALLED.items() if importlib.util.find_spec(module.partition(".")[0])]
#: Whose states only DeepSpeed's own loader restores, at which stages; DeepSpeed fails to save MADGRAD's in others.
LEFT = {"po.RACS": (1, 2, 3), "po.MADGRAD": (0,)}
STAGES = {
    **{"measuring": (0, 1, 2, 3), "hf.Adafactor": (0, 1, 2, 3), "po.MADGRAD": (0,)},
    **dict.fromkeys(("prodigy", "po.RACS"), (0, 1, 3)),
}
CELLS: dict[str, Configuration] = {
    cell["name"]: cell
    for name in HERE
    for cell in configurations(name, STAGES.get(name, (1, 3)), optimizer=name, groups="one")
}
#: What starts fresh on other ranks, where each computes it of its own partition.
ANEW = {"hf.Adafactor": {"RMS"}, "came": {"RMS"}, "po.Lamb": {"weight_norm", "adam_norm", "trust_ratio"}}
REFUSED = {"measuring", "prodigy", "dadapt", "po.NovoGrad"}
#: As the errors tell.
FRESH = {
    "measuring": ["d", "ends", "norm"],
    "prodigy": ["d", "d_denom", "d_hat", "d_max", "d_numerator"],
    "dadapt": ["d", "numerator_weighted"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def results(launch: Launch, folder: Path) -> dict[str, dict[str, Any]]:
    arguments = {"cells": list(CELLS.values()), "folder": str(folder)}
    (found,) = launch(2, "unchanged_jobs.matrix", arguments, timeout=500)
    return found


@pytest.mark.parametrize("name", CELLS)
def test_each_rank_gets_its_own_values_back(name: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[name]
    assert not found["a"], found["a"]
    assert not found["b"], found["b"]
    is_left = CELLS[name]["stage"] in LEFT.get(CELLS[name]["optimizer"], ())
    assert found["by"] == ("DeepSpeed" if is_left else "ours"), found["lines"]


@pytest.mark.usefixtures("results")
def test_on_other_ranks_their_own_values_are_computed_anew_or_refused(launch: Launch, folder: Path) -> None:
    tried = [name for name in HERE if name in ANEW or name in REFUSED]
    given = {f"{name}-z1": {} for name in tried} | {f"{name}-z1 fresh": FRESH[name] for name in tried if name in FRESH}
    targets = []
    for name, keys in given.items():
        config = {"elastic_checkpoint": {"states": dict.fromkeys(keys, "fresh")}} if keys else {}
        targets.append({**CELLS[name.removesuffix(" fresh")], "saved": name.removesuffix(" fresh"), "config": config})
    for found in launch(3, "unchanged_jobs.elsewhere", {"cells": targets, "folder": str(folder)}):
        optimizer, config = found["cell"]["optimizer"], found["cell"]["config"]
        if optimizer in REFUSED and not config:
            assert "UnsupportedError" in found["error"] and "differs between ranks" in found["error"]
            assert '"states": {' in found["error"] and "2 partitions" in found["error"]
            continue
        assert (found["error"], found["wrong"]) == ("", []), found
        assert found["fresh"].keys() == (set(FRESH[optimizer]) if config else ANEW[optimizer]), found


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("optimizer", ["measuring", "hf.Adafactor"])
@pytest.mark.parametrize("stage", [1, 3])
def test_tools_take_such_a_folder_for_what_it_is(folder: Path, optimizer: str, stage: int) -> None:
    saved = str(folder / f"{optimizer}-z{stage}")
    own = [["verify", saved], ["verify", saved, "--full"], ["diff", saved, saved], ["latest", saved]]
    own += [["plan", saved, "--dp", "2"], ["inspect", saved, "--json"]]
    for command in own:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output)
    result = CliRunner().invoke(app, ["plan", saved, "--dp", "3"])
    refused = optimizer in REFUSED
    assert (result.exit_code != 0) == refused and ("differs between ranks" in result.output) == refused, result.output
