"""The weights of pipeline stages that number their states, which are in files of layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_ckpt.errors import LayoutError
from elastic_ckpt.formats.assembling import RankFiles, numbered_stages
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.grid import Grid
from elastic_ckpt.formats.merging import LayerShard
from elastic_ckpt.formats.model_states import PLAIN, UnpartitionedState
from elastic_ckpt.formats.numbered_stages import StageFiles, with_layers
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from tests.formats.model_shards import model

TIED = "tied_modules.embed.weight"
LIVE = frozenset({TIED, "1.weight", "2.a", "2.b"})


def ref(offset: int) -> TensorRef:
    return TensorRef("float32", (3,), (1,), offset)


def layer(number: int, **offsets: int) -> LayerShard:
    return LayerShard(f"/ckpt/layer_{number:02}.pt", 10, number, 0, {key: ref(at) for key, at in offsets.items()})


#: The tied module's first occurrence is behind a layer with a parameter of the same last name.
LAYERS = [layer(2, a=8, mask=4, b=8), layer(3, weight=0), layer(1, weight=0)]
STAGES = [replace(model(), buffer_names=names) for names in ((), ("2.mask",))]


def test_tied_modules_come_first_and_then_layers_by_number_on_every_stage() -> None:
    models, files = with_layers(STAGES, LAYERS, LIVE)
    assert [list(each.weights) for each in models] == [[TIED, "1.weight", "2.a", "2.mask", "2.b"]] * 2
    assert [each.buffer_names for each in models] == [("2.mask",)] * 2
    assert {name: each.layer for name, each in files.items()} == {
        TIED: 3,
        "1.weight": 1,
        "2.a": 2,
        "2.mask": 2,
        "2.b": 2,
    }


def test_one_tensor_under_two_names_of_a_layer_is_tied() -> None:
    """At one offset of one file: those of other files are others."""
    models, _ = with_layers(STAGES, LAYERS, LIVE)
    assert models[0].shared == {"2.b": "2.a"}


def test_without_live_names_a_layer_is_what_its_number_says() -> None:
    models, _ = with_layers(STAGES, LAYERS, frozenset())
    assert list(models[0].weights) == ["1.weight", "2.a", "2.mask", "2.b", "3.weight"]


def test_a_stage_has_the_files_of_its_own_parameters() -> None:
    models, files = with_layers(STAGES, LAYERS, LIVE)
    stage = StageFiles(models[1], files, (), 1)
    layers, numbers = stage.files_of([TIED, None, "2.b", "2.a"], first_file=1)
    assert [each.layer for each in layers] == [3, 2]
    assert numbers == {TIED: 1, "2.b": 2, "2.a": 2}


#: An optimizer with one parameter that never had a gradient.
NUMBERED = UnpartitionedState("/ckpt/mp_rank.pt", 1, PLAIN, ({},), ((0,),), None, (), {}, {})
TWO = Grid(((0,), (1,)))


def test_every_stage_knows_what_all_number() -> None:
    ranks = {mp: RankFiles([replace(each, optimizer=NUMBERED)]) for mp, each in enumerate(STAGES)}
    found = numbered_stages(ranks, TWO, LAYERS, MetadataOptions(live_names=LIVE))
    assert {mp: stage.number for mp, stage in found.items()} == {0: 0, 1: 1}
    assert all(stage.numbered is found[0].numbered for stage in found.values())
    assert [each.shapes for each in found[0].numbered] == [[[None]]] * 2
    assert numbered_stages(ranks, TWO, LAYERS, MetadataOptions(with_states=False)) == {}


def test_a_stage_without_states_beside_others_is_damage_of_its_file() -> None:
    lacking = replace(STAGES[1], path="/ckpt/mp_rank_01.pt")
    ranks = {0: RankFiles([replace(STAGES[0], optimizer=NUMBERED)]), 1: RankFiles([lacking])}
    with pytest.raises(LayoutError, match="no optimizer states") as raised:
        numbered_stages(ranks, TWO, LAYERS, MetadataOptions())
    assert raised.value.file == lacking.path
    assert numbered_stages({0: RankFiles([lacking])}, Grid(((0,),)), LAYERS, MetadataOptions()) == {}
