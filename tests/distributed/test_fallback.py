"""The net under elastic_ckpt: where it does not understand a folder at the topology that saved it, DeepSpeed loads it.

And what must not fall into the net: files that are damaged or of another save, which DeepSpeed would load all the same.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.distributed import damage
from tests.distributed.cells import Cell, Save, cells, crossing
from tests.distributed.facts import OWN_LOADER, Loaded, Refused, Refuses, Resumes
from tests.distributed.model import Setup

MODEL = "mp_rank_00_model_states.pt"
MODELS3 = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]
Z1, Z2_BF16, Z3, Z3_BF16 = SAVES = [Save(Setup(1)), Save(Setup(2, "bf16")), Save(Setup(3)), Save(Setup(3, "bf16"))]

Change = Callable[..., Any]
Tree = dict[str, Any]


def models_of(save: Save) -> list[str]:
    return MODELS3 if save.setup.stage == 3 else [MODEL]


def optimizer_of(save: Save, rank: int) -> str:
    return ("bf16_" if save.setup.precision == "bf16" else "") + damage.OPTIMIZER.format(rank)


def in_all(names: list[str], change: Callable[[Tree], Any]) -> Change:
    """The same change in each of these files."""
    return damage.in_turn(*(damage.edit(name, change) for name in names))


def unzip(copy: Path) -> None:
    """Write every file as ``"checkpoint_serialization": false`` would have."""
    for file in damage.tag(copy).glob("*.pt"):
        torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)


def contradict(tree: Tree) -> None:
    tree["checkpoint_parallel_dimensions"] = {"tp_degree": 2, "pp_degree": 3}


def without(entry: str) -> Callable[[Tree], Any]:
    return lambda tree: tree.pop(entry)


#: What elastic_ckpt does not understand of model-states files, and what the line about DeepSpeed's own loader names.
NOT_UNDERSTOOD: dict[str, tuple[Callable[[Tree], Any], str]] = {
    "degrees that contradict the files": (contradict, "contradict each other"),
    "no buffer_names": (without("buffer_names"), "lacks an entry"),
    "no ds_version": (without("ds_version"), "lacks an entry"),
}


def left(save: Save, note: str, job: str, words: str, change: Change | None = None) -> Cell:
    """A load at the saved topology that DeepSpeed's own loader does."""
    name = f"{save.setup.name}: {note}"
    return Cell(name, save, job, save.ranks, {"setup": save.setup}, change, expected=words)


@cells(
    [
        left(save, name, "resume", words, in_all(models_of(save), change))
        for save in SAVES
        for name, (change, words) in NOT_UNDERSTOOD.items()
    ]
    + [
        left(save, "an exception that nobody foresaw", "fallback_jobs.resume_with_a_bug", "what nobody foresaw")
        for save in SAVES
    ]
)
def test_what_elastic_ckpt_does_not_understand_is_loaded_where_it_was_saved(cell: Cell, facts: list[Loaded]) -> None:
    """One line, of the first rank, says why."""
    Resumes("left to DeepSpeed").check(facts)
    (line,), *others = ([line for line in load.lines if line.startswith(OWN_LOADER)] for load in facts)
    assert cell.expected in line and not any(others)


def of_masters(save: Save, change: Callable[[list[torch.Tensor]], Any]) -> Change:
    """Masters of the second rank, which DeepSpeed would fill up with zeros."""
    entry = "fp32_flat_groups" if save.setup.stage == 3 else "single_partition_of_fp32_groups"
    return damage.edit(optimizer_of(save, 1), lambda tree: change(tree["optimizer_state_dict"][entry]))


def cut(masters: list[torch.Tensor], at: int, numel: int) -> None:
    masters[at] = masters[at].flatten()[:numel].clone()


def of_optimizer(save: Save, **entries: Any) -> Change:
    """Entries of the second rank's optimizer."""
    return damage.edit(optimizer_of(save, 1), lambda tree: tree["optimizer_state_dict"].update(entries))


def scale(save: Save, **values: Any) -> Change:
    """Attributes of the loss scaler of each rank, which is pickled in every precision."""

    def change(tree: Tree) -> None:
        vars(tree["optimizer_state_dict"]["loss_scaler"]).update(values)

    return in_all([optimizer_of(save, 0), optimizer_of(save, 1)], change)


def hyperparameters(save: Save, **values: Any) -> Change:
    """Hyperparameters of the first param group, in each rank's file."""
    entry = "optimizer_state_dict" if save.setup.stage == 3 else "base_optimizer_state"

    def change(tree: Tree) -> None:
        tree["optimizer_state_dict"][entry]["param_groups"][0].update(values)

    return in_all([optimizer_of(save, 0), optimizer_of(save, 1)], change)


