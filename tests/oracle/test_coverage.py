"""The proof that a job restores everything: it holds where it should, and fails on every planted hole and overlap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.scale_models import scale_metadata
from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import LoadPlan, ReadItem
from elastic_ckpt.planning.planner import LoadOptions, plan_load
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from tests import simulation_parallel as parallel
from tests.big_models import catalog_of, small_model
from tests.oracle.coverage import Proof, prove
from tests.oracle.intervals import coverage, covers_exactly, intervals, strided, together
from tests.simulation import cases as flat_cases
from tests.simulation import engine_of, saved
from tests.tools.sharded_models import RULES, sharded

slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

# --- intervals --------------------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(pairs, pairs, st.integers(1, 3))
def test_coverage_counts_every_integer(
    first: list[tuple[int, int]], second: list[tuple[int, int]], weight: int
) -> None:
    found = coverage([(intervals(first), 1), (intervals(second), weight)])
    counted = {}
    for start, stop, counts in zip(found.starts, found.stops, found.counts, strict=True):
        assert start < stop
        counted |= {number: tuple(counts) for number in range(start, stop)}
    for number in range(50):
        expected = sum(a <= number < b for a, b in first), weight * sum(a <= number < b for a, b in second)
        assert counted.get(number, (0, 0)) == expected


@given(pairs, pairs)
def test_covering_exactly_is_covering_each_integer_once(
    held: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    numbers = [number for a, b in held for number in range(a, b)]
    required = [number for a, b in wanted for number in range(a, b)]
    expected = sorted(numbers) == sorted(required) and len(set(required)) == len(required)
    assert covers_exactly(intervals(held), intervals(wanted)) == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3)), max_size=5))
def test_strided_copies_are_expanded_row_by_row(rows: list[tuple[int, int, int, int]]) -> None:
    rows = [(start, width, count, width + gap) for start, width, count, gap in rows]
    found = strided(rows)
    numbers = sorted(n for a, b in zip(found.starts, found.stops, strict=True) for n in range(a, b))
    assert numbers == sorted(
        start + row * stride + step
        for start, width, count, stride in rows
        for row in range(count)
        for step in range(width)
    )
    assert found.numel == len(numbers) == together([found, strided([])]).numel


# --- where it holds ---------------------------------------------------------------------------------------------------


@settings(slow, max_examples=25)
@given(parallel.parallel_cases())
def test_it_holds_for_every_topology(case: parallel.Case) -> None:
    saved_by, options = parallel.save(case), LoadOptions(rules=parallel.rules_of(case))
    target, ranks = case.target, []
    for stage in range(len(target.stages)):
        for rank in range(target.tp):
            for dp_rank in range(target.dp):
                local_state = parallel.engine(case, stage, rank, dp_rank)
                ranks.append((local_state, plan_load(saved_by.metadata, local_state, options)))
    proof = prove(saved_by.metadata, ranks)
    assert proof.faults == ()
    assert proof.ranks == len(ranks)
    assert proof.numel_saved == sum(
        chunk.range.numel for tensors in every_tensor(saved_by.metadata) for chunk in tensors.chunks
    )


def every_tensor(metadata: CheckpointMetadata) -> list[Any]:
    return [*metadata.tensors.values(), *(copy for copies in metadata.replicas.values() for copy in copies)]


@settings(slow, max_examples=25)
@given(flat_cases())
def test_without_tensor_parallelism_only_what_the_model_lacks_is_left_out(case: Any) -> None:
    options = LoadOptions(strict=False)
    ranks = []
    for rank in range(case.target.dp):
        local_state = engine_of(case, rank)
        ranks.append((local_state, plan_load(case.metadata, local_state, options)))
    proof = prove(case.metadata, ranks)
    assert {fault.name for fault in proof.faults} == set(case.extra)
    assert {fault.problem for fault in proof.faults} <= {
        "has no place on any rank",
        "is not read",
        "is read 0 times, not 0",
    }


SMALL = small_model()


def small_job(options: LoadOptions | None = None, **topology: int) -> VirtualJob:
    rules = LoadOptions.of(ElasticConfig(tp_preset="megatron-deepspeed-interleaved"))
    return VirtualJob(scale_metadata(SMALL), Topology(**topology), options or rules)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "tp", "pp"), [(3, 2, 2), (2, 4, 1), (4, 1, 3), (1, 1, 1)])
def test_it_holds_for_jobs_of_every_stage(stage: int, dp: int, tp: int, pp: int) -> None:
    job = small_job(dp=dp, tp=tp, pp=pp, zero_stage=stage, sub_group_numel=50)
    proof = prove(job.metadata, map(job.planned, range(job.topology.ranks)))
    assert proof.faults == ()
    assert proof.ranks == dp * tp * pp


@pytest.mark.parametrize("policy", ["strict", "first", "mean"])
@pytest.mark.parametrize("preset", ["bloom", "megatron-deepspeed-interleaved"])
def test_it_holds_where_means_are_taken(policy: str, preset: str) -> None:
    options = LoadOptions.of(ElasticConfig(tp_preset=preset, replicated_params=policy))
    job = small_job(options, dp=3, tp=4, pp=2)
    ranks = ranks_of(job)
    assert any(plan.reads.requantize_items for _, plan in ranks) == (policy == "mean" or preset == "bloom")
    assert prove(job.metadata, ranks).faults == ()


def test_it_holds_for_all_ranks_of_bloom() -> None:
    job = VirtualJob(
        catalog_of("bloom-176b"),
        Topology(dp=8, tp=4, pp=12),
        LoadOptions.of(ElasticConfig(tp_preset="bloom")),
    )
    proof = prove(job.metadata, map(job.planned, range(job.topology.ranks)))
    assert (proof.ranks, proof.faults) == (384, ())
    replicas = 3 * (70 * 6 * 14336 + 4 * 14336)  # copies on three more ranks: norms, row biases, final and first norm
    assert proof.numel_saved == 3 * (176_247_271_424 + 250_880 * 14336 + replicas)
    assert proof.numel_written == proof.numel_saved


# --- where it must fail -----------------------------------------------------------------------------------------------

Rank = tuple[LocalState, LoadPlan]
Change = Callable[[list[Rank]], None]


def ranks_of(job: VirtualJob) -> list[Rank]:
    return [job.planned(rank) for rank in range(job.topology.ranks)]


@lru_cache
def good(dp: int = 3, tp: int = 4, pp: int = 1, zero_stage: int = 1) -> tuple[CheckpointMetadata, tuple[Rank, ...]]:
    """A job of which the proof holds."""
    job = small_job(dp=dp, tp=tp, pp=pp, zero_stage=zero_stage)
    ranks = ranks_of(job)
    assert prove(job.metadata, ranks).holds
    return job.metadata, tuple(ranks)


def proof_after(change: Change, **topology: int) -> Proof:
    metadata, planned = good(**topology)
    ranks = list(planned)
    change(ranks)
    return prove(metadata, ranks)


def with_copies(rank: Rank, copies: Sequence[ReadItem]) -> Rank:
    plan = rank[1]
    return rank[0], dataclasses.replace(plan, reads=dataclasses.replace(plan.reads, items=tuple(copies)))


def changed(number: int, **changes: Any) -> Change:
    """Change one copy of rank 5."""

    def change(ranks: list[Rank]) -> None:
        copies = list(ranks[5][1].reads.items)
        values = {key: value(copies[number]) if callable(value) else value for key, value in changes.items()}
        copies[number] = dataclasses.replace(copies[number], **values)
        ranks[5] = with_copies(ranks[5], copies)

    return change


def problems(proof: Proof) -> set[str]:
    return {fault.problem for fault in proof.faults}


def copies_of_rank_5() -> int:
    return len(good()[1][5][1].reads.items)


@pytest.mark.parametrize("number", range(copies_of_rank_5()))
def test_a_copy_that_is_missing(number: int) -> None:
    def change(ranks: list[Rank]) -> None:
        copies = list(ranks[5][1].reads.items)
        del copies[number]
        ranks[5] = with_copies(ranks[5], copies)

    found = proof_after(change)
    assert "is not written" in problems(found)


@pytest.mark.parametrize("number", range(copies_of_rank_5()))
def test_a_copy_that_is_there_twice(number: int) -> None:
    def change(ranks: list[Rank]) -> None:
        copies = list(ranks[5][1].reads.items)
        ranks[5] = with_copies(ranks[5], [*copies, copies[number]])

    found = proof_after(change)
    assert "is written 2 times" in problems(found)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_offset": lambda copy: copy.target_offset + 1}, {"is not written"}),
        ({"numel": lambda copy: copy.numel - 1}, {"is not written", "is not read"}),
        ({"numel": lambda copy: copy.numel + 1}, set()),
        ({"byte_offset": lambda copy: copy.byte_offset + 4}, {"is not read"}),
        ({"file": lambda copy: copy.file + 1}, {"is not read"}),
    ],
)
def test_a_copy_that_is_displaced(changes: dict[str, Any], says: set[str]) -> None:
    seen: set[str] = set()
    for number in range(copies_of_rank_5()):
        found = proof_after(changed(number, **changes))
        assert not found.holds, number
        seen |= problems(found)
    assert says <= seen


def test_rows_of_a_strided_copy() -> None:
    strided_ones = [n for n, copy in enumerate(good(dp=1)[1][1][1].reads.items) if copy.rows > 1]
    assert strided_ones
    for number in strided_ones:
        for changes in (
            {"rows": lambda copy: copy.rows - 1},
            {"file_stride": lambda copy: copy.file_stride + 1},
            {"target_stride": lambda copy: copy.target_stride + 1},
        ):

            def change(ranks: list[Rank], changes: dict[str, Any] = changes, number: int = number) -> None:
                copies = list(ranks[1][1].reads.items)
                values = {key: value(copies[number]) for key, value in changes.items()}
                copies[number] = dataclasses.replace(copies[number], **values)
                ranks[1] = with_copies(ranks[1], copies)

            assert not proof_after(change, dp=1).holds, (number, changes)


def test_a_copy_from_another_tensor_of_the_same_file() -> None:
    """Masters into the moments and the other way round: all is written once, all is read once."""

    def change(ranks: list[Rank]) -> None:
        plan = ranks[5][1]
        numbers = [
            next(n for n, target in enumerate(plan.reads.targets) if target.key == key)
            for key in ("exp_avg", "exp_avg_sq")
        ]
        turned = dict(zip(numbers, reversed(numbers), strict=True))
        copies = [dataclasses.replace(copy, target=turned.get(copy.target, copy.target)) for copy in plan.reads.items]
        ranks[5] = with_copies(ranks[5], copies)

    found = proof_after(change)
    assert not found.holds
    assert all(
        problem.startswith(("is filled from exp_avg ", "is filled from exp_avg_sq ")) for problem in problems(found)
    )


def test_two_shards_that_change_places() -> None:
    """At the saved degree each rank gets its own shard."""

    def change(ranks: list[Rank]) -> None:
        plans = [plan for _, plan in ranks]
        ranks[:] = [(ranks[n][0], plans[n ^ 1]) for n in range(len(ranks))]  # ranks of one data-parallel rank

    found = proof_after(change, dp=1, tp=2, pp=1)
    assert not found.holds
    assert all(problem.startswith("is filled from elements") for problem in problems(found))


def test_the_fault_names_the_elements() -> None:
    """Of one copy: where its elements are missing, and which elements of which tensor nobody reads."""
    job = small_job(dp=3, tp=4, pp=1)
    ranks = ranks_of(job)
    plan = ranks[5][1]
    number = next(
        n
        for n, copy in enumerate(plan.reads.items)
        if copy.numel > 4 and copy.rows == 1 and plan.reads.targets[copy.target].key == MASTER
    )
    copy = plan.reads.items[number]
    ranks[5] = with_copies(
        ranks[5],
        [*plan.reads.items[:number], dataclasses.replace(copy, numel=copy.numel - 2), *plan.reads.items[number + 1 :]],
    )
    written, read = prove(job.metadata, ranks).faults
    assert (written.problem, written.name, written.key) == ("is not written", "flat partition 0", MASTER)
    assert (written.start, written.stop) == (copy.target_offset + copy.numel - 2, copy.target_offset + copy.numel)
    assert written.where == "pipeline stage 0, tensor-parallel rank 1, data-parallel rank 1"
    assert (read.problem, read.key, read.where) == ("is not read", MASTER, job.metadata.files[copy.file].path)
    chunk = next(
        e
        for e in job.metadata.tensors[read.name, MASTER].chunks
        if e.file == copy.file
        and e.byte_offset <= copy.byte_offset + 4 * copy.numel - 8 < e.byte_offset + 4 * e.range.numel
    )
    last = chunk.range.start + (copy.byte_offset - chunk.byte_offset) // 4 + copy.numel
    assert (read.start, read.stop) == (last - 2, last)
    assert str(read).startswith(f"elements {read.start} to {read.stop} of fp32 {read.name} (")


def test_a_rank_that_is_missing_or_there_twice() -> None:
    found = proof_after(lambda ranks: ranks.pop(7))
    assert "is held by no data-parallel rank" in problems(found)
    assert any("these were planned: [0, 2]" in fault.problem for fault in found.faults)
    found = proof_after(lambda ranks: ranks.append(ranks[7]))
    assert "is held 2 times, not 1" in problems(found)
    assert "is read 2 times, not 1" in problems(found)


def test_fragments_that_overlap_or_leave_a_hole() -> None:
    for distance, says in ((1, "is held by no data-parallel rank"), (-1, "is held 2 times, not 1")):

        def change(ranks: list[Rank], distance: int = distance) -> None:
            local_state, plan = ranks[5]
            number = next(n for n, part in enumerate(local_state.fragments) if part.range.start > 0)
            part = local_state.fragments[number]
            moved = FlatRange(part.range.start + distance, part.range.stop)
            parts = list(local_state.fragments)
            parts[number] = dataclasses.replace(part, range=moved)
            ranks[5] = dataclasses.replace(local_state, fragments=tuple(parts)), plan

        assert says in problems(proof_after(change)), distance


def test_a_gap_that_is_no_padding() -> None:
    def change(ranks: list[Rank]) -> None:
        local_state, plan = ranks[5]
        copy = plan.reads.items[0]
        targets = list(plan.reads.targets)
        hidden = FlatRange(copy.target_offset, copy.target_offset + copy.numel)
        targets[copy.target] = dataclasses.replace(targets[copy.target], gaps=(*targets[copy.target].gaps, hidden))
        reads = dataclasses.replace(plan.reads, targets=tuple(targets), items=plan.reads.items[1:])
        ranks[5] = local_state, dataclasses.replace(plan, reads=reads)

    assert {"is left out, although it is no padding", "is not read"} <= problems(proof_after(change))


def test_a_state_that_is_forgotten() -> None:
    def change(ranks: list[Rank]) -> None:
        local_state, plan = ranks[5]
        number = next(n for n, target in enumerate(plan.reads.targets) if target.key == "exp_avg_sq")
        kept = [copy for copy in plan.reads.items if copy.target != number]
        moved = [dataclasses.replace(copy, target=copy.target - (copy.target > number)) for copy in kept]
        targets = plan.reads.targets[:number] + plan.reads.targets[number + 1 :]
        reads = dataclasses.replace(plan.reads, targets=targets, items=tuple(moved))
        ranks[5] = local_state, dataclasses.replace(plan, reads=reads)

    assert {"has no target", "is not read"} <= problems(proof_after(change))


def test_a_parameter_that_is_not_restored() -> None:
    def change(ranks: list[Rank]) -> None:
        for number, (local_state, plan) in enumerate(ranks):
            outcomes = [
                dataclasses.replace(out, names=tuple(name for name in out.names if name != "3.mlp.dense_h_to_4h.bias"))
                for out in plan.outcomes
            ]
            ranks[number] = local_state, dataclasses.replace(plan, outcomes=tuple(outcomes))

    found = proof_after(change)
    assert {(fault.problem, fault.name) for fault in found.faults} == {("is not restored", "3.mlp.dense_h_to_4h.bias")}


def test_copies_that_nobody_compares() -> None:
    """Of replicated parameters one rank's copy is taken: the others must at least be looked at."""

    def change(ranks: list[Rank]) -> None:
        ranks[:] = [(local_state, dataclasses.replace(plan, replica_checks=())) for local_state, plan in ranks]

    found = proof_after(change)
    assert problems(found) == {"is not read"}
    # of two saved tensor-parallel ranks the second one's norms and biases, and the last stage's tied weights
    kinds = {fault.name.partition(".")[2] for fault in found.faults}
    assert {"input_layernorm.weight", "mlp.dense_4h_to_h.bias", "embed.word_embeddings.weight"} <= kinds
    assert not any(name.endswith(("query_key_value.weight", "dense_h_to_4h.weight")) for name in kinds)


