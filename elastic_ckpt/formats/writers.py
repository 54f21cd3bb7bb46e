"""What DeepSpeed's checkpoint writers (``"checkpoint": {"writer": ...}``) do to files.

Below ZeRO-3, each rank that is a writer saves the model-states file:

- ``fast`` writers of several replicas, sockets or machines each write a whole copy, under a name of their own;
- ranks of one name write one file at the same time, so that it may be a mixture of theirs (all of them with ``python``,
  those that are not the writers of their socket or machine with ``fast``);
- only with a torch whose ``torch.save`` knows ``save_torch_storage_object_list`` does each file have a slice of the
  storages, in the legacy format. Their pickles differ by rank, so that slices cannot be put together.
"""

from __future__ import annotations

from elastic_ckpt.errors import DamagedError, UnsupportedError
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.model_states import COUNTERS
from elastic_ckpt.formats.naming import number_of_writers
from elastic_ckpt.formats.pickled import PickledFile, open_file
from elastic_ckpt.formats.saved_config import config_section
from elastic_ckpt.storage.local import open_stream

_SAVE_ELSE = 'take another tag; save without "writer", or with "type": "fast" and "data_parallel": "replica"'


def refuse_writers(found: Found, trust_pickle: bool) -> None:
    """Refuse copies that may not be whole, or not of one save. Local; opens few files.

    Raises:
        DamagedError: copies of another number of writers are of another save, or unreadable.
        UnsupportedError: each file may have a slice.
    """
    files = found.files
    for name in (*files.model.values(), *files.optimizer.values()):
        if number_of_writers(name) > 1:
            _refuse_slices(found.path(name), trust_pickle)
            break  # one option of the config decides for all files
    compared: set[tuple[str, int]] = set()
    for copy, name in files.copies.items():
        writers = number_of_writers(copy)
        if writers != number_of_writers(name) and (name, writers) not in compared:
            compared.add((name, writers))
            _refuse_other_save(found, copy, name, trust_pickle)


def _refuse_slices(path: str, trust_pickle: bool) -> None:
    try:
        open_file(path, trust_pickle)
    except DamagedError as error:
        if _is_zip(path):
            raise
        raise UnsupportedError(
            "this file has a slice of the tensors: several data-parallel writers saved one legacy (non-zip) archive",
            file=path,
            expected="files that each have all tensors, as torch's own torch.save writes them",
            found=error.found,
            remedy='take another tag; save with "checkpoint": {"checkpoint_serialization": true}, which is the default',
        ) from error


def _is_zip(path: str) -> bool:
    with open_stream(path) as stream:
        return stream.read(2) == b"PK"


def _refuse_other_save(found: Found, copy: str, name: str, trust_pickle: bool) -> None:
    saved, other = (open_file(found.path(each), trust_pickle) for each in (name, copy))
    expected, counters = ({key: file.tree.get(key) for key in COUNTERS} for file in (saved, other))
    if counters != expected:
        raise DamagedError(
            f"two saves are mixed in one folder: {copy} belongs to another one than {name}",
            file=other.path,
            expected=expected,
            found=counters,
            remedy="remove the older files, or take another tag",
        )


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
    if not _is_zip(file.path):
        raise UnsupportedError(
            "several ranks may have written this legacy (non-zip) archive at the same time, and it has no checksums",
            file=file.path,
            expected="a zip archive, or a file that one rank wrote",
            found=f"the writer {dict(writer)}",
            remedy=_SAVE_ELSE,
        )
    changed = file.changed_record() if any(file.records.crc32s) else None  # none: set_crc32_options(False)
    if changed is not None:
        raise DamagedError(
            "this file is a mixture: several ranks wrote it at the same time, as DeepSpeed's checkpoint writers do",
            file=file.path,
            expected="records with the CRC32s that the archive's directory states",
            found=f"another CRC32 of the record at byte {changed}",
            remedy=_SAVE_ELSE,
        )
