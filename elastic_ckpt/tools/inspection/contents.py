"""The run that saved a checkpoint, parameters and their layouts, summaries of optimizer states and groups. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.core.local_state import SequenceParallel
from elastic_ckpt.core.metadata import BUFFER, ITEMSIZE, WEIGHTS, CheckpointMetadata, TensorMetadata
from elastic_ckpt.core.tp_rules import AMBIGUOUS, WHOLE_KINDS, CannotSplit, Rule
from elastic_ckpt.core.training_state import BatchSizes
from elastic_ckpt.core.values import PerRank, TensorValue, numbers
from elastic_ckpt.formats.model_states import UnpartitionedState
from elastic_ckpt.planning.optimizer_kinds import optimizer_of, saved_optimizer
from elastic_ckpt.sharding.rules import Preset, ShardingRules, tensor_of
from elastic_ckpt.sharding.specs import ShardSpec, ShardSpecs
from elastic_ckpt.tools.files import WHOLE_FORMATS
from elastic_ckpt.tools.inspection.facts import (
    BUFFER_ROLE,
    FROZEN_ROLE,
    TRAINED,
    WEIGHT,
    Evidence,
    GroupSummary,
    ParameterEntry,
    RuleFacts,
    SavedRun,
    Shape,
    StateSummary,
    Totals,
)

UNKNOWN = "unknown"
_BY_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_SHORT = 16
_CONFIG, _NAMES, _WEIGHTS = "saved config", "file names", "dtype of the weights"
SCALAR = "scalar"
#: Key, kind, dtype, rows, and elements per block of a state.
_Kind = tuple[str, str, str, int, int]
#: States of some parameters: kind; number of parameters, elements and bytes; value of a scalar.
_Row = tuple[_Kind, tuple[int, int, int], Any]
#: In place of an unknown rule, and of one that contradicts the shapes.
_UNDECIDED, _CONTRADICTED = "undecided", "contradicted"


def _numel(tensor: TensorMetadata) -> int:
    return sum(map(math.prod, tensor.shard_shapes))


def stored_nbytes(tensor: TensorMetadata) -> int:
    """Bytes of all shards, without the scales of a quantized state."""
    return _numel(tensor) * ITEMSIZE[tensor.dtype]


def totals(metadata: CheckpointMetadata, key: str) -> Totals:
    """All tensors of one key, without replicas on other pipeline stages."""
    mine = [tensor for (_, tensor_key), tensor in metadata.tensors.items() if tensor_key == key]
    dtypes = tuple(sorted({tensor.dtype for tensor in mine}))
    return Totals(len(mine), sum(map(_numel, mine)), sum(map(stored_nbytes, mine)), dtypes)


def states_of(metadata: CheckpointMetadata) -> tuple[StateSummary, ...]:
    """The optimizer states, by key and kind; then scalars, and states that cannot be resharded."""
    found = sorted(_summaries(_rows(metadata)), key=lambda state: (state.kind == SCALAR, state.key, state.kind))
    for kind, states in (("damaged", metadata.states.damaged), ("opaque", metadata.states.opaque)):
        found += [StateSummary(key, kind, why=why) for key, why in sorted(states.items())]
    found += [StateSummary(key, "fresh", why='"states" says so') for key in sorted(metadata.states.fresh)]
    return tuple(found)


def _rows(metadata: CheckpointMetadata) -> Iterator[_Row]:
    state_keys = set(metadata.state_keys)
    for (name, key), tensor in metadata.tensors.items():
        if key in state_keys:
            saved = metadata.parameters.get(name)
            kind = _kind_of(tensor, () if saved is None else saved.shape)
            yield kind, (1, _numel(tensor), stored_nbytes(tensor)), None
    replicated: dict[_Kind, tuple[int, int, int]] = {}
    for saved in metadata.parameters.values():
        for state in saved.replicated:  # one for all parameters of a partition
            kind = (state.key, "replicated", state.dtype, 1, 0)
            numel = math.prod(state.shape)
            replicated[kind] = replicated.get(kind, (0,))[0] + 1, numel, numel * ITEMSIZE.get(state.dtype, 0)
        for key, value in saved.scalars:
            yield (key, SCALAR, _form(value), 1, 0), (1, 0, 0), value
    yield from ((kind, counts, None) for kind, counts in replicated.items())


def _form(value: Any) -> str:
    """How a scalar state was saved."""
    if isinstance(value, PerRank):
        return ", ".join(sorted({_form(each) for each in value.values}))
    return value.dtype if isinstance(value, TensorValue) else type(value).__name__


def _kind_of(tensor: TensorMetadata, shape: Shape) -> _Kind:
    if tensor.is_whole:
        return tensor.key, "whole", tensor.dtype, 1, 0
    rows = tensor.shape[0] if len(tensor.shape) == len(shape) + 1 and tensor.shape[1:] == shape else 1
    kind, block_numel = ("elementwise", 0) if tensor.blocks is None else ("blocks", tensor.blocks.numel)
    return tensor.key, kind, tensor.dtype, rows, block_numel


def _summaries(rows: Iterable[_Row]) -> Iterator[StateSummary]:
    by_kind: dict[_Kind, list[_Row]] = defaultdict(list)
    for row in rows:
        by_kind[row[0]].append(row)
    for (key, name, dtype, row_count, block_numel), mine in by_kind.items():
        parameters, numel, nbytes = map(sum, zip(*(counts for _, counts, _ in mine), strict=True))
        values = [number for _, _, value in mine for number in numbers(value)]
        ends = tuple(dict.fromkeys((min(values), max(values)))) if values else ()
        yield StateSummary(key, name, dtype, parameters, row_count, block_numel, numel, nbytes, ends)


def groups_of(metadata: CheckpointMetadata) -> tuple[GroupSummary, ...]:
    """The param groups, in saved order."""
    members, numels = Counter[int](), Counter[int]()
    for saved in metadata.parameters.values():
        members[saved.group] += 1
        numels[saved.group] += sum(map(math.prod, saved.shards or (saved.shape,)))
    return tuple(GroupSummary(n, members[n], numels[n], values) for n, values in enumerate(metadata.groups))


def unnamed_states(parts: Mapping[int, UnpartitionedState], tp: int | None) -> tuple[StateSummary, ...]:
    """States of numbered parameters without names, by model-parallel rank; ``tp``: consecutive ranks share these."""
    rows: list[_Row] = []
    for mp, part in parts.items():
        count = int(mp % (tp or 1) == 0)
        for states in part.states.values():
            for key, ref in states.tensors.items():
                sizes = (count, ref.numel, ref.numel * ITEMSIZE[ref.dtype])
                rows.append(((key, "unnamed", ref.dtype, 1, 0), sizes, None))
            for key, value in states.scalars:
                rows.append(((key, "unnamed", _form(value), 1, 0), (count, 0, 0), value))
    return tuple(sorted(_summaries(rows), key=lambda state: (state.key, state.dtype)))


def unnamed_groups(parts: Mapping[int, UnpartitionedState], tp: int | None) -> tuple[GroupSummary, ...]:
    """Param groups of numbered members; arguments as for :func:`unnamed_states`."""
    members = Counter[int]()
    hyperparameters: dict[int, Mapping[str, Any]] = {}
    for mp, part in parts.items():
        for number, (inside, values) in enumerate(zip(part.members, part.groups, strict=True)):
            members[number] += len(inside) * (mp % (tp or 1) == 0)
            hyperparameters.setdefault(number, values)
    return tuple(GroupSummary(number, members[number], None, hyperparameters[number]) for number in sorted(members))


def parameters_of(
    metadata: CheckpointMetadata, book: ShardingRules, weights_only: bool
) -> tuple[list[ParameterEntry], dict[str, str]]:
    """Every parameter and buffer, in the checkpoint's order; and name -> why its shards contradict its rule."""
    keys: dict[str, list[str]] = {name: [] for name in metadata.parameters}
    for name, key in metadata.tensors:
        keys.setdefault(name, []).append(key)
    tied: dict[str, list[str]] = defaultdict(list)
    for name, holder in metadata.aliases.items():
        tied[holder].append(name)
    specs, entries = ShardSpecs(metadata, book), []
    contradictions: dict[str, str] = {}
    for name, mine in keys.items():
        saved, own = metadata.parameters.get(name), tensor_of(metadata, name)
        kept = BUFFER_ROLE if BUFFER in mine else WEIGHT if weights_only else FROZEN_ROLE
        stored = [metadata.tensors[name, key] for key in mine]
        stored += [replica for key in mine for replica in metadata.replicas.get((name, key), ())]
        states = sorted(set(mine) - WEIGHTS)
        shards: tuple[Shape, ...] = () if own is None else own.shard_shapes
        if saved is not None:
            states += [state.key for state in saved.replicated] + [key for key, _ in saved.scalars]
            shards = shards or saved.shards or (saved.shape,)
        shape, rule, origin = (shards[0] if len(shards) == 1 else None), "", ""
        if own is not None:
            try:
                shape, rule, origin = _layout(specs, own)
            except CannotSplit as error:
                if len(shards) > 1:
                    rule, contradictions[name] = _CONTRADICTED, str(error)
        entry = ParameterEntry(
            name=name,
            role=kept if saved is None else TRAINED,
            shape=shape,
            shards=shards,
            dtype="" if own is None else own.dtype,
            group=None if saved is None else saved.group,
            states=tuple(states),
            numel=sum(map(math.prod, shards)),
            nbytes=sum(map(stored_nbytes, stored)),
            tied=tuple(tied[name]),
            copies=1 + (0 if own is None else len(metadata.replicas.get((name, own.key), ()))),
            rule=rule,
            rule_from=origin,
        )
        entries.append(entry)
    return entries, contradictions


