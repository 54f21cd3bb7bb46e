"""Hostile pickles, each under one line on what it tries. A reader that only takes data refuses all of them."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

from tests.attacks.assembly import call, doubled, get, name, number, put, stacked, storage, tensor, text, tuple_of

COMMAND = text("echo executed")

#: Functions and classes that run code, read or write files, or lead to others that do, as a pickle names them.
NAMES = [
    *(("os", "system"), ("posix", "system"), ("nt", "system"), ("os", "popen"), ("os", "execv"), ("os", "mkdir")),
    *(("subprocess", "Popen"), ("subprocess", "check_output"), ("pty", "spawn"), ("shutil", "rmtree")),
    *(("builtins", "eval"), ("builtins", "exec"), ("builtins", "compile"), ("builtins", "__import__")),
    *(("builtins", "open"), ("builtins", "setattr"), ("builtins", "map"), ("builtins", "type"), ("io", "open")),
    *(("operator", "attrgetter"), ("operator", "methodcaller"), ("operator", "itemgetter"), ("functools", "partial")),
    *(("importlib", "import_module"), ("runpy", "run_path"), ("code", "interact"), ("timeit", "timeit")),
    *(
        ("pickle", "loads"),
        ("_pickle", "loads"),
        ("marshal", "loads"),
        ("types", "CodeType"),
        ("types", "FunctionType"),
    ),
    *(("copyreg", "add_extension"), ("copyreg", "__newobj__"), ("copyreg", "__newobj_ex__"), ("ctypes", "CDLL")),
    *(("pathlib", "Path"), ("pathlib", "PosixPath.touch"), ("functools", "partial"), ("types", "FunctionType")),
    # of torch, numpy and this package
    *(
        ("torch.storage", "_load_from_bytes"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch", "os.system"),
    ),
    *(("torch.hub", "load"), ("torch.jit", "load"), ("torch.utils._config_module", "ConfigModule.load_config")),
    *(("torch._dynamo.guards", "GuardBuilder.get"), ("torch.fx.experimental.symbolic_shapes", "eval_guards")),
    *(("torch._C._jit_tree_views", "Ident"), ("torch.cuda", "_lazy_call"), ("torch.nn.modules.linear", "Linear")),
    *(("numpy", "load"), ("numpy.testing._private.utils", "runstring"), ("numpy", "fromfile"), ("numpy", "memmap")),
    *(("elastic_ckpt.run", "main"), ("elastic_ckpt.formats.pickled", "open_pickled"), ("deepspeed", "initialize")),
    # attributes of what is on the list
    *(("collections", "OrderedDict.fromkeys"), ("collections", "OrderedDict.__init__.__globals__")),
    *(("torch._utils", "_rebuild_tensor_v2.__globals__"), ("argparse", "Namespace.__init__"), ("argparse", "FileType")),
    # names under torch that end as those of storages do
    *(("torch", "FloatStorage"), ("torch.evil", "RunsCodeStorage"), ("torch.storage", "UntypedStorage")),
    *(("torch", "storage.os.systemStorage"), ("torch.storage", "TypedStorage.from_file.Storage")),
    # names of Python 2, which are translated
    *(("__builtin__", "eval"), ("__builtin__", "execfile"), ("__builtin__", "reduce"), ("commands", "getoutput")),
    *(("cPickle", "loads"), ("copy_reg", "add_extension"), ("os", "getcwdu"), ("UserDict", "UserDict")),
]


def routes(module: str, qualname: str) -> dict[str, bytes]:
    """A call of a function by each opcode that pickle has for it."""
    line = f"{module}\n{qualname}\n".encode()
    return {
        "GLOBAL, REDUCE": b"\x80\x02" + call(name(module, qualname), COMMAND) + b".",
        "STACK_GLOBAL, REDUCE": b"\x80\x04" + call(stacked(module, qualname), COMMAND) + b".",
        "INST": b"(" + COMMAND + b"i" + line + b".",
        "OBJ": b"(" + name(module, qualname) + COMMAND + b"o.",
        "NEWOBJ": b"\x80\x02" + name(module, qualname) + COMMAND + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04" + name(module, qualname) + COMMAND + b"\x85}\x92.",
        "BUILD": b"\x80\x02" + name(module, qualname) + b"}" + text("__setstate__") + name(module, qualname) + b"sb.",
    }


NAMESPACE = call(name("argparse", "Namespace"))
ORDERED = call(name("collections", "OrderedDict"))
SCALER = name("deepspeed.runtime.fp16.loss_scaler", "LossScaler") + b")\x81"
DTYPE = call(name("numpy", "dtype"), text("f8"), b"\x89", b"\x88")
ARRAY = call(name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), tuple_of(number(0)), text("b"))
GETATTR, SIZE = name("builtins", "getattr"), name("torch", "Size")
V2, FROM_TYPE = name("torch._utils", "_rebuild_tensor_v2"), name("torch._tensor", "_rebuild_from_type_v2")
ONE = tensor(storage("0", 1), 0, [1], [1])


def stated(target: bytes, key: str, value: bytes = b"N") -> bytes:
    """BUILD with a dictionary of one entry."""
    return b"\x80\x02" + target + b"}" + text(key) + value + b"sb."


def array_of(dtype: bytes, *state: bytes) -> bytes:
    return b"\x80\x02" + ARRAY + tuple_of(number(1), tuple_of(number(1)), dtype, b"\x89", *state) + b"b."


#: What needs no function: states, persistent ids, and calls of what is on the list with arguments of nobody's.
TRICKS: dict[str, bytes] = {
    "the class of a namespace is exchanged": stated(NAMESPACE, "__class__", name("torch", "Tensor")),
    "the attributes of a namespace are exchanged": stated(NAMESPACE, "__dict__", b"}"),
    "a namespace is given a __setstate__": stated(NAMESPACE, "__setstate__"),
    "a namespace is given a __deepcopy__, which copy looks for in the object": stated(NAMESPACE, "__deepcopy__"),
    "a namespace is given an __array__, which numpy looks for in the object": stated(NAMESPACE, "__array__"),
    "a method of a namespace is hidden": stated(NAMESPACE, "_get_kwargs"),
    "a method of an ordered dict is hidden": stated(ORDERED, "items"),
    "the reduction of an ordered dict is exchanged": stated(ORDERED, "__reduce_ex__"),
    "the class of a stand-in is exchanged": stated(SCALER, "__class__", name("torch", "Tensor")),
    "the name of a stand-in is exchanged": stated(SCALER, "name", text("os.system")),
    "the arguments of a stand-in are exchanged": stated(SCALER, "args", b"]"),
    "a stand-in has a state by slots": b"\x80\x02" + SCALER + b"N}" + text("name") + text("os.system") + b"s\x86b.",
    "a namespace has a state by slots": b"\x80\x02" + NAMESPACE + b"N}" + text("__class__") + b"Ns\x86b.",
    "a namespace has a state that is no dictionary": b"\x80\x02" + NAMESPACE + b"]b.",
    "a namespace has attributes that are no strings": b"\x80\x02" + NAMESPACE + b"}K\x01K\x02sb.",
    "a dictionary has a state": stated(b"}", "__class__"),
    "a list has a state": stated(b"]", "append"),
    "a tensor has a state": stated(ONE, "byte_offset", number(0)),
    "a function of the list has a state": stated(V2, "call", name("torch", "Tensor")),
    "a number has a state": stated(b"K\x01", "real"),
    "a torch.Size has a state": stated(call(SIZE, b")"), "__class__"),
    "getattr of a class of the list": b"\x80\x02" + call(GETATTR, name("argparse", "Namespace"), text("__init__")) + b".",
    "getattr of a number": b"\x80\x02" + call(GETATTR, b"K\x01", text("__class__")) + b".",
    "getattr of a getattr": b"\x80\x02" + call(GETATTR, call(GETATTR, SIZE, text("count")), text("__self__")) + b".",
    "getattr of getattr itself": b"\x80\x02" + call(GETATTR, GETATTR, text("__globals__")) + b".",
    "the result of a call is called": b"\x80\x02" + call(ORDERED, COMMAND) + b".",
    "a string is called": b"\x80\x02" + call(text("os.system"), COMMAND) + b".",
    "a persistent id of a module": b"\x80\x02" + tuple_of(text("module"), text("os"), text("x"), text("y")) + b"Q.",
    "a persistent id that is a string": b"\x80\x02" + text("storage") + b"Q.",
    "a persistent id of protocol 0": b"Pstorage\n.",
    "a storage of a class that is none": b"\x80\x02" + storage("0", 1, "EvilStorage") + b".",
    "a storage of a function": b"\x80\x02"
    + tuple_of(text("storage"), V2, text("0"), text("cpu"), number(1))
    + b"Q.",
    "a storage whose key leads out of the archive": b"\x80\x02" + storage("../../../../etc/passwd", 1) + b".",
    "a storage whose key is the pickle": b"\x80\x02" + storage("../data.pkl", 1) + b".",
    "a storage that no record is of": b"\x80\x02" + storage("7", 1) + b".",
    "a storage larger than its record": b"\x80\x02" + storage("0", 1 << 40) + b".",
    "a storage of a negative size": b"\x80\x02" + storage("0", -1) + b".",
    "a tensor before its storage": b"\x80\x02" + tensor(storage("0", 4), -1, [1], [1]) + b".",
    "a tensor behind its storage": b"\x80\x02" + tensor(storage("0", 4), 4, [1], [1]) + b".",
    "a tensor whose size overflows": b"\x80\x02" + tensor(storage("0", 4), 0, [1 << 32, 1 << 32], [1, 1]) + b".",
    "a tensor with a negative stride": b"\x80\x02" + tensor(storage("0", 4), 3, [2], [-1]) + b".",
    "a tensor of 1,000 dimensions": b"\x80\x02" + tensor(storage("0", 4), 0, [1] * 1000, [1] * 1000) + b".",
    "a tensor of 2 ** 80 elements in one": b"\x80\x02" + tensor(storage("0", 4), 0, [1 << 40, 1 << 40], [0, 0]) + b".",
    "a tensor without a storage": b"\x80\x02" + tensor(b"N", 0, [1], [1]) + b".",
    "a tensor of a class that runs code": b"\x80\x02"
    + call(FROM_TYPE, V2, name("os", "system"), tuple_of(storage("0", 1), number(0), b")", b")", b"\x89", b"}"), b"N")
    + b".",
    "a tensor that is rebuilt by another function": b"\x80\x02"
    + call(FROM_TYPE, name("_codecs", "encode"), name("torch", "Tensor"), tuple_of(text("x")), b"N")
    + b".",
    "a parameter that is no tensor": b"\x80\x02" + call(name("torch._utils", "_rebuild_parameter"), COMMAND, b"\x89}") + b".",
    "an array of objects": array_of(call(name("numpy", "dtype"), text("O8"), b"\x89", b"\x88"), b"](K\x01e"),
    "an array of structures with objects": array_of(call(name("numpy", "dtype"), text("V16"), b"\x89", b"\x88"), b"C\x08" + bytes(8)),
    "an array whose bytes are missing": array_of(DTYPE, b"C\x01x"),
    "an array without a state": b"\x80\x02" + ARRAY + b".",
    "an array whose dtype is a string": array_of(text("f8"), b"C\x08" + bytes(8)),
    "a dtype whose state has another kind": array_of(DTYPE + tuple_of(number(3), text("<"), b"N", b"}", b"N", number(1)) + b"b0" + text("O"), b"N"),
    "a codec other than latin-1": b"\x80\x02" + call(name("_codecs", "encode"), text("x"), text("zip")) + b".",
    "a bytearray of 1 TiB": b"\x80\x02" + call(name("builtins", "bytearray"), number(1 << 40)) + b".",
    "bytes of 1 TiB": b"\x80\x02" + call(name("builtins", "bytes"), number(1 << 40)) + b".",
    "a set of a range": b"\x80\x02" + call(name("builtins", "set"), call(name("__builtin__", "xrange"), number(1 << 60))) + b".",
    "a path from a number": b"\x80\x02" + call(name("pathlib", "PosixPath"), number(1)) + b".",
    "a default that runs code": b"\x80\x02" + call(name("collections", "defaultdict"), name("os", "system")) + b".",
    "a default that is a function": b"\x80\x02" + call(name("collections", "defaultdict"), GETATTR) + b".",
    "a deque of a thousand million": b"\x80\x02" + call(name("collections", "deque"), b")", text("9")) + b".",
    "a date with a state": b"\x80\x02" + call(name("datetime", "date"), number(1), number(1), number(1)) + b"}b.",
    "a namespace of another class": b"\x80\x02"
    + call(name("types", "SimpleNamespace")) + b"}" + text("__class__") + name("builtins", "dict") + b"sb.",
    "a number of a list": b"\x80\x02" + call(name("decimal", "Decimal"), b"]") + b".",
    "a number of a million digits": b"\x80\x02" + call(name("decimal", "Decimal"), text("9" * 1_000_000)) + b".",
    "a member of an enum of two arguments": b"\x80\x02"
    + call(name("deepspeed.runtime.zero.config", "ZeroStageEnum"), text("Evil"), text("os system"))
    + b".",
    "a member of an enum that it has not": b"\x80\x02" + call(name("deepspeed.runtime.zero.config", "ZeroStageEnum"), number(77)) + b".",
    "a method of an enum as its member": b"\x80\x02" + call(GETATTR, name("deepspeed.runtime.zero.config", "ZeroStageEnum"), text("to_bytes")) + b".",
    "the call of a member": b"\x80\x02" + call(call(GETATTR, name("deepspeed.runtime.zero.config", "ZeroStageEnum"), text("weights")), number(1)) + b".",
    "a deque of bytes": b"\x80\x02" + call(name("collections", "deque"), b"B" + struct.pack("<I", 1 << 16) + bytes(1 << 16)) + b".",
    "a device that is none": b"\x80\x02" + call(name("torch", "device"), text("nowhere"), number(-5)) + b".",
    "an object of Python 2 with a state": b"\x80\x02"
    + call(name("copy_reg", "_reconstructor"), name("argparse", "Namespace"), name("__builtin__", "dict"), b"N")
    + b".",
}  # fmt: skip


def _client(entry: bytes) -> bytes:
    """A model-states file with an entry in its client state, of which only the maker of objects looks at the tree."""
    return b"\x80\x02}" + text("module") + b"}s" + text("entry") + entry + b"s."


DEQUE, FRACTION, PLAIN_NAMESPACE = (
    name("collections", "deque"),
    name("fractions", "Fraction"),
    name("types", "SimpleNamespace"),
)
RANGE = call(name("builtins", "range"), number(1 << 40))
TRICKS |= {
    "a key that cannot be hashed": _client(b"}" + call(DEQUE) + b"Ns"),
    "a member that cannot be hashed": _client(b"\x8f(" + call(DEQUE) + b"\x90"),
    "a frozen set of what cannot be hashed": _client(b"(" + call(DEQUE) + b"\x91"),
    "a namespace whose state gets a __deepcopy__ behind its BUILD": _client(
        b"(}" + put(9) + call(PLAIN_NAMESPACE) + get(9) + b"b" + get(9) + text("__deepcopy__") + name("builtins", "list") + b"st"
    ),
    "an array of another class than numpy's own": _client(call(name("numpy.core.multiarray", "_reconstruct"), name("numpy", "matrix"), tuple_of(number(0)), text("b"))),
    "a mesh of devices, which waits for other ranks": _client(call(name("torch.distributed.device_mesh", "DeviceMesh"), text("cpu"), b"](K\x00K\x01e")),
}  # fmt: skip


def _sizes(*sizes: int) -> bytes:
    return tuple_of(*map(number, sizes))


def _longs(first: int, size: list[int], stride: list[int]) -> bytes:
    """Of the two numbers that there are, which are zero."""
    return tensor(storage("0", 2, "LongStorage"), first, size, stride)


def _sparse(layout: str, *parts: bytes) -> bytes:
    named = call(name("torch.serialization", "_get_layout"), text(f"torch.{layout}"))
    return call(name("torch._utils", "_rebuild_sparse_tensor"), named, tuple_of(*parts))


def _quantized(kind: str, size: bytes, stride: bytes, *params: bytes) -> bytes:
    rebuild = name("torch._utils", "_rebuild_qtensor")
    return call(rebuild, storage("0", 4, kind), number(0), size, stride, tuple_of(*params), b"\x89", ORDERED)


def _meta(dtype: bytes, size: bytes, stride: bytes) -> bytes:
    return call(name("torch._utils", "_rebuild_meta_tensor_no_storage"), dtype, size, stride, b"\x89")


_HALF, _PER_TENSOR, _PER_CHANNEL = (
    b"G" + struct.pack(">d", 0.5),
    name("torch", "per_tensor_affine"),
    name("torch", "per_channel_affine"),
)
_FLOATS, _FLOAT32 = tensor(storage("0", 4), 0, [2], [1]), name("torch", "float32")
#: Tensors that are not dense, of parts that do not belong together, beyond what torch itself finds out.
_NOT_TENSORS = {
    "a sparse tensor of 2 ** 60 entries in one": _sparse("sparse_coo", _longs(0, [1, 1 << 60], [1, 0]), _longs(0, [1 << 60], [0]), _sizes(3)),
    "sparse rows of 2 ** 60 entries in one": _sparse("sparse_csr", _longs(0, [2], [1]), _longs(0, [1 << 60], [0]), _longs(0, [1 << 60], [0]), _sizes(1, 1)),
    "a sparse tensor of 2 ** 80 elements": _sparse("sparse_coo", _longs(0, [2, 1], [1, 1]), _longs(0, [1], [1]), _sizes(1 << 40, 1 << 40)),
    "a sparse tensor of a range": _sparse("sparse_coo", call(name("builtins", "range"), number(1 << 40)), _longs(0, [1], [1]), _sizes(3)),
    "a sparse tensor of a list": _sparse("sparse_coo", b"](" + b"]" * 1000 + b"e", _longs(0, [1], [1]), _sizes(3)),
    "a sparse tensor without a size": _sparse("sparse_coo", _longs(0, [1, 1], [1, 1]), _longs(0, [1], [1])),
    "a sparse tensor with a function for a flag": _sparse("sparse_coo", _longs(0, [1, 1], [1, 1]), _longs(0, [1], [1]), _sizes(3), GETATTR),
    "a sparse tensor with five parts": _sparse("sparse_csr", *[_longs(0, [1], [1])] * 3, _sizes(1, 1), b"\x88"),
    "a sparse tensor of a module for a layout": _sparse("os", _longs(0, [1, 1], [1, 1]), _longs(0, [1], [1]), _sizes(3)),
    "a sparse tensor that is dense": _sparse("strided", _longs(0, [1, 1], [1, 1]), _longs(0, [1], [1]), _sizes(3)),
    "a quantized tensor beyond its storage": _quantized("QInt8Storage", _sizes(1 << 40), _sizes(1), _PER_TENSOR, _HALF, number(0)),
    "a quantized tensor of 2 ** 40 elements in one": _quantized("QInt8Storage", _sizes(1 << 40), _sizes(0), _PER_TENSOR, _HALF, number(0)),
    "a quantized tensor of real numbers": _quantized("FloatStorage", _sizes(4), _sizes(1), _PER_TENSOR, _HALF, number(0)),
    "a quantized tensor of another scheme": _quantized("QInt8Storage", _sizes(4), _sizes(1), name("torch", "per_tensor_symmetric"), _HALF, number(0)),
    "a quantized tensor of a function": _quantized("QInt8Storage", _sizes(4), _sizes(1), GETATTR, _HALF, number(0)),
    "a quantized tensor with a text for a scale": _quantized("QInt8Storage", _sizes(4), _sizes(1), _PER_TENSOR, text("os.system"), number(0)),
    "a quantized tensor without parameters": _quantized("QInt8Storage", _sizes(4), _sizes(1)),
    "channels along no dimension": _quantized("QInt8Storage", _sizes(2), _sizes(1), _PER_CHANNEL, _FLOATS, _FLOATS, number(-1)),
    "more channels than there are scales": _quantized("QInt8Storage", _sizes(4), _sizes(1), _PER_CHANNEL, _FLOATS, _FLOATS, number(0)),
    "channels with 2 ** 60 scales in one": _quantized("QInt8Storage", _sizes(1 << 60), _sizes(0), _PER_CHANNEL, *[tensor(storage("0", 4), 0, [1 << 60], [0])] * 2, number(0)),
    "a tensor on meta with half a stride": _meta(_FLOAT32, _sizes(2), b")"),
    "a tensor on meta of a text": _meta(text("float32"), _sizes(2), _sizes(1)),
    "whole numbers that are conjugated": call(V2, storage("0", 2, "LongStorage"), number(0), _sizes(2), _sizes(1), b"\x89", ORDERED, b"}" + text("conj") + b"\x88s"),
}  # fmt: skip
TRICKS |= {what: _client(entry) for what, entry in _NOT_TENSORS.items()}
TRICKS |= {
    "a sparse tensor whose index is outside": _client(_sparse("sparse_coo", _longs(0, [1, 1], [1, 1]), _longs(1, [1], [1]), _sizes(0), b"\x88")),
    "a sparse tensor of a negative size": _client(_sparse("sparse_coo", _longs(0, [1, 1], [1, 1]), _longs(1, [1], [1]), _sizes(-1), b"\x88")),
    "a sparse tensor with fewer values than indices": _client(_sparse("sparse_coo", _longs(0, [1, 2], [2, 1]), _longs(1, [1], [1]), _sizes(3))),
    "a sparse tensor whose indices are real numbers": _client(_sparse("sparse_csr", _FLOATS, _FLOATS, _FLOATS, _sizes(1, 1))),
    "sparse rows that do not count their entries": _client(_sparse("sparse_csr", *[_longs(0, [2], [1])] * 3, _sizes(1, 1))),
    "sparse blocks without blocks": _client(_sparse("sparse_bsr", *[_longs(0, [2], [1])] * 3, _sizes(1, 1))),
    "a sparse tensor of 1,000 dimensions": _client(_sparse("sparse_coo", _longs(0, [1, 1], [1, 1]), _longs(1, [1], [1]), _sizes(*[1] * 1000))),
    "a quantized tensor with a zero point of 8,000 bits": _client(_quantized("QInt8Storage", _sizes(4), _sizes(1), _PER_TENSOR, _HALF, number(1 << 8000))),
    "a tensor on meta of 1,000 dimensions": _client(_meta(_FLOAT32, _sizes(*[1] * 1000), _sizes(*[1] * 1000))),
    "a tensor on meta of 2 ** 80 elements": _client(_meta(_FLOAT32, _sizes(1 << 40, 1 << 40), _sizes(1, 1))),
    "a tensor on meta of a function": _client(_meta(GETATTR, _sizes(2), _sizes(1))),
    "a storage larger than its record, without a tensor": _client(storage("0", 1 << 40)),
    "an attribute of a sparse tensor that hides a method": _client(
        call(FROM_TYPE, name("torch._utils", "_rebuild_sparse_tensor"), name("torch", "Tensor"),
             tuple_of(call(name("torch.serialization", "_get_layout"), text("torch.sparse_coo")), tuple_of(_longs(0, [1, 1], [1, 1]), _longs(0, [1], [1]), _sizes(3))),
             b"}" + text("numpy") + b"Ns")
    ),
}  # fmt: skip

_EXTENSIONS = {"EXT1": b"\x82\x01", "EXT2": b"\x83\x01\x00", "EXT4": b"\x84\x01\x00\x00\x00"}
TRICKS |= {f"an extension code, whose cache is asked before any list ({key})": b"\x80\x02" + code + b")R." for key, code in _EXTENSIONS.items()}  # fmt: skip


def repeated(head: bytes, each: bytes, count: int = 20_000) -> bytes:
    """A list of an object that takes a few bytes and much work to make."""
    return b"\x80\x02" + head + b"]" + (b"(" + each * 1000 + b"e") * (count // 1000) + b"."


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Pairs whose hashes are all the same: the hash of a tuple has no random seed, and can be inverted."""
    prime1, prime2, prime5, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    inverse1, inverse2 = pow(prime1, -1, 1 << 64), pow(prime2, -1, 1 << 64)

    def step(state: int, lane: int) -> int:
        state = (state + lane * prime2) & mask
        return ((state << 31 | state >> 33) & mask) * prime1 & mask

    goal = step(step(prime5, 1), 1) * inverse1 & mask
    goal, pairs, first = (goal >> 31 | goal << 33) & mask, [(1, 1)], 2
    while len(pairs) < count:
        second = (goal - step(prime5, first)) * inverse2 & mask
        if second < 1 << 60:
            pairs.append((first, second))
        first += 1
    return pairs


