"""The verdict about what all ranks read; on real loads: ``tests/distributed/test_verified_loads.py``."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.core.chunks import StorageChunk, listed
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import CheckpointMetadata, SourceFacts, SourceFile, TensorMetadata
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.io.checksums import ReadSums
from elastic_ckpt.load.verify_reads import RankSums, verify_reads

DATA, BEGIN, PADDING = bytes(range(200)) * 20, 64, 40


def metadata(folder: Path, data: bytes = DATA) -> CheckpointMetadata:
    """A record of fp32 values whose last ``PADDING`` bytes are of no tensor."""
    (folder / "file.pt").write_bytes(bytes(BEGIN) + data)
    file = SourceFile(
        str(folder / "file.pt"), BEGIN + len(DATA), records=Records.of([(BEGIN, len(DATA), zlib.crc32(DATA))])
    )
    numel = (len(DATA) - PADDING) // 4
    tensor = TensorMetadata("weight", "fp32", (numel,), "float32", listed(StorageChunk(FlatRange(0, numel), 0, BEGIN)))
    facts = SourceFacts("native", str(folder), "step4", 1, 2, "0.19.8")
    return CheckpointMetadata(facts, (file,), {}, {("weight", "fp32"): tensor}, ())


def reader(checkpoint: CheckpointMetadata, data: bytes, *ranges: tuple[int, int]) -> RankSums:
    sums = ReadSums(checkpoint.files)
    for start, stop in ranges:
        sums.add(0, BEGIN + start, [memoryview(data[start:stop])])
    return RankSums.of(sums)


def test_padding_that_nobody_owns_is_read_to_complete_a_record(tmp_path: Path) -> None:
    checkpoint = metadata(tmp_path)
    read = [reader(checkpoint, DATA, (0, 1000)), reader(checkpoint, DATA, (1000, len(DATA) - PADDING))]
    verified = verify_reads(checkpoint, read)
    assert (verified.nbytes, verified.without_checksum_nbytes, verified.incomplete_nbytes) == (
        len(DATA) - PADDING,
        0,
        0,
    )
    assert str(verified) == "100 % of 3.96kB"


@pytest.mark.parametrize("position", [0, 2000, len(DATA) - PADDING - 1, len(DATA) - 1])
def test_a_changed_byte_is_found_even_in_the_padding(tmp_path: Path, position: int) -> None:
    data = bytearray(DATA)
    data[position] ^= 1
    checkpoint = metadata(tmp_path, bytes(data))
    read = [reader(checkpoint, bytes(data), (0, len(DATA) - PADDING))]
    with pytest.raises(DamagedError, match="checksum of a record differs") as caught:
        verify_reads(checkpoint, read)
    assert caught.value.parameter == "fp32 of weight" and caught.value.file == checkpoint.files[0].path
    assert f"{zlib.crc32(DATA):08x}" in str(caught.value.expected)


def test_what_could_not_be_compared_is_counted(tmp_path: Path) -> None:
    checkpoint = metadata(tmp_path)
    sums = ReadSums(checkpoint.files)
    sums.add(0, 0, [memoryview(bytes(50))])
    sums.add(0, BEGIN, [memoryview(DATA[: -PADDING - 40])])  # a state that is not restored, say
    verified = verify_reads(checkpoint, [RankSums.of(sums)])
    assert (verified.nbytes, verified.without_checksum_nbytes) == (0, 50)
    assert verified.incomplete_nbytes == len(DATA) - PADDING - 40
    assert "0 % of" in str(verified) and "50.0B have no checksum" in str(verified)
