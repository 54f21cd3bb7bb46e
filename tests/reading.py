"""Plans by hand, on files that a test has written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from elastic_ckpt.core.metadata import MASTER, SourceFile
from elastic_ckpt.core.read_plan import ReadItem, ReadPlan, TargetTensor
from elastic_ckpt.io.coalesce import ReadOptions
from elastic_ckpt.io.reader import check_files, execute
from elastic_ckpt.io.staging import ReadStats

UNTOUCHED = -7.0


def plan_of(files: Sequence[Path], tensors: Sequence[torch.Tensor], copies: Sequence[ReadItem]) -> ReadPlan:
    return ReadPlan(
        files=tuple(SourceFile(str(path), path.stat().st_size if path.exists() else 0) for path in files),
        targets=tuple(
            TargetTensor(MASTER, number, "", tensor.numel(), str(tensor.dtype).removeprefix("torch."))
            for number, tensor in enumerate(tensors)
        ),
        items=tuple(sorted(copies, key=lambda copy: (copy.file, copy.byte_offset))),
    )


def run(
    files: Sequence[Path],
    tensors: Sequence[torch.Tensor],
    copies: Sequence[ReadItem],
    options: ReadOptions | None = None,
) -> ReadStats:
    plan = plan_of(files, tensors, copies)
    check_files(plan)
    return execute(plan, tensors, options or ReadOptions())


def write(path: Path, values: torch.Tensor, header: int = 0) -> Path:
    """A file of a header and the raw bytes of a tensor."""
    path.write_bytes(b"\xee" * header + values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return path


def untouched(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((numel,), UNTOUCHED, dtype=dtype)
