"""How much work one file may cause: bytes that are read, objects that are met, times that it is opened.

Each object of a file has limits of its own. What they multiply to has not: a thousand tensors may each reach over the
whole file, a thousand groups share one long list. So all that is done for a file is charged to one budget, which grows
with its size; that of a folder is the sum of its files'. An honest checkpoint is read once or twice.
"""

from __future__ import annotations

from elastic_ckpt.errors import UnsupportedError

#: Bytes and objects for each byte of the file, and in addition. A pickle needs two bytes to name an object again.
_MOST_TIMES = 8
_MORE_NBYTES = 64 << 20
_MORE_OBJECTS = 1 << 20
#: A file may be opened once for each part of so many bytes.
_OPENED_NBYTES = 1 << 8
#: And so many times in addition.
_MORE_OPENS = 1 << 12


class WorkBudget:
    """What is left of the work that a file may cause; an :class:`UnsupportedError` once something is used up.

    ``nbytes_read``, ``objects`` and ``opens`` are what was charged so far.
    """

    def __init__(self, path: str, file_nbytes: int) -> None:
        self._path = path
        self._file_nbytes = file_nbytes
        self.nbytes_read = self.objects = self.opens = 0
        self._most_nbytes = _MOST_TIMES * file_nbytes + _MORE_NBYTES
        self._most_objects = _MOST_TIMES * file_nbytes + _MORE_OBJECTS
        self._most_opens = file_nbytes // _OPENED_NBYTES + _MORE_OPENS

    def charge_nbytes(self, nbytes: int) -> None:
        """Bytes that are about to be read, or to be made of those that are."""
        self.nbytes_read += nbytes
        self.refuse_if_used_up()

    def charge_objects(self, count: int) -> None:
        """Objects that a walk meets."""
        self.objects += count
        self.refuse_if_used_up()

    def charge_open(self) -> None:
        """The file is about to be opened."""
        self.opens += 1
        self.refuse_if_used_up()

    def refuse_if_used_up(self) -> None:
        """Raise if more was charged than the file's size allows, also if an earlier error of it was caught."""
        limits = {
            "bytes to read": (self.nbytes_read, self._most_nbytes),
            "objects to look at": (self.objects, self._most_objects),
            "times to open it": (self.opens, self._most_opens),
        }
        for what, (count, most) in limits.items():
            if count > most:
                problem = "this file takes far more work to read than its size justifies: its parts share each other"
                expected = f"at most {most} {what}, of a file of {self._file_nbytes} bytes"
                remedy = "save copies of tensors and lists that many entries share, or leave them out of the client "
                remedy += "state and of the param groups"
                raise UnsupportedError(problem, self._path, expected, f"{count} {what}", remedy=remedy)
