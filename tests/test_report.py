"""The load report: names, counts, table and JSON."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elastic_ckpt.config import CONFIG_KEY, read_config
from elastic_ckpt.core.local_state import RankCoordinates
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, SourceFacts
from elastic_ckpt.core.read_plan import LoadPlan, Outcome, ReadPlan, RestoredShare, names_with
from elastic_ckpt.core.text import printable
from elastic_ckpt.load.publishing import publish
from elastic_ckpt.report import (
    LoadReport,
    RankWork,
    ReadStats,
    SafeConsole,
    literal,
    progress_bar,
    table,
    title,
    united,
)
from tests.hostile_text import HOSTILE, READABLE, controls_in, hostile_texts

SOURCE = SourceFacts("native", "/ckpt/step[4]", "step[4]", 3, 2, "0.19.8")
OUTCOMES = (
    Outcome(MASTER, "restored", ("a", "b")),
    Outcome("exp_avg", "restored", ("a",)),
    Outcome(BUFFER, "restored", ("mask",)),
    Outcome(FROZEN, "restored", ("head",)),
    Outcome("lr scheduler", "restored"),
    Outcome("counters", "restored"),
    Outcome("optimizer states", "fresh", ("b",), "it was frozen at save time"),
    Outcome(MASTER, "fresh", ("z", "c"), "not in the checkpoint"),
    Outcome("optimizer states", "skipped", ("head",), "frozen now"),
    Outcome("loss scale", "skipped", (), "not asked for"),
    Outcome(FROZEN, "ignored", ("old[2].bias",), "the live model has no such entry"),
    Outcome("loss scale", "ignored", (), "the live engine does not train in fp16"),
)


def work(rank: int, nbytes: int = 0, received: int = 0, **seconds: float) -> RankWork:
    return RankWork(rank, ReadStats(nbytes, 3), received, files_opened=2, seconds=seconds)


def report_of(*outcomes: Outcome, **more: Any) -> LoadReport:
    return LoadReport(SOURCE, 1, RankCoordinates(4), more.pop("rank", 0), outcomes, **more)


def rows(report: LoadReport) -> list[tuple[str, str]]:
    """The table's rows, as they are printed on a very wide terminal."""
    console = Console(width=1000, force_terminal=False)
    with console.capture() as capture:
        console.print(report.table())
    lines = [re.split(r"[│┃|]", line)[1:3] for line in capture.get().splitlines() if re.search(r"[│┃|]", line)]
    return [(left.strip(), right.strip()) for left, right in lines]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (RestoredShare(), ""),  # nothing trains
        (RestoredShare(trained_numel=1000, restored_numel=500), ""),
        (RestoredShare(trained_numel=1000, restored_numel=499), "only 50 % of what trains"),
        (RestoredShare(trained_numel=1000, restored_numel=16), "only 1.6 % of what trains"),
        (RestoredShare(trained_numel=10**9, restored_numel=1), "only 0.05 % or less of what trains"),
        (RestoredShare(trained_numel=10, frozen_numel=90, frozen_restored_numel=90), "only 0 % of what trains"),
    ],
)
def test_the_first_line_says_how_much_is_restored_if_that_is_little(share: RestoredShare, expected: str) -> None:
    report = report_of(*OUTCOMES, share=share)
    first = str(report).splitlines()[0]
    assert first.startswith("elastic_ckpt: ") and expected in first
    assert report.restores_little == bool(expected) and ("WARNING" in first) == bool(expected)


@pytest.mark.parametrize("with_states", [True, False])
def test_nothing_is_restored_only_if_that_is_so_on_all_ranks(with_states: bool) -> None:
    empty, without = RestoredShare(), RestoredShare(trained_numel=5, frozen_numel=9, frozen_restored_numel=9)
    some = RestoredShare(trained_numel=5, restored_numel=1)
    assert not empty.is_nothing(with_states) and not (empty + some).is_nothing(with_states)
    assert not (without + some).is_nothing(with_states)
    assert (without + without).is_nothing(with_states)
    # weights of a whole model below new adapters
    assert replace(without, placed_numel=9).is_nothing(with_states) == with_states
    # and of an engine that trains nothing
    assert RestoredShare(frozen_numel=3).is_nothing(with_states)
    assert not RestoredShare(frozen_numel=3, frozen_restored_numel=3).is_nothing(with_states)


