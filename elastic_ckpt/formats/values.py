"""Reads small tensors of a file: numbers for this package, real tensors and objects for whoever resumes."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, BinaryIO

from elastic_ckpt.core.hyperparameters import LeftInFile
from elastic_ckpt.core.metadata import ITEMSIZE, is_floating
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError
from elastic_ckpt.formats.pickled import PickledFile, unreadable
from elastic_ckpt.formats.torch_archive.stand_ins import ArrayStandIn, DtypeStandIn, Size, StandIn
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef
from elastic_ckpt.formats.torch_archive.tensors import StorageRef
from elastic_ckpt.formats.torch_archive.tree import replace_leaves
from elastic_ckpt.formats.torch_archive.unpickler import Global
from elastic_ckpt.storage.local import open_stream

if TYPE_CHECKING:
    import numpy as np

#: Tensors may be larger than their file by this factor and this many bytes: views share their storage, copies do not.
_MOST_COPIES, _MOST_MORE_NBYTES = 4, 1 << 20


def read_bytes(file: PickledFile, refs: Iterable[TensorRef]) -> list[bytes]:
    """The elements of each tensor in row-major order; :class:`DamagedError` if the file has shrunk."""
    wanted = list(refs)
    if not wanted:
        return []  # as in most files: they need not be opened again
    with open_stream(file.path) as stream:
        return [_row_major(_reached(file, stream, ref), ref) for ref in wanted]


def _reached(file: PickledFile, stream: BinaryIO, ref: TensorRef) -> bytes:
    """The bytes from a tensor's first element to its last."""
    nbytes = ref.reach * ITEMSIZE[ref.dtype]
    if ref.numel * ITEMSIZE[ref.dtype] > _most_nbytes(file):  # strides of 0 repeat elements without end
        raise _too_large(file, f"{ref.numel} elements of {nbytes} bytes")
    stream.seek(ref.byte_offset)
    raw = stream.read(nbytes)
    if len(raw) != nbytes:
        raise unreadable(file.path, f"end of file inside the tensor at byte {ref.byte_offset}")
    _compare_checksum(file, ref.byte_offset, raw)
    return raw


def _compare_checksum(file: PickledFile, byte_offset: int, raw: bytes) -> None:
    """Raise :class:`DamagedError` for bytes that are a whole record, but not as it was saved."""
    number = file.records.index(byte_offset)
    if number is None or (file.records.offsets[number], file.records.nbytes[number]) != (byte_offset, len(raw)):
        return
    if zlib.crc32(raw) != file.records.crc32s[number]:
        raise unreadable(file.path, f"Bad CRC-32 of the {len(raw)} bytes of a tensor at byte {byte_offset}")


def _most_nbytes(file: PickledFile) -> int:
    return _MOST_COPIES * file.nbytes + _MOST_MORE_NBYTES


def _too_large(file: PickledFile, found: str) -> UnsupportedError:
    return UnsupportedError(
        "this file holds tensors that share their elements, and are many times larger than the file",
        file=file.path,
        expected=f"at most {_most_nbytes(file)} bytes, {_MOST_COPIES} times the file's size and a bit more",
        found=found,
        remedy="leave such tensors out of the client state, or save copies of them",
    )


def _row_major(raw: bytes, ref: TensorRef) -> bytes:
    if ref.is_contiguous:
        return raw
    import numpy as np  # noqa: PLC0415  few files need it

    itemsize = ITEMSIZE[ref.dtype]
    strides = tuple(stride * itemsize for stride in ref.stride)
    return np.ndarray(ref.shape, f"V{itemsize}", raw, strides=strides).tobytes()


def read_numbers(file: PickledFile, refs: Iterable[TensorRef]) -> list[np.ndarray[Any, Any]]:
    """The elements of each tensor, flat; bfloat16 as float32, and dtypes that numpy lacks as their bytes."""
    refs = list(refs)
    return [to_numbers(ref.dtype, raw) for ref, raw in zip(refs, read_bytes(file, refs), strict=True)]


def to_numbers(dtype: str, raw: bytes) -> np.ndarray[Any, Any]:
    """See :func:`read_numbers`."""
    import numpy as np  # noqa: PLC0415  few files need it

    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    known = dtype not in ("complex32",) and not dtype.startswith("float8")
    return np.frombuffer(raw, dtype if known else f"V{ITEMSIZE[dtype]}")


def agrees_when_rounded(values: np.ndarray[Any, Any], rounded: np.ndarray[Any, Any], dtype: str) -> bool:
    """Whether the ``rounded`` numbers, which were of ``dtype``, are the values rounded to it, to nearest even.

    True for dtypes that are not floating-point ones of torch, whose rounding is not known here.
    """
    import numpy as np  # noqa: PLC0415  few files need it

    if not is_floating(dtype) or values.dtype.kind != "f":
        return True
    if dtype == "bfloat16":
        bits = values.astype("<f4").view("<u4").astype("<u8")
        even = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype("<u4").view("<f4")
        values = np.where(np.isnan(values), values, even)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(rounded.dtype), rounded, equal_nan=True))