def _layout(specs: ShardSpecs, tensor: TensorMetadata) -> tuple[Shape | None, str, str]:
    """Logical shape (``None`` if unknown), layout in words, and its origin."""
    shards = tensor.shard_shapes
    spec = ShardSpec(specs, tensor, None).resolve()
    chosen = spec.chosen
    if len(shards) == 1:  # the rule for other degrees
        return (shards[0], _in_words(chosen.rule), chosen.origin) if chosen is not None else (shards[0], "", "")
    split, _, is_recorded = spec.layouts()
    if split is not None and is_recorded:
        rule = "replicated" if split.is_whole else f"cut along dimension {split.dim}"
        return split.shape, rule, "the checkpoint's recorded map"
    if split is not None and chosen is not None:
        return split.shape, _in_words(chosen.rule), chosen.origin
    if (tensor.key == BUFFER or len(shards[0]) < 2) and len(set(shards)) == 1:
        return shards[0], "replicated", "a guess: nothing says so"
    return None, _UNDECIDED, ""


def _in_words(rule: Rule) -> str:
    if rule.kind in WHOLE_KINDS:
        return rule.kind
    parts = rule.sub_parameters
    if parts is None:
        several = ""
    elif isinstance(parts, str):
        several = " of q, k, v"
    else:
        several = f" of parts {':'.join(map(str, parts[:8]))}" + (f":... ({len(parts)})" if len(parts) > 8 else "")
    return f"{rule.kind}, dimension {rule.cut_dim}{several}"


