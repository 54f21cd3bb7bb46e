"""Changes of a checkpoint's files: another entry in a pickle or in JSON, or another thing in the place of a file.

:mod:`tests.distributed.malformed` has the ways in which one entry of a pickle changes. These draws go over every file of
a folder, whatever wrote it, and say of each change what a load that succeeds all the same must have restored.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.distributed.malformed import REMOVED, VALUES, WAYS, Path_, changed, places

#: Of what the tests write beside a checkpoint, and of what no reader of checkpoints opens.
NOT_READ = re.compile(r"truth\.pt|found\.pkl|.*\.log|config\.json|generation_config\.json|zero_to_fp32\.py|\.ready")
#: Parts of :func:`tests.distributed.truth.fingerprint` that no entry beside a tensor's values and steps decides.
TENSORS = ("weights", "partitions", "masters", "states")
#: And all of them: a file's bytes came from elsewhere, or did not change.
EVERYTHING = (*TENSORS, "groups", "scheduler", "counters", "scaler")


@dataclass(frozen=True)
class FileChange:
    """One change of one file.

    Attributes:
        name: path of the file in the folder.
        text: what happens to it.
        apply: does it, to a copy of the folder.
        exact: parts of an engine's fingerprint that a load which is not refused restores as they were.
    """

    name: str
    text: str
    apply: Callable[[Path], object]
    exact: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class Runs:
    """Makes a folder when it is unpickled."""

    #: In the working directory of the process that reads it.
    MARK = "code-of-a-checkpoint-ran"

    def __reduce__(self) -> Any:
        return os.mkdir, (self.MARK,)


def _nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


#: Beside those that :mod:`tests.distributed.malformed` draws.
MORE: dict[str, Any] = {
    "-(2 ** 70)": -(1 << 70),
    "2 ** 63": 1 << 63,
    "code": Runs(),
    "nested": _nested(200),
    "many items": [0] * 100_000,
    "a huge count": (1 << 62) - 1,
    "-inf": float("-inf"),
}
#: What is no Python value takes the place of a text in JSON.
_RAW = {
    "of 5,000 digits": "9" * 5000,
    "beyond a double": "1e999",
    "-Infinity": "-Infinity",
    "NaN": "NaN",
    "nested": "[" * 100_000 + "]" * 100_000,
    "objects in objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "one key twice": '{"a": 1, "a": 2}',
    "half a surrogate": '"\\ud800"',
    "a path above": '"../../x"',
    "an absolute path": '"/etc/passwd"',
    "no code point": '"\\u0000"',
}
_PLACEHOLDER = "<raw>"
_JSON = {way: value for way, value in VALUES.items() if type(value) in (type(None), bool, int, float, str, list, dict)}
_JSON = {way: value for way, value in _JSON.items() if way != "{1: 2}"}


def names_of(folder: Path) -> list[str]:
    """The files of a folder that readers open."""
    names = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in names if not NOT_READ.fullmatch(name.rpartition("/")[2])]


def drawn(folder: Path, other: Path | None, seed: int, count: int) -> Iterator[FileChange]:
    """``count`` changes of a folder: of entries and of whole files, half each.

    ``other``: another save of the same kind, with files of the same names and other values.
    """
    choice = random.Random(seed)
    names = names_of(folder)
    trees = {name: _tree(folder / name) for name in names}
    by_file = {name: [*places(tree)] for name, tree in trees.items() if tree is not None}
    while count:
        if by_file and choice.random() < 0.5:
            name = choice.choice([*by_file])
            place, way = choice.choice(by_file[name]), choice.choice(_ways_of(name))
            change = _entry_change(name, trees[name], place, way)
        else:
            change = _file_change(folder, other, choice.choice(names), choice)
        if change is not None:
            count -= 1
            yield change


def _tree(path: Path) -> Any:
    """What a file holds, if its entries can be changed one by one; else ``None``."""
    if path.suffix in (".pt", ".bin"):
        return torch.load(path, weights_only=False)
    if path.name.endswith(".metadata"):
        return pickle.loads(path.read_bytes())
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix == ".safetensors":
        return _header(path)
    return None


def _header(path: Path) -> Any:
    raw = path.read_bytes()
    (nbytes,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + nbytes])


def entry_change(folder: Path, name: str, place: Path_, way: str) -> FileChange:
    """A change of one entry, which there must be."""
    change = _entry_change(name, _tree(folder / name), place, way)
    assert change is not None, f"there is no such change of {name}: {place} <- {way}"
    return change


def _ways_of(name: str) -> list[str]:
    if name.endswith((".json", ".safetensors")):
        return [*_JSON, *_RAW, REMOVED, "twice as long", "one item less", "negative", "as text"]
    return [*WAYS, *MORE]


def _entry_change(name: str, tree: Any, place: Path_, way: str) -> FileChange | None:
    is_json = name.endswith((".json", ".safetensors"))
    raw = _RAW.get(way) if is_json else None
    new = changed(tree, place, way, {way: _PLACEHOLDER} if raw else MORE)
    if new is ...:
        return None
    text = json.dumps(new).replace(f'"{_PLACEHOLDER}"', raw or "") if is_json else ""
    exact = () if _holds_values(tree, place) else TENSORS
    return FileChange(name, f"{place} <- {way}", partial(_write, name, new, text), exact)


def _holds_values(tree: Any, place: Path_) -> bool:
    """Whether an entry is, holds or lies in values of the run that a load cannot know to be others."""
    node = tree
    for key in place:
        is_attribute = isinstance(key, str) and key.startswith("@") and not isinstance(node, dict)
        node = vars(node)[key[1:]] if is_attribute else node[key]
        if isinstance(node, torch.Tensor):
            return True
    found = [node]
    while found:
        each = found.pop()
        if isinstance(each, torch.Tensor):
            return True
        found += each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ()
    return "step" in place


def _write(name: str, tree: Any, text: str, copy: Path) -> None:
    path = copy / name
    body = path.read_bytes()
    path.unlink()
    if name.endswith(".json"):
        path.write_text(text)
    elif name.endswith(".safetensors"):
        (nbytes,) = struct.unpack_from("<Q", body)
        header = text.encode()
        header += b" " * (-len(header) % 8)
        path.write_bytes(struct.pack("<Q", len(header)) + header + body[8 + nbytes :])
    elif name.endswith(".metadata"):
        path.write_bytes(pickle.dumps(tree))
    else:
        torch.save(tree, path)


def _archive(tree: Any) -> bytes:
    """What ``torch.save`` writes, into files of any name."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    return stream.getvalue()


