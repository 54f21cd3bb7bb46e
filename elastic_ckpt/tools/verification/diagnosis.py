"""What is wrong with files that the reader refuses: all of it, where the reader stops at the first.

Every file is opened for itself, those of one kind are compared with each other, and what a shard check has against one
file is asked of every other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, MismatchError, UnsupportedError
from elastic_ckpt.formats import Found, model_states, shards
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER
from elastic_ckpt.formats.native import index_native
from elastic_ckpt.formats.pickled import PickledFile, open_pickled
from elastic_ckpt.formats.same_save import spot_check
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.universal_files import index_optimizer, index_state
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, of_error, one_line
from elastic_ckpt.tools.opened import open_checkpoint
from elastic_ckpt.tools.verification.findings import DAMAGED, FOREIGN, MISSING, UNCHECKED, UNREADABLE, kind_of
from elastic_ckpt.tools.verification.folder import checkpoint_files, missing_files

T = TypeVar("T")
#: What the files hold that open, by its class and by model-parallel rank.
Items = dict[tuple[type, int], list[Any]]
#: The metadata, if there is any, and what is wrong.
Diagnosis = tuple[CheckpointMetadata | None, list[Finding]]
#: How many files are tried as the one that the others are compared with.
_MOST_REFERENCES = 8
_MODEL_PARALLEL = re.compile(r"mp_rank_(\d+)")


def read_metadata(found: Found, config: ElasticConfig) -> Diagnosis:
    """Read a checkpoint's metadata as a load would; where that fails, find out all that is wrong."""
    try:
        return open_checkpoint(found, config).checkpoint.metadata, []
    except ElasticCkptError as error:
        return _diagnose(found, config, error)


def _diagnose(found: Found, config: ElasticConfig, error: ElasticCkptError) -> Diagnosis:
    items, findings = _open_all(found, config)
    models = list(chain(*_of(ModelShard, items)))
    findings += _missing(found, models)
    foreign, complaints = _foreign(items)
    findings += foreign
    wrong = [finding for finding in findings if finding.level == ERROR]
    if isinstance(error, UnsupportedError):
        return None, [*findings, of_error(error, UNCHECKED, NOTE)]
    if error.file in {finding.file for finding in wrong} or _complaint(error) in complaints:
        return None, [*findings, Finding(NOTE, UNCHECKED, "the tensors, since not all files can be read together")]
    if wrong or not config.check_shards:
        return _refused(found, wrong, error)
    return _without_shard_checks(found, config, error, models)


def _refused(found: Found, findings: list[Finding], error: ElasticCkptError) -> Diagnosis:
    """Without ZeRO, only a live model may know which state is which: that is no damage."""
    if not findings and isinstance(error, MismatchError) and not found.files.is_universal:
        return None, [of_error(error, UNCHECKED, NOTE)]
    note = Finding(NOTE, UNCHECKED, "the tensors, since the files do not fit together")
    return None, [*findings, of_error(error, kind_of(error)), note]


def _open_all(found: Found, config: ElasticConfig) -> tuple[Items, list[Finding]]:
    """What each file that opens holds; what is wrong with the others."""
    items: Items = {}
    findings: list[Finding] = []
    for path in checkpoint_files(found):
        name = os.path.basename(path)
        try:
            file = open_pickled(path, config.trust_pickle)
            item = None if name in found.files.experts else _index(file, path, config)
        except ElasticCkptError as error:
            kind = UNREADABLE if kind_of(error) == DAMAGED else kind_of(error)
            findings.append(of_error(error, kind, NOTE if kind == UNCHECKED else ERROR))
        except Exception as error:  # what a file holds may be of any form
            text = f"not of the form that DeepSpeed writes: {type(error).__name__}: {error}"
            findings.append(Finding(ERROR, UNREADABLE, one_line(text), file=path))
        else:
            match = _MODEL_PARALLEL.search(name)
            items.setdefault((type(item), int(match[1]) if match else 0), []).append(item)
    return items, findings


def _of(kind: type[T], items: Items) -> list[list[T]]:
    """Those of a class, by model-parallel rank."""
    return [items[key] for key in sorted((key for key in items if key[0] is kind), key=lambda key: key[1])]


