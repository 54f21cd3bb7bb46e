"""What is wrong with the optimizer states of a checkpoint, whatever the live engine: damaged, unknown, or missing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from elastic_ckpt.core.metadata import MASTER, CheckpointMetadata
from elastic_ckpt.core.state_kinds import (
    MOMENTS,
)
from elastic_ckpt.core.text import NamesText, whole_text
from elastic_ckpt.errors import (
    BY_DEEPSPEED,
    MADE_ANEW,
    WITHOUT_STATES,
    DamagedError,
    Remedy,
    UnsupportedError,
    listed,
)

RESTORE = Remedy("restore the missing files, or use another tag"), WITHOUT_STATES


def state_errors(metadata: CheckpointMetadata) -> Iterator[DamagedError | UnsupportedError]:
    """An error for files that are missing, for each damaged state, and for each of unknown layout."""
    if (missing := missing_files(metadata)) is not None:
        yield missing
    for key, description in metadata.states.damaged.items() if missing is None else ():
        problem = f"optimizer state {key!r} does not have the scales or the quantization map that its codes need"
        expected = "one scale for each block of 256 or 2048 elements, and one map of 256 ascending values in all files"
        if key in MOMENTS:
            problem = f"optimizer state {key!r} does not have the shape or the dtype of a moment"
            expected = (
                "one real number for each element of its partition, or the shape of the parameter's other moments"
            )
        yield metadata.error(DamagedError, problem, key, expected, description, RESTORE)
    for key, description in metadata.states.opaque.items() if missing is None else ():
        problem = f"optimizer state {key!r} has a layout that cannot be resharded"
        expected = "one value per element of the partition, one per tensor, or a tensor that all ranks share"
        # of whole tensors, no declaration settles what another state is
        foreign = metadata.source.foreign
        fresh = Remedy("leaves it out", when=MADE_ANEW, config={"states": {key: "fresh"}})
        kinds = {"replicated": "one tensor that all ranks share", "elementwise": "a value for each element"}
        declared = (Remedy(when=f"if it is {kind}", config={"states": {key: word}}) for word, kind in kinds.items())
        remedy = (fresh,) if foreign else (*declared, fresh, BY_DEEPSPEED)
        yield metadata.error(UnsupportedError, problem, key, expected, description, (*remedy, WITHOUT_STATES))


def missing_files(metadata: CheckpointMetadata) -> DamagedError | None:
    """The error for files that a universal checkpoint lacks, which explain what else looks damaged or unknown."""
    if not (missing := metadata.states.missing):
        return None
    texts = [path + " of " + listed(names) if names else path for path, names in missing.items()]
    expected = NamesText("; ".join(texts), "; ".join(map(whole_text, texts)))
    (first, names) = next(iter(missing.items()))
    every = sorted({*chain(*missing.values())})
    are_several = len(missing) > 1 or len(every) > 1
    problem = (
        f"{'files of the universal checkpoint are' if are_several else 'a file of the universal checkpoint is'} missing"
    )
    remedy = [Remedy("restore what is missing"), Remedy("convert the native checkpoint again")]
    if not any(path.endswith(f"/{MASTER}.pt") for path in missing):
        remedy.append(WITHOUT_STATES)
    path = f"{metadata.source.folder}/{first.replace('*', names[0]) if names else first}"
    parameter = every or None
    return DamagedError(problem, path, expected, "none", parameter=parameter, remedy=remedy)


def refuse_missing_files(metadata: CheckpointMetadata) -> None:
    """Raise :func:`missing_files`."""
    if (error := missing_files(metadata)) is not None:
        raise error


def refuse_damaged_states(metadata: CheckpointMetadata) -> None:
    """Raise the first of :func:`state_errors` that is damage."""
    for error in state_errors(metadata):
        if isinstance(error, DamagedError):
            raise error


def refuse_unreadable_states(metadata: CheckpointMetadata) -> None:
    """Refuse :func:`state_errors`, and groups with states of some members: if partitioned, all have them or none."""
    for error in state_errors(metadata):
        raise error
    stateful = metadata.keys_by_name
    if metadata.source.zero_stage == 0 or metadata.parameters.keys() <= stateful.keys():
        return
    with_state = {metadata.parameters[name].group for name in stateful if name in metadata.parameters}
    for name, saved in metadata.parameters.items():
        if saved.group in with_state and name not in stateful:
            problem = "the checkpoint holds no optimizer state of this parameter, but of others in its param group"
            expected = listed(metadata.state_keys) + " and step"
            raise metadata.error(DamagedError, problem, name, expected, "none", RESTORE)
