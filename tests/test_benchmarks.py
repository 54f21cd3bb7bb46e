"""The pure parts of the benchmarks: cases, statistics, tables, pictures, and values that every rank works out."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import (
    buckets,
    chart,
    cold,
    collectives,
    export,
    flat,
    flat_view,
    gaps,
    machine,
    metadata,
    pretrained,
    report,
    run,
    scale,
)
from benchmarks.cases import (
    CONTENDERS,
    MODELS,
    QUICK,
    Case,
    enumerate_cases,
    parse_pair,
    shuffled,
    sources_of,
    that_run,
    with_their_floors,
)
from benchmarks.checkpoints import Store
from benchmarks.flat_cases import FILES, PARAMETERS, FlatCase, FlatPoint, enumerate_flat, growth, lines_of, point_of
from benchmarks.launching import JobFailed, Launcher
from benchmarks.meter import Opens
from benchmarks.model import SAVED, build_model, build_optimizer, fill, is_filled, values
from benchmarks.played import PlayedJob
from benchmarks.report import BEGIN, END, RESULTS, SECTIONS, Measured, check_in, growths, pages, with_sections
from benchmarks.results import CaseResult, all_wrong, find, over_floor, spread, summarize, targets
from benchmarks.run import machine_need, repeat_options, settings_of, words
from benchmarks.scale import ScalePoint
from benchmarks.scale_models import ScaleModel
from benchmarks.table import full_report
from elastic_ckpt import distributed
from elastic_ckpt.distributed import inline_nbytes
from elastic_ckpt.tools.virtual import Topology

MACHINE = {
    "cpu": "A processor",
    "cores": 2,
    "memory_nbytes": 24 << 30,
    "kernel": "6.1",
    "python": "3.11",
    "torch": "2.13",
    "deepspeed": "0.19.8",
}


def sample(contender: str, kind: str, number: int, seconds: list[float], wrong: str = "", phases: bool = False) -> dict:
    ranks = [
        {
            "seconds": each,
            "own_seconds": each,
            "read_nbytes": 1000 + 24 * rank,
            "disk_nbytes": 0,
            "peak_nbytes": 0,
            "opens": 7 + rank,
            "files": 3,
            "system_seconds": 0.1,
            "faults": 10,
            "lent_nbytes": 0,
            "extra_nbytes": (rank + 1) << 20,
            "owned_nbytes": 1000,
            "tensor_nbytes": 1000 if phases else None,
            "phases": {"plan": each / 4, "read": each / 2} if phases else {},
        }
        for rank, each in enumerate(seconds)
    ]
    restored = {"fp32": True} | ({wrong: False} if wrong else {})
    return {"contender": contender, "kind": kind, "round": number, "ranks": ranks, "restored": restored}


BIG = Case("270M", 3, 2, 4)


def canned(case: Case = BIG) -> CaseResult:
    """Round 0 is slow and must not count; medians of the others: floor 1, native 2, DeepSpeed 12."""
    samples = []
    for number, (floor, native, theirs) in enumerate([(90, 90, 90), (1, 2, 10), (0.5, 5, 12), (3, 1, 40)]):
        samples.append(sample("floor", "resume", number, [floor, floor / 2], phases=True))
        samples.append(sample("native", "resume", number, [native / 2, native], phases=True))
        samples.append(sample("ds-universal", "resume", number, [theirs, theirs], "steps" if number == 0 else ""))
    return CaseResult(case, samples, {"conversion_seconds": 100.0}, {"dcp": "no room for it"})


def test_cases_of_one_checkpoint_stand_side_by_side() -> None:
    cases = enumerate_cases(["30M"], [1, 3], [(2, 4), (4, 2), (2, 2), (2, 4)])
    assert [(case.stage, case.saved_dp, case.dp) for case in cases] == [
        (1, 2, 2),
        (1, 2, 4),
        (1, 4, 2),
        (3, 2, 2),
        (3, 2, 4),
        (3, 4, 2),
    ]


@pytest.mark.parametrize("text", ["2", "2:", "0:2", "2:x", "-1:2", "1:2:3", "2:65"])
def test_pairs_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="no pair of data-parallel degrees"):
        parse_pair(text)


def test_only_the_saved_degree_suits_deepspeeds_native_load_and_conversion_is_not_run_twice() -> None:
    assert "ds-native" in that_run(Case("30M", 1, 2, 2), CONTENDERS)
    assert that_run(Case("30M", 1, 2, 4), ["native", "ds-native", "ds-convert", "ds-universal"]) == [
        "native",
        "ds-universal",
    ]


def test_floors_come_with_who_is_held_against_them() -> None:
    assert with_their_floors(["universal"]) == ["floor-universal", "universal"]
    assert with_their_floors(["dcp", "native"]) == ["floor", "native", "dcp"]


def test_no_contender_always_follows_the_same_one() -> None:
    keys = ["a", "b", "c", "d", "e"]
    rounds = [shuffled(keys, number) for number in range(6)]
    assert all(sorted(order) == keys for order in rounds)
    assert rounds[3] == shuffled(keys, 3)  # every rank draws it for itself
    for key in keys:
        assert len({order[order.index(key) - 1] for order in rounds if order[0] != key}) > 1


@pytest.mark.parametrize(("size", "millions"), [("30M", 30), ("270M", 270), ("700M", 700)])
def test_models_have_the_size_that_they_are_called_by(size: str, millions: int) -> None:
    assert abs(MODELS[size].numel / 1e6 - millions) < 0.02 * millions


def test_the_number_of_parameters_is_that_of_the_real_model() -> None:
    model = build_model(MODELS["1M"], saved=True)
    assert sum(param.numel() for param in model.parameters()) == MODELS["1M"].numel
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert all(is_filled(param.data.view(-1), name, "fp32", 0) for name, param in model.named_parameters())
    assert not any(param.any() for param in build_model(MODELS["1M"], saved=False).parameters())
    optimizer = build_optimizer(model, SAVED)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_values_can_be_worked_out_from_anywhere() -> None:
    whole = values("a.weight", "exp_avg", 0, 1000)
    assert torch.equal(whole[300:700], values("a.weight", "exp_avg", 300, 700))
    assert len(whole.unique()) > 990
    assert not torch.equal(whole, values("b.weight", "exp_avg", 0, 1000))
    assert values("a", "exp_avg_sq", 0, 1000).min() >= 0 > values("a", "fp32", 0, 1000).min()


def test_a_changed_bit_and_a_shift_are_noticed() -> None:
    tensor = torch.empty(1000)
    fill(tensor, "a", "fp32", 5)
    assert is_filled(tensor, "a", "fp32", 5)
    assert not is_filled(tensor, "a", "fp32", 6)
    tensor.view(torch.int32)[999] ^= 1
    assert not is_filled(tensor, "a", "fp32", 5)


def test_masters_rounded_through_bf16_are_not_the_saved_ones() -> None:
    tensor = values("a", "fp32", 0, 100)
    assert not is_filled(tensor.bfloat16().float(), "a", "fp32", 0)


def test_the_first_round_does_not_count_and_the_slowest_rank_does() -> None:
    floor, native = (find(summarize(canned()), key) for key in ("floor", "native"))
    assert floor is not None and native is not None
    assert (floor.seconds.median, floor.seconds.least, floor.seconds.most, floor.seconds.count) == (1, 0.5, 3, 3)
    assert native.seconds.median == 2
    assert native.phases == {"plan": 0.5, "read": 1.0}
    assert (native.read_nbytes, native.metadata_nbytes, native.extra_nbytes, native.opens) == (1024, 24, 2 << 20, 8)


def test_conversion_is_added_and_shares_the_loads() -> None:
    summaries = summarize(canned())
    load, both = find(summaries, "ds-universal"), find(summaries, "ds-convert")
    assert load is not None and both is not None
    assert (load.seconds.median, both.seconds.median, both.seconds.least) == (12, 112, 110)
    assert load.metadata_nbytes is None
    assert over_floor(load, summaries) == 12


def test_what_was_wrong_once_is_told_of_every_way_that_shares_the_load() -> None:
    result = canned()
    assert all_wrong(result, "ds-universal") == all_wrong(result, "ds-convert") == ("steps",)
    assert all_wrong(result, "native") == ()


def test_aims_are_judged_where_they_apply() -> None:
    aims = {aim.what: aim for aim in targets(canned())}
    floor = "elastic_ckpt, native: times the floor"
    assert (aims[floor].value, aims[floor].bound, aims[floor].is_met) == (2.0, 1.05, False)
    theirs = aims["times as fast as DeepSpeed, universal"]
    assert (theirs.value, theirs.is_met, theirs.applies) == (6.0, False, True)
    both = aims["times as fast as DeepSpeed, conversion + universal"]
    assert (both.value, both.is_met, both.applies) == (56.0, True, True)
    assert aims["tensor bytes read / bytes owned"].value == 1.0
    assert aims["extra memory of a rank, MiB"].value == 2.0
    small = {aim.what: aim for aim in targets(canned(Case("30M", 3, 2, 4)))}
    assert (small[floor].bound, small[floor].is_met, small[floor].applies) == (2.0, True, True)
    assert not small["times as fast as DeepSpeed, universal"].applies
    assert not any(aim.applies for aim in targets(canned(Case("270M", 1, 2, 2))) if "floor" in aim.what)


def test_the_report_has_all_that_was_measured_and_aimed_at(tmp_path: Path) -> None:
    assert {write(Measured(tmp_path)) for write in SECTIONS.values()} == {""}
    cases = [canned().as_dict(), canned(Case("270M", 1, 2, 2)).as_dict()]
    results = {"machine": MACHINE, "when": "2026-01-02 03:04:05", "pages": "warm", "repeats": 3, "cases": cases}
    cpus = {("elastic_ckpt", 1000): 0.25, ("torch.load", 1000): 3, ("elastic_ckpt", 100): 1, ("torch.load", 100): 1}
    points = [
        {"case": asdict(metadata.MetadataCase("model states", 1, n)), "reader": reader, "collection": "on"}
        | {"cpu": {"median": cpu}}
        for (reader, n), cpu in cpus.items()
    ]
    flats = [asdict(replace(POINTS[0], case=replace(POINTS[0].case, parameters=10_000), seconds=1.5))]
    ranks = asdict(ScalePoint(3, 1000, 1024, 16, 2048, 2048, 0.5, 0.4, 0.2, 3 << 20, 2048, 4096, 9))
    documents = {"results": results, "metadata": {"points": points}, "flat": {"points": flats}}
    for name, document in (documents | {"scale": {"points": [ranks | {"ranks": 8}, ranks]}}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    measured = Measured(tmp_path)
    text = SECTIONS["contenders"](measured) + SECTIONS["aims"](measured)
    assert "| DeepSpeed, conversion + universal | 112.00 | 56.00 |  | 0.00 GB | 2 MiB |" in text
    expected = [
        "270M ZeRO-3, DP 2 → 4: elastic_ckpt, native: times the floor | <= 1.05 | 2 | **missed**",
        "270M ZeRO-3, DP 2 → 4: times as fast as DeepSpeed, conversion + universal | >= 28 | 56 | met",
        "270M ZeRO-1, DP 2 → 2: tensor bytes read / bytes owned | <= 1.02 | 1 | met",
        "10,000 parameters, ZeRO-1, DP 2 → 2: seconds | <= 1.5 | 1.5 | met",
        "ZeRO-3 source of 1,024 ranks x 1,000 parameters, one rank: seconds of CPU | <= 0.5 | 0.6 | **missed**",
        "ZeRO-3 source of 1,024 ranks x 1,000 parameters, one rank: extra memory, MiB | <= 64 | 3 | met",
        "ZeRO-3: seconds of CPU grow with source ranks by the power | <= 0.2 | 0 | met",
    ]
    assert [line for line in expected if f"| {line} |" not in text] == []
    assert "DeepSpeed 0.19.8; pages warm; 2026-01-02; medians of 3." in text
    page = tmp_path / "README.md"
    begin, end = BEGIN.format("aims"), END.format("aims")
    page.write_text(f"before\n{begin}\nold\n{end}\nbehind\n")
    for _ in range(2):
        page.write_text(with_sections(page.read_text(), measured))
        assert page.read_text() == f"before\n{begin}\n{SECTIONS['aims'](measured)}\n{end}\nbehind\n"


def test_a_run_is_checked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    machine.write_document(tmp_path, "gaps", [{"kib": 1, "seconds": [1, 2, 3, 4]}], repeats=3)
    assert check_in(tmp_path) == ["gaps"]
    measured = Measured(tmp_path / "results")
    assert measured["gaps"]["machine"]["when"][:4].isdigit() and not measured["scale"]
    assert "| 1 | 1.000 | 2.000 | 3.000 | 4.000 |" in SECTIONS["gaps"](measured)


def test_loads_from_a_bucket_are_compared_by_link_and_nodes(tmp_path: Path) -> None:
    """nginx's log has a line for each answer; the last part of a node's address but one is its number."""
    lines = ["10.78.0.2 206 700 GET /bucket/run/a", "10.78.1.2 206 300 GET /bucket/run/a", "10.78.1.2 404 9 GET /b"]
    (tmp_path / "sent").write_text("\n".join(lines))
    to_each = buckets.sent(tmp_path, 2)
    assert to_each == [{"requests": 1, "nbytes": 700}, {"requests": 1, "nbytes": 300}]
    of_both = {"mbit": 800, "nodes": 2, "owned_nbytes": 990, "sent": to_each}
    points = [{**of_both, "contender": buckets.OURS, "seconds": 2.0}]
    points += [{**of_both, "contender": buckets.DOWNLOAD, "seconds": 5.0}]
    _, row = buckets.table_rows(points)
    assert row == ("100 MB/s", "2", "2.00", "5.00", "0.40", "1.010", "1")
    aims = list(buckets.aims({"params": "30M", "points": points}))
    assert [round(aim.value, 3) for aim in aims] == [0.8, 1.01] and all(aim.is_met for aim in aims)


def test_pretrained_weights_are_compared_with_what_is_aimed_at() -> None:
    seconds = {"floor": 1.0, "elastic_ckpt": 1.5, "from_pretrained": 12.0}
    points = [
        {"params": "240M", "ranks_of_job": 2, "contender": name, "ranks": [{"seconds": each, "peak_nbytes": 3 << 20}]}
        for name, each in seconds.items()
    ]
    aims = list(pretrained.aims({"points": points}))
    assert [(round(aim.value, 3), aim.is_met) for aim in aims] == [(8.0, False), (0.2, False), (3.0, True)]


def test_a_listing_has_the_versions_that_nginx_gives(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    os.utime(tmp_path / "a", (0x6A000000, 0x6A000000))
    assert "<Key>run/a</Key>" in (text := buckets.listing(tmp_path, ["a"])) and "<Size>5</Size>" in text
    assert "<ETag>&quot;6a000000-5&quot;</ETag>" in text


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_numbers_of_a_page_are_those_that_were_measured(page: Path) -> None:
    """``python -m benchmarks.report`` writes them."""
    text = page.read_text(encoding="utf-8")
    assert with_sections(text, Measured(RESULTS)) == text


def test_what_is_checked_in_has_its_machine_and_date() -> None:
    for path in RESULTS.glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        assert document["machine"]["cpu"] and (document.get("when") or document["machine"]["when"]), path.name


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        spread([])


def test_results_survive_json() -> None:
    result = canned()
    again = CaseResult.from_dict(json.loads(json.dumps(result.as_dict())))
    assert summarize(again) == summarize(result)
    assert result.as_dict()["summaries"][1]["times_floor"] == 2.0


def test_tables_show_figures_reasons_and_what_is_wrong() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(full_report(canned()))
    text = console.export_text()
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "112.000" in rows["DeepSpeed, conversion + universal"] and "steps" in rows["DeepSpeed, universal"]
    assert "no room for it" in rows["torch.distributed.checkpoint"]
    assert (
        "missed" in rows["elastic_ckpt, native: times the floor"] and "met" in rows["tensor bytes read / bytes owned"]
    )


POINTS = [
    FlatPoint(FlatCase(PARAMETERS, 1, n, 1, 2, 2), 6, n, {"metadata": n, "plan": n, "commit": n}, n, 9, 9)
    for n in (1, 9)
]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [canned(), canned(Case("30M", 1, 2, 2)), CaseResult(Case("30M", 3, 2, 2), [], {}, {"native": "failed"})]
    assert {size: len(row) for size, row in chart.chart_rows(results).items()} == {"270M": 1, "30M": 1}
    assert [bar.contender for bar in chart.bars_of(results[0], "resume")] == ["native", "ds-universal", "ds-convert"]
    chart.draw(results, MACHINE, "warm", tmp_path / "chart.png")
    flat_view.draw(POINTS, tmp_path / "flat.png")
    for name in ("chart.png", "flat.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.parametrize(("module", "arguments"), [(run, ["--quick"]), (flat, []), (metadata, ["--most", "100"])])
def test_without_matplotlib_the_start_says_so_and_the_picture_is_left_out(
    module: ModuleType, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.setattr(run.Session, "_measure", lambda _session, _case: canned())
    monkeypatch.setattr(flat.Session, "run", lambda _session, _cases, _repeats: POINTS)
    result = CliRunner().invoke(module.app, [*arguments, "--out", str(tmp_path), "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert "no picture will be drawn" in " ".join(result.output.splitlines()[:2])
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
def test_every_reader_of_metadata_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(metadata.app, ["--most", "100", "--repeats", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "metadata.json").read_text())["points"]
    assert {(point["case"]["form"], point["reader"], point["collection"]) for point in points} == set(
        itertools.product(metadata.FORMS, metadata.READERS, ("off", "on"))
    )
    assert all(0 < point["cpu"]["least"] <= point["cpu"]["median"] for point in points)
    assert all(f"1 x 100 {form}" in result.output for form in metadata.FORMS)
    assert [path.name for path in tmp_path.glob("*.png")] == (["metadata.png"] if not chart.hindrance() else [])


def test_lists_on_the_command_line() -> None:
    argv = ["--stages", "1", "3", "--cold", "--dp", "2:4", "4:2", "--out", "x"]
    assert repeat_options(argv) == [
        "--stages", "1", "--stages", "3", "--cold", "--dp", "2:4", "--dp", "4:2", "--out", "x",
    ]  # fmt: skip
    assert words(["2:4,4:2", "2:2"], "") == words(["2:4 4:2 2:2"], "") == ["2:4", "4:2", "2:2"]
    assert words(None, "1,3") == ["1", "3"]


@pytest.mark.parametrize(
    ("params", "stages", "dp", "contenders"),
    [
        (["31M"], [1], ["2:2"], []),
        (["30M"], [0], ["2:2"], []),
        (["30M"], [1], ["2-2"], []),
        (["30M"], [1], ["2:2"], ["x"]),
    ],
)
def test_wrong_usage_is_refused(params: list[str], stages: list[int], dp: list[str], contenders: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        settings_of(params, stages, dp, contenders, False, 5, False, Path("x"), 1.0)


def test_disk_and_memory_are_reckoned_before_anything_is_made(tmp_path: Path) -> None:
    store = Store(tmp_path, 25 << 30, Launcher(tmp_path, tmp_path), lambda line: None)
    every = sources_of(CONTENDERS)
    assert store.fits(Case("270M", 3, 2, 4), every)
    assert not store.fits(Case("700M", 3, 2, 4), every)
    assert store.fits(Case("700M", 3, 2, 4), ["native", "dcp"])
    numel = MODELS["700M"].numel
    assert machine_need(Case("700M", 1, 2, 4)) - machine_need(Case("700M", 3, 2, 4)) == 6 * numel


def test_the_checkpoint_of_dcp_serves_every_stage(tmp_path: Path) -> None:
    store = Store(tmp_path, 1, Launcher(tmp_path, tmp_path), lambda line: None)
    stages = [Case("30M", stage, 2, 4) for stage in (1, 3)]
    assert len({store.folder(case, "dcp") for case in stages}) == 1
    assert len({store.folder(case, "native") for case in stages}) == 2
    assert store.conversion(stages[0]) == {}


def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    import os

    for age, name in enumerate(("new", "old", "needed")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(b"x" * 100)
        (tmp_path / name / "made.json").write_text("")
        os.utime(tmp_path / name / "made.json", (1000 - age, 1000 - age))
    store = Store(tmp_path, 300, Launcher(tmp_path, tmp_path), lambda line: None)
    store._make_room(50, {tmp_path.resolve() / "needed"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["needed", "new"]


def test_opened_files_are_counted_below_the_folder_alone(tmp_path: Path) -> None:
    opens = Opens()
    (tmp_path / "in").mkdir()
    for name in ("in/a", "in/b", "other"):
        (tmp_path / name).write_text("x")
    opens.start(tmp_path / "in")
    for name in ("in/a", "in/a", "in/b", "other"):
        (tmp_path / name).read_text()
    paths = opens.stop()
    (tmp_path / "in/a").read_text()
    assert [Path(path).name for path in paths] == ["a", "a", "b"]


def test_quick_has_every_contender() -> None:
    assert {key for case in QUICK for key in that_run(case, CONTENDERS)} == set(CONTENDERS) - {"ds-convert"}


def test_what_is_varied() -> None:
    cases = enumerate_flat([100, 10_000], [1, 100], [1, 8], [1, 4], most_universal=1000, stages=(3,))
    universal = [case.parameters for case in cases if case.source == "universal"]
    assert universal == [100]
    assert sorted((case.saved_dp, case.dp) for case in cases if case.series == FILES) == [
        (1, 1),
        (1, 4),
        (8, 1),
        (8, 4),
    ]


def test_points_and_lines() -> None:
    rounds = [
        [
            {
                "phases": {"plan": plan},
                "seconds": 2 * plan,
                "read_nbytes": 9,
                "tensor_nbytes": 5,
                "opens": 3,
                "files": 2,
            }
            for plan in plans
        ]
        for plans in ([1, 2], [9, 1], [4, 3])
    ]
    point = point_of(FlatCase(PARAMETERS, 3, 100, 1, 2, 2), 7, rounds)
    assert (point.phases, point.seconds, point.metadata_nbytes, point.opened) == ({"plan": 4}, 8, 4, 2)
    assert list(lines_of([point])[PARAMETERS]) == ["ZeRO-3, native"]


def test_growth_is_the_power() -> None:
    assert growth([(100, 2.0), (10_000, 2.0)]) == 0
    assert growth([(100, 2.0), (1000, 9.0), (10_000, 200.0)]) == pytest.approx(1)
    assert growth([(1, 2.0)]) == 0


def test_a_job_that_hangs_or_fails_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.launching.sys.executable", "/bin/false")
    with pytest.raises(JobFailed, match="failed with exit code 1"):
        Launcher(tmp_path, tmp_path).run(1, "save", {}, 10)
    script = tmp_path / "hang"
    script.write_text("#!/bin/sh\necho started\nsleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr("benchmarks.launching.sys.executable", str(script))
    with pytest.raises(JobFailed, match=r"(?s)ran past 0 s.*started"):
        Launcher(tmp_path, tmp_path).run(1, "save", {}, 0.4)


def test_a_played_rank_receives_what_the_others_sent() -> None:
    def work() -> list[list[object]]:
        mine = distributed.rank(), distributed.world_size()
        first = distributed.all_gather("tell", lambda: mine)
        return [first, distributed.all_gather("answer", lambda: sum(rank for rank, _ in first))]

    job = PlayedJob(3)
    expected = [[(0, 3), (1, 3), (2, 3)], [3, 3, 3]]
    assert job.run_all(work) == [expected] * 3
    assert job.run_first(work, trace=True) == expected
    assert job.traced_nbytes > 0 and job.received_nbytes == 3 * job.sent_nbytes
    assert distributed.world_size() == 1


def test_an_error_of_one_played_rank_is_raised() -> None:
    def work() -> None:
        if distributed.rank() == 1:
            raise KeyError("broken")
        distributed.all_gather("wait", lambda: None)

    with pytest.raises(KeyError, match="broken"):
        PlayedJob(2).run_all(work)


def test_the_cost_of_source_ranks_is_shown_with_its_growth() -> None:
    points = [
        ScalePoint(3, 1000, ranks, 16, 2048, 2 * ranks, 0.5, 0.01, 0.04, 3 << 20, 2048, 4096, 9) for ranks in (8, 64)
    ]
    assert growths([asdict(point) for point in points]) == {3: 0.0}
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(scale.table_of(points))
    assert "0.010 │  0.040 │       3.0" in console.export_text()
    universal = ScalePoint(3, 1000, 1, 16, 2048, 4001, 0.5, 9.0, 0.04, 3 << 20, 2048, 4096, 9, format="universal")
    assert growths([asdict(point) for point in (*points, universal)]) == {3: 0.0}


def test_the_checkpoint_of_a_large_model_is_exchanged_and_planned_without_files() -> None:
    point = scale.measure_model("mixtral-8x7b", Topology(dp=32, ep=8), job_ranks=3)
    assert (point.model, point.ranks, point.live_ranks, point.files, point.parameters) == (
        "mixtral-8x7b",
        64,
        32,
        321,
        995,
    )
    assert min(point.metadata_s, point.plan_s, point.extra_nbytes, point.items) > 0
    assert point.received_nbytes > 2 * point.sent_nbytes > 0
    assert growths([asdict(point)]) == {}


def test_what_a_rank_sends_does_not_grow_with_the_job() -> None:
    small, larger = map(collectives.of_zero3, (4, 32))
    assert larger.collectives == small.collectives and larger.collectives <= 10
    assert larger.sent_nbytes < 1.1 * small.sent_nbytes < 2000
    assert larger.received_nbytes < 8.2 * small.received_nbytes


@pytest.mark.slow
def test_bloom_is_exchanged_by_its_384_ranks() -> None:
    found = collectives.collectives_of(384, ScaleModel.load("bloom-176b"))
    assert found.collectives <= 14 and found.sent_nbytes < 10_000 and found.received_nbytes < 9 << 20


@pytest.mark.parametrize("ranks", [8, 64, 512, 4096])
def test_one_long_message_costs_each_rank_its_length_once(ranks: int) -> None:
    long, others = b"a" * (1 << 20), b"b" * 300
    job = PlayedJob(ranks, [[long, *[others] * (ranks - 1)]])
    every_head = ranks * (inline_nbytes(ranks) + 8)
    rounds, nbytes = job.cost
    assert rounds <= 3 and nbytes <= every_head + len(long) + ranks * len(others)


def test_pieces_that_are_merged_wait_for_the_network_once(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    path.write_bytes(bytes(1 << 20))
    with gaps.network(latency_s=0.02, bandwidth=1e12):
        alone, merged = (gaps.seconds_of(path, 4096, 40, gap_nbytes) for gap_nbytes in (0, 4096))
    assert alone > 0.2 > merged > 0.02  # 4 threads wait 10 times


def test_an_export_is_held_against_deepspeeds_script_and_the_disk() -> None:
    figures = {export.OURS: (2.0, 300 << 20), export.THEIRS: (30.0, 2 << 30), export.FLOOR: (1.0, 1 << 20)}
    samples = [
        export.ExportSample(name, seconds * slower, seconds + 1, seconds, peak)
        for name, (seconds, peak) in figures.items()
        for slower in (1, 9, 1)
    ]
    document = {"case": asdict(BIG), "points": list(map(asdict, samples)), "load_average": [0.1, 0.2]}
    assert [(aim.value, aim.is_met) for aim in export.aims(document)] == [(300.0, True)]
    assert export.aims({}) == []
    console = Console(file=io.StringIO(), width=150)
    console.print(export.table_of(document["points"]))
    assert "2,048" in console.file.getvalue()


def test_the_cost_of_a_command_is_that_of_its_process(tmp_path: Path) -> None:
    script = f"import time, pathlib; x = b'x' * (200 << 20); time.sleep(0.5); pathlib.Path({str(tmp_path / 'out')!r}).write_bytes(b'1')"
    sample = export.run("a", [sys.executable, "-c", script], tmp_path / "out")
    assert 0.5 < sample.seconds <= sample.on_disk and sample.peak_nbytes > 200 << 20
    with pytest.raises(RuntimeError, match="a failed: "):
        export.run("a", [sys.executable, "-c", "assert False"], tmp_path / "out")


def test_the_disk_is_asked_for_the_files_that_have_tensors(tmp_path: Path) -> None:
    for name, nbytes in (("a_optim_states.pt", 3 << 20), ("b_optim_states.pt", 2 << 20), ("model_states.pt", 1 << 12)):
        (tmp_path / name).write_bytes(bytes(nbytes))
    nbytes, seconds = cold.disk_seconds(tmp_path)
    assert nbytes == 5 << 20 and seconds > 0