def _keys(keys: list[Any]) -> bytes:
    return pickle.dumps(dict.fromkeys(keys), 2)


LONG = text("x" * 200_000)
_SIXTY = doubled(60)
_DEEP = b")" + b"\x85" * 100_000
_PRIME = 2**61 - 1


def _index(part: bytes) -> bytes:
    """An object whose real one hashes its attributes."""
    return name("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81}" + text("fqn") + part + b"sb"


def _calls(function: bytes, count: int) -> bytes:
    """A dictionary whose keys are numbers of one hash."""
    return b"}(" + b"".join(call(function, text(str(k * _PRIME))) + b"N" for k in range(count)) + b"u"


_DATE = call(name("numpy", "dtype"), text("M8"), b"\x89", b"\x88")
_UNITS = tuple_of(
    number(4),
    text("<"),
    b"NNN",
    number(-1),
    number(-1),
    number(0),
    tuple_of(b"N", tuple_of(b"C\x01D", number(1 << 8000), number(1), number(1))),
)

#: What only the maker of objects may meet, in small files.
_MADE = {
    "a fraction of a thousand million digits": call(FRACTION, text("1e999999999")),
    "a default dictionary with a key that is deep": call(name("collections", "defaultdict"), b"N", tuple_of(_DEEP + b"N\x86")),
    "a default dictionary with a key of 2 ** 60 parts": call(name("collections", "defaultdict"), b"N", tuple_of(_SIXTY + b"N\x86")),
    "a key whose real object hashes what is deep": b"}" + _index(_DEEP) + b"Ns",
    "a member whose real object hashes 2 ** 60 parts": b"\x8f(" + _index(_SIXTY) + b"\x90",
    "a default dictionary with keys of one hash": call(name("collections", "defaultdict")) + b"".join(number(k * _PRIME) + b"Ns" for k in range(20_000)),
    "keys that become decimals of one hash": _calls(name("decimal", "Decimal"), 20_000),
    "keys that become fractions of one hash": _calls(FRACTION, 20_000),
    "namespaces whose shared state is filled behind their BUILD": b"(}" + put(9) + b"](" + (call(PLAIN_NAMESPACE) + get(9) + b"b") * 5000 + b"e"
    + get(9) + b"(" + b"".join(text(f"a{k}") + b"N" for k in range(20_000)) + b"u0t",
    "an array of 20,000 dimensions of 2,400 digits": b"(" + number(1 << 8000) + put(3) + ARRAY + tuple_of(number(1), tuple_of(*[get(3)] * 20_000), DTYPE, b"\x89", b"C\x08" + bytes(8)) + b"bt",
    "a date whose unit grows": b"(" + _UNITS + put(3) + _DATE + (get(3) + b"b") * 20_000 + b"t",
    "a deque of a range": call(DEQUE, RANGE),
    "sparse tensors of the same entries": _longs(0, [1, 8000], [1, 0]) + put(0) + _longs(0, [8000], [0]) + put(1)
    + b"](" + _sparse("sparse_coo", get(0), get(1), _sizes(3)) * 20_000 + b"e\x87",
}  # fmt: skip

#: Small pickles that would take hours, or more memory than there is, of a reader that does what they ask for.
BOMBS: dict[str, bytes] = {
    "a memo of 2 ** 31 entries": b"\x80\x02N" + put(0x7FFFFFFF) + b".",
    "a memo of 10 ** 4000 entries": b"Np" + b"9" * 4000 + b"\n.",
    "memo indices whose hashes are the same": b"".join(b"Np%d\n0" % (k * (2**61 - 1)) for k in range(9000)) + b".",
    "a negative memo index": b"Np-1\ng-1\n.",
    "a string of 16 EiB": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "bytes of 4 GiB": b"\x80\x03B\xff\xff\xff\xff.",
    "a bytearray of 1 EiB": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
    "a frame of 16 EiB and an integer of 2 GiB": b"\x80\x04\x95" + b"\xff" * 8 + b"\x8b\xff\xff\xff\x7f.",
    "an integer of 300,000 bits": b"\x80\x02\x8b" + struct.pack("<I", 40_000) + b"\x7f" * 40_000 + b".",
    "an integer of 60,000 digits": b"L" + b"9" * 60_000 + b"L\n.",
    "a real number of 60,000 digits": b"F" + b"9" * 60_000 + b"\n.",
    "a line without an end": b"c" + b"x" * 1_000_000,
    "marks without end": b"\x80\x02" + b"(" * 500_000 + b".",
    "lists 200,000 deep": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples 200,000 deep": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "a list that contains itself": b"\x80\x02]q\x00h\x00a.",
    "a dictionary that contains itself through a tuple": b"\x80\x02}q\x00K\x01h\x00\x85s.",
    "a namespace that contains itself": b"\x80\x02" + NAMESPACE + b"q\x00}" + text("self") + b"h\x00sb.",
    "a stand-in that contains itself": b"\x80\x02" + SCALER + b"q\x00}" + text("self") + b"h\x00sb.",
    "a key that contains the dictionary that it is in": b"\x80\x02}q\x00" + SCALER + b"q\x01K\x01s"
    b"h\x01}" + text("owner") + b"h\x00sb0.",
    "a tuple of 2 ** 60 parts": b"\x80\x02" + _SIXTY + b".",
    "a list of 2 ** 60 parts": b"\x80\x02]r\0\0\0\0" + b"".join(b"](" + get(k) + get(k) + b"e" + put(k + 1) for k in range(60)) + b".",
    "dictionaries of 2 ** 60 parts": b"\x80\x02}r\0\0\0\0" + b"".join(b"}(K\0" + get(k) + b"K\1" + get(k) + b"u" + put(k + 1) for k in range(60)) + b".",
    "a key of 2 ** 60 parts": b"\x80\x02}" + _SIXTY + b"Ns.",
    "a key 200,000 deep": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
    "a member of a set of 2 ** 60 parts": b"\x80\x04\x8f(" + _SIXTY + b"\x90.",
    "a frozenset of 2 ** 60 parts": b"\x80\x04(" + _SIXTY + b"\x91.",
    "a set from a tuple of 2 ** 60 parts": b"\x80\x02" + call(name("builtins", "set"), _SIXTY + b"\x85") + b".",
    "keys that are pairs with the same hash": _keys(colliding_pairs(40_000)),
    "keys that are large integers with the same hash": _keys([k * (2**61 - 1) for k in range(40_000)]),
    "members that are pairs with the same hash": pickle.dumps(set(colliding_pairs(40_000)) if False else frozenset(colliding_pairs(9000)), 4),
    "a key of 255 parts that is set again and again": b"\x80\x02}(" + b"K\1" * 255 + b"t" + put(0) + b"0" + (b"(" + (get(0) + b"N") * 1000 + b"u") * 100 + b".",
    "errors that print 2 ** 60 parts: a codec": b"\x80\x02" + call(name("_codecs", "encode"), text("x"), _SIXTY) + b".",
    "errors that print 2 ** 60 parts: a dtype": array_of(call(name("numpy", "dtype"), _SIXTY), b"C\x08" + bytes(8)),
    "errors that print 2 ** 60 parts: getattr": b"\x80\x02" + call(GETATTR, _SIXTY, _SIXTY) + b".",
    "errors that print 2 ** 60 parts: a size": b"\x80\x02" + call(V2, storage("0", 1), number(0), _SIXTY, _SIXTY, b"\x89", b"}", b"}" + text("conj") + b"\x88s") + b".",
    "errors that print 2 ** 60 parts: metadata": b"\x80\x02" + call(V2, storage("0", 1), number(0), b")", b")", b"\x89", b"}", _SIXTY) + b".",
    "errors that print 2 ** 60 parts: a device": b"\x80\x02" + call(name("torch", "device"), _SIXTY) + b".",
    "errors that print 2 ** 60 parts: a storage": b"\x80\x02" + _SIXTY + b"Q.",
    "errors that print 2 ** 60 parts: a global": b"\x80\x04" + _SIXTY + _SIXTY + b"\x93.",
    "bytes that are encoded again and again": repeated(name("_codecs", "encode") + put(0) + tuple_of(LONG, text("latin1")) + put(1), get(0) + get(1) + b"R"),
    "bytearrays of the same bytes": repeated(name("builtins", "bytearray") + put(0) + tuple_of(b"B" + struct.pack("<I", 200_000) + bytes(200_000)) + put(1), get(0) + get(1) + b"R"),
    "sets of the same list": repeated(name("builtins", "set") + put(0) + tuple_of(b"](" + b"".join(map(number, range(5000))) + b"e") + put(1), get(0) + get(1) + b"R"),
    "ordered dicts of the same list": repeated(name("collections", "OrderedDict") + put(0) + tuple_of(b"](" + b"".join(number(k) + b"N\x86" for k in range(5000)) + b"e") + put(1), get(0) + get(1) + b"R"),
    "counters of the same dictionary": repeated(name("collections", "Counter") + put(0) + tuple_of(b"}(" + b"".join(number(k) + b"K\1" for k in range(5000)) + b"u") + put(1), get(0) + get(1) + b"R"),
    "sizes of the same list": repeated(SIZE + put(0) + tuple_of(tuple_of(*[b"K\1"] * 20_000)) + put(1), get(0) + get(1) + b"R"),
    "paths of the same parts": repeated(name("pathlib", "PosixPath") + put(0) + tuple_of(*[text("part")] * 5000) + put(1), get(0) + get(1) + b"R"),
    "namespaces with the same attributes": repeated(name("argparse", "Namespace") + put(0) + b"}(" + b"".join(text(f"a{k}") + b"N" for k in range(5000)) + b"u" + put(1), get(0) + b")R" + get(1) + b"b"),
    "arrays of the same bytes": repeated(name("numpy.core.multiarray", "_reconstruct") + put(0) + tuple_of(number(1), tuple_of(number(200_000)), call(name("numpy", "dtype"), text("u1"), b"\x89", b"\x88"), b"\x89", b"B" + struct.pack("<I", 200_000) + bytes(200_000)) + put(1), get(0) + b")R" + get(1) + b"b"),
    "tensors 900 deep in each other": b"\x80\x02" + FROM_TYPE + put(0) + name("torch", "Tensor") + put(1) + tuple_of(storage("0", 1), b"K\0", b"K\1\x85", b"K\1\x85", b"\x89", b"}") + put(2) + tuple_of(V2, get(1), get(2), b"N") + put(3)
    + b"".join(tuple_of(get(0), get(1), get(k), b"N") + put(k + 1) for k in range(3, 900)) + b"]" + (b"(" + (get(0) + get(900) + b"R") * 1000 + b"e") * 20 + b".",
}  # fmt: skip

