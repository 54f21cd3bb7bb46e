"""States that are no plain moments in universal checkpoints: converted, and loaded as from the native checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
from typer.testing import CliRunner

from elastic_ckpt.cli import app
from tests.distributed.conftest import Launch
from tests.distributed.model import Setup
from tests.distributed.optimizer_expectations import LOOSE, Exact, Requantized, bnb, configured
from tests.distributed.parallel_models import Parallel

SAVED = [bnb(name, stage) for name in ("AdamW8bit", "Lion8bit") for stage in (1, 2, 3)]
#: Two averages in one state; beside the step, a count, a factor and a norm of each partition, and a table.
OTHERS = [
    bnb("AdEMAMix8bit", 3),
    bnb("AdEMAMix", 2),
    bnb("LAMB8bit", 1),
    Setup(1, optimizer="nadam"),
    *[Setup(stage, optimizer="unknown") for stage in (1, 3)],
]
MAPPED = [Setup(stage, optimizer="mapped") for stage in (1, 2, 3)]
BY_NAME, BY_SIZE = {"my_map": "replicated"}, {"numel<=256": "replicated"}


def save(launch: Launch, folder: Path, setups: Iterable[Setup]) -> None:
    """Each by two ranks, in a folder of its name."""
    launch(2, "optimizer_jobs.save", [{"setup": each, "folder": str(folder / f"{each.name}-dp2")} for each in setups])


def load(launch: Launch, degree: int, targets: Iterable[tuple[Setup, list[dict[str, Any]]]]) -> list[Any]:
    cases = [{"setup": setup, **source} for setup, sources in targets for source in sources]
    return launch(degree, "optimizer_jobs.load", cases, timeout=500)


def source(folder: str, loss: float = 1e-5) -> dict[str, Any]:
    """A checkpoint to load, and by which losses of the run that goes on may differ."""
    return {"folder": folder, "loss": loss}


def assert_exact(found: Any) -> None:
    Exact(found.case["loss"]).check([found])


def assert_requantized(found: Any) -> None:
    Requantized(found.case["loss"]).check([found])


@pytest.fixture(scope="module")
def universal(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8-bit checkpoints of two ranks as universal ones, with their truth beside them."""
    folder = tmp_path_factory.mktemp("universal_states")
    save(launch, folder / "native", [*SAVED, *OTHERS, *MAPPED])
    config = folder / "config.json"
    config.write_text(json.dumps({"elastic_checkpoint": {"states": BY_NAME}}))
    for setup in [*SAVED, *OTHERS]:
        convert(folder / "native" / f"{setup.name}-dp2", folder / setup.name)
    for setup in MAPPED:
        convert(folder / "native" / f"{setup.name}-dp2", folder / setup.name, "--config", str(config))
    return folder


def convert(native: Path, target: Path, *options: str) -> dict[str, Any]:
    words = ["convert", str(native), str(target / "step4_universal"), "--to", "universal", "--json", *options]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    shutil.copy(native / "truth.pt", target / "truth.pt")
    return dict(json.loads(result.stdout))


def targets(
    folder: Path, setups: Iterable[Setup], loss: float, **options: Any
) -> list[tuple[Setup, list[dict[str, Any]]]]:
    sources = {setup: [source(str(folder / setup.name), loss)] for setup in setups}
    return [(configured(setup, **options) if options else setup, found) for setup, found in sources.items()]


def test_at_the_saved_topology_8_bit_states_come_back_bit_by_bit(launch: Launch, universal: Path) -> None:
    """Also if nothing may change: blocks that neighbours share are known to be the same."""
    for found in load(launch, 2, targets(universal, SAVED, 1e-5, on_change="error")):
        assert_exact(found)


