"""Jobs about optimizers of every kind: their states are decoded by :mod:`tests.distributed.optimizer_truth`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

import elastic_ckpt
from tests.distributed import old_blocks as old
from tests.distributed import optimizer_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.facts import loss_gap
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, truth_of, where
from tests.distributed.model import Setup, WideLM, build_engine, close, train


def save(arguments: dict[str, Any]) -> None:
    """Train each setup, save it, write down its decoded states, and train on for the reference losses."""
    for setup in arguments["setups"]:
        folder = os.path.join(arguments["folder"], f"{setup.name}-dp{dist.get_world_size()}")
        if setup.config:
            elastic_ckpt.install()
        engine = build_engine(setup, WideLM())
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(folder, tag="step4")
        truth = everything(engine)
        truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
        if dist.get_rank() == 0:
            torch.save(truth, os.path.join(folder, "truth.pt"))
        close(engine)
        elastic_ckpt.uninstall()
        dist.barrier()


def everything(engine: Any) -> dict[str, Any]:
    """Masters, decoded states, scalars and groups of a whole job. Collective."""
    is_muon = "Muon" in type(plain.base_of(engine)).__name__ and engine.zero_optimization_stage() in (1, 2)
    is_muon = is_muon and not getattr(engine.optimizer, "cpu_offload", True)  # which BF16_Optimizer has not
    held = {"masters": masters(engine), "scalars": oracle.scalars(engine), "groups": plain.hyperparameters(engine)}
    states, scales = oracle.decoded(engine, {"momentum_buffer"} if is_muon else set())
    if is_muon:
        states |= oracle.muon_momentum(engine)
    if engine.zero_optimization_stage() == 0:
        states |= oracle.whole_states(engine)
    return {**held, "states": states, "scales": scales, "maps": oracle.maps(engine)}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {"masters": {}, "states": {}}
    if engine.zero_optimization_stage() == 0:
        plain.gather_unpartitioned(engine, [], found)
    else:
        found["masters"] = {
            name: plain.safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()
        }
    return {name: value.cpu() for name, value in found["masters"].items()}


def load(targets: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Load many checkpoints into one engine after another, compare each with its truth, and train on.

    Of each of the ``sources`` of a target: ``folder``; ``rename``: saved state -> live state; ``resave``: where to save
    it again.
    """
    elastic_ckpt.install()
    facts = []
    for target in targets:
        setup = target["setup"]
        engine = build_engine(setup, WideLM(seed=8))
        for source in target["sources"]:
            truth = truth_of(source["folder"])
            engine.load_checkpoint(source["folder"])
            found = compare(engine, truth, source.get("rename", {}))
            if "resave" in source:
                engine.save_checkpoint(source["resave"], tag="step4")
                if dist.get_rank() == 0:
                    torch.save(truth, os.path.join(source["resave"], "truth.pt"))
            found.case, found.where = source, where({"setup": setup, **source})
            found.loss_gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
            facts.append(found)
        close(engine)
    return facts


def compare(engine: Any, truth: dict[str, Any], rename: dict[str, str]) -> SimpleNamespace:
    """What an engine holds, beside ``truth``, and what the report says of its blocks. Collective.

    Returns:
        ``differences`` of all but states; those of ``states``; ``drift``: by state, the largest difference as a part of
        its block's scale; ``requantized`` of ``blocks`` of the job, and the ``reported_drift``; ``text``: of the report.
    """
    now = everything(engine)
    expected = {(name, rename.get(key, key)): value.float() for (name, key), value in truth["states"].items()}
    differences = other_differences(engine, now, truth)
    if expected.keys() != now["states"].keys():
        differences["states"] = f"not on both sides: {expected.keys() ^ now['states'].keys()}"
    states: dict[str, str] = {}
    drift: dict[str, float] = {}
    for (name, key), wanted in expected.items():
        error = (now["states"][name, key].float().reshape(wanted.shape) - wanted).abs()
        scale = now["scales"].get((name, key), torch.zeros(())).reshape(-1).clamp(min=1e-38)
        part = (error.reshape(-1) / scale).max().item() if error.numel() else 0.0
        drift[key] = max(drift.get(key, 0.0), part)
        if not torch.equal(error, torch.zeros_like(error)):
            states[f"{name} {key}"] = f"off by {error.max()}"
    ranks = engine.elastic_report.ranks
    return SimpleNamespace(
        differences=differences,
        states=states,
        drift=drift,
        requantized=sum(rank.read.blocks for rank in ranks),
        blocks=sum(rank.blocks for rank in ranks),
        reported_drift=max(rank.read.worst_error for rank in ranks),
        text=" ".join(str(engine.elastic_report).replace("│", " ").split()),
    )


