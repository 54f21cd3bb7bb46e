"""What is wrong with files that the reader refuses: all of it, where the reader stops at the first.

Every file is opened for itself, those of one kind are compared with each other, and what a shard check has against one
file is asked of every other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsupportedError
from elastic_ckpt.formats import Found, model_states, shards
from elastic_ckpt.formats.layers import index_layer
from elastic_ckpt.formats.legacy import LegacyShard
from elastic_ckpt.formats.model_states import ModelShard, index_model_states
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.spot_check import SavedWeights, spot_check
from elastic_ckpt.formats.universal_files import index_optimizer, index_state
from elastic_ckpt.formats.zero3 import index_zero3
from elastic_ckpt.formats.zero12 import index_zero12
from elastic_ckpt.tools.opened import open_checkpoint
from elastic_ckpt.tools.verification.findings import (
    DAMAGED,
    FOREIGN,
    MISSING,
    UNCHECKED,
    UNREADABLE,
    Finding,
    of_error,
    one_line,
    without_repeats,
)
from elastic_ckpt.tools.verification.folder import checkpoint_files, missing_files

T = TypeVar("T")
#: How many files are tried as the one that the others are compared with.
_MOST_REFERENCES = 8
_MODEL_PARALLEL = re.compile(r"mp_rank_(\d+)")


@dataclass
class Diagnosis:
    """What is wrong, what was not checked, and the metadata, if there is one all the same."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    metadata: CheckpointMetadata | None = None


@dataclass
class _Indexed:
    """What each file says that opens, by model-parallel rank."""

    models: dict[int, list[ModelShard]] = field(default_factory=dict)
    optimizers: dict[int, list[OptimizerShard]] = field(default_factory=dict)

    @property
    def every_model(self) -> list[ModelShard]:
        return [model for _, models in sorted(self.models.items()) for model in models]


def read_metadata(found: Found, config: ElasticConfig) -> Diagnosis:
    """Read a checkpoint's metadata as a load would; where that fails, find out all that is wrong."""
    try:
        return Diagnosis(metadata=open_checkpoint(found, config).checkpoint.metadata)
    except ElasticCkptError as error:
        return _diagnose(found, config, error)


def _diagnose(found: Found, config: ElasticConfig, error: ElasticCkptError) -> Diagnosis:
    indexed, opened = _open_all(found, config)
    findings = [finding for finding in opened if finding.code != UNCHECKED]
    unsupported = [finding for finding in opened if finding.code == UNCHECKED]
    findings += _missing(found, indexed)
    odd = _foreign(indexed)
    findings += odd.findings
    named = {finding.file for finding in findings}
    if isinstance(error, UnsupportedError):
        return Diagnosis(findings, [*unsupported, of_error(error, UNCHECKED)])
    if error.file in named or _complaint(error) in odd.complaints:
        note = Finding(UNCHECKED, "the tensors, since not all files can be read together")
        return Diagnosis(findings, [*unsupported, note])
    if not findings and config.check_shards:
        return _without_shard_checks(found, config, error, indexed)
    return _refused(found, findings, error)


def _refused(found: Found, findings: list[Finding], error: ElasticCkptError) -> Diagnosis:
    """Without ZeRO, a live model may be needed to tell which state is which: that is no damage."""
    if not findings and isinstance(error, MismatchError) and not found.files.is_universal:
        return Diagnosis([], [of_error(error, UNCHECKED)])
    note = Finding(UNCHECKED, "the tensors, since the files do not fit together")
    return Diagnosis([*findings, of_error(error)], [note])


def _open_all(found: Found, config: ElasticConfig) -> tuple[_Indexed, list[Finding]]:
    indexed, findings = _Indexed(), []
    for path in checkpoint_files(found):
        try:
            file = open_pickled(path, config.trust_pickle)
            item = None if os.path.basename(path) in found.files.experts else _index(file, path, config)
        except ElasticCkptError as error:
            finding = of_error(error)
            findings.append(Finding(UNREADABLE, *_rest(finding)) if finding.code == DAMAGED else finding)
        except Exception as error:  # what a file says may be of any form
            message = f"not of the form that DeepSpeed writes: {type(error).__name__}: {error}"
            findings.append(Finding(UNREADABLE, one_line(message), path))
        else:
            match = _MODEL_PARALLEL.search(os.path.basename(path))
            rank = int(match[1]) if match else 0
            if isinstance(item, ModelShard):
                indexed.models.setdefault(rank, []).append(item)
            elif isinstance(item, OptimizerShard):
                indexed.optimizers.setdefault(rank, []).append(item)
    return indexed, findings


def _rest(finding: Finding) -> tuple[str, str | None, str | None]:
    return finding.message, finding.file, finding.parameter


