"""Checkpoints as BLOOM's, gpt-neox's and Megatron-DeepSpeed's code left them, at other topologies."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor

from tests.distributed.conftest import Launch
from tests.distributed.facts import Refused
from tests.distributed.foreign_changes import as_means, drift, recut, write_universal_01
from tests.distributed.foreign_folders import (
    TAG,
    as_bloom,
    as_deeperspeed_03,
    as_deepspeed_05,
    as_megatron,
    as_neox,
    read,
)
from tests.distributed.parallel_models import Parallel

BLOOM = Parallel("bloom", "real", 2, 2, 1, "bf16_fp32acc")
NEOX = Parallel("neox", "real", 2, 1, 1, "fp16")
NEOX_J = Parallel("neoxj", "real", 2, 1, 1, "fp32")
THIRDS = Parallel("thirds", "real", 2, 1, 1, "fp32")
PRESETS = {
    "bloom": "bloom",
    "neox": "gpt-neox",
    "neoxj": "gpt-neox-gptj-residual",
    "thirds": "megatron-deepspeed-contiguous",
}
#: Of losses: rounding, which other sums of low precision have more of.
TOLERANCES = {"bloom": 5e-3, "neox": 1e-3, "neoxj": 2e-6, "thirds": 2e-6}
DRIFTED = "3.input_layernorm.weight"
AVERAGED = ("layernorm.weight", "layernorm.bias", "norm.weight", "norm.bias", "dense.bias", "dense_4h_to_h.bias")
ROWS = ("self_attention.dense.weight", "dense_4h_to_h.weight")


def is_averaged_by_bloom(name: str) -> bool:
    return name.endswith(AVERAGED) or name in ("6.weight", "6.bias")


@pytest.fixture(scope="session")
def native(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained and saved by today's DeepSpeed."""
    folder = tmp_path_factory.mktemp("foreign_native")
    launch(4, "foreign_jobs.save", {"folder": str(folder), "setups": [BLOOM]})
    launch(2, "foreign_jobs.save", {"folder": str(folder), "setups": [NEOX, NEOX_J, THIRDS]})
    launch(1, "foreign_jobs.save", {"folder": str(folder), "setups": [replace(NEOX_J, tp=1)]})
    return folder