def scheduler(state: Tree | None) -> Change:
    """The live StepLR would load that of another schedule without a look."""
    return in_all([MODEL], lambda tree: tree.update(lr_scheduler=state))


#: Runs of the same shapes: with other data, and a step shorter.
OTHER_DATA = Save(Setup(1), more={"first": 30})


def shorter(save: Save) -> Save:
    return Save(save.setup, more={"steps": 3})


def refused(
    save: Save, name: str, changes: Sequence[Change], error: str, *words: str, other: Save | None = None, **case: Any
) -> Cell:
    """A load at the saved topology that must fail; ``other``: whose shard of the second rank takes the place of this one's."""
    name, case = f"{save.setup.name}: {name}", {"setup": save.setup, **case}
    change, others = damage.in_turn(*changes), () if other is None else (other,)
    if other is not None:
        change = damage.of_other(optimizer_of(save, 1), then=changes)
    return Cell(name, save, "refusal_jobs.refuse", 2, case, change, others, Refuses(error, words))


def damaged(save: Save) -> list[Cell]:
    """What is refused in ZeRO-1 and in ZeRO-3."""
    shard, step = optimizer_of(save, 1), shorter(save)
    no_names = in_all(models_of(save), without("buffer_names"))
    truncated, missing = damage.truncate(shard, 0.6), damage.remove(shard)
    no_masters = of_masters(save, lambda masters: cut(masters, -1, 0))
    half = of_masters(save, lambda masters: cut(masters, 0, masters[0].numel() // 2))
    infinite, text = scale(save, cur_scale=math.inf), scale(save, cur_scale="32")
    other_method = scale(save, update_scale=OrderedDict)
    no_rate = hyperparameters(save, lr=math.nan)
    many_betas = hyperparameters(save, betas=(0.9, 0.99, 0.999))
    large = hyperparameters(save, eps=torch.full((600,), 1e-8))
    return [
        refused(save, "a shard of another step", [], "DamagedError", shard, "another save", other=step),
        refused(save, "a truncated shard", [truncated], "DamagedError", shard, "truncated"),
        refused(save, "a missing shard", [missing], "LayoutError", shard, "missing"),
        refused(save, "masters of none", [no_masters], "DamagedError", shard),
        refused(save, "half of the masters", [half], "DamagedError", shard),
        refused(save, "an infinite scale", [infinite], "DamagedError", "cur_scale"),
        refused(save, "a text for a scale", [text], "DamagedError", "cur_scale"),
        # what would be left to DeepSpeed, were it not for the damage
        refused(save, "no buffer_names, masters of none", [no_names, no_masters], "DamagedError"),
        refused(save, "no buffer_names, an infinite scale", [no_names, infinite], "DamagedError"),
        refused(save, "no buffer_names, a scaler with another method", [no_names, other_method], "DamagedError"),
        refused(save, "no buffer_names, another step", [no_names], "UnknownLayoutError", "buffer_names", other=step),
        refused(save, "no buffer_names, a rate that is no number", [no_names, no_rate], "UnknownLayoutError"),
        refused(save, "no buffer_names, three betas", [no_names, many_betas], "UnknownLayoutError"),
        refused(save, "a large tensor for a number", [large], "MismatchError", "eps", "shape (600,)"),
        refused(save, "a large tensor, and a rate that is no number", [large, no_rate], "MismatchError"),
        refused(save, "no zip archives, another step", [unzip], "DamagedError", shard, "another save", other=step),
        refused(save, "no zip archives, truncated", [unzip, truncated], "DamagedError", shard, "truncated"),
        refused(save, "no zip archives, one missing", [unzip, missing], "LayoutError", shard, "missing"),
    ]


def damaged_of_zero_1() -> list[Cell]:
    """What ZeRO-3 has no other file for, what is asked of it, and entries that it does not have."""
    shard = optimizer_of(Z1, 1)
    no_names = in_all([MODEL], without("buffer_names"))
    custom = {"custom_load_fn": True}
    required = {"setup": Setup(1, config=(("elastic_checkpoint", {"mode": "require"}),))}
    other_schedule, no_schedule = scheduler({"last_batch_iteration": 3}), scheduler(None)
    paddings = of_optimizer(Z1, param_alignment_paddings=[[], []])
    more_ranks = of_optimizer(Z1, partition_count=[5, 1])
    missing = damage.remove(shard)
    by_hand = ("UnsupportedError", "custom_load_fn")
    return [
        refused(Z1, "a shard of another run", [], "DamagedError", shard, "weights", other=OTHER_DATA),
        refused(Z1, "custom_load_fn, another step", [], *by_hand, other=shorter(Z1), **custom),
        refused(Z1, "custom_load_fn, one missing", [missing], *by_hand, **custom),
        refused(Z1, "custom_load_fn, another scheduler", [other_schedule], *by_hand, **custom),
        refused(Z1, "custom_load_fn, no scheduler", [no_schedule], *by_hand, **custom),
        refused(Z1, "paddings of other parameters", [paddings], "DamagedError", "param_alignment_paddings"),
        refused(Z1, "partitions of more ranks", [more_ranks], "DamagedError"),
        # where elastic_ckpt is required, nothing is left to DeepSpeed
        refused(Z1, "no buffer_names, required", [no_names], "UnknownLayoutError", "buffer_names", **required),
    ]


@cells(damaged(Z1) + damaged_of_zero_1() + damaged(Z3))
def test_what_is_damaged_or_of_another_save_is_not_left_to_deepspeed(cell: Cell, facts: list[Refused]) -> None:
    cell.expected.check(facts)
    assert not any(line.startswith(OWN_LOADER) for line in facts[0].lines)


@cells(
    [
        replace(crossing(save, target, 3, expected=Resumes(loss_gap=gap)), change=unzip)
        for save, target, gap in ((Z1, Setup(3), 1e-5), (Z3, Setup(2), 1e-5), (Z2_BF16, Z2_BF16.setup, 5e-2))
    ]
)
def test_files_that_are_no_zip_archives_are_loaded_at_any_topology(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


#: Where code of :func:`hostile` leaves a folder behind, in the folder of the load.
MARKER = "code-ran"


class Marker:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def hostile(file: str) -> Change:
    """Code in a file."""
    return lambda copy: damage.edit(file, lambda tree: tree.update(and_then=Marker(copy / MARKER)))(copy)


#: A model-states file that elastic_ckpt leaves to DeepSpeed, which does not need the names of buffers.
NAMELESS = damage.edit(MODEL, without("buffer_names"))
#: Arguments of loads that DeepSpeed's own loader does in its place.
ARGUMENTS: list[dict[str, Any]] = [{"load_module_only": True}, {"load_optimizer_states": False}, {}]


def handed_over(save: Save, arguments: dict[str, Any], file: str = "") -> Cell:
    """A folder for DeepSpeed's own loader, with code in one of the files that it may open."""
    name = f"{save.setup.name}: {arguments}, code in {file or 'no file'}"
    change = damage.in_turn(NAMELESS, *([hostile(file)] if file else []))
    case = {"setup": save.setup, "arguments": arguments}
    return Cell(name, save, "refusal_jobs.refuse", 2, case, change)


BELOW_ZERO3 = (Z1, Z2_BF16)


@cells([handed_over(save, arguments) for save in BELOW_ZERO3 for arguments in ARGUMENTS])
def test_what_cannot_be_read_is_handed_over(cell: Cell, facts: list[Refused]) -> None:
    (found,) = facts
    assert found.kinds == (), found.texts
    assert any(line.startswith(OWN_LOADER) for line in found.lines)


@cells(
    [
        handed_over(save, arguments, file)
        for save in BELOW_ZERO3
        for file in (MODEL, optimizer_of(save, 1))
        for arguments in ARGUMENTS
    ]
)
def test_what_has_code_in_it_is_not_handed_over(cell: Cell, facts: list[Refused]) -> None:
    """Whichever file elastic_ckpt reads first."""
    (found,) = facts
    (text,) = found.texts
    assert found.changed == set() and found.kinds, text
    assert "posix.mkdir" in text and '"trust_pickle": true' in text
    assert not Path(found.case["folder"], MARKER).exists()


EXCHANGED = {"from": "hostile.pt", "to": f"step4/{MODEL}"}


def with_another_beside(copy: Path) -> None:
    """Beside the tag, the model-states file with code in it."""
    NAMELESS(copy)
    harmless = (copy / "step4" / MODEL).read_bytes()
    hostile(MODEL)(copy)
    (copy / "step4" / MODEL).rename(copy / EXCHANGED["from"])
    (copy / "step4" / MODEL).write_bytes(harmless)


@cells([Cell("ZeRO-1", Z1, "fallback_jobs.exchanged", 2, {"setup": Z1.setup, **EXCHANGED}, with_another_beside)])
def test_a_file_that_is_exchanged_after_it_was_checked_runs_nothing(cell: Cell, facts: list[Refused]) -> None:
    for found in facts:
        # a rank that has seen the file before says that it moved
        assert not {"UnsafePickleError", "PartialLoadError"}.isdisjoint(found.kinds), found.texts
        assert not Path(found.case["folder"], MARKER).exists()
    assert len({(*found.kinds, *found.texts) for found in facts}) == 1, "all ranks say the same"
