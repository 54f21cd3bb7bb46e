"""Reads the replicas of tensor-parallel ranks and pipeline stages, and compares their values; imports torch."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.fqn import rename_saved
from elastic_ckpt.core.metadata import WEIGHTS, CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, listed
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import find_drift, united, without_untrained
from elastic_ckpt.sharding.rules import Preset
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding
from elastic_ckpt.tools.logical import LogicalReader


def check_copies(metadata: CheckpointMetadata, config: ElasticConfig, threads: int) -> Iterator[Finding]:
    """Findings on replicas that differ, by the names that ``"rename"`` gives them.

    Without a live model, only rules determine which tensors are replicated over tensor-parallel ranks; those without
    one get a note. Raises :class:`MismatchError` if ``"rename"`` gives two tensors one name.
    """
    errors: dict[str, ElasticCkptError] = {}
    reader = LogicalReader(rename_saved(metadata, config.rename), config, errors=errors)
    metadata, unknown = reader.metadata, set(errors)
    drifts = find_drift(metadata.files, reader.replica_checks, ReadOptions(threads=threads, progress=False))
    of_stages = {each.check.name for each in drifts if each.check.is_of_stages}
    synchronized = {_module(name) for name, _ in metadata.replicas if name not in of_stages}
    for drift in united(without_untrained(drifts, reader.of_first_stage)[0]):
        name, key = drift.check.name, drift.check.key
        if name in reader.resharding.guessed and (name, key) not in metadata.replicas:
            unknown.add(name)
            continue
        what = "" if key in WEIGHTS else f" of {key}"
        text = f"{drift.copies} copies{what}, which should be equal, are {drift.apart}"
        is_expected = name in reader.resharding.averaged
        if name in of_stages and _module(name) in synchronized:
            is_expected, text = True, f"{text}: DeepSpeed synchronizes only the tied weights of a tied module"
        yield Finding(NOTE if is_expected else ERROR, "drift", text, name, metadata.source.folder)
    if unknown:
        yield Finding(
            NOTE,
            "not-checked",
            "whether these differ between tensor-parallel ranks, since no rule says which are copies: "
            f"{listed(unknown)}; name the code base with --tp-preset ({', '.join(Preset.names())}), or give "
            '"tp_rules" with --config',
            file=metadata.source.folder,
        )


def _module(name: str) -> str:
    """The tied module of a parameter: ``tied_modules.embed``."""
    return ".".join(name.split(".")[:2])
