"""Are the files that DeepSpeed's own loader would read of one save, and of the sizes of the live engine?

Asked where elastic_ckpt does not understand a folder: DeepSpeed gives each rank its own files by position and checks
next to nothing, so it is right only for a folder that is whole and has the live engine's layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.engines.compat import flat_master_numels, has_optimizer
from elastic_ckpt.formats import Found
from elastic_ckpt.formats.features import base_groups
from elastic_ckpt.formats.model_states import COUNTERS
from elastic_ckpt.formats.pickled import PickledFile, TensorRef, materialise
from elastic_ckpt.load.own_files import open_any


def one_save(engine: Any, found: Found, partitions: int, check_sizes: bool) -> tuple[Any, ...] | None:
    """Which save the files of a native checkpoint are of: what it counted, and DeepSpeed's version. Local.

    Args:
        engine: the live engine, whose model-parallel rank's files are looked at.
        found: the folder.
        partitions: of how many data-parallel ranks there must be files.
        check_sizes: whether partitions must have the live sizes, and states be of the step that the counters say; if
            not, states must be of one step all the same.

    Returns:
        ``None`` where some are missing, they are not of one save, or not of the live sizes.
    """
    mp, files = engine.checkpoint_mp_rank, found.files
    models = [name for at, name in files.model.items() if at == mp]
    models += [name for (_, at), name in sorted(files.model_zero3.items()) if at == mp]
    optimizers = [name for (_, at), name in sorted(files.optimizer.items()) if at == mp]
    needed = partitions if engine.zero_optimization_stage() and has_optimizer(engine) else len(optimizers)
    if files.clashes or len(optimizers) != needed:
        return None
    if not models or (files.model_zero3 and len(models) != len(optimizers)):
        return None
    opened = [open_any(found.path(name)) for name in models]
    states = [open_any(found.path(name)) for name in optimizers]
    counters = [tuple(file.tree.get(key) for key in COUNTERS) for file in opened]
    versions = [file.tree["ds_version"] for file in (*opened, *states) if "ds_version" in file.tree]
    if len({*counters}) > 1 or len({*versions}) > 1 or counters[0][0] is None:
        return None
    if len({(frozenset(_steps(file)), repr(base_groups(file))) for file in states if not _is_list(file)}) > 1:
        return None
    step = counters[0][0] - (counters[0][2] or 0)
    fits = not (check_sizes and states and has_optimizer(engine)) or _fits_live(engine, states, step)
    return (*counters[0], *versions[:1]) if fits else None


def _fits_live(engine: Any, files: Sequence[PickledFile], step: int) -> bool:
    """Whether optimizer-states files hold partitions of the live sizes, at the step that the counters say."""
    live = flat_master_numels(engine)
    if live is None:
        return False
    zero3 = engine.zero_optimization_stage() == 3
    return all(list(_partition_numels(file, zero3)) == live and _steps(file) <= {step} for file in files)


def _partition_numels(file: PickledFile, zero3: bool) -> Iterator[int]:
    """Elements of each partition, padding included, which ZeRO-1 and 2 cut off the masters."""
    state = file.section("optimizer_state_dict")
    refs: Sequence[TensorRef] = state["fp32_flat_groups" if zero3 else "single_partition_of_fp32_groups"]
    paddings = [0] * len(refs) if zero3 else state["group_paddings"]
    for index, (ref, padding) in enumerate(zip(refs, paddings, strict=True)):
        full = _state_numel(state, index)
        yield ref.numel + padding if full is None else full


def _state_numel(state: Mapping[str, Any], index: int) -> int | None:
    """Elements of the first flat state, which keeps the padding; ``None``: there is none."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        values = state.get(key)
        if isinstance(values, Mapping):
            refs = [value for value in values["state"].get(index, {}).values() if isinstance(value, TensorRef)]
            return next((ref.numel for ref in refs if ref.shape), None)
    return None


def _is_list(file: PickledFile) -> bool:
    """Whether the base optimizer's state has no names (legacy ``zero_optimization.elastic_checkpoint``)."""
    return isinstance(file.section("optimizer_state_dict").get("base_optimizer_state"), list)


def _steps(file: PickledFile) -> set[int]:
    """Step counts of a file's states."""
    state = file.section("optimizer_state_dict")
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    values = base["state"].values() if isinstance(base, Mapping) else ()
    return {int(materialise(file, value["step"])) for value in values if "step" in value}
