"""Comparing resume sheets: no clean resume is accused, and each fault has a name of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.resume_sheet import (
    BATCH,
    CODE,
    COMPONENTS,
    DATA,
    HYPERPARAMETERS,
    LOSSES,
    LR,
    MOST_LOSSES,
    OPTIMIZER,
    PRECISION,
    RNG,
    WEIGHTS,
    ResumeSheet,
    compare_sheets,
    goes_on,
)
from elastic_ckpt.core.text import counted

NUMBERS = st.one_of(st.booleans(), st.integers(-9, 10**9), st.floats(allow_nan=True))
TEXTS = st.text(max_size=9)
SHEETS = st.builds(
    ResumeSheet,
    step=st.integers(0, 10**7),
    world_size=st.integers(1, 4096),
    global_batch=st.integers(1, 10**6),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    groups=st.lists(
        st.fixed_dictionaries({"lr": st.floats(0, 1), "betas": st.lists(st.floats(0, 1), min_size=2, max_size=2)}, optional={"eps": NUMBERS}),
        max_size=4,
    ),
    data=st.none() | st.dictionaries(TEXTS, NUMBERS, max_size=4),
    rng=st.dictionaries(TEXTS, TEXTS, max_size=4),
    versions=st.dictionaries(TEXTS, TEXTS, max_size=4),
    losses=st.lists(st.floats(allow_nan=True), max_size=MOST_LOSSES),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(sheet=SHEETS, ranks=st.integers(1, 4096), rounding=st.floats(-1e-5, 1e-5), handed=st.integers(0, MOST_LOSSES))
def test_no_clean_resume_is_accused(sheet: ResumeSheet, ranks: int, rounding: float, handed: int) -> None:
    """Of other ranks, through the file, with losses that are rounded otherwise, of which it may have fewer."""
    live = sheet.model_dump() | {"world_size": ranks}
    live["losses"] = [loss * (1 + rounding) for loss in sheet.losses][
        len(sheet.losses) - min(handed, len(sheet.losses)) :
    ]
    resumed = ResumeSheet.model_validate(json.loads(json.dumps(live)))
    assert compare_sheets(sheet, resumed) == compare_sheets(resumed, sheet) == []


PLAIN: dict[str, Any] = {
    "step": 8,
    "world_size": 2,
    "global_batch": 24,
    "precision": "bf16",
    "groups": [{"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}, {"lr": 2e-3, "weight_decay": 0}],
    "data": {"samples_consumed": 192, "seed": 7, "length": 960},
    "rng": {"python": "a", "torch": "b"},
    "versions": {"torch": "2.13.0", "script": "train.py a"},
    "losses": [3.0, 2.0, 1.0],
}


@pytest.mark.parametrize(
    ("fault", "component", "detail"),
    [
        ({"versions": {"torch": "2.14.0", "script": "train.py a"}}, CODE, "torch 2.13.0 -> 2.14.0"),
        ({"versions": {"torch": "2.13.0", "script": "train.py b"}}, CODE, "script train.py a -> train.py b"),
        ({"precision": "fp16"}, PRECISION, "bf16 -> fp16"),
        ({"global_batch": 12}, BATCH, "24 -> 12"),
        ({"data": {"samples_consumed": 96, "seed": 7, "length": 960}}, DATA, "samples_consumed 192 -> 96"),
        ({"data": {"samples_consumed": 192, "seed": 8, "length": 960}}, DATA, "seed 7 -> 8"),
        ({"groups": [{"lr": 1e-3}, {"lr": 3e-3}]}, LR, "lr 0.002 -> 0.003 (param group 1)"),
        ({"groups": [{"betas": [0.9, 0.99]}, {}]}, HYPERPARAMETERS, "betas [0.9, 0.95] -> [0.9, 0.99] (param group 0)"),
        ({"groups": [{}]}, HYPERPARAMETERS, "2 -> 1 param group"),
        ({"rng": {"python": "a", "torch": "c"}}, RNG, "other states of torch"),
        ({"losses": [2.0, 1.1]}, LOSSES, "1 -> 1.1, number 1 from the end"),
        ({"losses": [float("nan")]}, LOSSES, "1 -> nan, number 1 from the end"),
    ],
)
def test_each_fault_has_its_own_name(fault: dict[str, Any], component: str, detail: str) -> None:
    saved, live = ResumeSheet(**PLAIN), ResumeSheet(**PLAIN | fault)
    (found,) = compare_sheets(saved, live)
    assert (found.component, found.detail) == (component, detail)
    words = goes_on(saved, live, [found])
    assert goes_on(saved, live, []) != words or component in (RNG, LOSSES)


def test_causes_come_before_what_follows_and_what_goes_on_is_said_in_words() -> None:
    saved, live = ResumeSheet(**PLAIN), ResumeSheet(**PLAIN | {"losses": [9], "rng": {"torch": "x"}, "global_batch": 1})
    assert [each.component for each in compare_sheets(saved, live)] == [BATCH, RNG, LOSSES]
    assert COMPONENTS.index(RNG) < COMPONENTS.index(WEIGHTS) < COMPONENTS.index(OPTIMIZER)
    order = "data order (samples_consumed 192, seed 7, length 960)"
    rest = f"lr 0.001, 0.002, hyperparameters, {order}, precision bf16, code versions"
    assert goes_on(saved, saved, []) == f"batch 24, {rest}"
    assert goes_on(saved, live, compare_sheets(saved, live)) == rest


def test_what_one_side_does_not_tell_is_neither_compared_nor_said_to_go_on() -> None:
    saved, live = ResumeSheet(**PLAIN), ResumeSheet(**PLAIN | {"data": None, "groups": [], "losses": [], "rng": {}})
    assert compare_sheets(saved, live) == compare_sheets(live, saved) == []
    assert goes_on(saved, live, []) == goes_on(live, saved, []) == "batch 24, precision bf16, code versions"


def with_groups(*rates: float) -> ResumeSheet:
    groups: list[Any] = [{"lr": rate, "eps": 1e-8} for rate in rates]
    return ResumeSheet(step=3, world_size=2, global_batch=12, precision="bf16", groups=groups)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), rates=st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_groups_in_another_order_are_compared_with_their_own(data: st.DataObject, rates: list[float]) -> None:
    sources = data.draw(st.lists(st.integers(0, len(rates) - 1), min_size=1, max_size=5))
    live = [rates[source] for source in sources]
    of_each = [[source] for source in sources]
    found = compare_sheets(with_groups(*rates), with_groups(*live), of_each)
    counts = (
        [] if len(live) == len(rates) else [f"hyperparameters: {len(rates)} -> {counted(len(live), 'param group')}"]
    )
    assert list(map(str, found)) == counts
    number = data.draw(st.integers(0, len(live) - 1))
    live[number] += 1
    found = compare_sheets(with_groups(*rates), with_groups(*live), of_each)
    expected = f"lr: lr {rates[sources[number]]} -> {live[number]} (param group {number})"
    assert [str(each) for each in found if each.component == LR] == [expected]


@pytest.mark.parametrize(
    ("saved", "live", "sources", "said"),
    [
        ([0.1, 0.2], [0.2], [[0, 1]], ["lr 0.1 -> 0.2 (param group 0)"]),
        ([0.1, 0.1], [0.1], [[0, 1]], []),
        ([0.1], [0.1, 0.3], [[0], []], ["0.3 (param group 1, of which nothing was saved)"]),
        # whose is whose is not known
        ([0.1, 0.2], [0.1], None, ["0.1, 0.2 -> 0.1, in other param groups"]),
        ([0.1, 0.2], [0.1, 0.2, 0.2], None, ["0.1, 0.2 -> 0.1, 0.2, in other param groups"]),
        ([0.1, 0.1], [0.1], None, []),
    ],
)
def test_an_lr_goes_on_where_that_of_no_parameter_is_another(
    saved: list[float], live: list[float], sources: list[list[int]] | None, said: list[str]
) -> None:
    found = compare_sheets(with_groups(*saved), with_groups(*live), sources)
    assert [each.detail for each in found if each.component == LR] == said
    assert ("lr " in goes_on(with_groups(*saved), with_groups(*live), found)) == (not said)


def test_sheets_of_any_size_are_told_apart_in_few_words() -> None:
    """A file of a MiB may have as many param groups as it has room for, or one value of all its length."""
    facts = {"step": 1, "world_size": 1, "global_batch": 8}
    many = [
        ResumeSheet(
            **facts,
            precision=letter * 100_000,
            groups=[{"lr": number + at, "b": number + at} for at in range(20_000)],
            data={f"{key}": f"{number}" * 9000 for key in range(300)},
            rng={f"{key}": letter for key in range(5000)},
            versions={"x" * 9000: letter},
        )
        for number, letter in enumerate("ab", 1)
    ]
    found = compare_sheets(*many)
    assert len(found) < 300 and max(len(each.detail) for each in found) < 1000
    lr = [each.detail for each in found if each.component == LR]
    assert lr[0] == "lr 1 -> 2 (param group 0)"
    assert lr[-1] == f"and {20_000 - (len(lr) - 1)} more"
    assert {LR, PRECISION, DATA, RNG, HYPERPARAMETERS, CODE} == {each.component for each in found}
