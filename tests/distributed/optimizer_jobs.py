"""Jobs about optimizers of every kind: their states are decoded by :mod:`tests.distributed.optimizer_truth`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import elastic_ckpt
from tests.distributed import old_blocks as old
from tests.distributed import optimizer_truth as oracle
from tests.distributed import truth as plain
from tests.distributed.model import Setup, TinyLM, build_engine, close, setup_from_json, train

SAVE_AT = 4
CONTINUE_TO = 7
#: Half the widest gap of bitsandbytes' maps: what quantizing anew may change, as a part of a block's largest value.
BOUNDS = {"state1": 0.9 / 128, "state2": 0.9 / 256}


class WideLM(TinyLM):
    """Big enough for 8-bit states: 17,000 elements in one param group, and a second group that stays in fp32."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__(seed)
        self.hidden = nn.Linear(13, 211)
        self.norm = nn.LayerNorm(211)
        self.back = nn.Linear(211, 13, bias=False)
        self.bulk = nn.Parameter(torch.randn(67, 167))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + (self.bulk * self.bulk.detach().roll(1)).mean()


def save(arguments: dict[str, Any]) -> None:
    """Train each setup, save it, write down its decoded states, and train on for the reference losses."""
    for setup in map(setup_from_json, arguments["setups"]):
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
    is_muon = is_muon and not engine.optimizer.cpu_offload
    held = {"masters": masters(engine), "scalars": oracle.scalars(engine), "groups": plain.hyperparameters(engine)}
    states, scales = oracle.decoded(engine, {"momentum_buffer"} if is_muon else set())
    if is_muon:
        states |= oracle.muon_momentum(engine)
    if engine.zero_optimization_stage() == 0:
        states |= oracle.whole_states(engine)
    return {**held, "states": states, "scales": scales}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {"masters": {}, "states": {}}
    if engine.zero_optimization_stage() == 0:
        plain.gather_unpartitioned(engine, [], found)
    else:
        found["masters"] = {
            name: plain.safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()
        }
    return found["masters"]


def load(arguments: dict[str, Any]) -> None:
    """Load many checkpoints into one engine after another, and compare each with its truth.

    Of each source: ``exact``: whether every state must come back bit by bit; else within :data:`BOUNDS`. ``rename``:
    saved state -> live state. ``loss``: by how much the losses of the continued run may differ. ``says``: words of the
    report. ``resave``: where to save it again.
    """
    elastic_ckpt.install()
    for target in arguments["targets"]:
        setup = setup_from_json(target["setup"])
        engine = build_engine(setup, WideLM(seed=8))
        for number, source in enumerate(target["sources"]):
            where = f"{source['folder']} -> {setup.name}-dp{dist.get_world_size()}"
            truth = torch.load(os.path.join(source["folder"], "truth.pt"), weights_only=False)
            engine.load_checkpoint(source["folder"])
            assert engine.elastic_report is not None, f"{where}: DeepSpeed's own path ran"
            compare(engine, truth, source, where)
            if "resave" in source:
                engine.save_checkpoint(source["resave"], tag="step4")
                if dist.get_rank() == 0:
                    torch.save(truth, os.path.join(source["resave"], "truth.pt"))
            if number in target.get("continue", [0]):
                losses = train(engine, SAVE_AT, CONTINUE_TO)
                worst = max(abs(a - b) for a, b in zip(losses, truth["losses"], strict=True))
                assert worst <= source.get("loss", 1e-5), f"{where}: losses {losses}, uninterrupted {truth['losses']}"
            else:
                train(engine, 100 + number, 101 + number)
        close(engine)


