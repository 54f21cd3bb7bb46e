"""Digests that tell copies of a file apart without reading all of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b

from elastic_ckpt.storage import Ranges

DIGEST_NBYTES = 16
#: Where an entry of a zip archive's directory has the CRC32 of its record.
_CRC32_AT = 16
_CRC32_NBYTES = 4
#: Files up to that size are digested whole.
_WHOLE_NBYTES = 1 << 20
#: Of others, either end.
_END_NBYTES = (1 << 16) + 98
#: And so much of a zip archive's directory.
_MOST_DIRECTORY_NBYTES = 64 << 20
_CHUNK_NBYTES = 1 << 20


def content_digest(ranges: Ranges, nbytes: int) -> bytes:
    """16 bytes that differ where two copies of a file differ in size or in what tells most about their content.

    That is the directory of a zip archive with the CRC32 of each record, so that a copy in which a bit has flipped is
    still one; else all of a small file, or both ends of a large one, of which bytes in the middle go unnoticed. Closes
    the file.
    """
    digest = blake2b(nbytes.to_bytes(8, "big"), digest_size=DIGEST_NBYTES)
    buffer = bytearray(_CHUNK_NBYTES)

    def chunks(start: int, part_nbytes: int) -> Iterator[memoryview]:
        while start < nbytes and part_nbytes:
            count = ranges.read([memoryview(buffer)[:part_nbytes]], start)
            if not count:
                return
            yield memoryview(buffer)[:count]
            start = start + count
            part_nbytes = part_nbytes - count

    try:
        parts = [(0, nbytes)]
        end = max(nbytes - _END_NBYTES, 0)
        start, directory_nbytes = _zip_directory(b"".join(chunks(end, _END_NBYTES)))
        if directory_nbytes and any(b"".join(chunks(start + _CRC32_AT, _CRC32_NBYTES))):
            parts = [(start, directory_nbytes)]
        elif nbytes > _WHOLE_NBYTES:
            parts = [(0, _END_NBYTES), (end, _END_NBYTES), (start, directory_nbytes)]
        for part in parts:
            for chunk in chunks(*part):
                digest.update(chunk)
    finally:
        ranges.close()
    return digest.digest()


def _zip_directory(tail: bytes) -> tuple[int, int]:
    """Offset and size of what a zip archive with this tail states as its directory; no bytes of any other file."""
    at = tail.rfind(b"PK\x05\x06", 0, -18)
    if at < 0:
        return 0, 0
    nbytes, start = struct.unpack_from("<12x2L", tail, at)
    wide = tail[max(at - 76, 0) : at]  # zip64's end of the directory, and its locator
    if wide.startswith(b"PK\x06\x06") and wide[56:].startswith(b"PK\x06\x07"):
        nbytes, start = struct.unpack_from("<40x2Q", wide)
    return start, min(nbytes, _MOST_DIRECTORY_NBYTES)
