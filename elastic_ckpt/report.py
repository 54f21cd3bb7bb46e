"""The report of a load: one record, its table, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from elastic_ckpt.core.extra_states import EXTRA_STATE
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, SourceFacts
from elastic_ckpt.core.read_plan import NO_SHARE, Outcome, RestoredShare, names_with
from elastic_ckpt.core.text import counted, printable, printable_lines
from elastic_ckpt.core.values import BatchSizes
from elastic_ckpt.errors import shortened

_NAMES_SHOWN = 12
#: Columns where the output is no terminal, as a rule.
_WIDTH = 80
#: Columns there if a word is wider.
_WIDEST = 100_000
#: Facts of the source that its text shows, or that only planning uses.
_NOT_SHOWN = ("frozen_recorded", "buffers_recorded", "merged_from", "by_rank", "foreign", "files")
#: Below this share of the elements that train, little is restored, which is the first that a report says.
_LITTLE = 0.5
#: The role of what :func:`elastic_ckpt.register` gave an engine.
DATA_POSITION = "data position"
#: Display names of roles.
_TITLES = {
    MASTER: "fp32 masters",
    BUFFER: "buffers",
    FROZEN: "frozen parameters",
    EXTRA_STATE: "extra states",
}


def progress_bar(what: str, nbytes: int, show: bool | None, leave: bool = True) -> tqdm[Any]:
    """A progress bar over bytes; ``show`` is ``None``: if standard error is a terminal."""
    disable = None if show is None else not show
    return tqdm(None, printable(what), nbytes, leave, unit="B", unit_scale=True, disable=disable)


class SafeConsole(Console):
    """Prints text of a checkpoint (tags, names, values) with control characters escaped, whoever prints it."""

    def render_str(self, text: str, **options: Any) -> Text:
        """The text that rich lays out: all strings pass through here, those in tables and trees too."""
        return super().render_str(printable_lines(text), **options | {"emoji": False})


def literal(text: Any) -> str:
    """Text of a checkpoint for a place that may have markup: on one line, and shown as it is."""
    return escape(printable(str(text)))


@dataclass(frozen=True)
class ReadStats:
    """What was read."""

    nbytes: int = 0  # with the gaps between merged reads
    calls: int = 0  # reads; with ``"local"`` storage and checksums, ``preadv`` is called for each MiB
    staged_nbytes: int = 0  # bytes that went through staging buffers or other host memory
    blocks: int = 0  # requantized 8-bit blocks
    worst_error: float = 0.0  # of these, as a fraction of the new block's scale

    def __add__(self, other: ReadStats) -> ReadStats:
        nbytes = self.nbytes + other.nbytes
        staged = self.staged_nbytes + other.staged_nbytes
        calls = self.calls + other.calls
        blocks = self.blocks + other.blocks
        return ReadStats(nbytes, calls, staged, blocks, max(self.worst_error, other.worst_error))


@dataclass(frozen=True)
class Requests:
    """What was asked of object stores."""

    count: int = 0
    nbytes: int = 0  # of the answers
    repeated: int = 0  # of these, those that failed and were made again

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.count + other.count, self.nbytes + other.nbytes, self.repeated + other.repeated)


@dataclass(frozen=True)
class RankWork:
    """What one rank did."""

    rank: int
    read: ReadStats
    nbytes_received: int  # of tensors, from other ranks
    files_opened: int  # for metadata
    seconds: dict[str, float]  # wall-clock, by phase
    blocks: int = 0  # 8-bit blocks of the rank's states
    files_read: int = 0  # that tensors were read from
    requests: Requests | None = None  # for listings, metadata and tensors; ``None``: nothing is in an object store


@dataclass(frozen=True)
class Verified:
    """Bytes that all ranks read: those with the saved checksum, and those that could not be compared."""

    nbytes: int
    #: Of files that have none: swap files of NVMe, legacy archives, those that torch was told to save without.
    without_checksum_nbytes: int = 0
    incomplete_nbytes: int = 0  # of records of which only a part was read

    def __str__(self) -> str:
        everything = self.nbytes + self.without_checksum_nbytes + self.incomplete_nbytes
        parts = [f"{100 * self.nbytes / max(everything, 1):.4g} % of {size(everything)}"]
        if self.without_checksum_nbytes:
            parts.append(f"{size(self.without_checksum_nbytes)} have no checksum")
        if self.incomplete_nbytes:
            parts.append(f"{size(self.incomplete_nbytes)} are of records that are not restored whole")
        return ", ".join(parts)


@dataclass(frozen=True)
class LoadReport:
    """What an elastic load restored."""

    source: SourceFacts
    zero_stage: int  # of the live engine
    live: RankCoordinates  # of this rank in the live job
    rank: int  # global rank of this report
    outcomes: tuple[Outcome, ...]  # what is restored, fresh, skipped or ignored
    global_steps: int = 0
    ranks: tuple[RankWork, ...] = ()  # what each rank of the job did, in rank order
    notes: tuple[str, ...] = ()
    storage: str = ""  # where the files are: ``local (ext4)``, ``network (nfs4)``
    #: Of the resume sheet, on rank 0: in words, what of the run that saved goes on, and what is another now.
    goes_on: str = ""
    differs: tuple[str, ...] = ()
    samples_consumed: int | None = None  # by the run that saved; ``None`` if that is not known or of no concern
    #: As many batches of each rank's live loader, in micro-batches, hold what was consumed, and samples of the next
    #: batch of all ranks; unless the registered sampler does it, or the framework.
    batches_to_skip: int | None = None
    samples_to_skip: int | None = None
    batch: BatchSizes | None = None  # of the run that saved
    verified: Verified | None = None  # bytes compared with checksums in the files; ``None`` with ``"verify": "off"``
    share: RestoredShare = NO_SHARE  # of the weights that all ranks hold

    @property
    def initialized(self) -> tuple[str, ...]:
        """Sorted names of the frozen parameters that the checkpoint lacks: they are as the live model has them."""
        return names_with((each for each in self.outcomes if each.role == FROZEN), "fresh")

    @property
    def restores_little(self) -> bool:
        """Whether less than half of the elements that train are restored."""
        share = self.share.of_trained
        return share is not None and share < _LITTLE

    @property
    def heading(self) -> str:
        """The first line, which says so if little is restored."""
        if not self.restores_little:
            return "elastic_ckpt: checkpoint restored"
        share = _percent(self.share.of_trained or 0.0)
        return f"elastic_ckpt: WARNING: only {share} of what trains is restored, the rest is as it was initialized"

    def names(self, what: str) -> tuple[str, ...]:
        """Sorted names of parameters and buffers with one outcome (``"fresh"`` ...)."""
        return names_with(self.outcomes, what)

    @property
    def mine(self) -> RankWork:
        """What this rank did."""
        return self.ranks[self.rank]

    def as_json(self) -> str:
        """The report as JSON text."""
        more = {"source": source_dict(self.source), "initialized": self.initialized}
        return json.dumps(asdict(self) | more, indent=2, default=str)

    def table(self) -> Table:
        """The report as a rich table."""
        source = self.source
        now = topology_text(self.zero_stage, self.live)
        by = f", DeepSpeed {source.ds_version}" if source.ds_version else ""
        done = ", ".join(_shown(outcome) for outcome in self.outcomes if outcome.what == "restored")
        rows = [("from", f"{source.format} {source.folder}"), ("saved", f"{saved_topology(source)}{by}")]
        rows[1:1] = [("storage", self.storage)] * bool(self.storage)
        rows += [("now", f"{now}, at step {self.global_steps}"), ("restored", done or "nothing")]
        for what in ("fresh", "skipped", "ignored"):
            rows += [(what, _shown(outcome)) for outcome in self.outcomes if outcome.what == what]
        if self.samples_consumed is not None:
            skip = f"to skip: {self.batches_to_skip:,} batches of each rank's loader"
            skip += (
                f", and {self.samples_to_skip} samples of the next batch of all ranks" if self.samples_to_skip else ""
            )
            if any((each.role, each.what) == (DATA_POSITION, "restored") for each in self.outcomes):
                skip = "the registered sampler continues there"
            rows += [("data", f"{self.samples_consumed:,} samples consumed; {skip}")]
        rows += _work_rows(self.ranks) + ([] if self.verified is None else [("verified", str(self.verified))])
        rows += [("note", note) for note in self.notes] + [("unchanged", self.goes_on)] * bool(self.goes_on)
        rows += [("differs", each) for each in self.differs]
        return table(self.heading, rows=[(name, Text(printable(text))) for name, text in rows])

    def print_to(self, console: Console) -> None:
        """Print the table; words that are wider than it, such as paths, are broken on terminals only."""
        if not console.is_terminal:
            console.width = max(_WIDTH, Console(width=_WIDEST).measure(self.table()).minimum)
        console.print(self.table())

    def __str__(self) -> str:
        console = Console(force_terminal=False)
        with console.capture() as capture:
            self.print_to(console)
        return capture.get()


def table(heading: str, *columns: str, rows: Iterable[Sequence[Any]] = (), **options: Any) -> Table:
    """A titled table of rows, whose strings may have markup; headings that begin with ``>`` are of numeric columns.

    Without headings, it lists facts: pairs of a name and a value, those without a value left out.
    """
    made = Table(title=heading, title_justify="left", caption_justify="left", show_header=bool(columns), **options)
    for column in columns:
        is_number = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if is_number else "left", overflow="fold")
    if not columns:
        made.add_column(style="bold", no_wrap=True)
        made.add_column(overflow="fold")
    for row in rows:
        if columns or row[1]:
            made.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return made


def source_dict(source: SourceFacts) -> dict[str, Any]:
    """A checkpoint's source as plain containers, without :data:`_NOT_SHOWN`."""
    return {key: value for key, value in asdict(source).items() if key not in _NOT_SHOWN}


