"""Tensor- and pipeline-parallel checkpoints on other topologies: every value by name, and training that goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Convert, Launch
from tests.distributed.facts import Loaded
from tests.distributed.jobs import SAVE_AT
from tests.distributed.model import GLOBAL_BATCH
from tests.distributed.parallel_models import Parallel

LLAMA, GPT = ("megatron", "llama"), ("megatron", "gpt")
#: What is saved, by number of ranks.
SAVED: dict[int, list[Parallel]] = {
    1: [
        Parallel(*LLAMA, stage=1),
        Parallel(*GPT, stage=0),
        Parallel(*GPT, stage=1, rows=61),
        Parallel("3d", "uniform", stage=1),
        Parallel("autotp", "fused_uneven", stage=1),
        Parallel("autotp", "llama", stage=1),
    ],
    2: [
        Parallel(*LLAMA, tp=2, stage=1),
        Parallel(*LLAMA, tp=2, stage=3),
        Parallel(*GPT, tp=2, stage=1, precision="bf16"),
        Parallel("pipeline", "parameters", pp=2, stage=1),
        Parallel("pipeline", "uniform", pp=2, precision="bf16"),
        Parallel("pipeline", "uniform", pp=2),
        Parallel("autotp", "fused_uneven", tp=2, stage=1),
        Parallel("autotp", "tied", tp=2, stage=1),
        Parallel("autotp", "fused", tp=2, stage=1),
        Parallel("3d", "uniform", tp=2, stage=1),
    ],
    4: [
        Parallel(*LLAMA, tp=4, stage=1),
        Parallel(*GPT, tp=2, stage=3),
        Parallel("3d", "uniform", tp=2, pp=2, stage=1),
        Parallel("autotp", "uneven", tp=4, stage=1),
    ],
}
#: By which losses of runs that go on may differ in bf16, and where other padding is another denominator of the softmax.
BF16_LOSSES, OTHER_PADDING = 3e-2, 0.3
Sources = Sequence[tuple[int, Parallel]]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of everything in :data:`SAVED`."""
    folder = tmp_path_factory.mktemp("parallel")
    for degree, setups in SAVED.items():
        launch(degree, "parallel_jobs.save", {"folder": str(folder), "setups": setups}, timeout=400)
    return folder


Load = Callable[..., list[Loaded]]


@pytest.fixture
def load(launch: Launch, saved: Path) -> Load:
    """``load(ranks, (target, sources), ...)``: sources by number of ranks and setup."""

    def run(degree: int, *targets: tuple[Parallel, Sources]) -> list[Loaded]:
        return launch(degree, "parallel_jobs.load", [target_of(saved, *target) for target in targets], timeout=400)

    return run


def target_of(folder: Path, setup: Parallel, sources: Sources, **more: Any) -> dict[str, Any]:
    names = [f"{source.name}-dp{degree // (source.tp * source.pp)}" for degree, source in sources]
    return {"setup": setup, "sources": [{"folder": str(folder / name), **more} for name in names]}


def test_megatron_core_changes_its_degree_and_stage(load: Load) -> None:
    llama = [
        (1, Parallel(*LLAMA, stage=1)),
        (2, Parallel(*LLAMA, tp=2, stage=3)),
        (4, Parallel(*LLAMA, tp=4, stage=1)),
    ]
    gpt = [(1, Parallel(*GPT, stage=0)), (4, Parallel(*GPT, tp=2, stage=3))]
    facts = load(1, (Parallel(*LLAMA, stage=2), llama), (Parallel(*GPT, stage=3), gpt))
    facts += load(2, (Parallel(*LLAMA, tp=2, stage=3), llama), (Parallel(*GPT, tp=2, stage=0), gpt))
    facts += load(4, (Parallel(*LLAMA, tp=2, stage=1), llama), (Parallel(*GPT, tp=4, stage=3), gpt))
    for found in facts:
        assert found.format == "native" and found.differences == {}, found.where
        assert found.loss_gap <= 1e-5, found.where


def test_low_precision_of_another_degree(load: Load) -> None:
    bf16 = [(2, Parallel(*GPT, tp=2, stage=1, precision="bf16"))]
    for found in load(1, (Parallel(*GPT, stage=3, precision="bf16"), bf16)):
        assert found.format == "native" and found.differences == {}, found.where
        assert found.loss_gap <= BF16_LOSSES, found.where


def test_pipelines_change_their_stages(load: Load) -> None:
    two = [(2, Parallel("pipeline", "parameters", pp=2, stage=1))]
    bf16 = [(2, Parallel("pipeline", "uniform", pp=2, precision="bf16"))]
    one = Parallel("pipeline", "uniform", stage=1)
    four = [(Parallel("pipeline", "uniform", pp=pp, stage=1), two) for pp in (4, 2)]
    for found in load(1, (one, two)) + load(4, *four):
        assert found.format == "native" and found.differences == {}, found.where
        assert found.loss_gap <= 1e-5, found.where
    for found in load(1, (Parallel("pipeline", "uniform", stage=1, precision="bf16"), bf16)):
        assert found.format == "native" and found.differences == {}, found.where
        assert found.loss_gap <= BF16_LOSSES, found.where


def test_three_dimensions_change_at_once(load: Load) -> None:
    every = [
        (1, Parallel("3d", "uniform", stage=1)),
        (4, Parallel("3d", "uniform", tp=2, pp=2, stage=1)),
        (2, Parallel("3d", "uniform", tp=2, stage=1)),
    ]
    facts = load(1, (Parallel("3d", "uniform", stage=1), every))
    facts += load(2, (Parallel("3d", "parameters", pp=2, stage=1), every))
    for found in facts + load(4, (Parallel("3d", "parameters", tp=2, pp=2, stage=1), every)):
        assert found.format == "native" and found.differences == {}, found.where
        assert found.loss_gap <= 1e-5, found.where


