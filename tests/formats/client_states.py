"""Client states as training scripts have them, drawn, and what makes one equal to another: types, bits, what is shared.

``Pool`` has the classes that a script could allow, beside what every process may read.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import random
import types
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn


class Color(enum.Enum):
    RED = 1


class Node:
    """With what it is linked to, itself perhaps."""

    def __init__(self, value: Any) -> None:
        self.value, self.link = value, self


class Stateful:
    """With a state of its own, and slots."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getstate__(self) -> Any:
        return {"kept": self.value}

    def __setstate__(self, state: Any) -> None:
        self.value = state["kept"]


class Listing(list):  # type: ignore[type-arg]
    pass


class Marked(torch.Tensor):
    pass


def doubled(value: int) -> int:
    return 2 * value


#: What a script passes to ``add_safe_globals``, before it loads the objects below.
ALLOWED: list[Any] = [Color, Node, Stateful, Listing, Marked, doubled, functools.partial, collections.ChainMap]
ALLOWED += [np.dtype, random.Random]
SHARED = torch.arange(24.0).reshape(4, 6)


def quantized(per_channel: bool) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if per_channel:
            scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([1, 2])
            return torch.quantize_per_channel(torch.rand(2, 3), scales, zeros, 0, torch.qint8)
        return torch.quantize_per_tensor(torch.rand(2, 3), 0.1, 3, torch.quint8)


def with_attributes(tensor: torch.Tensor, **attributes: Any) -> torch.Tensor:
    vars(tensor).update(attributes)
    return tensor


TENSORS: dict[str, Any] = {
    "float": lambda: torch.tensor([1.5, -0.0, float("nan")]),
    "bfloat16": lambda: torch.ones(2, 2).bfloat16(),
    "uint16": lambda: torch.ones(2, dtype=torch.uint16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "point": lambda: torch.tensor(7),
    "empty": lambda: torch.empty(3, 0),
    "shared": lambda: SHARED,
    "row": lambda: SHARED[1],
    "column": lambda: SHARED[:, 2],
    "turned": SHARED.t,
    "expanded": lambda: torch.ones(1).expand(5),
    "requires grad": lambda: torch.ones(2, requires_grad=True),
    "view that requires grad": lambda: SHARED[2:3].detach().requires_grad_(),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "frozen parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "integer parameter": lambda: nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
    "attributes": lambda: with_attributes(torch.ones(2), tag="a", links=[SHARED[0], {1: torch.ones(1)}]),
    "parameter with attributes": lambda: with_attributes(nn.Parameter(torch.ones(2)), sharded=True),
    "conjugated": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse, not coalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (3,)),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "sparse columns": lambda: torch.eye(3).to_sparse_csc(),
    "sparse blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse parameter": lambda: nn.Parameter(torch.eye(2).to_sparse()),
    "meta": lambda: torch.ones(2, 3, device="meta", requires_grad=True).t(),
    "quantized": lambda: quantized(per_channel=False),
    "quantized by channel": lambda: quantized(per_channel=True),
    "storage": lambda: torch.arange(3.0).to(torch.float16)._typed_storage(),
}
OBJECTS: dict[str, Any] = {
    "none": lambda: None,
    "numbers": lambda: [True, 2**80, -(2**70), 1.5, float("inf"), 1j, -0.0],
    "texts": lambda: ["", "\ud800", "a" * 300, b"", b"raw" * 100, bytearray(b"x"), "TENSOR|client|0"],
    "sets": lambda: [set(), {1, "a"}, frozenset({(1, 2), 3.5}), {torch.float16, None}],
    "torch": lambda: [torch.float16, torch.uint4, torch.Size([2]), torch.device("cpu"), torch.device("cuda", 3)],
    "layout": lambda: torch.sparse_coo,
    "generator": torch.get_rng_state,
    "random": random.Random(3).getstate,
    "numpy state": lambda: np.random.RandomState(3).get_state(),
    "numpy bits": lambda: np.random.default_rng(3).bit_generator.state,
    "array": lambda: np.arange(6).reshape(2, 3),
    "array by columns": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian array": lambda: np.arange(3, dtype=">i4"),
    "strings": lambda: np.array(["ab", "c"]),
    "byte strings": lambda: np.array([b"ab", b"c"]),
    "days": lambda: np.array(["2020-02-03", "NaT"], dtype="M8[D]"),
    "durations": lambda: np.array([1, 2], dtype="m8[25s]"),
    "numpy scalars": lambda: [np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2020-01-01"), np.str_("a")],
    "empty arrays": lambda: [np.empty((0, 3)), np.array(3.0), np.empty(0, "U4")],
    "dtypes": lambda: [np.dtype("float32"), np.dtype(">i2"), np.dtype("M8[ns]"), np.dtype("U7")],
    "namespace": lambda: argparse.Namespace(lr=0.1, deep=argparse.Namespace(w=[SHARED[3]])),
    "simple namespace": lambda: types.SimpleNamespace(a=1, b=[2]),
    "paths": lambda: [pathlib.PosixPath("/a/b"), pathlib.PurePosixPath("c")],
    "counter": lambda: collections.Counter(ham=2),
    "ordered": lambda: collections.OrderedDict(b=SHARED[0], a=()),
    "deque": lambda: collections.deque([1, [2], SHARED[0]], maxlen=5),
    "endless deque": lambda: collections.deque("abc"),
    "defaultdict": lambda: collections.defaultdict(list, {1: [2], (3, 4): []}),
    "defaultdict of none": lambda: collections.defaultdict(None, a=1),
    "times": lambda: [datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc), datetime.datetime.max],
    "dates": lambda: [datetime.date(2020, 1, 2), datetime.time(1, 2, 3), datetime.timedelta(1, 2, 3)],
    "zone": lambda: datetime.timezone(datetime.timedelta(hours=2), "here"),
    "exact numbers": lambda: [decimal.Decimal("1.10"), decimal.Decimal("NaN"), fractions.Fraction(3, 7)],
    "ranges": lambda: [range(2, 9, 3), slice(1, None, 2)],
    "classes": lambda: [list, collections.OrderedDict, torch.Tensor, dict, int],
    "keys": lambda: {1: "a", None: "b", (1, "x"): "c", 2.5: "d", torch.float16: "e", b"k": "f", -(2**70): 0},
    "objects as keys": lambda: {torch.Size([1]): 1, datetime.date(2020, 1, 1): 2, frozenset({1}): 3},
}
#: Of classes in :data:`ALLOWED`.
OF_USERS: dict[str, Any] = {
    "enum": lambda: [Color.RED, {Color.RED: 1}],
    "node": lambda: Node([SHARED[0]]),
    "stateful": lambda: Stateful({"deep": Stateful(torch.ones(2))}),
    "listing": lambda: Listing([1, [SHARED]]),
    "marked": lambda: with_attributes(torch.ones(2).as_subclass(Marked), tag="x"),
    "partial": lambda: functools.partial(doubled, 3),
    "function": lambda: doubled,
    "chain": lambda: collections.ChainMap({1: 2}, {3: [4]}),
    "generator object": lambda: random.Random(5),
    "array of objects": lambda: np.array([1, "a", [2, SHARED[0]]], dtype=object),
    "array of records": lambda: np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "scalar of records": lambda: np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])[0],
    "dtype of records": lambda: np.dtype([("a", "i4"), ("b", "U3")]),
}


