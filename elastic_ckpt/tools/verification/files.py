"""Files that a checkpoint has and should have, and all their problems, where the reader stops at the first.

If the reader refuses a checkpoint, every file is opened alone and compared with those of its kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.values import numbers
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MismatchError, NotFoundError, UnsupportedError, listed
from elastic_ckpt.formats import Found, model_states, shards
from elastic_ckpt.formats.base import refuse_swapped
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL, list_tags, look_below, read_latest
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER, plain_name, sort_names
from elastic_ckpt.formats.native import index_native
from elastic_ckpt.formats.pickled import PickledFile, open_file, refuse_unmade
from elastic_ckpt.formats.same_save import spot_check
from elastic_ckpt.formats.shards import OptimizerShard
from elastic_ckpt.formats.universal_files import index_optimizer, index_state
from elastic_ckpt.storage.local import file_names
from elastic_ckpt.tools.files import WHOLE_FORMATS, expected_files, file_sizes, kind_of_file
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, kind_of, of_error, one_line
from elastic_ckpt.tools.opened import locate_despite_latest, open_checkpoint

T = TypeVar("T")
#: Contents of the files that open, by class and model-parallel rank.
Items = dict[tuple[type, int], list[Any]]
#: The metadata, if readable, and findings.
Diagnosis = tuple[CheckpointMetadata | None, list[Finding]]
#: Number of files tried as the reference for the others.
_MOST_REFERENCES = 8
_MODEL_PARALLEL = re.compile(r"mp_rank_(\d+)")
#: Scripts that DeepSpeed copies into checkpoints.
_SCRIPT = ".py"


def choose(folder: str, tag: str | None, trust_pickle: bool) -> tuple[Found, list[Finding]]:
    """The checkpoint to verify, and findings on the ``latest`` files; errors as of :func:`locate_despite_latest`."""
    path = os.path.abspath(folder)
    found, misled = locate_despite_latest(folder, tag, trust_pickle)
    findings: list[Finding] = []
    for name in (LATEST, LATEST_UNIVERSAL) if found.folder != path else ():
        try:
            named = read_latest(path, name)
        except DamagedError as error:
            findings.append(Finding(ERROR, "latest", f"cannot be read: {error.found}", file=error.file))
            continue
        if named is not None and look_below(path, named) is None:
            text = f"names {named!r}, which is not there; there are {listed(list_tags(path))}"
            findings.append(Finding(ERROR, "latest", text, file=os.path.join(path, name)))
    if misled is not None:
        findings = findings or [of_error(misled, "latest" if isinstance(misled, NotFoundError) else "unreadable")]
        findings.append(Finding(NOTE, "latest", f"verified {found.tag} instead", file=path))
    return found, findings


def checkpoint_files(found: Found) -> list[str]:
    """Paths of all files of a checkpoint but those from NVMe, sorted."""
    return sorted(path for path, kind in _kinds_of(found) if kind not in ("swapped", "other"))


def swap_files(found: Found) -> list[str]:
    """Sorted paths of optimizer states from NVMe: raw bytes without checksums."""
    return sorted(path for path, kind in _kinds_of(found) if kind == "swapped")


def other_files(found: Found) -> list[str]:
    """Names of files in the tag's folder that are not DeepSpeed's."""
    names = (os.path.relpath(path, found.folder) for path, kind in _kinds_of(found) if kind == "other")
    return sorted(name for name in names if os.sep not in name and not name.endswith(_SCRIPT))


def _kinds_of(found: Found) -> Iterator[tuple[str, str]]:
    """Path and kind of each file; what else is among the parameters of a universal checkpoint is another one."""
    for name in file_sizes(found):
        kind = kind_of_file(name)
        if kind in ("parameter", "optimizer") and not (found.files.is_universal and name.endswith(".pt")):
            kind = "other"
        own = {"dcp": ("chunks", "metadata"), "safetensors": ("safetensors",)}.get(found.format, ())
        if (kind in ("chunks", "metadata", "safetensors") or own) and kind not in own:
            kind = "other"
        yield found.path(name), kind


def read_metadata(found: Found, config: ElasticConfig) -> Diagnosis:
    """Read a checkpoint's metadata as a load would; if that fails, find all problems."""
    try:
        return open_checkpoint(found, config, with_unmade=False).checkpoint.metadata, []
    except ElasticCkptError as error:
        if found.format in WHOLE_FORMATS:  # whose files are not compared with each other
            return None, [of_error(error, kind_of(error)), Finding(NOTE, "not-checked", "anything else")]
        return _diagnose(found, config, error)


def _diagnose(found: Found, config: ElasticConfig, error: ElasticCkptError) -> Diagnosis:
    items, findings = _open_all(found, config)
    models = list(chain(*_of(ModelShard, items)))
    findings += _missing(found, config)
    foreign, complaints = _foreign(items)
    findings += foreign
    wrong = [finding for finding in findings if finding.level == ERROR]
    if isinstance(error, UnsupportedError):
        return None, [*findings, of_error(error, "not-checked", NOTE)]
    if error.file in {finding.file for finding in wrong} or _complaint(error) in complaints:
        return None, [*findings, Finding(NOTE, "not-checked", "the tensors, since not all files can be read together")]
    if wrong or config.verify != "load":
        return _refused(found, wrong, error)
    return _without_shard_checks(found, config, error, models)


