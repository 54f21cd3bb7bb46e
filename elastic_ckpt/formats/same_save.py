"""Checks whether a checkpoint's model-states files and optimizer shards belong to the same save.

A job that dies while it overwrites a tag leaves model-states files of one step beside optimizer shards of another: what
an optimizer and a loss scaler have counted shows it. A shard of another run may have the same shapes and counts.
ZeRO-1/2 saves the low-precision weights whole in the model-states file, and DeepSpeed always makes them by rounding the
fp32 masters, so a few elements of each shard, rounded, must equal them. ZeRO-3 saves none: only counts are compared.

Counts are not those of the counters after a reset, or where the run began elsewhere. How far they are apart then stays
the same. Param groups that were added during the run have counted less, and where something else than ``engine.step``
steps, as in Lightning Fabric, the counters stand still and tell nothing. So a difference is a suspicion, not a proof.
That counters stood still is told by an optimizer that is further, by as many steps in all groups on all ranks, two or
more, where the engine steps no schedule: DeepSpeed writes model-states files first, so that a save which is cut short
leaves optimizer states behind the counters, or ranks apart.
Saves under elastic_ckpt state it (``elastic_ckpt.engines.compat.recorded_counts``), so that two of them differ again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Any

from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, CheckpointMetadata
from elastic_ckpt.core.text import counted
from elastic_ckpt.core.values import WITHIN_STEP, RecordedCounts, numbers
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, MismatchError, MixedSavesError, Remedy, UnsupportedError
from elastic_ckpt.formats.model_states import PLAIN, ModelShard
from elastic_ckpt.formats.torch_archive.tensors import TensorRef
from elastic_ckpt.formats.values import agrees_when_rounded, to_numbers
from elastic_ckpt.storage import open_stream

_NO_STEP_WHEN_BUILT = (0, 13, 5)  # from this release on, ZeRO's optimizers do not step once when they are built
#: Error, problem and remedy where masters are not those of their weights.
_OTHER_RUN = (
    MixedSavesError,
    "the fp32 masters in this file are not those of the weights saved beside it",
    (
        Remedy("use another tag", when="if the file is of another run, or the save was made within an optimizer step"),
        Remedy(when="if weights were changed by hand before the save", config={"verify": "bytes"}),
    ),
)
_OTHER_ORDER = (
    MismatchError,
    "without ZeRO, DeepSpeed saves masters without names, and this parameter's are not those of its weights",
    Remedy(
        "build the live param groups with the parameters of the saved ones, in their order; if they are, the file is "
        "damaged: use another tag"
    ),
)
#: Elements of a parameter that are compared in each file.
_ELEMENTS = 16
#: Parameters that are compared in each file.
_PARAMETERS = 8


def with_progress_compared(
    metadata: CheckpointMetadata, model: ModelShard, check_shards: bool, scalers: Sequence[Any] = ()
) -> CheckpointMetadata:
    """The metadata, with a note if the optimizer has not counted the steps of the counters, as after a reset.

    It is a warning if the counters are at 0.

    ``scalers``: the loss scaler of each model-parallel rank, if the states are in other files than the counters. Raises
    :class:`MixedSavesError` with ``check_shards`` if files of two saves may be mixed: counts are one apart or, under
    ZeRO-3 where no weights tell, any number, and nothing in the files explains it.
    """
    kind = PLAIN if model.optimizer is None else model.optimizer.kind
    counted = int(model.counters["global_steps"])
    skipped = int(model.counters["skipped_steps"])
    flats = _optimizer_steps(metadata, counted - skipped)
    if not metadata.source.by_rank:  # of a universal checkpoint each parameter has files of its own
        flats = frozenset({frozenset(chain.from_iterable(flats))} if flats else ())
    exact = metadata.source.zero_stage == 3
    recorded = model.counts
    has_schedule = model.has_schedule
    ahead = 0.0
    if not (exact and _counts_in_groups(metadata)):  # where what a step adds is not known
        ahead = _stood_still(counted, skipped, flats, scalers, recorded, has_schedule)
    odd_steps, why = compare_counts(
        counted, skipped, flats, scalers, model.ds_version, recorded, exact, kind, has_schedule, ahead > 0
    )
    # Prodigy and D-Adaptation (d0) find their rate themselves, and count no step of rate zero
    counts_all = not any({"d", "d0"} & group.keys() for group in metadata.groups)
    if why is not None and scalers and check_shards and counts_all:
        problem = "optimizer states and counters are of different steps: files of two saves may be mixed in this folder"
        explained = "if the optimizer was reset during the run, or the run began without ZeRO in fp16 or bf16, or with "
        explained += "DeepSpeed before 0.13, which explains it"
        another = Remedy("use another tag", when="if files are of two saves, or the save was made within a step")
        remedy = another, Remedy(when=explained, config={"verify": "bytes"})
        raise MixedSavesError(problem, model.path, *why, remedy=remedy)
    not_counted = steps_not_counted(metadata, model.counters)
    if not odd_steps and not (recorded.at_save and not_counted):
        return metadata
    found = f"at step {_shown(chain.from_iterable(flats))}, counters at {counted - skipped}"
    if not odd_steps:
        reason = "something other than engine.step has stepped, as in Lightning Fabric"
        return replace(metadata, notes=(*metadata.notes, f"optimizer states are {found}: {reason}"))
    if not counted or ahead:  # of an unfinished save over an older one, too: a user has to know
        reason = "no step was counted" if not counted else f"no engine.step has counted the last {ahead:g}"
        reason += ", as where something other than engine.step steps (Lightning Fabric); if that is not so here, the "
        reason += "model-states files are of an older save"
        return replace(metadata, warnings=(*metadata.warnings, f"optimizer states are {found}: {reason}"))
    if counts_all and _only_began_later(counted - skipped, flats):
        reason = "parameters were added during the run"
    else:
        reason = "as after a reset of the optimizer"
    note = f"optimizer states are {found}: {reason}"
    return replace(metadata, notes=(*metadata.notes, note))


def refuse_within_step(models: Sequence[ModelShard], check_shards: bool) -> None:
    """Raise :class:`MixedSavesError` with ``check_shards`` if a save states that an optimizer was amid a step."""
    torn = [model for model in models if model.counts.within_step]
    if not torn or not check_shards:
        return
    raise MixedSavesError(
        "this was saved within a step of the optimizer, as by a signal handler: some parameters may have stepped and "
        "others not",
        torn[0].path,
        "a save after engine.step() has returned",
        f"{WITHIN_STEP!r} in {counted(len(torn), 'model-states file')}, as the save has recorded",
        remedy=(
            Remedy("use another tag"),
            Remedy("loads it as it is", when="if a step that is half done is good enough", config={"verify": "bytes"}),
        ),
    )


def steps_not_counted(metadata: CheckpointMetadata, counters: Mapping[str, Any]) -> int:
    """Steps of the optimizer that the counters have not counted; one that it took when it was built is no such step."""
    counted = int(counters["global_steps"]) - int(counters["skipped_steps"])
    ahead = max(chain.from_iterable(_optimizer_steps(metadata, counted)), default=0) - counted
    return int(ahead) if ahead > bool(counted) else 0


def _optimizer_steps(metadata: CheckpointMetadata, expected: int) -> frozenset[frozenset[float]]:
    """The steps that parameters have counted: those of all ranks, for each flat tensor that has a count."""
    counts = set[frozenset[float]]()
    for saved in metadata.parameters.values():
        counted = numbers(dict(saved.scalars).get("step"))
        counts.add(frozenset(step for step in counted if isfinite(step)))  # others are read where no state is restored
    steps = counts - {frozenset()}
    if expected == 1 and not steps and not metadata.state_keys and any("betas" in group for group in metadata.groups):
        return frozenset({frozenset({0.0})})  # of an optimizer that counts, but has not begun
    if metadata.source.zero_stage == 3 and _counts_in_groups(metadata):
        # a step that is kept in the group counts each of its sub-groups
        multiples = (frozenset(step for step in each if not expected or step % expected) for each in steps)
        steps = {each for each in multiples if each}
    return frozenset(steps)


def _counts_in_groups(metadata: CheckpointMetadata) -> bool:
    """Whether the optimizer keeps its step in param groups, as apex's and DeepSpeed's FusedAdam."""
    return any("bias_correction" in group for group in metadata.groups)


def _only_began_later(expected: int, flats: Collection[Collection[float]]) -> bool:
    """Whether a flat tensor has counted all steps, on all ranks, and others less: those of groups that were added."""
    furthest = max(chain.from_iterable(flats), default=None)
    return furthest == expected and {expected} in [set(steps) for steps in flats]


def compare_counts(
    counted: int,
    skipped: int,
    flats: Collection[Collection[float]],
    scalers: Sequence[Any],
    ds_version: str,
    recorded: RecordedCounts,
    exact: bool,
    kind: str = PLAIN,
    has_schedule: bool = False,
    stood_still: bool = False,
) -> tuple[set[float], tuple[str, str] | None]:
    """By how many steps the optimizer is ahead, where nothing explains it; and how files may be of two saves.

    The latter is what was expected and found; ``exact``: of any two saves, not of neighbours. ``counted`` and
    ``skipped`` are the counters of the model-states files, ``flats`` what the optimizer has counted of each flat tensor
    on any rank, ``scalers`` loss scalers if its states are in other files. ``kind`` is that of an optimizer without
    ZeRO. ``stood_still``: whether the run has left the counters standing, as far as is known.
    """
    expected = counted - skipped
    steps = set(chain.from_iterable(flats))
    scaled = _scaled_steps(scalers)
    step = {0}
    if kind != PLAIN:  # FP16_Optimizer and FP16_UnfusedOptimizer step once when they are built
        step = {1} if scalers else {0, 1}
    elif () < tuple(map(int, re.findall(r"\d{1,9}", ds_version)[:3])) < _NO_STEP_WHEN_BUILT:
        step = {0, 1}
    explained: Mapping[str, Set[int]] = {"step": step, "cur_iter": {0}, **recorded.ahead}
    odd_steps = {each - expected for each in steps} - set(explained["step"])
    odd = {each - counted for each in scaled} - set(explained["cur_iter"])
    if not counted and not recorded.at_save and (recorded.ahead or not has_schedule):
        return odd_steps, None  # no step has touched the counters; nothing shows that one would
    exact = exact and (counted > 0 or recorded.at_save)
    near, near_steps = (  # one step apart from a count that is explained
        any(not explained[key].isdisjoint((each - 1, each + 1)) for each in found)
        for key, found in (("cur_iter", odd), ("step", odd_steps))
    )
    if near:
        return odd_steps, (f"a loss scaler at step {counted}, from global_steps", f"at step {_shown(scaled)}")
    if "step" not in recorded.ahead and _only_began_later(expected, flats):
        return odd_steps, None
    if stood_still:
        return odd_steps, None
    # a scaler counts the steps that overflow, too: where it agrees, all files are of one save
    if (odd or not scaled) and (near_steps or (exact and odd_steps)):
        wanted = f"optimizer step {expected}, from global_steps and skipped_steps, which only engine.step counts"
        return odd_steps, (wanted, f"optimizer step {_shown(steps)}")
    return odd_steps, None


def _scaled_steps(scalers: Sequence[Any]) -> set[int]:
    """The steps that dynamic loss scalers have counted, overflows included."""
    saved = (each if isinstance(each, Mapping) else getattr(each, "__dict__", {}) for each in scalers)
    dynamic = (values for values in saved if values.get("dynamic_loss_scale", values.get("dynamic")))
    return {values["cur_iter"] for values in dynamic if isinstance(values.get("cur_iter"), int)}


def _stood_still(
    counted: int,
    skipped: int,
    flats: Collection[Collection[float]],
    scalers: Sequence[Any],
    recorded: RecordedCounts,
    has_schedule: bool,
) -> float:
    """Steps that the optimizer has taken while the counters stood still; 0 where that is not told, or contradicted.

    One step may be that of a save within ``engine.step``. A schedule of the engine, and a record of elastic_ckpt, would
    tell; a loss scaler counts at least what the optimizer does.
    """
    counts = set(chain.from_iterable(flats))
    if len(counts) != 1 or not counted or recorded.at_save or recorded.ahead or has_schedule:
        return 0.0
    ahead = max(counts) - (counted - skipped)
    scaled = _scaled_steps(scalers)
    return ahead if ahead > 1 and all(each - counted >= ahead for each in scaled) else 0.0


def _shown(steps: Iterable[float]) -> str:
    return ", ".join(f"{step:g}" for step in sorted(set(steps)))


def spot_check(
    metadata: CheckpointMetadata, path: str, weights: Mapping[str, TensorRef], files: Collection[int]
) -> None:
    """Compare a few masters in each of some files with the low-precision weights saved beside them. Local.

    ``files`` are indices in ``metadata.files``, ``weights`` the entries of ``path`` by parameter: none under ZeRO-3.
    Raises :class:`MixedSavesError`; without ZeRO, where parameters are matched by order, :class:`MismatchError`.
    """
    checked: Counter[int] = Counter()
    # without partitions, values also prove which parameter is which: compare all of them
    most = _PARAMETERS if metadata.source.zero_stage else len(metadata.parameters)
    for name, weight in weights.items():
        tensor = metadata.tensors.get((name, MASTER)) if name in metadata.parameters else None
        if tensor is None or weight.shape != tensor.shape:
            continue
        for chunk in tensor.chunks_in(files):
            if checked[chunk.file] >= most or not weight.is_contiguous:
                continue
            checked[chunk.file] += 1
            count = min(_ELEMENTS, chunk.range.numel)
            start = chunk.range.start
            file = metadata.files[chunk.file].path
            masters = _read(file, chunk.byte_offset, count, tensor.dtype)
            saved = _read(path, weight.byte_offset + start * ITEMSIZE[weight.dtype], count, weight.dtype)
            if agrees_when_rounded(masters, saved, weight.dtype):
                continue
            if any(group.get("train_mode") is False for group in metadata.groups):
                problem = "a schedule-free optimizer was in evaluation mode when this was saved: its masters are not "
                problem += "those of the weights, which is not supported"
                both = "train_mode: True in the param groups", "train_mode: False"
                saved_in_training = Remedy("call optimizer.train() before saving")
                ways = saved_in_training, AT_ITS_TOPOLOGY
                raise UnsupportedError(problem, file, *both, parameter=name, remedy=ways)
            is_partitioned = metadata.source.zero_stage > 0
            error, problem, remedy = _OTHER_RUN if is_partitioned else _OTHER_ORDER
            where = f" from element {start} on, as in {path}" if is_partitioned else ""
            expected, found = (", ".join(f"{value:.5g}" for value in each[:4].tolist()) for each in (saved, masters))
            raise error(problem, file, f"{expected} ...{where}", f"{found} ...", parameter=name, remedy=remedy)


def _read(path: str, offset: int, numel: int, dtype: str) -> Any:
    with open_stream(path) as stream:
        stream.seek(offset)
        return to_numbers(dtype, stream.read(numel * ITEMSIZE[dtype]))