def test_shares_of_another_rank() -> None:
    """Without ZeRO ranks read a share each and send it around: what a rank does not own would not be sent."""

    def change(ranks: list[Rank]) -> None:
        first, second = ranks[0], ranks[1]
        ranks[0], ranks[1] = (
            (first[0], with_copies(first, second[1].reads.items)[1]),
            (second[0], with_copies(second, first[1].reads.items)[1]),
        )

    found = proof_after(change, dp=2, tp=1, pp=1, zero_stage=0)
    assert problems(found) == {"is read by a rank that does not send it to the others"}


def test_a_hole_in_what_ranks_fill_together() -> None:
    def change(ranks: list[Rank]) -> None:
        ranks[1] = with_copies(ranks[1], ranks[1][1].reads.items[1:])

    found = proof_after(change, dp=2, tp=1, pp=1, zero_stage=0)
    assert {"is not written", "is not read"} <= problems(found)
    assert any(fault.where.endswith("its ranks together") for fault in found.faults)


def test_bytes_that_belong_to_no_tensor() -> None:
    def change(ranks: list[Rank]) -> None:
        ranks[5] = with_copies(ranks[5], [dataclasses.replace(copy, byte_offset=8) for copy in ranks[5][1].reads.items])

    assert "is read, and is of no tensor" in problems(proof_after(change))


