"""Detects a checkpoint's format and tag from file names and the ``latest`` files. Local, no collectives."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.errors import DamagedError, ElasticCkptError, NotFoundError, Remedy, UnsupportedError, shortened
from elastic_ckpt.formats.base import CheckpointInfo
from elastic_ckpt.formats.naming import DCP_METADATA, UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER, sort_names
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.storage import absolute, copies_of, exists, file_names, folder_names, is_folder, modified, open_stream
from elastic_ckpt.storage.listing import search
from elastic_ckpt.storage.local import named_os_errors

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
#: Longer than any folder name; a ``latest`` file is untrusted input.
MOST_TAG_NBYTES = 4096
#: Folders of steps as DeepSpeed, torchtitan and Megatron name them.
_OWN_TAG = re.compile(r"(?:global_step|step-|iter_)(\d+)")


def find_checkpoint(
    load_dir: str, tag: str | None, prefer_universal: bool, trust_pickle: bool = False, without_latest: bool = False
) -> CheckpointInfo | None:
    """The checkpoint in a folder, or ``None`` where the folder contains nothing of DeepSpeed's.

    With a tag, only that tag's folder. Without one, what ``latest_universal`` or ``latest`` names; if both name one,
    ``latest``, or with ``prefer_universal`` (``load_universal`` in the DeepSpeed config, or ``--universal-checkpoint``)
    the universal one, unless the native one has been trained further. ``without_latest``: where neither file is there,
    a folder that is a checkpoint itself, or the only checkpoint in it, is taken, with a note. Raises
    :class:`NotFoundError` if there are checkpoints, but not the requested one, :class:`DamagedError` if a ``latest``
    file cannot be read.
    """
    if tag is not None:
        found = look_at(load_dir, str(tag))
        if found is None and (read_latest(load_dir, LATEST) is not None or list_tags(load_dir)):
            raise _no_such_tag(load_dir, f"the tag {str(tag)!r} that was asked for", str(tag))
        return found
    choices: list[CheckpointInfo] = []
    for latest in (LATEST_UNIVERSAL, LATEST) if prefer_universal else (LATEST, LATEST_UNIVERSAL):
        named = read_latest(load_dir, latest)
        below = None if named is None else _below(load_dir, named)
        found = None if below is None else look_at(load_dir, below)
        if found is not None:
            choices.append(found)
        elif named is not None and not choices:
            raise _misled(load_dir, latest, named)
    if not choices:  # something else than a file may have its name
        has_latest = any(exists(os.path.join(load_dir, latest)) for latest in (LATEST, LATEST_UNIVERSAL))
        return _of_dcp(load_dir) or _unnamed(load_dir, without_latest and not has_latest)
    if len(choices) < 2 or choices[0].folder == choices[1].folder:
        return choices[0]
    steps = [global_steps(each, trust_pickle) for each in choices]
    if choices[0].format == "universal" and None not in steps and steps[1] > steps[0]:  # type: ignore[operator]
        choices = choices[::-1]
        steps = steps[::-1]
    note = f"loaded {choices[0].tag} (step {steps[0]}); {choices[1].tag} (step {steps[1]}) is there too"
    return replace(choices[0], notes=(note,))


def _unnamed(load_dir: str, may_take: bool) -> CheckpointInfo | None:
    """The checkpoint that a folder is itself, or the only one in it, if ``may_take``; ``None``: there is none.

    Raises :class:`NotFoundError` if there is one that may not be taken, or there are several.
    """
    itself = look_at(load_dir, "")
    tags = list_tags(load_dir)
    if itself is not None and not tags:
        if not may_take:
            raise _is_itself_a_tag(load_dir, itself)
        return replace(itself, notes=(f"{load_dir} has no file {LATEST!r} and is a checkpoint itself: loaded it",))
    if itself is None and len(tags) == 1 and may_take:
        found = look_at(load_dir, tags[0])
        note = f"{load_dir} has no file {LATEST!r}: loaded {tags[0]}, the only checkpoint in it"
        return None if found is None else replace(found, notes=(note,))
    if tags:
        raise _no_such_tag(load_dir, f"a file {LATEST!r} that names the tag to load", None)
    return None


def _is_itself_a_tag(load_dir: str, found: CheckpointInfo) -> NotFoundError:
    """The error for a ``load_dir`` that is the folder of a tag, which DeepSpeed's own loader would pass over."""
    problem = "load_dir is the folder of a checkpoint, not the folder that has it under a tag, and loads nothing"
    expected = f"the folder that save_checkpoint was given, with a file {LATEST!r}, or a tag"
    around, tag = os.path.split(absolute(load_dir))
    by_tag = Remedy(arguments={"load_dir": around, "tag": tag})
    remedy = by_tag, Remedy("--universal-checkpoint, which takes this folder itself")
    files = f"the files of a {found.format} checkpoint"
    return NotFoundError(problem, load_dir, expected, files, remedy=remedy)


