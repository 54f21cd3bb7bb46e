"""What a DeepSpeed config says of a run, and what such a run has in memory after a load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, ITEMSIZE
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import BATCH_KEYS, BatchSizes
from elastic_ckpt.formats.saved_config import complete_batch, positive_int, section_of

GPU = "GPU"
#: Devices of DeepSpeed's offload -> where they keep what is offloaded.
_PLACES = {"cpu": "host", "nvme": "NVMe"}
_PRECISIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class RunSettings:
    """ZeRO stage, dtype of the weights, and where masters and optimizer states (``optimizer``) and weights are."""

    zero_stage: int
    precision: str = "float32"
    optimizer: str = GPU
    weights: str = GPU
    config: Mapping[str, Any] | None = None  # which says so

    @classmethod
    def of(cls, config: Mapping[str, Any], saved: RunSettings) -> RunSettings:
        """The settings of a config; what it leaves out, or leaves to a framework (``"auto"``), is as saved."""
        zero = section_of(config, "zero_optimization")
        said = {key: section_of(config, key).get("enabled") for key in _PRECISIONS if key in config}
        is_open = "auto" in said.values() or not (said or zero)
        precision = saved.precision if is_open else "float32"
        stage = zero.get("stage")
        return cls(
            stage if type(stage) is int and 0 <= stage <= 3 else saved.zero_stage,
            next((_PRECISIONS[key] for key, value in said.items() if value is True), precision),
            _place(zero, "offload_optimizer", "cpu_offload") if zero else saved.optimizer,
            _place(zero, "offload_param", "cpu_offload_param") if zero else saved.weights,
            config or saved.config,
        )

    def memory(self, local_state: LocalState, filled: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What a rank has after a load, where, and how many bytes; ``filled`` is a forecast's.

        Neither gradients nor activations, which come with the first step.
        """
        model = local_state.model
        stage = self.zero_stage
        kept = {name for flat in local_state.flats for name in flat.members}
        numel = sum(math.prod(model.layouts[name].shapes[model.coordinates.tp_rank]) for name in kept)
        numel = sum(flat.numel for flat in local_state.flats) if stage == 3 else numel
        weights = self.weights if stage == 3 else GPU
        optimizer = self.optimizer if stage else GPU
        found = [{"key": "weights", "dtype": self.precision, "tensors": len(kept), "numel": numel, "padding": 0}]
        found = found if stage or self.precision != "float32" else []  # else the masters are the weights
        return [
            {
                **each,
                "place": {"weights": weights, BUFFER: GPU, FROZEN: weights}.get(each["key"], optimizer),
                "nbytes": each["numel"] * ITEMSIZE[each["dtype"]],
            }
            for each in (*found, *filled)
        ]

    def batch(self, dp: int, saved: BatchSizes) -> tuple[int | None, str]:
        """The global batch on ``dp`` ranks, as far as it is known, and why DeepSpeed refuses it, if it does."""
        config = self.config or {}
        said, *others = (positive_int(config, key) for key in BATCH_KEYS)
        known = complete_batch(config, dp).global_batch
        if known is None and saved.micro_batch and saved.accumulation_steps:
            known = saved.micro_batch * saved.accumulation_steps * dp
        if said is None or None not in others or known == said:
            return known, ""
        return said, f"DeepSpeed refuses a global batch of {said} on {counted(dp, 'data-parallel rank')}"


def _place(zero: Mapping[str, Any], key: str, old_key: str) -> str:
    device = section_of(zero, key).get("device", "cpu" if zero.get(old_key) is True else None)
    return _PLACES.get(str(device), GPU)
