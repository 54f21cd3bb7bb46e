"""Ranges of files from other processes: what is read, who may read, and what is said when nothing more comes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Client, Listener
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.errors import CommunicationError, DamagedError, SavedOverError, UnforeseenError
from elastic_ckpt.storage import peers
from elastic_ckpt.storage.digest import content_digest
from elastic_ckpt.storage.local import open_ranges, open_stream, pinned
from elastic_ckpt.storage.peers import HEADER, READ, REQUEST, REQUEST_NBYTES, FileServer, Peers

HOST, SECRET, MIB = "127.0.0.1", b"the job's own", 1 << 20
FILES = [Random(1).randbytes(300_007), Random(2).randbytes(4_096), b""]
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for number, content in enumerate(FILES):
        (tmp_path / f"{number}").write_bytes(content)
    return sorted(tmp_path.iterdir())


@pytest.fixture
def server(paths: list[Path]) -> Iterator[FileServer]:
    with closing(FileServer(HOST, SECRET, [(str(path), path.stat().st_size) for path in paths])) as server:
        yield server


@pytest.fixture
def client(server: FileServer) -> Iterator[Peers]:
    with closing(Peers(SECRET, [server.address])) as client:
        yield client


def read(client: Peers, file: int, byte_offset: int, nbytes: int) -> bytes:
    raw = bytearray(nbytes)
    return bytes(raw[: client.read_into(0, file, [memoryview(raw)], byte_offset)])


def serve(path: Path, content: bytes = b"old") -> FileServer:
    path.write_bytes(content)
    return FileServer(HOST, SECRET, [(str(path), len(content))])


@one_folder
@given(st.integers(0, 2), st.integers(0, 310_000), st.lists(st.integers(0, 70_000), max_size=8))
def test_buffers_are_filled_like_those_of_preadv(client: Peers, file: int, byte_offset: int, sizes: list[int]) -> None:
    memory = bytearray(b"\xaa" * sum(sizes))
    buffers, start = [], 0
    for nbytes in sizes:
        buffers.append(memoryview(memory)[start : start + nbytes])
        start += nbytes
    expected = FILES[file][byte_offset : byte_offset + len(memory)]
    assert client.read_into(0, file, buffers, byte_offset) == len(expected)
    assert memory == expected.ljust(len(memory), b"\xaa")
    nbytes = len(expected)
    assert client.crc32(0, file, byte_offset, nbytes) == zlib.crc32(expected)


def test_a_request_carries_a_bounded_number_of_bytes_and_buffers(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 2 * REQUEST_NBYTES + 5
    with open(path, "wb") as stream:
        stream.truncate(nbytes)
        stream.seek(REQUEST_NBYTES - 1)
        stream.write(b"123")
    content = path.read_bytes()
    with (
        closing(FileServer(HOST, SECRET, [(str(path), nbytes)])) as server,
        closing(Peers(SECRET, [server.address])) as client,
    ):
        raw = bytearray(nbytes)
        assert client.read_into(0, 0, [memoryview(raw)], 0) == REQUEST_NBYTES
        assert client.read_into(0, 0, [memoryview(raw)[REQUEST_NBYTES:]], REQUEST_NBYTES) == REQUEST_NBYTES
        assert raw == content
        buffers = [memoryview(bytearray(1)) for _ in range(2000)]
        assert client.read_into(0, 0, buffers, REQUEST_NBYTES - 1) == 1023
        assert b"".join(buffers[:3]) == b"123"
        assert client.crc32(0, 0, 1, nbytes - 1) == zlib.crc32(memoryview(content)[1:])


def test_a_sum_of_more_than_there_is_is_refused(client: Peers) -> None:
    with pytest.raises(DamagedError, match="end of file"):
        client.crc32(0, 1, 4_000, 97)


def test_many_threads_read_at_once(client: Peers) -> None:
    def check(seed: int) -> int:
        random = Random(seed)
        for _ in range(200):
            file, byte_offset, nbytes = random.randrange(3), random.randrange(310_000), random.randrange(9_000)
            assert read(client, file, byte_offset, nbytes) == FILES[file][byte_offset : byte_offset + nbytes]
        return threading.get_ident()

    before = threading.active_count()
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8, initializer=barrier.wait) as pool:
        threads = set(pool.map(check, range(32)))
        assert threading.active_count() == before + 2 * len(threads)  # a connection of its own for each


def test_servers_and_their_files_are_known_by_number(tmp_path: Path) -> None:
    first, second = serve(tmp_path / "a", b"first"), serve(tmp_path / "b", b"second")
    with closing(first), closing(second), closing(Peers(SECRET, [first.address, second.address])) as client:
        raw = [bytearray(5), bytearray(5)]
        assert [client.read_into(server, 0, [memoryview(raw[server])], 1) for server in (1, 0)] == [5, 4]
        assert raw == [b"irst\0", b"econd"]


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_a_host_may_have_an_address_of_ipv6(paths: list[Path]) -> None:
    server = FileServer("::1", SECRET, [(str(paths[1]), 4096)])
    with closing(server), closing(Peers(SECRET, [server.address])) as client:
        assert read(client, 0, 0, 4096) == FILES[1]


# who may read


def test_who_does_not_know_the_secret_gets_nothing(server: FileServer, client: Peers) -> None:
    with closing(Peers(b"another", [server.address])) as stranger:
        with pytest.raises(CommunicationError, match="prove that it knows the secret") as caught:
            read(stranger, 1, 0, 10)
        assert f"file 1 from {HOST} port {server.address[1]}" in str(caught.value)
        assert "start the job again" in str(caught.value)
    assert read(client, 1, 0, 10) == FILES[1][:10]


def test_a_server_that_takes_any_proof_is_not_believed() -> None:
    with (
        Listener((HOST, 0)) as listener,
        ThreadPoolExecutor(1) as pool,
        closing(Peers(SECRET, [listener.address])) as client,
    ):

        def pretend() -> None:
            with listener.accept() as connection:
                connection.send_bytes(b"#CHALLENGE#" + b"{sha256}" * (sys.version_info >= (3, 12)) + bytes(40))
                connection.recv_bytes()
                connection.send_bytes(b"#WELCOME#")
                connection.recv_bytes()
                connection.send_bytes(b"no proof")
                connection.recv_bytes()

        pretending = pool.submit(pretend)
        with pytest.raises(CommunicationError, match="prove that it knows the secret"):
            read(client, 0, 0, 10)
        pretending.result()


def raw_connection(server: FileServer) -> socket.socket:
    return socket.create_connection(server.address, 30)


def is_closed(connection: socket.socket) -> bool:
    """The server closes it before long; what it sent before is no byte of a file."""
    connection.settimeout(30)
    received = bytearray()
    try:
        while chunk := connection.recv(4096):
            received += chunk
    except ConnectionResetError:
        pass
    return len(received) < 100


@pytest.mark.parametrize(
    "said",
    [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 12, b"\0\0\0\x10" + bytes(16), b"\0\0\1\0half", bytes(99_999)],
)
def test_what_strangers_say_ends_their_connection_alone(
    server: FileServer, client: Peers, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PROOF_SECONDS", 1)
    with raw_connection(server) as stranger:
        stranger.sendall(said)
        assert read(client, 0, 5, 1000) == FILES[0][5:1005]
        assert is_closed(stranger)
    assert read(client, 0, 5, 1000) == FILES[0][5:1005]


def test_a_stranger_cannot_prolong_its_time_byte_by_byte(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PROOF_SECONDS", 1)
    with raw_connection(server) as stranger, pytest.raises(ConnectionError):
        stranger.sendall(b"\0\0\1\0")
        for _ in range(200):  # fewer than it has announced
            stranger.sendall(b"a")
            time.sleep(0.1)


def test_who_has_proven_it_may_be_silent(server: FileServer, client: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PROOF_SECONDS", 1)
    assert read(client, 1, 0, 10) == FILES[1][:10]
    time.sleep(3)
    assert read(client, 1, 0, 10) == FILES[1][:10]


def test_many_silent_strangers_delay_others_but_do_not_keep_them_out(
    server: FileServer, client: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PROOF_SECONDS", 2)
    monkeypatch.setattr(peers, "MOST_STRANGERS", 5)
    before, strangers = threading.active_count(), [raw_connection(server) for _ in range(8)]
    time.sleep(1)
    assert threading.active_count() - before <= 5
    assert read(client, 1, 0, 10) == FILES[1][:10]
    for stranger in strangers:
        stranger.close()


def proven(server: FileServer) -> socket.socket:
    """A connection to a server, which it serves, to say on it what no client of ours does."""
    with Client(server.address, authkey=SECRET) as connection:
        return socket.socket(fileno=os.dup(connection.fileno()))


def received(connection: socket.socket, nbytes: int) -> bytes:
    raw = connection.recv(nbytes, socket.MSG_WAITALL) if nbytes else b""
    assert len(raw) == nbytes
    return raw


numbers = st.one_of(st.integers(0, 2), st.integers(0, 2**32 - 1))
offsets = st.one_of(st.integers(-3, 310_000), st.integers(-(2**63), 2**63 - 1))
amounts = st.one_of(st.integers(0, 310_000), st.integers(0, 2**64 - 1))


@one_folder
@given(st.integers(0, 255), numbers, offsets, amounts)
def test_no_request_gets_what_is_not_in_its_file(
    server: FileServer, operation: int, file: int, byte_offset: int, nbytes: int
) -> None:
    with proven(server) as connection:
        for asked in (READ, operation):
            connection.sendall(REQUEST.pack(asked, file, byte_offset, nbytes, 0))
            status, count = HEADER.unpack(received(connection, HEADER.size))
            answer = received(connection, count)
            if asked == READ and file < len(FILES) and byte_offset >= 0:
                assert status == 0 and answer == FILES[file][byte_offset : byte_offset + nbytes]
            assert status or count <= max(nbytes, 16)
            if status == 0:
                assert asked < 3 and byte_offset >= 0 and file < len(FILES)
                assert received(connection, HEADER.size) == HEADER.pack(0, 0)
            else:
                assert answer.isascii() and len(answer) < 1000


def test_half_a_request_holds_up_nobody(server: FileServer, client: Peers) -> None:
    with proven(server) as connection:
        connection.sendall(REQUEST.pack(READ, 0, 0, 9, 0)[:-1])
        assert read(client, 0, 0, 1000) == FILES[0][:1000]
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


ANSWERS = {
    "more bytes than were asked for": HEADER.pack(0, 11) + bytes(11) + HEADER.pack(0, 0),
    "very many bytes": HEADER.pack(0, 2**63),
    "an unknown status": HEADER.pack(77, 3) + b"why",
    "endless words": HEADER.pack(2, 2**40),
    "words at a good end": HEADER.pack(0, 10) + bytes(10) + HEADER.pack(0, 3) + b"why",
    "no end": HEADER.pack(0, 10) + bytes(10),
    "too few bytes": HEADER.pack(0, 10) + bytes(9),
    "nothing": b"",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_server_is_not_believed(answer: bytes) -> None:
    def pretend() -> None:
        with listener.accept() as connection:
            os.read(connection.fileno(), REQUEST.size)
            os.write(connection.fileno(), answer)

    with Listener((HOST, 0), authkey=SECRET) as listener, ThreadPoolExecutor(1) as pool:
        pretending = pool.submit(pretend)
        with closing(Peers(SECRET, [listener.address])) as client, pytest.raises(CommunicationError):
            read(client, 0, 0, 10)
        pretending.result()


def test_a_server_may_be_slow_as_long_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_slowly() -> None:
        with listener.accept() as connection:
            os.read(connection.fileno(), REQUEST.size)
            for part in (HEADER.pack(0, 9) + b"12", b"345", b"6789" + HEADER.pack(0, 0)):
                os.write(connection.fileno(), part)
                time.sleep(1.2)

    monkeypatch.setattr(peers, "_PROGRESS_SECONDS", 2)
    with Listener((HOST, 0), authkey=SECRET) as listener, ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_slowly)
        with closing(Peers(SECRET, [listener.address])) as client:
            assert read(client, 0, 0, 9) == b"123456789"
        going.result()


def test_words_of_a_server_are_printable_and_a_short_sum_is_none() -> None:
    def pretend() -> None:
        for answer in (HEADER.pack(2, 7) + b"\x1b[2J\xff\0a", HEADER.pack(0, 3) + b"sum" + HEADER.pack(0, 0)):
            with listener.accept() as connection:
                os.read(connection.fileno(), REQUEST.size)
                os.write(connection.fileno(), answer)

    with Listener((HOST, 0), authkey=SECRET) as listener, ThreadPoolExecutor(1) as pool:
        pretending = pool.submit(pretend)
        with closing(Peers(SECRET, [listener.address])) as client:
            with pytest.raises(DamagedError) as caught:
                read(client, 0, 0, 10)
            assert "\\x1b[2J\N{REPLACEMENT CHARACTER}\\x00a" in str(caught.value)
            with pytest.raises(CommunicationError):
                client.crc32(0, 0, 0, 10)
        pretending.result()


# files that change


def rename_over(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"NEW")
    other.rename(path)


def rewrite(path: Path) -> None:
    path.write_bytes(b"NEW")
    os.utime(path, ns=(0, 5))


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[Callable[[Path], object], tuple[type[DamagedError], str]] = {
    rename_over: (SavedOverError, "overwritten"),
    rewrite: (SavedOverError, "overwritten"),
    lambda path: os.truncate(path, 1): (SavedOverError, "overwritten"),
    Path.unlink: (DamagedError, "no such file"),
    put_folder: (DamagedError, "a folder"),
}


@pytest.mark.parametrize("has_read", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_are_refused(tmp_path: Path, change: Callable[[Path], object], has_read: bool) -> None:
    path, (kind, words) = tmp_path / "file", CHANGES[change]
    path.write_bytes(b"old")
    with pinned():
        open_stream(str(path)).close()
        server = serve_unchanged(path)
    with closing(server), closing(Peers(SECRET, [server.address])) as client:
        assert not has_read or read(client, 0, 0, 9) == b"old"
        change(path)
        for ask in (
            lambda: read(client, 0, 0, 9),
            lambda: client.crc32(0, 0, 0, 1),
            lambda: client.directory_digest(0, 0),
        ):
            with pytest.raises(kind, match=words) as caught:
                ask()
            assert str(path) in str(caught.value) and type(caught.value) is kind


def serve_unchanged(path: Path) -> FileServer:
    return FileServer(HOST, SECRET, [(str(path), path.stat().st_size)])


@pytest.mark.parametrize("nbytes", [2, 4])
def test_a_file_of_another_size_than_listed_is_refused(tmp_path: Path, nbytes: int) -> None:
    with closing(serve(tmp_path / "file")) as server, closing(Peers(SECRET, [server.address])) as client:
        os.truncate(tmp_path / "file", nbytes)
        with pytest.raises(SavedOverError, match=f"{nbytes} bytes, not 3"):
            read(client, 0, 0, 2)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 40 * MIB), lambda path: os.utime(path, ns=(0, 5))])
def test_a_change_is_told_though_a_part_was_sent(tmp_path: Path, change: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    with pinned():
        server = serve(path, bytes(60 * MIB))
    with closing(server), proven(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)  # so that most is not yet sent
        connection.sendall(REQUEST.pack(READ, 0, 0, 60 * MIB, 0))
        assert received(connection, HEADER.size) == HEADER.pack(0, 60 * MIB)
        change(path)
        received(connection, 60 * MIB)
        status, nbytes = HEADER.unpack(received(connection, HEADER.size))
        assert status and str(path).encode() in received(connection, nbytes)


def test_what_is_no_file_is_refused_though_it_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    files = [(str(tmp_path / name), 0) for name in ("pipe", "file")]
    with closing(FileServer(HOST, SECRET, files)) as server, closing(Peers(SECRET, [server.address])) as client:
        with pytest.raises(DamagedError, match="pipe"):
            client.crc32(0, 0, 0, 0)
        assert client.crc32(0, 1, 0, 0) == 0


REFUSED_BY_THE_SYSTEM = Path("/sys/class/net/lo/speed")


@pytest.mark.skipif(not REFUSED_BY_THE_SYSTEM.exists(), reason="no file here that the system fails to read")
def test_what_the_system_says_of_a_file_is_told() -> None:
    with closing(serve_unchanged(REFUSED_BY_THE_SYSTEM)) as server, closing(Peers(SECRET, [server.address])) as client:
        for ask in (read, Peers.crc32):
            with pytest.raises(DamagedError, match="Invalid argument"):
                ask(client, 0, 0, 10) if ask is read else ask(client, 0, 0, 0, 10)


# servers that end

SERVER = """
import os, resource, sys
from elastic_ckpt.storage.peers import FileServer
path = sys.argv[1]
server = FileServer("127.0.0.1", b"the job's own", [(path, os.path.getsize(path))])
print(server.address[1], flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print("limited", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with open(tmp_path / "large", "wb") as stream:
        stream.truncate(200 * MIB)
    arguments = [sys.executable, "-c", SERVER, str(tmp_path / "large")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def port_of(holder: subprocess.Popen[str]) -> int:
    assert holder.stdout is not None
    return int(holder.stdout.readline())


def test_a_holder_that_is_killed_is_noticed_by_its_connection(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_PROGRESS_SECONDS", 3600)  # no silence is noticed
    raw, progress = memoryview(bytearray(200 * MIB)), threading.Event()

    def read_on() -> None:
        while True:
            start = 0
            while start < len(raw):
                start += client.read_into(0, 0, [raw[start:]], start)
                progress.set()

    with closing(Peers(SECRET, [(HOST, port_of(holder))])) as client, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_on)
        assert progress.wait(60)
        time.sleep(0.05)
        holder.kill()
        with pytest.raises(CommunicationError, match="no longer answers"):
            reading.result(60)
        holder.wait()
        with pytest.raises(CommunicationError, match="refused"):
            read(client, 0, 0, 10)


def test_a_holder_that_stops_is_noticed(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PROGRESS_SECONDS", 1)
    with closing(Peers(SECRET, [(HOST, port_of(holder))])) as client:
        assert read(client, 0, 7, 10) == bytes(10)
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        with pytest.raises(CommunicationError, match="nothing for 1 s"):
            read(client, 0, 0, 10)


def test_a_holder_without_descriptors_does_not_accuse_the_file(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None and holder.stdout is not None
    with closing(Peers(SECRET, [(HOST, port_of(holder))])) as client:
        assert read(client, 0, 0, 10) == bytes(10)
        print(file=holder.stdin, flush=True)
        assert holder.stdout.readline() == "limited\n"
        with pytest.raises(UnforeseenError, match="used up its file descriptors"):
            read(client, 0, 0, 10)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open(paths: list[Path]) -> None:
    threads, descriptors = threading.enumerate(), open_descriptors()
    server = FileServer(HOST, SECRET, [(str(path), path.stat().st_size) for path in paths])
    client, stranger = Peers(SECRET, [server.address]), raw_connection(server)
    with ThreadPoolExecutor(4, initializer=threading.Barrier(4).wait) as pool:
        list(pool.map(lambda byte_offset: read(client, 0, byte_offset, 100_000), range(40)))
        with pytest.raises(DamagedError):
            read(client, 3, 0, 1)
        half = proven(server)
        half.sendall(REQUEST.pack(READ, 0, 0, 300_000, 0) * 200)  # more than it takes before it is read
        time.sleep(0.1)
        assert open_descriptors() > descriptors + 8
    server.close()
    server.close()
    assert threading.enumerate() == threads
    with pytest.raises(CommunicationError):
        read(client, 0, 0, 1)
    client.close()
    client.close()
    stranger.close()
    half.close()
    assert open_descriptors() == descriptors


def test_a_server_digests_its_files(client: Peers, paths: list[Path]) -> None:
    assert [client.directory_digest(0, file) for file in range(3)] == [
        content_digest(open_ranges(str(path)), path.stat().st_size) for path in paths
    ]
