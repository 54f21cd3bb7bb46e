"""A hostile object store: whatever it answers ends in an error in words, after few requests and few bytes."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from elastic_ckpt.errors import DamagedError, ElasticCkptError
from elastic_ckpt.storage import Entry, remote
from elastic_ckpt.storage.remote import RemoteFolder
from elastic_ckpt.storage.view import FolderView, NodeListing

URL = "s3://bucket/run"
NBYTES = 100_000
ENTRY = Entry("step4/a.pt", NBYTES, 0, '"version"')
PART = 1 << 14  # bytes that the server sends at a time
#: Requests after which a test has failed: the server ends whatever it was asked to keep on with.
GUARD = 3000


@dataclass
class Hostile:
    """A server on the loopback, and what it was asked for and has sent."""

    answer: Callable[[Hostile, BaseHTTPRequestHandler], None] | None = None
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # path, authorization
    sent_nbytes: int = 0
    port: int = 0

    def send(self, handler: BaseHTTPRequestHandler, nbytes: int) -> None:
        """Send a body as long as someone takes it."""
        with suppress(OSError):
            while nbytes > 0:
                self.sent_nbytes += handler.wfile.write(bytes(min(PART, nbytes)))
                nbytes -= PART


@contextmanager
def serve(hostile: Hostile) -> Iterator[Hostile]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hostile.requests.append((self.path, self.headers.get("Authorization")))
            if len(hostile.requests) > GUARD:
                self.send_error(403)
            elif hostile.answer is not None:
                hostile.answer(hostile, self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hostile.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hostile
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    for name, value in {"_FIRST_PAUSE": 0.001, "_RETRIES": 1, "_MOST_PAGE_SECONDS": 1.0, "_MOST_OBJECTS": 5000}.items():
        monkeypatch.setattr(remote, name, value)
    with serve(Hostile()) as server:
        yield server


def folder_on(hostile: Hostile) -> RemoteFolder:
    keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    client = {"allow_http": True, "timeout": "1s"}
    return RemoteFolder(URL, {**keys, "endpoint": f"http://127.0.0.1:{hostile.port}", "client_options": client})


def respond(handler: BaseHTTPRequestHandler, status: int, nbytes: int | None, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    if nbytes is not None:
        handler.send_header("Content-Length", str(nbytes))
    handler.end_headers()


def page(first: int, count: int, token: str | None, date: str = "2026-01-01T00:00:00.000Z") -> bytes:
    """A page of a listing."""
    when = f"<LastModified>{date}</LastModified>"
    objects = (
        f"<Contents><Key>run/x{number:09d}</Key>{when}<ETag>e</ETag><Size>5</Size></Contents>"
        for number in range(first, first + count)
    )
    more = "" if token is None else f"<NextContinuationToken>{token}</NextContinuationToken>"
    truncated = f"<IsTruncated>{str(token is not None).lower()}</IsTruncated>{more}"
    return f"<ListBucketResult><Name>bucket</Name>{truncated}{''.join(objects)}</ListBucketResult>".encode()


def listing(count: int, has_same_token: bool, repeats: bool) -> Callable[[Hostile, BaseHTTPRequestHandler], None]:
    def answer(hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        number = len(hostile.requests)
        body = page(0 if repeats else number * count, count, "token" if has_same_token else f"token{number}")
        respond(handler, 200, len(body))
        with suppress(OSError):
            handler.wfile.write(body)

    return answer


@pytest.mark.parametrize("tags", [None, ("step4",)], ids=["whole", "of a tag"])
@pytest.mark.parametrize("has_same_token", [True, False], ids=["one token", "new tokens"])
@pytest.mark.parametrize(
    ("count", "repeats"),
    [(0, False), (1, False), (1000, False), (1000, True)],
    ids=["empty pages", "an object each", "whole pages", "a page again and again"],
)
def test_a_listing_without_end_is_an_error(
    hostile: Hostile, count: int, repeats: bool, has_same_token: bool, tags: tuple[str, ...] | None
) -> None:
    hostile.answer = listing(count, has_same_token, repeats)
    with pytest.raises(ElasticCkptError, match="lists this folder without end") as caught:
        folder_on(hostile).entries(tags)
    assert caught.value.file == URL and caught.value.expected and caught.value.found and caught.value.remedy
    assert len(hostile.requests) < GUARD


def listing_of(*names: str) -> Callable[[Hostile, BaseHTTPRequestHandler], None]:
    """One page, of objects that are empty if their names end in a slash."""
    when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    objects = (
        f"<Contents><Key>run/{name.rstrip('/')}</Key>{when}<ETag>e</ETag><Size>{0 if name[-1] == '/' else 5}</Size>"
        "</Contents>"
        for name in names
    )
    body = f"<ListBucketResult><Name>bucket</Name>{''.join(objects)}</ListBucketResult>".encode()

    def answer(_hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        respond(handler, 200, len(body))
        handler.wfile.write(body)

    return answer


def at_the_top(*names: str) -> Callable[[Hostile, BaseHTTPRequestHandler], None]:
    """Objects that are listed where those at the top of a folder are asked for, and nowhere else."""

    def answer(hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        listing_of(*(names if "delimiter" in handler.path else ("step4/x",)))(hostile, handler)

    return answer


@pytest.mark.parametrize("listed", [listing_of, at_the_top])
@pytest.mark.parametrize("tags", [None, ("step4",)], ids=["whole", "of a tag"])
def test_a_name_longer_than_stores_take_is_an_error(
    hostile: Hostile, tags: tuple[str, ...] | None, listed: Any
) -> None:
    """Of many folders in each other, work and memory were the square of its length."""
    hostile.answer = listed("step4/" + "a/" * 600 + "x")
    if listed is at_the_top and tags is None:
        assert [entry.name for entry in folder_on(hostile).entries()] == ["step4/x"]
        return
    with pytest.raises(ElasticCkptError, match="longer than any store takes") as caught:
        folder_on(hostile).entries(tags)
    assert caught.value.file == URL and caught.value.found == str(len("run/step4/") + 1201)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"<Key>run/", b"<Key>running/", "not in this folder"),
        (b"<Key>run/", b"<Key>r", "not in this folder"),
        (b"<ETag>e<", b"<ETag>e&#13;&#10;X: 1<", "a version that no request can name"),
        (b"<ETag>e<", b"<ETag>&#27;[31m<", "a version that no request can name"),
        (b"<ETag>e</ETag>", b"", "gives its files no version"),
    ],
)
def test_an_object_that_cannot_be_asked_for_is_an_error(hostile: Hostile, old: bytes, new: bytes, problem: str) -> None:
    body = page(0, 1, None).replace(old, new)

    def answer(_hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        respond(handler, 200, len(body))
        handler.wfile.write(body)

    hostile.answer = answer
    with pytest.raises(ElasticCkptError, match=problem) as caught:
        folder_on(hostile).entries()
    assert caught.value.remedy and (caught.value.found or not new)
    assert "\x1b" not in str(caught.value)


def test_an_object_that_is_listed_twice_at_the_top_is_an_error(hostile: Hostile) -> None:
    hostile.answer = at_the_top("latest", "latest")
    with pytest.raises(ElasticCkptError, match="lists this folder without end"):
        folder_on(hostile).entries(("step4",))


def test_objects_that_are_nested_deeper_than_a_checkpoints_are_left_out(
    hostile: Hostile, caplog: pytest.LogCaptureFixture
) -> None:
    """A listing of 2 MB, each of its names with 500 folders, took 1.2 GB."""
    hostile.answer = listing_of("step4/x", *(f"step4/{number:03}/{'a/' * 500}x" for number in range(300)))
    tracemalloc.start()
    try:
        entries = folder_on(hostile).entries()
        view = FolderView(URL, [NodeListing(URL, (URL,), (tuple(entries),))])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [os.path.relpath(path, URL) for path, _ in view.walk(URL)] == ["step4/x"]
    assert most < 10 << 20
    (record,) = caplog.records
    assert "leaves out 300 objects in more than 33 folders" in record.getMessage()
    hostile.answer = listing_of(f"{'a/' * 33}x", f"{'a/' * 34}x")
    assert [entry.name for entry in folder_on(hostile).entries()] == [f"{'a/' * 33}x"]


def test_empty_objects_in_the_place_of_folders_are_none(hostile: Hostile) -> None:
    deep = "a/" * 30
    hostile.answer = listing_of("step4/", "step4/x", "step4-empty/", f"{deep}x", f"{deep}", "a/", "a.b/", "a!/c")
    assert [entry.name for entry in folder_on(hostile).entries()] == [
        "step4/x",
        "step4-empty",
        f"{deep}x",
        "a.b",
        "a!/c",
    ]


def test_a_folder_of_many_objects_is_listed(hostile: Hostile) -> None:
    def answer(hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        number = len(hostile.requests)
        body = page(number * 1000, 1000, None if number == 5 else f"token{number}")
        respond(handler, 200, len(body))
        handler.wfile.write(body)

    hostile.answer = answer
    assert len(folder_on(hostile).entries()) == 5000 and len(hostile.requests) == 5


@pytest.mark.parametrize("year", ["+10000", "+262000", "-0001", "+999999", "x"])
def test_a_date_that_python_does_not_have_is_an_error_in_words(hostile: Hostile, year: str) -> None:
    def answer(hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        body = page(0, 5, None, f"{year}-01-01T00:00:00Z")
        respond(handler, 200, len(body))
        handler.wfile.write(body)

    hostile.answer = answer
    for tags in (None, ("step4",)):
        with pytest.raises(ElasticCkptError) as caught:
            folder_on(hostile).entries(tags)
        is_date = year not in ("+999999", "x")  # those are of no listing
        assert ("date that cannot be read" in caught.value.problem) == isinstance(caught.value, DamagedError) == is_date
        assert is_date or "does not answer as it should" in caught.value.problem
        assert caught.value.file == URL and caught.value.found and caught.value.remedy


@pytest.mark.parametrize("year", ["1000", "1600", "9999"])
def test_odd_dates_are_kept(hostile: Hostile, year: str) -> None:
    def answer(hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        body = page(0, 1, None, f"{year}-06-01T00:00:00Z")
        respond(handler, 200, len(body))
        handler.wfile.write(body)

    hostile.answer = answer
    (entry,) = folder_on(hostile).entries()
    view = FolderView(URL, [NodeListing(URL, (URL,), ((entry,),))])
    assert f"written {year}-06-01" in view.described(view.copies[entry.name][0])


def body(stated: int | None, sent: int, begin: int = 0, end: int = NBYTES, status: int = 206) -> Any:
    """An answer to a read: of a stated and a real length, and of a stated range."""

    def answer(hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        own = {"ETag": '"version"', "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        respond(handler, status, stated, Content_Range=f"bytes {begin}-{end - 1}/{NBYTES}", **own)
        handler.close_connection = True
        hostile.send(handler, sent)

    return answer


ENDLESS = 1 << 40
BODIES = {
    "longer than asked for": body(NBYTES + 1, NBYTES + 1),
    "much longer": body(1 << 30, 1 << 30),
    "no end": body(None, ENDLESS),
    "a length of 1 TiB": body(ENDLESS, ENDLESS),
    "shorter than stated": body(NBYTES, NBYTES // 2),
    "shorter than asked for": body(NBYTES // 2, NBYTES // 2),
    "nothing": body(0, 0),
    "a shorter range": body(NBYTES // 2, NBYTES // 2, end=NBYTES // 2),
    "another range": body(NBYTES, NBYTES, begin=5, end=NBYTES + 5),
    "a longer range": body(1 << 30, 1 << 30, end=1 << 30),
    "the whole object": body(1 << 30, 1 << 30, status=200),
}


@pytest.mark.parametrize("what", BODIES)
def test_a_body_is_not_read_beyond_what_was_asked_for(hostile: Hostile, what: str) -> None:
    hostile.answer = BODIES[what]
    with pytest.raises(ElasticCkptError, match=r"sends more bytes than|does not answer as it should") as caught:
        folder_on(hostile).read(ENTRY, 0, NBYTES)
    assert caught.value.file == f"{URL}/{ENTRY.name}" and (caught.value.found or caught.value.expected)
    # buffers of sockets take some MiB more
    assert len(hostile.requests) <= 2 + 1 and hostile.sent_nbytes <= (32 << 20)


def test_a_body_that_trickles_ends_with_the_time_of_a_request(hostile: Hostile) -> None:
    ended = threading.Event()

    def answer(hostile: Hostile, handler: BaseHTTPRequestHandler) -> None:
        body(NBYTES, 1)(hostile, handler)
        ended.wait(20)

    hostile.answer = answer
    with pytest.raises(ElasticCkptError, match="does not answer"):
        folder_on(hostile).read(ENTRY, 0, NBYTES)
    ended.set()
    assert len(hostile.requests) <= 3


def test_redirects_in_a_loop_are_an_error_at_once(hostile: Hostile) -> None:
    hostile.answer = lambda _, handler: respond(handler, 307, 0, Location=handler.path)
    for ask in (lambda: folder_on(hostile).read(ENTRY, 0, NBYTES), folder_on(hostile).entries):
        hostile.requests.clear()
        with pytest.raises(ElasticCkptError, match="does not answer") as caught:
            ask()
        assert "redirect" in str(caught.value.found) and len(hostile.requests) <= 11


def test_another_host_gets_no_credentials_by_a_redirect(hostile: Hostile) -> None:
    """The client follows it, and cannot be told not to; what comes must be of the range and version that was asked."""
    with serve(Hostile(body(NBYTES, NBYTES))) as other:
        location = f"http://127.0.0.1:{other.port}/internal"
        hostile.answer = lambda _, handler: respond(handler, 307, 0, Location=location)
        assert len(folder_on(hostile).read(ENTRY, 0, NBYTES)) == NBYTES
        assert other.requests == [("/internal", None)] and hostile.requests[0][1] is not None
        other.answer = BODIES["much longer"]
        with pytest.raises(ElasticCkptError, match="sends more bytes"):
            folder_on(hostile).read(ENTRY, 0, NBYTES)