def compare(engine: Any, truth: dict[str, Any], source: dict[str, Any], where: str) -> None:
    """The engine holds ``truth``: masters and scalars exactly, states exactly or within their bound. Collective."""
    now = everything(engine)
    for name, expected in truth["masters"].items():
        assert torch.equal(now["masters"][name], expected), f"{where}: master {name}"
    rename = source.get("rename", {})
    expected_keys = {(name, rename.get(key, key)) for name, key in truth["states"]}
    assert expected_keys == now["states"].keys(), f"{where}: {expected_keys ^ now['states'].keys()}"
    worst = 0.0
    for (name, key), expected in truth["states"].items():
        live = name, rename.get(key, key)
        found = now["states"][live].float().reshape(expected.shape)
        if source.get("exact", True):
            assert torch.equal(found, expected.float()), f"{where}: {live} by {(found - expected).abs().max()}"
            continue
        scale = now["scales"][live].reshape(expected.shape)
        bound = BOUNDS[live[1]] * scale * (1 + 1e-5)
        error = (found - expected).abs()
        assert (error <= bound).all(), f"{where}: {live} is off by {(error - bound).max()} more than its bound"
        worst = max(worst, (error / scale.clamp(min=1e-38)).max().item())
    assert now["scalars"] == {**truth["scalars"], **source.get("scalars", {})}, (
        where,
        now["scalars"],
        truth["scalars"],
    )
    for live_group, saved in zip(now["groups"], truth["groups"], strict=True):
        same = {key: value for key, value in saved.items() if key in live_group}
        assert {key: list(v) if isinstance(v, tuple) else v for key, v in live_group.items() if key in same} == {
            key: list(v) if isinstance(v, tuple) else v for key, v in same.items()
        }, where
    assert all(count == 1 for count in oracle.shared_maps(engine).values()), f"{where}: {oracle.shared_maps(engine)}"
    check_report(engine, source, worst, where)


def check_report(engine: Any, source: dict[str, Any], worst: float, where: str) -> None:
    """The report counts the blocks that were quantized anew, and says how far that moved values."""
    text = " ".join(str(engine.elastic_report).replace("│", " ").split())
    for words in source.get("says", []):
        assert words in text, f"{where}: {words!r} is not in\n{engine.elastic_report}"
    table = torch.linspace(0.5, 1.5, 100)
    assert all(torch.equal(held, table) for held in oracle.tables(engine)), where
    work = engine.elastic_report.mine
    assert work.blocks == oracle.numel_of_blocks(engine), (where, work)
    totals = engine.elastic_report.ranks
    requantized = sum(rank.blocks_requantized for rank in totals)
    seen = max(rank.worst_requantization_error for rank in totals)
    assert seen >= worst - 1e-6, (where, seen, worst)
    if source.get("exact", True):
        assert requantized == 0 and seen == 0.0, (where, requantized, seen)
    else:
        assert requantized > 0 and seen > 0.0, where
        assert f"{requantized} of {sum(rank.blocks for rank in totals)} quantized anew" in text


def refuse(arguments: dict[str, Any]) -> None:
    """Loads that must be refused, with these words, on all ranks, and change nothing."""
    elastic_ckpt.install()
    for case in arguments["cases"]:
        engine = build_engine(setup_from_json(case["setup"]), WideLM())
        train(engine, 50, 52)
        before = plain.fingerprint(engine)
        try:
            engine.load_checkpoint(case["folder"])
        except elastic_ckpt.ElasticCkptError as error:
            message = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError(f"{case}: loaded without an error")
        plain.agree(message)
        for detail in case["says"]:
            assert detail in message, f"{case}: {detail!r} is not in:\n{message}"
        assert plain.fingerprint(engine) == before, case
        close(engine)


def old_blocks(arguments: dict[str, Any]) -> None:
    """States in blocks of 2048, decoded here from the files themselves, against what the engine holds."""
    elastic_ckpt.install()
    engine = build_engine(setup_from_json(arguments["setup"]), WideLM(seed=8))
    engine.load_checkpoint(arguments["folder"])
    files = sorted(Path(arguments["folder"]).glob("*/*_optim_states.pt"))
    saved = [torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"] for path in files]
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
            if arguments["exact"]:
                assert torch.equal(found, expected), (group, number)
            assert ((found - expected).abs() <= BOUNDS[f"state{number}"] * scales * (1 + 1e-5)).all(), (group, number)
            assert not mine[expected.numel() :].any()
    train(engine, SAVE_AT, CONTINUE_TO)


def mismatched_init(arguments: dict[str, Any]) -> None:
    """``deepspeed.zero.Init`` and the engine have to pad alike, or gradients would be cut elsewhere than parameters."""
    elastic_ckpt.install()
    for made_with, trained_with in ((256, 0), (256, 64), (0, 64)):
        config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
        if made_with:
            config["elastic_checkpoint"] = {"align_partitions": made_with}
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = WideLM()
        options = (("elastic_checkpoint", {"align_partitions": trained_with}),) if trained_with else ()
        try:
            build_engine(Setup(3, config=options), model)
        except elastic_ckpt.ElasticCkptError as error:
            assert "align_partitions" in str(error) and "zero.Init" in str(error), error
        else:
            raise AssertionError(f"made with {made_with}, trained with {trained_with}: no error")
