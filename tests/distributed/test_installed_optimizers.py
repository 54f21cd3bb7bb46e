"""Optimizers that elastic_ckpt does not know: what DeepSpeed alone restores of them, it restores too.

Those of packages run where these are installed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.model import INSTALLED
from tests.distributed.unchanged_configurations import Configuration, configurations

HERE = [name for name, (module, *_) in INSTALLED.items() if importlib.util.find_spec(module.partition(".")[0])]
#: Whose states only DeepSpeed's own loader restores, at which stages; DeepSpeed fails to save MADGRAD's in others.
LEFT = {"po.RACS": (1, 2, 3), "po.MADGRAD": (0,)}
STAGES = {
    **{"measuring": (0, 1, 2, 3), "hf.Adafactor": (0, 1, 2, 3), "po.MADGRAD": (0,)},
    **dict.fromkeys(("prodigy", "po.RACS"), (0, 1, 3)),
}
CONFIGURATIONS = [
    configuration
    for name in HERE
    for configuration in configurations(name, STAGES.get(name, (1, 3)), optimizer=name, groups="one")
]
#: What starts fresh on other ranks, where each computes it of its own partition.
ANEW = {"hf.Adafactor": {"RMS"}, "came": {"RMS"}, "po.Lamb": {"weight_norm", "adam_norm", "trust_ratio"}}
REFUSED = {"measuring", "prodigy", "dadapt", "po.NovoGrad"}
#: As the errors tell.
FRESH = {
    "measuring": ["d", "ends", "norm"],
    "prodigy": ["d", "d_denom", "d_hat", "d_max", "d_numerator"],
    "dadapt": ["d", "numerator_weighted"],
}


@cells([Cell(each["name"], None, "unchanged_jobs.compare", 2, each) for each in CONFIGURATIONS])
def test_each_rank_gets_its_own_values_back(cell: Cell, facts: list[Any]) -> None:
    (found,) = facts
    assert not found["a"], found["a"]
    assert not found["b"], found["b"]
    is_left = cell.case["stage"] in LEFT.get(cell.case["optimizer"], ())
    assert found["by"] == ("DeepSpeed" if is_left else "ours"), found["lines"]


def configuration_of(optimizer: str, stage: int = 1) -> Configuration:
    (found,) = (each for each in CONFIGURATIONS if each["name"] == f"{optimizer}-z{stage}")
    return found


def saved(configuration: Configuration) -> Save:
    return Save(configuration, 2, "unchanged_jobs.save_alone")


def on_three_ranks(optimizer: str, *fresh: str) -> Cell:
    """A load of what two have saved, of which some values are to start fresh."""
    configuration = configuration_of(optimizer)
    config = {"elastic_checkpoint": {"states": dict.fromkeys(fresh, "fresh")}} if fresh else {}
    name = f"{optimizer}{' fresh' * bool(fresh)}"
    return Cell(name, saved(configuration), "unchanged_jobs.elsewhere", 3, {**configuration, "config": config})


LOADS = on_three_ranks("measuring", *FRESH["measuring"])


@cells([replace(on_three_ranks(name), fits=(LOADS.save, LOADS.case)) for name in HERE if name in REFUSED])
def test_on_other_ranks_what_differs_between_ranks_is_refused(cell: Cell, facts: list[Any]) -> None:
    for found in facts:
        assert "UnsupportedError" in found["error"] and "differs between ranks" in found["error"]
        assert '"states": {' in found["error"] and "2 partitions" in found["error"]


@cells(
    [on_three_ranks(name) for name in HERE if name in ANEW]
    + [on_three_ranks(name, *FRESH[name]) for name in HERE if name in FRESH]
)
def test_on_other_ranks_their_own_values_are_computed_anew(cell: Cell, facts: list[Any]) -> None:
    """Where they are of no consequence, or the user says so."""
    optimizer = cell.case["optimizer"]
    for found in facts:
        assert (found["error"], found["wrong"]) == ("", []), found
        assert found["fresh"].keys() == set(FRESH.get(optimizer, ANEW.get(optimizer, ()))), found


@pytest.mark.parametrize("optimizer", ["measuring", "hf.Adafactor"])
@pytest.mark.parametrize("stage", [1, 3])
def test_tools_take_such_a_folder_for_what_it_is(saves: Saves, optimizer: str, stage: int) -> None:
    folder = str(saves.folder(saved(configuration_of(optimizer, stage))))
    own = [["verify", folder], ["verify", folder, "--full"], ["diff", folder, folder], ["latest", folder]]
    own += [["plan", folder, "--dp", "2"], ["inspect", folder, "--json"]]
    for command in own:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output)
    result = CliRunner().invoke(app, ["plan", folder, "--dp", "3"])
    refused = optimizer in REFUSED
    assert (result.exit_code != 0) == refused and ("differs between ranks" in result.output) == refused, result.output
