"""Mutated files: whatever happens to a file's bytes, nothing runs, hangs or takes memory, and errors are of this package.

``ELASTIC_CKPT_FUZZ`` is the number of mutated files, which are the same ones in each run; ``launch/test.sh --fuzz`` is
the nightly mode with 200,000.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import open_pickled
from tests.attacks import assembly
from tests.attacks.assembly import Records, archive, packed
from tests.attacks.guard import read
from tests.attacks.mutations import BYTES, NUMBERS, OF_PICKLES, moved, mutated
from tests.attacks.pickles import NAMES
from tests.attacks.seeds import TREES, saved
from tests.trees import described

FILES = int(os.environ.get("ELASTIC_CKPT_FUZZ", "1400"))
KINDS = [*TREES, "legacy", "protocol5"]
REUSED_FOLDER = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = saved(tmp_path_factory.mktemp("seeds"))
    for path in paths.values():  # what is imported at first use is imported now, before the canary watches
        file = open_pickled(str(path))
        materialise(file, file.tree)
    return paths


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_to_be_mutated_are_read_like_torch_reads_them(seeds: dict[str, Path], kind: str) -> None:
    file, error = read(str(seeds[kind]))
    assert error is None and file is not None
    assert described(materialise(file, file.tree)) == described(torch.load(seeds[kind], weights_only=False))


def mutant(random: Random, raw: bytes) -> bytes:
    """A changed file: any of its bytes, or its pickle within a sound archive, or a record's name and data."""
    way = random.randrange(4)
    if way == 0 or not raw.startswith(b"PK"):
        return mutated(random, raw, OF_PICKLES if not raw.startswith(b"PK") else BYTES)
    records = records_in(raw)
    position = random.randrange(len(records)) if way == 1 else 0
    name, data = records[position]
    if way == 1:
        records[position] = random.choice([(name, mutated(random, data, BYTES)), (name + "/x", data), (name, b"")])
    elif way == 2:
        records[0] = name, moved(random, data)
    else:
        records[0] = name, mutated(random, data, OF_PICKLES)
    return packed(records)


def records_in(raw: bytes) -> Records:
    """The records of an archive, its pickle first."""
    with zipfile.ZipFile(io.BytesIO(raw)) as source:
        return [(name, source.read(name)) for name in source.namelist()]


@pytest.mark.parametrize("kind", KINDS)
def test_no_mutation_breaks_the_reader(seeds: dict[str, Path], tmp_path: Path, kind: str) -> None:
    raw, path, refused = seeds[kind].read_bytes(), tmp_path / "file.pt", 0
    count = max(1, FILES // len(KINDS))
    for number in range(count):
        mutation = mutant(Random(f"{kind} {number}"), raw)
        path.write_bytes(mutation)
        try:
            refused += read(str(path))[1] is not None
        except BaseException:
            (kept := seeds[kind].parent / f"{kind}-{number}.pt").write_bytes(mutation)
            print(f"mutation {number} of {kind}: {kept}")
            raise
    assert count < 200 or 0.2 * count < refused < count, (
        "the others are still read: mutations reach behind the first checks"
    )


ALLOWED = [("collections", "OrderedDict"), ("collections", "Counter"), ("argparse", "Namespace"), ("torch", "Size")]
ALLOWED += [("builtins", name) for name in ("set", "frozenset", "getattr", "bytearray", "complex", "object")]
ALLOWED += [("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"), ("torch", "device")]
ALLOWED += [
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch", "Tensor"),
    ("torch", "float32"),
    ("_codecs", "encode"),
]
ALLOWED += [
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("pathlib", "PosixPath"),
]
ALLOWED += [("numpy._core.multiarray", "scalar"), ("deepspeed.runtime.zero.config", "ZeroStageEnum")]
ALLOWED += [("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), ("copyreg", "_reconstructor")]
STORAGE = assembly.storage("0", 4)
PARTS = st.one_of(
    st.sampled_from([*ALLOWED * 3, *NAMES]).map(lambda pair: assembly.name(*pair)),
    st.sampled_from([bytes([code]) for code in b"((((tttRRRRR]}eusabbb\x81\x81Q0N\x88)\x85\x86\x87\x8f\x90\x91ld2o"]),
    st.sampled_from(NUMBERS).map(assembly.number),
    st.text("ab_<f4latin1", max_size=6).map(assembly.text),
    st.integers(0, 6).map(assembly.put),
    st.integers(0, 6).map(assembly.get),
    st.just(STORAGE),
    st.tuples(st.sampled_from([0, 1, -1]), st.lists(st.sampled_from([0, 1, 2, 4, 1 << 40]), max_size=3)).map(
        lambda drawn: assembly.tensor(STORAGE, drawn[0], drawn[1], [1] * len(drawn[1]))
    ),
)


@settings(REUSED_FOLDER, max_examples=max(1, FILES // 5))
@given(st.lists(PARTS, max_size=40))
def test_no_program_of_opcodes_breaks_the_reader(tmp_path: Path, parts: list[bytes]) -> None:
    read(archive(tmp_path, b"\x80\x02" + b"".join(parts) + b".", bytes(16)))
