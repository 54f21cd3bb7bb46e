"""The files of this process's node, read for ranks of other nodes."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.errors import DamagedError
from elastic_ckpt.storage import Ranges
from elastic_ckpt.storage.local import named_os_errors, open_ranges, saved_over, version_of


class NodeFiles:
    """Files of this node, by number; the one that was read last stays open. For one thread.

    Args:
        files: path and size, as it was listed, of each.
    """

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        self._files = files
        self._number = -1
        self._ranges: Ranges | None = None

    def read(self, file: int, byte_offset: int, buffer: memoryview) -> None:
        """Fill a buffer; :class:`DamagedError` that names the file if that cannot be."""
        path, nbytes = self._files[file]
        fill(path, nbytes, self._open(file), byte_offset, buffer)

    def _open(self, file: int) -> Ranges:
        """The file, which must still have the size that was listed; the load's pins tell whether it is another one."""
        if self._ranges is not None and self._number == file:
            return self._ranges
        self.close()
        path, listed_nbytes = self._files[file]
        self._ranges = open_ranges(path)
        self._number = file
        nbytes = version_of(path).nbytes
        if nbytes != listed_nbytes:
            self.close()
            raise saved_over(path, f"{listed_nbytes} bytes", f"{nbytes} bytes")
        return self._ranges

    def close(self) -> None:
        """Close what is open."""
        ranges = self._ranges
        self._ranges = None
        if ranges is not None:
            ranges.close()


def fill(path: str, nbytes: int, ranges: Ranges, byte_offset: int, buffer: memoryview) -> None:
    """Fill a buffer from an open file of so many bytes; :class:`DamagedError` that names it if that cannot be."""
    with named_os_errors(path):
        while buffer:
            count = ranges.read([buffer], byte_offset)
            if not count:
                problem = "reading a file of the checkpoint failed"
                found = f"end of file at byte {byte_offset}"
                remedy = "check the disk or network file system"
                raise DamagedError(problem, path, f"{nbytes} readable bytes", found, remedy=remedy)
            buffer = buffer[count:]
            byte_offset = byte_offset + count
