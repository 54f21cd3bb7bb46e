"""Model-states files that contradict themselves."""

from __future__ import annotations

import copy
from itertools import permutations
from pathlib import Path

import pytest
import torch

from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.model_states import index_model_states
from elastic_ckpt.formats.pickled import open_pickled
from tests.attacks.seeds import TREES

SHAPES = {
    name: tuple(TREES["model"]["module"][name].shape)
    for group in TREES["model"]["param_shapes"]
    for name in group
    if name in TREES["model"]["module"]
}


def with_shapes(folder: Path, shapes: dict[str, tuple[int, ...]]) -> str:
    """The file of a model whose parameters are listed with these shapes."""
    tree = copy.deepcopy(TREES["model"])
    for group in tree["param_shapes"]:
        group.update({name: torch.Size(shape) for name, shape in shapes.items() if name in group})
    torch.save(tree, folder / "mp_rank_00_model_states.pt")
    return str(folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    ("name", "other"), [pair for pair in permutations(SHAPES, 2) if SHAPES[pair[0]] != SHAPES[pair[1]]]
)
def test_a_parameter_that_is_listed_with_another_shape_than_its_weight_is_damage(
    name: str, other: str, tmp_path: Path
) -> None:
    """The values of a neighbour would be taken for its own."""
    path = with_shapes(tmp_path, {name: SHAPES[other], other: SHAPES[name]})
    with pytest.raises(DamagedError) as caught:
        index_model_states(open_pickled(path))
    error = caught.value
    assert (error.file, error.parameter in (name, other)) == (path, True)
    assert str(SHAPES[error.parameter or ""]) in str(error.expected)


def test_parameters_that_are_listed_as_they_are_there_are_read(tmp_path: Path) -> None:
    index_model_states(open_pickled(with_shapes(tmp_path, SHAPES)))
