"""Jobs that save tensor and pipeline parallel engines, and load their checkpoints into engines of other topologies."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import parallel_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.facts import Loaded, Refused, attempt, loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of
from tests.distributed.model import close
from tests.distributed.parallel_models import TOKENS, Parallel, build, folder_name, place_of, train


def save(arguments: dict[str, Any]) -> None:
    """Train each setup to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses."""
    for parallel in arguments["setups"]:
        folder = os.path.join(arguments["folder"], folder_name(parallel))
        engine = build(parallel, config=arguments.get("config"))
        oracle.assert_fresh(engine, parallel, seed=7)
        before = train(engine, parallel, 0, SAVE_AT)
        if arguments.get("declares"):
            engine.module.universal_checkpoint_info = declared_by_megatron(parallel)
        engine.save_checkpoint(folder, tag="step4", client_state=client_state_of(parallel))
        truth = oracle.gather(engine, parallel)
        truth["losses"] = train(engine, parallel, SAVE_AT, CONTINUE_TO)
        truth["losses_before"] = before
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        close(engine)
        dist.barrier()


def load(targets: list[dict[str, Any]]) -> list[Loaded]:
    """Load many checkpoints into one engine after another, compare each with its truth, and train on.

    Of each target: its ``setup``, and ``config``: more entries of DeepSpeed's. Of each of its ``sources``: ``folder``;
    ``tokens``: compare the vocabulary without its padding; ``arguments``: of the load.
    """
    elastic_ckpt.install()
    facts = []
    for target in targets:
        parallel = target["setup"]
        engine = build(parallel, seed=8, config=target.get("config"))
        for number, source in enumerate(target["sources"]):
            truth = truth_of(source["folder"])
            _, client_state = engine.load_checkpoint(source["folder"])
            truth = without_padding(truth) if source.get("tokens") else truth
            differences = oracle.differences(engine, parallel, truth)
            differences |= client_differences(client_state, engine.elastic_report, parallel)
            gap = loss_gap(train(engine, parallel, SAVE_AT, CONTINUE_TO), truth)
            train(engine, parallel, 100 + number, 101 + number)  # leave other values for the next load to replace
            where = f"rank {dist.get_rank()}: {source['folder']} -> {folder_name(parallel)}"
            facts.append(Loaded(source, where, engine.elastic_report, differences, gap))
        close(engine)
    return facts


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


def refuse(target: dict[str, Any]) -> list[Refused] | None:
    """Try to load the first source of a target into an engine that has trained."""
    elastic_ckpt.install()
    engine = build(target["setup"], seed=8, config=target.get("config"))
    train(engine, target["setup"], 0, 1)
    refused = attempt(target, engine, lambda: engine.load_checkpoint(target["sources"][0]["folder"]))
    close(engine)
    return [refused] if dist.get_rank() == 0 else None


def weights(target: dict[str, Any]) -> list[Loaded]:
    """Load the weights alone of the first source of a target; how masters and weights differ from the saved weights."""
    elastic_ckpt.install()
    parallel, folder = target["setup"], target["sources"][0]["folder"]
    engine = build(parallel, seed=8)
    engine.load_checkpoint(folder, load_module_only=True)
    found = plain.compare(oracle.gather(engine, parallel), {"weights": truth_of(folder)["weights"]})
    report = engine.elastic_report
    close(engine)
    return [Loaded(target, f"{folder} -> {parallel.name}", report, found)]
