"""Archives that two readers could read differently, and what is handed to a loader that would run them."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.errors import DamagedError, ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.formats.pickled import named_errors, open_pickled
from elastic_ckpt.formats.torch_archive.directory import Directory
from tests.attacks.assembly import LEGACY_START, Records, call, name, packed, records_of, text

PLAIN = pickle.dumps({"who": "plain"}, 2)
CASES = ["data.pkl", "DATA.pkl", "Data.PKL", "data.pkL", "dATA.pkl", "DATA.PKL", "daTa.pkl", "byteorder", "version"]


class Marker:
    """Leaves a file behind where a pickle runs code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def evil(folder: Path) -> bytes:
    return pickle.dumps(Marker(str(folder / "ran")), 2)


def handed_on(path: Path) -> Any:
    """What DeepSpeed's loader gets of a file; an error for users is ``None``."""
    try:
        return read_objects(str(path))
    except ElasticCkptError:
        return None


@pytest.mark.parametrize("read", [open_pickled, read_objects])
def test_a_file_of_datastates_is_refused_by_name_and_not_handed_over(read: Any, tmp_path: Path) -> None:
    header = json.dumps({"datastates_metadata": {"data_offsets": [0, 64]}}).encode()
    path = tmp_path / "mp_rank_00_model_states.pt"
    path.write_bytes(len(header).to_bytes(8, "little") + header + evil(tmp_path))
    with pytest.raises(UnsupportedError, match="files of DataStates-LLM are not supported") as refused:
        read(str(path))
    assert not refused.value.remedies[0].is_data and refused.value.file == str(path)
    path.write_bytes(path.read_bytes()[: len(header)])  # without its end, it may be anything
    with pytest.raises(DamagedError, match="truncated or unreadable"):
        read(str(path))


def shifted(raw: bytes, record: str, extra: int) -> bytes:
    """The archive whose local header of a record claims another length of its extra field."""
    new, at = bytearray(raw), raw.index(record.encode()) - 30
    struct.pack_into("<H", new, at + 28, struct.unpack_from("<H", raw, at + 28)[0] + extra)
    return bytes(new)


def with_wide_end(raw: bytes, other: bytes, offset: int) -> bytes:
    """The archive with a wide end that says what ``other``'s end does, and a locator that points to ``offset``."""
    at, theirs = raw.rindex(b"PK\x05\x06"), other.rindex(b"PK\x05\x06")
    *_, count, nbytes, start, _ = struct.unpack_from("<4s4H2LH", other, theirs)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, start)
    return raw[:at] + wide + struct.pack("<4sLQL", b"PK\x06\x07", 0, offset, 1) + raw[at:]


def hostile_archives(folder: Path) -> dict[str, bytes]:
    bad, good = evil(folder), records_of(PLAIN)
    one_root = [("file/data.pkl", PLAIN), ("file/byteorder", b"little")]
    two = packed([*one_root, ("file/DATA.PKL", bad)])
    return {
        "names that differ in case": packed([*good, *((f"file/{each}", bad) for each in CASES[1:7])]),
        "the other one first": packed([("file/Data.pkl", bad), *good]),
        "another folder first": packed([("evil/data.pkl", bad), ("evil/version", b"3\n"), *good]),
        "another folder in upper case": packed([("FILE/data.pkl", bad), *good]),
        "a folder in a folder": packed([("a/b/data.pkl", PLAIN), ("a/data.pkl", bad)]),
        "a pickle before the archive": bad + packed(good),
        "TorchScript beside it": packed([*good, ("file/constants.pkl", bad)]),
        "data elsewhere by the local header": shifted(
            packed([("file/data.pkl", PLAIN + bytes(64) + bad)]), "file/data.pkl", 64
        ),
        "a wide end that points elsewhere": with_wide_end(packed(good), two, 0),
        "a wide end of another directory": with_wide_end(two, packed(good), two.rindex(b"PK\x05\x06")),
        "an archive behind the archive": packed(good) + packed(records_of(bad)),
        "an archive in the comment": packed(good, comment=packed(records_of(bad))),
    }


