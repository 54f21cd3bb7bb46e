"""The metadata of a ``torch.save`` file, without its tensor data.

``torch.load(map_location="meta")`` builds the pickled object and records where each storage's bytes are in the file
(``_checkpoint_offset``), reading none of them. Each tensor becomes a :class:`TensorRef`.
"""

from __future__ import annotations

import argparse
import copy
import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

from elastic_ckpt.core.metadata import ITEMSIZE
from elastic_ckpt.errors import (
    DamagedError,
    ElasticCkptError,
    LayoutError,
    UnsafePickleError,
    UnsupportedError,
    UnzippedError,
)
from elastic_ckpt.formats.safe_globals import finished, safe_globals

#: ``torch.serialization.MAGIC_NUMBER`` as its own pickle, which a legacy (non-zip) archive begins with.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Words that occur only in the errors of torch's unpickler about names that are not allowed.
_FORBIDDEN_MARKERS = ("GLOBAL", "allowlisted")
_UNPICKLER_PREFIX = "WeightsUnpickler error:"

#: Classes of dense tensors that ``torch.load`` builds.
_DENSE = (torch.Tensor, torch.nn.Parameter)
#: Objects whose attributes may be tensors: scheduler-like things in a client state, DeepSpeed's loss scalers.
_PLAIN_OBJECTS = (argparse.Namespace, LossScalerBase)
_NO_TENSOR = (bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, type(None))


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that stays in its file.

    Attributes:
        dtype, shape, stride: name of its torch dtype; strides are in elements.
        byte_offset: absolute offset of its first element in the file.
        is_parameter: whether it was saved as ``nn.Parameter``.
        swap_id: name of the swap file with its data, if on NVMe; its own bytes are then missing or stale.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    byte_offset: int
    is_parameter: bool = False
    swap_id: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are consecutive, in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != step:
                return not self.numel
            step *= size
        return True


@dataclass(frozen=True)
class PickledFile:
    """A file's object tree, with each tensor replaced by a :class:`TensorRef`."""

    path: str
    nbytes: int
    tree: Any

    def section(self, *keys: str) -> Any:
        """The entry at a path of dictionary keys; a :class:`DamagedError` if there is none."""
        node = self.tree
        for depth, key in enumerate(keys):
            if not isinstance(node, Mapping) or key not in node:
                raise LayoutError(
                    "this file lacks an entry that DeepSpeed always writes",
                    file=self.path,
                    expected=" / ".join(keys[: depth + 1]),
                    found=sorted(map(str, node))[:12] if isinstance(node, Mapping) else type(node).__name__,
                    remedy="the file is not of this checkpoint, or of a DeepSpeed version that is not supported",
                )
            node = node[key]
        return node


