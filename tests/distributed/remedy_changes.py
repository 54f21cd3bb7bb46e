"""What cells of remedies make of a native checkpoint: universal ones, and folders of torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from elastic_ckpt.cli import app

Change = Callable[[Path], Any]
#: Of the folder that :func:`as_dcp` writes.
DCP = "dcp"


def convert(copy: Path, target: str, *options: str) -> None:
    """Convert the tag of a copy by our command, into ``target`` beside it."""
    result = CliRunner().invoke(app, ["convert", *options, str(copy / "step4"), str(copy / target)])
    assert result.exit_code == 0, result.output


def as_universal(*removed: str) -> Change:
    """A universal checkpoint in the place of the native one, without some files of its ``zero`` folder."""

    def apply(copy: Path) -> None:
        convert(copy, "step4_universal")
        for name in removed:
            (copy / "step4_universal" / "zero" / name).unlink()
        shutil.rmtree(copy / "step4")
        (copy / "latest").unlink()

    return apply


def as_universal_saved_anew(name: str) -> Change:
    """One of its files has the same values as the first part of a longer storage."""

    def apply(copy: Path) -> None:
        as_universal()(copy)
        path = copy / "step4_universal" / "zero" / name
        tree = torch.load(path)
        values = tree["param"]
        longer = torch.cat([values.flatten(), torch.ones(8)])
        torch.save({**tree, "param": longer[: values.numel()].view(values.shape)}, path)

    return apply


def as_dcp(change: Callable[[dict[str, Any]], Any]) -> Change:
    """A folder of torch.distributed.checkpoint with a changed tree: ``model`` and ``optim`` of ``get_state_dict``."""

    def apply(copy: Path) -> None:
        convert(copy, "converted", "--to", "dcp")
        whole = copy / "whole.pt"
        dcp_to_torch_save(copy / "converted", whole)
        tree = torch.load(whole, weights_only=False)
        change(tree)
        dcp.save(tree, checkpoint_id=copy / DCP, no_dist=True)

    return apply


def number_members(tree: dict[str, Any]) -> None:
    """Param groups list their parameters as an optimizer's own state dict does."""
    for group in tree["optim"]["param_groups"]:
        group["params"] = list(range(len(group["params"])))


def number_states(tree: dict[str, Any]) -> None:
    """So do the states, which are those of no name then."""
    states = tree["optim"]["state"]
    tree["optim"]["state"] = {str(number): states[name] for number, name in enumerate(states)}


def keep_a_dictionary(tree: dict[str, Any]) -> None:
    """A hyperparameter has entries of its own."""
    for group in tree["optim"]["param_groups"]:
        group["schedule"] = {"warmup": 3, "decay": 0.5}


def save_two_optimizers(tree: dict[str, Any]) -> None:
    """Both have states of the same parameters."""
    tree["another"] = tree["optim"]


def lose_a_state(tree: dict[str, Any]) -> None:
    """One parameter lacks what the others of its param group have."""
    del tree["optim"]["state"]["hidden.weight"]["exp_avg"]
