"""Verification without a checkpoint: checksums, values, metadata, names of files."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.chunks import (
    BlockCode,
    FlatTensors,
    PartitionedChunks,
    PartitionRule,
    StorageChunk,
    by_rank,
    chunks_of,
)
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    TensorMetadata,
)
from elastic_ckpt.core.shard_specs import ShardSpec
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import MismatchError, UnsupportedError
from elastic_ckpt.planning import read_items
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools import verification as scan
from elastic_ckpt.tools.comparison import check_copies, compare
from elastic_ckpt.tools.conversion.dcp import convert_to_dcp
from elastic_ckpt.tools.export import export
from elastic_ckpt.tools.inspection import ERROR, NOTE, UNCHECKED, Finding, check_metadata, kind_of, of_error
from elastic_ckpt.tools.opened import OpenedCheckpoint, open_folder
from elastic_ckpt.tools.verification import Record, Span, scan_file, spans_of
from elastic_ckpt.tools.virtual import Topology, VirtualJob
from tests.unpartitioned import FILE, indexed


def written(folder: Path, nbytes: int, seed: int = 0) -> Path:
    path = folder / "file"
    path.write_bytes(random.Random(seed).randbytes(nbytes))
    return path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes, so that everything crosses some."""
    monkeypatch.setattr(scan, "CHUNK_NBYTES", 64)


def record_of(data: bytes, offset: int, nbytes: int) -> Record:
    return Record(offset, nbytes, zlib.crc32(data[offset : offset + nbytes]))


def scanned(path: Path, nbytes: int, *items: Record | Span) -> list[Finding]:
    records, spans = ([item for item in items if isinstance(item, kind)] for kind in (Record, Span))
    return list(scan_file(str(path), nbytes, records, spans, lambda nbytes: None))


@pytest.mark.parametrize("seed", [1, 3])
def test_checksums_of_records_across_chunks(small_chunks: None, tmp_path: Path, seed: int) -> None:
    path = written(tmp_path, 3000)
    data = path.read_bytes()
    draw = random.Random(seed)
    borders = sorted(draw.sample(range(3001), 24))
    records = [record_of(data, low, high - low) for low, high in zip(borders[::2], borders[1::2], strict=True)]
    records += [record_of(data, 0, 3000), record_of(data, 17, 0), Record(1, 5, 0)]
    assert scanned(path, 3000, *records) == []
    offset = draw.randrange(3000)
    path.write_bytes(data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :])
    hit = [record for record in records if record.crc32 and record.offset <= offset < record.offset + record.nbytes]
    found = scanned(path, 3000, *records)
    assert len(found) == len(hit) >= 1 and {finding.kind for finding in found} == {"checksum"}
    for finding, record in zip(found, hit, strict=True):
        assert finding.text.startswith(f"the {record.nbytes} bytes of a tensor from byte {record.offset} on")
        assert finding.expected == f"CRC32 {record.crc32:#010x}" != f"CRC32 {finding.found}"


def test_a_file_that_became_shorter_is_a_failure_and_no_wrong_checksum(small_chunks: None, tmp_path: Path) -> None:
    path = written(tmp_path, 2000)
    data = path.read_bytes()
    os.truncate(path, 1000)
    (finding,) = scanned(path, 2000, record_of(data, 0, 200), record_of(data, 500, 1400))
    assert finding.kind == "read-error" and "byte 1000" in finding.text
    (finding,) = scanned(tmp_path / "gone", 10)
    assert finding.kind == "read-error" and "no such file" in finding.text


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def values_in(tmp_path: Path, values: torch.Tensor, key: str = "exp_avg") -> dict[str, str]:
    """What is found of values in a file."""
    path = tmp_path / "values"
    path.write_bytes(values.contiguous().view(torch.uint8).numpy().tobytes())
    span = Span(0, values.nbytes, str(values.dtype).removeprefix("torch."), "w", key, 0)
    return {finding.kind: finding.text for finding in scanned(path, values.nbytes, span)}


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_are_no_numbers_are_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 101).to(dtype)
    assert values_in(tmp_path, values) == {}
    values[[7, 50]] = float("inf")
    values[60] = float("-inf")
    assert values_in(tmp_path, values) == {"inf": "3 infinite values in exp_avg, the first at element 7"}
    values[[9, 100]] = float("nan")
    found = values_in(tmp_path, values)
    assert found["nan"] == "2 NaN in exp_avg, the first at element 9" and found["inf"].startswith("3 ")