def test_autotp_changes_its_degree(load: Load) -> None:
    uneven, fused = ("autotp", "fused_uneven"), ("autotp", "uneven")
    both = [(1, Parallel(*uneven, stage=1)), (2, Parallel(*uneven, tp=2, stage=1))]
    tied = [(2, Parallel("autotp", "tied", tp=2, stage=1))]
    llama = [(1, Parallel("autotp", "llama", stage=1))]
    empty = [(4, Parallel(*fused, tp=4, stage=1))]  # of three heads, one rank has none
    facts = load(1, (Parallel(*uneven, stage=1), both), (Parallel("autotp", "tied", stage=1), tied))
    facts += load(2, (Parallel(*uneven, tp=2, stage=1), both), (Parallel(*fused, tp=2, stage=1), empty))
    for found in facts + load(4, (Parallel("autotp", "llama", tp=2, stage=3), llama)):
        assert found.format == "native" and found.differences == {}, found.where
        assert found.loss_gap <= 1e-5, found.where
        # whose config states no train_batch_size, which DeepSpeed completes by all ranks
        assert found.report is not None and found.report.samples_consumed == SAVE_AT * GLOBAL_BATCH, found.where
        assert "set_train_batch_size" not in found.text, found.where


def test_rows_of_vocabulary_padding_stay_or_are_the_models_own(launch: Launch, saved: Path) -> None:
    wider = target_of(saved, Parallel(*GPT, tp=2, stage=1, rows=64), [(1, Parallel(*GPT, stage=1, rows=61))])
    for found in launch(2, "parallel_jobs.load", [wider], timeout=200):
        assert found.format == "native" and found.differences == {}, found.where
        assert found.loss_gap <= OTHER_PADDING, found.where
    narrower = target_of(saved, Parallel(*LLAMA, stage=1, rows=61), [(2, Parallel(*LLAMA, tp=2, stage=1))])
    (refused,) = launch(1, "parallel_jobs.refuse", narrower)
    (text,) = refused.texts
    assert refused.kinds and refused.changed == set()
    assert "embedding.word_embeddings.weight" in text and '"vocabulary": 61' in text
    assert "64 rows, and nothing says which of them are padding" in text


def test_universal_checkpoints_of_tensor_parallel_runs(
    launch: Launch, saved: Path, convert: Convert, tmp_path: Path
) -> None:
    setups = [Parallel("autotp", "fused", tp=2, stage=1), Parallel("3d", "uniform", tp=2, stage=1)]
    convert(saved, tmp_path, [f"{setup.name}-dp1" for setup in setups])
    for tp in (1, 2):
        fused = target_of(tmp_path, Parallel("autotp", "fused", tp=tp, stage=3), [(2, setups[0])])
        for found in launch(tp, "parallel_jobs.load", [fused]):
            assert found.format == "universal" and found.differences == {}, found.where
            assert found.loss_gap <= 1e-5, found.where
    # the converter knew no rules and concatenated everything, replicated biases and rows too
    for tp in (1, 2):
        repaired = target_of(tmp_path, Parallel("3d", "uniform", tp=tp, stage=1), [(2, setups[1])])
        for found in launch(tp, "parallel_jobs.load", [repaired]):
            dropped = {key for key in found.differences if key.startswith("buffers")}  # of layers, by the converter
            assert found.format == "universal" and found.differences.keys() == dropped, found.where
            assert found.loss_gap <= 1e-5, found.where
            assert ("divided again" in str(found.report.notes)) == (tp == 1)


def test_universal_checkpoints_of_megatron_core(launch: Launch, convert: Convert, tmp_path: Path) -> None:
    """With the patterns of Megatron-DeepSpeed, of which one rank omits the rows and the converter drops padding."""
    native, universal = tmp_path / "native", tmp_path / "universal"
    sources = {1: Parallel(*LLAMA, stage=1), 2: Parallel(*GPT, tp=2, stage=1), 4: Parallel(*LLAMA, tp=4, stage=2)}
    for ranks, setup in sources.items():
        launch(ranks, "parallel_jobs.save", {"folder": str(native), "setups": [setup], "declares": True})
    universal.mkdir()
    convert(native, universal, [f"{setup.name}-dp1" for setup in sources.values()])
    targets = [
        target_of(universal, Parallel(*LLAMA, tp=2, stage=3), [(1, sources[1]), (4, sources[4])], tokens=True),
        target_of(universal, Parallel(*GPT, tp=2, stage=1), [(2, sources[2])], tokens=True),
    ]
    for found in launch(2, "parallel_jobs.load", targets):
        assert found.format == "universal" and found.differences == {}, found.where
        assert found.loss_gap <= OTHER_PADDING, found.where  # rows of padding are the model's own


def test_states_that_are_numbered_by_stage_stay_with_their_stage(launch: Launch, saved: Path) -> None:
    source = [(2, Parallel("pipeline", "uniform", pp=2))]
    for found in launch(2, "parallel_jobs.load", [target_of(saved, Parallel("pipeline", "uniform", pp=2), source)]):
        assert found.report is None, "DeepSpeed's own loader does it right"
        assert found.differences == {} and found.loss_gap <= 1e-5, found.where
    other = target_of(saved, Parallel("pipeline", "uniform", stage=1), source)
    (refused,) = launch(1, "parallel_jobs.refuse", other)
    (text,) = refused.texts
    assert refused.kinds and refused.changed == set()
    assert "numbered, not named" in text and '"stage": 1' in text
    (found,) = launch(1, "parallel_jobs.weights", other)
    assert found.format == "native" and found.differences == {}  # the tied embedding among them, which no file names
