"""Verification without a checkpoint: archives, checksums, values, names of files."""

from __future__ import annotations

import io
import os
import random
import zipfile
import zlib
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
    listed,
)
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    ITEMSIZE,
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    StateFacts,
    TensorMetadata,
)
from elastic_ckpt.core.state_kinds import BlockFormat, Codebook
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.tp_rules import Rule
from elastic_ckpt.errors import DamagedError, MismatchError
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.tools import findings
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, kind_of, of_error
from elastic_ckpt.tools.verification import check_metadata, scan
from elastic_ckpt.tools.verification.archive import Problem, Record, read_archive
from elastic_ckpt.tools.verification.copies import check_copies
from elastic_ckpt.tools.verification.scan import (
    Checked,
    Odd,
    Span,
    Work,
    check,
    judge,
    look,
    metadata_spans,
    wrong_records,
)


def problems_of(data: bytes) -> tuple[list[Problem], tuple[Record, ...], bool]:
    """What is wrong with an archive, checksums included; its records; whether torch wrote it."""

    archive = read_archive(io.BytesIO(data))
    found = list(archive.problems)
    for record in archive.records:
        if zlib.crc32(data[record.offset : record.offset + record.nbytes]) != record.crc32:
            found.append(("checksum", record.name))
    return found, archive.records, archive.by_torch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file of ``torch.save``, with an empty tensor."""
    path = tmp_path_factory.mktemp("saved") / "file.pt"
    torch.save({"a": torch.arange(5.0), "empty": torch.empty(0), "b": [1, "two"]}, path)
    return path.read_bytes()


def test_an_archive_of_torch_has_no_problems_and_all_of_its_records(saved: bytes, tmp_path: Path) -> None:
    found, records, by_torch = problems_of(saved)
    path = tmp_path / "file.pt"
    path.write_bytes(saved)
    with zipfile.ZipFile(path) as archive:
        expected = [(info.filename, info.file_size, info.CRC) for info in archive.infolist()]
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    assert (found, by_torch) == ([], True)
    assert [(record.name, record.nbytes, record.crc32) for record in records] == expected
    for record in records:
        assert saved[record.offset : record.offset + record.nbytes] == contents[record.name]


def test_no_bit_of_an_archive_is_passed_over(saved: bytes) -> None:
    """Headers, directory, padding and data. Every seventh bit, to save time: places in a byte and fields all occur."""
    for bit in range(0, 8 * len(saved), 7):
        data = bytearray(saved)
        data[bit // 8] ^= 1 << bit % 8
        assert problems_of(bytes(data))[0], bit


def test_every_length_that_a_file_may_be_cut_to_counts(saved: bytes) -> None:
    for nbytes in (*range(0, len(saved), 13), *range(len(saved) - 120, len(saved))):
        assert problems_of(saved[:nbytes])[0], nbytes
    assert problems_of(saved + b"\0")[0]


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_of_other_writers(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "other.zip"
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.comment = b"a comment"
        archive.writestr("one", b"1" * 1000)
        archive.writestr("two", random.Random(0).randbytes(500))
    found, records, by_torch = problems_of(path.read_bytes())
    assert not by_torch
    if kind == zipfile.ZIP_STORED:
        assert (found, [record.name for record in records]) == ([], ["one", "two"])
    else:
        assert {code for code, _ in found} == {findings.DIRECTORY}
        assert records == () and "compressed" in found[0][1]


def test_noise_is_no_archive() -> None:
    draw = random.Random(3)
    for nbytes in (0, 1, 21, 22, 500):
        ((_, text),), records, _ = problems_of(draw.randbytes(nbytes))
        assert text.endswith("its records were not checked") and records == ()
    assert problems_of(b"PK\x05\x06" * 30)[0]


def test_noise_in_a_directory_is_damage_to_the_reader_too(saved: bytes, tmp_path: Path) -> None:
    """Offsets, methods, sizes: whatever zipfile makes of them."""
    path = tmp_path / "noise.pt"
    start = saved.index(b"PK\x01\x02")
    raised = 0
    for bit in [
        *range(8 * 28, 8 * 30),
        *range(8 * start, 8 * (start + 30)),
        *range(8 * (len(saved) - 22), 8 * len(saved)),
    ]:
        data = bytearray(saved)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            open_pickled(str(path))
        except DamagedError:
            raised += 1
    assert raised > 50


def written(folder: Path, nbytes: int, seed: int = 0) -> Path:
    path = folder / "file"
    path.write_bytes(random.Random(seed).randbytes(nbytes))
    return path


def record_of(data: bytes, name: str, offset: int, nbytes: int) -> Record:
    return Record(name, offset, nbytes, zlib.crc32(data[offset : offset + nbytes]))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes and slices of 256, so that everything crosses some."""
    monkeypatch.setattr(scan, "CHUNK_NBYTES", 64)
    monkeypatch.setattr(scan, "SLICE_NBYTES", 256)