def test_a_target_that_is_written_beyond_its_end() -> None:
    def change(ranks: list[Rank]) -> None:
        copies = list(ranks[5][1].reads.items)
        copies[-1] = dataclasses.replace(copies[-1], target_offset=10**6)
        ranks[5] = with_copies(ranks[5], copies)

    assert "is written beyond its ends" in problems(proof_after(change))


def test_buffers_that_each_rank_reads_for_itself() -> None:
    metadata = saved({"a": (4,)}, wholes={("steps", BUFFER): ((5,), "int64")})
    metadata = dataclasses.replace(
        metadata, source=dataclasses.replace(metadata.source, zero_stage=3, partition_degree=2)
    )
    job = VirtualJob(metadata, Topology(dp=2, zero_stage=3), LoadOptions())
    ranks = ranks_of(job)
    assert prove(job.metadata, ranks).holds
    plan = ranks[1][1]
    kept = [copy for copy in plan.reads.items if plan.reads.targets[copy.target].key != BUFFER]
    assert problems(prove(job.metadata, [ranks[0], with_copies(ranks[1], kept)])) == {
        "is not written",
        "is read 1 times, not 2",
    }


def test_rows_of_a_vocabulary_that_was_not_saved_are_padding() -> None:
    """20 rows on two ranks; on eight, 3 each are 24."""
    job = VirtualJob(sharded(2), Topology(tp=8), LoadOptions(rules=RULES))
    ranks = ranks_of(job)
    assert prove(job.metadata, ranks).holds
    gaps = [target.gaps for _, plan in ranks for target in plan.reads.targets if target.key == MASTER]
    assert np.sum([gap.numel for held in gaps for gap in held]) >= 4 * 4