@pytest.mark.parametrize("degree", [1, 3, 4])
def test_at_another_degree_they_are_within_the_bound(degree: int, launch: Launch, universal: Path) -> None:
    """Into their own stage, and into others; one rank holds everything without ZeRO, too."""
    pairs = [(0, 2), (2, 1), (5, 3)]  # of setups: into stage 3, 2, and 1
    crossed = [(SAVED[live], [source(str(universal / SAVED[saved].name), LOOSE)]) for saved, live in pairs]
    if degree == 1:
        crossed = [(bnb("AdamW8bit", 0), [source(str(universal / SAVED[0].name), LOOSE)])]
    for found in load(launch, degree, targets(universal, SAVED, LOOSE) + crossed):
        assert_requantized(found)


def test_states_of_other_optimizers_come_back(launch: Launch, universal: Path) -> None:
    whole = [setup for setup in OTHERS if "8bit" not in setup.optimizer]
    for found in load(launch, 3, targets(universal, whole, 1e-5)):
        assert_exact(found)
    for found in load(launch, 3, targets(universal, [bnb("AdEMAMix8bit", 3), bnb("LAMB8bit", 1)], LOOSE)):
        assert_requantized(found)


@pytest.mark.parametrize("degree", [1, 3])
def test_a_map_that_the_config_names_is_whole_on_every_rank(degree: int, launch: Launch, universal: Path) -> None:
    """By its name, and by its size; from one stage into the others."""
    sources = [source(str(universal / setup.name)) for setup in MAPPED]
    live = [configured(MAPPED[0], states=BY_NAME), configured(MAPPED[2], states=BY_SIZE)]
    for found in load(launch, degree, [(setup, sources) for setup in live]):
        assert_exact(found)


def test_folders_made_by_hand_are_read(launch: Launch, universal: Path, tmp_path: Path) -> None:
    """A file for each state, in each parameter's folder: blocks are counted from the parameter's first element."""
    eight_bit, mapped = bnb("AdamW8bit", 1), MAPPED[2]
    for setup in (eight_bit, mapped):
        by_hand(universal / setup.name, tmp_path / setup.name)
    quantized = targets(tmp_path, [eight_bit], LOOSE)
    into_three = [(bnb("AdamW8bit", 3), quantized[0][1])]
    live = configured(mapped, states=BY_NAME)
    maps = [(live, [source(str(tmp_path / mapped.name))])]
    for found in load(launch, 3, [*quantized, *into_three]):
        assert_requantized(found)
    for found in load(launch, 3, maps):
        assert_exact(found)


def test_a_folder_in_a_folder_made_by_hand_loads_without_a_latest_file(
    launch: Launch, universal: Path, tmp_path: Path
) -> None:
    """As BLOOM's are published: with the folder around the tag, and with the tag's own; a map is known by its size."""
    sources = []
    for setup in MAPPED:
        by_hand(universal / setup.name, tmp_path / setup.name)
        (tmp_path / setup.name / "latest_universal").unlink()
        tag = tmp_path / setup.name / "step4_universal"
        shutil.copy(tmp_path / setup.name / "truth.pt", tag)
        sources += [source(str(folder)) for folder in (tmp_path / setup.name, tag)]
    live = [configured(setup, states=BY_SIZE, mode="require") for setup in MAPPED[::2]]
    for found in load(launch, 3, [(setup, sources) for setup in live]):
        assert_exact(found)