def title(role: str) -> str:
    """The display name of a role."""
    return _TITLES.get(role, role)


def topology_text(zero_stage: int, at: RankCoordinates | SourceFacts) -> str:
    """A topology in words, such as ``"ZeRO-3, DP=2, SP=4"``."""
    degrees = (("SP", at.sequence.degree), ("TP", at.tp), ("PP", at.pp), ("EP", at.ep))
    others = "".join(f", {name}={degree}" for name, degree in degrees if degree > 1)
    return f"ZeRO-{zero_stage}, DP={at.sequence.data_degree(at.partition_degree)}{others}"


def saved_topology(source: SourceFacts) -> str:
    """The topology of the run that saved a checkpoint, in words; whole tensors in files show none."""
    if source.foreign:
        return f"{counted(source.files, 'file')} of {source.foreign}"
    return topology_text(source.zero_stage, source)


def size(nbytes: float) -> str:
    """A human-readable number of bytes."""
    return str(tqdm.format_sizeof(nbytes, "B"))


def united(stages: Sequence[Sequence[Outcome]]) -> tuple[Outcome, ...]:
    """Merge the outcomes of all pipeline stages into one model's."""
    names: dict[Outcome, dict[str, None]] = {}
    for outcome in chain.from_iterable(stages):
        names.setdefault(replace(outcome, names=()), {}).update(dict.fromkeys(outcome.names))
    return tuple(replace(outcome, names=tuple(found)) for outcome, found in names.items())


