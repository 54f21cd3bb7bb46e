"""Digests of the files of a save, by which files of another run are told from its own.

Below ZeRO-3, optimizer partitions have fp32 masters, which are compared with the weights saved beside them. A save
without partitions has no masters, files of layers and experts hold weights alone, and ZeRO-3 saves weights nowhere but
in the partitions. So the resume sheet notes what is in each file, by the checksums of its tensors.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from elastic_ckpt.core.metadata import SourceFile
from elastic_ckpt.core.resume_sheet import MOST_FILES, SHEET
from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import DamagedError, ElasticCkptError, MixedSavesError, Remedy
from elastic_ckpt.formats.naming import sort_names
from elastic_ckpt.formats.sheet import read_sheet
from elastic_ckpt.formats.torch_archive.directory import ArchiveError, Listing
from elastic_ckpt.storage import open_stream, walk
from elastic_ckpt.storage.local import Version

_OF_TENSOR = re.compile(r"[^/]*/data/\d+")
_DIGEST_NBYTES = 8
#: Files that are opened at once: on a network file system, waiting for each is what takes long.
_THREADS = 16


def versions_in(folder: str) -> dict[str, Version]:
    """The version of each file in a folder; none where there is no folder."""
    in_folder = ((os.path.relpath(path, folder), version) for path, version in walk(folder))
    return {name: version for name, version in in_folder if os.path.basename(name) == name}


def digests_of_save(folder: str, before: Mapping[str, Version]) -> dict[str, str]:
    """By name, digests of what a save has written to its folder, where files were of the versions ``before``.

    Files that the save has not touched are of an older one. None if it has optimizer partitions beside whole weights,
    or no two files; and none for archives without checksums.
    """
    written = [name for name, version in versions_in(folder).items() if before.get(name) != version]
    files = sort_names(written, is_universal=False)
    if files.model_zero3:
        names = [*files.model_zero3.values(), *files.optimizer.values()]
    else:
        names = [*files.model.values(), *files.layers.values(), *files.of_experts]
    has_whole_weights = files.optimizer and not files.model_zero3
    if has_whole_weights or not 1 < len(names) <= MOST_FILES:
        return {}
    paths = [os.path.join(folder, name) for name in names]
    with ThreadPoolExecutor(_THREADS, "elastic_ckpt") as pool:
        digests = zip(names, pool.map(_digest_of_file, paths), strict=True)
        return {name: digest for name, digest in digests if digest}


def refuse_other_files(folder: str, step: int, items: Iterable[Any]) -> None:
    """Raise :class:`MixedSavesError` for a file that has other tensors than its save has noted in the resume sheet.

    ``items``: what was read of each file of the save, which was made after ``step`` steps. A sheet of another step, or
    one with which no file agrees, is of another save, whose files are all gone.
    """
    try:
        sheet = read_sheet(folder)
    except DamagedError:  # the report of a load says so, which compares the rest of it
        return
    if sheet is None or sheet.step != step:
        return
    files = [item for item in items if isinstance(item, SourceFile)]
    noted = {file.path: sheet.files.get(os.path.basename(file.path), "") for file in files}
    noted = {path: digest for path, digest in noted.items() if digest}
    here = {file.path: _digest((nbytes, crc32) for _, nbytes, crc32 in file.records) for file in files}
    others = [path for path, digest in noted.items() if here[path] != digest]
    if not others or len(others) == len(noted):
        return
    raise MixedSavesError(
        "this file has other tensors than its save has noted: files of two saves may be mixed in this folder",
        others[0],
        f"tensors with the digest {noted[others[0]]}, as in {os.path.join(folder, SHEET)}",
        f"{here[others[0]] or 'none'}; so it is with {len(others)} of {counted(len(noted), 'file')}",
        remedy=(
            Remedy("use another tag", when="if the file is of another run"),
            Remedy(when="if tensors were changed by hand after the save", config={"verify": "bytes"}),
        ),
    )


def _digest_of_file(path: str) -> str:
    """The digest of what is in an archive; empty without checksums, or if it is none."""
    with suppress(ArchiveError, ElasticCkptError, OSError), open_stream(path) as stream:
        tensors = (each for each in Listing(stream).entries() if _OF_TENSOR.fullmatch(each.name))
        return _digest((each.nbytes, each.crc32) for each in sorted(tensors, key=lambda each: each.header))
    return ""


def _digest(records: Iterable[tuple[int, int]]) -> str:
    """The digest of sizes and CRC32s of tensors' records, in the order of the file; empty if these are unknown."""
    known = [(nbytes, crc32) for nbytes, crc32 in records if nbytes]
    if not any(crc32 for _, crc32 in known):
        return ""
    return hashlib.blake2b(repr(known).encode(), digest_size=_DIGEST_NBYTES).hexdigest()
