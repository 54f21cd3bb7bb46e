"""What the metadata of a checkpoint shows, without a live engine. Files are read here; the rest is pure."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.detect import LATEST, LATEST_UNIVERSAL, list_tags
from elastic_ckpt.formats.naming import plain_name
from elastic_ckpt.formats.peek import peek
from elastic_ckpt.sharding.rules import Preset, ShardingRules
from elastic_ckpt.tools.files import entries_of, expected_files, file_sizes
from elastic_ckpt.tools.inspection import contents
from elastic_ckpt.tools.inspection.facts import ROLES, Evidence, Inspection, ParameterEntry, RuleFacts, Totals
from elastic_ckpt.tools.inspection.findings import findings_of
from elastic_ckpt.tools.opened import locate_despite_latest, open_checkpoint, tag_named_by


def inspect_folder(folder: str, tag: str | None, config: ElasticConfig) -> Inspection:
    """Inspect the latest checkpoint of a folder, its ``tag``, or the one whose folder it is.

    Of tensors, it reads only what a load compares to verify that shards are of one save. Raises
    :class:`NotFoundError` if there is no such checkpoint, :class:`ConfigError` if there is no such preset.
    """
    book = ShardingRules.of(config)
    found, misled = locate_despite_latest(folder, tag, config.trust_pickle)
    base = found.folder
    for _ in os.path.normpath(found.tag).split(os.sep):
        base = os.path.dirname(base)
    named = ((name, tag_named_by(base, name)) for name in (LATEST, LATEST_UNIVERSAL))
    evidence = Evidence(
        found,
        sizes=file_sizes(found),
        tags=tuple(list_tags(base)),
        latest={name: tag for name, tag in named if tag is not None},
        peeked=peek(found, config.trust_pickle),
        misled=misled,
    )
    return inspect_checkpoint(_read(evidence, config), book, map(Preset.load, Preset.names()))


def _read(evidence: Evidence, config: ElasticConfig) -> Evidence:
    try:
        return replace(evidence, checkpoint=open_checkpoint(evidence.found, config).checkpoint)
    except ElasticCkptError as error:
        refusal = error
    if evidence.peeked is None or not (evidence.peeked.unnamed or evidence.peeked.without_states):
        return replace(evidence, refusal=refusal)
    try:  # without ZeRO, states are numbered or not saved, and weights can be read without these
        weights = open_checkpoint(evidence.found, config, with_states=False).checkpoint
        return replace(evidence, checkpoint=weights, unnamed=refusal)
    except ElasticCkptError:
        return replace(evidence, refusal=refusal)


def inspect_checkpoint(evidence: Evidence, book: ShardingRules, presets: Iterable[Preset] = ()) -> Inspection:
    """The inspection of what was read; ``presets``: candidates for undecided layouts. Pure."""
    metadata, weights_only = evidence.metadata, evidence.unnamed is not None
    run, missing = contents.saved_run(evidence), missing_files(evidence)
    parameters: list[ParameterEntry] = []
    rules = RuleFacts()
    if metadata is not None:
        parameters, contradictions = contents.parameters_of(metadata, book, weights_only)
        rules = contents.rule_facts(metadata, parameters, contradictions, book, presets)
    numbered = {} if evidence.peeked is None or (metadata and not weights_only) else evidence.peeked.unnamed
    totals = {key: Totals() if metadata is None else contents.totals(metadata, key) for key in (MASTER, FROZEN, BUFFER)}
    if numbered:
        states, groups = contents.unnamed_states(numbered, run.tp), contents.unnamed_groups(numbered, run.tp)
    else:
        states, groups = ((), ()) if metadata is None else (contents.states_of(metadata), contents.groups_of(metadata))
    return Inspection(
        format=evidence.found.format,
        folder=evidence.found.folder,
        tag=evidence.found.tag,
        readable=metadata is not None,
        weights_only=weights_only,
        run=run,
        masters=totals[MASTER],
        frozen=Totals() if weights_only else totals[FROZEN],
        buffers=totals[BUFFER],
        weights=totals[FROZEN] if weights_only else Totals(),
        states=states,
        groups=groups,
        rules=rules,
        parameters=tuple(sorted(parameters, key=lambda entry: ROLES.index(entry.role))),
        aliases={} if metadata is None else metadata.aliases,
        files=entries_of(evidence.sizes, run.tp, metadata),
        missing=missing,
        tags=evidence.tags,
        latest=evidence.latest,
        findings=findings_of(evidence, missing, parameters, rules),
    )


def missing_files(evidence: Evidence) -> tuple[str, ...]:
    """Missing files, inferred from the names of the others and from a model-states file."""
    found, peeked = evidence.found, evidence.peeked
    dp = 0 if peeked is None else peeked.training_state.counters.get("dp_world_size")
    ranks = 0 if peeked is None else peeked.degrees.model_parallel
    experts = () if peeked is None else peeked.experts
    expected = list(expected_files(found, dp if isinstance(dp, int) else 0, ranks, experts, peeked))
    named = None if evidence.refusal is None else evidence.refusal.file
    if named is not None and os.path.dirname(named) == found.folder and "*" not in named:
        expected += [os.path.basename(named)] if not os.path.lexists(named) else []
    present = set(map(plain_name, evidence.sizes))
    return tuple(name for name in dict.fromkeys(map(plain_name, expected)) if name not in present)
