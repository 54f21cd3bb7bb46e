"""What DeepSpeed's checkpoint writers (``"checkpoint": {"writer": ...}``) do to files.

Below ZeRO-3, each rank that is a writer saves the model-states file:

- ``fast`` writers of several replicas, sockets or machines each write a whole copy, under a name of their own;
- ranks of one name write one file at the same time, so that it may be a mixture of theirs (all of them with ``python``,
  those that are not the writers of their socket or machine with ``fast``).
"""

from __future__ import annotations

from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.naming import number_of_writers
from elastic_ckpt.formats.pickled import PickledFile, open_file
from elastic_ckpt.formats.saved_config import COUNTERS, config_section
from elastic_ckpt.storage.local import open_stream

_SAVE_ELSE = 'take another tag; save without "writer", or with "type": "fast" and "data_parallel": "replica"'


def refuse_writers(found: CheckpointInfo, trust_pickle: bool) -> None:
    """Raise :class:`DamagedError` for copies of another number of writers that are of another save. Opens few files."""
    compared: set[tuple[str, int]] = set()
    for copy, name in found.files.copies.items():
        writers = number_of_writers(copy)
        if writers == number_of_writers(name) or (name, writers) in compared:
            continue
        compared.add((name, writers))
        saved, other = (open_file(found.path(each), trust_pickle) for each in (name, copy))
        expected, counters = ({key: file.tree.get(key) for key in COUNTERS} for file in (saved, other))
        if counters != expected:
            problem = f"two saves are mixed in one folder: {copy} belongs to another one than {name}"
            remedy = "remove the older files, or take another tag"
            raise DamagedError(problem, other.path, expected, counters, remedy=remedy)


def refuse_mixture(file: PickledFile) -> None:
    """Raise :class:`DamagedError` for a model-states file that is a mixture of what several ranks wrote.

    Reads the whole file, if it is one that several ranks may have written. :class:`UnsupportedError` if it has no
    checksums that would tell.
    """
    writer = config_section(file, "checkpoint").get("writer")
    stage, ranks = config_section(file, "zero_optimization").get("stage", 0), file.tree.get("dp_world_size", 1)
    if not writer or stage == 3 or ranks == 1 or number_of_writers(file.path) > 1:
        return
    if stage == 0 and not writer.get("data_parallel"):
        return  # rank 0 alone is a writer
    with open_stream(file.path) as stream:
        is_zip = stream.read(2) == b"PK"
    if not is_zip:
        problem = (
            "several ranks may have written this legacy (non-zip) archive at the same time, and it has no checksums"
        )
        both = "a zip archive, or a file that one rank wrote", f"the writer {dict(writer)}"
        raise UnsupportedError(problem, file.path, *both, remedy=_SAVE_ELSE)
    changed = file.changed_record() if any(file.records.crc32s) else None  # none: set_crc32_options(False)
    if changed is not None:
        problem = (
            "this file is a mixture: several ranks wrote it at the same time, as DeepSpeed's checkpoint writers do"
        )
        expected, found = "records with the CRC32s that the archive's directory states", f"another at byte {changed}"
        raise DamagedError(problem, file.path, expected, found, remedy=_SAVE_ELSE)
