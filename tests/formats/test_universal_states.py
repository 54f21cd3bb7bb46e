"""Universal checkpoints with states that are no plain moments: what each is, and what is refused."""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.core.chunks import QuantizedRun
from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.core.values import TensorValue
from elastic_ckpt.errors import DamagedError, MismatchError, UnsupportedError
from elastic_ckpt.formats import universal_states
from elastic_ckpt.formats.base import MetadataOptions
from elastic_ckpt.formats.detect import look_at
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.formats.universal_states import index_state
from elastic_ckpt.load.metadata import read_checkpoint
from tests.formats.universal_folders import SHAPES, written
from tests.quantization import own_maps

# Covers elastic_ckpt/formats/universal_blocks.py, which is called where a file is read.
MAP = torch.full((256,), 0.5)


def read(zero: Path, **states: Any) -> CheckpointMetadata:
    found = look_at(str(zero.parent.parent), "tag")
    assert found is not None
    return read_checkpoint(found, MetadataOptions(with_client_state=False, states=StateOptions(**states))).metadata


@pytest.mark.parametrize(
    "states", [{"schema": {"my_map": "replicated"}}, {"max_numel": 256}, {}], ids=["name", "size", ""]
)
@pytest.mark.parametrize("table", [(256,), (16, 16), (4, 8, 8)], ids=str)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(
    "shapes", [{"a": (16, 16), "b": (16, 16)}, {"a": (16, 16), "b": (16,)}, {"a": (2, 128), "b": (256,)}], ids=str
)
def test_a_table_keeps_its_shape_whatever_parameters_have_as_many_elements(
    shapes: dict[str, tuple[int, ...]], is_shared: bool, table: tuple[int, ...], states: dict[str, Any], tmp_path: Path
) -> None:
    if not is_shared and not states:
        pytest.skip("without a word it may be a state of each element")
    if not is_shared and "max_numel" in states and set(shapes.values()) == {table}:
        pytest.skip("a state in the shape of every parameter is one of each element, unless its name says otherwise")
    whole = MAP.reshape(table).clone()
    zero = written(tmp_path, {"my_map": whole} if is_shared else None, shapes)
    for name in shapes if not is_shared else ():
        torch.save(whole, zero / name / "my_map.pt")
    metadata = read(zero, **states)
    for name in shapes:
        (state,) = metadata.parameters[name].replicated
        assert (state.key, state.shape, state.differs) == ("my_map", table, False)


@pytest.mark.parametrize("states", [{"schema": {"my_map": "replicated"}}, {"max_numel": 256}], ids=["name", "size"])
def test_a_table_is_one_for_all_though_a_bias_has_as_many_elements(states: dict[str, Any], tmp_path: Path) -> None:
    zero = written(tmp_path)
    for name in SHAPES:
        torch.save(MAP, zero / name / "my_map.pt")
    metadata = read(zero, **states)
    assert metadata.states.opaque == {} and ("bias", "my_map") not in metadata.tensors
    for name, saved in metadata.parameters.items():
        (state,) = saved.replicated
        assert (state.key, state.shape, state.differs) == ("my_map", (256,), False)
        assert state.crc32 == zlib.crc32(MAP.numpy().tobytes())
        assert metadata.files[state.file].path == str(zero / name / "my_map.pt")


def test_what_the_config_does_not_settle_is_opaque_and_what_it_leaves_out_is_fresh(tmp_path: Path) -> None:
    zero = written(tmp_path)
    for name in SHAPES:
        torch.save(MAP, zero / name / "my_map.pt")
    assert "my_map" in read(zero).states.opaque
    assert read(zero, schema={"my_map": "fresh"}).states.fresh == {"my_map"}
    with pytest.raises(MismatchError, match="my_map"):
        read(zero, schema={"my_map": "elementwise"})


def test_parameters_that_keep_other_states_do_not_make_a_table_elementwise(tmp_path: Path) -> None:
    """The bias alone has a second momentum, and as many elements as its table."""
    zero = written(tmp_path)
    for name in SHAPES:
        torch.save(MAP, zero / name / "my_map.pt")
    torch.save(torch.zeros(256), zero / "bias" / "second.pt")
    metadata = read(zero, max_numel=256, schema={"second": "elementwise"})
    assert metadata.states.opaque == {} and ("bias", "my_map") not in metadata.tensors
    assert {name: each.replicated[0].key for name, each in metadata.parameters.items()} == dict.fromkeys(
        SHAPES, "my_map"
    )


def test_what_the_file_records_as_shared_needs_no_config_and_is_said(tmp_path: Path) -> None:
    zero = written(tmp_path, {"my_map": MAP, "count": torch.tensor(3.0)})
    metadata = read(zero)
    for saved in metadata.parameters.values():
        assert [state.key for state in saved.replicated] == ["my_map"]
        assert dict(saved.scalars) == {"step": 7, "count": TensorValue("float32", (), (3.0,))}
    assert any("my_map" in note and "records it" in note for note in metadata.notes)
    assert read(zero, schema={"my_map": "fresh"}).states.fresh == {"my_map"}
    with pytest.raises(MismatchError, match="recorded as one tensor for all"):
        read(zero, schema={"my_map": "elementwise"})


