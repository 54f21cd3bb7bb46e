"""Do replicas of one parameter differ: those of tensor-parallel ranks, and of pipeline stages?

Which tensors are replicated over tensor-parallel ranks only rules say; a load learns it from the live model too. What
no rule covers is noted, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.local_state import LiveLayout, ModelLayout
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.errors import ElasticCkptError, listed
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.compare_replicas import Drift, find_drift, united
from elastic_ckpt.planning.replicas import compare_replicas
from elastic_ckpt.sharding.book import RuleBook
from elastic_ckpt.sharding.offline import decided_layouts
from elastic_ckpt.sharding.presets import Preset
from elastic_ckpt.sharding.resolve import STRICT, Resharding, resolve
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, Level
from elastic_ckpt.tools.verification.findings import DRIFT, UNCHECKED

#: Parameters whose rules and shapes contradict each other are left out one by one, up to so many.
_MOST_CONTRADICTIONS = 64


def check_copies(metadata: CheckpointMetadata, config: ElasticConfig, threads: int) -> Iterator[Finding]:
    """Compare copies, value by value. Reads them.

    Args:
        metadata: what the checkpoint holds.
        config: whose rules and preset count.
        threads: how many read at once.

    Raises:
        ConfigError: there is no such preset.
    """
    if metadata.source.tp == 1 and not metadata.replicas:
        return
    weights = {name for name, key in metadata.tensors if key in (MASTER, FROZEN, BUFFER)}
    resharding, layouts, unknown = _resharding(metadata, sorted(weights), config)
    checks = compare_replicas(metadata, ModelLayout(layouts=layouts), resharding, layouts, with_states=True)
    options = ReadOptions(threads=threads, progress=False)
    for drift in united(find_drift(metadata.files, checks, options)):
        if drift.name in resharding.guessed and (drift.name, drift.key) not in metadata.replicas:
            unknown.add(drift.name)
        else:
            may_differ = drift.name in resharding.averaged
            yield _drifted(drift, metadata.source.folder, NOTE if may_differ else ERROR)
    if unknown:
        yield _no_rule(unknown, metadata.source.folder)


def _resharding(
    metadata: CheckpointMetadata, names: Sequence[str], config: ElasticConfig
) -> tuple[Resharding, Mapping[str, LiveLayout], set[str]]:
    """The layout of each saved parameter, as far as rules say; and the names of which they do not."""
    if metadata.source.tp == 1:
        return Resharding(), {name: LiveLayout(()) for name in names}, set()
    book = RuleBook.of(config)
    layouts, undecided = decided_layouts(metadata, names, 1, book)
    unknown = set(undecided)
    while layouts:
        try:
            return resolve(metadata, ModelLayout(layouts=layouts), layouts, book, STRICT), layouts, unknown
        except ElasticCkptError as error:
            named = error.parameter
            contradictory = {named} if named in layouts and named is not None else set(layouts)
            if len(unknown) > len(undecided) + _MOST_CONTRADICTIONS:
                contradictory = set(layouts)
            unknown |= contradictory
            layouts = {name: layout for name, layout in layouts.items() if name not in contradictory}
    return Resharding(), {}, unknown


def _no_rule(unknown: Iterable[str], folder: str) -> Finding:
    message = (
        "whether the copies of these on tensor-parallel ranks have drifted apart, since no rule says which are copies "
        f"and which are cut: {listed(unknown)}; name the code base with --preset ({', '.join(Preset.names())}), or "
        'give "tp_rules" with --config'
    )
    return Finding(NOTE, UNCHECKED, message, file=folder)


def _drifted(drift: Drift, folder: str, level: Level) -> Finding:
    what = "" if drift.key in (MASTER, BUFFER, FROZEN) else f" of {drift.key}"
    apart = f"at most {drift.largest:.3g} and in the mean {drift.mean:.3g} apart"
    message = f"{drift.copies} copies{what}, which should be equal, are {apart}"
    return Finding(level, DRIFT, message, drift.name, folder)
