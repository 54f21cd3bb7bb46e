"""Mixtures of experts: any expert-parallel degree to any other, with data-parallel degree and ZeRO stage."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from elastic_ckpt.tools.opened import config_of, locate, open_checkpoint
from tests.distributed import damage
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.expert_jobs import Experts
from tests.distributed.facts import Loaded, Refused, Refuses, Resumes

EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "expp_rank_{}_mp_rank_00_optim_states.pt"


def saved(*run: Any, **more: Any) -> Save:
    experts = Experts(*run, **more)
    return Save(experts, experts.world, "expert_jobs.save_each")


SAVED = [
    saved(4, 1, 2),
    saved(4, 2, 4, group_size=400),
    saved(2, 1, 1, "fp32"),
    saved(4, 2, 2, data_first=True),
    saved(4, 0, 2, "fp32"),
    saved(4, 0, 4),
    saved(2, 0, 2, "fp32", data_first=True),
]
TARGETS = [
    Experts(4, 1, 1),
    Experts(2, 2, 2, data_first=True),
    Experts(4, 0, 4, "fp32"),
    Experts(1, 1, 1),
    Experts(2, 0, 1),
]
#: With a dense branch beside the experts, and a loss scale.
RESIDUAL = [saved(4, 2, 2, "fp16", residual=True), saved(2, 0, 1, "fp16", residual=True)]
RESIDUAL_TARGETS = [Experts(4, 1, 4, "fp16", residual=True), Experts(1, 0, 1, "fp16", residual=True)]
AUTOEP = [
    saved(4, 1, 2, autoep=True),
    saved(4, 3, 2, autoep=True),
    saved(2, 0, 2, "fp32", autoep=True),
    saved(4, 3, 4, "fp32", autoep=True),
    saved(2, 2, 1, autoep=True),
]
BY_DEEPSPEED = [replace(save, converted=True) for save in AUTOEP[:2]]
BY_OUR_COMMAND = [replace(save, converter="convert.convert_by_command") for save in BY_DEEPSPEED]
AUTOEP_TARGETS = [
    Experts(4, 3, 1, autoep=True),
    Experts(2, 3, 2, "fp32", autoep=True),
    Experts(4, 1, 4, autoep=True),
    Experts(1, 2, 1, autoep=True),
    Experts(2, 0, 1, autoep=True),
]
#: Models of Hugging Face, with the same number of experts in each layer.
MIXTRAL, QWEN, DEEPSEEK = (
    {"experts": (4, 4), "autoep": True, "preset": preset} for preset in ("mixtral", "qwen3_moe", "deepseek_v3")
)
MIXTRALS = [saved(2, 0, 2, "fp32", **MIXTRAL), saved(4, 3, 2, **MIXTRAL)]
PRESETS = [
    (Experts(4, 1, 4, **MIXTRAL), MIXTRALS),
    (Experts(1, 2, 1, "fp32", **MIXTRAL), MIXTRALS),
    (Experts(2, 0, 1, **MIXTRAL), MIXTRALS),
    (Experts(4, 3, 4, **QWEN), [saved(2, 1, 2, **QWEN)]),
    (Experts(2, 3, 1, **DEEPSEEK), [saved(4, 1, 2, **DEEPSEEK)]),
]


def resumed(save: Save, run: Experts, change: Callable[[Path], None] | None = None) -> Cell:
    """A checkpoint that goes on in an engine of this run."""
    kind = "universal" if save.converted else "native"
    name = f"{save.setup.name}{' universal' * save.converted} to {run.name}"
    return Cell(name, save, "expert_jobs.resume", run.world, {"run": run}, change, expected=Resumes(kind, 0.05))


@cells(
    [
        *(resumed(save, run) for run in TARGETS for save in SAVED),
        *(resumed(save, run) for run in RESIDUAL_TARGETS for save in RESIDUAL),
        *(resumed(save, run) for run in AUTOEP_TARGETS for save in AUTOEP + BY_DEEPSPEED),
        *(resumed(save, run) for run, sources in PRESETS for save in sources),
    ]
)
def test_every_source_loads_at_any_expert_parallel_degree(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)
    for load in facts:
        assert "100 %" in str(load.report.verified), load.text


FACTORED = saved(2, 0, 2, "fp32", autoep=True, factored=True)
WITHOUT_EXPERT_PARALLELISM = replace(FACTORED.setup, ep=1)


@cells([Cell("factored", FACTORED, "expert_jobs.follow", 2, {"run": WITHOUT_EXPERT_PARALLELISM})])
def test_factors_of_stacked_experts_are_refused_and_left_out_as_the_error_says(
    cell: Cell, facts: list[tuple[Refused, dict[str, str]]]
) -> None:
    for refused, differences in facts:
        Refuses("UnsupportedError", ("is kept for stacked experts as a whole",)).check([refused])
        assert differences == {}


#: Of a model-states file with experts.
SINCE_0_19_4 = {"buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
SINCE_0_19_4 |= {"shared_params", "ds_config", "ds_version", "ds_autoep_layers"}


def without_what_0_19_4_added(copy: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        for key in tree.keys() & SINCE_0_19_4:
            del tree[key]

    damage.edit(MODEL, change)(copy)


def with_nested_modules(copy: Path) -> None:
    """The same, with a dictionary for each child of the module, as Megatron-DeepSpeed saves without a pipeline."""

    def change(tree: dict[str, Any]) -> None:
        found: dict[str, Any] = {}
        for name, tensor in tree["module"].items():
            child, _, rest = name.partition(".")
            if rest:
                found.setdefault(child, {})[rest] = tensor
            else:
                found[name] = tensor
        tree["module"] = found

    without_what_0_19_4_added(copy)
    damage.edit(MODEL, change)(copy)


#: As DeepSpeed before 0.19.4 writes them, which ``launch/matrix.sh`` tries on the old versions themselves.
OLD = [
    (save, with_nested_modules if number % 2 == 0 else without_what_0_19_4_added) for number, save in enumerate(SAVED)
]


@cells([resumed(save, Experts(4, 1, 1), change) for save, change in OLD])
def test_files_without_shapes_names_of_buffers_and_config_load_as_the_others(cell: Cell, facts: list[Loaded]) -> None:
    cell.expected.check(facts)


def copied(save: Save, saves: Saves, to: Path, *changes: Callable[[Path], None]) -> Path:
    copy = Path(shutil.copytree(saves.folder(save), to))
    for change in changes:
        change(copy)
    return copy


@pytest.mark.parametrize(("save", "change"), OLD, ids=[save.setup.name for save, _ in OLD])
def test_files_without_shapes_names_of_buffers_and_config_are_verified(
    save: Save, change: Callable[[Path], None], saves: Saves, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["verify", str(copied(save, saves, tmp_path / "copy", change))])
    assert result.exit_code == 0, result.output


def test_a_lost_expert_is_named_without_shapes(saves: Saves, tmp_path: Path) -> None:
    lost = EXPERT.format(0, 0)
    copy = copied(SAVED[0], saves, tmp_path / "copy", without_what_0_19_4_added, damage.remove(lost))
    result = CliRunner().invoke(app, ["verify", str(copy)])
    assert result.exit_code == 1 and lost in re.sub(r"[\s│]", "", result.output), result.output


def test_parameters_in_round_robin_order_are_found_without_their_shapes(saves: Saves, tmp_path: Path) -> None:
    save = saved(4, 2, 2, data_first=True, round_robin=True)
    found = []
    for folder in (saves.folder(save), copied(save, saves, tmp_path / "copy", without_what_0_19_4_added)):
        metadata = open_checkpoint(locate(str(folder), None), config_of(None)).metadata
        names = [Path(file.path).name for file in metadata.files]
        chunks = {
            key: [(chunk.range, names[chunk.file], chunk.byte_offset) for chunk in tensor.chunks]
            for key, tensor in metadata.tensors.items()
            if key[1] not in ("buffer", "frozen")
        }
        found.append(chunks)
    assert len(found[0]) > 100 and found[0] == found[1]


#: What was saved, what happens to it, with which other run, and what the error says.
DAMAGED: dict[str, tuple[Save, Any, tuple[Save, ...], str]] = {
    "missing": (SAVED[0], damage.remove(EXPERT.format(1, 3)), (), r"the file of an expert is missing.*layer_1_expert_3_mp"),
    "exchanged": (SAVED[0], damage.swap(EXPERT.format(0, 1), EXPERT.format(0, 2)), (), r"(changed places|the expert that its name says)"),
    "mixed": (SAVED[0], damage.of_other(EXPERT.format(1, 5)), (RESIDUAL[0],), r"the fp32 masters in this file are not those of the weights"),
    "optimizer": (SAVED[4], damage.of_other(OPTIMIZER.format(0)), (SAVED[5],), r"belongs to another save.*param groups differ"),
    "lost": (SAVED[4], damage.remove(OPTIMIZER.format(1)), (), r"is missing.*expp_rank_1_mp_rank_00_optim_states"),
}  # fmt: skip


def check(refused: Refused, error: str, pattern: str) -> None:
    """One error on all ranks, of a class or a subclass, which says this; and an engine that is as it was."""
    (text,) = refused.texts
    assert error in refused.kinds and refused.changed == set(), text
    assert re.search(pattern, text.replace("\n", " ")), text


@cells(
    [
        Cell(name, save, "expert_jobs.refuse", 2, {"run": Experts(2, 1, 2, "fp32")}, change, others, expected=words)
        for name, (save, change, others, words) in DAMAGED.items()
    ]
)
def test_what_is_missing_or_mixed_is_named(cell: Cell, facts: list[Refused]) -> None:
    (refused,) = facts
    check(refused, "DamagedError", cell.expected)


def leave_moments_stale(copy: Path) -> None:
    """Moments of stacked experts are one rank's, and not noted as of experts.

    So an older converter of DeepSpeed may have left them, for AutoEP in ZeRO-1 and 2.
    """
    changed = 0
    for path in copy.glob("step4_universal/zero/*experts*/exp_avg*.pt"):
        tree = torch.load(path, weights_only=False)
        mine = tree["param"][: len(tree["param"]) // 2]
        torch.save({"param": mine.clone(), "cat_dim": 0}, path)
        changed += 1
    assert changed


@cells(
    [
        Cell("stale moments", BY_DEEPSPEED[0], "expert_jobs.refuse", 2, {"run": run}, leave_moments_stale)
        for run in [Experts(2, 1, 2, autoep=True)]
    ]
)
def test_moments_of_one_rank_are_not_those_of_all_experts(cell: Cell, facts: list[Refused]) -> None:
    (refused,) = facts
    check(refused, "MismatchError", r"experts\.w\d.*convert the native checkpoint again")


#: In number, with routers of other shapes, or in another number of layers.
OTHER_MODELS = [Experts(2, 2, 2, "fp32", experts=experts) for experts in ((4, 4), (8, 8), (4,))]


@cells(
    [
        Cell(run.name, SAVED[0], "expert_jobs.refuse", 2, {"run": run}, fits=(SAVED[0], {"run": Experts(2, 2, 2)}))
        for run in OTHER_MODELS
    ]
)
def test_other_experts_than_the_models_are_named(cell: Cell, facts: list[Refused]) -> None:
    (refused,) = facts
    assert refused.kinds[:1] == ("MismatchError",), refused.texts
    check(refused, "MismatchError", "deepspeed_experts|shape")


#: Where experts are read, named, and placed.
PLACES = [
    ("elastic_ckpt.formats.merging", "index_expert"),
    ("elastic_ckpt.engines.adapter", "LiveFQNs"),
    ("elastic_ckpt.formats.partitioned", "check_experts"),
]


@cells(
    [
        Cell(
            function,
            SAVED[0],
            "expert_jobs.fail_alone",
            4,
            {"run": Experts(4, 2, 4), "module": module, "function": function},
        )
        for module, function in PLACES
    ]
)
def test_the_failure_of_one_rank_is_that_of_all(cell: Cell, facts: list[Refused]) -> None:
    (refused,) = facts
    (text,) = refused.texts
    assert refused.kinds[:1] == ("DamagedError",) and refused.changed == set(), text
    assert "this rank alone has failed" in text and "rank:      1" in text, text


def test_our_command_writes_stacked_experts_as_deepspeeds_does(saves: Saves) -> None:
    for theirs, ours in zip(BY_DEEPSPEED, BY_OUR_COMMAND, strict=True):
        expected, found = (saves.folder(save) / "step4_universal/zero" for save in (theirs, ours))
        # a buffer has no states
        files = {path.relative_to(expected) for path in expected.rglob("*/*.pt") if path.parent.name != "ticks"}
        more = {path.relative_to(found) for path in found.rglob("*/*.pt")} - files
        assert files and {file.name for file in more} <= {"step.pt"}  # which DeepSpeed leaves out after ZeRO-3
        for file in sorted(files):
            check_written_alike(expected / file, found / file)


def check_written_alike(theirs: Path, ours: Path) -> None:
    """A state, and for those of stacked experts what is said of them."""
    expected, found = torch.load(theirs), torch.load(ours)
    its, own = (each.pop("param") if isinstance(each, dict) else each for each in (expected, found))
    assert torch.equal(torch.as_tensor(own).flatten(), torch.as_tensor(its).flatten()), ours
    is_stacked = re.search(r"experts\.w\d$", str(ours.parent)) is not None and ours.name != "step.pt"
    assert ("is_expert_param" in found) is is_stacked if isinstance(found, dict) else not is_stacked, ours
    assert not is_stacked or (found, own.shape) == (expected, its.shape), ours


@cells(
    [
        Cell(f"{save.setup.name} to {run.name}", save, "expert_jobs.deepspeed_loads", run.world, {"run": run})
        for world, ep in ((4, 4), (2, 1))
        for save in BY_OUR_COMMAND
        for run in [replace(save.setup, world=world, ep=ep)]
    ]
)
def test_deepspeed_loads_what_our_command_writes_of_stacked_experts(cell: Cell, facts: list[Any]) -> None:
    assert facts == [{}] * cell.ranks
