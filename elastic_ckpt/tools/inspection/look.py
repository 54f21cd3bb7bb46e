"""From a folder to its inspection: the files are read here, the rest is pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER
from elastic_ckpt.errors import DamagedError, ElasticCkptError, NotFoundError
from elastic_ckpt.formats.base import Checkpoint, Found
from elastic_ckpt.formats.detect import list_tags, look_at
from elastic_ckpt.formats.peek import Peeked, peek
from elastic_ckpt.sharding.book import RuleBook
from elastic_ckpt.sharding.presets import Preset
from elastic_ckpt.tools.findings import NOTE, Finding, of_error
from elastic_ckpt.tools.inspection import contents, findings
from elastic_ckpt.tools.inspection.facts import Inspection, RuleFacts, Totals
from elastic_ckpt.tools.inspection.files import Listing, entries_of, list_folder, missing_files
from elastic_ckpt.tools.inspection.layouts import Layout, layouts_of, rule_facts
from elastic_ckpt.tools.inspection.saved_run import saved_run
from elastic_ckpt.tools.opened import locate, open_checkpoint


@dataclass(frozen=True)
class Read:
    """What reading the metadata came to.

    Attributes:
        checkpoint: the metadata; ``None``: it does not fit together.
        refusal: why not.
        unnamed: why optimizer states could not be named, so that these are the weights alone.
        misled: why another tag than the one in ``latest`` was taken.
    """

    checkpoint: Checkpoint | None
    refusal: ElasticCkptError | None = None
    unnamed: ElasticCkptError | None = None
    misled: ElasticCkptError | None = None


def inspect_folder(folder: str, tag: str | None, config: ElasticConfig) -> Inspection:
    """Inspect a checkpoint.

    Of tensors, no more is read than a load reads to see whether its shards belong together.

    Args:
        folder: with a ``latest`` file, or of one tag.
        tag: which checkpoint of the folder; ``None``: the latest.
        config: options as of a load.

    Raises:
        NotFoundError: there is no checkpoint at all, or not the tag that was asked for.
        ConfigError: there is no such preset.
    """
    book = RuleBook.of(config)
    found, misled = _found(folder, tag, config)
    peeked = peek(found, config.trust_pickle)
    presets = [Preset.load(name) for name in Preset.names()]
    return inspect_checkpoint(found, list_folder(found), peeked, _read(found, config, peeked, misled), book, presets)


def _found(folder: str, tag: str | None, config: ElasticConfig) -> tuple[Found, ElasticCkptError | None]:
    """The checkpoint; where ``latest`` leads nowhere, the newest one, and the error."""
    try:
        return locate(folder, tag, trust_pickle=config.trust_pickle), None
    except (NotFoundError, DamagedError) as error:
        tags = list_tags(folder) if tag is None else []
        found = look_at(folder, tags[0]) if tags else None
        if found is None:
            raise
        return found, error


def _read(found: Found, config: ElasticConfig, peeked: Peeked | None, misled: ElasticCkptError | None) -> Read:
    try:
        return Read(open_checkpoint(found, config).checkpoint, misled=misled)
    except ElasticCkptError as error:
        if peeked is None or not peeked.unnamed:
            return Read(None, refusal=error, misled=misled)
        refusal = error
    try:  # without ZeRO, states are numbered; weights can be read without knowing whose they are
        return Read(open_checkpoint(found, config, with_states=False).checkpoint, unnamed=refusal, misled=misled)
    except ElasticCkptError:
        return Read(None, refusal=refusal, misled=misled)


def inspect_checkpoint(
    found: Found, listing: Listing, peeked: Peeked | None, read: Read, book: RuleBook, presets: Iterable[Preset] = ()
) -> Inspection:
    """Everything that was read, as facts. Pure.

    Args:
        found: the folder.
        listing: names and sizes of its files, and what lies beside it.
        peeked: what one model-states file says by itself.
        read: the metadata of all files together.
        book: the user's rules and preset.
        presets: those that might know what nothing else does.
    """
    metadata = None if read.checkpoint is None else read.checkpoint.metadata
    run = saved_run(found, peeked, read.checkpoint)
    missing = missing_files(found, listing, peeked, None if read.refusal is None else read.refusal.file)
    layouts = {} if metadata is None else layouts_of(metadata, book)
    rules = RuleFacts() if metadata is None else rule_facts(metadata, layouts, book, presets)
    weights_only = read.unnamed is not None
    unnamed = peeked.unnamed if peeked is not None and (weights_only or metadata is None) else {}
    blank = Totals()
    return Inspection(
        format=found.format,
        folder=found.folder,
        tag=found.tag,
        readable=metadata is not None,
        weights_only=weights_only,
        run=run,
        masters=blank if metadata is None else contents.totals(metadata, MASTER),
        frozen=blank if metadata is None or weights_only else contents.totals(metadata, FROZEN),
        buffers=blank if metadata is None else contents.totals(metadata, BUFFER),
        weights=contents.totals(metadata, FROZEN) if metadata is not None and weights_only else blank,
        states=contents.unnamed_states(unnamed, run.tp)
        if unnamed
        else contents.states_of(metadata)
        if metadata
        else (),
        groups=contents.unnamed_groups(unnamed, run.tp)
        if unnamed
        else contents.groups_of(metadata)
        if metadata
        else (),
        rules=rules,
        parameters=() if metadata is None else contents.parameters_of(metadata, layouts, weights_only),
        aliases={} if metadata is None else metadata.aliases,
        files=entries_of(listing, run.tp, metadata),
        missing=missing,
        tags=listing.tags,
        latest=listing.latest,
        findings=findings.by_gravity(_findings(found, listing, peeked, read, missing, layouts, rules)),
    )


def _findings(
    found: Found,
    listing: Listing,
    peeked: Peeked | None,
    read: Read,
    missing: tuple[str, ...],
    layouts: dict[str, Layout],
    rules: RuleFacts,
) -> Iterator[Finding]:
    if read.misled is not None:
        yield replace(of_error(read.misled, kind="latest"), text=f"{read.misled.problem}; this is the newest one")
    if read.refusal is not None:
        is_missing = read.refusal.file in {found.path(name) for name in missing}
        yield of_error(read.refusal, "missing_file" if is_missing else "refused")
        missing = missing if len(missing) > 1 or not is_missing else ()  # one is named already
    if read.unnamed is not None:
        yield findings.unnamed(read.unnamed)
    yield from findings.in_folder(found, listing, missing, misled=read.misled is not None)
    yield from findings.of_run(found, peeked)
    if read.checkpoint is None:
        yield from (Finding(NOTE, "reader", note) for note in found.notes)
        return
    yield from findings.in_catalog(read.checkpoint.metadata)
    yield from findings.of_copies(read.checkpoint.metadata, layouts)
    yield from findings.of_rules(rules)