def test_sums_that_overflow_are_no_infinite_values(tmp_path: Path) -> None:
    assert values_in(tmp_path, torch.full((1000,), 6e4, dtype=torch.float16)) == {}
    assert values_in(tmp_path, torch.full((1000,), 3e38)) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_code_of_a_short_dtype_is_taken_for_another(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.arange(2**16, dtype=torch.int64).to(torch.int16).view(dtype)
    masks = {"nan": values.float().isnan(), "inf": values.float().isinf()}
    found = values_in(tmp_path, values)
    for kind, mask in masks.items():
        assert found[kind].startswith(f"{int(mask.sum())} ") and found[kind].endswith(f"element {mask.int().argmax()}")


@pytest.mark.parametrize(("offset", "dtype"), [(0, "float32"), (132, "float32"), (7, "float32"), (129, "bfloat16")])
def test_spans_are_looked_at_wherever_they_are(small_chunks: None, tmp_path: Path, offset: int, dtype: str) -> None:
    """Across chunks, misaligned ones too; what is before and behind them is padding, and garbage."""
    values = torch.ones(300, dtype=getattr(torch, dtype))
    values[[123, 299]] = float("nan")
    values[200] = float("inf")
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * offset + values.view(torch.uint8).numpy().tobytes() + b"\xff" * 64)
    half = values.nbytes // 2
    spans = [
        Span(offset, half, dtype, "w", "exp_avg", 1000),
        Span(offset + half, values.nbytes - half, dtype, "w", "exp_avg", 1150),
    ]
    assert scanned(path, path.stat().st_size, *spans) == [
        Finding(ERROR, "nan", "2 NaN in exp_avg, the first at element 1123", "w", str(path)),
        Finding(ERROR, "inf", "1 infinite values in exp_avg, the first at element 1200", "w", str(path)),
    ]


def parameter(shape: Shape, group: int = 0) -> SavedParameter:
    return SavedParameter(shape, group, (("step", 4.0),))


def metadata_of(
    tensors: list[TensorMetadata], parameters: dict[str, SavedParameter], **more: Any
) -> CheckpointMetadata:
    facts = more.pop("source", SourceFacts("native", "/ckpt/step4", "step4", 1, 2, "0.19.8"))
    files = (SourceFile("/ckpt/step4/0", 1000), SourceFile("/ckpt/step4/1", 1000))
    return CheckpointMetadata(facts, files, parameters, {(t.name, t.key): t for t in tensors}, ({},) * 2, **more)


def tensor(key: str, *ranges: tuple[int, int, int], name: str = "w", dtype: str = "float32") -> TensorMetadata:
    """A tensor of 100 elements; ranges of start, stop and file, at the byte of their start."""
    chunks = (StorageChunk(FlatRange(start, stop), file, 4 * start) for start, stop, file in ranges)
    return TensorMetadata(name, key, (100,), dtype, chunks_of(*chunks))


def checked_metadata(metadata: CheckpointMetadata) -> tuple[list[Finding], list[Finding]]:
    """Its findings and notes."""
    every = list(check_metadata(metadata))
    return [one for one in every if one.level == ERROR], [one for one in every if one.level == NOTE]


def test_whole_metadata_has_no_findings() -> None:
    whole = [tensor(key, (0, 60, 0), (60, 100, 1)) for key in (MASTER, "exp_avg")]
    assert checked_metadata(metadata_of(whole, {"w": parameter((100,))})) == ([], [])


def test_every_hole_and_overlap_is_found() -> None:
    tensors = [
        tensor(MASTER, (0, 60, 0), (61, 100, 1)),
        tensor("exp_avg", (0, 60, 0), (50, 100, 1)),
        tensor("exp_avg_sq", (0, 60, 0)),
    ]
    found, _ = checked_metadata(metadata_of(tensors, {"w": parameter((100,))}))
    assert [finding.kind for finding in found] == ["incomplete"] * 3
    for finding, where in zip(found, ("60 to 61", "50 to 60", "60 to 100"), strict=True):
        assert finding.parameter == "w" and where in finding.message


def test_states_that_only_some_of_a_group_have() -> None:
    tensors = [tensor(MASTER, (0, 100, 0), name=name) for name in ("a", "b", "c")]
    tensors += [tensor("exp_avg", (0, 100, 1), name="a")]
    saved = {"a": parameter((100,)), "b": parameter((100,)), "c": SavedParameter((100,), 1, ())}
    found, notes = checked_metadata(metadata_of(tensors, saved))
    assert [(finding.kind, finding.parameter) for finding in found] == [("state-missing", "b")]
    assert notes == []
    whole = SourceFacts("native", "/ckpt/step4", "step4", 0, 2, "0.19.8")
    saved["b"] = SavedParameter((100,), 0, ())  # without ZeRO: it got no gradient
    found, notes = checked_metadata(metadata_of(tensors, saved, source=whole))
    assert found == []