def open_pickled(path: str, trust_pickle: bool = False) -> PickledFile:
    """Read the metadata of one ``torch.save`` file.

    With ``trust_pickle`` the file may run code (``weights_only=False``); only at the user's explicit wish.

    Raises:
        DamagedError: missing, truncated, not a ``torch.save`` file, or shorter than its tensors claim.
        UnsafePickleError: a class or function is not on the list of safe globals.
        UnzippedError: a legacy pickle archive.
    """
    last = _check_is_archive(path)
    bases: set[int] = set()
    try:
        with safe_globals():
            loaded = torch.load(path, map_location="meta", weights_only=not trust_pickle)
        nbytes = os.path.getsize(path)
        tree = replace_leaves(loaded, lambda leaf: _to_ref(leaf, path, nbytes, bases))
        if bases and max(bases) != last:  # torch does not look at the records: it adds up what it would have written
            raise _unreadable(path, "a zip archive that was packed anew: tensors are not where torch.save puts them")
        return PickledFile(path, nbytes, tree)
    except ElasticCkptError:
        raise
    except pickle.UnpicklingError as error:
        raise _unsafe_or_damaged(path, error) from error
    except Exception as error:  # noise in a pickle can make the unpickler raise anything at all
        raise _unreadable(path, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def is_unzipped(path: str) -> bool:
    """Whether a file is a legacy archive (``"checkpoint_serialization": false``), which has no index of offsets."""
    with open(path, "rb") as stream:
        return stream.read(len(_LEGACY_MAGIC)) == _LEGACY_MAGIC


def _check_is_archive(path: str) -> int | None:
    """The offset at which the last tensor record's bytes really start; ``None``: there is none."""
    if not os.path.isfile(path):
        raise DamagedError(
            "a file of the checkpoint is missing",
            file=path,
            expected="a file, visible on every rank",
            found="no such file",
            remedy="restore the file, take another tag, or put the folder on storage that all nodes share",
        )
    if is_unzipped(path):
        raise UnzippedError(
            "this file is a legacy (non-zip) pickle archive of torch.save, whose reading is not supported yet",
            file=path,
            expected="a zip archive, which torch.save writes since torch 1.6",
            found='a legacy pickle archive, as "checkpoint": {"checkpoint_serialization": false} makes DeepSpeed write',
            remedy='load it at the topology and ZeRO stage it was saved with, then save it with "checkpoint": '
            '{"checkpoint_serialization": true}, which is the default',
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
            for entry in pickles:
                if entry.CRC:  # 0: saved with torch.serialization.set_crc32_options(False)
                    archive.read(entry)  # checks the CRC32 of the pickle, which torch.load does not
        last = max((entry.header_offset for entry in entries if "/data/" in entry.filename), default=None)
        if last is not None:
            with open(path, "rb") as stream:
                stream.seek(last + 26)
                last += 30 + sum(struct.unpack("<HH", stream.read(4)))  # the header's own name and padding
    except Exception as error:  # noise in a directory can make zipfile and its decompressors raise anything at all
        raise _unreadable(path, f"{os.path.getsize(path)} bytes; {type(error).__name__}: {error}") from error
    if not pickles:
        raise _unreadable(path, "a zip archive without a pickle")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:  # tensors are read by their offsets, which would give other bytes
            raise _unreadable(path, f"a zip archive that was packed anew: {entry.filename} is compressed")
    return last


def _unreadable(path: str, found: str) -> DamagedError:
    return DamagedError(
        "a file of the checkpoint is truncated or unreadable",
        file=path,
        expected="a complete torch.save archive",
        found=found,
        remedy="copy the file again from its original, or take another tag",
    )


def _subclass(path: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        "this file holds a tensor of a class of its own, whose parts cannot be cut for another topology",
        file=path,
        expected="torch.Tensor",
        found=name,
        remedy="load at the topology it was saved with; the 8- and 4-bit formats of torchao are not supported",
    )


def _unsafe_or_damaged(path: str, error: pickle.UnpicklingError) -> Exception:
    text = str(error)
    lines = [line.strip() for line in (text.partition(_UNPICKLER_PREFIX)[2] or text).strip().splitlines()]
    offender = next((line for line in lines if any(marker in line for marker in _FORBIDDEN_MARKERS)), None)
    if offender is None:
        return _unreadable(path, f"UnpicklingError: {lines[0] if lines else 'no details'}")
    if "torchao" in offender:
        return _subclass(path, offender[:300])
    return UnsafePickleError(
        "this file asks for a Python class or function that is not on the list of safe globals",
        file=path,
        expected="tensors, containers, numbers, strings, and DeepSpeed's own small classes",
        found=offender[:300],
        remedy=(
            "if you trust whoever wrote the file: torch.serialization.add_safe_globals([TheClass]) before loading, "
            'or "elastic_checkpoint": {"trust_pickle": true}'
        ),
    )


def replace_leaves(node: Any, replace: Callable[[Any], Any]) -> Any:
    """Copy a tree of containers and plain objects, passing every leaf through ``replace``."""
    if isinstance(node, dict):
        copied = copy.copy(node)  # keeps what a subclass adds: an order, a default factory
        for key, value in node.items():
            copied[key] = replace_leaves(value, replace)
        return copied
    if type(node) in (list, tuple, torch.Size):
        return type(node)(replace_leaves(value, replace) for value in node)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(replace_leaves(value, replace) for value in node))
    if isinstance(node, _PLAIN_OBJECTS):
        plain = copy.copy(node)
        vars(plain).update({key: replace_leaves(value, replace) for key, value in vars(node).items()})
        return plain
    return replace(node)


def _to_ref(leaf: Any, path: str, nbytes: int, bases: set[int]) -> Any:
    """The reference to a tensor, whose storage offset is added to ``bases``; any other object as it is."""
    if not isinstance(leaf, torch.Tensor):
        leaf = finished(leaf)
        _refuse_hidden_tensors(leaf, path)
        return leaf
    if type(leaf) not in _DENSE:
        raise _subclass(path, f"{type(leaf).__module__}.{type(leaf).__qualname__}")
    dtype = str(leaf.dtype).removeprefix("torch.")
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_conj() or leaf.is_neg() or dtype not in ITEMSIZE:
        raise UnsupportedError(
            "this file holds a tensor of a kind that cannot be read by its bytes",
            file=path,
            expected="a dense tensor of a plain dtype, neither conjugated nor negated lazily",
            found=f"{leaf.layout} {leaf.dtype} of shape {tuple(leaf.shape)}",
            remedy="resolve or densify it before saving, or load at the topology it was saved with",
        )
    storage = leaf.untyped_storage()
    base = getattr(storage, "_checkpoint_offset", None)
    if base is not None:
        bases.add(int(base))
    elif leaf.numel():
        raise _unreadable(path, f"a {type(leaf).__name__} of shape {tuple(leaf.shape)} without an offset")
    start = int((base or 0) + leaf.storage_offset() * leaf.element_size())
    shape, stride = tuple(leaf.shape), tuple(leaf.stride())
    # the storage too, but also the tensor itself: sizes in a pickle are only claims
    end = max((base or 0) + storage.nbytes(), start + _reach(shape, stride) * leaf.element_size())
    if end > nbytes:
        raise _unreadable(path, f"{nbytes} bytes, but a tensor of {shape} ends at byte {end}")
    swap_id = getattr(leaf, "__dict__", {}).get("ds_id")  # by which DeepSpeed's optimizer swapper names a tensor's file
    return TensorRef(
        dtype=dtype,
        shape=shape,
        stride=stride,
        byte_offset=start,
        is_parameter=isinstance(leaf, torch.nn.Parameter),
        swap_id=swap_id if isinstance(swap_id, str) else None,
    )


class _TensorSeeker(pickle.Pickler):
    """Pickles an object to nowhere, to find out whether it contains a tensor."""

    found = False

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.found = True
        return 0  # stands for the tensor, which need not be pickled then


def _refuse_hidden_tensors(leaf: Any, path: str) -> None:
    """Refuse a tensor inside an object of an unknown class, which would stay without data."""
    if isinstance(leaf, _NO_TENSOR):
        return
    seeker, failure = _TensorSeeker(io.BytesIO()), None
    try:
        seeker.dump(leaf)
    except Exception as error:
        failure = error
    if seeker.found:
        raise UnsupportedError(
            "this file holds a tensor inside an object that cannot be read piece by piece",
            file=path,
            expected="tensors in dicts, lists, tuples, or argparse.Namespace",
            found=type(leaf).__name__,
            remedy="keep the tensor in a dict, or load at the topology it was saved with",
        ) from failure
    if failure is not None:
        raise UnsupportedError(
            "this file holds an object that cannot be looked into for tensors",
            file=path,
            found=f"{type(leaf).__name__}; {type(failure).__name__}: {failure}",
            remedy="leave it out of the client state, or load at the topology it was saved with",
        ) from failure


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last that a tensor touches, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def materialise(file: PickledFile, node: Any) -> Any:
    """Read the tensors below ``node`` from the file; for small tensors outside the model, not for weights."""
    with open(file.path, "rb") as stream:

        def read(leaf: Any) -> Any:
            if not isinstance(leaf, TensorRef):
                return leaf
            dtype = getattr(torch, leaf.dtype)
            if leaf.numel == 0:
                return torch.empty(leaf.shape, dtype=dtype)
            stream.seek(leaf.byte_offset)
            nbytes = _reach(leaf.shape, leaf.stride) * dtype.itemsize
            raw = stream.read(nbytes)
            if len(raw) != nbytes:
                raise _unreadable(file.path, f"end of file inside the tensor at byte {leaf.byte_offset}")
            flat = torch.frombuffer(bytearray(raw), dtype=dtype)
            tensor = flat.as_strided(leaf.shape, leaf.stride).clone()
            return torch.nn.Parameter(tensor, requires_grad=False) if leaf.is_parameter else tensor

        return replace_leaves(node, read)
