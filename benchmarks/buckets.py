"""``python -m benchmarks.buckets``: a checkpoint in an object store, against a download of it to every node.

The store is nginx, with a listing as S3 has it. It and the nodes are in network namespaces of their own; each node has
a link of its own to the store, as fast as memory or shaped by a token bucket. nginx's log says who was sent what.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.cases import NATIVE, Case
from benchmarks.checkpoints import Store
from benchmarks.launching import REPO, Launcher
from benchmarks.machine import write_document
from benchmarks.results import Target
from benchmarks.table import table_of

app = typer.Typer(add_completion=False)
OURS, DOWNLOAD = "elastic_ckpt", "download, then load"
MBIT = 800  # 100 MB/s, the rate of a shaped link
_PORT, _INSIDE = 8080, "BENCHMARKS_INSIDE"
_CONFIG = """
daemon off; pid {place}/pid; error_log {place}/errors; worker_processes 2; user root;
events {{}}
http {{
  log_format sent '$server_addr $status $body_bytes_sent $request_method $uri';
  access_log {place}/sent sent; sendfile on; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
  fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
  server {{
    listen {port}; default_type application/xml;
    location = /bucket {{ root {place}; if ($arg_delimiter) {{ rewrite ^ /top.xml break; }} rewrite ^ /tag.xml break; }}
    location /bucket/run/ {{ alias {folder}/; }}
  }}
}}
"""
_ENTRY = (
    "<Contents><Key>run/{}</Key><LastModified>{}</LastModified><ETag>&quot;{}&quot;</ETag><Size>{}</Size></Contents>"
)


def listing(folder: Path, names: Sequence[str]) -> str:
    """S3's answer to a request for a listing; versions are nginx's ETags."""
    entries = ""
    for name in names:
        status = (folder / name).stat()
        written = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
        entries += _ENTRY.format(name, written, f"{int(status.st_mtime):x}-{status.st_size:x}", status.st_size)
    return f"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"


def _ip(*words: str, inside: int | None = None) -> None:
    enter = [] if inside is None else ["nsenter", f"--net=/proc/{inside}/ns/net"]
    subprocess.run([*enter, *words], check=True)


@contextmanager
def store(place: Path, folder: Path, nodes: int, mbit: int | None) -> Iterator[list[str]]:
    """nginx in a namespace of its own, with a link for each node; its endpoints, by node."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    for name, inside in (("top.xml", False), ("tag.xml", True)):
        (place / name).write_text(listing(folder, [each for each in files if ("/" in each) is inside]))
    config = place / "nginx.conf"
    config.write_text(_CONFIG.format(place=place, folder=folder, port=_PORT))
    server = subprocess.Popen(["unshare", "--net", "sh", "-c", f"ip link set lo up; exec nginx -c {config}"])
    try:
        while not (place / "pid").exists():
            time.sleep(0.05)
        for node in range(nodes):
            _ip("ip", "link", "add", f"node{node}", "type", "veth", "peer", f"store{node}", "netns", str(server.pid))
            _ip("ip", "address", "add", f"10.78.{node}.1/24", "dev", f"node{node}")
            _ip("ip", "link", "set", f"node{node}", "up")
            _ip("ip", "address", "add", f"10.78.{node}.2/24", "dev", f"store{node}", inside=server.pid)
            _ip("ip", "link", "set", f"store{node}", "up", inside=server.pid)
            if mbit is not None:
                shape = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
                _ip("tc", "qdisc", "add", "dev", f"store{node}", "root", *shape, inside=server.pid)
        yield [f"http://10.78.{node}.2:{_PORT}" for node in range(nodes)]
    finally:
        server.terminate()
        server.wait()
        for node in range(nodes):
            subprocess.run(["ip", "link", "delete", f"node{node}"], check=False, capture_output=True)


def sent(place: Path, nodes: int) -> list[dict[str, int]]:
    """What nginx has sent to each node."""
    found = [{"requests": 0, "nbytes": 0} for _ in range(nodes)]
    for line in (place / "sent").read_text().splitlines():
        address, status, nbytes, *_ = line.split()
        if status in ("200", "206"):
            node = found[int(address.split(".")[2])]
            node["requests"] += 1
            node["nbytes"] += int(nbytes)
    return found


