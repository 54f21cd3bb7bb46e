"""Which files a checkpoint has, which it should have, and what the ``latest`` files say."""

from __future__ import annotations

import os
import re

from elastic_ckpt.errors import ElasticCkptError, NotFoundError, listed
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.detect import LATEST as LATEST_FILE
from elastic_ckpt.formats.detect import LATEST_UNIVERSAL, MOST_TAG_NBYTES, list_tags, look_at, look_below
from elastic_ckpt.formats.naming import SWAPPED_FOLDER, UNIVERSAL_FOLDER, FolderFiles
from elastic_ckpt.tools.findings import ERROR, NOTE, Finding, of_error
from elastic_ckpt.tools.opened import locate
from elastic_ckpt.tools.verification.findings import LATEST, UNCHECKED, UNREADABLE

_RANKS = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+")
#: Numbers of ranks in a file are only claims: beyond this many, what is missing is not listed.
_MOST_RANKS = 1 << 14
#: Scripts that DeepSpeed copies into checkpoints.
_SCRIPT = ".py"


def choose(folder: str, tag: str | None, trust_pickle: bool) -> tuple[Found | None, list[Finding]]:
    """The checkpoint to verify, and what is wrong with the ``latest`` files.

    Where ``latest`` is of no use, ``latest_universal`` may be; or there is one tag only.

    Raises:
        NotFoundError: there is no checkpoint at all, or not the one that was asked for.
    """
    path = os.path.abspath(folder)
    if tag is None and look_at(os.path.dirname(path), os.path.basename(path)) is not None:
        return locate(path, None), []
    tags, named, findings = list_tags(path), {}, []
    for name in (LATEST_FILE, LATEST_UNIVERSAL):
        pointer = os.path.join(path, name)
        if not os.path.lexists(pointer):
            continue
        try:
            with open(pointer, encoding="utf-8") as stream:
                named[name] = pointed = stream.read(MOST_TAG_NBYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            findings.append(Finding(ERROR, LATEST, f"cannot be read: {error}", file=pointer))
            continue
        if look_below(path, pointed) is None:
            text = f"names {pointed!r}, which is not there; there are {listed(tags)}"
            findings.append(Finding(ERROR, LATEST, text, file=pointer))
    try:
        return locate(path, tag, trust_pickle=trust_pickle), findings
    except ElasticCkptError as error:
        if tag is not None or not tags:
            raise
        findings = findings or [of_error(error, LATEST if isinstance(error, NotFoundError) else UNREADABLE)]
    for name, pointed in named.items():
        if pointed in tags:
            note = Finding(NOTE, LATEST, f"verified {pointed}, which {name} names", file=path)
            return look_at(path, pointed), [*findings, note]
    if len(tags) > 1:
        note = Finding(NOTE, UNCHECKED, f"none of the tags {listed(tags)}: say which with --tag", file=path)
        return None, [*findings, note]
    note = Finding(NOTE, LATEST, f"verified {tags[0]}, the only tag there is", file=path)
    return look_at(path, tags[0]), [*findings, note]


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
    """Names of files that ought to be there.

    Args:
        files: what is there.
        dp: data-parallel degree, as files say; ``None``: none does.
        model_parallel: number of model-parallel ranks, as files say.
    """
    sharded = (files.model_zero3, files.optimizer)
    dps = range(max([dp or 0, *(at + 1 for names in sharded for at, _ in names)]))
    mps = range(max([model_parallel or 0, *(mp + 1 for mp in files.mp_ranks)]))
    if len(dps) * len(mps) > _MOST_RANKS:
        return []
    missing = [f"mp_rank_{mp:02d}_model_states.pt" for mp in mps if files.model and mp not in files.model]
    for names in filter(None, sharded):
        sample = next(iter(names.values()))
        absent = [(at, mp) for mp in mps for at in dps if (at, mp) not in names]
        missing += [_RANKS.sub(f"zero_pp_rank_{at}_mp_rank_{mp:02d}", sample) for at, mp in absent]
    layers, tps = {layer for layer, _ in files.layers}, {tp for _, tp in files.layers}
    absent = [(layer, tp) for layer in sorted(layers) for tp in tps if (layer, tp) not in files.layers]
    return missing + [f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" for layer, tp in absent]
