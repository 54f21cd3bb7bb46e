"""Ways in which checkpoints go wrong on the way to tonight's job. Each makes a damaged copy of a whole one."""

from __future__ import annotations

import io
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def tag(copy: Path) -> Path:
    """The one tag folder of a copy."""
    return next(path for path in sorted(copy.iterdir()) if path.is_dir() and path.name[0] != ".")


def remove(name: str) -> Callable[[Path], None]:
    return lambda copy: (tag(copy) / name).unlink()


def put(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in the place of a file; ``latest`` is beside the tag's folder."""

    def apply(copy: Path) -> None:
        path = copy / name if name == "latest" else tag(copy) / name
        path.unlink()
        make(path)

    return apply


def truncate(name: str, kept: float) -> Callable[[Path], None]:
    def apply(copy: Path) -> None:
        path = tag(copy) / name
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * kept)])

    return apply


def swap(name: str, other: str) -> Callable[[Path], None]:
    def apply(copy: Path) -> None:
        first, second = tag(copy) / name, tag(copy) / other
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)

    return apply


def copy_over(name: str, other: str) -> Callable[[Path], None]:
    """``other`` becomes a copy of ``name``."""
    return lambda copy: shutil.copy(tag(copy) / name, tag(copy) / other) and None


def flip_bit(name: str, key: str, part: float) -> Callable[[Path], None]:
    """Flip one bit of the largest tensor of a key, so far into its record."""

    def apply(copy: Path) -> None:
        start, nbytes = record_of(tag(copy) / name, key)
        _write(tag(copy) / name, start + min(int(part * nbytes), nbytes - 1), lambda raw: bytes([raw[0] ^ 16]), 1)

    return apply


def write_nan(name: str, key: str) -> Callable[[Path], None]:
    """Write a NaN over an fp32 value in the middle of the largest tensor of a key."""

    def apply(copy: Path) -> None:
        start, nbytes = record_of(tag(copy) / name, key)
        _write(tag(copy) / name, start + nbytes // 8 * 4, lambda raw: struct.pack("<f", float("nan")), 4)

    return apply


def _write(path: Path, offset: int, change: Callable[[bytes], bytes], nbytes: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        raw = stream.read(nbytes)
        stream.seek(offset)
        stream.write(change(raw))


def record_of(path: Path, key: str) -> tuple[int, int]:
    """Where the bytes of the largest tensor below an entry are (``fp32``: of the masters)."""
    names = {"single_partition_of_fp32_groups", "fp32_flat_groups"} if key == "fp32" else {key}

    def walk(node: Any, inside: bool) -> None:
        if isinstance(node, torch.Tensor) and inside:
            largest.append((node.untyped_storage().nbytes(), bytes(node.untyped_storage())))
        elif isinstance(node, dict):
            for name, value in node.items():
                walk(value, inside or name in names)
        elif isinstance(node, (list, tuple)):
            for value in node:
                walk(value, inside)

    largest: list[tuple[int, bytes]] = []
    walk(torch.load(path, weights_only=False), False)
    nbytes, raw = max(largest)
    start = path.read_bytes().index(raw)
    return start, nbytes


def replace_by(name: str, other: Path) -> Callable[[Path], None]:
    return lambda copy: shutil.copy(other, tag(copy) / name) and None


def of_other(*names: str, then: Sequence[Callable[[Path], object]] = ()) -> Callable[[Path, Path], None]:
    """These files of another checkpoint take the place of this one's; ``then`` more happens to them."""

    def apply(copy: Path, other: Path) -> None:
        for name in names:
            replace_by(name, tag(other) / name)(copy)
        in_turn(*then)(copy)

    return apply


def in_turn(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    """One change after the other."""

    def apply(copy: Path) -> None:
        for change in changes:
            change(copy)

    return apply


def remove_latest(copy: Path) -> None:
    (copy / "latest").unlink()


def rewrite_pickle(name: str) -> Callable[[Path], None]:
    """A well-formed zip whose pickle is noise."""

    def apply(copy: Path) -> None:
        path = tag(copy) / name
        buffer = io.BytesIO()
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as target:
            for item in source.infolist():
                noise = item.filename.endswith("data.pkl")
                target.writestr(item.filename, b"\x80\x02}q\x00(X\x03" if noise else source.read(item))
        path.write_bytes(buffer.getvalue())

    return apply


class Bomb:
    """Unpickling it would run code."""

    def __reduce__(self):
        return print, ("BOOM: code of a checkpoint ran",)


def edit(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Load a file, change it, save it again."""

    def apply(copy: Path) -> None:
        path = tag(copy) / name
        tree = torch.load(path, weights_only=False)
        change(tree)
        torch.save(tree, path)

    return apply


def plant_bomb(tree: dict) -> None:
    tree["surprise"] = Bomb()


def add_strange_state(tree: dict) -> None:
    tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["curvature"] = torch.ones(3, 2)


def drop_master(tree: dict) -> None:
    tree["optimizer_state_dict"]["single_partition_of_fp32_groups"].pop()


def change_shape(tree: dict) -> None:
    tree["param_shapes"][0]["hidden.weight"] = torch.Size([13, 29])


def forget_parameter(tree: dict) -> None:
    del tree["param_shapes"][0]["never_used"]


def no_counters(tree: dict) -> None:
    del tree["global_steps"]
