"""Flows are drawn on all axes, written down and read again, and reduced to what fails."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from tests.drawn import plainest
from tests.flows.draw import KINDS, EngineFlow, Flow, flow_of, random_flow, simpler
from tests.flows.parts import choices, is_possible

FLOWS = {
    kind: [random_flow(random.Random(seed), kind, choices(kind), is_possible) for seed in range(300)]
    for kind in KINDS.values()
}


@pytest.mark.parametrize("kind", FLOWS)
def test_all_choices_of_all_axes_are_drawn(kind: type[Flow]) -> None:
    for axis, some in choices(kind).items():
        drawn = {getattr(flow, axis) for flow in FLOWS[kind]}
        assert len(drawn) > 1 and drawn <= {*some, getattr(kind(), axis)}, axis
    assert {field.name for field in fields(kind)} == set(choices(kind))


@pytest.mark.parametrize("kind", FLOWS)
def test_a_flow_is_read_as_it_was_written(kind: type[Flow]) -> None:
    assert all(flow_of(flow.as_json()) == flow for flow in FLOWS[kind])


def test_a_failing_flow_is_reduced_to_what_it_needs() -> None:
    flow = EngineFlow(3, 0, "bf16", "sgd", "none", "plain", "LoraLM", trained=1)
    shortest = plainest(flow, simpler, lambda other: other.stage == 0 and other.client == "plain")
    assert shortest == EngineFlow(stage=0, client="plain")
