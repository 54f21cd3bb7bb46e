"""Checkpoints whose optimizer files were removed to save space: their weights, exported and loaded at other topologies.

What only commands read starts no ranks of its own: these tests take the saves of the cells.
"""

# Covers elastic_ckpt/formats/module_weights.py, which reads such folders.

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from tests.distributed import weights_jobs
from tests.distributed.cells import Cell, Save, Saves, cells
from tests.distributed.expert_jobs import Experts
from tests.distributed.facts import Loaded, Refused, Refuses
from tests.distributed.foreign_folders import TAG, as_neox, as_twenty, mp_rank, read
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel
from tests.distributed.weights_jobs import DRIFTED, drift, without_names

Z1, Z2_BF16, Z3 = Save(Setup(1)), Save(Setup(2, "bf16")), Save(Setup(3))
SAVED = [Z1, Z2_BF16]
TARGETS = [Setup(0), Setup(1), Setup(2, "bf16"), Setup(3)]
ALONE = {"load_module_only": True}
#: Of two optimizer-states files, the one that is missing; empty: both are.
LACKS = ("", "0", "1")


def lost(lacks: str = "") -> Callable[[Path], None]:
    """The optimizer-states files are gone, or that of a rank."""

    def apply(copy: Path) -> None:
        name = f"zero_pp_rank_{lacks}_mp_rank_*optim_states.pt" if lacks else "optim_states.pt"
        for path in copy.glob(f"*/*{name}"):
            path.unlink()

    return apply


def dtype_of(save: Save) -> str:
    return "bfloat16" if save.setup.precision == "bf16" else "float32"


def named(lacks: str) -> str:
    """What is said of the one file that is missing."""
    return f"zero_pp_rank_{lacks}_mp_rank_00" if lacks else ""


def load_of(
    save: Save, target: Setup, ranks: int, lacks: str | None, arguments: dict[str, bool], job: str = "load", **more: Any
) -> Cell:
    """A load of what is left of a save; of all of it, where ``lacks`` is ``None``."""
    without = "" if lacks is None else f" without {lacks or 'any'}"
    name = f"{save.setup.name}{without} to {target.name}-dp{ranks}, {arguments}"
    case = {"setup": target, "arguments": arguments, **more.pop("case", {})}
    change = None if lacks is None else lost(lacks)
    return Cell(name, save, f"weights_jobs.{job}", ranks, case, change, **more)


@pytest.mark.parametrize("lacks", LACKS)
@pytest.mark.parametrize("save", SAVED, ids=lambda save: save.setup.name)
def test_a_folder_without_optimizer_files_is_exported_in_the_saved_dtype(
    save: Save, lacks: str, saves: Saves, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(saves.folder(save), tmp_path / "source"))
    lost(lacks)(source)
    found, notes = exported(source, tmp_path / "out")
    expected = weights_jobs.weights_alone(truth_of(source))
    wanted = {**expected["weights"], **expected["buffers"]}
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in wanted.items()}
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    dtype = dtype_of(save)
    prefix = "bf16_" if dtype == "bfloat16" else ""
    why = f"are missing ({prefix}zero_pp_rank_{lacks}_" if lacks else "no optimizer states"
    assert [note for note in notes if why in note and f"saved in {dtype}" in note]
    for command, level in (("inspect", 1), ("verify", 1)):
        result = CliRunner().invoke(app, [command, str(source), "--json"])
        assert result.exit_code == level and named(lacks) in result.stdout, result.output
    opened = elastic_ckpt.open(source)
    assert all(torch.equal(opened[name], value) for name, value in found.items())