def by_hand(converted: Path, target: Path) -> None:
    """The checkpoint as somebody else would write it, with bitsandbytes' own quantization, and its truth."""
    shutil.copytree(converted, target)
    truth = torch.load(target / "truth.pt", weights_only=False)
    zero = target / "step4_universal" / "zero"
    common = torch.load(zero / "optimizer_state.pt", weights_only=False)
    shared, _ = common.pop("elastic_ckpt_shared_states"), common.pop("elastic_ckpt_files")
    torch.save(common, zero / "optimizer_state.pt")
    for folder in filter(Path.is_dir, zero.iterdir()):
        if not (folder / "step.pt").exists() and not (folder / "trail.pt").exists():
            continue  # it has no states
        for key in shared.keys() - {"qmap1", "qmap2"}:
            torch.save(shared[key], folder / f"{key}.pt")
        for number in (1, 2):
            file = folder / f"state{number}.pt"
            if file.exists() and torch.load(file)["param"].dtype == torch.uint8:
                values = truth["states"][folder.name, f"state{number}"].float()
                codes, made = quantize_blockwise(values.reshape(-1), code=shared[f"qmap{number}"], blocksize=256)
                torch.save({"param": codes.reshape(values.shape[1:])}, file)
                torch.save(made.absmax, folder / f"absmax{number}.pt")
                torch.save(shared[f"qmap{number}"], folder / f"qmap{number}.pt")
                read = dequantize_blockwise(codes, made).reshape(values.shape)
                truth["states"][folder.name, f"state{number}"] = read
    torch.save(truth, target / "truth.pt")


LLAMA = Parallel("megatron", "llama", tp=2, stage=1)


