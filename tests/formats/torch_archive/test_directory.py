"""Record offsets, against ``zipfile`` and torch's own writer."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.formats.torch_archive.directory import ArchiveError, Directory, Layouts

REUSED_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def by_header(path: Path, entry: zipfile.ZipInfo) -> int:
    raw = path.read_bytes()
    name, extra = struct.unpack_from("<2H", raw, entry.header_offset + 26)
    return entry.header_offset + 30 + name + extra


def check(path: Path) -> None:
    with open(path, "rb") as stream, zipfile.ZipFile(path) as archive:
        directory = Directory(stream, {})
        assert {f"{directory.root}/{name}" for name in directory.layout.records} == set(archive.namelist())
        for entry in archive.infolist():
            record = directory.layout.records[entry.filename.removeprefix(f"{directory.root}/")]
            assert (record.nbytes, record.crc32) == (entry.file_size, entry.CRC)
            assert directory.offset(record) == by_header(path, entry)


@settings(REUSED_FOLDER, max_examples=60)
@given(st.text("abcdefghé_.", min_size=1, max_size=90), st.lists(st.integers(0, 200), max_size=8))
def test_records_of_torch_are_where_their_headers_say(tmp_path: Path, name: str, numels: list[int]) -> None:
    path = tmp_path / f"{name}.pt"
    torch.save([torch.ones(numel) for numel in numels], path)
    check(path)
    path.unlink()


#: Python's own reader takes the signature of a directory's end for one.
COMMENTS = st.binary(max_size=50).filter(lambda comment: b"PK\x05\x06" not in comment)


@settings(REUSED_FOLDER, max_examples=60)
@given(st.lists(st.tuples(st.binary(max_size=100), st.binary(max_size=9)), max_size=8), COMMENTS)
def test_records_of_other_writers_are_where_their_headers_say(
    tmp_path: Path, records: list[tuple[bytes, bytes]], comment: bytes
) -> None:
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("top/data.pkl", b"x")
        for number, (data, extra) in enumerate(records):
            entry = zipfile.ZipInfo(f"top/data/{number}")
            entry.extra = struct.pack("<2H", 0x4246, len(extra)) + extra
            archive.writestr(entry, data)
        archive.comment = comment
    check(path)


def test_torchs_alignment_makes_headers_unnecessary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([torch.ones(numel) for numel in range(20)], tmp_path / "many.pt")
    monkeypatch.setattr(Directory, "_offset_by_header", lambda *_: pytest.fail("a header was read"))
    with open(tmp_path / "many.pt", "rb") as stream:
        directory = Directory(stream, {})
        assert all(directory.offset(record) for record in directory.layout.records.values() if record.nbytes)


def test_the_name_it_was_saved_under_is_known(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / "mp_rank_00_model_states.pt").rename(tmp_path / "other.pt")
    with open(tmp_path / "other.pt", "rb") as stream:
        assert Directory(stream, {}).root == "mp_rank_00_model_states"


def test_a_record_is_read_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": 1}, path)
    with open(path, "rb") as stream:
        directory = Directory(stream, {})
        record = directory.find("data.pkl")
        assert record is not None and directory.read_record("data.pkl", 1000).startswith(b"\x80\x02")
        at = directory.offset(record)
        with pytest.raises(ArchiveError, match="at most 3 bytes"):
            directory.read_record("data.pkl", 3)
        with pytest.raises(ArchiveError, match="no record"):
            directory.read_record("constants.pkl", 3)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with open(path, "rb") as stream, pytest.raises(ArchiveError, match="CRC-32"):
        Directory(stream, {}).read_record("data.pkl", 1000)


def names_twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("file/data.pkl", b"other")


def claims_many(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-12:-10] = b"\xff\xff"
    path.write_bytes(raw)


@pytest.mark.parametrize("change", [names_twice, claims_many])
def test_a_directory_that_contradicts_itself_is_refused(tmp_path: Path, change: object) -> None:
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("file/data.pkl", b"x")
    change(path)  # type: ignore[operator]
    with open(path, "rb") as stream, pytest.raises(ArchiveError):
        Directory(stream, {})


@pytest.mark.parametrize("change", ["name", "longer name", "size", "value", "pickle outside"])
def test_a_layout_is_shared_by_archives_that_differ_in_their_name_alone(tmp_path: Path, change: str) -> None:
    paths = [tmp_path / "rank_1_states.pt", tmp_path / "rank_2_states.pt"]
    if change == "longer name":
        paths[1] = tmp_path / "rank_1000_states.pt"
    for number, path in enumerate(paths):
        changed = number if change in ("size", "value") else 0
        torch.save([torch.full((3 + (change == "size") * number,), float(changed)), torch.zeros(0)], path)
        if change == "pickle outside":
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr("data/0", b"not below the root")
    known: Layouts = {}
    alone, together = [], []
    for path in paths:
        with open(path, "rb") as stream:
            alone.append(Directory(stream, {}))
            together.append(Directory(stream, known))
            assert together[-1].root == path.stem
            assert list(together[-1].layout.records) == list(alone[-1].layout.records)
            for name in (name for name in alone[-1].layout.records if not name.startswith("../")):
                record = together[-1].find(name)
                own = alone[-1].find(name)
                assert record is not None and own is not None and record[1:] == own[1:]
                assert together[-1].offset(record) == alone[-1].offset(record)
    assert (together[0].layout is together[1].layout) == (change == "name")


def test_headers_are_compared_with_the_files_own_name_where_a_layout_is_shared(tmp_path: Path) -> None:
    known: Layouts = {}
    for name in "ab":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for record, data in (("data.pkl", b"x"), ("data/0", b"1234")):
                archive.writestr(zipfile.ZipInfo(f"{name}/{record}"), data)
        with open(tmp_path / name, "rb") as stream, zipfile.ZipFile(tmp_path / name) as archive:
            directory = Directory(stream, known)
            record = directory.find("data/0")
            assert record is not None
            assert directory.offset(record) == by_header(tmp_path / name, archive.getinfo(f"{name}/data/0"))
    assert len(known) == 1
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes().replace(b"b/data/0", b"a/data/0", 1))
    with open(tmp_path / "b", "rb") as stream, pytest.raises(ArchiveError, match="the header of record b/data/0"):
        Directory(stream, known).offset(record)


def test_a_name_that_occurs_elsewhere_in_the_directory_shares_no_layout(tmp_path: Path) -> None:
    """Else bytes that say where a record is could be taken for its name."""
    for name in "ab":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{name}/data.pkl", b"x")
            archive.writestr(f"{name}/data/a/b/", b"")
    known: Layouts = {}
    roots = []
    for name in "ab":
        with open(tmp_path / name, "rb") as stream:
            roots.append(Directory(stream, known).root)
    assert roots == ["a", "b"] and not known
