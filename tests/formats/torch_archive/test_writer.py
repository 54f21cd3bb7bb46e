"""What is written for other loaders: equal to what was read, and naming nothing that was not understood."""

from __future__ import annotations

import pickle
import pickletools
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from elastic_ckpt.errors import ElasticCkptError, UnsafePickleError, UnsupportedError
from elastic_ckpt.formats.objects import read_objects
from elastic_ckpt.formats.pickled import open_whole
from elastic_ckpt.formats.torch_archive.globals import find_global
from elastic_ckpt.formats.torch_archive.writer import pickled_tree
from elastic_ckpt.tools.conversion.rewriting import rewrite
from tests.attacks.assembly import archive, packed
from tests.attacks.mutations import OF_PICKLES, moved, mutated
from tests.attacks.pickles import NAMES, TRICKS, routes
from tests.attacks.seeds import TREES, saved
from tests.formats.client_states import ALLOWED, OBJECTS, OF_USERS, TENSORS, Comparison, states
from tests.trees import described

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of quantized and typed storages


def rewritten(source: Path, target: Path) -> Path:
    """The file written anew, client state and all."""
    assert rewrite(str(source), target, trust_pickle=False, skip_unreadable=False) == []
    return target


def anew(source: Path) -> bytes:
    """An archive of what was read of a file, by nothing of torch."""
    file = open_whole(str(source))
    pickled, storages = pickled_tree(file.tree)
    records = [("file/data.pkl", pickled), ("file/byteorder", b"little")]
    with file.kept_open():
        for key, ref in storages.items():
            raw = bytearray(ref.nbytes)
            file.read_into(ref.byte_offset, memoryview(raw))
            records.append((f"file/data/{key}", bytes(raw)))
    return packed([*records, ("file/version", b"3\n")])


@pytest.mark.parametrize("kind", [*TREES, "legacy", "protocol5"])
def test_files_of_deepspeed_are_written_as_torch_reads_them(tmp_path: Path, kind: str) -> None:
    source, target = saved(tmp_path)[kind], tmp_path / "anew.pt"
    rewritten(source, target)
    expected = described(torch.load(source, weights_only=False))
    assert described(torch.load(target, weights_only=False)) == expected
    assert described(read_objects(str(target))) == expected