def _of_dcp(load_dir: str) -> CheckpointInfo | None:
    """A folder of ``torch.distributed.checkpoint``: this one, the tracked iteration of Megatron, or the last step."""
    if not is_folder(load_dir):
        return None
    itself = look_at(load_dir, "")
    if itself is not None and itself.format == "dcp":
        return itself
    iteration = read_latest(load_dir, _MEGATRON_LATEST)
    if iteration is not None and iteration.isdecimal():
        return look_at(load_dir, f"iter_{int(iteration):07d}")
    steps = [(step_of_tag(name), name) for name in folder_names(load_dir) if name.startswith("step-")]
    names = [name for _, name in sorted((step, name) for step, name in steps if step is not None)]
    found = (look_at(load_dir, name) for name in reversed(names))  # one without .metadata was cut short
    return next((each for each in found if each is not None and each.format == "dcp"), None)


def look_at(load_dir: str, tag: str) -> CheckpointInfo | None:
    """What one tag's folder contains, or ``None``; :class:`DamagedError` if it was universal and has no parameter."""
    folder = absolute(os.path.join(load_dir, tag))
    if not is_folder(folder):
        return None
    parameters = os.path.join(folder, UNIVERSAL_FOLDER)
    is_universal = is_folder(parameters) and (
        exists(os.path.join(parameters, UNIVERSAL_OPTIMIZER))  # which BLOOM's lacks
        or any(exists(os.path.join(parameters, name, f"{MASTER}.pt")) for name in folder_names(parameters))
    )
    names = file_names(folder)
    files = sort_names(names, is_universal)
    if files.model and files.of_weights_alone and UNIVERSAL_FOLDER in names:  # not what it is without that folder
        problem = "a universal checkpoint has lost its parameters: no folder of one is in the folder that has them"
        raise DamagedError(problem, parameters, "a folder for each parameter, with its master and states", "none")
    if is_universal or files.optimizer or files.model or files.model_zero3 or files.layers:
        return CheckpointInfo("universal" if is_universal else "native", folder, tag, files)
    return CheckpointInfo("dcp", folder, tag, files) if exists(os.path.join(folder, DCP_METADATA)) else None


def _below(load_dir: str, named: str) -> str | None:
    """The tag that a ``latest`` file names: a path, or nothing, which is the folder itself; ``None``: outside it."""
    relative = os.path.relpath(os.path.join(load_dir, named), load_dir)
    return None if relative.split(os.sep)[0] == os.pardir else "" if relative == os.curdir else relative


def list_checkpoints(load_dir: str) -> list[CheckpointInfo]:
    """All checkpoints directly below a folder, newest first by the time of their folders."""

    def mtime(name: str) -> float:
        return modified(os.path.join(load_dir, name))

    found = []
    with search(load_dir) as count:
        for name in sorted(folder_names(load_dir), key=mtime, reverse=True) if is_folder(load_dir) else ():
            # nobody asked for this folder, which may be unreadable, as lost+found of a disk, or too large
            with suppress(DamagedError, UnsupportedError):
                found.append(look_at(load_dir, name))
            count.refuse_if_used_up()
    return [each for each in found if each is not None]