def rule_facts(
    metadata: CheckpointMetadata,
    parameters: Sequence[ParameterEntry],
    contradictions: Mapping[str, str],
    book: ShardingRules,
    presets: Iterable[Preset],
) -> RuleFacts:
    """Facts on all shards, from the results of :func:`parameters_of`; ``presets``: candidates for undecided ones."""
    declared = metadata.declared
    uses: dict[tuple[str, str], list[str]] = {}
    for entry in parameters:
        if entry.rule not in ("", _UNDECIDED, _CONTRADICTED):
            uses.setdefault((entry.rule, entry.rule_from), []).append(entry.name)
    undecided = tuple(entry.name for entry in parameters if entry.rule == _UNDECIDED)
    by_pattern = {rule.pattern: rule for rule in declared.rules}
    return RuleFacts(
        patterns=Counter("fused" if rule.sub_parameters else rule.kind for rule in by_pattern.values()),
        recorded=len({*declared.affine, *declared.widths}),
        vocabulary_rows=declared.vocabulary,
        unreadable=declared.unreadable,
        user_rules=len(book.rules),
        preset=None if book.preset is None else book.preset.name,
        uses=tuple({"rule": rule, "origin": by, "parameters": names} for (rule, by), names in sorted(uses.items())),
        undecided=undecided,
        contradictions=contradictions,
        fitting_presets=_fitting(metadata, undecided, presets),
    )


def _fitting(metadata: CheckpointMetadata, names: Sequence[str], presets: Iterable[Preset]) -> dict[str, int]:
    """The presets with unambiguous rules for the most of these parameters -> their number."""
    counts = {}
    for preset in presets:
        first = [next((rule for rule in preset.rules if rule.applies(name, metadata.run)), None) for name in names]
        counts[preset.name] = sum(rule is not None and rule.kind != AMBIGUOUS for rule in first)
    most = max(counts.values(), default=0)
    return {name: count for name, count in counts.items() if count == most > 0}


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
    experts = () if peeked is None else peeked.experts
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
        ep=metadata.source.ep if metadata and experts else None,
        experts=experts,
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
    if source.format in WHOLE_FORMATS:
        return None, None, None, None
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
