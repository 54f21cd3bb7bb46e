"""What each opcode of a pickle does to the machine of :mod:`.unpickler`, but for those that this inlines."""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats.torch_archive.calls import ITEMS, MEMBERS, PAIRS, Call, Global, Unmade
from elastic_ckpt.formats.torch_archive.checks import set_state
from elastic_ckpt.formats.torch_archive.keys import check_key, checked_keys

if TYPE_CHECKING:
    from elastic_ckpt.formats.torch_archive.unpickler import Machine

#: Largest number in bytes.
_MOST_NUMBER_NBYTES = 1 << 10


def _push(value: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    """The operation that pushes what ``value`` reads."""
    return lambda machine: machine.stack.append(value(machine))


def _make(value: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    """:func:`_push` of a container."""

    def make(machine: Machine) -> None:
        machine.count_container()
        machine.stack.append(value(machine))

    return make


def _skip(nbytes: int) -> Callable[[Machine], None]:
    """PROTO and FRAME: what they announce is not needed."""

    def skip(machine: Machine) -> None:
        machine.take(nbytes)

    return skip


def _text(machine: Machine, width: int) -> str:
    return machine.take(machine.number(width)).decode("utf-8", "surrogatepass")


def _long(machine: Machine, width: int) -> int:
    nbytes = machine.number(width)
    if nbytes > _MOST_NUMBER_NBYTES:
        raise pickle.UnpicklingError(f"an integer of {nbytes} bytes")
    return int.from_bytes(machine.take(nbytes), "little", signed=True)


def _tuple3(machine: Machine) -> None:
    machine.count_container()
    first, second, third = machine.stack[-3:]  # ValueError if there are fewer
    machine.stack[-3:] = [(first, second, third)]


def _put(machine: Machine) -> None:
    machine.memo[machine.number(1)] = machine.stack[-1]


def _memoize(machine: Machine) -> None:
    machine.count_container()
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _append(target: Any, items: list[Any]) -> None:
    if _is_kept_for_later(target, ITEMS, items):
        return
    if type(target) is not list:
        raise pickle.UnpicklingError(f"items are appended to an object of type {type(target).__name__}")
    target += items


def _is_kept_for_later(target: Any, kind: str, items: list[Any]) -> bool:
    """Record what an object gets that is not made yet, or never."""
    if type(target) is Call:
        target.steps.append((kind, items))
    return type(target) in (Call, Unmade)


def _update(target: Any, items: list[Any]) -> None:
    keys = items[::2]
    if len(items) % 2 == 0 and _is_kept_for_later(target, PAIRS, items):
        checked_keys(keys)
        return
    if not isinstance(target, (dict, OrderedDict, Counter)) or len(items) % 2:
        raise pickle.UnpicklingError(f"items are set in an object of type {type(target).__name__}, or half of one")
    if type(target) is dict and {str}.issuperset(map(type, keys)):
        target.update(zip(keys, items[1::2], strict=True))
        return
    for key, value in zip(keys, items[1::2], strict=True):
        if type(key) is not str:
            check_key(key, len(target))
        target[key] = value


def _add(target: Any, items: list[Any]) -> None:
    if _is_kept_for_later(target, MEMBERS, items):
        return
    if type(target) is not set:
        raise pickle.UnpicklingError(f"members are added to an object of type {type(target).__name__}")
    target |= set(checked_keys(items, len(target)))


def _with_marked(fill: Callable[[Any, list[Any]], None]) -> Callable[[Machine], None]:
    """The operation that fills what is below the topmost mark with what is above it."""

    def filled(machine: Machine) -> None:
        items = machine.pop_mark()
        fill(machine.stack[-1], items)

    return filled


def _with_last(fill: Callable[[Any, list[Any]], None], count: int) -> Callable[[Machine], None]:
    """The operation that fills an object with the ``count`` above it."""

    def filled(machine: Machine) -> None:
        items = [machine.stack.pop() for _ in range(count)]
        fill(machine.stack[-1], items[::-1])

    return filled


def _global(machine: Machine, module: str, name: str) -> Global:
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    module = IMPORT_MAPPING.get(module, module)
    if (module, name) not in machine.globals:
        machine.globals[module, name] = machine.find(module, name)
    return machine.globals[module, name]


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise pickle.UnpicklingError("a global whose name is no string")
    machine.stack.append(_global(machine, module, name))


def _new_object(machine: Machine) -> None:
    arguments = machine.stack.pop()
    machine.stack[-1] = machine.new(machine.stack[-1], arguments)


def _build(machine: Machine) -> None:
    state, target = machine.stack.pop(), machine.stack[-1]
    machine.charge(state)
    try:
        set_state(target, state)
    except ElasticCkptError as error:  # of an array, whose elements are refused
        target.function = Global(target.name, error=machine.unmade(error).error)


def _pop_mark(machine: Machine) -> None:
    machine.pop_mark()


def _pop(machine: Machine) -> None:
    """Of a tuple that is part of itself, which was pickled already while its items were."""
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


#: By opcode.
OPERATIONS: dict[int, Callable[[Machine], None]] = {
    pickle.PROTO[0]: _skip(1),
    pickle.FRAME[0]: _skip(8),
    pickle.NONE[0]: _push(lambda machine: None),
    pickle.NEWTRUE[0]: _push(lambda machine: True),
    pickle.NEWFALSE[0]: _push(lambda machine: False),
    pickle.EMPTY_TUPLE[0]: _push(lambda machine: ()),
    pickle.EMPTY_LIST[0]: _make(lambda machine: []),
    pickle.EMPTY_DICT[0]: _make(lambda machine: {}),
    pickle.BINPUT[0]: _put,
    pickle.BININT[0]: _push(lambda machine: int.from_bytes(machine.take(4), "little", signed=True)),
    pickle.EMPTY_SET[0]: _make(lambda machine: set()),
    pickle.LONG1[0]: _push(lambda machine: _long(machine, 1)),
    pickle.LONG4[0]: _push(lambda machine: _long(machine, 4)),
    pickle.BINFLOAT[0]: _push(lambda machine: struct.unpack(">d", machine.take(8))[0]),
    pickle.SHORT_BINUNICODE[0]: _push(lambda machine: _text(machine, 1)),
    pickle.BINUNICODE8[0]: _push(lambda machine: _text(machine, 8)),
    pickle.SHORT_BINBYTES[0]: _push(lambda machine: machine.take(machine.number(1))),
    pickle.BINBYTES[0]: _push(lambda machine: machine.take(machine.number(4))),
    pickle.BINBYTES8[0]: _push(lambda machine: machine.take(machine.number(8))),
    pickle.BYTEARRAY8[0]: _push(lambda machine: bytearray(machine.take(machine.number(8)))),
    pickle.TUPLE3[0]: _tuple3,
    pickle.TUPLE[0]: _make(lambda machine: tuple(machine.pop_mark())),
    pickle.BINPERSID[0]: _push(lambda machine: machine.load(machine.stack.pop())),
    pickle.LIST[0]: _make(lambda machine: machine.pop_mark()),
    pickle.FROZENSET[0]: _make(lambda machine: frozenset(checked_keys(machine.pop_mark()))),
    pickle.APPEND[0]: _with_last(_append, 1),
    pickle.APPENDS[0]: _with_marked(_append),
    pickle.SETITEM[0]: _with_last(_update, 2),
    pickle.SETITEMS[0]: _with_marked(_update),
    pickle.ADDITEMS[0]: _with_marked(_add),
    pickle.MEMOIZE[0]: _memoize,
    pickle.GLOBAL[0]: _push(lambda machine: _global(machine, machine.line().decode(), machine.line().decode())),
    pickle.STACK_GLOBAL[0]: _stack_global,
    pickle.NEWOBJ[0]: _new_object,
    pickle.BUILD[0]: _build,
    pickle.POP[0]: _pop,
    pickle.POP_MARK[0]: _pop_mark,
}
