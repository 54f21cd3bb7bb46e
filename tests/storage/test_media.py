"""Which file systems are those of a network, by the kernel's list of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ckpt.config import ElasticConfig, Reading
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.storage import media, medium_of
from elastic_ckpt.storage.media import medium_in

MOUNTS = r"""
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
22 21 0:5 / /dev rw,nosuid - devtmpfs devtmpfs rw,size=12Mi
25 21 0:41 / /a\040-\040name rw,relatime shared:5 master:1 - nfs4 host:/export rw,vers=4.2
36 21 0:42 /x /lustre rw - lustre 10.0.0.1@o2ib:/scratch rw
37 21 0:43 / /mnt/b rw - fuse.s3fs s3fs rw,user_id=0
38 21 0:44 / /mnt/c rw - fuse fuse rw,user_id=0
39 21 0:45 / /mnt/d rw - fuseblk /dev/sdb1 rw
40 21 0:46 / /mnt/e rw - beegfs beegfs_nodev rw
41 21 0:47 / /mnt/f rw - smb3 //host/share rw
42 21 0:48 / /mnt/g rw - btrfs /dev/nvme0n1 rw
"""


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        ("21", "local (ext4)"),
        ("22", "local (devtmpfs, taken for a disk)"),
        ("25", "network (nfs4)"),
        ("36", "network (lustre)"),
        ("37", "network (fuse.s3fs)"),
        ("38", "network (fuse)"),
        ("39", "local (fuseblk)"),
        ("40", "network (beegfs)"),
        ("41", "network (smb3)"),
        ("42", "local (btrfs)"),
        ("2", "local (unknown)"),
        ("", "local (unknown)"),
    ],
)
def test_a_mount_is_a_disk_or_a_network(mount: str, expected: str) -> None:
    assert str(medium_in(MOUNTS, mount)) == expected


def test_a_folder_is_on_the_mount_that_it_is_in_or_will_be(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    for path in ("/dev/shm", "/dev/shm/not/there/yet", str(tmp_path / "link")):
        assert str(medium_of(path, "auto")) == "local (tmpfs)"
    assert str(medium_of("/dev/shm", "network")) == "network (as configured)"
    assert str(medium_of("/proc", "auto")) == "local (proc, taken for a disk)"


@pytest.mark.parametrize(("storage", "gap_nbytes"), [("auto", 0), ("local", 0), ("network", 64 << 10)])
def test_gaps_are_read_where_calls_wait(tmp_path: Path, storage: str, gap_nbytes: int) -> None:
    config = ElasticConfig(reading=Reading(storage=storage))
    for nearby in (None, medium_of("/dev/shm", config.reading.storage)):
        assert read_options(config, nearby).gap_nbytes == gap_nbytes
    far = medium_in(MOUNTS, "25")
    assert read_options(config, far).gap_nbytes == 64 << 10


def test_the_medium_of_a_path_that_is_too_long_is_that_of_a_folder_above(tmp_path: Path) -> None:
    assert media.medium_of(str(tmp_path / "/".join("d" * 5000))) == media.medium_of(str(tmp_path))