@st.composite
def states(draw: st.DrawFn, pool: dict[str, Any]) -> dict[Any, Any]:
    """Objects of the pool in containers, which hold each other, and themselves, in places."""
    made = {name: pool[name]() for name in draw(st.lists(st.sampled_from(sorted(pool)), min_size=1, max_size=6))}
    containers: list[Any] = [dict(made)]
    for _ in range(draw(st.integers(0, 5))):
        parts = [*made.values(), *containers]
        chosen = [parts[draw(st.integers(0, len(parts) - 1))] for _ in range(draw(st.integers(0, 3)))]
        kind = draw(st.sampled_from(["list", "tuple", "dict", "ordered", "namespace", "deque"]))
        by_name = {f"at{number}": each for number, each in enumerate(chosen)}
        containers.append(
            {
                "list": list,
                "tuple": tuple,
                "dict": lambda _, by_name=by_name: by_name,
                "ordered": lambda _, by_name=by_name: collections.OrderedDict(by_name),
                "namespace": lambda _, by_name=by_name: argparse.Namespace(**by_name),
                "deque": collections.deque,
            }[kind](chosen)
        )
    lists = [each for each in containers if isinstance(each, list)]
    for holder in lists:
        if draw(st.booleans()):  # what holds itself, at some distance
            holder.append(containers[draw(st.integers(0, len(containers) - 1))])
    return {0: "fold", "client": containers[0], "all": containers}


