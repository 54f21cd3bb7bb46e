"""What was measured, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.cases import CONTENDERS
from benchmarks.results import CaseResult, Summary, all_wrong, is_floor, over_floor, summarize, targets

_MIB = 1 << 20


def table_of(rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Rows, of which the first one is the heads."""
    heads, *others = rows
    table = Table(*heads, title=title)
    for row in others:
        table.add_row(*row)
    return table


def case_table(result: CaseResult) -> Table:
    """One case: a row for each contender and kind of memory."""
    table = Table(title=result.case.name, title_justify="left", title_style="bold", header_style="bold")
    for name in ("contender", "memory"):
        table.add_column(name, no_wrap=True)
    for name in ("seconds", "(least - most)", "x floor", "read MiB", "x owned", "metadata KiB", "extra MiB", "opened"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("not right")
    summaries = summarize(result)
    last = ""
    for summary in summaries:
        if last and summary.contender != last:
            table.add_section()
        title = CONTENDERS[summary.contender].title if summary.contender != last else ""
        last = summary.contender
        ratio = over_floor(summary, summaries)
        table.add_row(
            title,
            summary.kind,
            *_figures(summary, ratio),
            _wrong(result, summary),
            style="dim" if is_floor(summary) else "",
        )
    for key, reason in result.left_out.items():
        table.add_section()
        table.add_row(CONTENDERS[key].title, "left out", *[""] * 8, reason, style="italic")
    return table


def _figures(summary: Summary, ratio: float | None) -> tuple[str, ...]:
    seconds = summary.seconds
    metadata = "" if summary.metadata_nbytes is None else f"{summary.metadata_nbytes / 1024:,.0f}"
    return (
        f"{seconds.median:.3f}",
        f"{seconds.least:.2f} - {seconds.most:.2f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{summary.read_nbytes / _MIB:,.0f}",
        f"{summary.read_nbytes / summary.owned_nbytes:.3f}",
        metadata,
        f"{summary.extra_nbytes / _MIB:,.0f}",
        str(summary.opens),
    )


def _wrong(result: CaseResult, summary: Summary) -> Text:
    wrong = all_wrong(result, summary.contender)
    if wrong:
        return Text(", ".join(wrong), style="red")
    return Text("", style="green")


def phases_table(result: CaseResult) -> Table | None:
    """Where elastic_ckpt's time goes."""
    ours = [summary for summary in summarize(result) if summary.phases]
    if not ours:
        return None
    phases = list(ours[0].phases)
    table = Table(title="phases, seconds of the slowest rank", title_justify="left", header_style="bold")
    for name in ("contender", "memory"):
        table.add_column(name, no_wrap=True)
    for name in (*phases, "the rest"):
        table.add_column(name, justify="right")
    for summary in ours:
        values = [summary.phases[name] for name in phases]
        rest = max(summary.seconds.median - sum(values), 0.0)
        figures = [f"{value:.3f}" for value in (*values, rest)]
        table.add_row(CONTENDERS[summary.contender].title, summary.kind, *figures)
    return table


def targets_table(result: CaseResult) -> Table | None:
    """What was aimed at."""
    aims = targets(result)
    if not aims:
        return None
    table = Table(title="aims", title_justify="left", header_style="bold")
    table.add_column("")
    for name in ("aim", "measured", ""):
        table.add_column(name, justify="right")
    for aim in aims:
        verdict = Text("met", style="green") if aim.is_met else Text("missed", style="red")
        bound = f"{'>=' if aim.at_least else '<='} {aim.bound:g}"
        applies = aim.applies
        table.add_row(aim.what, bound if applies else "", f"{aim.value:.2f}", verdict if applies else Text(""))
    return table


def full_report(result: CaseResult) -> RenderableType:
    """All tables of a case."""
    parts = [case_table(result), phases_table(result), targets_table(result)]
    return Group(*(part for part in parts if part is not None))


def machine_line(machine: Mapping[str, str | int], page_state: str = "") -> str:
    """Where the figures come from, in one line."""
    gib = int(machine["memory_nbytes"]) / (1 << 30)
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {gib:.0f} GiB, Linux {machine['kernel']}; "
        f"Python {machine['python']}, torch {machine['torch']}, DeepSpeed {machine['deepspeed']}"
        + (f"; pages {page_state}" if page_state else "")
    )