def _shown(outcome: Outcome) -> str:
    """An outcome in the table: what is restored by number, with its names only if it was frozen; else with a reason."""
    name = title(outcome.role)
    count = len(outcome.names)
    names = shortened(outcome.names, _NAMES_SHOWN)
    if outcome.what != "restored":
        return f"{name}{names and ' '}{names}: {outcome.reason}"
    return f"{name} {count}" + (f" ({names})" if outcome.role == FROZEN else "") if count else name


def _percent(share: float) -> str:
    """A share that is not shown as 0 unless it is."""
    return f"{100 * share:.2g} %" if share >= 0.0005 or not share else "0.05 % or less"


def _work_rows(ranks: Sequence[RankWork]) -> list[tuple[str, str]]:
    """Bytes and seconds over all ranks: least and most, if they differ."""
    if not ranks:
        return []
    opened = sum(work.files_opened for work in ranks)
    files = _span([work.files_read for work in ranks], "{:,}".format)
    rows = [("files", f"{opened:,} opened for metadata, {files} read per rank")]
    rows += [("read per rank", _span([work.read.nbytes for work in ranks], size))]
    if asked := [work.requests for work in ranks if work.requests is not None]:
        counts, sizes = ([getattr(each, name) for each in asked] for name in ("count", "nbytes"))
        repeated = sum(each.repeated for each in asked)
        again = f"; {repeated:,} of all failed and were repeated" if repeated else ""
        rows += [("requests per rank", f"{_span(counts, '{:,}'.format)}, for {_span(sizes, size)}{again}")]
    received = [work.nbytes_received for work in ranks]
    rows += [("received per rank", _span(received, size))] if any(received) else []
    if blocks := sum(work.blocks for work in ranks):
        requantized = sum(work.read.blocks for work in ranks)
        worst = max(work.read.worst_error for work in ranks)
        change = f", values changed by at most {100 * worst:.3f} % of their block's largest" if requantized else ""
        rows += [("8-bit blocks", f"{blocks - requantized} exact, {requantized} of {blocks} requantized{change}")]
    phases = [f"{phase} {max(work.seconds.get(phase, 0.0) for work in ranks):.2f}" for phase in ranks[0].seconds]
    return [*rows, ("seconds, slowest rank", ", ".join(phases))]


def _span(numbers: Sequence[int], text: Callable[[int], str]) -> str:
    least = text(min(numbers))
    most = text(max(numbers))
    return most if least == most else f"{least} to {most}"
