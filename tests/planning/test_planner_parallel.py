"""Any tensor-, pipeline- and data-parallel degree to any other: every element of every live shard, against torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.core.read_plan import LoadPlan, ReplicaCheck, TargetTensor, names_with
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from tests.simulation import simulate, written
from tests.simulation_parallel import (
    NAMES,
    TIED,
    Case,
    engine,
    expected,
    keys_of,
    parallel_cases,
    rules_of,
    save,
)

slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def gap_places(target: TargetTensor) -> list[int]:
    return [place for gap in target.gaps for place in range(gap.start, gap.stop)]


def holes(values: Sequence[int]) -> list[int]:
    return [place for place, value in enumerate(values) if value == -1]


@settings(slow, max_examples=100)
@given(parallel_cases())
def test_every_live_rank_gets_exactly_the_elements_of_its_shards(case: Case) -> None:
    saved, options = save(case), LoadOptions(rules=rules_of(case))
    side = case.target
    for stage in range(len(side.stages)):
        for rank in range(side.tp):
            for dp_rank in range(side.dp):
                plan = plan_load(saved.metadata, engine(case, stage, rank, dp_rank), options)
                wanted = expected(case, stage, rank, dp_rank)
                assert simulate(plan, saved.files) == wanted
                for target in plan.reads.targets:
                    assert gap_places(target) == holes(wanted[target.key, target.flat, target.name])
                assert not plan.reads.requantize_items
                assert names_with(plan.outcomes, "fresh") == names_with(plan.outcomes, "ignored") == ()


@settings(slow, max_examples=40)
@given(parallel_cases(), st.integers(1, 9))
def test_ranks_of_a_job_compare_each_element_of_each_replica_and_tied_replica_once(case: Case, grain: int) -> None:
    saved, options = save(case), LoadOptions(rules=rules_of(case))
    source, target = case.source, case.target
    plans: list[LoadPlan] = []
    with patch("elastic_ckpt.planning.planner.GRAIN_NUMEL", grain):
        for stage in range(len(target.stages)):
            for rank in range(target.tp):
                every = (engine(case, stage, rank, dp) for dp in range(target.dp))
                plans += [plan_load(saved.metadata, one, options) for one in every]
    wanted: Counter[tuple[str, str, int]] = Counter()
    for name in case.said:
        for key in keys_of(name):
            if NAMES[name] == "replicated" and source.tp > 1 and source.tp != target.tp:
                wanted[name, key, source.tp] += 1
            if name == TIED and len(source.stages) > 1:
                wanted[name, key, 2] += source.tp
    tiled: dict[tuple[str, str, int, int], list[ReplicaCheck]] = {}
    for one in (comparison for plan in plans for comparison in plan.replica_checks):
        tiled.setdefault((one.name, one.key, len(one.replicas), one.number), []).append(one)
        first, *others = (written(replica, one.numel, saved.files) for replica in one.replicas)
        assert -1 not in first
        assert all(other == first for other in others)
    assert Counter(what[:3] for what in tiled) == wanted
    for pieces in tiled.values():
        position = 0
        for piece in sorted(pieces, key=lambda piece: piece.start):
            assert piece.start == position and piece.numel
            position += piece.numel
        assert position == sum(piece.numel for piece in pieces)