def in_tar(folder: Path) -> bytes:
    """A legacy archive that is a tar archive, too, as torch's first versions wrote it: its first name is the start."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for member in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(member)
            info.size = len(evil(folder))
            tar.addfile(info, io.BytesIO(evil(folder)))
    return stream.getvalue()


@pytest.mark.parametrize("what", hostile_archives(Path("/none")))
def test_nothing_runs_of_an_archive_that_is_handed_on(tmp_path: Path, what: str) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(hostile_archives(tmp_path)[what])
    assert handed_on(path) in (None, {"who": "plain"})
    assert not (tmp_path / "ran").exists()


def test_most_of_them_would_run_code_or_break_in_torch(tmp_path: Path) -> None:
    """The control: what is refused is refused for a reason."""
    ran = 0
    for number, (what, raw) in enumerate(hostile_archives(tmp_path).items()):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(raw)
        try:
            torch.load(path, weights_only=False)
        except Exception:
            assert what
        ran += (tmp_path / "ran").exists()
        (tmp_path / "ran").rmdir() if (tmp_path / "ran").exists() else None
    assert ran >= 3


@given(
    names=st.lists(st.sampled_from([f"{root}/{each}" for root in ("file", "FILE", "a/b", "other") for each in CASES]), min_size=1, max_size=8),
    prefix=st.sampled_from([b"", b"", b"x", PLAIN, b"PK\x03\x04"]),
    extra=st.integers(-2, 2).map(lambda each: 64 * each),
    tail=st.sampled_from([b"", b"", b"PK\x05\x06", packed(records_of(PLAIN))]),
)  # fmt: skip
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_where_ours_reads_a_pickle_torch_reads_the_same(
    names: Sequence[str], prefix: bytes, extra: int, tail: bytes
) -> None:
    records: Records = [(each, pickle.dumps(number, 2) + bytes(300)) for number, each in enumerate(names)]
    records += [(f"{names[0].partition('/')[0]}/version", b"3\n")]
    raw = packed(records)
    shift = next((each for each in names if each.endswith("/data.pkl")), names[0])
    raw = prefix + (shifted(raw, shift, extra) if extra >= 0 else raw) + tail
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file.pt")
        Path(path).write_bytes(raw)
        try:
            with open(path, "rb") as stream, named_errors(path):
                directory = Directory(stream, {})
                ours = directory.read_record("data.pkl", 1 << 20)
        except ElasticCkptError:
            return
        try:
            reader = torch._C.PyTorchFileReader(path)
        except RuntimeError:  # an archive that torch refuses
            return
        assert reader.get_record("data.pkl") == ours
        assert raw[:4] == b"PK\x03\x04"  # by which torch.load knows an archive


def test_a_tar_archive_is_not_taken_for_a_legacy_one(tmp_path: Path) -> None:
    raw = bytearray(in_tar(tmp_path))
    start = LEGACY_START[:100]
    raw[: len(start)] = start
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw[:512]):06o}\0 ".encode()
    path = tmp_path / "file.pt"
    path.write_bytes(raw)
    assert tarfile.TarInfo.frombuf(bytes(raw[:512]), "utf-8", "surrogateescape")
    assert handed_on(path) is None


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.of_the_user = [1]  # type: ignore[attr-defined]
    return tensor


SPARSE = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,))
UNREADABLE = {
    "sparse": SPARSE,
    "csr": torch.eye(3).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8),
    "meta": torch.empty(3, device="meta"),
    "conjugated": torch.rand(2, dtype=torch.complex64).conj(),
    "a parameter of one": torch.nn.Parameter(SPARSE, requires_grad=False),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "with attributes": with_attribute(torch.ones(2)),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_piece_by_piece_is_made_as_torch_makes_it(tmp_path: Path, kind: str, legacy: bool) -> None:
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    with_code = {"first": UNREADABLE[kind], "then": Marker(str(tmp_path / "ran"))}
    for path, tree in ((good, {"first": UNREADABLE[kind], "then": [1]}), (bad, with_code)):
        torch.save(tree, path, _use_new_zipfile_serialization=not legacy)
    assert handed_on(bad) is None and not (tmp_path / "ran").exists()
    made = handed_on(good)
    is_broken = legacy and kind == "nested"  # torch looks at its sizes before it has read them
    expected = UNREADABLE[kind] if is_broken else torch.load(good, weights_only=False)["first"]
    assert made["then"] == [1] and described(made["first"]) == described(expected)


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Class, dtype, layout, elements and attributes."""
    if tensor.is_meta:
        values: Any = tensor.shape
    elif tensor.is_nested:
        values = [each.tolist() for each in tensor.unbind()]
    elif tensor.is_complex():
        values = tensor.resolve_conj().tolist()
    else:
        values = tensor.detach().to_dense().dequantize().tolist()
    return type(tensor), tensor.dtype, tensor.layout, values, vars(tensor), tensor.is_conj()


def test_functions_hidden_in_the_parts_of_a_tensor_are_refused(tmp_path: Path) -> None:
    rebuild, tensor = name("torch._tensor", "_rebuild_from_type_v2"), name("torch", "Tensor")
    for function in (
        ("builtins", "getattr"),
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_from_type_v2"),
    ):
        inner = b"(" + name(*function) + tensor + b")" + b"Nt"
        pickled = (
            b"\x80\x02" + call(rebuild, name("torch._tensor", "_rebuild_from_type_v2"), tensor, inner, b"N") + b"."
        )
        path = tmp_path / "file.pt"
        path.write_bytes(packed(records_of(pickled)))
        assert handed_on(path) is None, function
    path.write_bytes(packed(records_of(b"\x80\x02" + text("nothing") + b".")))
    assert handed_on(path) == "nothing"


def compressed(folder: Path) -> torch.Tensor:
    return torch.sparse_csr_tensor([0, 1], [1 << 40], [1.0], (1, 1), check_invariants=False)


def out_of_its_buffer(folder: Path) -> Any:
    class Nested:
        def __reduce__(self) -> Any:
            one = torch.tensor([[1 << 40]])
            return torch._utils._rebuild_nested_tensor, (torch.ones(3), one, torch.tensor([[1]]), torch.tensor([0]))

    return Nested()


@pytest.mark.parametrize("hostile", [compressed, out_of_its_buffer])
def test_indices_of_tensors_are_checked_since_they_are_addresses(tmp_path: Path, hostile: Any) -> None:
    torch.save(hostile(tmp_path), tmp_path / "file.pt")
    with pytest.raises(UnsupportedError, match="cannot be rebuilt"):
        read_objects(str(tmp_path / "file.pt"))
