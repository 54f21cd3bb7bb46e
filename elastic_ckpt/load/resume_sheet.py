"""Writes the resume sheet of a save, and compares that of a checkpoint with the live run. Neither can fail a job."""

from __future__ import annotations

import hashlib
import json
import numbers
import os
import platform
import random
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from elastic_ckpt import distributed
from elastic_ckpt.config import read_config
from elastic_ckpt.core.logs import logger_of
from elastic_ckpt.core.resume_sheet import LOSSES, MOST_LOSSES, RNG, SHEET, ResumeSheet, compare_sheets, goes_on
from elastic_ckpt.engines import compat
from elastic_ckpt.engines.coordinates import coordinates_of
from elastic_ckpt.engines.data_position import registered
from elastic_ckpt.formats.saved_files import digests_of_save, versions_in
from elastic_ckpt.formats.sheet import read_sheet
from elastic_ckpt.load.trainer_hook import splits_batches
from elastic_ckpt.storage.local import Version, made_whole, pinned

logger = logger_of(__name__)
#: Packages of which a run's results may depend on the version, if it has imported them.
_PACKAGES = ("torch", "deepspeed", "elastic_ckpt", "numpy", "transformers", "accelerate", "lightning", "bitsandbytes")
_DIGEST_NBYTES = 8
_MOST_SCRIPT_NBYTES = 1 << 20


def files_before_save(engine: Any, given: Mapping[str, Any]) -> dict[str, Version] | None:
    """On rank 0, what is in the folder of a save that begins; ``None``: what it writes cannot be told afterwards.

    ``given``: arguments of ``save_checkpoint``. Local.
    """
    if distributed.rank() or not compat.saves_in_foreground(engine):
        return None
    with suppress(Exception):  # of a folder that cannot be listed, nothing is noted; the save says what is wrong
        return versions_in(_folder_of(engine, given))
    return None


def write_sheet(engine: Any, given: Mapping[str, Any], before: Mapping[str, Version] | None = None) -> None:
    """Write the sheet of a save that has ended, on rank 0, or warn; ``given``: arguments of ``save_checkpoint``. Local.

    Losses are those under ``"losses"`` in the client state. ``before``: as of :func:`files_before_save`.
    """
    if distributed.rank():
        return
    client_state = given.get("client_state")
    folder = _folder_of(engine, given)
    path = os.path.join(folder, SHEET)
    try:
        if not read_config(compat.ds_config(engine)).sheet:
            return
        losses = client_state.get("losses") if isinstance(client_state, Mapping) else None
        files = {} if before is None else digests_of_save(folder, before)
        text = json.dumps({**sheet_of(engine, losses).model_dump(), "files": files})
        with made_whole(path) as stream:
            stream.write(text.encode())
    except Exception as error:  # what was saved is whole without it
        logger.warning("elastic_ckpt could not write the resume sheet %s: %s", path, error)


def _folder_of(engine: Any, given: Mapping[str, Any]) -> str:
    """The folder of the tag that ``save_checkpoint`` writes."""
    tag = given.get("tag")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)  # as DeepSpeed has it
    return os.path.join(given["save_dir"], tag)


def sheet_to_compare(folder: str) -> ResumeSheet | None:
    """The sheet of a checkpoint; ``None``, with a warning, if it cannot be read. Local."""
    try:
        with pinned():  # a save under the same tag may write it last, after all that is loaded
            return read_sheet(folder)
    except Exception as error:  # what is loaded is right without it
        logger.warning("elastic_ckpt could not compare the resume sheet of %s: %s", folder, error)
        return None


def compare_run(
    engine: Any, saved: ResumeSheet | None, replaced: bool = False, sources: Sequence[Sequence[int]] = ()
) -> tuple[str, tuple[str, ...]]:
    """In words, what of the run that saved a loaded checkpoint goes on, and what is another now. Local.

    Neither generators, which a load does not touch, nor losses, of which there are none yet. ``replaced``: whether
    saved hyperparameters have replaced other ones, of the engine as it was built. ``sources``: per live param group,
    the saved ones of its parameters.
    """
    try:
        if saved is None:
            return "", ()
        if saved.step != engine.global_steps:
            return "", (f"not compared: the resume sheet is one of step {saved.step}",)
        live = sheet_of(engine)
        known = [number for of_group in sources for number in of_group]
        are_of_sheet = bool(known) and len(sources) == len(live.groups) and max(known) < len(saved.groups)
        found = compare_sheets(saved, live, sources if are_of_sheet else None)
        found = [each for each in found if each.component not in (RNG, LOSSES)]
        return goes_on(saved, live, found, replaced), tuple(map(str, found))
    except Exception as error:  # what was loaded is right without it
        logger.warning("elastic_ckpt could not compare the resume sheet with this run: %s", error)
        return "", ()


def sheet_of(engine: Any, losses: Any = ()) -> ResumeSheet:
    """The sheet of a live engine; ``losses``: what a script hands over as such."""
    group = compat.partition_group(engine) if engine.zero_optimization_stage() == 3 else compat.dp_group_of(engine)
    at = coordinates_of(engine, group)
    micro_batches = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    groups = compat.base_optimizer(engine).param_groups if compat.has_optimizer(engine) else []
    recent = list(losses)[-MOST_LOSSES:] if isinstance(losses, (list, tuple, deque)) else []
    return ResumeSheet(
        step=engine.global_steps,
        world_size=dist.get_world_size(),
        global_batch=micro_batches * (1 if splits_batches() else at.data_degree),
        precision="bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        groups=[_numbers_in(group) for group in groups],
        data=None if (sampler := registered(engine)) is None else sampler.state_dict(),
        rng=_generators(),
        versions=_versions(),
        losses=[float(each) for each in recent if isinstance(each, numbers.Real)],
    )


def _numbers_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among some values, and short lists of them; the count of steps is no setting."""
    found = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # noqa: PLW2901  a learning rate, with some optimizers
        elements = list(value) if isinstance(value, (list, tuple)) else [value]
        plain = all(isinstance(each, numbers.Real) for each in elements) and len(elements) <= MOST_LOSSES
        if plain and key not in ("params", "step") and not str(key).startswith("_"):
            plain_values = [each if isinstance(each, bool | int) else float(each) for each in elements]
            found[str(key)] = plain_values if isinstance(value, (list, tuple)) else plain_values[0]
    return found


def _generators() -> dict[str, str]:
    """Digests of the states of this process's generators."""
    of_numpy: Any = np.random.get_state()  # a name, an array, and numbers
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": of_numpy[1].tobytes() + repr(of_numpy[2:]).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if (accelerator := get_accelerator()).device_name() != "cpu":
        states[accelerator.device_name()] = accelerator.get_rng_state().cpu().numpy().tobytes()
    return {key: _digest(state) for key, state in states.items()}


@cache  # of one process
def _versions() -> dict[str, str]:
    modules = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    versions = {"python": platform.python_version(), **{name: str(each) for name, each in modules.items() if each}}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError, TypeError), open(script or "", "rb") as stream:  # asks the system: the training script
        versions["script"] = f"{os.path.basename(script or '')} {_digest(stream.read(_MOST_SCRIPT_NBYTES))}"
    return versions


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).hexdigest()
