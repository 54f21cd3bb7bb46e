"""Jobs about optimizers of every kind: their states are decoded by :mod:`tests.distributed.optimizer_truth`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
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
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, SPOILS, take_over, truth_of, where
from tests.distributed.model import Setup, WideLM, build_engine, close, train


def save(cases: list[dict[str, Any]]) -> None:
    """Train each ``setup``, save it in ``folder``, write down its decoded states, and train on for the reference losses."""
    for case in cases:
        if case["setup"].config:
            elastic_ckpt.install()
        engine = build_engine(case["setup"], WideLM())
        train(engine, 0, SAVE_AT)
        engine.save_checkpoint(case["folder"], tag="step4")
        truth = everything(engine)
        truth["losses"] = train(engine, SAVE_AT, CONTINUE_TO)
        _write_truth(truth, case["folder"])
        close(engine)
        elastic_ckpt.uninstall()
        dist.barrier()


def resave(case: dict[str, Any]) -> None:
    """Load ``source``, and save it in ``folder`` with the same truth."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"], WideLM(seed=8))
    engine.load_checkpoint(case["source"])
    engine.save_checkpoint(case["folder"], tag="step4")
    _write_truth(torch.load(os.path.join(case["source"], "truth.pt"), weights_only=False), case["folder"])
    close(engine)


def age(case: dict[str, Any]) -> None:
    """``source`` as bitsandbytes wrote it before 0.44, in ``folder``."""
    take_over(case)
    old.to_flat_blocks_of_2048(Path(case["folder"]))


def convert(case: dict[str, Any]) -> None:
    """``source`` as a universal checkpoint in ``folder``, or one of ``to``, by the command, with elastic_ckpt's ``options``.

    A job of one rank.
    """
    from typer.testing import CliRunner

    from elastic_ckpt.cli import app  # which takes long, and no other job needs it

    config, to = f"{case['folder']}.json", case.get("to", "universal")
    Path(config).write_text(json.dumps({"elastic_checkpoint": case["options"]}))
    target = os.path.join(case["folder"], "step4_universal") if to == "universal" else case["folder"]
    words = ["convert", case["source"], target, "--to", to, "--config", config]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    truth = Path(case["source"], "truth.pt")
    if truth.exists():
        shutil.copy(truth, case["folder"])


def _write_truth(truth: dict[str, Any], folder: str) -> None:
    if dist.get_rank() == 0:
        torch.save(truth, os.path.join(folder, "truth.pt"))


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


def load(cases: list[dict[str, Any]]) -> list[SimpleNamespace]:
    """Load each ``folder`` into an engine of its ``setup``, compare it with its truth, and train on.

    ``rename``: saved state -> live state; ``trained``: whether the engine has other states for the load to replace.
    """
    elastic_ckpt.install()
    facts = []
    for case in cases:
        truth = truth_of(case["folder"])
        engine = build_engine(case["setup"], WideLM(seed=8))
        if case.get("trained", False):
            train(engine, 100, 101)
        engine.load_checkpoint(case["folder"])
        found = compare(engine, truth, case.get("rename", {}))
        found.case, found.where = case, where(case)
        found.loss_gap = loss_gap(train(engine, SAVE_AT, CONTINUE_TO), truth)
        facts.append(found)
        close(engine)
    return facts


def losses(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Those of a run as it is, and of one whose partitions are aligned to ``numel`` elements."""
    elastic_ckpt.install()
    section = ("elastic_checkpoint", {"align_partitions": case["numel"]})
    found = []
    for setup in (case["setup"], replace(case["setup"], config=(section,))):
        engine = build_engine(setup, WideLM())
        found.append(train(engine, 0, CONTINUE_TO))
        close(engine)
    plain, aligned = found
    return [SimpleNamespace(plain=[loss + SPOILS for loss in plain], aligned=aligned)]


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


def old_blocks(case: dict[str, Any]) -> list[SimpleNamespace]:
    """States in blocks of 2048, decoded here from the files themselves, beside what the engine holds."""
    elastic_ckpt.install()
    engine = build_engine(case["setup"], WideLM(seed=8))
    engine.load_checkpoint(case["folder"])
    files = sorted(Path(case["folder"]).glob("*/*_optim_states.pt"))
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
            expected = torch.from_numpy(whole[first : first + flat.numel()]) + SPOILS
            found, scales = mine[: expected.numel()], scales[: expected.numel()]
            drift = ((found - expected).abs() / scales.clamp(min=1e-38)).max().item()
            padding = mine[expected.numel() :]
            facts.append(SimpleNamespace(key=f"state{number}", drift=drift, padding_is_zero=not padding.any()))
    train(engine, SAVE_AT, CONTINUE_TO)
    return facts


def mismatched_init(case: dict[str, Any]) -> list[str]:
    """The error of an engine of a model that ``deepspeed.zero.Init`` padded otherwise.

    ``made_with``, ``trained_with``: alignments of partitions.
    """
    elastic_ckpt.install()
    made_with, trained_with = case["made_with"], case["trained_with"]
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    if made_with:
        config["elastic_checkpoint"] = {"align_partitions": made_with}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = WideLM()
    options = (("elastic_checkpoint", {"align_partitions": trained_with}),) if trained_with else ()
    try:
        build_engine(Setup(3, config=options), model)
    except elastic_ckpt.ElasticCkptError as error:
        return [str(error)]
    return ["built"]