def test_frozen_parameters_that_were_not_loaded_are_all_in_the_file_and_counted_on_the_screen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = tuple(f"layers.{number}.lora_A" for number in range(30))
    lacking = [Outcome(FROZEN, "fresh", names[:20], "left out"), Outcome(FROZEN, "fresh", names[20:], "not there")]
    report = report_of(Outcome(FROZEN, "restored", ("base",)), Outcome(MASTER, "fresh", ("head",), "new"), *lacking)
    assert report.initialized == tuple(sorted(names))
    file = tmp_path / "report.json"
    publish(report, (), read_config({CONFIG_KEY: {"report": str(file)}}))
    assert json.loads(file.read_text())["initialized"] == sorted(names)
    (line,) = caplog.messages
    assert "30 frozen parameters were initialized by this run and not loaded" in line and "and 22 more" in line
    assert "layers.9.lora_A" not in line and "head" not in line
    caplog.clear()
    publish(report_of(*OUTCOMES), (), read_config({CONFIG_KEY: {"report": False}}))
    assert caplog.messages == []


def test_names_are_those_of_one_outcome_sorted_and_each_once() -> None:
    report = report_of(*OUTCOMES)
    assert report.names("fresh") == ("b", "c", "z")
    assert report.names("restored") == ("a", "b", "head", "mask")
    assert report.names("skipped") == ("head",)
    assert report.names("ignored") == ("old[2].bias",)
    assert report.names("nothing") == ()


def test_a_plan_and_its_report_tell_the_same_names() -> None:
    plan = LoadPlan(ReadPlan((), (), ()), outcomes=OUTCOMES)
    report = report_of(*OUTCOMES)
    for what in ("fresh", "ignored", "restored", "skipped"):
        assert names_with(plan.outcomes, what) == report.names(what)


@pytest.mark.parametrize(
    ("role", "name"),
    [(MASTER, "fp32 masters"), (BUFFER, "buffers"), (FROZEN, "frozen parameters"), ("lr scheduler", "lr scheduler")],
)
def test_roles_are_called_as_people_call_them(role: str, name: str) -> None:
    assert title(role) == name


def test_mine_is_the_work_of_this_rank() -> None:
    ranks = (work(0, 10), work(1, 20))
    assert report_of(rank=1, ranks=ranks).mine == ranks[1]


def test_the_table_has_every_outcome() -> None:
    printed = rows(report_of(*OUTCOMES, global_steps=7, notes=("look [here]", "and there")))
    assert printed[:3] == [
        ("from", "native /ckpt/step[4]"),
        ("saved", "ZeRO-3, DP=2, DeepSpeed 0.19.8"),
        ("now", "ZeRO-1, DP=4, at step 7"),
    ]
    assert printed[3] == (
        "restored",
        "fp32 masters 2, exp_avg 1, buffers 1, frozen parameters 1 (head), lr scheduler, counters",
    )
    assert printed[4:10] == [
        ("fresh", "optimizer states b: it was frozen at save time"),
        ("fresh", "fp32 masters z, c: not in the checkpoint"),
        ("skipped", "optimizer states head: frozen now"),
        ("skipped", "loss scale: not asked for"),
        ("ignored", "frozen parameters old[2].bias: the live model has no such entry"),
        ("ignored", "loss scale: the live engine does not train in fp16"),
    ]
    assert printed[10:] == [("note", "look [here]"), ("note", "and there")]


def test_the_table_of_a_load_that_restored_nothing_says_so() -> None:
    assert ("restored", "nothing") in rows(report_of())


@pytest.mark.parametrize(("count", "more"), [(12, ""), (13, " and 1 more"), (40, " and 28 more")])
def test_long_lists_of_names_are_cut_short_in_the_table_and_whole_in_the_report(count: int, more: str) -> None:
    names = tuple(f"p{number:02}" for number in range(count))
    report = report_of(Outcome(MASTER, "fresh", names, "why"))
    shown = ", ".join(names[:12])
    assert rows(report)[4] == ("fresh", f"fp32 masters {shown}{more}: why")
    assert report.names("fresh") == names


def test_the_text_is_the_table_and_breaks_off_nothing() -> None:
    names = tuple(f"a.rather.long.name.of.a.parameter.{number}" for number in range(12))
    text = str(report_of(Outcome(MASTER, "fresh", names, "not in the checkpoint")))
    assert text.startswith("elastic_ckpt: checkpoint restored")
    assert max(map(len, text.splitlines())) <= 80
    together = re.sub(r"[\s│┃|]+", "", text)
    assert all(name in together for name in names)


