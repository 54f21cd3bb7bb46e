"""Nodes of a cluster on one machine: each has a disk, a network interface and a host name of its own.

A node is a mount, a network and a UTS namespace, held by a process that waits. Its disk is a tmpfs, at the same path on
every node; a veth pair leads from its ``eth0`` to a bridge in one more namespace. So no interface, address or mount is
seen outside, and all is gone with the processes, which end with this one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import end, run_ranks

_KINDS = ("uts", "net", "mnt")
#: Says that it is ready, and waits until its standard input is closed, as it is when this process ends.
_HOLD = "echo ready; exec cat"
_SWITCH = f"set -e; ip link add switch type bridge; ip link set switch up; {_HOLD}"
_NODE = f"""
set -e
mount -t tmpfs -o size=1g none "$1"
mount --bind "$2" /etc/hosts
echo "$3" > /proc/sys/kernel/hostname
ip link set lo up
{_HOLD}
"""
_PLUG = 'set -e; ip link add "$1" type veth peer name eth0 netns "$2"; ip link set "$1" master switch up'
_ADDRESS = 'set -e; ip address add "$1"/24 dev eth0; ip link set eth0 up'


def enter(holder: int) -> None:
    """Have this process, which has one thread, be on the node that a process holds."""
    folder, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    descriptors = [os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _KINDS]
    for descriptor in descriptors:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    os.chdir(folder)


def _hold(script: str, *words: str, new: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process in new namespaces, once its script says that they are ready; skips the test if it cannot be."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"nodes need {', '.join(missing)}; test_nodes.py has folders in place of them")
    command = ["unshare", *new, "--propagation", "private"] if "--mount" in new else ["unshare", *new]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "sh", "-c", script, "sh", *words], start_new_session=True, **pipes)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != b"ready\n":
        end(process)
        why = process.stderr.read().decode(errors="replace").strip()
        pytest.skip(f"this machine forbids nodes of their own: {why}; test_nodes.py has folders in place of them")
    return process


def _within(holder: int, script: str, *words: str) -> None:
    """Run a script in the network namespace that a process holds."""
    command = ["nsenter", f"--net=/proc/{holder}/ns/net", "sh", "-c", script, "sh", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=20)


class Cluster:
    """Some nodes that reach each other, each with an empty disk at the same path.

    Args:
        count: number of nodes.
        folder: for what this needs; the nodes have their disks at ``folder/disk``.
        extensions_dir: see :func:`tests.distributed.launch.environment`.
    """

    def __init__(self, count: int, folder: Path, extensions_dir: str) -> None:
        self.disk, self._extensions_dir = folder / "disk", extensions_dir
        self.disk.mkdir(parents=True)
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        hosts = folder / "hosts"
        lines = [f"{address} node{number}\n" for number, address in enumerate(self.addresses)]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        try:
            self._switch = _hold(_SWITCH, new=["--net"])
            for number, address in enumerate(self.addresses):
                words = (str(self.disk), str(hosts), f"node{number}")
                self._holders[number] = node = _hold(_NODE, *words, new=["--mount", "--net", "--uts"])
                _within(self._switch.pid, _PLUG, f"node{number}", str(node.pid))
                _within(node.pid, _ADDRESS, address)
        except BaseException:
            self.close()
            raise

    def files(self, node: int) -> Path:
        """A node's disk, as this process sees it."""
        return Path(f"/proc/{self._holders[node].pid}/root{self.disk}")

    def run(self, nodes: Sequence[int], job: str, arguments: Any, interface: str = "", **options: Any) -> list[Any]:
        """Run a job with ranks on these nodes, as a launcher would; see :func:`tests.distributed.launch.run_ranks`.

        ``interface``: of gloo; empty: it takes that of the host's name.
        """
        places = []
        for rank, node in enumerate(nodes):
            env = {"LOCAL_RANK": str(nodes[:rank].count(node)), "MASTER_ADDR": self.addresses[nodes[0]]}
            env |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
            places.append((self._holders[node].pid, env))
        return run_ranks(len(nodes), job, arguments, self._extensions_dir, places=places, **options)

    def lose(self, node: int) -> None:
        """End a node for good, with its disk."""
        end(self._holders.pop(node))

    def close(self) -> None:
        """End all of it."""
        while self._holders:
            end(self._holders.popitem()[1])
        if self._switch is not None:
            end(self._switch)