class Comparison:
    """Walks through two objects at once, without recursion, and finds the first difference."""

    def __init__(self) -> None:
        self._pairs: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []

    def difference(self, expected: Any, found: Any) -> str | None:
        waiting = [(expected, found, "")]
        while waiting:
            one, other, where = waiting.pop()
            text = None if type(one) is type(other) else f"{type(other)} instead of {type(one)}"
            if text is None and not _is_plain(one):
                if id(one) in self._pairs:
                    text = None if self._pairs[id(one)] == id(other) else "shared differently"
                    if text is None:
                        continue
                self._pairs[id(one)] = id(other)
                self._kept += [one, other]
            if text is None:
                text = self._shallow(one, other)
            if text is not None:
                return f"{where}: {text}"
            parts, others = _parts(one), _parts(other)
            if len(parts) != len(others):
                return f"{where}: {len(others)} parts instead of {len(parts)}"
            waiting += [(a, b, f"{where}/{n}") for n, (a, b) in enumerate(zip(parts, others, strict=True))]
        return None

    def _shallow(self, one: Any, other: Any) -> str | None:
        if isinstance(one, torch.Tensor):
            return self._of_tensors(one, other)
        if isinstance(one, (torch.UntypedStorage, torch.TypedStorage)):
            return None if list(one) == list(other) and one.nbytes() == other.nbytes() else "another storage"
        if isinstance(one, np.ndarray):
            facts = [(a.dtype, a.shape, a.size and a.strides, a.flags.writeable) for a in (one, other)]
            same = facts[0] == facts[1] and (one.dtype.hasobject or one.tobytes() == other.tobytes())
            return None if same else f"{facts[1]} {other} instead of {facts[0]} {one}"
        if _is_plain(one) or isinstance(one, (np.generic, np.dtype, pathlib.PurePath, slice)):
            is_same = repr(one) == repr(other) and (one == other or "nan" in repr(one).lower())
            return None if is_same else f"{other!r} instead of {one!r}"
        return None

    def _of_tensors(self, one: torch.Tensor, other: torch.Tensor) -> str | None:
        facts = [_facts(each) for each in (one, other)]
        if facts[0] != facts[1]:
            return f"{facts[1]} instead of {facts[0]}"
        if one.layout is not torch.strided or one.device.type == "meta":
            return None
        storages = [each.untyped_storage() for each in (one, other)]
        if storages[0].nbytes():
            pair = self._storages.setdefault(storages[0]._cdata, storages[1]._cdata)
            self._kept += storages
            if pair != storages[1]._cdata or storages[0].nbytes() != storages[1].nbytes():
                return "another storage is shared"
        same = bytes(storages[0].tolist()) == bytes(storages[1].tolist())
        return None if same else f"{other} instead of {one}"


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    facts: tuple[Any, ...] = tensor.dtype, tensor.layout, tuple(tensor.shape), tensor.device, tensor.requires_grad
    facts = (*facts, tensor.is_conj(), tensor.is_neg(), tensor.is_leaf, tensor.is_quantized)
    if tensor.is_quantized:
        per_tensor = tensor.qscheme() is torch.per_tensor_affine
        scales = (tensor.q_scale(), tensor.q_zero_point()) if per_tensor else tensor.q_per_channel_scales().tolist()
        facts = (*facts, tensor.qscheme(), scales)
    if tensor.layout is torch.strided:
        return (*facts, tensor.stride(), tensor.storage_offset())
    return (*facts, tensor.layout is torch.sparse_coo and tensor.is_coalesced())


def _is_plain(value: Any) -> bool:
    plain = (
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type,
        enum.Enum,
        torch.dtype,
        torch.layout,
        torch.device,
    )
    exact = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction)
    return isinstance(value, (*plain, *exact, range, types.FunctionType)) or (type(value) is tuple and not value)


def _parts(node: Any) -> list[Any]:
    parts: list[Any] = []
    if isinstance(node, torch.Tensor):
        if node.layout is torch.sparse_coo:
            parts = [node._indices(), node._values()]
        elif node.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [node.crow_indices(), node.col_indices(), node.values()]
        elif node.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [node.ccol_indices(), node.row_indices(), node.values()]
        parts = [each.detach() for each in parts]
    elif isinstance(node, np.ndarray) and node.dtype.hasobject:
        parts = list(node.flat)
    elif isinstance(node, dict):
        parts = [*node.keys(), *node.values(), getattr(node, "default_factory", None)]
    elif isinstance(node, (list, tuple, collections.deque)) and not isinstance(node, np.generic):
        parts = [*node, getattr(node, "maxlen", None)]
    elif isinstance(node, (set, frozenset)):
        parts = sorted(node, key=repr)
    elif isinstance(node, functools.partial):
        parts = [node.func, node.args, node.keywords]
    elif isinstance(node, random.Random):
        parts = [node.getstate()]
    elif isinstance(node, Stateful):
        parts = [node.value]
    attributes = getattr(node, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(node, (type, types.FunctionType, torch.TypedStorage)):
        parts = [*parts, *attributes.keys(), *attributes.values()]
    return parts
