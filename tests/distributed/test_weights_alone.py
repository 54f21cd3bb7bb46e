"""Checkpoints whose optimizer files were removed to save space: their weights, exported and loaded at other topologies."""

# Covers elastic_ckpt/formats/module_weights.py, which reads such folders.

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import elastic_ckpt
from elastic_ckpt.cli import app
from elastic_ckpt.config import ElasticConfig
from tests.distributed.conftest import Launch
from tests.distributed.expert_jobs import Experts
from tests.distributed.foreign_folders import TAG, as_deeperspeed_03, as_neox, mp_rank, read
from tests.distributed.jobs import truth_of
from tests.distributed.model import Setup
from tests.distributed.parallel_models import Parallel

NEOX, NEOX_J = Parallel("neox", "real", 2, 1, 1, "fp16"), Parallel("neoxj", "real", 2, 1, 1, "fp32")
SAVED = [Setup(1), Setup(2, "bf16")]
TARGETS = [Setup(0), Setup(1), Setup(2, "bf16"), Setup(3)]
#: Of two optimizer-states files, the one that is missing.
LACKS = ("0", "1")
WHOLE, ROWS = ("norm.weight", "norm.bias"), ("attention.dense.weight", "dense_4h_to_h.weight")
SUMMED = ("attention.dense.bias", "dense_4h_to_h.bias")
DRIFTED = "3.input_layernorm.weight"


def without_optimizer(source: Path, target: Path, ranks: str = "") -> Path:
    """A copy without optimizer-states files, or those of some ranks."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for path in target.glob(f"*/*zero_pp_rank_{ranks}*_mp_rank_*optim_states.pt" if ranks else "*/*optim_states.pt"):
        path.unlink()
    return target


@pytest.fixture(scope="module")
def plain(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    launch(2, "save", {"folder": str(folder / "saved"), "setups": [*SAVED, Setup(3)]})
    for path in (folder / "saved").iterdir():
        truth = truth_of(path)
        kept = {name: value for name, value in truth["buffers"].items() if name != "scratch"}  # not persistent
        expected = {"weights": truth["weights"], "buffers": kept}
        torch.save(expected, without_optimizer(path, folder / path.name) / "expected.pt")
        for rank in LACKS:
            torch.save(expected, without_optimizer(path, folder / f"{path.name}-lacks{rank}", rank) / "expected.pt")
    return folder


def merged(tag: Path, gpt_j: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The whole weights and buffers of two tensor-parallel ranks of gpt-neox, by its layers' files."""
    found: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "buffers": {}}
    for path in sorted(tag.glob("layer_*-model_00-model_states.pt")):
        first, second = read(path), read(path.with_name(path.name.replace("model_00", "model_01")))
        for key, one in first.items():
            name, two = f"{int(path.name[6:8])}.{key}", second[key]
            if key.endswith("inv_freq"):
                found["buffers"][name] = one
            elif key.endswith(ROWS):
                found["weights"][name] = torch.cat([one, two], 1)
            elif key.endswith(SUMMED) and gpt_j:
                found["weights"][name] = one.float() + two.float()
            elif key.endswith(SUMMED):
                found["weights"][name] = one
            elif key.endswith(WHOLE):
                found["weights"][name] = (one.float() + two.float()) / 2
            else:
                found["weights"][name] = torch.cat([one, two])
    return found


def without_names(folder: Path) -> None:
    """Model-states files that list no parameters and state no pipeline, as of engines without ZeRO."""
    for path in (folder / TAG).glob("mp_rank_*.pt"):
        tree = {key: value for key, value in read(path).items() if key != "checkpoint_parallel_dimensions"}
        torch.save({**tree, "param_shapes": None}, path)


def drift(folder: Path) -> None:
    """The second rank's copy of a norm becomes another one."""
    path = folder / TAG / "layer_03-model_01-model_states.pt"
    weights = read(path)
    weights[DRIFTED[2:]].mul_(1.25)
    torch.save(weights, path)


