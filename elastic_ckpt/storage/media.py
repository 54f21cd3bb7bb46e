"""Where files are: on a disk, or behind a network, by the kernel's list of mounts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

#: Types of file systems, as the kernel names them: those on which a read waits for a server, and known ones that are
#: not of these.
_NETWORK = re.compile(r"nfs\d?|lustre|gpfs|ceph|beegfs\w*|cifs|smb\d?|9p|afs|wekafs|panfs|dvs|virtiofs|fuse(\..*)?")
_LOCAL = re.compile(r"ext\d|xfs|btrfs|zfs|f2fs|bcachefs|tmpfs|ramfs|overlay|fuseblk")


class Medium(NamedTuple):
    """Where files are. The greatest of the media that ranks see is that of the job: a network's, if any is."""

    kind: Literal["local", "network"]
    name: str  # of the type of file system

    def __str__(self) -> str:
        return f"{self.kind} ({self.name})"


UNKNOWN = Medium("local", "unknown")
OBJECT_STORE = Medium("network", "object store")


def medium_of(path: str) -> Medium:
    """Where a file or folder is; of one that is not there, where it would be."""
    path = os.path.abspath(path)
    while True:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            if (parent := os.path.dirname(path)) == path:
                return UNKNOWN
            path = parent
        else:
            break
    try:
        about, mounts = (Path(f"/proc/self/{name}").read_bytes() for name in (f"fdinfo/{descriptor}", "mountinfo"))
    except OSError:
        return UNKNOWN
    finally:
        os.close(descriptor)
    mount = re.search(rb"^mnt_id:\s*(\d+)$", about, re.MULTILINE)
    return medium_in(mounts.decode(errors="replace"), "" if mount is None else mount[1].decode())


def medium_in(mounts: str, mount: str) -> Medium:
    """The medium of a mount, by its number in the text of ``/proc/self/mountinfo``."""
    of_each = (line.partition(" - ") for line in mounts.split("\n"))
    name = next((about.split(" ")[0] for place, _, about in of_each if about and place.split(" ")[0] == mount), None)
    if name is None:
        return UNKNOWN
    if _NETWORK.fullmatch(name):
        return Medium("network", name)
    return Medium("local", name if _LOCAL.fullmatch(name) else f"{name}, taken for a disk")