def test_a_parameter_without_a_master_and_a_tensor_that_ends_behind_its_file() -> None:
    behind = TensorMetadata("w", MASTER, (100,), "float32", chunks_of(StorageChunk(FlatRange(0, 100), 0, 700)))
    found, _ = checked_metadata(metadata_of([behind], {"w": parameter((100,)), "lost": parameter((3,))}))
    assert [(finding.kind, finding.parameter) for finding in found] == [("unreadable", "w"), ("incomplete", "lost")]
    assert "the end of its file; expected: 1100 bytes or more; found: 1000 bytes" in found[0].message


@pytest.mark.parametrize(("numel", "expected"), [(140, []), (150, ["1030 bytes or more"])])
def test_a_partition_may_end_behind_its_file_where_it_is_padding(numel: int, expected: list[str]) -> None:
    flat = FlatTensors(files=range(2), byte_offsets=by_rank([64, 750]), numel=80, dtype="float32", itemsize=4)
    sources = (PartitionedChunks(PartitionRule(numel, step=80), flat),)
    weights = TensorMetadata("w", MASTER, (numel,), "float32", sources)
    found, _ = checked_metadata(metadata_of([weights], {"w": parameter((numel,))}))
    assert [finding.expected for finding in found] == expected
    assert all((finding.kind, finding.file) == ("unreadable", "/ckpt/step4/1") for finding in found)


def test_states_that_are_damaged_or_not_understood() -> None:
    metadata = metadata_of([], {}, states=StateFacts({"odd": "a dict"}, {"state1": "no absmax1"}), notes=("hm",))
    found, notes = checked_metadata(metadata)
    assert [(finding.kind, finding.parameter) for finding in found] == [("damaged", "state1")]
    assert [(note.kind, note.parameter) for note in notes] == [("reader", None)]
    unchecked = [each for each in check_metadata(metadata) if each.level == UNCHECKED]
    assert [(each.kind, each.parameter) for each in unchecked] == [("not-checked", "odd")]


@pytest.mark.parametrize("step", [float("nan"), float("inf")])
def test_counts_that_no_load_takes_are_found(step: float) -> None:
    saved = SavedParameter((2,), 0, (("step", step),))
    found, _ = checked_metadata(metadata_of([tensor("w", (0, 2, 0))], {"w": saved}))
    assert ("damaged", "w") in [(finding.kind, finding.parameter) for finding in found]


def test_of_quantized_states_the_scales_are_looked_at() -> None:
    """Blocks of 256: elements 300 to 700 of a partition are in blocks 1 and 2."""
    blocks = BlockFormat(256, "absmax1", Codebook(tuple(-1 + n / 127.5 for n in range(256))))
    chunk = StorageChunk(FlatRange(0, 400), 1, 5000, BlockCode(blocks, 300, 80_000))
    coded = TensorMetadata("w", "state1", (400,), "uint8", chunks_of(chunk))
    spans = spans_of(metadata_of([coded], {}))
    assert spans == {"/ckpt/step4/1": [Span(80_004, 8, "float32", "w", "absmax1", 1)]}
    integers = tensor("counts", (0, 100, 0), dtype="int64")
    assert spans_of(metadata_of([integers], {})) == {}


def test_copies_go_by_the_names_that_rename_gives_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(torch.tensor([1.0, 2.0, 1.0, 3.0]).numpy().tobytes())
    shards = tuple(chain.from_iterable(chunks_of(StorageChunk(FlatRange(0, 2), 0, 8 * rank)) for rank in (0, 1)))
    saved = TensorMetadata("old", MASTER, (2,), "float32", shards, shards=((2,), (2,)))
    facts = SourceFacts("native", str(tmp_path), "step4", 1, 1, "0.19.8", tp=2)
    metadata = metadata_of([saved], {"old": parameter((2,))}, source=facts)
    metadata = replace(metadata, files=(SourceFile(str(tmp_path / "a"), 16),))
    rules = [ShardSpec(pattern="new", kind="replicated")]
    for rename, code, name in (([("old", "new")], "drift", "new"), ([], "not-checked", None)):
        (finding,) = check_copies(metadata, ElasticConfig(tp_rules=rules, rename=rename), threads=1)
        assert (finding.kind, finding.parameter) == (code, name)
        assert finding.text.endswith("at most 1 apart (a)") or not rename


