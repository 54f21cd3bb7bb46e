"""Reads a checkpoint's metadata: who opens which file, and how ranks share what they have read, for all formats."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt import distributed
from elastic_ckpt.core.training_state import TrainingState
from elastic_ckpt.formats import READERS, Checkpoint, CheckpointInfo, MetadataOptions
from elastic_ckpt.formats.base import Fitted, Format, refuse_unsupported_folder
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.load.exchange import file_opener, opener_of, read_my_share

#: Position of what has a rank's training state; and from its reader, if all ranks want it, that state.
Wanted = tuple[int, bytes | None]


def read_checkpoint(found: CheckpointInfo, options: MetadataOptions) -> Checkpoint:
    """Read a checkpoint's metadata. Collective: all ranks raise the same :class:`ElasticCkptError`."""
    reader, looking = READERS[found.format], "look at the checkpoint's files"
    if not isinstance(reader, Format):
        return reader(found, options)
    with distributed.deterministic(looking):  # at their names, as rank 0 has found them
        refuse_unsupported_folder(found)
        survey = reader.survey(found, options)
    surveyed = None if survey is None else distributed.broadcast(looking, survey)
    with distributed.deterministic(looking):
        reading = reader.reading(found, options, surveyed)
    opened: dict[str, PickledFile] = {}
    open_one = file_opener(options, opened)
    records = read_my_share(reading.count, lambda position: reading.read(position, open_one))
    shared: list[SharedState] = []

    def fit() -> Wanted:
        shared.append(SharedState(reading.fit(records, opened)))
        return shared[0].wanted()

    everybody = distributed.all_gather("fit the checkpoint's files together", fit)
    fitted, me = shared[0].fitted, distributed.rank()
    state = shared[0].exchanged(everybody) if fitted.state is None else fitted.state
    mine = sum(opener_of(position) == me for position in range(reading.count))
    return Checkpoint(fitted.metadata, state, fitted.model_path, len(opened) or mine)


class SharedState:
    """Gives each rank the training state that it wants, whichever rank has read it."""

    def __init__(self, fitted: Fitted) -> None:
        self.fitted = fitted
        self._known: dict[int, TrainingState] = {}

    def wanted(self) -> Wanted:
        """What this rank wants. Local."""
        position, me = self.fitted.position, distributed.rank()
        state = self._read(position) if self.fitted.state is None and opener_of(position) == me else None
        sends = state is not None and self.fitted.for_all and distributed.world_size() > 1
        return position, distributed.pack(state) if sends else None

    def exchanged(self, everybody: Sequence[Wanted]) -> TrainingState:
        """The training state that this rank wants, given what each rank wants. Collective if any rank lacks its own."""
        packed = {position: state for position, state in everybody if state is not None}
        by_others = {position for rank, (position, _) in enumerate(everybody) if opener_of(position) != rank}
        lacking = by_others - packed.keys()
        if lacking:  # the same on all ranks

            def read() -> dict[int, bytes]:
                mine = sorted(at for at in lacking if opener_of(at) == distributed.rank())
                return {at: distributed.pack(self._read(at)) for at in mine}

            for part in distributed.all_gather("read counters, scheduler and client state", read):
                packed.update(part)
        own = self.fitted.position
        return self._known[own] if own in self._known else distributed.unpack(packed[own])

    def _read(self, position: int) -> TrainingState:
        if position not in self._known:
            assert self.fitted.read_state is not None
            self._known[position] = self.fitted.read_state(position)
        return self._known[position]