def hyperparameters(file: PickledFile, group: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a param group as the optimizer had them; tensors without dimensions become Python numbers.

    In place of other tensors, arrays and objects there is :class:`LeftInFile`, which no load restores. Devices are left
    out: that of the rank that saved a file is not that of another one.
    """

    def real(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            number = b"" if leaf.shape else read_numbers(file, [leaf])[0].item()
            is_read = not isinstance(number, bytes)  # as of dtypes that numpy lacks
            return number if is_read else LeftInFile(f"a tensor of torch.{leaf.dtype}, shape {leaf.shape}")
        if isinstance(leaf, (Size, Global, DtypeStandIn, StandIn)):
            return _named(file, leaf)
        if isinstance(leaf, StorageRef):
            return LeftInFile(f"a storage of {leaf.nbytes} bytes")
        value: Any = leaf.value if isinstance(leaf, ArrayStandIn) else leaf
        if isinstance(value, type) or not hasattr(value, "__array__"):
            return LeftInFile("an array without data") if value is not leaf else leaf
        return LeftInFile(repr(value)[:200]) if value.shape else value.item()

    return {key: replace_leaves(value, real) for key, value in group.items() if not _is_device(value)}


def _is_device(value: Any) -> bool:
    """Whether a value is a ``torch.device``, or stands for one; torch need not be there."""
    is_real = type(value).__module__ == "torch" and type(value).__name__ == "device"  # of a trusted pickle
    return is_real or (isinstance(value, StandIn) and value.name == "torch.device")


def _named(file: PickledFile, leaf: Any) -> Any:
    """The size, dtype or enum member that a leaf stands for; other objects differ from their equals of other files."""
    try:
        found = materialise(file, leaf)
    except ElasticCkptError:  # of another version; refused by its name, and only where it is restored
        found = None
    is_read = isinstance(found, Enum) if isinstance(leaf, StandIn) else found is not None
    return found if is_read else LeftInFile(f"an object of {getattr(leaf, 'name', leaf)}"[:200])


def plain_numbers(file: PickledFile, values: dict[str, Any]) -> dict[str, Any]:
    """A dictionary in which tensors of one element, without dimensions, are Python numbers."""
    points = {key: value for key, value in values.items() if isinstance(value, TensorRef) and not value.shape}
    read = zip(points, read_numbers(file, points.values()), strict=True)
    return {**values, **{key: number.item() for key, number in read}}


def materialise(file: PickledFile, node: Any) -> Any:
    """The tree below ``node`` as the job that saved it had it; for small tensors outside the model, not for weights.

    Objects of DeepSpeed and Megatron become real ones if their classes are imported already; else stand-ins remain.
    torch is imported only for what is torch's.
    """
    left = _most_nbytes(file)

    def tensor(ref: TensorRef) -> Any:
        nonlocal left
        left -= ref.numel * ITEMSIZE[ref.dtype]
        if left < 0:
            raise _too_large(file, "more in its tensors together")
        import torch  # noqa: PLC0415  whoever resumes has it; who only looks need not

        raw, dtype = bytearray(read_bytes(file, [ref])[0]), getattr(torch, ref.dtype)
        new = torch.frombuffer(raw, dtype=dtype).view(ref.shape) if raw else torch.empty(ref.shape, dtype=dtype)
        return torch.nn.Parameter(new, requires_grad=False) if ref.is_parameter else new

    def real(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return tensor(leaf)
        if isinstance(leaf, (Size, Global, StorageRef)):
            return _of_torch(leaf, file)
        if isinstance(leaf, ArrayStandIn):
            return leaf.array()
        if isinstance(leaf, DtypeStandIn):
            return leaf.dtype()
        return _real_object(leaf) if isinstance(leaf, StandIn) else leaf

    try:
        return replace_leaves(node, real)
    except ElasticCkptError:
        raise
    except Exception as error:  # what a damaged file has for the arguments of a constructor can raise anything
        raise unreadable(file.path, f"{type(error).__name__}: {error}"[:300]) from error


def _of_torch(leaf: Size | Global | StorageRef, file: PickledFile) -> Any:
    import torch  # noqa: PLC0415  whoever resumes has it; who only looks need not

    found: Any = torch.Size(leaf) if isinstance(leaf, Size) else None
    if isinstance(leaf, Global):
        found = leaf.call if leaf.is_users else getattr(torch, leaf.name.removeprefix("torch."), None)
    if found is not None:
        return found
    raise UnsupportedError(
        "this file holds the name of a class or function, or a storage without a tensor, not an object",
        file=file.path,
        found=str(leaf)[:300],
        remedy="leave it out of the client state, or load at the topology it was saved with",
    )


def _real_object(leaf: StandIn) -> Any:
    module, _, name = leaf.name.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)  # never imported from here: that would run code at a file's wish
    if not isinstance(cls, type):
        return leaf
    if leaf.name == "torch.device":
        return cls(*leaf.args)
    if leaf.name == "torch.layout":
        found = getattr(sys.modules[module], str(leaf.args[0]).removeprefix("torch."), None)
        return found if isinstance(found, cls) else leaf
    if issubclass(cls, Enum):
        return cls[leaf.args[0]] if leaf.is_by_name else cls(*leaf.args)
    new = cls.__new__(cls)
    vars(new).update(vars(leaf))
    return new