BOMBS |= {what: _client(entry) for what, entry in _MADE.items()}

#: What torch's loader would make.
MADE_BY_TORCH: dict[str, bytes] = {
    **{what: _client(_MADE[what]) for what in ("a fraction of a thousand million digits", "a deque of a range")},
    "a default dictionary with a deep key": _client(_MADE["a default dictionary with a key that is deep"]),
    "a key that hashes what is deep": _client(_MADE["a key whose real object hashes what is deep"]),
    **{what: _client(entry) for what, entry in _NOT_TENSORS.items()},
    "a list of a range as a tensor": _client(call(FROM_TYPE, name("builtins", "list"), name("builtins", "list"), tuple_of(RANGE), b"N")),
    "an array with elements before its state": _client(call(name("numpy.core.multiarray", "_reconstruct"), name("numpy", "ndarray"), tuple_of(number(1 << 29)), text("O"))),
    "a dtype of another size": _client(call(name("numpy", "dtype"), text("S8"), b"\x89", b"\x88") + tuple_of(number(3), text("|"), b"NNN", number(1 << 30), number(0), number(0)) + b"b"),
    "a dtype with parts": _client(DTYPE + tuple_of(number(3), text("<"), b"N", tuple_of(text("a")), b"}", number(-1), number(-1), number(63)) + b"b"),
    "a mesh of devices": TRICKS["a mesh of devices, which waits for other ranks"],
}  # fmt: skip


class Nested:
    """A real object whose pickle calls :func:`os.system`, as an attacker would write it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo executed",)
