"""What this process has been sent of other nodes' files, for work that reads little of them.

Work that reads more is interrupted (:class:`Lacking`), and runs again once the range is here. What is read of a file
one after another is sent in ever larger ranges, so that this happens a few times for a file, not once for each read.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.core.lacking import Lacking, Wanted
from elastic_ckpt.errors import ElasticCkptError, UnsupportedError

_PAGE_NBYTES = 1 << 16
#: What is asked for at once, at most.
_MOST_WANTED_NBYTES = 4 << 20
#: What a load keeps of other nodes' files, at most: metadata, never tensors, which are exchanged in rounds.
_MOST_NBYTES = 1 << 30
#: A file: the rank that reads it, and its number on that rank's node.
_File = tuple[int, int]


class Pages:
    """Pages of other nodes' files, by file."""

    def __init__(self) -> None:
        self._pages: dict[_File, dict[int, bytes]] = {}
        self._errors: dict[Wanted, ElasticCkptError] = {}
        self._nbytes = 0

    def read(self, holder: int, file: int, nbytes: int, buffers: Sequence[memoryview], byte_offset: int) -> int:
        """Fill buffers, in order, from a file of ``nbytes`` bytes; returns how many bytes, 0 at its end.

        Raises :class:`Lacking` for what is not here, and the holder's error for what it could not read.
        """
        start = byte_offset
        for buffer in buffers:
            rest = buffer
            while rest and byte_offset < nbytes:
                position = byte_offset % _PAGE_NBYTES
                part = self._page(holder, file, nbytes, byte_offset // _PAGE_NBYTES)[position : position + len(rest)]
                rest[: len(part)] = part
                rest = rest[len(part) :]
                byte_offset += len(part)
        return byte_offset - start

    def _page(self, holder: int, file: int, nbytes: int, number: int) -> bytes:
        pages = self._pages.get((holder, file), {})
        if number in pages:
            return pages[number]
        start = number * _PAGE_NBYTES
        ahead_nbytes = min(_PAGE_NBYTES << len(pages), _MOST_WANTED_NBYTES)
        wanted = Wanted(holder, file, start, min(ahead_nbytes, nbytes - start))
        if wanted in self._errors:
            raise self._errors[wanted]
        if self._nbytes > _MOST_NBYTES:
            problem = "too much beside tensors is in files of other nodes"
            expected = f"at most {_MOST_NBYTES} bytes"
            remedy = "put the checkpoint on storage that all nodes share"
            raise UnsupportedError(problem, None, expected, f"more than {self._nbytes} bytes", remedy=remedy)
        raise Lacking(wanted)

    def add(self, wanted: Wanted, range_: bytes | ElasticCkptError) -> None:
        """Keep a range that was lacking, or why its holder could not read it."""
        if isinstance(range_, ElasticCkptError):
            self._errors[wanted] = range_
            return
        pages = self._pages.setdefault((wanted.holder, wanted.file), {})
        for start in range(0, len(range_), _PAGE_NBYTES):
            pages[(wanted.byte_offset + start) // _PAGE_NBYTES] = range_[start : start + _PAGE_NBYTES]
        self._nbytes += len(range_)
