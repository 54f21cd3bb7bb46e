"""What must be equal in two jobs of different frameworks' resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.conftest import Job

#: DeepSpeed's refusal of another number of ranks, which is what a resume without elastic_ckpt ends in.
REFUSAL = "Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported"

#: Largest change of a value that is quantized once more, as a fraction of its block's scale: half the widest gap
#: between two codes of bitsandbytes' maps.
ONE_QUANTIZATION = {"state1": 0.0070313, "state2": 0.0035157}


def assert_restored(before: dict[str, Any], after: dict[str, Any], exact_states: bool = True, step: int = 3) -> None:
    """Everything a job held when it saved is what another holds right after its load, bit by bit."""
    assert_same_tensors(before["masters"], after["masters"])
    assert_same_tensors(before["weights"], after["weights"])
    assert_same_tensors(before["buffers"], after["buffers"])
    if exact_states:
        assert_same_tensors(before["states"], after["states"])
    else:
        _assert_one_quantization_apart(before["states"], after["states"], after["scales"])
    for fact in ("steps", "groups", "counters", "scheduler"):
        assert after[fact] == before[fact], fact
    assert before["steps"] == [step]


def assert_same_tensors(before: dict[Any, torch.Tensor], after: dict[Any, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), f"{name} differs by {(after[name] - tensor).abs().max()}"


def _assert_one_quantization_apart(
    before: dict[Any, torch.Tensor], after: dict[Any, torch.Tensor], scales: dict[Any, torch.Tensor]
) -> None:
    assert after.keys() == before.keys()
    for (name, key), tensor in before.items():
        limit = ONE_QUANTIZATION[key] * scales[name, key] * (1 + 1e-4)
        assert bool(((after[name, key] - tensor).abs() <= limit).all()), (name, key)  # a scale of 0: in 32 bits, equal
    assert any(not torch.equal(after[key], tensor) for key, tensor in before.items()), "no block was quantized anew"


def assert_trains_on(before: Job, after: Job, rel: float = 2e-6) -> None:
    """The resumed job ends where the uninterrupted one ended, and has its losses on the way there."""
    assert after.result["global_step"] == before.result["global_step"] == 6
    expected, found = before.result["losses"], after.result["losses"]
    for step in ("4", "5", "6"):
        assert found[step] == pytest.approx(expected[step], rel=rel), step


def rounding(ranks: int) -> float:
    """How far a loss may be from the one of two ranks, which sum up gradients in another order than others."""
    return 0.0 if ranks == 2 else 2e-6


def assert_reported_once(
    job: Job, saved_dp: int, now_dp: int, loads: int = 1, *, saved_sp: int = 1, now_sp: int = 1
) -> None:
    """One rank printed one report for each load, with the right data- and sequence-parallel degrees."""
    assert job.log.count("elastic_ckpt: checkpoint restored") == loads
    report = job.holds("loaded")["report"]
    saved, now = (f"DP={dp}" + f", SP={sp}" * (sp > 1) for dp, sp in ((saved_dp, saved_sp), (now_dp, now_sp)))
    assert f"{saved}, DeepSpeed" in report and f"{now}, at step 3" in report, report