def medians(points: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, float]]:
    """By link and number of nodes: seconds of each contender, and what a node was sent for ours."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for key in dict.fromkeys((point["mbit"], point["nodes"]) for point in points):
        own = [point for point in points if (point["mbit"], point["nodes"]) == key]
        seconds = {each: median(p["seconds"] for p in own if p["contender"] == each) for each in (OURS, DOWNLOAD)}
        ours = [point for point in own if point["contender"] == OURS]
        nbytes = max(sum(node["nbytes"] for node in point["sent"]) for point in ours)
        requests = max(node["requests"] for point in ours for node in point["sent"])
        found[key] = {
            **seconds,
            "ratio": seconds[OURS] / seconds[DOWNLOAD],
            "sent_of_owned": nbytes / ours[0]["owned_nbytes"],
            "requests": requests,
        }
    return found


def table_rows(points: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A table's rows, beginning with its head."""
    yield (
        "link of a node",
        "nodes",
        "elastic_ckpt s",
        "download, then load s",
        "ratio",
        "sent / owned",
        "requests a node",
    )
    for (mbit, nodes), each in medians(points).items():
        link = "memory speed" if mbit is None else f"{mbit / 8:.0f} MB/s"
        seconds = (f"{each[key]:.2f}" for key in (OURS, DOWNLOAD, "ratio"))
        yield link, str(nodes), *seconds, f"{each['sent_of_owned']:.3f}", f"{each['requests']:.0f}"


def aims(document: Mapping[str, Any]) -> Iterator[Target]:
    """What is aimed at, and what was measured; nothing for an empty document."""
    for (mbit, nodes), each in medians(document.get("points", ())).items():
        if mbit is not None:
            what = f"{document['params']} in an object store at {mbit / 8:.0f} MB/s a node, {nodes} nodes"
            yield Target(f"{what}: N x seconds / downloading first", nodes * each["ratio"], 1.2, at_least=False)
            yield Target(f"{what}: bytes sent / owned", each["sent_of_owned"], 1.02, at_least=False)


@app.command()
def main(
    params: Annotated[str, typer.Option(help="Size of the model, saved with ZeRO-3 by 2 ranks.")] = "30M",
    nodes: Annotated[list[int], typer.Option(help="Nodes, of one rank each.")] = [1, 2, 4],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for results and checkpoints.")] = Path("benchmark_results"),
    extensions: Annotated[Path | None, typer.Option(help="TORCH_EXTENSIONS_DIR; in --out by default.")] = None,
) -> None:
    """Measure loads from an object store, for links as fast as memory and of 100 MB/s. Needs root, nginx, ip and tc."""
    if _INSIDE not in os.environ:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, "-m"]
        command += ["benchmarks.buckets", *sys.argv[1:]]
        raise typer.Exit(subprocess.run(command, env={**os.environ, _INSIDE: "1"}, cwd=REPO, check=False).returncode)
    out = out.absolute()
    console, launcher = Console(width=120), Launcher(out / "logs", extensions or out / "extensions")
    points, load = [], os.getloadavg()
    for count in nodes:
        case = Case(params, 3, 2, count)
        checkpoints = Store(out / "checkpoints", 25 << 30, launcher, console.print)
        checkpoints.ensure(case, [NATIVE], 1800)
        folder, place = checkpoints.folder(case, NATIVE), out / "store"
        for mbit in (None, MBIT):
            for number in range(repeats):
                for contender in (OURS, DOWNLOAD) if number % 2 else (DOWNLOAD, OURS):
                    with store(place, folder, count, mbit) as endpoints:
                        job: dict[str, Any] = {"case": asdict(case), "contender": contender, "endpoints": endpoints}
                        job |= {"files": {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*.pt")}}
                        job |= {"scratch": str(out / "downloads"), "out": str(out / "measured.json")}
                        job["files"]["latest"] = (folder / "latest").stat().st_size
                        launcher.run(count, "bucket", job, 900)
                    shutil.rmtree(out / "downloads", ignore_errors=True)
                    measured = json.loads((out / "measured.json").read_text())
                    points.append({"mbit": mbit, "nodes": count, **measured, "sent": sent(place, count)})
    write_document(out, "buckets", points, params=params, repeats=repeats, load_average=round(load[0], 1))
    console.print(table_of(table_rows(points), f"{params}, medians"))


if __name__ == "__main__":
    app()
