"""Tensor- and pipeline-parallel checkpoints on other topologies: every value by name, and training that goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Convert, Launch
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
Sources = Sequence[tuple[int, Parallel]]


@pytest.fixture(scope="module")
def saved(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of everything in :data:`SAVED`."""
    folder = tmp_path_factory.mktemp("parallel")
    for degree, setups in SAVED.items():
        arguments = {"folder": str(folder), "setups": [setup.as_json() for setup in setups]}
        launch(degree, "parallel_jobs.save", arguments, timeout=400)
    return folder


@pytest.fixture
def load(launch: Launch, saved: Path) -> Callable[..., None]:
    """``load(ranks, (target, sources), ...)``: sources by number of ranks and setup."""

    def run(degree: int, *targets: tuple[Parallel, Sources]) -> None:
        arguments = [target_json(saved, setup, sources) for setup, sources in targets]
        launch(degree, "parallel_jobs.load", {"targets": arguments}, timeout=400)

    return run


def target_json(folder: Path, setup: Parallel, sources: Sources, **config: Any) -> dict[str, Any]:
    return {"setup": setup.as_json(), "sources": [source_json(folder, *source) for source in sources], "config": config}


def source_json(folder: Path, degree: int, setup: Parallel) -> dict[str, Any]:
    name = f"{setup.name}-dp{degree // (setup.tp * setup.pp)}"
    return {"folder": str(folder / name), "tolerance": 1e-5 if setup.precision == "fp32" else 3e-2}


def test_megatron_core_changes_its_degree_and_stage(load: Callable[..., None]) -> None:
    llama = [
        (1, Parallel(*LLAMA, stage=1)),
        (2, Parallel(*LLAMA, tp=2, stage=3)),
        (4, Parallel(*LLAMA, tp=4, stage=1)),
    ]
    gpt = [(1, Parallel(*GPT, stage=0)), (4, Parallel(*GPT, tp=2, stage=3))]
    load(1, (Parallel(*LLAMA, stage=2), llama), (Parallel(*GPT, stage=3), gpt))
    load(2, (Parallel(*LLAMA, tp=2, stage=3), llama), (Parallel(*GPT, tp=2, stage=0), gpt))
    load(4, (Parallel(*LLAMA, tp=2, stage=1), llama), (Parallel(*GPT, tp=4, stage=3), gpt))


def test_low_precision_of_another_degree(load: Callable[..., None]) -> None:
    bf16 = [(2, Parallel(*GPT, tp=2, stage=1, precision="bf16"))]
    load(1, (Parallel(*GPT, stage=3, precision="bf16"), bf16))


def test_pipelines_change_their_stages(load: Callable[..., None]) -> None:
    two = [(2, Parallel("pipeline", "parameters", pp=2, stage=1))]
    bf16 = [(2, Parallel("pipeline", "uniform", pp=2, precision="bf16"))]
    one = Parallel("pipeline", "uniform", stage=1)
    load(1, (one, two), (Parallel("pipeline", "uniform", stage=1, precision="bf16"), bf16))
    load(
        4, (Parallel("pipeline", "uniform", pp=4, stage=1), two), (Parallel("pipeline", "uniform", pp=2, stage=1), two)
    )


def test_three_dimensions_change_at_once(load: Callable[..., None]) -> None:
    every = [
        (1, Parallel("3d", "uniform", stage=1)),
        (4, Parallel("3d", "uniform", tp=2, pp=2, stage=1)),
        (2, Parallel("3d", "uniform", tp=2, stage=1)),
    ]
    load(1, (Parallel("3d", "uniform", stage=1), every))
    load(2, (Parallel("3d", "parameters", pp=2, stage=1), every))
    load(4, (Parallel("3d", "parameters", tp=2, pp=2, stage=1), every))


