"""Which checkpoint of a folder a load tries: the newest, files that appear late, after damage the newest older one."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from elastic_ckpt import distributed, errors
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.formats import CheckpointInfo, detect
from elastic_ckpt.load.flow import LoadCall, Prepared, as_partial_load_error
from elastic_ckpt.load.nodes import Nodes
from elastic_ckpt.load.older import Older, Tried, choose_older
from elastic_ckpt.storage import exists

logger = logger_of(__name__)
#: Seconds between two looks for files, at first and at most.
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 5.0


class RetryPolicy:
    """The checkpoints that one call of ``load_checkpoint`` tries, one after another.

    Rank 0 looks and decides; the others wait for its message, a few seconds at most at a time. ``prefer_universal``:
    see :func:`elastic_ckpt.formats.detect.find_checkpoint`.
    """

    def __init__(self, call: LoadCall, prefer_universal: bool) -> None:
        self._load_dir = os.fspath(call.arguments.load_dir) or os.curdir
        self._engine = call.engine
        self._tag = call.arguments.tag
        self._config = call.config
        self._prefer_universal = prefer_universal
        #: Whether the user asks for a checkpoint: there has to be one, and a lone one needs no ``latest`` file.
        self.is_asked = prefer_universal or call.config.mode == "require"
        self._deadline = time.monotonic() + call.config.wait_for_files
        self._pause = _FIRST_PAUSE
        every_tag = call.config.on_damage != "error"
        folders = (self._load_dir, *call.config.fallback_dirs)
        own_disks = bool(call.engine.use_node_local_storage())
        options = call.config.storage_options
        tag = None if call.arguments.tag is None else str(call.arguments.tag)  # numbers are tags, too
        self.nodes = Nodes(folders, tag, every_tag, own_disks, options)
        self._older: Older | None = None  # than the damaged ones so far: what is tried now
        self._skipped: tuple[str, ...] = ()  # these, and why
        self._restoring: set[tuple[str, str]] = set()  # roles and names that the last attempt takes on this rank
        self.partly_overwritten = False

    def find(self) -> CheckpointInfo | None:
        """The checkpoint to try next. Collective."""
        if (older := self._older) is not None and older.found is not None:
            # whose files are listed anew: of other copies
            self.nodes.look("look for an older checkpoint", lambda: None)
            instead = f"loaded {older.found.tag} instead, {older.why}"
            return replace(older.found, notes=(*self._skipped, instead, *older.notes, *self.nodes.notes))
        tag = self._tag
        config = self._config

        def look() -> tuple[CheckpointInfo | None, list[str]]:
            options = (self._prefer_universal, config.trust_pickle, self.is_asked)
            try:
                return detect.find_checkpoint(self._load_dir, tag, *options), []
            except errors.NotFoundError:
                # where DeepSpeed's own loader returns without a checkpoint: scripts that start a run rely on it
                asks = self.is_asked or config.on_damage != "error"
                latest = (os.path.join(self._load_dir, name) for name in (detect.LATEST, detect.LATEST_UNIVERSAL))
                if tag is not None or asks or any(map(exists, latest)):
                    raise
                if detect.look_at(self._load_dir, "") is not None:  # a run that is resumed with another path in mind
                    raise
                return None, detect.list_tags(self._load_dir)

        while True:
            found, tags = self.nodes.look("look for a checkpoint", look)
            expected = bool(tags) or tag is not None or self.is_asked
            if found is not None or not expected or not self._wait("there is no checkpoint yet"):
                break
        if found is None and not expected and distributed.rank() == 0:
            logger.warning("elastic_ckpt loads nothing: there is no checkpoint in %s", self._load_dir)
        if tags and distributed.rank() == 0:
            where = f"load_checkpoint({self._load_dir!r}, tag={tags[0]!r})"
            message = "elastic_ckpt loads nothing: no file %r is in %s, which has checkpoints under the tags %s: %s"
            logger.warning(message, detect.LATEST, self._load_dir, errors.shortened(tags), where)
        view = self.nodes.view
        if found is not None and view is not None:
            return replace(found, notes=(*found.notes, f"files: {view.summary(found.folder)}", *self.nodes.notes))
        if found is not None and self._engine.use_node_local_storage():  # each rank has a load_dir of its own
            return replace(found, folder=os.path.abspath(os.path.join(self._load_dir, found.tag)))
        return found

    def will_overwrite(self, ready: Prepared) -> None:
        """Note what a load restores. Collective if a failed one has left its values in the engine.

        Raises the same :class:`MismatchError` on every rank if this one would not replace all of them.
        """
        saved = ready.checkpoint.training_state
        outcomes = ready.plan.outcomes
        roles = [key for key in ("random_ltd", "data_sampler") if saved.checkpoint.get(key) is not None]
        roles += [f"{saved.loss_scale and saved.loss_scale.kind} loss scale", *["lr scheduler"] * ready.runs_code]
        restored = {(each.role, name) for each in outcomes if each.what == "restored" for name in each.names or ("",)}
        before = self._restoring
        self._restoring = restored | {(role, "") for role in roles}
        if self.partly_overwritten:
            with distributed.agree("compare the checkpoint with the damaged one"):
                if left := before - self._restoring:
                    problem = "an older checkpoint does not replace all that the damaged one has left in the engine"
                    names = errors.listed({" of ".join(filter(None, item)) for item in left})
                    file = ready.found.folder
                    expected = "what the damaged checkpoint holds"
                    remedy = "start the job again, and load this checkpoint by its tag"
                    raise errors.MismatchError(problem, file, expected, parameter=names, remedy=remedy)

    def recover(self, error: errors.ElasticCkptError, found: CheckpointInfo | None) -> bool:
        """Whether there is something else to try after an error. Collective.

        Raises :class:`PartialLoadError` if not, and an earlier attempt has overwritten the engine.
        """
        partly = isinstance(error, errors.PartialLoadError)
        self.partly_overwritten |= partly
        cause = error.__cause__ if partly else error
        missing = isinstance(cause, errors.NotFoundError) and found is None
        if isinstance(cause, errors.DamagedError) or missing:
            assert isinstance(cause, errors.ElasticCkptError)
            if self.nodes.view is not None:
                seen = f"files on all nodes: {self.nodes.view.summary(found.folder if found else self.nodes.view.root)}"
                error.remarks += (seen,)
            moved = isinstance(cause, errors.SavedOverError)
            is_final = moved or isinstance(cause, errors.ConflictingCopiesError)
            if not is_final and (other := self.nodes.take_other_copies(cause.file)) is not None:
                if distributed.rank() == 0:
                    logger.warning("elastic_ckpt: %s; %s", cause.problem, other)
                return True
            again = not partly or moved  # which the new save replaces
            if again and self._older is None and self._wait(cause.problem):
                return True
            if self._config.on_damage != "error" and not (missing or cause.proves_damage):
                error.remarks += ('"on_damage" goes back only for proven damage',)
            elif self._config.on_damage != "error" and not (missing and self._tag is not None):
                why_not = self._fall_back(cause, found)
                if why_not is None:
                    return True
                error.remarks += (why_not,)
        error.remarks += self._skipped
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

    def _fall_back(self, cause: errors.ElasticCkptError, found: CheckpointInfo | None) -> str | None:
        """Take the newest older checkpoint for the next attempt; or why there is none. Collective."""
        damaged = found.folder if found is not None else cause.file or self._load_dir
        where = ", ".join(filter(None, (cause.parameter, cause.file)))
        skipped = f"skipped {os.path.basename(damaged)}: {cause.problem}" + (f" ({where})" if where else "")
        of_first = self._older.tried if self._older is not None else ()
        tried = (*of_first, Tried(damaged, None if self._older is None else self._older.save))
        limit = self._config.on_damage if isinstance(self._config.on_damage, int) else None
        by_tag = self._tag is not None
        trust = self._config.trust_pickle

        def choose() -> Older:
            return choose_older(self._load_dir, tried, found, limit, by_tag, trust)

        older = distributed.broadcast("look for an older checkpoint", choose)
        if older.found is None:
            return "; ".join((older.why, *older.notes))
        if distributed.rank() == 0:
            logger.warning("elastic_ckpt %s; next: %s, %s", skipped, older.found.tag, older.why)
        self._older = older
        self._skipped = (*self._skipped, skipped)
        return None

    def report_loss(self) -> None:
        """Log on rank 0 which steps are lost, after a load that went back."""
        older = self._older
        if older is not None and older.found is not None and distributed.rank() == 0:
            message = "elastic_ckpt loaded %s instead of %s, %s: %s"
            first = os.path.basename(older.tried[0].folder)
            logger.error(message, older.found.tag, first, "; ".join((older.why, *older.notes)), older.lost)
