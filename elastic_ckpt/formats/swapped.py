"""Optimizer states of ZeRO-3 on NVMe: swap files beside the shards.

``DeepSpeedEngine.save_checkpoint`` copies the swap folder of rank R to ``<tag>/offloaded_tensors/rankR``. A sub-group
whose partition has at least ``max(1 MiB, aio.block_size)`` bytes is swapped: its master is in ``<id>.tensor.swp``, a
state in ``<state>-<id>.tensor.swp``, raw fp32 from the first byte on, padded at the end to a multiple of
``1024 * aio.intra_op_parallelism`` bytes. In the shard, the tensors of such a sub-group are empty or, with
``pipeline_read`` or ``pipeline_write``, stale at full size; each has its file's name as an attribute. Sources:
``swap_tensor/optimizer_utils.py``, ``swap_tensor/pipelined_optimizer_swapper.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.core.metadata import MASTER, SourceFile
from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.naming import SWAPPED_FOLDER
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

_SUFFIX = ".tensor.swp"
_ID = re.compile(r"\d+_\d+")
_STATE = re.compile(r"\w+")
#: Upper bound of the padding behind the data (``intra_op_parallelism`` of 1024).
_MOST_PADDING_NBYTES = 1 << 20
_ALIGNMENT_NBYTES = 1024


def swap_files(file: PickledFile, dp_rank: int, master: TensorRef, state: Mapping[str, Any]) -> dict[str, SourceFile]:
    """The swap files of one sub-group: metadata key -> file; empty if the shard itself has its data.

    ``master`` and ``state`` are its master and optimizer states in ``file``, the shard of ``dp_rank``.

    Raises:
        DamagedError: a swap file is missing, or its name is invalid.
        UnsupportedError: whether the sub-group was swapped is unknown.
    """
    folder = _folder(file, dp_rank)
    states = {key: ref for key, ref in state.items() if isinstance(ref, TensorRef) and ref.swap_id is not None}
    if not states and not _master_is_swapped(file, folder, master, state):
        return {}
    named = {MASTER: master.swap_id, **{key: ref.swap_id for key, ref in states.items()}}
    for key, swap_id in named.items():
        is_named = swap_id is not None and (
            _ID.fullmatch(swap_id) if key == MASTER else _STATE.fullmatch(key) and swap_id == f"{key}-{named[MASTER]}"
        )
        if not is_named:
            raise DamagedError(
                f"{'the fp32 master' if key == MASTER else key} was swapped to NVMe, but does not name its swap file",
                file=file.path,
                expected="<first>_<last> for a master, <state>-<first>_<last> for a state",
                found=repr(swap_id),
                remedy="take another tag",
            )
    return {key: _swap_file(os.path.join(folder, f"{swap_id}{_SUFFIX}")) for key, swap_id in named.items()}


def _master_is_swapped(file: PickledFile, folder: str, master: TensorRef, state: Mapping[str, Any]) -> bool:
    """Whether a sub-group without swapped states is on NVMe because it has no states yet."""
    if master.numel == 0:
        return master.swap_id is not None
    if state or master.swap_id is None or not os.path.isfile(os.path.join(folder, master.swap_id + _SUFFIX)):
        return False
    raise UnsupportedError(
        "this checkpoint was saved before the first step by a run that swaps optimizer states to NVMe: which of its "
        "masters are up to date cannot be told",
        file=file.path,
        expected="a checkpoint saved after a step, or without pipeline_read and pipeline_write",
        found=f"a swap file and {master.numel} elements in the shard",
        remedy="start from the initial weights instead",
    )


def refuse_unnamed_swap_files(file: PickledFile, dp_rank: int) -> None:
    """Raise :class:`UnsupportedError` for swap files that no tensor names: of a rewritten shard, they may be stale."""
    folder = _folder(file, dp_rank)
    if os.path.isdir(folder) and any(name.endswith(_SUFFIX) for name in os.listdir(folder)):
        raise UnsupportedError(
            "swap files lie beside this shard, but none of its tensors says that it was swapped to NVMe",
            file=file.path,
            expected="tensors that name their swap files, as DeepSpeed saves them",
            found=f"unnamed files in {folder}",
            remedy="take the shard as DeepSpeed saved it; if nothing was swapped, remove the folder",
        )


def _folder(file: PickledFile, dp_rank: int) -> str:
    return os.path.join(os.path.dirname(file.path), SWAPPED_FOLDER, f"rank{dp_rank:02d}")


def _swap_file(path: str) -> SourceFile:
    if not os.path.isfile(path):
        raise DamagedError(
            "a swap file of the checkpoint is missing",
            file=path,
            expected="the copy of a swap file that DeepSpeed makes when it saves",
            found="no such file",
            remedy="restore the file, or take another tag",
        )
    return SourceFile(path, os.path.getsize(path))


def check_swap_file(source: SourceFile, numel: int) -> None:
    """Raise :class:`DamagedError` unless a swap file has the size of its data, padded."""
    padding = source.nbytes - 4 * numel
    if not 0 <= padding < _MOST_PADDING_NBYTES or source.nbytes % _ALIGNMENT_NBYTES:
        raise DamagedError(
            "a swap file of the checkpoint has the wrong size",
            file=source.path,
            expected=f"{numel} fp32 elements, padded to a multiple of {_ALIGNMENT_NBYTES} bytes",
            found=f"{source.nbytes} bytes",
            remedy="it is truncated, or of another run that used the same swap folder: take another tag",
        )