def test_autotp_changes_its_degree(load: Callable[..., None]) -> None:
    uneven, fused = ("autotp", "fused_uneven"), ("autotp", "uneven")
    both = [(1, Parallel(*uneven, stage=1)), (2, Parallel(*uneven, tp=2, stage=1))]
    tied = [(2, Parallel("autotp", "tied", tp=2, stage=1))]
    llama = [(1, Parallel("autotp", "llama", stage=1))]
    empty = [(4, Parallel(*fused, tp=4, stage=1))]  # of three heads, one rank has none
    load(1, (Parallel(*uneven, stage=1), both), (Parallel("autotp", "tied", stage=1), tied))
    load(2, (Parallel(*uneven, tp=2, stage=1), both), (Parallel(*fused, tp=2, stage=1), empty))
    load(4, (Parallel("autotp", "llama", tp=2, stage=3), llama))


def test_rows_of_vocabulary_padding_stay_or_are_the_models_own(launch: Launch, saved: Path) -> None:
    wider = target_json(saved, Parallel(*GPT, tp=2, stage=1, rows=64), [(1, Parallel(*GPT, stage=1, rows=61))])
    wider["sources"][0]["tolerance"] = 0.3  # other padding is another denominator of the softmax
    launch(2, "parallel_jobs.load", {"targets": [wider]}, timeout=200)
    narrower = target_json(saved, Parallel(*LLAMA, stage=1, rows=61), [(2, Parallel(*LLAMA, tp=2, stage=1))])
    says = [
        "embedding.word_embeddings.weight",
        "64 rows, and nothing says which of them are padding",
        '"vocabulary": 61',
    ]
    launch(1, "parallel_jobs.refuse", {**narrower, "says": says})


def test_universal_checkpoints_of_tensor_parallel_runs(
    launch: Launch, saved: Path, convert: Convert, tmp_path: Path
) -> None:
    setups = [Parallel("autotp", "fused", tp=2, stage=1), Parallel("3d", "uniform", tp=2, stage=1)]
    convert(saved, tmp_path, [f"{setup.name}-dp1" for setup in setups])
    fused = [target_json(tmp_path, Parallel("autotp", "fused", tp=tp, stage=3), [(2, setups[0])]) for tp in (1, 2)]
    launch(1, "parallel_jobs.load", {"targets": fused[:1]})
    launch(2, "parallel_jobs.load", {"targets": fused[1:]})
    # the converter knew no rules and put everything side by side, replicated biases too
    wrong = target_json(tmp_path, Parallel("3d", "uniform", stage=1), [(2, setups[1])])
    launch(1, "parallel_jobs.refuse", {**wrong, "says": ["universal", "1.bias", "(64,)", "(32,)"]})


def test_universal_checkpoints_of_megatron_core(launch: Launch, convert: Convert, tmp_path: Path) -> None:
    """With the patterns of Megatron-DeepSpeed, of which one rank omits the rows and the converter drops padding."""
    native, universal = tmp_path / "native", tmp_path / "universal"
    sources = {1: Parallel(*LLAMA, stage=1), 2: Parallel(*GPT, tp=2, stage=1), 4: Parallel(*LLAMA, tp=4, stage=2)}
    for ranks, setup in sources.items():
        arguments = {"folder": str(native), "setups": [setup.as_json()], "declares": True}
        launch(ranks, "parallel_jobs.save", arguments)
    universal.mkdir()
    convert(native, universal, [f"{setup.name}-dp1" for setup in sources.values()])
    targets = [
        target_json(universal, Parallel(*LLAMA, tp=2, stage=3), [(1, sources[1]), (4, sources[4])]),
        target_json(universal, Parallel(*GPT, tp=2, stage=1), [(2, sources[2])]),
    ]
    for target in targets:
        for source in target["sources"]:
            source |= {"exact": "tokens", "tolerance": 0.3}  # rows of padding are the model's own
    launch(2, "parallel_jobs.load", {"targets": targets})


def test_states_that_are_numbered_by_stage_stay_with_their_stage(launch: Launch, saved: Path) -> None:
    source = [(2, Parallel("pipeline", "uniform", pp=2))]
    launch(2, "parallel_jobs.delegate", target_json(saved, Parallel("pipeline", "uniform", pp=2), source))
    says = ["numbered, not named", '"stage": 1']
    other = target_json(saved, Parallel("pipeline", "uniform", stage=1), source)
    launch(1, "parallel_jobs.refuse", {**other, "says": says})
    launch(1, "parallel_jobs.weights", other)  # the tied embedding among them, which no file names
