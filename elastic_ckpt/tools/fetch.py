"""Brings files of a checkpoint from an object store to a folder, for programs that look for them there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ckpt.errors import ConfigError, DamagedError, ElasticCkptError, refuse_used_up
from elastic_ckpt.report import progress_bar
from elastic_ckpt.storage import Entry, absolute, is_url, was_url
from elastic_ckpt.storage.local import made_whole, version_of
from elastic_ckpt.storage.remote import REQUEST_NBYTES, RemoteFolder

#: Files of tensors, of DeepSpeed, torch.distributed.checkpoint and Hugging Face.
_TENSORS = ("model_states.pt", "optim_states.pt", ".distcp", ".safetensors")


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
    remote = RemoteFolder(absolute(url), options)
    folder = Path(os.path.abspath(folder))
    if was_url(folder):
        raise ConfigError("nothing is written to an object store", str(folder), "a folder on this machine")
    entries = remote.entries()
    if not entries:
        raise DamagedError("there is nothing to fetch", url, "objects below it", "none", remedy="check its spelling")
    left = [] if everything else [entry for entry in entries if _has_tensors(entry.name)]
    left_names = {entry.name for entry in left}
    wanted = [entry for entry in entries if entry.name not in left_names]
    nbytes = sum(entry.nbytes for entry in wanted)
    try:
        with progress_bar("fetching", nbytes, None) as bar:
            for entry in entries:
                path = Path(os.path.normpath(folder / entry.name))
                if folder not in path.parents:
                    raise DamagedError("an object's name leads out of the folder", f"{url}/{entry.name}")
                os.makedirs(path.parent, exist_ok=True)  # a folder a frame, where pathlib takes several
                if entry.name in left_names:
                    continue
                if not _is_current(path, entry):
                    _download(remote, entry, path)
                bar.update(entry.nbytes)
    except OSError as error:
        refuse_used_up(error, str(folder))
        found = f"{type(error).__name__}: {error.strerror}"
        raise ElasticCkptError("a file cannot be written", str(error.filename or folder), found=found) from error
    names, others = (tuple(entry.name for entry in each) for each in (wanted, left))
    return Fetched(names, nbytes, others, sum(entry.nbytes for entry in left))


def _has_tensors(name: str) -> bool:
    """Whether an object is a file of tensors; those of a universal checkpoint are below ``zero``."""
    *folders, file = name.split("/")
    of_hugging_face = file.startswith("pytorch_model") and file.endswith(".bin")
    return file.endswith(_TENSORS) or of_hugging_face or (file.endswith(".pt") and "zero" in folders)


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
