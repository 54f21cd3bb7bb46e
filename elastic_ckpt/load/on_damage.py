"""What follows damage: waiting for files that appear late, then the newest older checkpoint of the folder.

Rank 0 looks and decides; the others wait for its message, a few seconds at most at a time.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace

from elastic_ckpt import distributed
from elastic_ckpt.errors import (
    DamagedError,
    ElasticCkptError,
    MismatchError,
    NotFoundError,
    PartialLoadError,
    SavedOverError,
    listed,
    shortened,
)
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.detect import (
    LATEST,
    LATEST_UNIVERSAL,
    find_checkpoint,
    global_steps,
    list_checkpoints,
    list_tags,
    step_of_tag,
)
from elastic_ckpt.load.flow import LoadCall, Prepared, as_partial_load_error

logger = logging.getLogger(__name__)
#: Seconds between two looks for files, at first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


class RetryPolicy:
    """The checkpoints that one call of ``load_checkpoint`` tries, one after another.

    ``prefer_universal``: see :func:`elastic_ckpt.formats.detect.find_checkpoint`.
    """

    def __init__(self, call: LoadCall, prefer_universal: bool) -> None:
        self._load_dir, self._engine = os.fspath(call.arguments.load_dir) or os.curdir, call.engine
        self._tag, self._config, self._prefer_universal = call.arguments.tag, call.config, prefer_universal
        self._deadline = time.monotonic() + call.config.wait_for_files
        self._pause = _FIRST_PAUSE
        self._older: CheckpointInfo | None = None
        self._skipped: tuple[str, ...] = ()
        self._steps: tuple[int, ...] = ()  # of the checkpoints so far, where known
        self._restoring: frozenset[tuple[str, str]] = frozenset()
        self.partly_overwritten = False

    def find(self) -> CheckpointInfo | None:
        """The checkpoint to try next. Collective."""
        if self._older is not None:
            return self._older
        tag, config = self._tag, self._config

        def look() -> tuple[CheckpointInfo | None, list[str]]:
            try:
                return find_checkpoint(self._load_dir, tag, self._prefer_universal, config.trust_pickle), []
            except NotFoundError:
                # where DeepSpeed's own loader returns without a checkpoint: scripts that start a run rely on it
                asks = self._prefer_universal or config.mode == "require" or config.on_damage != "error"
                latest = (os.path.join(self._load_dir, name) for name in (LATEST, LATEST_UNIVERSAL))
                if tag is not None or asks or any(map(os.path.lexists, latest)):
                    raise
                return None, list_tags(self._load_dir)

        while True:
            found, tags = distributed.broadcast("look for a checkpoint", look)
            expected = bool(tags) or tag is not None or config.mode == "require"
            if found is not None or not expected or not self._wait("there is no checkpoint yet"):
                break
        if tags and distributed.rank() == 0:
            where = f"load_checkpoint({self._load_dir!r}, tag={tags[0]!r})"
            message = "elastic_ckpt loads nothing: no file %r is in %s, which has checkpoints under the tags %s: %s"
            logger.warning(message, LATEST, self._load_dir, shortened(tags), where)
        if found is not None and self._engine.use_node_local_storage():  # each rank has a load_dir of its own
            return replace(found, folder=os.path.abspath(os.path.join(self._load_dir, found.tag)))
        return found

    def will_overwrite(self, ready: Prepared) -> None:
        """Note what a load restores. Collective if a failed one has left its values in the engine.

        Raises:
            MismatchError: this one would not replace all of them; the same on every rank.
        """
        before, self._restoring = self._restoring, _restored(ready)
        if self.partly_overwritten:
            with distributed.agree("compare the checkpoint with the damaged one"):
                if left := before - self._restoring:
                    problem = "an older checkpoint does not replace all that the damaged one has left in the engine"
                    names = listed({" of ".join(filter(None, item)) for item in left})
                    file, expected = ready.found.folder, "what the damaged checkpoint holds"
                    remedy = "start the job again, and load this checkpoint by its tag"
                    raise MismatchError(problem, parameter=names, file=file, expected=expected, remedy=remedy)

    def recover(self, error: ElasticCkptError, found: CheckpointInfo | None) -> bool:
        """Whether there is something else to try after an error. Collective.

        Raises :class:`PartialLoadError` if not, and an earlier attempt has overwritten the engine.
        """
        partly = isinstance(error, PartialLoadError)
        self.partly_overwritten |= partly
        cause = error.__cause__ if partly else error
        missing = isinstance(cause, NotFoundError) and found is None
        if isinstance(cause, DamagedError) or missing:
            assert isinstance(cause, ElasticCkptError)
            again = not partly or isinstance(cause, SavedOverError)  # which the new save replaces
            if again and self._older is None and self._wait(cause.problem):
                return True
            if self._config.on_damage != "error" and not (missing and self._tag is not None):
                why_not = self._fall_back(cause, found)
                if why_not is None:
                    return True
                error.remedy = f"{error.remedy}; {why_not}" if error.remedy else why_not
        if self.partly_overwritten and not partly:
            raise as_partial_load_error(error) from error
        return False

    def _wait(self, why: str) -> bool:
        """Whether time is left to wait for files; rank 0 has spent some of it. Collective."""
        if not self._config.wait_for_files:
            return False

        def sleep() -> bool:
            pause = min(self._pause, self._deadline - time.monotonic())
            if pause <= 0:
                return False
            if self._pause == _FIRST_PAUSE:
                logger.warning("elastic_ckpt waits up to %g s for files: %s", self._config.wait_for_files, why)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            time.sleep(pause)
            return True

        return distributed.broadcast("wait for files", sleep)

    def _fall_back(self, cause: ElasticCkptError, found: CheckpointInfo | None) -> str | None:
        """Take the newest older checkpoint for the next attempt; or why there is none. Collective."""
        damaged = found.folder if found is not None else cause.file or self._load_dir
        where = f" ({', '.join(filter(None, (cause.parameter, cause.file)))})"
        skipped = f"skipped {os.path.basename(damaged)}: {cause.problem}{where}"
        choice = distributed.broadcast("look for an older checkpoint", lambda: self._choose(damaged, found))
        self._older, self._steps, why = choice
        if self._older is None:
            return "; ".join((why, *self._skipped))
        if distributed.rank() == 0:
            logger.warning("elastic_ckpt %s; %s", skipped, why)
        self._skipped = (*self._skipped, skipped)
        self._older = replace(self._older, notes=(*self._skipped, why))
        return None

    def _choose(self, damaged: str, found: CheckpointInfo | None) -> tuple[CheckpointInfo | None, tuple[int, ...], str]:
        """The newest older checkpoint, all steps so far, and in words how old it is or why there is none. Local."""
        load_dir, trust, steps = self._load_dir, self._config.trust_pickle, self._steps
        limit = self._config.on_damage if isinstance(self._config.on_damage, int) else None
        if not steps:
            step = step_of_tag(os.path.basename(damaged)) if found is None else global_steps(found, trust)
            steps = () if step is None else (step,)
        if not steps and (limit is not None or self._tag is not None):
            return None, (), "which checkpoints are older is not known, since no file of this one tells its step"
        others = [(global_steps(each, trust), each) for each in list_checkpoints(load_dir) if each.folder != damaged]
        notes = [f"{each.tag} is left out, since no file tells its step" for step, each in others if step is None]
        older = [(step, each) for step, each in others if step is not None and (not steps or step < steps[-1])]
        if not older:
            around = os.path.dirname(os.path.abspath(load_dir))
            why = f"no older checkpoint is in {load_dir} (elastic-ckpt latest {around} looks beside it)"
            return None, (), "; ".join((why, *notes))
        step, newest = max(older, key=lambda each: (each[0], each[1].by_rank, each[1].tag))
        back = f"{steps[0] - step} steps back" if steps else f"at step {step}"
        if limit is not None and steps[0] - step > limit:
            return None, (), f'the newest older checkpoint, {newest.tag}, is {back}, "on_damage" allows {limit}'
        return newest, (*steps, step), "; ".join((f"loaded {newest.tag} instead, {back}", *notes))


def _restored(ready: Prepared) -> frozenset[tuple[str, str]]:
    """Roles and names of everything that a load takes from the checkpoint on this rank."""
    saved = ready.checkpoint.training_state
    others = [key for key in ("random_ltd", "data_sampler") if saved.checkpoint.get(key) is not None]
    others += [f"{saved.loss_scale and saved.loss_scale.kind} loss scale", *["lr scheduler"] * ready.runs_code]
    outcomes = [outcome for outcome in ready.plan.outcomes if outcome.what == "restored"]
    return frozenset({(outcome.role, name) for outcome in outcomes for name in outcome.names or ("",)}).union(
        (role, "") for role in others
    )
