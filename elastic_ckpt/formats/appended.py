"""Archives that DeepSpeed's ``fast`` checkpoint writer saved over older ones.

``FastFileWriter`` writes whole blocks from the start of the file, which it does not truncate, and appends the rest
(``_unaligned_drain``): the end of the new archive follows that of the old one, or of the one that another rank
writes under the same name. Whoever trusts the archive's directory, as ``torch.load`` does, reads old bytes.
"""

from __future__ import annotations

import os
import struct
import zlib

from elastic_ckpt.core.checksums import Records
from elastic_ckpt.errors import DamagedError

_PIECE_NBYTES = 1 << 20
_END, _END64, _LOCATOR64 = 22, 56, 20  # bytes of a zip archive's last three entries, of which the first is the last


def refuse_appended(path: str, records: Records | None = None) -> None:
    """Raise :class:`DamagedError` if a file has bytes in its middle that its archive's directory does not know of.

    With ``records``, those of a file that can be read, only if not all of them have their checksums; reads it whole.
    """
    surplus = _surplus_nbytes(path)
    if surplus > 0 and not (records is not None and _are_intact(path, records)):
        raise DamagedError(
            "this file was written over an older one: DeepSpeed's fast checkpoint writer appends the last bytes of the "
            "new file to the old one, and torch.load then reads old values",
            file=path,
            expected="a file that was written once, by one rank",
            found=f"{surplus} bytes of another archive inside it",
            remedy="take another tag; with this writer, remove the folder of a tag before it is saved again, and let "
            'each rank write under a name of its own ("data_parallel": "replica")',
        )


def _are_intact(path: str, records: Records) -> bool:
    """Whether each record has the checksum that the directory states; false if there are none that would tell."""
    with open(path, "rb") as stream:
        for offset, nbytes, crc32 in zip(records.offsets, records.nbytes, records.crc32s, strict=True):
            stream.seek(offset)
            found = 0
            for first in range(0, nbytes, _PIECE_NBYTES):
                found = zlib.crc32(stream.read(min(nbytes - first, _PIECE_NBYTES)), found)
            if found != crc32:
                return False
    return True


def _surplus_nbytes(path: str) -> int:
    """Bytes from the offset that a zip archive states for its directory to the directory itself; 0 for other files."""
    with open(path, "rb") as stream:
        nbytes = stream.seek(0, os.SEEK_END)
        stream.seek(max(nbytes - _END - _LOCATOR64, 0))
        locator, end = (tail := stream.read())[:_LOCATOR64], tail[_LOCATOR64:]
    if end[:4] != b"PK\5\6" or len(end) != _END:
        return 0
    if locator[:4] == b"PK\6\7":
        (offset,) = struct.unpack_from("<Q", locator, 8)
        return nbytes - _END - _LOCATOR64 - _END64 - int(offset)
    size, offset = struct.unpack_from("<II", end, 12)
    return nbytes - _END - int(size) - int(offset)
