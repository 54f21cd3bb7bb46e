"""Checks of a checkpoint's logical tensors: coverage, states, and equal replicas."""

from __future__ import annotations

import os
from collections.abc import Iterator

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import ModelLayout
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, listed
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import find_drift, united
from elastic_ckpt.planning.replicas import compare_replicas
from elastic_ckpt.planning.state_matching import keys_by_name
from elastic_ckpt.sharding.book import Preset, RuleBook
from elastic_ckpt.sharding.decide import virtual_layouts
from elastic_ckpt.sharding.resolve import STRICT, resolve
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, of_tensors


def check_metadata(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Findings on coverage and states, from metadata alone."""
    yield from of_tensors(metadata, "incomplete", "unreadable")
    is_universal, folder = metadata.source.format == "universal", metadata.source.folder
    for name in metadata.parameters:
        if (name, MASTER) not in metadata.tensors:
            file = os.path.join(folder, UNIVERSAL_FOLDER) if is_universal else folder
            text = f"no fp32 master of this parameter: no {name}/{MASTER}.pt"
            yield Finding(ERROR, "incomplete", text, name, file)
    yield from _state_findings(metadata)
    for key, why in metadata.states.damaged.items():
        yield Finding(ERROR, "damaged", f"this state lacks the scales that its codes need: {why}", key)
    for key, why in metadata.states.opaque.items():
        text = f"an optimizer state of a layout that is not known, whose values are not looked at: {why}"
        yield Finding(NOTE, "not-checked", text, key)
    for note in dict.fromkeys((*metadata.notes, *metadata.warnings)):
        yield Finding(NOTE, "reader", note)


def _state_findings(metadata: CheckpointMetadata) -> Iterator[Finding]:
    """Members of a param group have the same states; without ZeRO, those without gradients have none."""
    keys = keys_by_name(metadata)
    whole = metadata.source.zero_stage == 0 and metadata.source.format == "native"
    stateless: list[str] = []
    for group in range(len(metadata.groups)):
        members = {name: saved for name, saved in metadata.parameters.items() if saved.group == group}
        states = {
            name: {*keys.get(name, ()), *dict(saved.scalars)}
            for name, saved in members.items()
            if (name, MASTER) in metadata.tensors  # the others are reported above
        }
        every = set().union(*states.values())
        if states and not every and keys:
            yield Finding(NOTE, "state-missing", f"param group {group} has no optimizer states: {listed(states)}")
        for name, present in states.items():
            if whole and every and not present:
                stateless.append(name)
            elif lost := every - present:
                text = f"no {', '.join(sorted(lost))} of this parameter, but of others in its param group"
                yield Finding(ERROR, "state-missing", text, name, metadata.source.folder)
    if stateless:
        text = f"no optimizer states, as of parameters that got no gradient: {listed(stateless)}"
        yield Finding(NOTE, "state-missing", text)


def check_copies(metadata: CheckpointMetadata, config: ElasticConfig, threads: int) -> Iterator[Finding]:
    """Read the replicas of tensor-parallel ranks and pipeline stages, and compare their values.

    Without a live model, only rules determine which tensors are replicated over tensor-parallel ranks; tensors without
    a rule get a note. Raises :class:`ConfigError` if there is no such preset.
    """
    if metadata.source.tp == 1 and not metadata.replicas:
        return
    folder = metadata.source.folder
    weights = sorted({name for name, key in metadata.tensors if key in (MASTER, FROZEN, BUFFER)})
    errors: dict[str, ElasticCkptError] = {}
    book = RuleBook.of(config)
    model = ModelLayout(layouts=virtual_layouts(metadata, weights, 1, book, errors))
    resharding = resolve(metadata, model, model.layouts, book, STRICT, errors)
    unknown = set(errors)
    checks = compare_replicas(metadata, model, resharding, model.layouts.keys() - unknown, with_states=True)
    for drift in united(find_drift(metadata.files, checks, ReadOptions(threads=threads, progress=False))):
        if drift.name in resharding.guessed and (drift.name, drift.key) not in metadata.replicas:
            unknown.add(drift.name)
            continue
        what = "" if drift.key in (MASTER, BUFFER, FROZEN) else f" of {drift.key}"
        apart = f"at most {drift.largest:.3g} and in the mean {drift.mean:.3g} apart"
        message = f"{drift.copies} copies{what}, which should be equal, are {apart}"
        level = NOTE if drift.name in resharding.averaged else ERROR
        yield Finding(level, "drift", message, drift.name, folder)
    if unknown:
        message = (
            "whether the copies of these on tensor-parallel ranks have drifted apart, since no rule says which are "
            f"copies and which are cut: {listed(unknown)}; name the code base with --preset "
            f'({", ".join(Preset.names())}), or give "tp_rules" with --config'
        )
        yield Finding(NOTE, "not-checked", message, file=folder)