def test_a_log_file_shows_long_paths_whole(capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"/{'long/' * 40}step4"
    publish(replace(report_of(), source=replace(SOURCE, folder=folder)), (), read_config({}))
    assert folder in capsys.readouterr().err


def test_frozen_parameters_are_listed_by_name() -> None:
    names = tuple(f"layers.{number}.weight" for number in range(14))
    restored = rows(report_of(Outcome(MASTER, "restored", names), Outcome(FROZEN, "restored", names)))[3][1]
    assert restored == f"fp32 masters 14, frozen parameters 14 ({', '.join(names[:12])} and 2 more)"


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [([], None), ([512], "512B"), ([2000, 2000], "2.00kB"), ([2000, 3500000, 0], "0.00B to 3.50MB")],
)
def test_bytes_read_are_shown_as_a_span_where_ranks_differ(nbytes: list[int], shown: str | None) -> None:
    ranks = tuple(work(rank, count) for rank, count in enumerate(nbytes))
    assert dict(rows(report_of(ranks=ranks))).get("read per rank") == (shown)


def test_the_files_that_the_job_touched_are_counted() -> None:
    ranks = tuple(replace(work(rank), files_opened=500, files_read=read) for rank, read in enumerate((3, 3, 12)))
    assert dict(rows(report_of(ranks=ranks)))["files"] == "1,500 opened for metadata, 3 to 12 read per rank"
    assert dict(rows(report_of(ranks=ranks[:2])))["files"] == "1,000 opened for metadata, 3 read per rank"


def test_received_bytes_are_shown_only_where_there_are_any() -> None:
    assert "received per rank" not in dict(rows(report_of(ranks=(work(0, 5), work(1, 5)))))
    printed = dict(rows(report_of(ranks=(work(0, 5, 0), work(1, 5, 3000)))))
    assert printed["received per rank"] == "0.00B to 3.00kB"


def test_seconds_are_those_of_the_slowest_rank_of_each_phase() -> None:
    ranks = (work(0, plan=0.5, read=1.0), work(1, plan=0.25, read=2.0), work(2, plan=0.1))
    assert dict(rows(report_of(ranks=ranks)))["seconds, slowest rank"] == "plan 0.50, read 2.00"


def test_the_table_shows_expert_parallel_degrees() -> None:
    report = replace(report_of(), source=replace(SOURCE, ep=2), live=RankCoordinates(4, ep=4))
    shown = dict(rows(report))
    assert "ZeRO-3, DP=2, EP=2" in shown["saved"] and "ZeRO-1, DP=4, EP=4" in shown["now"]


def test_json_has_everything_and_can_be_read_back() -> None:
    report = report_of(*OUTCOMES, global_steps=7, ranks=(work(0, 5, 6, read=1.5),), notes=("a", "ü"))
    read = json.loads(report.as_json())
    assert read["source"] == {
        "format": "native",
        "folder": "/ckpt/step[4]",
        "tag": "step[4]",
        "zero_stage": 3,
        "partition_degree": 2,
        "ds_version": "0.19.8",
        "tp": 1,
        "pp": 1,
        "sequence": {"degree": 1, "partitioned": True, "strided": False},
        "ep": 1,
    }
    assert [Outcome(o["role"], o["what"], tuple(o["names"]), o["reason"]) for o in read["outcomes"]] == [*OUTCOMES]
    assert read["ranks"] == [
        {
            "rank": 0,
            "read": {"nbytes": 5, "calls": 3, "staged_nbytes": 0, "blocks": 0, "worst_error": 0.0},
            "nbytes_received": 6,
            "files_opened": 2,
            "seconds": {"read": 1.5},
            "blocks": 0,
            "files_read": 0,
            "requests": None,
        }
    ]
    assert (read["zero_stage"], read["live"]["partition_degree"], read["rank"], read["global_steps"]) == (1, 4, 0, 7)
    assert read["notes"] == ["a", "ü"]


# --- text of a checkpoint in it -----------------------------------------------------------------------------------