def exported(source: Path, out: Path, *options: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    result = CliRunner().invoke(app, ["export", str(source), str(out), *options, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return load_file(out / "model.safetensors"), json.loads(result.stdout)["notes"]


@pytest.mark.parametrize(
    ("save", "options", "says"),
    [(Z1, ["--optimizer"], "no optimizer-states files"), (Z3, [], "under ZeRO-3")],
    ids=["states", "ZeRO-3"],
)
def test_what_needs_the_missing_files_is_refused(
    save: Save, options: list[str], says: str, saves: Saves, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(saves.folder(save), tmp_path / "source"))
    lost()(source)
    result = CliRunner().invoke(app, ["export", str(source), str(tmp_path / "out"), *options, "--json"])
    assert result.exit_code == 3 and says in result.output, result.output
    assert not (tmp_path / "out").exists()


def each_target(*loads: tuple[Save, str, dict[str, bool]], **more: Any) -> list[Cell]:
    """These loads into an engine of each stage, on one rank and on three."""
    return [
        load_of(save, target, ranks, lacks, arguments, expected=lacks, **more)
        for ranks in (1, 3)
        for target in TARGETS
        for save, lacks, arguments in loads
    ]


WITH_COUNTERS = {"load_optimizer_states": False}


@cells(
    each_target(
        *((save, lacks, ALONE) for save in SAVED for lacks in LACKS),
        (Z1, "", WITH_COUNTERS),
        (Z1, "0", WITH_COUNTERS),
    )
)
def test_any_stage_at_any_degree_loads_them(cell: Cell, facts: list[Loaded]) -> None:
    assert cell.save is not None
    for load in facts:
        assert load.differences == {} and load.report.source.zero_stage in (1, 2), load.where
        notes = " | ".join(load.report.notes)
        assert f"own weights, saved in {dtype_of(cell.save)}" in notes
        assert ("optimizer-states files are missing" in notes) == bool(cell.expected), notes
        assert named(cell.expected) in notes, notes


@cells(each_target(*((Z1, lacks, {}) for lacks in LACKS), job="refuse"))
def test_with_states_they_are_refused(cell: Cell, facts: list[Refused]) -> None:
    Refuses("LayoutError", (named(cell.expected), "load_module_only=True")).check(facts)


@cells(each_target(*((Z3, lacks, ALONE) for lacks in LACKS), job="refuse"))
def test_weights_in_the_shards_of_zero_3_are_refused(cell: Cell, facts: list[Refused]) -> None:
    Refuses("LayoutError", (named(cell.expected) or "under ZeRO-3",)).check(facts)
    (text,) = facts[0].texts
    assert "load_module_only=True" not in text


UNTIED = {"case": {"model": "UntiedLM"}}
NOT_STRICT = {"load_module_strict": False}
MORE: tuple[dict[str, bool], ...] = ({}, NOT_STRICT)


@cells(
    [
        load_of(save, target, 2, lacks, ALONE, **UNTIED)
        for target in TARGETS
        for save, lacks in ((Z1, None), (Z3, None), (Z1, ""), (Z2_BF16, ""))
    ]
)
def test_names_that_are_no_longer_tied_both_get_the_weights(cell: Cell, facts: list[Loaded]) -> None:
    """From masters, and from the files of the module."""
    for load in facts:
        assert load.differences == {}, load.where
        assert "tied in the checkpoint, not here: head.weight" in " | ".join(load.report.notes)


@cells(
    [
        load_of(Z1, target, 2, None, {}, "refuse", **UNTIED, fits=(Z1, {"setup": target, "arguments": {}}))
        for target in TARGETS
    ]
)
def test_what_states_names_that_are_no_longer_tied_have_is_not_known(cell: Cell, facts: list[Refused]) -> None:
    Refuses("MismatchError", ("one parameter at the save", "load_module_strict=False")).check(facts)
    (text,) = facts[0].texts
    assert "not in the checkpoint" not in text


@cells(
    [
        load_of(save, target, 2, None, NOT_STRICT, "load_with_states", **UNTIED)
        for target in TARGETS
        for save in (Z1, Z3)
        if target.precision == "fp32"
    ]
)
def test_names_that_are_no_longer_tied_have_states_of_their_own_if_asked_for(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences == {}, load.where
        fresh = [each for each in load.report.outcomes if each.what == "fresh"]
        assert [(each.names, "those of embedding.weight" in each.reason) for each in fresh] == [
            (("head.weight",), True)
        ]


def tied_now(
    run: Setup, steps: int, target: Setup, arguments: dict[str, bool], job: str = "load", **options: str
) -> Cell:
    """A load of a head with weights of its own, equal to the embedding's until the first step, which are tied here."""
    save = Save(run, 2, "weights_jobs.save_untied", {"steps": steps})
    name = f"{run.name} at step {steps} to {target.name}, {arguments} {options or ''}"
    case = {"setup": target, "arguments": arguments, "options": options}
    fits = (replace(save, more={"steps": 0}), {**case, "arguments": ALONE}) if job == "refuse" else None
    return Cell(name, save, f"weights_jobs.{job}", 3, case, fits=fits)


UNTIED_RUNS, TIED = (Setup(1), Setup(3), Setup(0)), (Setup(1), Setup(3), Setup(2, "bf16"))
FIRST = {"replicated_params": "first"}


@cells(
    [
        tied_now(run, steps, target, arguments, **options)
        for target in TIED
        for run in UNTIED_RUNS
        for steps, arguments, options in ((0, ALONE, {}), (0, WITH_COUNTERS, {}), (2, ALONE, FIRST))
    ]
)
def test_names_that_are_tied_now_have_equal_weights_or_a_word(cell: Cell, facts: list[Loaded]) -> None:
    assert cell.save is not None
    for load in facts:
        assert load.differences == {}, load.where
        notes = " | ".join(load.report.notes)
        says = "tied here, not in the checkpoint" in notes and "head.weight = embedding.weight" in notes
        # without masters, weights are those of the module's files
        assert says == (cell.save.setup.stage > 0), notes
        assert ("different when saved" in notes) == bool(cell.case["options"])


WITH_STATES = [(run, arguments) for run in UNTIED_RUNS for arguments in ({}, NOT_STRICT)]


@cells([tied_now(run, 2, TIED[0], arguments, "load_with_states", **FIRST) for run, arguments in WITH_STATES])
def test_the_states_of_the_name_that_is_kept_come_with_it(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences == {}, load.where
        assert "different when saved" in " | ".join(load.report.notes)
        assert not [each for each in load.report.outcomes if each.what == "ignored"]


@cells(
    [tied_now(run, 2, target, {**ALONE, **more}, "refuse") for target in TIED for run in UNTIED_RUNS for more in MORE]
    + [tied_now(run, 2, target, arguments, "refuse") for target in TIED for run, arguments in WITH_STATES]
)
def test_names_that_are_tied_now_and_have_other_weights_need_a_word(cell: Cell, facts: list[Refused]) -> None:
    Refuses("MismatchError", ("different values under their names",)).check(facts)
    (remedy,) = [each for each in facts[0].remedies if each.config]
    assert remedy.config == FIRST and "embedding.weight" in remedy.text


@cells([tied_now(Setup(0), 0, target, {}, "refuse") for target in TIED])
def test_what_states_names_that_are_tied_now_have_is_not_known(cell: Cell, facts: list[Refused]) -> None:
    """Without ZeRO, states have no names, and before the first step not even shapes."""
    Refuses("MismatchError").check(facts)
    (text,) = facts[0].texts
    assert facts[0].kinds[0] == "MismatchError" and "different values under their names" not in text


@pytest.mark.parametrize("run", [Experts(2, 1, 2), Experts(2, 1, 2, autoep=True)], ids=lambda run: run.name)
def test_experts_are_in_files_of_their_own(run: Experts, saves: Saves, tmp_path: Path) -> None:
    folder = shutil.copytree(saves.folder(Save(run, 2, "expert_jobs.save_each")), tmp_path / "copy")
    lost()(folder)
    opened = elastic_ckpt.open(folder)
    wanted = {name: value.bfloat16() for name, value in truth_of(folder)["masters"].items()}
    assert opened.keys() - wanted.keys() == {"ticks"} and wanted.keys() <= opened.keys()
    assert {name for name, value in wanted.items() if not torch.equal(opened[name], value)} == set()
    next(folder.glob("step4/layer_1_expert_5_*")).unlink()
    with pytest.raises(elastic_ckpt.ElasticCkptError, match="layer_1_expert_5"):
        elastic_ckpt.open(folder)


# --- layer files of gpt-neox ------------------------------------------------------------------------------------------

NEOX, NEOX_J = Parallel("neox", "real", 2, 1, 1, "fp16"), Parallel("neoxj", "real", 2, 1, 1, "fp32")


def layers_of(setup: Parallel, writes: Callable[..., Any], **how: Any) -> Save:
    """A run of gpt-neox, as its code writes it, of which the files of the layers are left; ``how``: see ``write``."""
    run = Save(setup, 2 * setup.pp, "foreign_jobs.save_each")
    whole = Save(setup, 1, "foreign_jobs.rewrite", {"writes": writes}, source=run)
    return Save(setup, 1, "foreign_jobs.rewrite", {"writes": partial(weights_jobs.write, **how)}, source=whole)


#: At TP 2: with names, without any, drifted, of two stages, as the 20B model's, and with shares of biases.
LAYERS = {
    "listed": layers_of(NEOX, as_neox),
    "unlisted": layers_of(NEOX, as_neox, change=without_names),
    "drifted": layers_of(NEOX, as_neox, change=drift),
    "stages": layers_of(replace(NEOX, pp=2), as_neox, change=without_names),
    "twenty": layers_of(NEOX, as_twenty),
    "shares": layers_of(NEOX_J, partial(as_neox, gpt_j=True), gpt_j=True),
}
SHARES = "gpt-neox-gptj-residual"


@pytest.mark.parametrize("name", ["listed", "unlisted", "stages", "shares", "twenty"])
def test_layer_files_of_gpt_neox_are_merged_by_its_preset(name: str, saves: Saves, tmp_path: Path) -> None:
    source, has_shares = saves.folder(LAYERS[name]), name == "shares"
    found, notes = exported(source, tmp_path / "out", "--tp-preset", SHARES if has_shares else "gpt-neox")
    expected = read(source / "truth.pt")
    wanted = {**expected["weights"], **expected["buffers"]}
    assert found.keys() == wanted.keys()
    assert {key for key, value in found.items() if not torch.equal(value, wanted[key].to(value.dtype))} == set()
    dtype = torch.float32 if has_shares else torch.float16
    assert {found[key].dtype for key in expected["weights"]} == {dtype}
    assert [note for note in notes if f"own weights, saved in {str(dtype).removeprefix('torch.')}" in note]
    assert ("means of shards are rounded to float16" in " | ".join(notes)) == (not has_shares)
    assert ("layers without files" in " | ".join(notes)) == (name in ("unlisted", "stages", "twenty"))


@pytest.mark.parametrize("policy", ["strict", "first", "mean"])
def test_copies_that_drifted_are_judged_as_those_of_masters(policy: str, saves: Saves, tmp_path: Path) -> None:
    folder = saves.folder(LAYERS["drifted"])
    rule = {"pattern": r"\d+\.input_layernorm\.weight", "kind": "replicated"}
    section = {"tp_preset": "gpt-neox", "tp_rules": [rule], "replicated_params": policy}
    (tmp_path / "ds.json").write_text(json.dumps({"elastic_checkpoint": section}))
    words = ["export", str(folder), str(tmp_path / "out"), "--config", str(tmp_path / "ds.json"), "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    if policy == "strict":
        assert result.exit_code == 3 and DRIFTED in result.output and "2 copies" in result.output, result.output
        return
    assert result.exit_code == 0, result.output
    first, second = (read(folder / TAG / f"layer_03-model_0{rank}-model_states.pt") for rank in (0, 1))
    both = [each[DRIFTED[2:]] for each in (first, second)]
    wanted = both[0] if policy == "first" else ((both[0].float() + both[1].float()) / 2).half()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[DRIFTED], wanted)
    assert f"{policy} was taken" in " | ".join(json.loads(result.stdout)["notes"])


def of_layers(name: str, ranks: int, tp: int, pp: int, preset: str = "gpt-neox") -> Cell:
    save = LAYERS[name]
    target = replace(save.setup, tp=tp, pp=pp)
    case = {"setup": target, "arguments": ALONE, "options": {"tp_preset": preset}}
    return Cell(f"{name} to {target.name}-n{ranks}", save, "weights_jobs.load", ranks, case)


@cells(
    [
        *(
            of_layers(name, ranks, tp, pp)
            for ranks, tp, pp in ((1, 1, 1), (4, 4, 1), (2, 1, 2))
            for name in LAYERS
            if name != "shares"
        ),
        of_layers("shares", 4, 4, 1, SHARES),
    ]
)
def test_layer_files_load_at_other_tensor_and_pipeline_parallel_degrees(cell: Cell, facts: list[Loaded]) -> None:
    for load in facts:
        assert load.differences == {} and load.report.source.tp == 2, load.where
        assert "own weights, saved in float" in " | ".join(load.report.notes)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("layer_03-model_01-model_states.pt", "layer_03-model_01-model_states.pt"),
        ("layer_03-model_0*", "3.input_layernorm.weight"),
        ("mp_rank_01*", "ranks"),
    ],
)
def test_a_missing_file_of_weights_is_named(missing: str, says: str, saves: Saves, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saves.folder(LAYERS["listed"]), tmp_path / "folder"))
    for path in (folder / TAG).glob(missing):
        path.unlink()
    with pytest.raises(elastic_ckpt.ElasticCkptError, match=says) as caught:
        elastic_ckpt.open(folder, config=ElasticConfig(tp_preset="gpt-neox"))
    assert "LayoutError" in [kind.__name__ for kind in type(caught.value).__mro__]


def test_ranks_of_a_run_are_told_apart_by_their_layers(saves: Saves) -> None:
    """Two stages of two tensor-parallel ranks, of which model-states files say nothing."""
    folder = saves.folder(LAYERS["stages"])
    assert sorted(map(mp_rank, (folder / TAG).glob("mp_rank_*.pt"))) == [0, 1, 2, 3]
    opened = elastic_ckpt.open(folder, config=ElasticConfig(tp_preset="gpt-neox"))
    assert (opened._opened.metadata.source.tp, opened._opened.metadata.source.pp) == (2, 2)
