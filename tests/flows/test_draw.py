"""Flows are drawn on all axes, written down and read again, and reduced to what fails."""

from __future__ import annotations

import random
from dataclasses import fields

from tests.flows.draw import Flow, flow_of, random_flow, reduced
from tests.flows.parts import choices, is_possible

FLOWS = [random_flow(random.Random(seed), choices(), is_possible) for seed in range(300)]


def test_all_choices_of_all_axes_are_drawn() -> None:
    for axis, some in choices().items():
        drawn = {getattr(flow, axis) for flow in FLOWS}
        assert len(drawn) > 1 and drawn <= {*some, getattr(Flow(), axis)}, axis
    assert {field.name for field in fields(Flow)} == set(choices())


def test_a_flow_is_read_as_it_was_written() -> None:
    assert all(flow_of(flow.as_json()) == flow for flow in FLOWS)


def test_a_failing_flow_is_reduced_to_what_it_needs() -> None:
    flow = Flow(3, 0, "bf16", "sgd", "none", "plain", "LoraLM", trained=1)
    assert reduced(flow, lambda other: other.stage == 0 and other.client == "plain") == Flow(stage=0, client="plain")
