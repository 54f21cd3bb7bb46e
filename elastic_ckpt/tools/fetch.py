"""Brings files of a checkpoint from an object store to a folder, for programs that look for them there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ckpt.errors import ConfigError, DamagedError, ElasticCkptError, refuse_used_up
from elastic_ckpt.report import progress_bar
from elastic_ckpt.storage import Entry, absolute, is_url, was_url
from elastic_ckpt.storage.local import made_whole, version_of
from elastic_ckpt.storage.remote import REQUEST_NBYTES, RemoteFolder

#: Tensors of DeepSpeed, torch.distributed.checkpoint and Hugging Face.
_TENSORS = re.compile(r"(.*/)?(.*(model|optim)_states\.pt|zero/.*\.pt|.*\.distcp|.*\.safetensors|pytorch_model.*\.bin)")


@dataclass(frozen=True)
class Fetched:
    """What was brought."""

    names: tuple[str, ...]
    nbytes: int
    left: tuple[str, ...]  # tensors, which ranks read from where they are
    left_nbytes: int


def fetch(url: str, folder: Path, options: Mapping[str, Any], everything: bool = False) -> Fetched:
    """Download what is no tensor of a folder in an object store, or ``everything``; folders are made in any case.

    A file gets its name once it is whole; one that was fetched from the same object is kept. Raises
    :class:`ElasticCkptError` if there is nothing, or something cannot be read or written.
    """
    if not is_url(url):
        raise ConfigError("there is nothing to fetch from a folder", url, "a URL such as s3://bucket/run")
    remote, folder = RemoteFolder(absolute(url), options), Path(os.path.abspath(folder))
    if was_url(folder):
        raise ConfigError("nothing is written to an object store", str(folder), "a folder on this machine")
    entries = remote.entries()
    if not entries:
        raise DamagedError("there is nothing to fetch", url, "objects below it", "none", remedy="look at its spelling")
    wanted = [entry for entry in entries if everything or not _TENSORS.fullmatch(entry.name)]
    left = [entry for entry in entries if entry not in wanted]
    nbytes = sum(entry.nbytes for entry in wanted)
    try:
        with progress_bar("fetching", nbytes, None) as bar:
            for entry in entries:
                path = Path(os.path.normpath(folder / entry.name))
                if folder not in path.parents:
                    raise DamagedError("an object's name leads out of the folder", f"{url}/{entry.name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                if entry in wanted and not _is_current(path, entry):
                    _download(remote, entry, path)
                bar.update(entry.nbytes if entry in wanted else 0)
    except OSError as error:
        refuse_used_up(error, str(folder))
        found = f"{type(error).__name__}: {error.strerror}"
        raise ElasticCkptError("a file cannot be written", str(error.filename or folder), found=found) from error
    names, others = (tuple(entry.name for entry in each) for each in (wanted, left))
    return Fetched(names, nbytes, others, sum(entry.nbytes for entry in left))


def _is_current(path: Path, entry: Entry) -> bool:
    """Whether a file was fetched from just this object."""
    # asks the system: what was fetched before
    return path.is_file() and version_of(str(path))[1:] == (entry.nbytes, entry.mtime_ns)


def _download(remote: RemoteFolder, entry: Entry, path: Path) -> None:
    ranges = remote.open_ranges(entry)
    buffer = memoryview(bytearray(min(REQUEST_NBYTES, entry.nbytes)))
    with made_whole(str(path), entry.mtime_ns) as stream:
        while count := ranges.read([buffer], stream.tell()):
            stream.write(buffer[:count])
