"""Which files a pipeline's folder should have: those of the layers that its model-states files list."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.formats.merging import index_expert, index_layer
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.tools.expected_files import expected_files
from tests.attacks.seeds import TREES

#: Layers of two stages; the fourth has a buffer alone.
STAGES = ((0, 1), (2, 3))


def layer_file(layer: int) -> str:
    return f"layer_{layer:02d}-model_states.pt"


def pipeline(folder: Path, lost: set[int]) -> Path:
    folder.mkdir()
    for rank, layers in enumerate(STAGES):
        shapes = {f"{layer}.weight": torch.Size((2, 2)) for layer in layers if layer != 3}
        shapes["tied_modules.embed.weight"] = torch.Size((2, 2))
        tree = TREES["model"] | {"module": None, "param_shapes": [shapes], "frozen_param_shapes": {}}
        tree |= {"shared_params": {}, "buffer_names": ["3.steps"] if 3 in layers else []}
        torch.save(tree, folder / f"mp_rank_{rank:02d}_model_states.pt")
        for layer in set(layers) - lost:
            torch.save({"weight": torch.ones(2, 2)}, folder / layer_file(layer))
    return folder


@pytest.mark.parametrize("lost", [set(), {0}, {1}, {2}, {3}, {0, 3}])
def test_the_file_of_each_listed_layer_is_expected(lost: set[int], tmp_path: Path) -> None:
    pipeline(tmp_path / "step", lost)
    found = look_at(str(tmp_path), "step")
    assert found is not None
    expected = set(expected_files(found))
    present = {path.name for path in (tmp_path / "step").iterdir()}
    assert expected - present == {layer_file(layer) for layer in lost}


@pytest.mark.parametrize(("name", "tree"), list(product(["layer", "expert"], [[], torch.ones(2), 3, None])))
def test_a_file_of_a_layer_or_expert_is_a_dictionary(name: str, tree: object, tmp_path: Path) -> None:
    path = tmp_path / {"layer": layer_file(1), "expert": "layer_0_expert_1_mp_rank_00_model_states.pt"}[name]
    torch.save(tree, path)
    with pytest.raises(DamagedError, match="a dictionary") as caught:
        file = open_pickled(str(path))
        index_layer(file, 1, 0) if name == "layer" else index_expert(file)
    assert caught.value.file == str(path)
