"""Batch sizes of a job of another size. Pure arithmetic."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.errors import ConfigError, MismatchError

#: The first highly composite numbers (OEIS A002182), each with more divisors than any before it: DeepSpeed's multiples.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)
#: DeepSpeed's defaults of numbers in the section ``"elasticity"``.
_NUMBERS = {"min_gpus": 1, "max_gpus": 10_000, "num_gpus_per_node": 1, "model_parallel_size": 1}


@dataclass(frozen=True)
class BatchPlan(BatchSizes):
    """Batch sizes of a job."""

    learning_rate_factor: float = 1.0  # of a learning rate that is proportional to the batch; 1.0: the batch is kept


def batch_for(world_size: int, global_batch: int, max_micro_batch: int) -> BatchPlan:
    """The largest micro-batch, and the accumulation steps, with which a number of data-parallel ranks keeps the batch.

    If the ranks do not divide it, the result is the nearest batch that they divide (of two, the smaller), with a factor
    for a learning rate that is proportional to the batch. For Adam, the square root of that factor is often used.
    """
    if min(world_size, global_batch, max_micro_batch) < 1:
        given = f"world_size={world_size}, global_batch={global_batch}, max_micro_batch={max_micro_batch}"
        raise ConfigError("batch sizes and numbers of ranks are 1 or more", found=given)
    samples = max((2 * global_batch + world_size - 1) // (2 * world_size), 1)  # of a rank, in a step
    micro_batch = max(each for each in _divisors(samples) if each <= max_micro_batch)
    nearest = samples * world_size
    return BatchPlan(nearest, micro_batch, samples // micro_batch, nearest / global_batch)


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """What ``deepspeed.elasticity.compute_elastic_config`` returned before DeepSpeed dropped it, of the same config.

    The section ``"elasticity"`` has the micro-batches that fit and the largest global batch. Returns the global batch
    that the most numbers of ranks divide, and these numbers. With a ``world_size`` or ``return_microbatch``, it also
    returns the micro-batch. Version 0.2 counts complete nodes. ``target_deepspeed_version`` is ignored.

    Raises :class:`ConfigError` for a wrong section, and :class:`MismatchError` for ranks that the section excludes.
    """
    section = _section(ds_config)
    micro_batches: list[int] = section["micro_batch_sizes"]
    is_by_node = float(section["version"]) == 0.2
    known = os.environ.get("WORLD_SIZE", "")
    ranks = world_size or (int(known) if is_by_node and known.isnumeric() else 0)
    if not ranks and (is_by_node or return_microbatch):
        problem = "this elasticity section needs a world_size, for version 0.2 or the micro-batch"
        raise ConfigError(problem, remedy="give one, or for version 0.2 WORLD_SIZE in the environment")
    batch, valid = _by_node(section, ranks) if is_by_node else _most_divisible(section, 1, 1)
    if not batch or not valid or (world_size and world_size not in valid):
        problem = f"{world_size or ranks or 'no number of'} ranks can train with this elasticity section"
        remedy = "take one of these numbers of ranks, or a larger max_train_batch_size"
        raise MismatchError(problem, None, f"one of {valid}", world_size or ranks, remedy=remedy)
    if not world_size and not return_microbatch:
        return batch, valid
    takes_largest = bool(world_size) or section["prefer_larger_batch"]
    every = sorted(micro_batches, reverse=True) if takes_largest else micro_batches
    return batch, valid, next((each for each in every if batch // ranks % each == 0), None)


def _section(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The checked ``"elasticity"`` section, with DeepSpeed's defaults."""
    given = ds_config.get("elasticity")
    if not isinstance(given, Mapping) or not given.get("enabled"):
        raise ConfigError('the config has no "elasticity" section that is enabled', expected='"enabled": true in it')
    section = {"prefer_larger_batch": True, "version": 0.2, **_NUMBERS, **given}
    micro_batches = section.get("micro_batch_sizes")
    numbers = [section.get(key) for key in ("max_train_batch_size", *_NUMBERS)]
    numbers += micro_batches if isinstance(micro_batches, list) and micro_batches else [None]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        expected = "max_train_batch_size, a list micro_batch_sizes, and numbers of 1 or more"
        raise ConfigError('the "elasticity" section is wrong', None, expected, dict(given))
    parallel = section["model_parallel_size"]
    node = section["num_gpus_per_node"]
    is_by_node, is_first = (float(section["version"]) == version for version in (0.2, 0.1))
    if section["max_gpus"] < section["min_gpus"] or not (is_by_node or is_first) or (is_first and parallel > 1):
        expected = "version 0.1 or 0.2 (with model_parallel_size above 1: 0.2), and max_gpus not below min_gpus"
        raise ConfigError('the "elasticity" section is wrong', None, expected, dict(given))
    if is_by_node and node % parallel:
        expected = "num_gpus_per_node that model_parallel_size divides"
        raise ConfigError('the "elasticity" section is wrong', None, expected, f"{node} and {parallel}")
    return section


def _by_node(section: Mapping[str, Any], ranks: int) -> tuple[int, list[int]]:
    """Version 0.2: the batch for whole nodes; where these do not fit, the largest (or smallest) for so many ranks."""
    node = section["num_gpus_per_node"]
    largest = section["max_train_batch_size"]
    per_node = node // section["model_parallel_size"]  # data-parallel ranks
    batch, nodes = _most_divisible(section, node, per_node)
    valid = [number * per_node for number in nodes]
    if ranks // section["model_parallel_size"] in valid:
        return batch * per_node, valid
    data_ranks = ranks / node * per_node
    batches = [
        math.floor(largest / (micro * data_ranks)) * micro * data_ranks for micro in section["micro_batch_sizes"]
    ]
    return int(max(batches) if section["prefer_larger_batch"] else min(batches)), [int(data_ranks)]


def _most_divisible(section: Mapping[str, Any], node: int, per_node: int) -> tuple[int, list[int]]:
    """The batch, of one data-parallel rank a node, that most numbers of nodes divide; and these numbers."""
    micro_batches = section["micro_batch_sizes"]
    prefers_larger = section["prefer_larger_batch"]
    largest = int(section["max_train_batch_size"] / per_node)
    if max(micro_batches) > largest:
        raise ConfigError("a micro-batch is above the largest batch", None, f"at most {largest}", max(micro_batches))
    bases = {*micro_batches, math.lcm(*micro_batches)}
    candidates = {
        base * _HIGHLY_COMPOSITE[bisect_right(_HIGHLY_COMPOSITE, max(largest // base, 1)) - 1] for base in bases
    }
    least = int(section["min_gpus"] / node) or 1
    most = int(section["max_gpus"] / node) or largest // min(micro_batches)
    valid = {batch: _numbers_of_ranks(batch, micro_batches, least, most) for batch in candidates}
    best = max(candidates, key=lambda batch: (len(valid[batch]), batch if prefers_larger else -batch))
    return best, valid[best]


def _numbers_of_ranks(batch: int, micro_batches: Sequence[int], least: int, most: int) -> list[int]:
    every = {ranks for micro in micro_batches if batch % micro == 0 for ranks in _divisors(batch // micro)}
    return sorted(ranks for ranks in every if least <= ranks <= most)


def _divisors(number: int) -> set[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return {*small, *(number // each for each in small)}