def _refused(found: Found, findings: list[Finding], error: ElasticCkptError) -> Diagnosis:
    """Without ZeRO, states that only a live model can name are no damage."""
    if not findings and isinstance(error, MismatchError) and not found.files.is_universal:
        return None, [of_error(error, "not-checked", NOTE)]
    note = Finding(NOTE, "not-checked", "the tensors, since the files do not fit together")
    return None, [*findings, of_error(error, kind_of(error)), note]


def _open_all(found: Found, config: ElasticConfig) -> tuple[Items, list[Finding]]:
    """Contents of each file that opens; findings on the others."""
    items: Items = {}
    findings: list[Finding] = []
    for path in checkpoint_files(found):
        name = os.path.basename(path)
        try:
            file = open_file(path, config.trust_pickle)
            refuse_unmade(file)
            refuse_swapped(file)
            item = _index(file, path, config)
        except ElasticCkptError as error:
            kind = "unreadable" if kind_of(error) == "damaged" else kind_of(error)
            findings.append(of_error(error, kind, NOTE if kind == "not-checked" else ERROR))
        except Exception as error:  # contents may be of any form
            text = f"not of the form that DeepSpeed writes: {type(error).__name__}: {error}"
            findings.append(Finding(ERROR, "unreadable", one_line(text), file=path))
        else:
            match = _MODEL_PARALLEL.search(name)
            items.setdefault((type(item), int(match[1]) if match else 0), []).append(item)
    return items, findings


def _of(kind: type[T], items: Items) -> list[list[T]]:
    return [items[key] for key in sorted((key for key in items if key[0] is kind), key=lambda key: key[1])]


def _index(file: PickledFile, path: str, config: ElasticConfig) -> Any:
    name = os.path.basename(path)
    if os.path.basename(os.path.dirname(os.path.dirname(path))) == UNIVERSAL_FOLDER:
        return index_state(file)
    if name == UNIVERSAL_OPTIMIZER:
        return index_optimizer(file)
    of_experts = sort_names([name], is_universal=False)
    if of_experts.experts:
        return index_native(file, (0, 0, "expert"), state_options(config))
    for ep_rank, mp in of_experts.expert_optimizers:
        return index_native(file, (ep_rank, mp, "experts' optimizer"), state_options(config))
    dp_rank = int(match[1]) if (match := re.search(r"zero_pp_rank_(\d+)", name)) else 0
    what = "layer" if name.startswith("layer_") else "model" if "model_states.pt" in name else "optimizer"
    return index_native(file, (0, dp_rank, what), state_options(config))


def _missing(found: Found, config: ElasticConfig) -> list[Finding]:
    text = "no such file; restore it, or take another tag"
    present = set(map(plain_name, file_names(found.folder)))
    names = [name for name in expected_files(found, config.trust_pickle) if name not in present]
    return [Finding(ERROR, "missing", text, file=found.path(name)) for name in names]


def _number(claim: Any) -> int:
    return claim if isinstance(claim, int) else 0


def _majority(items: Sequence[T]) -> T:
    return max(items, key=items.count)


def _foreign(items: Items) -> tuple[list[Finding], set[tuple[str | None, ...]]]:
    """Files of another save than most of their kind, and all complaints.

    The reader compares with the first file of a kind; if that one is foreign, its complaint is about another.
    """
    findings: list[Finding] = []
    complaints: set[tuple[str | None, ...]] = set()
    for kind, check, likeliest in _kinds(items):
        references = (*likeliest[:_MOST_REFERENCES], *kind[:1])
        by_reference = [_against(reference, kind, check) for reference in references]
        complaints |= set(map(_complaint, chain(*by_reference)))
        findings += [of_error(error, "foreign") for error in min(by_reference, key=len, default=())]
    return findings, complaints


def _kinds(items: Items) -> Iterator[tuple[list[Any], Callable[[list[Any]], None], list[Any]]]:
    """Files that must be of one save, in the reader's order; the check that raises; candidates, likeliest first."""
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
        try:
            if item is not reference:
                check([reference, item])
        except ElasticCkptError as error:
            errors.append(error)
    return errors


def _complaint(error: ElasticCkptError) -> tuple[str | None, ...]:
    return error.problem, error.file, error.expected, error.found


def _steps_of(shard: OptimizerShard) -> set[float]:
    steps = {number for flat in shard.flats for number in numbers(dict(flat.states.scalars).get("step"))}
    grouped: Iterable[Mapping[str, Any]] = shard.groups
    return steps | {group["step"] for group in grouped if isinstance(group.get("step"), int | float)}


def _without_shard_checks(
    found: Found, config: ElasticConfig, error: ElasticCkptError, models: Sequence[ModelShard]
) -> Diagnosis:
    """Values alone contradict each other: read without comparing shards, then compare every file's."""
    relaxed = config.model_copy(update={"verify": "bytes"})
    try:
        metadata = open_checkpoint(found, relaxed).checkpoint.metadata
    except ElasticCkptError:
        return _refused(found, [], error)
    errors = [error]
    if metadata.source.tp * metadata.source.pp * metadata.source.merged_from == 1:
        for number in range(len(metadata.files)):
            for model in models:
                try:
                    spot_check(metadata, model.path, model.weights, {number})
                except ElasticCkptError as other:
                    errors.append(other)
    return metadata, [of_error(one, "foreign") for one in errors]