def test_a_shared_state_that_is_a_view_is_refused_where_states_are_restored(tmp_path: Path) -> None:
    zero = written(tmp_path, {"my_map": torch.arange(512.0)[::2]})
    with pytest.raises(UnsupportedError, match="state of all parameters was saved as a view") as caught:
        read(zero)
    assert caught.value.parameter == "my_map"
    assert read(zero, are_restored=False).parameters


@pytest.mark.parametrize("shared", [[], {1: MAP}])
def test_shared_states_that_are_no_dictionary_are_damage(shared: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="share are no dictionary"):
        read(written(tmp_path, shared))


def quantize(folder: Path, scales: torch.Tensor, **noted: Any) -> None:
    torch.save({"param": torch.zeros(30, 20, dtype=torch.uint8)}, folder / "state1.pt")
    torch.save({"param": scales, **noted}, folder / "absmax1.pt")


def codebook(key: str = "qmap1") -> torch.Tensor:
    return torch.tensor(own_maps()[key].values)


def test_blocks_are_counted_from_the_first_element_unless_runs_are_recorded(tmp_path: Path) -> None:
    zero = written(tmp_path, {"qmap1": codebook()})
    quantize(zero / "weight", torch.ones(3))
    (chunk,) = read(zero).tensors["weight", "state1"].chunks
    assert chunk.code is not None and (chunk.code.position, chunk.code.format.numel) == (0, 256)
    runs = torch.tensor([[0, 10, 30, 20, 0, 250], [10, 10, 30, 20, 1, 0]])
    quantize(zero / "weight", torch.ones(3 + 2), block_numel=256, quantized_runs=runs)
    tensor = read(zero).tensors["weight", "state1"]
    assert tensor.blocks == chunk.code.format and tensor.sources[0].tile(600)
    second = tensor.chunks[1]
    assert second.code is not None and (second.range.start, second.code.position, second.code.origin) == (10, 0, 1)


RUN = [0, 600, 1, 600, 0, 0]


@pytest.mark.parametrize(
    ("rows", "block_numel"),
    [
        ([RUN], 255),
        ([RUN], 256.0),
        ([[0, 1 << 62, 1 << 62, 1 << 62, 0, 0]], 256),
        ([RUN], None),
        ([[0, 100, 1, 100, 0, 0]], 256),
        ([RUN, RUN], 256),
        ([[-1, *RUN[1:]]], 256),
        ([[0, 600, 0, 600, 0, 0]], 256),
        ([[0, 20, 30, 10, 0, 0]], 256),
        ([[*RUN[:5], 600]], 2048),
        ([RUN[:5]], 256),
        ([], 256),
    ],
)
def test_records_of_blocks_that_do_not_fit_the_scales_are_damage(
    rows: list[list[int]], block_numel: Any, tmp_path: Path
) -> None:
    runs = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), -1) if rows else torch.zeros(0, 6).long()
    torch.save({"param": torch.ones(3), "quantized_runs": runs, "block_numel": block_numel}, tmp_path / "absmax1.pt")
    with pytest.raises(DamagedError, match="does not fit its scales"):
        index_state(open_pickled(str(tmp_path / "absmax1.pt")))


@pytest.mark.parametrize(("numel", "rows", "is_limit"), [(1, 150_000, True), (1, 5_000, False), (64, 20_000, False)])
def test_rows_of_hardly_any_elements_have_a_limit(numel: int, rows: int, is_limit: bool, tmp_path: Path) -> None:
    """Each is a chunk: a table of 48 bytes kept an export busy for minutes."""
    run = torch.tensor([[0, numel, rows, numel, 0, 0]])
    scales = torch.ones(-(-numel * rows // 256))
    torch.save({"param": scales, "quantized_runs": run, "block_numel": 256}, tmp_path / "absmax1.pt")
    file = open_pickled(str(tmp_path / "absmax1.pt"))
    with pytest.raises(UnsupportedError, match="up to a limit") if is_limit else nullcontext():
        index_state(file)


def test_runs_that_fit_are_read(tmp_path: Path) -> None:
    tree = {"param": torch.ones(3), "quantized_runs": torch.tensor([RUN]), "block_numel": 256}
    torch.save(tree, tmp_path / "absmax1.pt")
    layout = index_state(open_pickled(str(tmp_path / "absmax1.pt"))).layout
    assert layout is not None and layout.runs == (QuantizedRun(*RUN),)


@pytest.mark.parametrize("lost", ["absmax1.pt", "qmap1.pt"])
def test_codes_without_scales_or_codebook_are_damaged(lost: str, tmp_path: Path) -> None:
    zero = written(tmp_path)
    quantize(zero / "weight", torch.ones(3))
    torch.save(codebook(), zero / "weight" / "qmap1.pt")
    assert read(zero).states.damaged == {}
    (zero / "weight" / lost).unlink()
    assert "state1" in read(zero).states.damaged


def test_a_name_that_is_longer_than_a_pattern_is_no_raw_error() -> None:
    """Objects in stores may have such names."""
    assert universal_states._rule_of("a" * 600, {"param": 1}) is None
    assert universal_states._rule_of("a" * 500, {"cat_dim": 1}) is not None
    with pytest.raises(UnsupportedError, match="up to a limit"):
        universal_states._rule_of("a" * 600, {"cat_dim": 1})
