"""What interrupts work that needs bytes which only other ranks can read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """A range of a file that a rank lacks."""

    holder: int  # the rank that reads it
    file: int  # number of the file among those of the holder's node
    byte_offset: int
    nbytes: int


class Lacking(BaseException):
    """Interrupts work on one rank, which runs again from its beginning once the job's ranks have exchanged a range.

    No :class:`Exception`: readers turn these into errors of files.
    """

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(wanted)
        self.wanted = wanted