@pytest.fixture(scope="module")
def parallel(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor-parallel checkpoint with rows, columns, gated halves and a vocabulary in 8 bits, and its conversion."""
    folder = tmp_path_factory.mktemp("parallel_states")
    launch(2, "universal_states_jobs.save", {"folder": str(folder / "native"), "setups": [LLAMA]})
    native = folder / "native" / f"{LLAMA.name}-dp1"
    torch.save({}, native / "truth.pt")
    convert(native, folder / "universal", "--tp-preset", "megatron-core")
    return folder


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 2), (4, 2)])
def test_at_any_tensor_parallel_degree_they_are_what_the_native_checkpoint_gives(
    ranks: int, tp: int, launch: Launch, parallel: Path
) -> None:
    target = {
        "setup": replace(LLAMA, tp=tp),
        "config": {"elastic_checkpoint": {"tp_preset": "megatron-core"}},
        "native": str(parallel / "native" / f"{LLAMA.name}-dp1"),
        "universal": str(parallel / "universal"),
    }
    for found in launch(ranks, "universal_states_jobs.load", [target]):
        assert found.formats == ["native", "universal"] and found.differences == [], found.where
        assert found.coded > 0 and found.requantized[0] == found.requantized[1], found.where
        assert (found.requantized[0] > 0) == (ranks != 2), found.where


def test_what_no_shape_tells_is_refused_with_the_line_that_settles_it(
    launch: Launch, universal: Path, tmp_path: Path
) -> None:
    setups = (MAPPED[0], MAPPED[2])
    for setup in setups:
        by_hand(universal / setup.name, tmp_path / setup.name)
    words = ("my_map", '"states": {"my_map": "replicated"}')
    cases = [
        {"setup": setup, "folder": str(tmp_path / setup.name), "words": words, "model": "WideLM"} for setup in setups
    ]
    for refused in launch(2, "refusal_jobs.refuse", cases):
        (text,) = refused.texts
        assert refused.kinds and refused.changed == set(), text
        assert all(word in text for word in refused.case["words"]) and "two conversions" not in text, text


#: Files that are removed, the setup that saved them, and whether the folder is made by hand, without a list of its files.
REMOVED: list[tuple[str, Setup, bool]] = [
    ("zero/optimizer_state.pt", SAVED[0], False),
    ("zero/bulk/absmax1.pt", SAVED[0], False),
    ("zero/*/absmax2.pt", SAVED[0], False),
    ("zero/*/state1.pt", SAVED[0], False),
    ("zero/*/step.pt", SAVED[0], False),
    ("zero/bulk/qmap1.pt", SAVED[0], True),
    ("zero/*/absmax1.pt", SAVED[0], True),
    ("zero/bulk/fp32.pt", SAVED[0], True),
    ("zero/optimizer_state.pt", MAPPED[0], False),
    ("zero/*/trail.pt", MAPPED[0], False),
    ("zero/bulk/my_map.pt", MAPPED[0], True),
    ("zero/gain/count.pt", MAPPED[0], True),
]


def test_a_missing_file_is_named_by_loads_and_commands(launch: Launch, universal: Path, tmp_path: Path) -> None:
    live = [SAVED[0], configured(MAPPED[0], states=BY_NAME)]
    every: dict[str, str] = {}
    targets: list[dict[str, Any]] = [{"setup": setup, "folders": []} for setup in live]
    for number, (removed, setup, is_by_hand) in enumerate(REMOVED):
        folder = tmp_path / str(number)
        (by_hand if is_by_hand else shutil.copytree)(universal / setup.name, folder)
        for path in sorted((folder / "step4_universal").glob(removed)):
            path.unlink()
        every[str(folder)] = removed
        targets[setup is not SAVED[0]]["folders"].append(str(folder))
    facts = launch(2, "missing_jobs.load", targets)
    assert len(facts) == len(REMOVED)
    for refused in facts:
        removed = every[refused.case]
        wanted = removed.rpartition("/")[2]
        (text,) = refused.texts
        assert "DamagedError" in refused.kinds and refused.changed == set(), text
        assert "missing" in text and f"/{wanted}" in text and ("*" in removed or f"/{removed}" in text), text
        words = ["--config", str(universal / "config.json"), "--json"]
        dcp = str(tmp_path / "dcp")
        for command, code in ((["verify"], 1), (["inspect"], 1), (["convert", "--to", "dcp"], 3)):
            targets = [refused.case, dcp] if command[0] == "convert" else [refused.case]
            result = CliRunner().invoke(app, [*command, *targets, *words], catch_exceptions=False)
            assert result.exit_code == code and f"/{wanted}" in result.stdout, (removed, result.stdout)


def test_the_commands_know_these_states(universal: Path) -> None:
    """What they read is what the native checkpoint has, dequantized; checksums are right."""
    for setup in (SAVED[0], MAPPED[0]):
        native, converted = (str(universal / name) for name in (f"native/{setup.name}-dp2", setup.name))
        config = str(universal / "config.json")  # of the native one, whose shapes tell nothing of the map
        for words in (
            ["diff", native, converted, "--config", config],
            ["verify", "--full", converted],
            ["inspect", converted],
        ):
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            assert result.exit_code == 0, result.output
    assert "replicated" in result.output and "my_map" in result.output


def test_deepspeed_loads_what_is_shared_by_all_beside_the_states_that_it_knows(launch: Launch, universal: Path) -> None:
    """A map and a count are where DeepSpeed's loader does not look: it restores masters and momentum."""
    target = {"setup": MAPPED[0], "folder": str(universal / MAPPED[0].name)}
    for differences in launch(3, "universal_states_jobs.deepspeed_loads", target):
        assert differences == {}


def test_a_map_goes_to_a_folder_of_dcp_and_back(launch: Launch, universal: Path, tmp_path: Path) -> None:
    """Beside the states of each parameter, as ``get_state_dict`` has it; 8-bit states are refused."""
    native = universal / "native" / f"{MAPPED[2].name}-dp2"
    words = ["convert", str(native), str(tmp_path / "dcp"), "--to", "dcp", "--config", str(universal / "config.json")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    shutil.copy(native / "truth.pt", tmp_path / "dcp" / "truth.pt")
    for states in (BY_NAME, BY_SIZE):
        live = configured(MAPPED[0], states=states)
        for found in load(launch, 2, [(live, [source(str(tmp_path / "dcp"), 1.0)])]):
            # these folders have no state of a schedule: the live one begins anew, from the live lr
            assert found.differences.keys() <= {"groups"} and found.states == {}, found.where
    words = ["convert", str(universal / "native" / f"{SAVED[0].name}-dp2"), str(tmp_path / "8bit"), "--to", "dcp"]
    refused = CliRunner().invoke(app, words, catch_exceptions=False)
    assert refused.exit_code == 3 and "8-bit states (state1, state2)" in refused.output.replace("\n", " ")