Make = Callable[[Path, bytes], object]


def _put(data: Callable[[bytes], bytes]) -> Make:
    return lambda path, old: path.write_bytes(data(old))


#: What is made in the place of a file, of which the old bytes are given.
IN_ITS_PLACE: Mapping[str, Make] = {
    "removed": lambda path, old: None,
    "emptied": _put(lambda old: b""),
    "one byte": _put(lambda old: old[:1]),
    "half of it": _put(lambda old: old[: len(old) // 2]),
    "a byte less": _put(lambda old: old[:-1]),
    "100 bytes less": _put(lambda old: old[:-100]),
    "its end alone": _put(lambda old: old[len(old) // 2 :]),
    "zeros": _put(lambda old: bytes(len(old))),
    "zeros at its end": _put(lambda old: old[: len(old) // 2] + bytes(len(old) - len(old) // 2)),
    "twice": _put(lambda old: old + old),
    "text": _put(lambda old: b"step4\n"),
    "long text": _put(lambda old: b"x" * (1 << 20)),
    "a path above": _put(lambda old: b"../../etc"),
    "no text": _put(lambda old: b"\xff\xfe\x00\xd8"),
    "an object that runs": lambda path, old: path.write_bytes(pickle.dumps(Runs())),
    "a number": lambda path, old: path.write_bytes(_archive(7)),
    "a folder": lambda path, old: path.mkdir(),
    "a pipe": lambda path, old: os.mkfifo(path),
    "a link to nothing": lambda path, old: path.symlink_to("nowhere"),
    "a link to itself": lambda path, old: path.symlink_to(path.name),
    "a link to its folder": lambda path, old: path.symlink_to("."),
    "a link to endless zeros": lambda path, old: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path, old: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path.name}.pipe")),
    "a link to a copy": lambda path, old: (
        Path(f"{path}.copy").write_bytes(old),
        path.symlink_to(f"{path.name}.copy"),
    ),
}
#: What is taken of a file beside it, or of the same file of another save.
OF_ANOTHER = ("another one's", "exchanged with another", "another save's", "a link to another one's")
#: What happens to the folder of a file.
OF_FOLDER = ("its folder removed", "its folder emptied", "its folder is a file", "its folder links to itself")
#: A file more.
BESIDE = ("beside it, a copy of the next number", "beside it, a copy under its name and more")


def _file_change(folder: Path, other: Path | None, name: str, choice: random.Random) -> FileChange | None:
    way = choice.choice([*IN_ITS_PLACE, *OF_ANOTHER, *OF_FOLDER[: 4 if "/" in name else 0], *BESIDE])
    if way in OF_ANOTHER:
        return _of_another(folder, other, name, way, choice)
    if way in BESIDE:
        return _beside(folder, name, way)
    if way in OF_FOLDER:
        return FileChange(name, way, partial(_change_folder, name, way), EVERYTHING)
    exact = () if way.startswith("zeros") and name.endswith(".safetensors") else EVERYTHING  # it has no checksums
    return FileChange(name, way, partial(_replace, name, IN_ITS_PLACE[way]), exact)


def _of_another(folder: Path, other: Path | None, name: str, way: str, choice: random.Random) -> FileChange | None:
    names = names_of(folder)
    # where masters are beside weights. Other files, as those of ZeRO-3, say nothing of the save that they are of
    is_told_apart = "_states.pt" in name and any(re.search(r"/(bf16_)?zero_pp_.*optim", each) for each in names)
    is_told_apart &= not any(re.search(r"/zero_pp_.*model_states", each) for each in names)
    exact = EVERYTHING if is_told_apart else ()
    if way == "another save's":
        if other is None or not (other / name).is_file():
            return None
        return FileChange(name, way, partial(_replace, name, lambda path, _: shutil.copy(other / name, path)), exact)
    like = [each for each in names if each != name and _kind_of(each) == _kind_of(name)]
    if not like:
        return None
    another = choice.choice(like)
    return FileChange(name, f"{way}, {another}", partial(_take, name, another, way), exact)


def _kind_of(name: str) -> str:
    """Equal for files of which one may be taken for the other."""
    return re.sub(r"\d+", "0", name.rpartition("/")[2])


def _take(name: str, like: str, way: str, copy: Path) -> None:
    path, another = copy / name, copy / like
    mine, its = path.read_bytes(), another.read_bytes()
    path.unlink()
    if way.startswith("a link"):
        path.symlink_to(os.path.relpath(another, path.parent))
        return
    path.write_bytes(its)
    if way.startswith("exchanged"):
        another.unlink()
        another.write_bytes(mine)


def _replace(name: str, make: Make, copy: Path) -> None:
    path = copy / name
    old = path.read_bytes()
    path.unlink()  # which is a link to the original
    make(path, old)


def _change_folder(name: str, way: str, copy: Path) -> None:
    path = (copy / name).parent
    shutil.rmtree(path)
    if way.endswith("emptied"):
        path.mkdir()
    elif way.endswith("a file"):
        path.write_bytes(b"")
    elif way.endswith("itself"):
        path.symlink_to(path.name)


def _beside(folder: Path, name: str, way: str) -> FileChange | None:
    head, _, tail = name.rpartition("/")
    number = re.search(r"\d+", tail)
    new = f"{tail}.orig"
    if way.endswith("next number"):
        if number is None:
            return None
        following = str(int(number.group()) + 7).zfill(len(number.group()))
        new = tail[: number.start()] + following + tail[number.end() :]
    return FileChange(name, f"{way}, {new}", lambda copy: shutil.copy(copy / name, copy / head / new), EVERYTHING)
