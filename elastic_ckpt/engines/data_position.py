"""The data position of a live engine: what its own counters say was trained on, and its registered sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from elastic_ckpt.core.kinds import is_count
from elastic_ckpt.core.values import TrainingState
from elastic_ckpt.data import DataPosition, Trained
from elastic_ckpt.data.position import SAMPLES
from elastic_ckpt.engines.compat import dp_group_of
from elastic_ckpt.engines.coordinates import coordinates_of

#: Entry of the client state in a checkpoint, which ``load_checkpoint`` does not return.
POSITION_KEY = "elastic_ckpt_data"
_SAMPLER = "_elastic_ckpt_sampler"
_POSITION = "_elastic_ckpt_position"


def registered(engine: Any) -> DataPosition | None:
    """The sampler or stream of an engine."""
    return getattr(engine, _SAMPLER, None)


def set_registered(engine: Any, sampler: DataPosition | None) -> None:
    """Have the saves of an engine hold the position of a sampler that counts by itself, or none."""
    setattr(engine, _SAMPLER, sampler)


def position_of(engine: Any) -> int:
    """Samples consumed by the sampler of an engine; 0 without one."""
    return 0 if (sampler := registered(engine)) is None else sampler.samples_consumed


def saved_position(engine: Any) -> Mapping[str, Any] | None:
    """What the checkpoint that an engine was loaded from holds as its data position."""
    return getattr(engine, _POSITION, None)


def bind_sampler(engine: Any, sampler: DataPosition) -> None:
    """Let a sampler or stream count by an engine, from the position that this was loaded with, if any."""
    at = coordinates_of(engine, dp_group_of(engine))
    degree = at.data_degree
    data_rank = at.partition_rank // at.sequence.ranks_per_sample
    sampler.bind(lambda: trained(engine, degree), None if at.sequence.strided else (degree, data_rank))
    setattr(engine, _SAMPLER, sampler)
    if (position := saved_position(engine)) is not None:
        sampler.check(position)
        sampler.refuse_uncounted(position, engine.global_samples)
        sampler.load_state_dict(position)


def take_position(engine: Any, position: Mapping[str, Any] | None, before: int) -> None:
    """Go on from a saved position once the counters are restored, with a sampler that is registered later, too.

    ``before``: the sampler's position before the load, at which it stays if the checkpoint holds none.
    """
    setattr(engine, _POSITION, position)
    if (sampler := registered(engine)) is not None:
        sampler.move_to(before)
        if position is not None:
            sampler.load_state_dict(position)


def trained(engine: Any, data_degree: int) -> Trained:
    """What an engine has trained on. ``train_batch_size()`` counts AutoTP's ranks too, which have the same samples."""
    steps = engine.gradient_accumulation_steps()
    micro_batch = engine.train_micro_batch_size_per_gpu() * data_degree
    samples = engine.global_samples * micro_batch // (engine.train_batch_size() // steps)
    if isinstance(engine, PipelineEngine):
        return Trained(samples, micro_batch, None, steps)
    # a loop that says itself when it steps, as Accelerate's, does so at the end of an epoch, too
    is_told = engine._is_gradient_accumulation_boundary is not None
    in_flight = 0 if is_told else engine.micro_steps % steps
    return Trained(samples, micro_batch, getattr(engine, "_unmanaged_backward_count", 0) or in_flight, steps)


def samples_consumed(saved: TrainingState) -> int | None:
    """Samples that the run which saved a checkpoint had trained on; ``None`` if it does not tell."""
    position = saved.checkpoint.get(POSITION_KEY)
    batch = saved.batch.global_batch
    if isinstance(position, Mapping) and is_count(position.get(SAMPLES)):
        return int(position[SAMPLES])
    counted = counted_samples(saved)
    return counted if counted is not None or batch is None else int(saved.counters["global_steps"] * batch)


def counted_samples(saved: TrainingState) -> int | None:
    """DeepSpeed's own count, without AutoTP's ranks, which it multiplies it by; ``None`` if it is not saved."""
    samples = saved.counters.get("global_samples")
    batch = saved.batch.global_batch
    if samples is None or batch is None:
        return samples
    config = saved.checkpoint.get("ds_config")
    return int(samples * batch // _counted_batch(saved, config if isinstance(config, Mapping) else {}, batch))


def _counted_batch(saved: TrainingState, config: Mapping[str, Any], batch: int) -> int:
    """The samples that DeepSpeed counted in a step: AutoTP's ranks are among those that its config knows, unless an
    ``mpu`` told them apart, whose steps count as many samples as a batch has."""
    stated = config.get("train_batch_size")
    section = config.get("tensor_parallel")
    if isinstance(stated, int) and stated >= 1:
        return stated
    degree = section.get("autotp_size") if isinstance(section, Mapping) else None
    is_each_once = saved.counters.get("global_samples") == saved.counters.get("global_steps", 0) * batch
    return batch * degree if isinstance(degree, int) and degree > 1 and not is_each_once else batch