@pytest.mark.parametrize("threads", [1, 3])
def test_checksums_of_records_across_chunks_and_slices(small_chunks: None, tmp_path: Path, threads: int) -> None:
    path = written(tmp_path, 3000)
    data = path.read_bytes()
    draw = random.Random(threads)
    borders = sorted(draw.sample(range(3001), 24))
    pairs = zip(borders[::2], borders[1::2], strict=True)
    records = [record_of(data, f"{n}", low, high - low) for n, (low, high) in enumerate(pairs)]
    records += [record_of(data, "all", 0, 3000), record_of(data, "none", 17, 0)]
    work = Work(str(path), len(data), tuple(records))
    (checked,) = check([work], threads)
    assert checked.nbytes == 3000 and checked.failure is None
    assert wrong_records(work, checked) == {}
    offset = draw.randrange(3000)
    path.write_bytes(data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :])
    (checked,) = check([work], threads)
    hit = {record.name for record in records if record.offset <= offset < record.offset + record.nbytes}
    assert {record.name for record in wrong_records(work, checked)} == hit and "all" in hit
    assert wrong_records(work, checked)[records[-2]] == zlib.crc32(path.read_bytes())


def test_records_without_a_checksum_are_right_only_where_none_has_one(tmp_path: Path) -> None:
    path = written(tmp_path, 100)
    bare = Record("bare", 0, 50, 0)
    work = Work(str(path), 100, (bare,))
    assert not work.has_checksums and wrong_records(work, check([work], 1)[0]) == {}
    both = Work(str(path), 100, (bare, record_of(path.read_bytes(), "other", 50, 50)))
    assert both.has_checksums and list(wrong_records(both, check([both], 1)[0])) == [bare]


def test_a_file_that_became_shorter_is_a_failure_and_no_wrong_checksum(small_chunks: None, tmp_path: Path) -> None:
    path = written(tmp_path, 2000)
    data = path.read_bytes()
    work = Work(str(path), 2000, (record_of(data, "early", 0, 200), record_of(data, "late", 500, 1400)))
    os.truncate(path, 1000)
    (checked,) = check([work], 2)
    assert checked.failure is not None and "byte 1000" in checked.failure
    assert wrong_records(work, checked) == {}
    (gone,) = check([Work(str(tmp_path / "gone"), 10)], 1)
    assert gone.failure is not None and "no such file" in gone.failure


def looked_at(values: torch.Tensor) -> Odd:
    return look(values.view(torch.uint8).numpy().data, str(values.dtype).removeprefix("torch."))


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_are_no_numbers_are_counted(dtype: torch.dtype) -> None:
    values = torch.linspace(-1, 1, 101).to(dtype)
    assert looked_at(values) == {}
    values[[7, 50]] = float("inf")
    values[60] = float("-inf")
    assert looked_at(values) == {"inf": (3, 7)}
    values[[9, 100]] = float("nan")
    assert looked_at(values) == {"nan": (2, 9), "inf": (3, 7)}


def test_sums_that_overflow_are_no_infinite_values() -> None:
    assert looked_at(torch.full((1000,), 6e4, dtype=torch.float16)) == {}
    assert looked_at(torch.full((1000,), 3e38)) == {}


@pytest.mark.parametrize("dtype", sorted(name for name in ITEMSIZE if "float8" in name or "float16" in name))
def test_no_code_of_a_short_dtype_is_taken_for_another(dtype: str) -> None:
    nbits = 8 * ITEMSIZE[dtype]
    codes = torch.arange(2**nbits, dtype=torch.int64).to(torch.uint8 if nbits == 8 else torch.int16)
    values = codes.view(getattr(torch, dtype)).to(torch.float32)
    masks = {"nan": values.isnan(), "inf": values.isinf()}
    expected = {kind: (int(mask.sum()), int(mask.int().argmax())) for kind, mask in masks.items() if mask.any()}
    assert expected and looked_at(codes.view(getattr(torch, dtype))) == expected


@pytest.mark.parametrize(("offset", "dtype"), [(0, "float32"), (132, "float32"), (7, "float32"), (129, "bfloat16")])
def test_spans_are_looked_at_wherever_they_are(small_chunks: None, tmp_path: Path, offset: int, dtype: str) -> None:
    """Across chunks and slices, misaligned ones too; what is before and behind them is padding, and garbage."""
    values = torch.ones(300, dtype=getattr(torch, dtype))
    values[[123, 299]] = float("nan")
    values[200] = float("inf")
    garbage = b"\xff" * offset
    path = tmp_path / "file"
    path.write_bytes(garbage + values.view(torch.uint8).numpy().tobytes() + b"\xff" * 64)
    span = Span(offset, 300, dtype, "w", "exp_avg", 1000)
    (checked,) = check([Work(str(path), path.stat().st_size, (span,))], 2)
    assert checked.odd == {span: {"nan": (2, 123), "inf": (1, 200)}}
    assert list(judge(str(path), checked.odd)) == [
        Finding(ERROR, "nan", "2 NaN in exp_avg, the first at element 1123", "w", str(path)),
        Finding(ERROR, "inf", "1 infinite values in exp_avg, the first at element 1200", "w", str(path)),
    ]


