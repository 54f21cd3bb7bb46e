"""Whether each file of a universal checkpoint is the one that was converted, and not that of another parameter.

Every archive of a key has the same name, so that nothing in a file tells whose it is. ``elastic-ckpt convert`` notes
what tells a tensor file from others in ``zero/optimizer_state.pt``: the CRC32 of its record, or one of the sizes and
CRC32s of several, which the archive's directory has. So no byte of a tensor is read for it. DeepSpeed's own converter
notes nothing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.errors import DamagedError, MixedSavesError, Remedy
from elastic_ckpt.formats.base import CONVERT_AGAIN
from elastic_ckpt.formats.universal_states import StateFile

#: Entry of ``zero/optimizer_state.pt``: parameter -> key -> :func:`content_of` that file.
CONTENTS = "elastic_ckpt_contents"
_RECORD = struct.Struct("<QI")
#: By parameter and key.
Contents = Mapping[tuple[str, str], int]


def content_of(records: Records) -> int | None:
    """What tells a file's tensors from others; ``None`` of a file without elements, or without checksums."""
    if len(records.crc32s) == 1:  # as almost every file has
        return records.crc32s[0] or None
    pairs = [(nbytes, crc32) for _, nbytes, crc32 in records if nbytes]
    if not pairs or not all(crc32 for _, crc32 in pairs):
        return None
    return zlib.crc32(b"".join(_RECORD.pack(*pair) for pair in pairs))


def note_contents(contents: Iterable[tuple[str, str, int | None]]) -> dict[str, dict[str, int]]:
    """The entry :data:`CONTENTS`, given parameter, key and content of each file."""
    noted: dict[str, dict[str, int]] = {}
    for name, key, content in contents:
        if content is not None:
            noted.setdefault(name, {})[key] = content
    return noted


def read_contents(entry: Any, path: str) -> Contents:
    """What :func:`note_contents` made, empty without it; :class:`DamagedError` if it is anything else."""
    found: dict[tuple[str, str], int] = {}
    for name, of_name in entry.items() if isinstance(entry, dict) else [] if entry is None else [(entry, None)]:
        pairs = of_name.items() if isinstance(of_name, dict) else [(None, None)]
        for key, content in pairs:
            if type(name) is not str or type(key) is not str or type(content) is not int:
                problem = f"the entry {CONTENTS!r} is damaged"
                expected = "a number by parameter and key"
                raise DamagedError(problem, path, expected, f"{type(content).__name__}", remedy=CONVERT_AGAIN)
            found[name, key] = content
    return found


def refuse_exchanged_files(
    contents: Contents, states: Mapping[tuple[str, str], StateFile], folders: Mapping[str, str], list_path: str
) -> None:
    """Raise :class:`DamagedError` for a file that is another's; ``folders``: parameter -> path of its folder.

    Raises :class:`MixedSavesError` if most are: then the list may be that of another conversion.
    """
    found = {place: content_of(item.records) for place, item in states.items() if place in contents}
    compared = [place for place, content in found.items() if content is not None]
    differing = sorted(place for place in compared if found[place] != contents[place])
    if not differing:
        return
    names = {name for name, _ in differing}
    if 1 < len(compared) < 2 * len(differing):
        problem = "the files of the parameters are not those of the conversion that wrote the optimizer's file"
        both = "the contents that it lists", f"others in {len(differing)} of {len(compared)} files"
        raise MixedSavesError(problem, list_path, *both, parameter=names, remedy=CONVERT_AGAIN)
    name, key = differing[0]
    owner = next((place for place, content in contents.items() if content == found[name, key]), None)
    problem = f"{key} of this parameter is not the file that was converted"
    what = "another content" if owner is None else f"the content of {owner[1]}.pt of {owner[0]}"
    ways = (
        Remedy("copy the folder again from its original"),
        Remedy(CONVERT_AGAIN),
        Remedy(when="if it was changed on purpose", config={"verify": "bytes"}),
    )
    expected = "the content that zero/optimizer_state.pt lists"
    raise DamagedError(problem, f"{folders[name]}/{key}.pt", expected, what, parameter=names, remedy=ways)
