"""Jobs about universal checkpoints with states that are no plain moments: of tensor-parallel engines, and made by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bitsandbytes
import torch
import torch.distributed as dist
from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
from torch import nn

import elastic_ckpt
from tests.distributed import parallel_models
from tests.distributed import truth as plain
from tests.distributed.jobs import CONTINUE_TO, SAVE_AT, SPOILS, truth_of
from tests.distributed.model import WideLM, build_engine, close
from tests.distributed.optimizer_jobs import convert, masters
from tests.distributed.optimizer_truth import BLOCKS, decode_flat, decoded
from tests.distributed.parallel_jobs import declared_by_megatron
from tests.distributed.parallel_models import Parallel, build, end, place_of, train
from tests.distributed.truth import base_of

States = dict[tuple[str, str], torch.Tensor]
#: As reports name them.
FORMATS = ("native", "universal")


def eight_bit(module: nn.Module, members: list[list[str]], _: str = "") -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    groups = [{"params": [named[name] for name in names], "weight_decay": 0.1 * (len(names) > 1)} for names in members]
    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=1e-2)
    optimizer.args.min_8bit_size = 256
    return optimizer


@contextmanager
def in_8_bits() -> Iterator[None]:
    with mock.patch.object(parallel_models, "build_optimizer", eight_bit):
        yield


def save_each(cases: list[dict[str, Any]]) -> None:
    """Train each ``setup`` and save it."""
    with in_8_bits():
        for case in cases:
            parallel = case["setup"]
            engine = build(parallel)
            train(engine, parallel, 0, SAVE_AT)
            engine.module.universal_checkpoint_info = declared_by_megatron(parallel)
            engine.save_checkpoint(case["folder"], tag="step4")
            end(engine)
            dist.barrier()


def keep_both(case: dict[str, Any]) -> None:
    """``source`` as ``native`` in ``folder``, and converted with ``options`` beside it: a job of one rank."""
    native, universal = (os.path.join(case["folder"], name) for name in FORMATS)
    shutil.copytree(case["source"], native)
    convert({"source": native, "folder": universal, "options": case["options"]})


def load(case: dict[str, Any]) -> list[SimpleNamespace]:
    """Load what :func:`keep_both` has kept, one after the other; what differs between the engines."""
    elastic_ckpt.install()
    parallel: Parallel = case["setup"]
    with in_8_bits():
        engine = build(parallel, seed=8, config={"elastic_checkpoint": case["options"]})
        found, reports = [], []
        for name in FORMATS:
            train(engine, parallel, 100, 101)  # leave other values for the load to replace
            engine.load_checkpoint(os.path.join(case["folder"], name))
            found.append(states_of(engine))
            reports.append(engine.elastic_report)
        if SPOILS:
            del found[1]["group 0", "master"]
        compared = {key: (value, found[1].get(key)) for key, value in found[0].items()}
        facts = SimpleNamespace(
            where=f"rank {dist.get_rank()} ({place_of(parallel, dist.get_rank())}) of {parallel.name}",
            formats=[report.source.format for report in reports],
            requantized=[sum(rank.read.blocks for rank in report.ranks) for report in reports],
            differences=[key for key, (one, two) in compared.items() if two is None or not torch.equal(one, two)],
            coded=sum(value.dtype == torch.uint8 for value in found[0].values()),
            losses=train(engine, parallel, SAVE_AT, CONTINUE_TO),
        )
        end(engine)
    return [facts]


def states_of(engine: Any) -> States:
    """This rank's masters, and states of its partitions: codes, scales, maps, and the values that they stand for."""
    found: States = {}
    for number, flat in enumerate(engine.optimizer.single_partition_of_fp32_groups):
        found[f"group {number}", "master"] = flat.detach().clone()
        padding = engine.optimizer.groups_padding[number] if dist.get_rank() else 0  # what it has is not restored
        state = base_of(engine).state[flat]
        for key, value in state.items():
            kept = value.clone() if torch.is_tensor(value) else torch.tensor(value)
            found[f"group {number}", key] = kept
        for key in BLOCKS.keys() & state.keys():
            values, _ = decode_flat(state, key, flat.numel())
            found[f"group {number}", f"values of {key}"] = values[:, : flat.numel() - padding]
    return found


def deepspeed_loads(case: dict[str, Any]) -> list[dict[str, str]]:
    """What differs in masters and elementwise states after DeepSpeed's own loader has read a universal folder."""
    elastic_ckpt.uninstall()
    engine = build_engine(case["setup"], WideLM(seed=8))
    engine._config.load_universal_checkpoint = True
    assert engine.load_checkpoint(case["folder"])[0] is not None
    truth = truth_of(case["folder"])
    states, _ = decoded(engine, set())
    found = {"masters": masters(engine), "states": states}
    close(engine)
    return [plain.compare(found, {kind: truth[kind] for kind in found})]


def by_hand(case: dict[str, Any]) -> None:
    """The universal ``source`` as somebody else would write it, with bitsandbytes' own quantization, and its truth.

    A file for each state, in each parameter's folder: blocks are counted from the parameter's first element.
    """
    folder = Path(shutil.copytree(case["source"], case["folder"]))
    truth = torch.load(folder / "truth.pt", weights_only=False)
    zero = folder / "step4_universal" / "zero"
    common = torch.load(zero / "optimizer_state.pt", weights_only=False)
    shared = common.pop("elastic_ckpt_shared_states")
    del common["elastic_ckpt_files"], common["elastic_ckpt_contents"]
    torch.save(common, zero / "optimizer_state.pt")
    for parameter in filter(Path.is_dir, zero.iterdir()):
        if (parameter / "step.pt").exists() or (parameter / "trail.pt").exists():  # else it has no states
            for key in shared.keys() - {"qmap1", "qmap2"}:
                torch.save(shared[key], parameter / f"{key}.pt")
            truth["states"] |= quantize(parameter, shared, truth["states"])
    torch.save(truth, folder / "truth.pt")


def quantize(parameter: Path, shared: dict[str, Any], states: States) -> States:
    """Write the 8-bit states of a parameter's folder anew; the values that are read of them."""
    read: States = {}
    for number in (1, 2):
        file, key = parameter / f"state{number}.pt", (parameter.name, f"state{number}")
        if not file.exists() or torch.load(file)["param"].dtype != torch.uint8:
            continue
        values, table = states[key].float(), shared[f"qmap{number}"]
        codes, made = quantize_blockwise(values.reshape(-1), code=table, blocksize=256)
        torch.save({"param": codes.reshape(values.shape[1:])}, file)
        torch.save(made.absmax, parameter / f"absmax{number}.pt")
        torch.save(table, parameter / f"qmap{number}.pt")
        read[key] = dequantize_blockwise(codes, made).reshape(values.shape)
    return read