def _index(file: PickledFile, path: str, config: ElasticConfig) -> Any:
    name = os.path.basename(path)
    if os.path.basename(os.path.dirname(os.path.dirname(path))) == UNIVERSAL_FOLDER:
        return index_state(file)
    if name == UNIVERSAL_OPTIMIZER:
        return index_optimizer(file)
    dp_rank = int(match[1]) if (match := re.search(r"zero_pp_rank_(\d+)", name)) else 0
    what = "layer" if name.startswith("layer_") else "model" if name.endswith("model_states.pt") else "optimizer"
    return index_native(file, (0, dp_rank, what), state_options(config))


def _missing(found: Found, models: Sequence[ModelShard]) -> list[Finding]:
    dp, ranks = None, None
    if models:
        most = _majority([_number(model.counters["dp_world_size"]) for model in models])
        degrees = _majority([model.stated for model in models]).borne_out(len(found.files.mp_ranks))
        dp, ranks = None if found.files.is_universal else most, degrees.model_parallel or None
    text = "no such file; restore it, or take another tag"
    return [Finding(ERROR, MISSING, text, file=found.path(name)) for name in missing_files(found.files, dp, ranks)]


def _number(claim: Any) -> int:
    """A number that a file claims; 0 where it is none."""
    return claim if isinstance(claim, int) else 0


def _majority(items: Sequence[T]) -> T:
    return max(items, key=items.count)


def _foreign(items: Items) -> tuple[list[Finding], set[tuple[str | None, ...]]]:
    """Files that are not of the save that most of their kind are of; and what any comparison complained about.

    The reader takes the first file of a kind for the right one; if that is the foreign one, it complains about another.
    """
    findings: list[Finding] = []
    complaints: set[tuple[str | None, ...]] = set()
    for kind, check, likeliest in _kinds(items):
        fewest: list[ElasticCkptError] | None = None
        for reference in (*likeliest[:_MOST_REFERENCES], *kind[:1]):
            if fewest is not None and 2 * len(fewest) < len(kind) and reference is not kind[0]:
                continue
            errors = _against(reference, kind, check)
            complaints |= {_complaint(error) for error in errors}
            if fewest is None or len(errors) < len(fewest):
                fewest = errors
        findings += [of_error(error, FOREIGN) for error in fewest or []]
    return findings, complaints


def _kinds(items: Items) -> Iterator[tuple[list[Any], Callable[[list[Any]], None], list[Any]]]:
    """Files that must be of one save, in the reader's order; what raises where two are not; the likeliest first."""
    models = _of(ModelShard, items)
    for of_rank in models:
        yield of_rank, model_states.check_same_save, of_rank
    firsts = [of_rank[0] for of_rank in models]
    yield firsts, lambda pair: model_states.check_same_save(pair, one_rank=False), firsts
    counters = [model.counters for model in chain(*models)]
    counted = [_number(one["global_steps"]) - _number(one["skipped_steps"]) for one in counters]
    for optimizers in _of(OptimizerShard, items):
        steps = {_majority(counted)} if counted else set()
        yield optimizers, shards.check_same_save, sorted(optimizers, key=lambda one: not steps <= _steps_of(one))


def _against(reference: Any, items: Sequence[Any], check: Callable[[list[Any]], None]) -> list[ElasticCkptError]:
    errors = []
    for item in items:
        if item is not reference:
            try:
                check([reference, item])
            except ElasticCkptError as error:
                errors.append(error)
    return errors


def _complaint(error: ElasticCkptError) -> tuple[str | None, ...]:
    """An error without the rank that raised it."""
    return error.problem, error.file, error.expected, error.found


def _steps_of(shard: OptimizerShard) -> set[float]:
    steps = {value for flat in shard.flats for key, value in flat.states.scalars if key == "step"}
    grouped: Iterable[Mapping[str, Any]] = shard.groups
    return steps | {group["step"] for group in grouped if isinstance(group.get("step"), int | float)}


def _without_shard_checks(
    found: Found, config: ElasticConfig, error: ElasticCkptError, models: Sequence[ModelShard]
) -> Diagnosis:
    """The files fit together but for their values: go on without comparing these, and compare those of every file."""
    relaxed = config.model_copy(update={"check_shards": False})
    try:
        metadata = open_checkpoint(found, relaxed).checkpoint.metadata
    except ElasticCkptError as again:
        return _refused(found, [], again)
    errors = [error]
    if metadata.source.tp * metadata.source.pp * metadata.source.merged_from == 1:
        for number in range(len(metadata.files)):
            for model in models:
                try:
                    spot_check(metadata, model.path, model.weights, {number})
                except ElasticCkptError as other:
                    errors.append(other)
    return metadata, [of_error(one, FOREIGN) for one in errors]