def test_findings_are_one_line_each_that_no_terminal_obeys() -> None:
    finding = Finding(ERROR, "checksum", "record \x1b[2J\n  evil", "w", "/ckpt/step4/file.pt")
    assert finding.line("/ckpt") == "checksum: step4/file.pt: w: record \\x1b[2J evil"
    assert Finding(ERROR, "nan", "m", file="/elsewhere/file.pt").line("/ckpt") == "nan: /elsewhere/file.pt: m"
    error = MismatchError("no\nfit", parameter="w", file="f", expected=(1, 2), found="x", remedy="y")
    finding = of_error(error, kind_of(error))
    assert (finding.kind, finding.parameter, finding.file) == ("mismatch", "w", "f")
    assert finding.message == "no fit; expected: (1, 2); found: x; remedy: y"
    error = MismatchError("d", parameter="none")
    assert of_error(error, "foreign") == Finding(ERROR, "foreign", "d", suspected=True)


def test_tensors_that_all_have_the_same_bytes_are_not_each_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand weights over one storage: their values are not looked at a thousand times."""
    monkeypatch.setattr(read_items, "_MORE_NBYTES", 1 << 12)
    looked_at = list[int]()
    monkeypatch.setattr(scan, "_look_at", lambda span, *_: looked_at.append(span.nbytes))
    shared = torch.zeros(5000)
    for count, kinds in ((7, set[str]()), (1000, {"shared"})):
        folder = tmp_path / str(count)
        folder.mkdir()
        weights = {f"w{number}": shared[number % 2 :][:4000] for number in range(count)}
        optimizer = torch.optim.SGD([(name, torch.nn.Parameter(torch.zeros(4000))) for name in weights])
        indexed(folder, weights, optimizer.state_dict())
        looked_at.clear()
        found = scan.verify(str(folder), None, ElasticConfig(), full=True)
        assert {finding.kind for finding in found.findings} & {"shared"} == kinds, found.findings
        size = (folder / FILE).stat().st_size
        assert bool(looked_at) != bool(kinds) and sum(looked_at) <= 8 * size + (1 << 12)


WAYS: dict[str, Callable[[OpenedCheckpoint, Path], object]] = {
    "export": lambda opened, out: export(opened.metadata.source.folder, out, optimizer=True, progress=False),
    "convert to dcp": lambda opened, out: convert_to_dcp(opened, out, progress=False),
    "diff": lambda opened, _: compare(opened, opened, 1, progress=False),
    "plan": lambda opened, _: VirtualJob(opened.metadata, Topology(1), LoadOptions()).planned(0),
}


@pytest.mark.parametrize("way", WAYS)
def test_states_that_all_have_the_same_bytes_are_refused_in_every_way_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A load plans as ``plan`` does."""
    monkeypatch.setattr(read_items, "_MORE_NBYTES", 1 << 12)
    base = torch.zeros(2000)
    for count in (3, 300):
        folder = tmp_path / str(count)
        folder.mkdir()
        optimizer = torch.optim.Adam([("w", torch.nn.Parameter(torch.zeros(1000)))])
        state = {f"s{number}": base[number % 900 :][:1000] for number in range(count)}
        saved = {**optimizer.state_dict(), "state": {0: {"step": torch.tensor(1.0), **state}}}
        indexed(folder, {"w": torch.zeros(1000)}, saved)
        opened = open_folder(str(folder), None, ElasticConfig())
        if count == 300:
            with pytest.raises(UnsupportedError, match="the same bytes of their files, again and again"):
                WAYS[way](opened, tmp_path / "out")
        else:
            WAYS[way](opened, tmp_path / "out")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_an_archive_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole takes no room on the disk, and may be a thousand times longer than all of it."""
    folder = tmp_path / "saved"
    folder.mkdir()
    optimizer = torch.optim.Adam([("w", torch.nn.Parameter(torch.zeros(1000)))])
    indexed(folder, {"w": torch.zeros(1000)}, optimizer.state_dict())
    (path,) = folder.rglob("*_model_states.pt")
    os.truncate(path, 1 << 40)
    read = list[str]()
    monkeypatch.setattr(scan, "scan_file", lambda path, *more: read.append(path) or scan_file(path, *more))
    result = scan.verify(str(folder), None, ElasticConfig(), full=True)
    assert not result.ok and path.name in repr(result.problems)
    assert str(path) not in read
