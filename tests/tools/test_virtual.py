"""Jobs that do not run: what their ranks hold, against DeepSpeed's own arithmetic and element-wise simulations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import chain
from unittest import mock

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import partition_balanced
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import chunks_of
from elastic_ckpt.core.local_state import LocalState
from elastic_ckpt.core.metadata import BUFFER, FROZEN, MASTER, CheckpointMetadata
from elastic_ckpt.core.state_kinds import PER_PARAMETER, REPLICATED, BlockFormat, Codebook
from elastic_ckpt.errors import MismatchError, UnsupportedError
from elastic_ckpt.formats.merging import merge_stages
from elastic_ckpt.planning.planner import LoadOptions, match, plan_load
from elastic_ckpt.tools import virtual
from elastic_ckpt.tools.virtual import Topology, VirtualJob, _partition, stages_of
from tests.simulation import Element, elements_of, saved
from tests.tools.sharded_models import RULES, sharded

OPTIONS = LoadOptions()


def job_of(metadata: CheckpointMetadata, options: LoadOptions = OPTIONS, **topology: int) -> VirtualJob:
    return VirtualJob(metadata, Topology(**topology), options)


# --- topology ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 1, 1), (3, 2, 4), (2, 5, 1), (1, 3, 2)])
def test_ranks_are_numbered_as_deepspeed_numbers_them(pp: int, dp: int, tp: int) -> None:
    theirs, ours = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp), Topology(dp=dp, tp=tp, pp=pp)
    places = [ours.coordinates(rank) for rank in range(ours.ranks)]
    assert len(places) == ours.ranks == pp * dp * tp
    for rank, place in enumerate(places):
        coordinates = theirs.get_coord(rank)
        assert (place.pp_rank, place.partition_rank, place.tp_rank) == (
            coordinates.pipe,
            coordinates.data,
            coordinates.model,
        )
        assert (place.pp, place.partition_degree, place.tp) == (pp, dp, tp)


# --- partitions -------------------------------------------------------------------------------------------------------


def held_elements(local_state: LocalState, flat: int) -> list[Element | None]:
    """A flat partition, element by element; ``None`` is padding."""
    held: list[Element | None] = [None] * local_state.flats[flat].numel
    for part in local_state.fragments:
        if part.flat == flat:
            for step in range(part.range.numel):
                assert held[part.flat_offset + step] is None, "fragments overlap"
                held[part.flat_offset + step] = (part.name, MASTER, part.range.start + step)
    return held


def in_equal_parts(flat: Sequence[Element | None], count: int, unit: int) -> list[list[Element | None]]:
    padded = list(flat)
    while len(padded) % (count * unit):
        padded.append(None)
    part = len(padded) // count
    return [padded[rank * part : (rank + 1) * part] for rank in range(count)]


SHAPES = {"a.weight": (7, 3), "b.weight": (5,), "c.weight": (), "d.weight": (4, 2, 3), "e.bias": (9,)}
GROUPS = {"b.weight": 1, "e.bias": 1}


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("alignment", [1, 4])
def test_stages_1_and_2_cut_each_group_into_equal_parts(dp: int, alignment: int) -> None:
    metadata = saved(SHAPES, groups=GROUPS, hyperparameters=({"lr": 1.0}, {"lr": 2.0}))
    members = [["a.weight", "c.weight", "d.weight"], ["b.weight", "e.bias"]]
    job = job_of(metadata, dp=dp, zero_stage=2, alignment=alignment)
    for group, names in enumerate(members):
        flat = [element for name in names for element in elements_of(name, MASTER, SHAPES[name])]
        for rank, expected in enumerate(in_equal_parts(flat, dp, max(alignment, 2))):
            local_state = job.local_state(rank)
            assert local_state.flats[group].members == tuple(names)
            assert local_state.flats[group].group == group
            assert held_elements(local_state, group) == expected


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 6, 20, 1000])
def test_stage_3_cuts_each_parameter_and_groups_at_sub_group_size(dp: int, limit: int) -> None:
    metadata = saved(SHAPES, groups=GROUPS, hyperparameters=({"lr": 1.0}, {"lr": 2.0}))
    job = job_of(metadata, dp=dp, zero_stage=3, sub_group_numel=limit)
    expected_groups: list[list[str]] = []
    for names in (["a.weight", "c.weight", "d.weight"], ["b.weight", "e.bias"]):
        gathered, numel = [], 0
        for name in names:
            gathered.append(name)
            numel += -(-math.prod(SHAPES[name]) // dp)
            if numel >= limit or name == names[-1]:
                expected_groups.append(gathered)
                gathered, numel = [], 0
    for rank in range(dp):
        local_state = job.local_state(rank)
        assert [list(flat.members) for flat in local_state.flats] == expected_groups
        for number, names in enumerate(expected_groups):
            parts = [in_equal_parts(elements_of(name, MASTER, SHAPES[name]), dp, 1)[rank] for name in names]
            assert held_elements(local_state, number) == [element for part in parts for element in part]


def test_without_zero_each_parameter_is_a_flat_tensor_that_all_ranks_hold() -> None:
    job = job_of(saved(SHAPES), dp=2, zero_stage=0)
    for rank in range(2):
        local_state = job.local_state(rank)
        assert [(flat.members, flat.numel, flat.replicated) for flat in local_state.flats] == [
            ((name,), math.prod(shape), True) for name, shape in SHAPES.items()
        ]
    assert not any(flat.replicated for flat in job_of(saved(SHAPES), zero_stage=0).local_state(0).flats)


def test_buffers_are_whole_and_stage_3_cuts_frozen_weights() -> None:
    wholes = {
        ("steps", BUFFER): ((5,), "int64"),
        ("base", FROZEN): ((3, 3), "bfloat16"),
        ("tiny", FROZEN): ((1,), "float32"),
    }
    metadata = saved({"a": (4,)}, wholes=wholes)
    ranges = {}
    for stage in (1, 3):
        job = job_of(metadata, dp=2, zero_stage=stage)
        every = [job.local_state(rank).wholes for rank in range(2)]
        assert [(whole.name, whole.key, whole.dtype) for whole in every[0]] == [
            ("steps", BUFFER, "int64"),
            ("base", FROZEN, "bfloat16"),
            ("tiny", FROZEN, "float32"),
        ]
        ranges[stage] = [[(whole.range.start, whole.range.stop, whole.replicated) for whole in held] for held in every]
    assert ranges[1] == [[(0, 5, True), (0, 9, True), (0, 1, True)]] * 2
    assert ranges[3] == [
        [(0, 5, True), (0, 5, False), (0, 1, False)],
        [(0, 5, True), (5, 9, False), (0, 0, False)],
    ]


@pytest.mark.parametrize(("zero_stage", "dp", "own"), [(3, 2, True), (3, 3, False), (2, 2, False)])
def test_ranks_of_an_unchanged_zero_3_job_read_their_own_buffers(zero_stage: int, dp: int, own: bool) -> None:
    metadata = saved({"a": (4,)}, wholes={("steps", BUFFER): ((5,), "int64")})
    source = dataclasses.replace(metadata.source, zero_stage=zero_stage, partition_degree=2)
    job = job_of(dataclasses.replace(metadata, source=source), dp=dp, zero_stage=3)
    for rank in range(dp):
        target = next(target for target in job.planned(rank)[1].reads.targets if target.key == BUFFER)
        assert target.replicated != own


def test_names_are_those_after_the_users_renames() -> None:
    job = job_of(saved({"old.a": (4,), "b": (3,)}), LoadOptions(ElasticConfig(rename=[(r"^old\.", "new.")])), dp=2)
    plan = job.planned(0)[1]
    assert [flat.members for flat in job.local_state(0).flats] == [("new.a", "b")]
    assert {outcome.names for outcome in plan.outcomes if outcome.role == MASTER} == {("b", "new.a")}
    assert "rename: 1 names go by '^old\\\\.'" in plan.notes


# --- tensor parallelism -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_of_another_degree_follow_from_the_rules(tp: int) -> None:
    job = job_of(sharded(2), LoadOptions(rules=RULES), tp=tp)
    expected = {"words": (-(-20 // tp), 4), "0.up": (16 // tp, 4), "0.down": (4, 16 // tp), "0.norm": (4,)}
    for rank in range(tp):
        local_state = job.local_state(rank)
        assert local_state.model.coordinates.tp_rank == rank
        assert {part.name: part.shape for part in local_state.fragments} == expected
        assert {name: layout.shapes for name, layout in local_state.model.layouts.items()} == {
            name: (shape,) * tp for name, shape in expected.items()
        }


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"dimension 0 of this parameter does not divide") as caught:
        job_of(sharded(2), LoadOptions(rules=RULES), tp=3)
    assert (caught.value.parameter, caught.value.expected, caught.value.found) == ("0.up", "a multiple of 3", "16")


def test_a_parameter_that_nobody_knows_is_refused_with_the_lines_that_settle_it() -> None:
    with pytest.raises(MismatchError, match="it is not known how this parameter is sharded") as caught:
        job_of(sharded(2), tp=4)
    assert caught.value.parameter == "words, 0.up, 0.down"
    assert '"tp_rules": [{"pattern": "words", "kind": "column"}]' in str(caught.value.remedy)
    assert "nothing yet in the live model" in str(caught.value.found)


@pytest.mark.parametrize(
    "topology", [{"dp": 3, "tp": 4}, {"dp": 2, "tp": 1, "zero_stage": 3}, {"dp": 2, "tp": 2, "zero_stage": 0}]
)
def test_what_ranks_share_does_not_change_their_plans(topology: dict[str, int]) -> None:
    """The job matches the checkpoint once with each tensor-parallel rank; a load does on every rank."""
    options = LoadOptions(rules=RULES)
    job = job_of(sharded(2), options, **topology)
    with mock.patch.object(virtual, "match", side_effect=match) as matched:
        planned = [job.planned(rank) for rank in range(job.topology.ranks)]
    assert matched.call_count == job.topology.tp
    for rank, found in enumerate(planned):
        assert found == (job.local_state(rank), plan_load(job.metadata, job.local_state(rank), options))


# --- stages -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 60))
@example([0, 1], 4, 1)
@example([0, 0, 7, 3], 2, 5)
def test_layers_are_balanced_as_deepspeed_balances_them(numels: list[int], pp: int, tied: int) -> None:
    weights = {f"{layer}.weight": numel for layer, numel in enumerate(numels) if numel}
    assume(weights)
    names = {"tied_modules.embed.weight": tied, **weights} if tied else weights
    last = max(int(name.partition(".")[0]) for name in weights)
    layers = [weights.get(f"{layer}.weight", 0) for layer in range(last + 1)]
    before = [tied] if tied and layers[0] else []
    if tied and not layers[0]:  # numbers count the tied layer too: it is the one in front of the first that has weights
        layers[min(int(name.partition(".")[0]) for name in weights) - 1] = tied
    held = [*before, *layers, *([tied] if tied else [])]
    bounds = partition_balanced(held, pp) if pp > 1 else [0, len(held)]
    expected = {"tied_modules.embed.weight": tuple({0, pp - 1})} if tied else {}
    for name in weights:
        place = int(name.partition(".")[0]) + len(before)
        expected[name] = (next(stage for stage in range(pp) if bounds[stage] <= place < bounds[stage + 1]),)
    if len(set(chain(*expected.values()))) < pp:
        with pytest.raises(UnsupportedError, match="stages without a parameter"):
            stages_of(names, pp, saved({"a": (1,)}))
    else:
        assert stages_of(names, pp, saved({"a": (1,)})) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9) | st.integers(0, 10**12), min_size=1, max_size=24).map(tuple), st.integers(1, 9))
def test_bounds_of_stages_are_deepspeeds_of_equal_choices_too(weights: tuple[int, ...], pp: int) -> None:
    assert list(_partition(weights, pp)) == [int(bound) for bound in partition_balanced(list(weights), pp)]


#: Cut otherwise than a balance of parameters would cut it.
STAGES = [
    {"tied_modules.e.words": (6, 2), "tied_modules.e.norm": (2,), "1.a": (40,)},
    {"2.a": (3,), "3.a": (3,), "tied_modules.e.words": (6, 2)},
]


def pipeline() -> CheckpointMetadata:
    return merge_stages([saved(shapes) for shapes in STAGES])


def held_by(job: VirtualJob) -> list[set[str]]:
    ranks = range(0, job.topology.ranks, job.topology.dp * job.topology.tp)  # the first of each stage
    return [{name for flat in job.local_state(rank).flats for name in flat.members} for rank in ranks]


def test_as_many_stages_as_were_saved_hold_what_they_held() -> None:
    assert held_by(job_of(pipeline(), pp=2)) == [set(STAGES[0]), set(STAGES[1])]
    job = job_of(pipeline(), pp=2)
    assert job.local_state(0).model.elsewhere == {"2.a", "3.a"}


def test_other_numbers_of_stages_share_tied_weights_but_not_what_one_stage_alone_held() -> None:
    first, second, third = held_by(job_of(pipeline(), pp=3))
    assert "tied_modules.e.words" in first & third - second
    assert "tied_modules.e.norm" in first - second - third
    assert held_by(job_of(pipeline(), pp=1)) == [set(STAGES[0]) | set(STAGES[1])]


def test_a_model_without_numbered_layers_has_one_stage() -> None:
    with pytest.raises(UnsupportedError, match="numbered layers") as caught:
        job_of(saved({"embed.weight": (4,), "0.weight": (3,)}), pp=2)
    assert caught.value.parameter == "embed.weight"
    assert caught.value.remedy == "a pipeline-parallel degree of 1"


# --- states -----------------------------------------------------------------------------------------------------------


def test_states_are_those_that_were_saved() -> None:
    metadata = saved({"a": (3, 2), "b": (4,)}, states=("exp_avg", "both"))
    rows = dataclasses.replace(metadata.tensors["a", "both"], shape=(2, 3, 2))
    metadata = dataclasses.replace(metadata, tensors={**metadata.tensors, ("a", "both"): rows})
    states = job_of(metadata).states_of(["a"])
    assert states is not None
    assert [(state.key, state.planes, state.blocks) for state in states] == [("both", 2, None), ("exp_avg", 1, None)]


def test_8_bit_states_have_blocks_of_todays_size() -> None:
    metadata = saved({"a": (5000,), "b": (4,)}, states=("state1",), dtype="float32")
    codebook = Codebook(tuple(number / 255 for number in range(256)))
    chunks = (
        dataclasses.replace(chunk, code=_code(BlockFormat(2048, "absmax1", codebook)))
        for chunk in metadata.tensors["a", "state1"].chunks
    )
    coded = dataclasses.replace(metadata.tensors["a", "state1"], dtype="uint8", sources=chunks_of(*chunks))
    metadata = dataclasses.replace(metadata, tensors={**metadata.tensors, ("a", "state1"): coded})
    for members in (["a", "b"], ["b", "a"]):
        (state,) = job_of(metadata).states_of(members) or ()
        assert (state.dtype, state.blocks) == ("uint8", BlockFormat(256, "absmax1", codebook))
    (plain,) = job_of(metadata).states_of(["b"]) or ()
    assert (plain.dtype, plain.blocks) == ("float32", None)


def _code(blocks: BlockFormat) -> object:
    from elastic_ckpt.core.chunks import BlockCode

    return BlockCode(blocks, 0, 0)


def test_states_of_a_shape_of_their_own_belong_to_one_whole_parameter() -> None:
    metadata = saved({"a": (3, 2), "b": (4,)}, states=("row_var",))
    whole = dataclasses.replace(metadata.tensors["a", "row_var"], shape=(3, 1), has_own_shape=True)
    metadata = dataclasses.replace(metadata, tensors={**metadata.tensors, ("a", "row_var"): whole})
    (state,) = job_of(metadata, zero_stage=0).states_of(["a"]) or ()
    assert (state.layout, state.shape) == (PER_PARAMETER, (3, 1))
    assert job_of(metadata, zero_stage=1).states_of(["a"]) is None
    assert job_of(metadata, zero_stage=0).states_of(["a", "b"]) is None


def test_replicated_states_are_kept_but_for_tables_that_bitsandbytes_makes() -> None:
    from elastic_ckpt.core.metadata import ReplicatedState

    metadata = saved({"a": (4,)}, states=())
    both = tuple(ReplicatedState(key, "float32", (2,), 0, 0, 1) for key in ("table", "qmap1"))
    one = dataclasses.replace(metadata.parameters["a"], replicated=both)
    (state,) = job_of(dataclasses.replace(metadata, parameters={"a": one})).states_of(["a"]) or ()
    assert (state.key, state.layout, state.shape) == ("table", REPLICATED, (2,))