def _index(file: PickledFile, path: str, config: ElasticConfig) -> Any:
    name = os.path.basename(path)
    options = state_options(config)
    if os.path.basename(os.path.dirname(os.path.dirname(path))) == UNIVERSAL_FOLDER:
        return index_state(file)
    if name == UNIVERSAL_OPTIMIZER:
        return index_optimizer(file)
    if name.startswith("layer_"):
        return index_layer(file, 0, 0)
    dp_rank = int(match[1]) if (match := re.search(r"zero_pp_rank_(\d+)", name)) else 0
    if name.endswith("model_states.pt"):
        return index_model_states(file, dp_rank, options)
    is_zero3 = "fp32_flat_groups" in file.section("optimizer_state_dict")
    shard: OptimizerShard | LegacyShard = (index_zero3 if is_zero3 else index_zero12)(file, dp_rank, options)
    return shard


def _missing(found: Found, indexed: _Indexed) -> list[Finding]:
    models = indexed.every_model
    if not models:
        return _named(found, missing_files(found.files, None, None))
    most = _majority([_number(model.counters["dp_world_size"]) for model in models])
    degrees = _majority([model.stated for model in models]).borne_out(len(found.files.mp_ranks))
    ranks = degrees.model_parallel or None
    return _named(found, missing_files(found.files, None if found.files.is_universal else most, ranks))


def _number(claim: Any) -> int:
    """What a file says is a number; 0 where it is none."""
    return claim if isinstance(claim, int) else 0


def _majority(items: Sequence[T]) -> T:
    return max(items, key=items.count)


def _named(found: Found, names: Iterable[str]) -> list[Finding]:
    return [Finding(MISSING, "no such file; restore it, or take another tag", found.path(name)) for name in names]


@dataclass
class _Odd:
    """Files of other saves.

    Attributes:
        findings: those that differ from most of their kind.
        complaints: all that was said in comparing them. The reader takes the first file of a kind for the right one; if
            that is the foreign one, it complains about another.
    """

    findings: list[Finding] = field(default_factory=list)
    complaints: set[tuple[str | None, ...]] = field(default_factory=set)

    def compare(self, items: Sequence[T], check: Callable[[list[T]], None], likeliest: Sequence[T]) -> None:
        """Find the items against which ``check`` has something, beside the one that most agree with.

        Args:
            items: all of a kind, in the reader's order.
            check: raises where the second of two is not of the save of the first.
            likeliest: the same, those first that are most likely right.
        """
        fewest: list[ElasticCkptError] | None = None
        for reference in (*likeliest[:_MOST_REFERENCES], *items[:1]):
            if fewest is not None and 2 * len(fewest) < len(items) and reference is not items[0]:
                continue
            errors = _against(reference, items, check)
            self.complaints |= {_complaint(error) for error in errors}
            if fewest is None or len(errors) < len(fewest):
                fewest = errors
        self.findings += [of_error(error, FOREIGN) for error in fewest or []]


def _complaint(error: ElasticCkptError) -> tuple[str | None, ...]:
    """An error without the rank that raised it."""
    return error.problem, error.file, error.expected, error.found


def _foreign(indexed: _Indexed) -> _Odd:
    """Files that are not of the save that most of their kind are of."""
    odd = _Odd()
    steps = _steps(indexed.every_model)
    for models in indexed.models.values():
        odd.compare(models, model_states.check_same_save, models)
    firsts = [models[0] for models in indexed.models.values()]
    odd.compare(firsts, lambda pair: model_states.check_same_save(pair, one_rank=False), firsts)
    for optimizers in indexed.optimizers.values():
        likeliest = sorted(optimizers, key=lambda shard: steps is None or steps not in _steps_of(shard))
        odd.compare(optimizers, shards.check_same_save, likeliest)
    return odd


def _against(reference: T, items: Sequence[T], check: Callable[[list[T]], None]) -> list[ElasticCkptError]:
    errors = []
    for item in items:
        if item is not reference:
            try:
                check([reference, item])
            except ElasticCkptError as error:
                errors.append(error)
    return errors


def _steps(models: Sequence[ModelShard]) -> int | None:
    counted = [_number(model.counters["global_steps"]) - _number(model.counters["skipped_steps"]) for model in models]
    return _majority(counted) if counted else None


def _steps_of(shard: OptimizerShard) -> set[float]:
    steps = {value for flat in shard.flats for key, value in flat.states.scalars if key == "step"}
    grouped: Iterable[Mapping[str, Any]] = shard.groups
    return steps | {group["step"] for group in grouped if isinstance(group.get("step"), int | float)}


def _without_shard_checks(found: Found, config: ElasticConfig, error: ElasticCkptError, indexed: _Indexed) -> Diagnosis:
    """The files fit together but for their values: go on without these, and ask every file."""
    relaxed = config.model_copy(update={"check_shards": False})
    try:
        metadata = open_checkpoint(found, relaxed).checkpoint.metadata
    except ElasticCkptError as again:
        return _refused(found, [], again)
    errors = [error]
    models = [SavedWeights(model.path, model.weights) for model in indexed.every_model]
    if metadata.source.tp * metadata.source.pp * metadata.merged_from == 1:
        for number in range(len(metadata.files)):
            for model in models:
                try:
                    spot_check(metadata, model, {number})
                except ElasticCkptError as other:
                    errors.append(other)
    return Diagnosis(list(without_repeats(of_error(one, FOREIGN) for one in errors)), [], metadata)
