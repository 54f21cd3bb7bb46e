"""Names of a tag's files, sorted by kind; those of DeepSpeed's ``fast`` checkpoint writer too."""

from __future__ import annotations

import pytest

from elastic_ckpt.formats.naming import FolderFiles, number_of_writers, plain_name, sort_names

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZERS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]


def sorted_from(*names: str) -> FolderFiles:
    return sort_names(names, is_universal=False)


@pytest.mark.parametrize(
    ("name", "plain", "writers"),
    [
        (f"{MODEL}-0.1", MODEL, 1),
        (f"{MODEL}-11.12", MODEL, 12),
        (MODEL, MODEL, 0),
        ("a.pt-1", "a.pt-1", 0),
        ("a-0.1", "a-0.1", 0),
    ],
)
def test_the_fast_writer_appends_its_rank_and_the_number_of_writers(name: str, plain: str, writers: int) -> None:
    assert (plain_name(name), number_of_writers(name)) == (plain, writers)


def test_of_all_copies_the_first_writers_is_read() -> None:
    models = [f"{MODEL}-{rank}.12" for rank in range(12)]
    files = sorted_from(
        *models, *(f"{name}-{rank}.12" for rank, name in enumerate(OPTIMIZERS)), "layer_03-model_00-model_states.pt-1.2"
    )
    assert files.model == {0: models[0]} and files.copies == dict.fromkeys(sorted(models[1:]), models[0])
    assert files.optimizer == {(rank, 0): f"{name}-{rank}.12" for rank, name in enumerate(OPTIMIZERS)}
    assert files.layers == {(3, 0): "layer_03-model_00-model_states.pt-1.2"}
    assert files.by_fast_writer and files.clashes == ()


def test_model_states_of_ranks_that_are_no_writers_are_copies_too() -> None:
    """Where sockets or machines write, the others all write ``-0.1``, maybe at the same time."""
    files = sorted_from(f"{MODEL}-0.1", f"{MODEL}-0.2", f"{MODEL}-1.2")
    assert files.model == {0: f"{MODEL}-0.2"} and set(files.copies) == {f"{MODEL}-0.1", f"{MODEL}-1.2"}
    assert files.clashes == ()


@pytest.mark.parametrize(
    "names",
    [
        (MODEL, f"{MODEL}-0.1"),
        (f"{OPTIMIZERS[1]}-0.1", f"{OPTIMIZERS[1]}-1.2"),
        (f"{OPTIMIZERS[1]}-0.2", f"{OPTIMIZERS[1]}-1.2"),
        (f"bf16_{OPTIMIZERS[1]}-0.2", f"{OPTIMIZERS[1]}-0.2"),
        ("layer_03-model_states.pt-0.1", "layer_03-model_states.pt-0.2"),
    ],
)
def test_names_that_no_save_has_side_by_side_clash(names: tuple[str, ...]) -> None:
    files = sorted_from(*names)
    assert len(files.clashes) == 1 and set(files.clashes) < set(names) and not files.copies


def test_files_of_other_writers_are_as_ever() -> None:
    files = sorted_from(MODEL, *OPTIMIZERS, "zero_to_fp32.py", f"{MODEL}-0.1.bak")
    assert not files.by_fast_writer and not files.copies and len(files.optimizer) == 12
