"""What a model-states file states about the degrees of its run, and what counts where the statements differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core.local_state import SequenceParallel
from elastic_ckpt.formats.saved_config import StatedDegrees, stated_degrees

DEGREE = st.integers(1, 8)


def tree(tp: Any, pp: Any, **more: Any) -> dict[str, Any]:
    return {"checkpoint_parallel_dimensions": {"tp_degree": tp, "pp_degree": pp}, **more}


@given(tp=DEGREE, pp=DEGREE, dp=DEGREE)
def test_statements_that_agree_with_the_files_are_taken_as_they_are(tp: int, pp: int, dp: int) -> None:
    stated = stated_degrees(tree(tp, pp, mp_world_size=tp, dp_world_size=dp), {}, {})
    assert stated.borne_out(tp * pp) == (tp, pp, SequenceParallel())


@given(sp=st.integers(2, 8), data=DEGREE)
def test_parallel_state_sp_states_its_own_degree_as_the_tensor_parallel_one(sp: int, data: int) -> None:
    """As DeepSpeed 0.19.8 saves it: one model-parallel rank, and ``tp_degree`` is the sequence-parallel degree."""
    stated = stated_degrees(tree(sp, 1, mp_world_size=1, dp_world_size=sp * data), {}, {})
    found = stated.borne_out(1)
    assert found == (1, 1, SequenceParallel(sp))
    assert found[2].data_degree(sp * data) == data
    assert [rank // found[2].ranks_per_sample for rank in range(sp * data)] == [rank // sp for rank in range(sp * data)]


@given(tp=st.integers(2, 8), files=DEGREE)
def test_lost_tensor_parallel_files_do_not_make_sequence_parallelism(tp: int, files: int) -> None:
    stated = StatedDegrees((tp, 1), mp=tp, partition_degree=tp * 8)
    assert stated.borne_out(files) == (tp, 1, SequenceParallel())


def test_the_saved_config_and_megatrons_arguments_tell_the_sequence_parallel_degree() -> None:
    config = {"sequence_parallel_size": 2}
    assert stated_degrees(tree(1, 1), config, {}).borne_out(1)[2] == SequenceParallel(2)
    mesh = stated_degrees(tree(1, 1, dp_world_size=3), {**config, "data_parallel_size": 3}, {}).borne_out(1)[2]
    assert mesh == SequenceParallel(2, partitioned=False)
    assert (mesh.data_degree(3), mesh.ranks_per_sample) == (3, 1)
    assert stated_degrees(tree(4, 1), {}, {"ds_sequence_parallel_size": 2}).borne_out(4)[2] == SequenceParallel(2)


@pytest.mark.parametrize("odd", [None, "2", True, 0, -1, 2.0, {}])
def test_what_is_no_degree_states_nothing(odd: Any) -> None:
    assert stated_degrees(tree(odd, 1), {"sequence_parallel_size": odd}, {}) == StatedDegrees()
    assert stated_degrees({"checkpoint_parallel_dimensions": odd}, {}, {}).borne_out(3)[:2] == (0, 0)


@pytest.mark.parametrize(
    ("batch", "ranks", "degree"),
    [((24, 3, 2), 8, 2), ((24, 3, 2), 4, 1), ((24, 3, 2), 6, 1), ((25, 3, 2), 8, 1), ((24, 3, None), 8, 1)],
)
def test_a_batch_that_fewer_ranks_make_up_tells_the_sequence_parallel_degree(
    batch: tuple[Any, ...], ranks: int, degree: int
) -> None:
    """``None``: DeepSpeed then derives the micro-batches in a step, from a degree that is not known here."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = dict(zip(names, batch, strict=True))
    stated = stated_degrees(tree(2, 1, dp_world_size=ranks, global_steps=2, global_samples=24), config, {})
    assert stated.borne_out(2)[2] == SequenceParallel(degree)
    arguments = {"ds_sequence_parallel_size": 4}
    assert stated_degrees(tree(2, 1, dp_world_size=ranks), config, arguments).sequence == 4


@pytest.mark.parametrize(
    ("steps", "samples", "counted"), [(4, 48, 2), (4, 96, None), (0, 0, None), (4, 50, None), (3, 24, 3)]
)
def test_counted_samples_alone_state_nothing(steps: int, samples: int, counted: int | None) -> None:
    entries = {"dp_world_size": 6, "global_steps": steps, "global_samples": samples}
    stated = stated_degrees(tree(1, 1, **entries), {"train_micro_batch_size_per_gpu": 4}, {})
    assert (stated.sequence, stated.possible) == (None, frozenset({counted} - {None}))
    assert stated.borne_out(1)[2] == SequenceParallel()


@pytest.mark.parametrize(
    ("ranks", "batch", "micro", "possible"),
    [(4, 4, 2, {2, 4}), (4, 12, 6, {2, 4}), (4, 12, 3, set()), (4, 5, 2, set())],
)
def test_a_batch_without_its_micro_batches_leaves_degrees_open(
    ranks: int, batch: int, micro: int, possible: set[int]
) -> None:
    """Nothing, where a run without sequence parallelism could have had it."""
    config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    stated = stated_degrees(tree(1, 1, dp_world_size=ranks), config, {})
    assert (stated.sequence, stated.possible) == (None, frozenset(possible))
