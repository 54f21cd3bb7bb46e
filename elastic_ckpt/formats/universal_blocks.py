"""How the codes of a parameter's 8-bit states are divided into blocks, as universal checkpoints record it."""

from __future__ import annotations

from typing import NamedTuple

from elastic_ckpt.core.chunks import QuantizedRun
from elastic_ckpt.core.state_kinds import BLOCK_NUMELS
from elastic_ckpt.errors import DamagedError
from elastic_ckpt.formats.base import CONVERT_AGAIN
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.charges import limit_error
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import read_numbers

#: Entries beside ``param`` in the file of the scales.
BLOCK_NUMEL = "block_numel"
RUNS = "quantized_runs"
_RUN_FIELDS = 6
_MOST_RUNS = 1 << 22
#: Rows of runs that may have few elements each, as hardly any tensor-parallel shard has.
_MOST_SHORT_ROWS = 1 << 14
#: Fewer elements than this are few.
_SHORT_ROW_NUMEL = 64


class QuantizedLayout(NamedTuple):
    """How a parameter's codes are divided into blocks, as recorded beside its scales."""

    block_numel: int
    runs: tuple[QuantizedRun, ...]


def layout_of(file: PickledFile, name: str, scales: TensorRef) -> QuantizedLayout | None:
    """The layout beside some scales; ``None`` if blocks are counted from the parameter's first element."""
    block_numel = file.tree.get(BLOCK_NUMEL)
    ref = file.tree.get(RUNS)
    if ref is None:
        return None
    rows: list[list[int]] = []
    is_table = isinstance(ref, TensorRef) and ref.dtype == "int64" and ref.is_contiguous and len(ref.shape) == 2
    if is_table and ref.shape[1] == _RUN_FIELDS and ref.shape[0] <= _MOST_RUNS:
        (numbers,) = read_numbers(file, [ref])
        rows = numbers.reshape(ref.shape).tolist()
    runs = tuple(QuantizedRun(*row) for row in rows)
    is_sound = type(block_numel) is int and block_numel in BLOCK_NUMELS and (runs or not scales.numel)
    is_sound = is_sound and all(
        min(run.start, run.position, run.origin) >= 0
        and min(run.numel, run.rows) > 0
        and (run.rows == 1 or run.stride >= run.numel)
        and run.total_numel <= scales.numel * block_numel
        for run in runs
    )
    if not is_sound or sum(len(run.blocks(block_numel)) for run in runs) != scales.numel:
        problem = "what is recorded of the 8-bit blocks of this parameter does not fit its scales"
        expected = f"{RUNS!r} of {_RUN_FIELDS} columns with {scales.numel} blocks, and {BLOCK_NUMEL!r}"
        found = f"{len(runs)} runs in blocks of {block_numel!r}"[:200]
        raise DamagedError(problem, file.path, expected, found, parameter=name, remedy=CONVERT_AGAIN)
    most = max(_MOST_SHORT_ROWS, scales.numel * block_numel // _SHORT_ROW_NUMEL)
    if (count := sum(run.rows for run in runs)) > most:  # each row is a chunk, and a read
        raise limit_error(f"{RUNS!r} of {name}: at most {most} rows", f"{count}", file.path)
    return QuantizedLayout(block_numel, runs)