#: Whatever of a report a checkpoint has chosen: reports that have a text there.
PLACES: dict[str, Callable[[str], LoadReport]] = {
    "folder": lambda text: replace(report_of(), source=replace(SOURCE, folder=text)),
    "format": lambda text: replace(report_of(), source=replace(SOURCE, format=text)),
    "foreign": lambda text: replace(report_of(), source=replace(SOURCE, foreign=text)),
    "version of DeepSpeed": lambda text: replace(report_of(), source=replace(SOURCE, ds_version=text)),
    "storage": lambda text: report_of(storage=text),
    "note": lambda text: report_of(notes=("a", text)),
    "unchanged": lambda text: report_of(goes_on=text),
    "differs": lambda text: report_of(differs=(text, "b")),
    "role": lambda text: report_of(Outcome(text, "restored", ("a",)), Outcome(text, "fresh", (), "why")),
    "parameter": lambda text: report_of(Outcome(FROZEN, "restored", (text,)), Outcome(MASTER, "ignored", (text, "b"))),
    "reason": lambda text: report_of(Outcome("exp_avg", "skipped", ("a",), text)),
}


@given(hostile_texts, st.sampled_from(sorted(PLACES)), st.booleans())
def test_no_text_of_a_checkpoint_in_a_report_controls_a_terminal(text: str, place: str, is_terminal: bool) -> None:
    report, out = PLACES[place](text), io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, color_system=None, width=1000)
    report.print_to(console)
    console.print(report)
    for shown in (out.getvalue(), str(report)):
        assert controls_in(re.sub(r"\x1b\[[0-9;]*m", "", shown), but="\n") == [], "but for rich's own bold letters"
    assert json.loads(report.as_json()) is not None and controls_in(report.as_json(), but="\n") == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", [printable(HOSTILE), "[red]a[/] :bomb: [link=x]", "a\\[0]", "a\\", *READABLE])
def test_a_report_shows_markup_and_readable_names_as_they_are(text: str, place: str) -> None:
    assert any(" ".join(text.split()) in " ".join(right.split()) for _, right in rows(PLACES[place](text)))


def test_json_has_the_text_as_it_is() -> None:
    assert json.loads(PLACES["note"](HOSTILE).as_json())["notes"] == ["a", HOSTILE]


@given(hostile_texts)
def test_what_is_published_has_none(text: str) -> None:
    for place, make in PLACES.items():
        with redirect_stderr(io.StringIO()) as err:
            publish(make(text), (), read_config({}))
        assert controls_in(err.getvalue(), but="\n") == [], place


@given(hostile_texts)
def test_progress_bars_and_tables_have_none(text: str) -> None:
    with redirect_stderr(io.StringIO()) as err:
        progress_bar(text, 1, True).close()
    assert controls_in(err.getvalue(), but="\r\n") == [], "which go back to the line's beginning"
    out = io.StringIO()
    SafeConsole(file=out, width=1000).print(
        table(literal(text), literal(text), rows=[(literal(text),), (text.replace("[", ""),)])
    )
    assert controls_in(out.getvalue(), but="\n") == []


# --- what is done with it ---------------------------------------------------------------------------------------


def test_the_report_is_written_where_the_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(*OUTCOMES, global_steps=7)
    publish(report, (), read_config({CONFIG_KEY: {"report": str(tmp_path / "report.json")}}))
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == json.loads(report.as_json())
    assert "checkpoint restored" in capsys.readouterr().err
    publish(report, (), read_config({CONFIG_KEY: {"report": False}}))
    assert capsys.readouterr() == ("", "")


def test_the_report_is_printed_beside_the_scripts_own_output(capsys: pytest.CaptureFixture[str]) -> None:
    publish(report_of(*OUTCOMES), (), read_config({}))
    out, err = capsys.readouterr()
    assert out == ""
    assert "checkpoint restored" in err


def test_a_report_that_cannot_be_written_is_a_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "no such folder" / "report.json")
    publish(report_of(), ("mind the gap",), read_config({CONFIG_KEY: {"report": path}}))
    assert "mind the gap" in caplog.text
    assert path in caplog.text


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    publish(report_of(), (), read_config({CONFIG_KEY: {"report": str(path)}}))
    assert str(path) in caplog.text


def test_outcomes_of_pipeline_stages_are_merged_in_their_order() -> None:
    stages = [[Outcome("fp32", "restored", ("a", "b"))], [Outcome("fp32", "restored", ("c",))]]
    assert united(stages) == (Outcome("fp32", "restored", ("a", "b", "c")),)
    assert united([]) == ()
