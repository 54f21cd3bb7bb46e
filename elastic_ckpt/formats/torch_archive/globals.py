"""The closed list of names that a checkpoint's pickles may use, and what takes the place of each.

torch's own names since 1.6 (``torch/_utils.py``, ``torch/_tensor.py``, ``torch/storage.py``), containers and numbers of
Python, arrays of numpy 1 and 2, and the small classes that DeepSpeed, Megatron and ``torch.distributed.checkpoint``
pickle, under every module path that they had. None of them runs code of the file's choosing. Others are named, and
called by nobody here, if the user passed them to :func:`torch.serialization.add_safe_globals`, or trusts the pickle.
"""

from __future__ import annotations

import argparse
import importlib
import operator
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.torch_archive import checks
from elastic_ckpt.formats.torch_archive.calls import NEW, Global, Size, unsafe_error
from elastic_ckpt.formats.torch_archive.keys import checked_keys
from elastic_ckpt.formats.torch_archive.tensors import REBUILD, UNREADABLE, kind_error, subclass_error

#: Classes of Python that are made of plain parts, where their result is wanted (:mod:`elastic_ckpt.formats.objects`).
PLAIN_CLASSES = frozenset(
    (
        *("collections.deque", "collections.defaultdict", "types.SimpleNamespace", "builtins.slice", "builtins.range"),
        *("datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta", "datetime.timezone"),
        *("decimal.Decimal", "fractions.Fraction"),
    )
)
#: What torch itself adds to the list of whoever imports it, and what starts to talk to other ranks where it is called.
_COLLECTIVE = frozenset({"torch.distributed.device_mesh.DeviceMesh", "torch.distributed.device_mesh.init_device_mesh"})
#: Modules whose names are refused even where the user allowed one, as torch does.
_BLOCKED = frozenset({"sys", "os", "posix", "nt"})
_DCP = "torch.distributed.checkpoint"
_ENUMS_OF_MEGATRON = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType", "AttnBackend")
_MODULES_OF_MEGATRON = ("enums", "model.enums", "core.enums", "core.transformer.enums")
#: Enums and classes with plain data, under every module path that they had.
_ENUMS = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    *(f"megatron.{module}.{name}" for module in _MODULES_OF_MEGATRON for name in _ENUMS_OF_MEGATRON),
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    f"{_DCP}.planner.WriteItemType",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",  # until torch 2.2
)
_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",  # until September 2022 (0.7.2)
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")),
    *(f"{_DCP}.metadata.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    f"{_DCP}.filesystem._StorageInfo",
    *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
    *(f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
)
#: Dtypes, also those whose tensors cannot be read, and schemes of quantized tensors.
_OF_TORCH = re.compile(r"torch\.(?:bool|(?:q?u?int|bits|b?float|complex)\d\w{,30}|per_(?:tensor|channel)_\w{,30})")


def find_global(module: str, name: str) -> Global:
    """The entry of a name. One that is not on the list, and that the user did not allow, has an error."""
    path = f"{module}.{name}"
    entry = _closed_list().get(path)
    if path == checks.DTYPE and path in _users_globals():
        return Global(path, checks.any_dtype)
    if entry is not None:
        return entry
    if (path.startswith("torch.") and path.endswith("Storage")) or _OF_TORCH.fullmatch(path):
        return Global(path)
    if module not in _BLOCKED and path not in _COLLECTIVE and path in (users := _users_globals()):
        return Global(path, users=users[path])
    if path in UNREADABLE:
        return Global(path, error=kind_error(path))
    is_torchao = module.partition(".")[0] == "torchao"
    return Global(path, error=subclass_error(path) if is_torchao else unsafe_error(path))


def find_trusted(module: str, name: str) -> Global:
    """The entry of a name in a trusted pickle, which is imported if it is not on the list."""
    path = f"{module}.{name}"
    if path == checks.DTYPE:
        return Global(path, checks.any_dtype)
    entry = find_global(module, name)
    if entry.error is None and path != "builtins.getattr":
        return entry
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        text = "this file holds an object of a class that cannot be imported here"
        remedy = "install its package, or import the module that has it before loading"
        return Global(path, error=UnsupportedError(text, found=f"{path}: {error}"[:300], remedy=remedy))
    return Global(path, users=found)


def _users_globals() -> dict[str, Any]:
    """What the user passed to :func:`torch.serialization.add_safe_globals`, by qualified name."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch.serialization, "get_safe_globals"):
        return {}
    pairs = [each if isinstance(each, tuple) else (each, "") for each in torch.serialization.get_safe_globals()]
    return {name or f"{each.__module__}.{each.__qualname__}": each for each, name in pairs}


@cache
def _closed_list() -> dict[str, Global]:
    calls: dict[str, Callable[..., Any] | None] = {
        "argparse.Namespace": argparse.Namespace,  # which takes keywords alone
        "collections.OrderedDict": checks.ordered_dict,
        "collections.Counter": checks.typed(Counter, dict),
        "builtins.set": lambda items=(): set(checked_keys(items)),
        "builtins.frozenset": lambda items=(): frozenset(checked_keys(items)),
        "builtins.complex": checks.typed(complex, float, float),
        "builtins.bytearray": checks.byte_array,
        "builtins.bytes": lambda: b"",  # only empty ones are pickled so, in protocols below 3
        "builtins.getattr": partial(checks.enum_member, _ENUMS),
        **dict.fromkeys(map("builtins.{}".format, ("object", "list", "dict", "tuple", "str", "int", "float", "bool"))),
        "_codecs.encode": checks.encoded,
        "torch.Size": Size,
        "torch.Tensor": None,
        "torch.nn.parameter.Parameter": None,
        "torch.device": checks.typed(partial(checks.later, "torch.device"), str, (int, type(None))),
        "torch.serialization._get_layout": checks.layout,
        checks.DTYPE: checks.numpy_dtype,
        checks.ARRAY: None,
        **REBUILD,
        **{path: checks.typed(partial(checks.later, path, how=NEW)) for path in (*_CLASSES, *checks.OF_TUPLES)},
        **{path: checks.typed(partial(checks.later, path), (int, str)) for path in _ENUMS},
        **{path: partial(checks.of_python, path) for path in PLAIN_CLASSES},
    }
    for module in ("pathlib", "pathlib._local"):  # the second is Python 3.13's
        for cls in (pathlib.PosixPath, pathlib.PurePosixPath):
            calls[f"{module}.{cls.__name__}"] = checks.typed(cls, str, is_repeated=True)  # touches no file
    for core in ("numpy._core", "numpy.core"):  # of numpy 2, and of older ones
        calls[f"{core}.multiarray._reconstruct"] = checks.numpy_array
        calls[f"{core}.multiarray.scalar"] = checks.numpy_scalar
        calls[f"{core}.numeric._frombuffer"] = checks.numpy_buffer
    return {path: Global(path, call, copies=path not in REBUILD) for path, call in calls.items()}
