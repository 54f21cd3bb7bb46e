"""A server of buckets for tests, which counts what it is asked for."""

from __future__ import annotations

import http.client
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import obstore
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

BUCKET = "bucket"

#: The server of this process, while one runs.
_served: list[str] = []


@dataclass
class Bucket:
    """A bucket behind a proxy.

    Attributes:
        options: for ``"storage_options"``.
        asked: method, path and number of bytes of each answer so far.
        faults: what happens to coming reads of ranges, one each: a status, ``cut``, or ``any version``, whatever
            one is asked for.
        refusal: status and code with which everything is answered.
    """

    options: dict[str, Any]
    store: Any
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, folder: Path, prefix: str) -> None:
        """Upload a folder."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                obstore.put(self.store, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    @property
    def read_nbytes(self) -> int:
        """Bytes of all objects that were sent."""
        return sum(nbytes for method, path, nbytes in self.asked if method == "GET" and "list-type" not in path)


def _handler(bucket: Bucket, upstream: str) -> type[BaseHTTPRequestHandler]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with bucket.lock:
                is_read = self.command == "GET" and "Range" in self.headers
                fault = bucket.faults.pop(0) if is_read and bucket.faults else ""
            refusal = (int(fault), "") if fault.isdecimal() else bucket.refusal
            if refusal is not None:
                text = f"<Error><Code>{refusal[1]}</Code></Error>".encode()
                self.send_response(refusal[0])
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                return
            connection = http.client.HTTPConnection(upstream)
            left_out = ["connection", *["if-match"] * (fault == "any version")]
            headers = {key: value for key, value in self.headers.items() if key.lower() not in left_out}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            raw = answer.read()
            with bucket.lock:
                bucket.asked.append((self.command, self.path, len(raw)))
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("transfer-encoding", "connection", "server", "date"):
                    self.send_header(key, value)
            self.end_headers()
            self.wfile.write(raw[: len(raw) // 2] if fault == "cut" else raw)
            if fault == "cut":
                self.close_connection = True
            connection.close()

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _forward

        def log_message(self, *_: Any) -> None:
            pass

    return Proxy


@contextmanager
def serve_bucket() -> Iterator[Bucket]:
    """An empty bucket of moto's, behind a proxy on the loopback interface: one at a time in a process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    assert _served == [], "all servers of moto in a process hold the same objects"
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    _served.append(f"{host}:{port}")
    keys = {"access_key_id": "key", "secret_access_key": "SECRET-OF-TESTS", "region": "us-east-1"}
    bucket = Bucket({}, None)
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(bucket, f"{host}:{port}"))
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    bucket.options = {**keys, "endpoint": endpoint, "client_options": {"allow_http": True}}
    connection = http.client.HTTPConnection(f"{host}:{port}")
    for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):
        connection.request(method, path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    bucket.store = S3Store(BUCKET, **bucket.options)
    try:
        yield bucket
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()
        _served.clear()


def names_in(text: str) -> set[str]:
    """What looks like a secret in a text."""
    return set(re.findall(r"SECRET-OF-TESTS", text))