def list_below(folder: str) -> list[tuple[str, CheckpointInfo]]:
    """The checkpoints in the folders that frameworks make (``checkpoint-20``), each with the path of that folder."""
    found: list[tuple[str, CheckpointInfo]] = []
    with search(folder) as count:
        for name in folder_names(folder) if is_folder(folder) else ():
            path = os.path.join(folder, name)
            with suppress(DamagedError, UnsupportedError):  # as above
                found += ((path, each) for each in list_checkpoints(path))
            count.refuse_if_used_up()
    return found


def list_tags(load_dir: str) -> list[str]:
    """The tags of :func:`list_checkpoints`."""
    return [found.tag for found in list_checkpoints(load_dir)]


def read_latest(load_dir: str, latest: str) -> str | None:
    """The tag that a ``latest`` file names, ``None`` if there is no such file; :class:`DamagedError` if unreadable."""
    path = os.path.join(load_dir, latest)
    if not exists(path) or is_folder(path):  # a folder may be a tag of this name
        return None
    try:
        with named_os_errors(path), open_stream(path) as stream:
            text = stream.read(MOST_TAG_NBYTES + 1)
            if len(text) > MOST_TAG_NBYTES:
                raise ValueError(f"more than {MOST_TAG_NBYTES:,} bytes, which is not a folder name")
            return text.decode().strip()
    except (DamagedError, ValueError) as error:
        problem = "the file that names the newest tag cannot be read"
        expected = "the name of a tag (global_step100)"
        found = error.found if isinstance(error, DamagedError) else error
        remedy = f"load_checkpoint({load_dir!r}, tag=...), or write the tag into it"
        raise DamagedError(problem, path, expected, found, remedy=remedy) from error


def _misled(load_dir: str, latest: str, named: str) -> NotFoundError:
    """The error for a ``latest`` file that leads to no checkpoint."""
    path = copies_of(os.path.join(load_dir, latest))[0]
    shown = repr(named)[:200]
    wanted = f"the tag {shown} that {path} names"
    tag = named[:200] or None
    if not named:
        wanted = f"the name of a tag in {path}, which is empty"
    elif _below(load_dir, named) is None:
        wanted = f"a tag below {load_dir}; {path} names {shown}, which is outside and is not followed"
        tag = None
    return _no_such_tag(load_dir, wanted, tag)


def _no_such_tag(load_dir: str, wanted: str, tag: str | None) -> NotFoundError:
    tags = list_tags(load_dir)
    problem = "the checkpoint to load is not there"
    file = os.path.join(load_dir, tag or LATEST)
    found = "checkpoints under the tags " + shortened(tags) if tags else f"no checkpoint in {load_dir}"
    by_tag = Remedy(arguments={"load_dir": load_dir, "tag": next(iter(tags), None)})
    remedy = by_tag if tags else Remedy("check the path")
    return NotFoundError(problem, file, wanted, found, remedy=remedy)


def global_steps(found: CheckpointInfo, trust_pickle: bool = False) -> int | None:
    """The global step of a checkpoint, by its model-states files or DeepSpeed's own tag; ``None``: not known."""
    steps = saved_entry(found, "global_steps", trust_pickle)
    return steps if isinstance(steps, int) else step_of_tag(found.tag)


def saved_entry(found: CheckpointInfo, key: str, trust_pickle: bool = False) -> Any:
    """An entry beside the weights in the first model-states file that has it; ``None`` without one."""
    for name in (*found.files.model.values(), *found.files.model_zero3.values()):
        try:
            return open_pickled(found.path(name), trust_pickle).section(key)
        except ElasticCkptError:
            continue  # whoever reads the whole checkpoint learns what is wrong
    return None


def step_of_tag(tag: str) -> int | None:
    """The step in a tag of a known form; ``None``: it is another one."""
    own = _OWN_TAG.fullmatch(tag)
    return None if own is None else int(own[1])