@pytest.fixture(scope="module")
def neox(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer files of gpt-neox at TP 2: with names, without any, of two stages, as the 20B model's, and with shares."""
    folder = tmp_path_factory.mktemp("neox")
    launch(2, "foreign_jobs.save", {"folder": str(folder / "saved"), "setups": [NEOX, NEOX_J]})
    launch(4, "foreign_jobs.save", {"folder": str(folder / "saved"), "setups": [replace(NEOX, pp=2)]})
    native = folder / "saved" / f"{NEOX.name}-dp1"
    for target, source, gpt_j in (
        ("listed", native, False),
        ("unlisted", native, False),
        ("drifted", native, False),
        ("stages", folder / "saved" / f"{replace(NEOX, pp=2).name}-dp1", False),
        ("shares", folder / "saved" / f"{NEOX_J.name}-dp1", True),
    ):
        as_neox(source, folder / "made" / target, gpt_j)
        without_optimizer(folder / "made" / target, folder / target)
    without_names(folder / "unlisted")
    without_names(folder / "stages")
    drift(folder / "drifted")
    as_deeperspeed_03(native, folder / "made" / "twenty")
    shutil.copytree(folder / "listed" / TAG / "configs", folder / "made" / "twenty" / TAG / "configs")
    without_optimizer(folder / "made" / "twenty", folder / "twenty")
    for path in folder.glob(f"*/{TAG}"):
        torch.save(merged(path, path.parent.name == "shares"), path.parent / "expected.pt")
    return folder


def exported(source: Path, out: Path, *options: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    result = CliRunner().invoke(app, ["export", str(source), str(out), *options, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return load_file(out / "model.safetensors"), json.loads(result.stdout)["notes"]


def of(folder: Path, refused: bool = False, **config: Any) -> dict[str, Any]:
    """A source of ``weights_jobs.load``."""
    how = {"arguments": {"load_module_only": True}, "expected": str(folder / "expected.pt")}
    return {"folder": str(folder), "config": config, "refused": refused, **how}


@pytest.mark.parametrize("lacks", ["", *(f"-lacks{rank}" for rank in LACKS)])
@pytest.mark.parametrize("setup", SAVED, ids=lambda setup: setup.name)
def test_a_folder_without_optimizer_files_is_exported_in_the_saved_dtype(
    setup: Setup, lacks: str, plain: Path, tmp_path: Path
) -> None:
    source = plain / f"{setup.name}-dp2{lacks}"
    found, notes = exported(source, tmp_path / "out")
    expected = torch.load(source / "expected.pt")
    wanted = {**expected["weights"], **expected["buffers"]}
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in wanted.items()}
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    dtype = "bfloat16" if setup.precision == "bf16" else "float32"
    why = f"are missing ({'bf16_' * (dtype != 'float32')}zero_pp_rank_{lacks[-1]}_" if lacks else "no optimizer states"
    assert [note for note in notes if why in note and f"saved in {dtype}" in note]
    for command, level in (("inspect", 1), ("verify", 1)):
        result = CliRunner().invoke(app, [command, str(source), "--json"])
        assert result.exit_code == level and (not lacks or f"zero_pp_rank_{lacks[-1]}" in result.stdout), result.output
    opened = elastic_ckpt.open(source)
    assert all(torch.equal(opened[name], value) for name, value in found.items())


def test_what_needs_the_missing_files_is_refused(plain: Path, tmp_path: Path) -> None:
    weights, zero3 = plain / f"{Setup(1).name}-dp2", plain / f"{Setup(3).name}-dp2"
    for source, options, says in ((weights, ["--optimizer"], "no optimizer-states files"), (zero3, [], "under ZeRO-3")):
        result = CliRunner().invoke(app, ["export", str(source), str(tmp_path / "out"), *options, "--json"])
        assert result.exit_code == 3 and says in result.output, result.output
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_stage_at_any_degree_loads_them(world_size: int, launch: Launch, plain: Path) -> None:
    whole = [f"{setup.name}-dp2" for setup in SAVED]
    folders = [plain / name for name in (*whole, *(f"{name}-lacks{rank}" for name in whole for rank in LACKS))]
    counted = [{**of(plain / name), "arguments": {"load_optimizer_states": False}} for name in (whole[0], folders[2])]
    zero3 = f"{Setup(3).name}-dp2"
    with_states = [{**of(folder, refused=True), "arguments": {}} for folder in (folders[0], *folders[2:4])]
    in_shards = [of(plain / name, refused=True) for name in (zero3, *(f"{zero3}-lacks{rank}" for rank in LACKS))]
    sources = [*map(of, folders), *counted, *with_states, *in_shards]
    targets = [{"setup": setup, "sources": sources} for setup in TARGETS]
    facts = launch(world_size, "weights_jobs.load", targets)
    for found in facts:
        name = Path(found.case["folder"]).name
        lacks = f"zero_pp_rank_{name[-1]}_mp_rank_00" if "lacks" in name else ""
        if not found.case["refused"]:
            assert found.differences == {} and found.report.source.zero_stage in (1, 2), found.where
            notes = " | ".join(found.report.notes)
            assert f"own weights, saved in {'bfloat16' if 'bf16' in name else 'float32'}" in notes
            assert ("optimizer-states files are missing" in notes) == bool(lacks) and lacks in notes, notes
            continue
        (text,) = found.texts
        assert "LayoutError" in found.kinds and found.changed == set(), text
        assert lacks in text and ("load_module_only=True" in text) == ("z3" not in name), text
        assert lacks or "z3" not in name or "under ZeRO-3" in text, text
    assert len(facts) == world_size * len(targets) * len(sources)


def test_names_that_are_no_longer_tied_both_get_the_weights(launch: Launch, plain: Path) -> None:
    """From masters, and from the files of the module; with optimizer states, what each would have is not known."""
    names = [f"{setup.name}-dp2" for setup in SAVED]
    whole = [plain / "saved" / f"{setup.name}-dp2" for setup in (Setup(1), Setup(3))]  # in fp32, as masters are
    folders = [*whole, *map(plain.__truediv__, names)]
    sources = [{**of(folder), "expected": str(plain / folder.name / "expected.pt")} for folder in folders]
    sources.append({**sources[0], "arguments": {}, "refused": True})
    targets = [{"setup": setup, "model": "UntiedLM", "sources": sources} for setup in TARGETS]
    facts = launch(2, "weights_jobs.load", targets)
    for found in facts:
        if found.case["refused"]:
            (text,) = found.texts
            assert "MismatchError" in found.kinds and "tied at save time, not now: head.weight" in text, text
            continue
        assert found.differences == {}, found.where
        assert "tied in the checkpoint, not here: head.weight" in " | ".join(found.report.notes)
    assert len(facts) == 2 * len(targets) * len(sources)


@pytest.mark.parametrize("setup", [Setup(1), Setup(3), Setup(0)], ids=lambda setup: setup.name)
def test_names_that_are_tied_now_have_equal_weights_or_a_word(setup: Setup, launch: Launch, tmp_path: Path) -> None:
    launch(2, "weights_jobs.save_untied", {"folder": str(tmp_path), "setup": setup})
    equal, other = of(tmp_path / "equal"), of(tmp_path / "other", replicated_params="first")
    both = [equal, {**equal, "arguments": {"load_optimizer_states": False}}, other]
    refused = of(tmp_path / "other", refused=True)
    with_states = {**equal, "arguments": {}, "refused": True}
    sources = [*both, refused, with_states]
    targets = [{"setup": target, "sources": sources} for target in (Setup(1), Setup(3), Setup(2, "bf16"))]
    facts = launch(3, "weights_jobs.load", targets)
    for found in facts:
        if not found.case["refused"]:
            assert found.differences == {}, found.where
            notes = " | ".join(found.report.notes)
            says = "tied here, not in the checkpoint" in notes and "head.weight = embedding.weight" in notes
            assert says == (setup.stage > 0), notes  # without masters, weights are those of the module's files
            assert ("different when saved" in notes) == bool(found.case["config"])
            continue
        (text,) = found.texts
        assert found.kinds[0] == "MismatchError" and found.changed == set(), text
        assert ("different values under their names" in text) == ("load_module_only" in found.case["arguments"]), text
        if "load_module_only" in found.case["arguments"]:
            (remedy,) = [each for each in found.remedies if each.config]
            assert remedy.config == other["config"] and "embedding.weight" in remedy.text
    assert len(facts) == 3 * len(targets) * len(sources)


def test_experts_are_in_files_of_their_own(launch: Launch, tmp_path: Path) -> None:
    runs = [Experts(2, 1, 2), Experts(2, 1, 2, autoep=True)]
    launch(2, "expert_jobs.save", {"folder": str(tmp_path / "saved"), "runs": runs})
    for run in runs:
        folder = without_optimizer(tmp_path / "saved" / run.name, tmp_path / run.name)
        opened = elastic_ckpt.open(folder)
        wanted = {name: value.bfloat16() for name, value in truth_of(folder)["masters"].items()}
        assert opened.keys() - wanted.keys() == {"ticks"} and wanted.keys() <= opened.keys()
        assert {name for name, value in wanted.items() if not torch.equal(opened[name], value)} == set(), run.name
    next(folder.glob("step4/layer_1_expert_5_*")).unlink()
    with pytest.raises(elastic_ckpt.ElasticCkptError, match="layer_1_expert_5"):
        elastic_ckpt.open(folder)


PRESETS = {"shares": "gpt-neox-gptj-residual"}


@pytest.mark.parametrize("name", ["listed", "unlisted", "stages", "shares", "twenty"])
def test_layer_files_of_gpt_neox_are_merged_by_its_preset(name: str, neox: Path, tmp_path: Path) -> None:
    found, notes = exported(neox / name, tmp_path / "out", "--tp-preset", PRESETS.get(name, "gpt-neox"))
    expected = torch.load(neox / name / "expected.pt")
    wanted = {**expected["weights"], **expected["buffers"]}
    assert found.keys() == wanted.keys()
    assert {key for key, value in found.items() if not torch.equal(value, wanted[key].to(value.dtype))} == set()
    dtype = torch.float32 if name == "shares" else torch.float16
    assert {found[key].dtype for key in expected["weights"]} == {dtype}
    assert [note for note in notes if f"own weights, saved in {str(dtype).removeprefix('torch.')}" in note]
    assert ("means of shards are rounded to float16" in " | ".join(notes)) == (name != "shares")
    assert ("layers without files" in " | ".join(notes)) == (name in ("unlisted", "stages", "twenty"))


@pytest.mark.parametrize("policy", ["strict", "first", "mean"])
def test_copies_that_drifted_are_judged_as_those_of_masters(policy: str, neox: Path, tmp_path: Path) -> None:
    rule = {"pattern": r"\d+\.input_layernorm\.weight", "kind": "replicated"}
    section = {"tp_preset": "gpt-neox", "tp_rules": [rule], "replicated_params": policy}
    (tmp_path / "ds.json").write_text(json.dumps({"elastic_checkpoint": section}))
    words = ["export", str(neox / "drifted"), str(tmp_path / "out"), "--config", str(tmp_path / "ds.json"), "--json"]
    result = CliRunner().invoke(app, words)
    if policy == "strict":
        assert result.exit_code == 3 and DRIFTED in result.output and "2 copies" in result.output, result.output
        return
    assert result.exit_code == 0, result.output
    first, second = (read(neox / "drifted" / TAG / f"layer_03-model_0{rank}-model_states.pt") for rank in (0, 1))
    both = [each[DRIFTED[2:]] for each in (first, second)]
    wanted = both[0] if policy == "first" else ((both[0].float() + both[1].float()) / 2).half()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[DRIFTED], wanted)
    assert f"{policy} was taken" in " | ".join(json.loads(result.stdout)["notes"])


@pytest.mark.parametrize(("world_size", "tp", "pp"), [(1, 1, 1), (4, 4, 1), (2, 1, 2)])
def test_layer_files_load_at_other_tensor_and_pipeline_parallel_degrees(
    world_size: int, tp: int, pp: int, launch: Launch, neox: Path
) -> None:
    plain = [of(neox / name, tp_preset="gpt-neox") for name in ("listed", "unlisted", "drifted", "stages", "twenty")]
    targets = [{"setup": replace(NEOX, tp=tp, pp=pp), "sources": plain}]
    if tp == 4:
        shares = of(neox / "shares", tp_preset="gpt-neox-gptj-residual")
        targets.append({"setup": replace(NEOX_J, tp=tp, pp=pp), "sources": [shares]})
    facts = launch(world_size, "weights_jobs.load", targets)
    for found in facts:
        assert found.differences == {} and found.report.source.tp == 2, found.where
        assert "own weights, saved in float" in " | ".join(found.report.notes)
    assert len(facts) == world_size * (5 + (tp == 4))


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("layer_03-model_01-model_states.pt", "layer_03-model_01-model_states.pt"),
        ("layer_03-model_0*", "3.input_layernorm.weight"),
        ("mp_rank_01*", "ranks"),
    ],
)
def test_a_missing_file_of_weights_is_named(missing: str, says: str, neox: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(neox / "listed", tmp_path / "folder"))
    for path in (folder / TAG).glob(missing):
        path.unlink()
    with pytest.raises(elastic_ckpt.ElasticCkptError, match=says) as caught:
        elastic_ckpt.open(folder, config=ElasticConfig(tp_preset="gpt-neox"))
    assert "LayoutError" in [kind.__name__ for kind in type(caught.value).__mro__]


def test_ranks_of_a_run_are_told_apart_by_their_layers(neox: Path) -> None:
    """Two stages of two tensor-parallel ranks, of which model-states files say nothing."""
    assert sorted(map(mp_rank, (neox / "stages" / TAG).glob("mp_rank_*.pt"))) == [0, 1, 2, 3]
    opened = elastic_ckpt.open(neox / "stages", config=ElasticConfig(tp_preset="gpt-neox"))
    assert (opened._opened.metadata.source.tp, opened._opened.metadata.source.pp) == (2, 2)
