"""What proves damage, and which checkpoint is tried after a damaged one: the newest of the folder that is older."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.errors import DamagedError, ElasticCkptError, MixedSavesError
from elastic_ckpt.formats import CheckpointInfo, detect
from elastic_ckpt.formats.save_order import BY_COUNTERS, Save, oldest_first, save_of, steps_between, told_by
from elastic_ckpt.load.flow import LoadCall, prepare
from elastic_ckpt.storage import absolute


@dataclass(frozen=True)
class Tried:
    """A damaged checkpoint.

    Attributes:
        folder: of its tag.
        save: what is known of when it was saved; ``None`` of a checkpoint that was not found.
    """

    folder: str
    save: Save | None


@dataclass(frozen=True)
class Older:
    """The checkpoint to try next, or why there is none.

    Attributes:
        found: it; ``None``: there is none.
        tried: what it is older than, with what was found out of it, the newest first.
        save: what is known of when it was saved.
        why: in words, how old it is or why there is none.
        notes: what else the user should know about the choice.
    """

    found: CheckpointInfo | None
    tried: tuple[Tried, ...]
    save: Save | None = None
    why: str = ""
    notes: tuple[str, ...] = ()

    @property
    def lost(self) -> str:
        """The steps that are trained again."""
        newest = self.tried[0].save
        assert self.save is not None
        if newest is None:
            return f"what was trained after {self.save.name} was saved is lost"
        steps = steps_between(newest, self.save)
        if steps is None:
            return f"what was trained after {self.save.name} was saved is lost"
        if not steps:
            return "no step is lost"
        stands_still = newest.counted in (None, self.save.counted)
        last = newest.tagged if stands_still else newest.counted
        return f"steps {int(last or 0) - steps + 1} to {last} are lost, and trained again"


def choose_older(
    load_dir: str, tried: Sequence[Tried], found: CheckpointInfo | None, limit: int | None, by_tag: bool, trust: bool
) -> Older:
    """The newest checkpoint of a folder that is older than those that were tried. Local.

    Of equal counters, only one of the same format is older: a universal checkpoint may be converted from damaged files.

    Args:
        load_dir: the folder.
        tried: the last one is damaged.
        found: the last one; ``None`` where a ``latest`` file leads to none.
        limit: how many steps it may be older than the first; ``None``: any number.
        by_tag: whether the user asked for a tag.
        trust: ``"trust_pickle"``.
    """
    last = tried[-1]
    if last.save is None:
        step = detect.step_of_tag(os.path.basename(last.folder))
        save = save_of(found, trust_pickle=trust) if found is not None else None
        save = save or (None if step is None else Save(os.path.basename(last.folder), None, step))
        last = Tried(last.folder, save)
    tried = (*tried[:-1], last)
    has_order = last.save is not None and last.save.step is not None
    if not has_order and (limit is not None or by_tag):
        why = "which checkpoints are older is not known, since no file of this one records its step"
        return Older(None, tried, why=why)
    folders = {each.folder for each in tried}
    candidates = [each for each in detect.list_checkpoints(load_dir) if each.folder not in folders]
    others = [(save_of(each, trust_pickle=trust), each) for each in candidates]
    unknown = [each.tag for save, each in others if save.step is None]
    notes = tuple(f"{tag} is left out, since no file records its step" for tag in unknown)
    known = [(save, each) for save, each in others if save.step is not None]
    if found is not None and last.save is not None:
        same = found.format
        known = [(save, each) for save, each in known if save.step != last.save.step or each.format == same]
    older = _older_than(last.save, known) if last.save is not None and has_order else known
    if not older:
        around = os.path.dirname(absolute(load_dir))
        why = f"no older checkpoint is in {load_dir} (elastic-ckpt latest {around} looks beside it)"
        return Older(None, tried, why=why, notes=notes)
    save, newest = older[oldest_first([save for save, _ in older])[-1]]
    first = tried[0].save
    if first is None or not has_order:
        return Older(newest, tried, save, f"at step {save.step}", notes)
    steps = steps_between(first, save)
    how = told_by(first, save)
    back = f"{steps} steps back" if steps is not None else "by an unknown number of steps"
    if how != BY_COUNTERS:
        notes += (f"{first.name} and {save.name} both count {save.step} steps: {how} say which is older",)
    if limit is not None and (steps is None or steps > limit):
        why = f'the newest older checkpoint, {newest.tag}, is {back}, "on_damage" allows {limit}'
        return Older(None, tried, why=why, notes=notes)
    return Older(newest, tried, save, back, notes)


def _older_than(save: Save, others: Sequence[tuple[Save, CheckpointInfo]]) -> list[tuple[Save, CheckpointInfo]]:
    order = oldest_first([save, *(other for other, _ in others)])
    return [others[index - 1] for index in order[: order.index(0)]]


def refuse_proven(call: LoadCall, found: CheckpointInfo, suspicion: MixedSavesError) -> None:
    """Raise what proves damage of a checkpoint that is suspected, if anything does. Collective.

    ``"on_damage"`` goes back then, and ``elastic-ckpt latest`` goes past it.
    """
    by_bytes = call.config.model_copy(update={"verify": "bytes"})
    try:
        prepare(replace(call, config=by_bytes), found)
    except DamagedError as error:
        if error.proves_damage:
            raise error from suspicion
    except ElasticCkptError:
        pass  # the suspicion is refused in any case