@pytest.fixture(scope="session")
def old(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, as older code wrote them."""
    folder = tmp_path_factory.mktemp("foreign")
    bloom, neox = native / f"{BLOOM.name}-dp1", native / f"{NEOX.name}-dp1"
    as_bloom(bloom, folder / "bloom", 2, 2)
    as_bloom(bloom, folder / "bloom_early", 2, 2, early=True)
    drifted = drift(bloom, folder / "drifted", 2, is_averaged_by_bloom)
    as_means(as_bloom(drifted, folder / "bloom_drifted", 2, 2))
    as_neox(neox, folder / "neox")
    stages = (range(0, 3), range(3, 4), range(4, 5), range(5, 8))
    as_neox(recut(neox, folder / "recut", 2, stages, 2), folder / "neox_242")
    as_means(as_neox(drift(neox, folder / "drifted_neox", 2, lambda name: "norm" in name), folder / "neox_drifted"))
    as_deeperspeed_03(neox, folder / "neox_2021")
    as_deepspeed_05(neox, folder / "neox_2022")
    as_neox(native / f"{NEOX_J.name}-dp1", folder / "neoxj", gpt_j=True)
    as_neox(native / f"{NEOX_J.name}-dp1", folder / "neoxj_beside", gpt_j=True, configs="configs")
    as_neox(native / f"{NEOX_J.name}-dp1", folder / "neoxj_unsaid", configs="")
    as_neox(native / f"{replace(NEOX_J, tp=1).name}-dp1", folder / "neoxj_tp1", gpt_j=True)
    thirds = native / f"{THIRDS.name}-dp1"
    as_megatron(thirds, folder / "thirds", 2)
    as_megatron(thirds, folder / "thirds_unsaid", 2, fpdt=False)
    drifted = drift(thirds, folder / "drifted_thirds", 2, DRIFTED.__eq__)
    as_megatron(drifted, folder / "thirds_first", 2)
    as_means(as_megatron(drifted, folder / "thirds_mean", 2))
    return folder


def to(setup: Parallel, tp: int, pp: int, *sources: dict[str, Any], preset: str | None = "") -> dict[str, Any]:
    """A target of ``foreign_jobs.load``: the setup at other degrees, with the preset of its code base."""
    name = PRESETS[setup.kind] if preset == "" else preset
    config: dict[str, Any] = {"report": False} | ({"tp_preset": name} if name else {})
    return {"setup": replace(setup, tp=tp, pp=pp), "config": config, "sources": list(sources)}


def load(launch: Launch, folder: Path, world_size: int, *targets: dict[str, Any]) -> list[Any]:
    sources = [{**target, "sources": [in_folder(folder, source) for source in target["sources"]]} for target in targets]
    return launch(world_size, "foreign_jobs.load", sources)


def in_folder(folder: Path, source: dict[str, Any]) -> dict[str, Any]:
    return {**source, "folder": str(folder / source["folder"])}


def topology_of(load: Any) -> tuple[int, int, int]:
    """As the report names that of the checkpoint."""
    return load.report.source.tp, load.report.source.pp, load.report.source.partition_degree


def of(folder: str, topology: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """A checkpoint of a tensor-, pipeline- and data-parallel degree."""
    return {"folder": folder, "topology": topology, **more}


#: The saved configuration says otherwise.
GPT_J = {"tp_preset": "gpt-neox-gptj-residual"}
#: By number of ranks. Every load is compared bit by bit with what was saved, and then goes on training.
CROSSINGS: dict[int, list[dict[str, Any]]] = {
    1: [
        to(BLOOM, 1, 1, of("bloom", (2, 2, 1)), of("bloom_early", (2, 2, 1))),
        to(NEOX, 1, 1, of("neox", (2, 1, 1)), of("neox", (2, 1, 1), config=GPT_J), of("neox_242", (2, 4, 2))),
        to(NEOX_J, 1, 1, of("neoxj_unsaid", (2, 1, 1)), of("neoxj_tp1", (1, 1, 1))),
        to(NEOX_J, 1, 1, of("neoxj", (2, 1, 1)), of("neoxj_beside", (2, 1, 1)), preset="gpt-neox"),
        to(NEOX_J, 1, 1, of("neoxj_unsaid", (2, 1, 1)), preset=None),
        to(NEOX, 1, 1, of("neox", (2, 1, 1)), of("neox_242", (2, 4, 2)), preset=None),
        to(THIRDS, 1, 1, of("thirds", (2, 1, 1))),
    ],
    2: [
        to(BLOOM, 1, 1, of("bloom", (2, 2, 1))),
        to(BLOOM, 1, 2, of("bloom", (2, 2, 1))),
        to(BLOOM, 2, 1, of("bloom", (2, 2, 1))),
        to(NEOX, 1, 2, of("neox_242", (2, 4, 2)), of("neox", (2, 1, 1))),
        to(NEOX_J, 2, 1, of("neoxj_tp1", (1, 1, 1)), of("neoxj", (2, 1, 1))),
    ],
    4: [
        to(BLOOM, 4, 1, of("bloom", (2, 2, 1))),
        to(NEOX, 2, 2, of("neox_242", (2, 4, 2))),
        to(NEOX_J, 4, 1, of("neoxj", (2, 1, 1))),
        to(NEOX_J, 4, 1, of("neoxj_unsaid", (2, 1, 1)), preset=None),
    ],
}


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", CROSSINGS)
def test_an_old_folder_loads_at_another_topology(launch: Launch, old: Path, world_size: int) -> None:
    for found in load(launch, old, world_size, *CROSSINGS[world_size]):
        assert topology_of(found) == found.case["topology"], found.where
        assert found.differences == {}, found.where
        kind = Path(found.case["folder"]).name.partition("_")[0]
        assert found.loss_gap <= TOLERANCES[kind], found.where


def test_deepspeed_misreads_the_topology_of_gpt_neox(old: Path) -> None:
    folder = str(old / "neox_242" / TAG)
    read_as = get_model_3d_descriptor(folder)
    assert (read_as.tp_degree, read_as.pp_degree, read_as.dp_degree) == (8, 1, 2), "then it is not as gpt-neox's are"


def test_copies_that_drifted_are_averaged_where_the_code_base_says_so(launch: Launch, old: Path) -> None:
    bloom, neox = of("bloom_drifted", (2, 2, 1)), of("neox_drifted", (2, 1, 1))
    for found in load(launch, old, 1, to(BLOOM, 1, 1, bloom), to(NEOX, 1, 1, neox)):
        assert topology_of(found) == found.case["topology"]
        assert found.differences == {}, found.where
        assert re.search("replicated, but different when saved: .*; the mean was taken", " | ".join(found.report.notes))


def test_of_copies_that_drifted_somebody_has_to_choose_where_the_code_base_does_not_say(
    launch: Launch, old: Path
) -> None:
    truth = read(old / "thirds_first" / "truth.pt")
    apart = (truth["masters"][DRIFTED].double() - truth["seconds"][DRIFTED, "fp32"].double()).abs()
    options = {"first": {"replicated_params": "first"}, "mean": {"replicated_params": "mean"}}
    sources = [of("thirds_first", (2, 1, 1), refused=True)]
    sources += [of(f"thirds_{word}", (2, 1, 1), config=config, word=word) for word, config in options.items()]
    refused, *loads = load(launch, old, 1, to(THIRDS, 1, 1, *sources))
    (text,) = refused.texts
    assert refused.kinds and refused.changed == set() and DRIFTED in text
    assert f"2 copies, at most {apart.max():.3g} apart" in text
    assert '"replicated_params": "first"' in text and '"replicated_params": "mean"' in text
    for found in loads:
        assert found.differences == {}, found.where
        assert f"{found.case['word']} was taken" in " | ".join(found.report.notes)
    assert len(loads) == 2


UNDECIDED = ["query_key_value", '"kind": "column"}', '"sub_parameters": [1, 1, 1]', '"tp_preset"']
#: Engine, preset, and what the error names, by folder.
REFUSED: dict[str, tuple[Parallel, str | None, list[str]]] = {
    "bloom": (BLOOM, None, UNDECIDED),
    "neoxj": (NEOX, None, ["gpt_j_residual: True", "gpt_j_residual: False", '"configs"']),
    "neox_2021": (NEOX, "gpt-neox", ["DeeperSpeed 0.3.15", "mp_rank_00_model_states.pt", "0.6.2"]),
    "neox_2022": (NEOX, "gpt-neox", ["before 0.6.2", "mp_rank_00_optim_states.pt", "param_shapes"]),
    "thirds": (
        THIRDS,
        "megatron-deepspeed-interleaved",
        ["ds_sequence_parallel_fpdt", "megatron-deepspeed-contiguous"],
    ),
}


@pytest.fixture(scope="module")
def refusals(launch: Launch, old: Path) -> dict[str, Refused]:
    """How each folder of :data:`REFUSED` is refused on one rank."""
    targets = [
        to(setup, 1, 1, of(name, (0, 0, 0), refused=True), preset=preset)
        for name, (setup, preset, _) in REFUSED.items()
    ]
    return {Path(refused.case["folder"]).name: refused for refused in load(launch, old, 1, *targets)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_known_or_read_is_refused(name: str, refusals: dict[str, Refused]) -> None:
    (text,) = refusals[name].texts
    assert refusals[name].kinds and refusals[name].changed == set(), text
    assert [words for words in REFUSED[name][2] if words not in text] == [], text


def test_with_the_preset_of_older_code_fused_attention_comes_out_wrong(launch: Launch, old: Path) -> None:
    """Where the save does not say that it is of newer code."""
    source = of("thirds_unsaid", (2, 1, 1))
    (found,) = load(launch, old, 1, to(THIRDS, 1, 1, source, preset="megatron-deepspeed-interleaved"))
    masters = read(old / "thirds_unsaid" / "truth.pt")["masters"]
    attention = {f"masters {name}" for name in masters if re.fullmatch(r".*query_key_value\.(weight|bias)", name)}
    assert {key for key in found.differences if key.startswith("masters")} == attention


def test_blooms_universal_folder_loads(launch: Launch, old: Path, tmp_path: Path) -> None:
    """Which has no param groups."""
    native = Path(shutil.copytree(old / "bloom", tmp_path / "bloom"))
    write_universal_01(native, read(native / "truth.pt"), is_averaged_by_bloom, lambda name: name.endswith(ROWS))
    source = of("bloom", (2, 2, 1), tag=f"{TAG}_universal")
    for found in load(launch, tmp_path, 2, to(BLOOM, 2, 1, source), to(BLOOM, 1, 1, source)):
        assert found.differences.keys() <= {"groups"}, found.where
        notes = " | ".join(found.report.notes)
        assert re.search("step.*counters|counters.*step", notes) and "param group" in notes
