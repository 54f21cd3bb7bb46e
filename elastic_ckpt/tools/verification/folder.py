"""Which files a checkpoint has, which it should have, and what the ``latest`` files say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from elastic_ckpt.errors import ElasticCkptError, NotFoundError, listed
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.detect import LATEST as LATEST_FILE
from elastic_ckpt.formats.detect import LATEST_UNIVERSAL, list_tags, look_at
from elastic_ckpt.formats.naming import SWAPPED_FOLDER, UNIVERSAL_FOLDER, FolderFiles
from elastic_ckpt.tools.opened import locate
from elastic_ckpt.tools.verification.findings import LATEST, UNCHECKED, UNREADABLE, Finding, of_error

_RANKS = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+")
#: Numbers of ranks in a file are only claims: beyond this many, what is missing is not listed.
_MOST_RANKS = 1 << 14
_MOST_TAG_NBYTES = 4096
#: Scripts that DeepSpeed copies into checkpoints.
_SCRIPT = ".py"


def choose(folder: str, tag: str | None, trust_pickle: bool) -> tuple[Found | None, list[Finding], list[Finding]]:
    """The checkpoint to verify; findings about the ``latest`` files; notes.

    Where ``latest`` is of no use, ``latest_universal`` may be; or there is one tag only.

    Raises:
        NotFoundError: there is no checkpoint at all, or not the one that was asked for.
    """
    path = os.path.abspath(folder)
    if tag is None and look_at(os.path.dirname(path), os.path.basename(path)) is not None:
        return locate(path, None), [], []
    findings = [finding for name in (LATEST_FILE, LATEST_UNIVERSAL) for finding in _pointer(path, name)]
    if tag is not None:
        return locate(path, tag), findings, []
    try:
        return locate(path, None, trust_pickle=trust_pickle), findings, []
    except ElasticCkptError as error:
        tags = list_tags(path)
        if not tags:
            raise
        findings = findings or [of_error(error, LATEST if isinstance(error, NotFoundError) else UNREADABLE)]
    for name in (LATEST_FILE, LATEST_UNIVERSAL):
        pointed = _tag_of(os.path.join(path, name))
        if pointed in tags:
            return look_at(path, pointed), findings, [Finding(LATEST, f"verified {pointed}, which {name} names", path)]
    if len(tags) > 1:
        return None, findings, [Finding(UNCHECKED, f"none of the tags {listed(tags)}: say which with --tag", path)]
    return look_at(path, tags[0]), findings, [Finding(LATEST, f"verified {tags[0]}, the only tag there is", path)]


def _pointer(folder: str, name: str) -> Iterator[Finding]:
    path = os.path.join(folder, name)
    if not os.path.lexists(path):
        return
    try:
        with open(path, encoding="utf-8") as stream:
            tag = stream.read(_MOST_TAG_NBYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        yield Finding(LATEST, f"cannot be read: {error}", path)
        return
    tags = list_tags(folder)
    if tag not in tags and not (_is_relative(tag) and look_at(folder, tag) is not None):
        yield Finding(LATEST, f"names {tag!r}, which is not there; there are {listed(tags)}", path)


def _tag_of(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read(_MOST_TAG_NBYTES).strip()
    except (OSError, UnicodeDecodeError):
        return None


def _is_relative(tag: str) -> bool:
    return bool(tag) and "\0" not in tag and not os.path.isabs(tag) and ".." not in tag.split("/")


def checkpoint_files(found: Found) -> list[str]:
    """Paths of all ``torch.save`` files of a checkpoint, sorted."""
    files = found.files
    names = [*files.model.values(), *files.model_zero3.values(), *files.optimizer.values(), *files.layers.values()]
    paths = {found.path(name) for name in (*names, *files.experts, *files.clashes)}
    if files.is_universal:
        root = found.path(UNIVERSAL_FOLDER)
        for entry in os.scandir(root):
            inside = os.scandir(entry.path) if entry.is_dir() else [entry]
            paths |= {file.path for file in inside if file.name.endswith(".pt") and file.is_file()}
    return sorted(paths)


def swap_files(found: Found) -> list[str]:
    """Paths of the files that hold optimizer states that were on NVMe, sorted: raw bytes without any checksum."""
    root = found.path(SWAPPED_FOLDER)
    paths = []
    for entry in os.scandir(root) if os.path.isdir(root) else ():
        if entry.is_dir():
            paths += [file.path for file in os.scandir(entry.path) if file.is_file()]
    return sorted(paths)


def other_files(found: Found) -> list[str]:
    """Names of files in the tag's folder that are none of DeepSpeed's."""
    known = {os.path.basename(path) for path in checkpoint_files(found) if os.path.dirname(path) == found.folder}
    names = [entry.name for entry in os.scandir(found.folder) if entry.is_file()]
    return sorted(name for name in names if name not in known and not name.endswith(_SCRIPT))


def missing_files(files: FolderFiles, dp: int | None, model_parallel: int | None) -> list[str]:
    """Names of files that ought to be there. Pure.

    Args:
        files: what is there.
        dp: data-parallel degree, as files say; ``None``: none does.
        model_parallel: number of model-parallel ranks, as files say.
    """
    seen = [at for at, _ in (*files.optimizer, *files.model_zero3)]
    dp_count = max(dp or 0, max(seen, default=-1) + 1)
    mp_count = max(model_parallel or 0, max(files.mp_ranks, default=-1) + 1)
    if dp_count * mp_count > _MOST_RANKS:
        return []
    dps, mps = range(dp_count), range(mp_count)
    missing = [f"mp_rank_{mp:02d}_model_states.pt" for mp in mps if files.model and mp not in files.model]
    for names in (files.model_zero3, files.optimizer):
        if names:
            sample = next(iter(names.values()))
            absent = [(at, mp) for mp in mps for at in dps if (at, mp) not in names]
            missing += [_RANKS.sub(f"zero_pp_rank_{at}_mp_rank_{mp:02d}", sample) for at, mp in absent]
    tps = {tp for _, tp in files.layers}
    for layer in sorted({layer for layer, _ in files.layers}):
        missing += [
            f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" for tp in tps if (layer, tp) not in files.layers
        ]
    return missing
