"""Which files of a tag another save has left, by what each states; tests/distributed/test_mixtures.py has real ones."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ckpt.errors import DamagedError, SavedOverError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.base import CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.leftovers import find_leftovers
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.native import native_reading
from elastic_ckpt.formats.saved_config import StatedDegrees
from elastic_ckpt.formats.shards import OptimizerShard

MODEL, ZERO = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def of(kind: type, **fields: Any) -> Any:
    """A file of which nothing else is looked at."""
    item = object.__new__(kind)
    vars(item).update(fields)
    return item


@pytest.mark.parametrize(
    ("ranks", "counts", "left"),
    [
        (2, [(2,), (2,)], []),
        (2, [(2,), (2,), (4,), (4,)], [2, 3]),
        (2, [(2,), (2,), (4,), (3,)], [2, 3]),  # of two older saves
        (2, [(2, 1), (2, 1), (4, 2)], [2]),  # with experts
        (2, [(2,), (2,), (2,)], []),  # one too many of this save
        (2, [(2,), (2,), (4,), ()], []),  # one that does not say
        (2, [(2,), (2,), None, (4,)], [2, 3]),  # one that cannot be read
        (2, [(2,), None, (4,)], [2]),  # beside one of this save that cannot be read
        (2, [(4,), (4,), (4,), (4,)], []),  # whose ranks the model-states file counts otherwise
        (2, [(2,), (4,), (4,), (4,)], []),  # interrupted after its first rank
        (None, [(2,), (2,)], []),
    ],
)
def test_files_that_state_other_ranks_than_all_before_them_are_left_over(
    ranks: int | None, counts: list[tuple[int, ...] | None], left: list[int]
) -> None:
    files: dict[str, Any] = {
        ZERO.format(rank): DamagedError("cut short") if count is None else of(OptimizerShard, partition_count=count)
        for rank, count in enumerate(counts)
    }
    files[MODEL] = of(ModelShard, stated=StatedDegrees(partition_degree=ranks))
    found = CheckpointInfo("native", "/ckpt/tag", "tag", sort_names(files, is_universal=False))
    assert find_leftovers(found, files) == {ZERO.format(rank) for rank in left}
    assert find_leftovers(found, files | {MODEL: DamagedError("cut short")}) == frozenset()


def test_what_cannot_be_read_is_kept_until_it_is_known_whose_it_is_but_neither_code_nor_a_file_that_moves() -> None:
    names = [MODEL, ZERO.format(0)]
    found = CheckpointInfo("native", "/ckpt/tag", "tag", sort_names(names, is_universal=False))
    reading = native_reading(found, MetadataOptions(), lambda work: work())

    def read(error: Exception) -> Any:
        def fail(path: str) -> Any:
            raise error

        return reading.read(1, fail)

    for kept in (DamagedError("cut short"), UnsupportedError("of an unknown optimizer")):
        assert read(kept) is kept
    for raised in (SavedOverError("saved over"), UnsafePickleError("runs code")):
        with pytest.raises(type(raised)):
            read(raised)