def other_differences(engine: Any, now: dict[str, Any], truth: dict[str, Any]) -> dict[str, str]:
    """What is not bit-equal, states left out."""
    found = plain.compare(now, {kind: truth[kind] for kind in ("masters", "scalars")})
    for live, saved in zip(now["groups"], truth["groups"], strict=True):
        wrong = {key: live[key] for key, value in saved.items() if key in live and list_of(live[key]) != list_of(value)}
        found |= {"groups": f"{wrong} instead of {saved}"} if wrong else {}
    table = torch.linspace(0.5, 1.5, 100)
    if now["maps"] != truth["maps"]:
        found["maps"] = "are other ones"
    if not all(torch.equal(here, table) for here in oracle.tables(engine)):
        found["table"] = "is another one"
    if engine.elastic_report.mine.blocks != oracle.numel_of_blocks(engine):
        found["blocks"] = f"{engine.elastic_report.mine} instead of {oracle.numel_of_blocks(engine)}"
    if any(count != 1 for count in oracle.shared_maps(engine).values()):
        found["codebooks"] = f"are not shared: {oracle.shared_maps(engine)}"
    return found


def list_of(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def old_blocks(arguments: dict[str, Any]) -> list[SimpleNamespace]:
    """States in blocks of 2048, decoded here from the files themselves, beside what the engine holds."""
    elastic_ckpt.install()
    engine = build_engine(arguments["setup"], WideLM(seed=8))
    engine.load_checkpoint(arguments["folder"])
    files = sorted(Path(arguments["folder"]).glob("*/*_optim_states.pt"))
    saved = [torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"] for path in files]
    facts = []
    for group, flat in enumerate(engine.optimizer.single_partition_of_fp32_groups):
        state = plain.base_of(engine).state[flat]
        for number in (1, 2):
            if f"absmax{number}" not in state:
                continue
            mine, scales = (part[0] for part in oracle.decode_flat(state, f"state{number}", flat.numel()))
            whole = np.concatenate([old.decode(file["state"][group], number, old.OLD_BLOCK) for file in saved])
            whole = whole[: sum(param.numel() for param in engine.optimizer.bit16_groups[group])]
            first = dist.get_rank() * flat.numel()
            expected = torch.from_numpy(whole[first : first + flat.numel()])
            found, scales = mine[: expected.numel()], scales[: expected.numel()]
            drift = ((found - expected).abs() / scales.clamp(min=1e-38)).max().item()
            padding = mine[expected.numel() :]
            facts.append(SimpleNamespace(key=f"state{number}", drift=drift, padding_is_zero=not padding.any()))
    train(engine, SAVE_AT, CONTINUE_TO)
    return facts


def mismatched_init(alignments: list[tuple[int, int]]) -> list[str]:
    """The errors of engines of models that ``deepspeed.zero.Init`` padded otherwise: (made with, trained with)."""
    elastic_ckpt.install()
    errors = []
    for made_with, trained_with in alignments:
        config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
        if made_with:
            config["elastic_checkpoint"] = {"align_partitions": made_with}
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = WideLM()
        options = (("elastic_checkpoint", {"align_partitions": trained_with}),) if trained_with else ()
        try:
            build_engine(Setup(3, config=options), model)
            errors.append("built")
        except elastic_ckpt.ElasticCkptError as error:
            errors.append(str(error))
    return errors
