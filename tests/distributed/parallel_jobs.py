"""Jobs that save tensor and pipeline parallel engines, and load their checkpoints into engines of other topologies."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

import elastic_ckpt
from tests.distributed import parallel_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.model import close
from tests.distributed.parallel_cuts import cut_of, piece_of
from tests.distributed.parallel_models import TOKENS, Parallel, build, folder_name, place_of, train

SAVE_AT = 4
CONTINUE_TO = 7


def save(arguments: dict[str, Any]) -> None:
    """Train each setup to step ``SAVE_AT``, save it, write down the truth, and train on for the reference losses."""
    for parallel in (Parallel(**values) for values in arguments["setups"]):
        folder = os.path.join(arguments["folder"], folder_name(parallel))
        engine = build(parallel)
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


def load(arguments: dict[str, Any]) -> None:
    """Load many checkpoints into one engine after another, and compare each with its truth.

    Of each target: its ``setup``, and ``config``: more entries of DeepSpeed's. Of each of its ``sources``: ``folder``;
    ``exact``: whether everything has to be bit-equal (by default it has; ``tokens``: but for padding of the vocabulary);
    ``tolerance`` of losses.
    """
    elastic_ckpt.install()
    for target in arguments["targets"]:
        parallel = Parallel(**target["setup"])
        engine = build(parallel, seed=8, config=target.get("config"))
        for number, source in enumerate(target["sources"]):
            where = f"{source['folder']} -> {folder_name(parallel)}"
            truth = torch.load(os.path.join(source["folder"], "truth.pt"), weights_only=False)
            _, client_state = engine.load_checkpoint(source["folder"])
            assert engine.elastic_report is not None, f"{where}: DeepSpeed's own path ran"
            assert_client_state(client_state, engine, parallel, where)
            if source.get("exact") == "tokens":
                truth = without_padding(truth)
            if source.get("exact", True):
                oracle.compare(engine, parallel, truth, where)
            assert_continues(engine, parallel, truth, source.get("tolerance", 1e-5), where)
            train(engine, parallel, 100 + number, 101 + number)  # leave other values for the next load to replace
        close(engine)


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


def assert_client_state(state: dict[str, Any], engine: Any, parallel: Parallel, where: str) -> None:
    """Arguments follow the topology; random states are the saved ones, or of a new run where TP or PP changed."""
    place, saved = place_of(parallel, dist.get_rank()), engine.elastic_report.source
    assert state["note"] == "hello", where
    args = state["args"]
    found = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.rank
    assert found == (parallel.tp, parallel.pp, dist.get_rank()), f"{where}: {args}"
    expected = random_state(1234 + 100 * place.pp + 2718 + place.tp)
    if (saved.tp, saved.pp) == (parallel.tp, parallel.pp) and saved.format == "native":
        expected = random_state(1000 + place.pp * parallel.tp + place.tp)
    assert torch.equal(state["rng_tracker_states"]["model-parallel-rng"], expected), where


def plant(arguments: dict[str, Any]) -> None:
    """Put truths into ZeRO-1 and 2 engines of other topologies by DeepSpeed's own setters, without elastic_ckpt.

    That training goes on from them as it did proves the truths, whatever elastic_ckpt does.
    """
    for target in arguments["targets"]:
        parallel = Parallel(**target["setup"])
        for source in target["sources"]:
            where = f"{source['folder']} planted into {folder_name(parallel)}"
            truth = torch.load(os.path.join(source["folder"], "truth.pt"), weights_only=False)
            engine = build(parallel, seed=8)
            train(engine, parallel, 100, 101)  # makes the states
            plant_tensors(engine, parallel, truth)
            base = plain.base_of(engine)
            for names, group in zip(engine.members, base.param_groups, strict=True):
                group.update(truth["groups"][names[0]])
            for state in base.state.values():
                state["step"].fill_(truth["steps"][0])
            engine.lr_scheduler.last_epoch = truth["scheduler"]["last_epoch"]
            oracle.compare_tensors(oracle.gather(engine, parallel), truth, where)
            assert_continues(engine, parallel, truth, source.get("tolerance", 1e-5), where)
            close(engine)


def plant_tensors(engine: Any, parallel: Parallel, truth: dict[str, Any]) -> None:
    """This rank's shards of all masters, states and weights, and the buffers."""
    plain.relink(engine)
    rank = place_of(parallel, dist.get_rank()).tp
    keys = {key for _, key in truth["states"]}
    for name, param in engine.module.named_parameters():
        master = truth["masters"][name]
        cut = cut_of(parallel, name, list(master.shape))
        safe_set_full_fp32_param(param, piece_of(master, cut, rank))
        param.data.copy_(piece_of(master, cut, rank))
        for key in keys:
            safe_set_full_optimizer_state(param, piece_of(truth["states"][name, key], cut, rank), key)
    for name, buffer in engine.module.named_buffers():
        if name in truth["buffers"]:
            buffer.copy_(truth["buffers"][name])


def assert_continues(engine: Any, parallel: Parallel, truth: dict[str, Any], tolerance: float, where: str) -> None:
    """Training goes on as the saved run did."""
    losses = train(engine, parallel, SAVE_AT, CONTINUE_TO)
    difference = max(abs(a - b) for a, b in zip(losses, truth["losses"], strict=True))
    assert difference <= tolerance, f"{where}: losses {losses}, uninterrupted {truth['losses']}"


def refuse(arguments: dict[str, Any]) -> None:
    """A load that has to be refused, with these words, and that changes nothing."""
    elastic_ckpt.install()
    parallel = Parallel(**arguments["setup"])
    engine = build(parallel, seed=8, config=arguments.get("config"))
    train(engine, parallel, 0, 1)
    before = oracle.gather(engine, parallel)
    try:
        engine.load_checkpoint(arguments["sources"][0]["folder"])
    except elastic_ckpt.ElasticCkptError as error:
        text = str(error)
        missing = [words for words in arguments["says"] if words not in text]
        assert not missing, f"{missing} not in: {text}"
    else:
        raise AssertionError("it was loaded")
    oracle.compare_tensors(oracle.gather(engine, parallel), before, "refused")
    close(engine)


def delegate(arguments: dict[str, Any]) -> None:
    """A load that DeepSpeed's own loader does right, and elastic_ckpt leaves to it."""
    elastic_ckpt.install()
    parallel = Parallel(**arguments["setup"])
    folder = arguments["sources"][0]["folder"]
    truth = torch.load(os.path.join(folder, "truth.pt"), weights_only=False)
    engine = build(parallel, seed=8)
    engine.load_checkpoint(folder)
    assert engine.elastic_report is None, "elastic_ckpt loaded it"
    oracle.compare(engine, parallel, truth, folder)
    assert_continues(engine, parallel, truth, 1e-5, folder)
    close(engine)


def weights(arguments: dict[str, Any]) -> None:
    """A load of weights alone: masters are the saved weights, whatever optimizer there was."""
    elastic_ckpt.install()
    parallel = Parallel(**arguments["setup"])
    folder = arguments["sources"][0]["folder"]
    truth = torch.load(os.path.join(folder, "truth.pt"), weights_only=False)
    engine = build(parallel, seed=8)
    engine.load_checkpoint(folder, load_module_only=True)
    assert engine.elastic_report is not None, "DeepSpeed's own path ran"
    found = oracle.gather(engine, parallel)["weights"]
    assert found.keys() == truth["weights"].keys()
    for name, expected in truth["weights"].items():
        assert torch.equal(found[name], expected), name
    close(engine)
