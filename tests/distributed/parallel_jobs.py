"""Jobs that save tensor and pipeline parallel engines, and load their checkpoints into engines of other topologies."""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import parallel_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.facts import Loaded, Refused, attempt, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of, without_states
from tests.distributed.kept import close_kept, engine_of
from tests.distributed.parallel_models import TOKENS, Parallel, build, end, folder_name, place_of, train


def save(arguments: dict[str, Any]) -> None:
    """:func:`save_each` of ``setups`` in folders of their names and data-parallel degrees."""
    shared = {key: value for key, value in arguments.items() if key not in ("folder", "setups")}
    folders = {setup: os.path.join(arguments["folder"], folder_name(setup)) for setup in arguments["setups"]}
    save_each([{**shared, "setup": setup, "folder": folder} for setup, folder in folders.items()])


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train each ``setup`` to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses.

    ``config``: more entries of DeepSpeed's; ``declares``: whether the model has the patterns of Megatron-DeepSpeed.
    """
    for case in cases:
        parallel, folder = case["setup"], case["folder"]
        engine = build(parallel, config=case.get("config"))
        oracle.assert_fresh(engine, parallel, seed=7)
        before = train(engine, parallel, 0, SAVE_AT)
        if case.get("declares"):
            engine.module.universal_checkpoint_info = declared_by_megatron(parallel)
        engine.save_checkpoint(folder, tag="step4", client_state=client_state_of(parallel))
        truth = oracle.gather(engine, parallel)
        truth["losses"] = train(engine, parallel, SAVE_AT, CONTINUE_TO)
        truth["losses_before"] = before
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        end(engine)
        dist.barrier()


def load(targets: list[dict[str, Any]]) -> list[Loaded]:
    """Of each target, load all ``sources`` into one engine of its ``setup`` and ``config``; see :func:`resume`."""
    shared = [{key: value for key, value in target.items() if key != "sources"} for target in targets]
    facts = []
    for case, target in zip(shared, targets, strict=True):
        for source in target["sources"]:
            facts += resume({**case, **source})
    close_kept()
    return facts


def resume(case: dict[str, Any]) -> list[Loaded]:
    """Load a checkpoint into an engine of ``setup``, compare with its truth, and train on as the saved run did.

    ``config``: more entries of DeepSpeed's; ``tokens``: compare the vocabulary without its padding.
    """
    elastic_ckpt.install()
    parallel, engine = case["setup"], live(case)
    truth = truth_of(case["folder"], *([without_padding] if case.get("tokens") else []))
    _, client_state = engine.load_checkpoint(case["folder"])
    differences = oracle.differences(engine, parallel, truth)
    differences |= client_differences(client_state, engine.elastic_report, parallel)
    gap = loss_gap(train(engine, parallel, SAVE_AT, CONTINUE_TO), truth)
    train(engine, parallel, 100, 101)  # leave other values for the next load to replace
    where = f"rank {dist.get_rank()}: {case['folder']} -> {folder_name(parallel)}"
    return [Loaded(case, where, engine.elastic_report, differences, gap)]


def live(case: dict[str, Any]) -> Any:
    """An engine of ``setup`` and ``config``, which the next case may get too. Collective."""
    parallel, config = case["setup"], case.get("config")
    return engine_of((parallel, config), partial(build, parallel, seed=8, config=config), end)


def declared_by_megatron(parallel: Parallel) -> dict[str, Any]:
    """Patterns as Megatron-DeepSpeed makes them from its parameters: one rank declares no rows."""
    is_llama = parallel.style == "llama"
    whole = [r".*layernorm\.weight$"]
    if not is_llama:
        whole += [r".*layernorm\.bias$", r".*position_embeddings.*", r".*linear_(proj|fc2)\.bias$"]
    return {
        "universal_checkpoint_version": 0.2,
        "parameter_with_row_parallelism_patterns": [r".*linear_(proj|fc2)\.weight$"] if parallel.tp > 1 else [],
        "tp_replicated_parameter_patterns": whole,
        "vocabulary_parameter_patterns": [r".*word_embeddings\.weight$"] + [r"output_layer\.weight$"] * is_llama,
        "parameter_with_2_sub_params_cat_dim_0": [r".*linear_fc1\.weight$"] if is_llama else [],
        "original_vocab_size": TOKENS,
    }


def without_padding(truth: dict[str, Any]) -> dict[str, Any]:
    """A truth whose vocabulary ends where the tokens do."""

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:TOKENS] if name.endswith(("word_embeddings.weight", "output_layer.weight")) else tensor

    by_name = {kind: {name: cut(name, value) for name, value in truth[kind].items()} for kind in ("masters", "weights")}
    states = {(name, key): cut(name, value) for (name, key), value in truth["states"].items()}
    return {**truth, **by_name, "states": states, "parallel": {**truth["parallel"], "rows": TOKENS}}


def client_state_of(parallel: Parallel) -> dict[str, Any]:
    """As Megatron's scripts save it: arguments, and random states of this rank."""
    place = place_of(parallel, dist.get_rank())
    tracker = {"model-parallel-rng": random_state(1000 + place.pp * parallel.tp + place.tp)}
    args = Namespace(
        tensor_model_parallel_size=parallel.tp, pipeline_model_parallel_size=parallel.pp, seed=1234, rank=0
    )
    return {"note": "hello", "args": args, "rng_tracker_states": tracker}


def random_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def client_differences(state: dict[str, Any], report: Any, parallel: Parallel) -> dict[str, str]:
    """Arguments follow the topology; random states are the saved ones, or reported where TP or PP changed."""
    place = place_of(parallel, dist.get_rank())
    expected = random_state(1000 + place.pp * parallel.tp + place.tp)
    saved = report.source if report else parallel
    is_same = (saved.tp, saved.pp) == (parallel.tp, parallel.pp) and (not report or saved.format == "native")
    args = state["args"]
    found = (state["note"], args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    wrong = {} if found == ("hello", parallel.tp, parallel.pp) else {"client state": str(state)}
    if report and args.rank != dist.get_rank():
        wrong["rank"] = str(args)
    if not is_same:
        if not any((each.role, each.what) == ("random state", "skipped") for each in report.outcomes):
            wrong["random state"] = "is another rank's, and nobody says so"
    elif not torch.equal(state["rng_tracker_states"]["model-parallel-rng"], expected):
        wrong["random state"] = "is of another rank or topology"
    return wrong


def refuse(case: dict[str, Any]) -> list[Refused] | None:
    """Try to load a checkpoint into an engine of ``setup`` that has trained."""
    elastic_ckpt.install()
    engine = live(case)
    train(engine, case["setup"], 0, 1)
    refused = attempt(case, engine, lambda: engine.load_checkpoint(case["folder"]))
    return [refused] if dist.get_rank() == 0 else None


def weights(case: dict[str, Any]) -> list[Loaded]:
    """Load the weights alone into an engine of ``setup``; how masters and weights differ from the saved weights."""
    elastic_ckpt.install()
    parallel, engine, truth = case["setup"], live(case), truth_of(case["folder"], without_states)
    engine.load_checkpoint(case["folder"], load_module_only=True)
    saved = {"weights": truth["weights"], "masters": truth["masters"]}
    found = plain.compare(oracle.gather(engine, parallel), saved)
    return [Loaded(case, f"{case['folder']} -> {parallel.name}", engine.elastic_report, found)]
