"""The newest whole checkpoint of a folder: what to resume from after a job died, maybe while it was saving."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.text import one_line
from elastic_ckpt.errors import DamagedError, ElasticCkptError, NotFoundError, UnsupportedError, printable_errors
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.detect import list_below, list_checkpoints
from elastic_ckpt.formats.safetensors import parse_json
from elastic_ckpt.formats.save_order import Save, oldest_first, save_of
from elastic_ckpt.storage import absolute, copies_of, exists, folder_names, is_folder, modified, open_stream
from elastic_ckpt.tools.opened import Folders, config_of, seen_together
from elastic_ckpt.tools.verification import verify

logger = logger_of(__name__)
#: State of Hugging Face's Trainer beside a checkpoint.
_TRAINER_STATE = "trainer_state.json"
#: Its largest plausible size.
_MOST_STATE_NBYTES = 64 << 20
_NUMBER = re.compile(r"\d+")
#: A folder of the Trainer, which names it by its own count.
_OF_TRAINER = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of the folder."""

    path: str  # what to resume from: the folder of a tag, or the one around it that a framework made (checkpoint-20)
    load_dir: str  # this and the tag as ``load_checkpoint`` takes them
    tag: str
    step: int | None  # global step of its model-states files, or of its tag; ``None`` if neither tells
    problem: str | None = None  # why it is not whole, in one line; ``None``: it is, or was not looked at
    suspicion: str | None = None  # why it may not be whole, where that is not proven: it counts as whole
    unchecked: bool = False  # whether it may be whole all the same, since this version does not support what it has


@printable_errors()
def find_latest(folder: Folders, full: bool = False) -> str:
    """The path of the newest complete checkpoint in a folder. Local.

    A checkpoint is skipped only if it is proven to be incomplete or damaged. The log names it, with the proof. If there
    is only a suspicion, its path is returned, the suspicion is logged, and the load says what to do. ``"on_damage"``
    applies the same rule: otherwise, the steps since the checkpoint before would be lost.

    In a folder of DeepSpeed's tags, it is the folder of a tag. In an output folder of the Trainer, Accelerate or
    Lightning, it is a folder such as ``checkpoint-20``, which their own ``resume_from_checkpoint`` takes.

    Args:
        folder: the folder that ``save_checkpoint`` or the framework was given; a list, if nodes saved to own disks.
        full: compare every byte with its checksum, instead of only metadata and sizes.

    Raises:
        NotFoundError: there is no checkpoint at all.
        DamagedError: there are checkpoints, but none is complete.
        UnsupportedError: none is known to be complete, and at least one could not be checked.
    """
    with seen_together(folder) as path:
        newest, skipped = newest_whole(path, config_of(None), full)
    if newest is None:
        found = "; ".join(f"{os.path.basename(each.path)}: {each.problem}" for each in skipped)
        remedy = "restore files of one of them, or remove the folder to start from the beginning"
        if any(each.unchecked for each in skipped):
            problem = "no checkpoint in this folder is known to be complete: this version cannot check all of them"
            raise UnsupportedError(problem, absolute(path), found=found)
        raise DamagedError("no checkpoint in this folder is complete", absolute(path), found=found, remedy=remedy)
    for each in skipped:
        logger.warning("elastic_ckpt: %s is newer than %s, and was skipped: %s", each.path, newest.path, each.problem)
    if newest.suspicion is not None:
        logger.warning(
            "elastic_ckpt: %s is the newest checkpoint, and may be damaged: %s", newest.path, newest.suspicion
        )
    return newest.path


def newest_whole(folder: str, config: ElasticConfig, full: bool = False) -> tuple[Candidate | None, list[Candidate]]:
    """The newest whole checkpoint, and newer ones that are not whole; see :func:`find_latest`."""
    folder = absolute(folder)
    candidates = _candidates(folder, config)
    if not candidates:
        problem = "there is no DeepSpeed checkpoint here"
        remedy = "give the folder that save_checkpoint was given"
        expected = "folders of tags (global_step100), or folders that contain them (checkpoint-100)"
        found = "no such folder" if not is_folder(folder) else "a folder without any"
        raise NotFoundError(problem, folder, expected, found, remedy=remedy)
    skipped: list[Candidate] = []
    for index in reversed(oldest_first([save for save, _ in candidates])):
        candidate = candidates[index][1]
        looked_at = candidate if candidate.problem else _judged(candidate, config, full)
        placed = replace(looked_at, path=copies_of(candidate.path)[0])
        if placed.problem is None:
            return placed, skipped
        skipped.append(placed)
    return None, skipped


