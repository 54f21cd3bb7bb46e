"""The files of this process's node, read for ranks of other nodes."""

from __future__ import annotations

from elastic_ckpt.errors import DamagedError
from elastic_ckpt.storage import Ranges
from elastic_ckpt.storage.local import named_os_errors
from elastic_ckpt.storage.view import FolderView


class NodeFiles:
    """Files of a view's own node, by number; the one that was read last stays open. For one thread."""

    def __init__(self, view: FolderView) -> None:
        self._view = view
        self._number = -1
        self._ranges: Ranges | None = None

    def read(self, file: int, byte_offset: int, buffer: memoryview) -> None:
        """Fill a buffer; :class:`DamagedError` that names the file if that cannot be."""
        fill(self._view.own_path(file), self._open(file), byte_offset, buffer)

    def nbytes(self, file: int) -> int:
        """Size of a file, as it was listed."""
        return self._view.own_nbytes(file)

    def _open(self, file: int) -> Ranges:
        if self._ranges is None or self._number != file:
            self.close()
            self._ranges = self._view.open_own(file)
            self._number = file
        return self._ranges

    def close(self) -> None:
        """Close what is open."""
        ranges = self._ranges
        self._ranges = None
        if ranges is not None:
            ranges.close()


def fill(path: str, ranges: Ranges, byte_offset: int, buffer: memoryview) -> None:
    """Fill a buffer from an open file; :class:`DamagedError` that names the path if that cannot be."""
    with named_os_errors(path):
        while buffer:
            count = ranges.read([buffer], byte_offset)
            if not count:
                remedy = "check the disk or network file system"
                found = f"end of file at byte {byte_offset}"
                raise DamagedError("reading a file of the checkpoint failed", path, found=found, remedy=remedy)
            buffer = buffer[count:]
            byte_offset = byte_offset + count