def test_spans_of_one_tensor_in_one_file_are_one_finding() -> None:
    odd = {
        Span(0, 10, "float32", "w", MASTER, 50): {"nan": (1, 2)},
        Span(80, 5, "float32", "w", MASTER, 7): {"nan": (3, 1)},
    }
    assert [finding.message for finding in judge("file", odd)] == ["4 NaN in fp32, the first at element 8"]


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
    return TensorMetadata(name, key, (100,), dtype, listed(*chunks))


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
    assert [note.message for note in notes] == ["param group 1 has no optimizer states: c"]
    whole = SourceFacts("native", "/ckpt/step4", "step4", 0, 2, "0.19.8")
    saved["b"] = SavedParameter((100,), 0, ())  # without ZeRO: it got no gradient
    found, notes = checked_metadata(metadata_of(tensors, saved, source=whole))
    assert found == [] and "no gradient: b" in notes[-1].message


def test_a_parameter_without_a_master_and_a_tensor_that_ends_behind_its_file() -> None:
    behind = TensorMetadata("w", MASTER, (100,), "float32", listed(StorageChunk(FlatRange(0, 100), 0, 700)))
    found, _ = checked_metadata(metadata_of([behind], {"w": parameter((100,)), "lost": parameter((3,))}))
    assert [(finding.kind, finding.parameter) for finding in found] == [("unreadable", "w"), ("incomplete", "lost")]
    assert "the end of its file; expected: 1100 bytes or more; found: 1000 bytes" in found[0].message


@pytest.mark.parametrize(("numel", "expected"), [(140, []), (150, ["1030 bytes or more"])])
def test_a_partition_may_end_behind_its_file_where_it_is_padding(numel: int, expected: list[str]) -> None:
    flat = FlatTensors(files=range(2), byte_offsets=by_rank([64, 750]), numel=80, itemsize=4)
    sources = (PartitionedChunks(PartitionRule(numel, step=80), flat),)
    weights = TensorMetadata("w", MASTER, (numel,), "float32", sources)
    found, _ = checked_metadata(metadata_of([weights], {"w": parameter((numel,))}))
    assert [finding.expected for finding in found] == expected
    assert all((finding.kind, finding.file) == ("unreadable", "/ckpt/step4/1") for finding in found)


def test_states_that_are_damaged_or_not_understood() -> None:
    metadata = metadata_of([], {}, states=StateFacts({"odd": "a dict"}, {"state1": "no absmax1"}), notes=("hm",))
    found, notes = checked_metadata(metadata)
    assert [(finding.kind, finding.parameter) for finding in found] == [("damaged", "state1")]
    assert [(note.kind, note.parameter) for note in notes] == [("not-checked", "odd"), ("reader", None)]


def test_of_quantized_states_the_scales_are_looked_at() -> None:
    """Blocks of 256: elements 300 to 700 of a partition are in blocks 1 and 2."""
    blocks = BlockFormat(256, "absmax1", Codebook(tuple(-1 + n / 127.5 for n in range(256))))
    chunk = StorageChunk(FlatRange(0, 400), 1, 5000, BlockCode(blocks, 300, 80_000))
    coded = TensorMetadata("w", "state1", (400,), "uint8", listed(chunk))
    spans = metadata_spans(metadata_of([coded], {}))
    assert spans == {"/ckpt/step4/1": [Span(80_004, 2, "float32", "w", "absmax1", 1)]}
    integers = tensor("counts", (0, 100, 0), dtype="int64")
    assert metadata_spans(metadata_of([integers], {})) == {}


def test_copies_go_by_the_names_that_rename_gives_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(torch.tensor([1.0, 2.0, 1.0, 3.0]).numpy().tobytes())
    shards = tuple(chain.from_iterable(listed(StorageChunk(FlatRange(0, 2), 0, 8 * rank)) for rank in (0, 1)))
    saved = TensorMetadata("old", MASTER, (2,), "float32", shards, shards=((2,), (2,)))
    facts = SourceFacts("native", str(tmp_path), "step4", 1, 1, "0.19.8", tp=2)
    metadata = metadata_of([saved], {"old": parameter((2,))}, source=facts)
    metadata = replace(metadata, files=(SourceFile(str(tmp_path / "a"), 16),))
    rules = [Rule(pattern="new", kind="replicated")]
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
    assert of_error(error, "foreign") == Finding(ERROR, "foreign", "d")


def test_a_slice_that_failed_says_nothing_of_its_records() -> None:
    record = Record("r", 0, 10, 5)
    assert wrong_records(Work("f", 10, (record,)), Checked(crc32={record: (7, 4)})) == {}
    assert wrong_records(Work("f", 10, (record,)), Checked(crc32={record: (7, 10)})) == {record: 7}