def _candidates(folder: str, config: ElasticConfig) -> list[tuple[Save, Candidate]]:
    """Every checkpoint in the folder, or one level below; and saves that had just begun.

    These are folders named like checkpoints, but for their number, without a file of one.
    """
    tags = list_checkpoints(folder)
    names = set(folder_names(folder)) if is_folder(folder) else set()
    trust = config.trust_pickle
    found = [_candidate(tag.folder, folder, tag, trust) for tag in tags]
    itself = {tag.folder for tag in tags}
    below = ((path, tag) for path, tag in list_below(folder) if path not in itself)
    found += (_candidate(path, path, tag, trust) for path, tag in below)
    whole = {os.path.basename(candidate.path) for _, candidate in found}
    patterns = {_NUMBER.sub("#", name) for name in whole if _NUMBER.search(name)}
    problem = "no file of a checkpoint can be seen in it"
    for name in names - whole:
        if _NUMBER.sub("#", name) in patterns:
            path = os.path.join(folder, name)
            begun = Save(name, None, written=modified(path))
            found.append((begun, Candidate(path, folder, name, None, problem)))
    return found


def _candidate(path: str, load_dir: str, found: CheckpointInfo, trust_pickle: bool) -> tuple[Save, Candidate]:
    save = save_of(found, os.path.basename(path), trust_pickle)
    return save, Candidate(path, load_dir, found.tag, save.step)


def _judged(candidate: Candidate, config: ElasticConfig, full: bool) -> Candidate:
    """The candidate with its problem, if it has one."""
    try:
        # by the folder of its tag, so that no ``latest`` file counts
        outcome = verify(os.path.join(candidate.load_dir, candidate.tag), None, config, full)
    except ElasticCkptError as error:
        is_unchecked = isinstance(error, UnsupportedError)
        return replace(candidate, problem=one_line(error.problem), unchecked=is_unchecked)
    suspicion = None
    if outcome.findings and all(finding.suspected for finding in outcome.findings):
        suspicion = outcome.findings[0].line(candidate.load_dir)
    elif problems := outcome.problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return replace(candidate, problem=problems[0].line(candidate.load_dir) + more, unchecked=not outcome.findings)
    return replace(candidate, problem=_trainers_problem(candidate), suspicion=suspicion)


def _trainers_problem(candidate: Candidate) -> str | None:
    """Why it is not whole to Hugging Face's Trainer: its own state is missing, or of another save.

    The Trainer counts steps by itself. It is one behind the engine in a save between the engine's step and its own, as
    its just-in-time checkpoint at ``on_pre_optimizer_step``; it may have begun with an engine that had trained.
    """
    around = os.path.dirname(candidate.path)
    step = candidate.step
    others = (os.path.join(around, name, _TRAINER_STATE) for name in folder_names(around))
    if not any(map(exists, others)):
        return None  # another framework's folders
    try:
        with open_stream(os.path.join(candidate.path, _TRAINER_STATE)) as stream:
            saved = parse_json(stream.read(_MOST_STATE_NBYTES))["global_step"]
    except (ElasticCkptError, OSError, ValueError, TypeError, LookupError) as error:
        return f"{_TRAINER_STATE} cannot be read, which the Trainer writes last: {type(error).__name__}"
    of_folder = _OF_TRAINER.fullmatch(os.path.basename(candidate.path))
    own_step = (step, None if step is None else step - 1) if of_folder is None else (step, int(of_folder[1]))
    return None if saved in own_step else f"{_TRAINER_STATE} is of step {saved}, the checkpoint of step {step}"
