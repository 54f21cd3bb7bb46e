"""The run that saved a checkpoint: precision, optimizer, degrees, batch sizes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core.local_state import SequenceParallel
from elastic_ckpt.core.training_state import BatchSizes
from elastic_ckpt.planning.optimizer_kinds import optimizer_of, saved_optimizer
from elastic_ckpt.tools.inspection.facts import Evidence, SavedRun

UNKNOWN = "unknown"
_BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_SHORT = 16
_CONFIG, _NAMES, _WEIGHTS = "saved config", "file names", "dtype of the weights"


def saved_run(evidence: Evidence) -> SavedRun:
    """The run that saved a checkpoint, as far as known."""
    peeked, metadata = evidence.peeked, evidence.metadata
    source = evidence.checkpoint or peeked
    state = None if source is None else source.training_state
    counters = {} if state is None else state.counters
    batch = BatchSizes(None, None, None) if state is None else state.batch
    scale = None if state is None else state.loss_scale
    precisions = precision_evidence(evidence)
    optimizer, says_so = _optimizer(evidence)
    stage, dp, tp, pp = _topology(evidence, counters)
    sequence = metadata.source.sequence if metadata else peeked.degrees.sequence if peeked else SequenceParallel()
    return SavedRun(
        step=_int(counters.get("global_steps")),
        samples=_int(counters.get("global_samples")),
        skipped_steps=_int(counters.get("skipped_steps")),
        ds_version=metadata.source.ds_version if metadata else (peeked.ds_version or None) if peeked else None,
        zero_stage=stage,
        dp=None if dp is None else sequence.data_degree(dp),
        sp=sequence.degree if sequence.degree > 1 else None,
        tp=tp,
        pp=pp,
        precision=next(iter(precisions.values()), UNKNOWN),
        precision_from=tuple(precisions),
        optimizer=optimizer,
        optimizer_from=says_so,
        global_batch=batch.global_batch,
        micro_batch=batch.micro_batch,
        accumulation_steps=batch.accumulation_steps,
        lr_scheduler=None if state is None else _short_entries(state.lr_scheduler),
        loss_scale=None if scale is None else {"kind": scale.kind, **scale.values},
        overflow=state is not None and state.overflow,
        client_state=() if peeked is None else peeked.client_state,
        config=None if peeked is None else peeked.config,
        arguments={} if metadata is None else metadata.run,
    )


def precision_evidence(evidence: Evidence) -> dict[str, str]:
    """Evidence for the run's precision, in words -> the precision; the most reliable first."""
    peeked, found = evidence.peeked, {}
    if peeked is not None and peeked.config is not None:
        sections = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
        enabled = (name for key, name in sections.items() if evidence.section(key).get("enabled") is True)
        found[_CONFIG] = next(enabled, "fp32")
    if any(name.startswith("bf16_") for name in evidence.found.files.optimizer.values()):
        found[_NAMES] = "bf16"
    if peeked is not None and peeked.weight_dtypes:
        found[_WEIGHTS] = _BY_DTYPE.get(peeked.weight_dtypes[0], peeked.weight_dtypes[0])
    return found


def _topology(evidence: Evidence, counters: Mapping[str, Any]) -> tuple[int | None, int | None, int | None, int | None]:
    """ZeRO stage, and data-, tensor- and pipeline-parallel degree."""
    degrees = None if evidence.peeked is None else evidence.peeked.degrees
    tp, pp = (None, None) if degrees is None else (degrees.tp, degrees.pp)
    if evidence.metadata is None:
        stage = 3 if evidence.found.files.model_zero3 else _int(evidence.section("zero_optimization").get("stage"))
        return stage, _int(counters.get("dp_world_size")), tp, pp
    source = evidence.metadata.source
    if source.format == "universal":  # of whole tensors, whatever the run's degrees
        return source.zero_stage, source.dp, source.merged_from, pp or 1
    return source.zero_stage, source.dp, source.tp, source.pp


def _optimizer(evidence: Evidence) -> tuple[str, str]:
    """The optimizer and its evidence; DeepSpeed ignores the config's if the client passes another one."""
    named = evidence.section("optimizer").get("type")
    by_states = _optimizer_by_states(evidence)
    if isinstance(named, str):
        return named, f"{_CONFIG}; its states are those of {by_states}" if by_states else _CONFIG
    return (by_states, "its states and hyperparameters") if by_states else (UNKNOWN, "")


def _optimizer_by_states(evidence: Evidence) -> str:
    if evidence.metadata is not None and evidence.metadata.parameters:
        return saved_optimizer(evidence.metadata)
    parts = [] if evidence.peeked is None else list(evidence.peeked.unnamed.values())
    if not parts:
        return ""
    keys = sorted({key for part in parts for states in part.states.values() for key in states.tensors})
    return optimizer_of(keys, parts[0].groups[0] if parts[0].groups else {})


def _short_entries(state: Any) -> Mapping[str, Any] | None:
    """The short entries of a scheduler's state, if it has one."""
    if state is None:
        return None
    if not isinstance(state, Mapping):
        return {"type": type(state).__name__}
    return {str(key): value for key, value in state.items() if _is_short(value)}


def _is_short(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return len(value) <= _SHORT and all(isinstance(item, (int, float, str)) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