def test_what_shares_memory_does_so_again(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    torch.save({"whole": whole, "part": whole[4:], "again": whole}, tmp_path / "a.pt")
    read = torch.load(rewritten(tmp_path / "a.pt", tmp_path / "b.pt"), weights_only=False)
    assert read["whole"] is read["again"] and torch.equal(read["part"], whole[4:])
    assert read["part"].data_ptr() - read["whole"].data_ptr() == 16
    assert (tmp_path / "b.pt").stat().st_size < 2 * (tmp_path / "a.pt").stat().st_size


def test_memory_that_nothing_refers_to_is_left_out(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    hidden = packed([("a/data.pkl", b"\x80\x02}."), ("a/data/7", b"secret" * 100), ("a/byteorder", b"little")])
    (tmp_path / "a.pt").write_bytes(hidden)
    assert b"secret" not in rewritten(tmp_path / "a.pt", tmp_path / "b.pt").read_bytes()


def test_records_are_aligned_as_torch_aligns_them(tmp_path: Path) -> None:
    tree = {f"w{number}": torch.ones(number) for number in range(1, 40)}
    torch.save(tree, tmp_path / "a.pt")
    target = rewritten(tmp_path / "a.pt", tmp_path / "b.pt")
    for key, tensor in torch.load(target, weights_only=True, mmap=True).items():
        assert torch.equal(tensor, tree[key])
    with zipfile.ZipFile(target) as found, target.open("rb") as stream:
        for info in found.infolist():
            stream.seek(info.header_offset + 26)
            name_nbytes, extra_nbytes = struct.unpack("<2H", stream.read(4))
            assert (info.header_offset + 30 + name_nbytes + extra_nbytes) % 64 == 0, info.filename
            assert info.filename.startswith("b/") and found.testzip() is None


DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.bool]
DTYPES += [torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.complex64, torch.complex128]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_form(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = torch.arange(6).reshape(2, 3).to(dtype)
    marked = plain.clone()
    marked.owner = {"of": [1]}  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(plain.clone(), requires_grad=plain.is_floating_point())
    noted = torch.nn.Parameter(plain.clone(), requires_grad=False)
    noted.ds_id = "3_1"  # type: ignore[attr-defined]
    tree = {"t": plain.t(), "empty": plain[:0], "scalar": plain[0, 0], "p": parameter, "marked": marked, "noted": noted}
    torch.save(tree, tmp_path / "a.pt")
    read = torch.load(rewritten(tmp_path / "a.pt", tmp_path / "b.pt"), weights_only=False)
    for key, tensor in tree.items():
        other = read[key]
        assert type(other) is type(tensor) and other.dtype == dtype and other.stride() == tensor.stride()
        assert other.shape == tensor.shape and other.requires_grad == tensor.requires_grad, key
        assert raw_bytes(other) == raw_bytes(tensor), key
        assert vars(other) == vars(tensor)


def written_as_torch_reads(folder: Path, tree: Any) -> None:
    """Save a client state, write it anew, and compare what torch loads of both."""
    source, target = folder / "a.pt", folder / "b.pt"
    torch.save({"module": {}, "client": tree}, source)
    target.write_bytes(anew(source))
    expected = torch.load(source, weights_only=False)
    assert Comparison().difference(expected, torch.load(target, weights_only=False)) is None
    assert Comparison().difference(expected, read_objects(str(target))) is None


@pytest.mark.parametrize("name", [*TENSORS, *OBJECTS])
def test_each_object_is_written_as_it_was(tmp_path: Path, name: str) -> None:
    written_as_torch_reads(tmp_path, {**TENSORS, **OBJECTS}[name]())


@pytest.mark.parametrize("name", OF_USERS)
def test_each_object_of_a_class_that_the_user_allowed_is_written_or_refused(tmp_path: Path, name: str) -> None:
    with torch.serialization.safe_globals(ALLOWED):
        try:
            written_as_torch_reads(tmp_path, OF_USERS[name]())
        except UnsupportedError as error:
            assert name == "marked" and "cannot be read by its bytes" in error.problem


@given(states({**TENSORS, **OBJECTS}))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_client_states_are_written_as_they_were(tmp_path: Path, client: Any) -> None:
    written_as_torch_reads(tmp_path, client)


def names_in(pickled: bytes) -> set[tuple[str, str]]:
    """What an unpickler would import; Python writes its own names as those of Python 2 in protocol 2."""
    lines = [argument for opcode, argument, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"]
    named = [(module, name) for module, _, name in (str(line).partition(" ") for line in lines)]
    return {
        (IMPORT_MAPPING.get(module, module), NAME_MAPPING.get((module, name), ("", name))[1]) for module, name in named
    }


def test_nothing_is_written_that_is_not_on_the_closed_list(tmp_path: Path) -> None:
    """Of pickles that name what runs code, by any opcode, in any place, and of mutated files."""
    random = Random(7)
    hostile = [route for each in NAMES for route in routes(*each).values()] + list(TRICKS.values())
    plain = [pickle.dumps(tree, 2) for tree in ({"a": [1, (2.5, "x")]}, {"module": {}, "b": {1, 2}})]
    hostile += [mutated(random, random.choice([*hostile, *plain]), OF_PICKLES) for _ in range(1500)]
    hostile += [moved(random, random.choice(plain)) for _ in range(300)]
    written = 0
    for raw in hostile:
        path = Path(archive(tmp_path, raw, bytes(16)))
        try:
            pickled, _ = pickled_tree(open_whole(str(path)).tree)
        except ElasticCkptError:
            continue
        written += 1
        for module, name in names_in(pickled):
            assert find_global(module, name).error is None, (module, name)
    assert written > 50


def test_code_in_a_client_state_is_not_written(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return exec, ("raise SystemExit",)

    torch.save({"module": {"w": torch.ones(2)}, "odd": Evil(), "epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(UnsafePickleError, match="not on the list") as caught:
        rewritten(tmp_path / "a.pt", tmp_path / "b.pt")
    assert caught.value.file == str(tmp_path / "a.pt") and "on_unreadable_entry" in str(caught.value.remedy)
    left_out = rewrite(str(tmp_path / "a.pt"), tmp_path / "b.pt", trust_pickle=False, skip_unreadable=True)
    assert left_out == ["odd"]
    assert torch.load(tmp_path / "b.pt", weights_only=True)["epoch"] == 3


class Outer:
    class Inner:
        pass


def test_a_class_in_a_class_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"module": {}, "x": Outer.Inner()}, tmp_path / "a.pt", pickle_protocol=4)
    with torch.serialization.safe_globals([Outer.Inner]), pytest.raises(UnsupportedError, match="in another class"):
        rewritten(tmp_path / "a.pt", tmp_path / "b.pt")


def test_what_is_too_deep_is_refused(tmp_path: Path) -> None:
    deep = b"\x80\x02}X\x06\x00\x00\x00module}sX\x01\x00\x00\x00x" + b"](" * 900 + b"e" * 900 + b"s."
    path = Path(archive(tmp_path, deep))
    with pytest.raises(UnsupportedError, match="too deeply"):
        rewritten(path, tmp_path / "b.pt")
