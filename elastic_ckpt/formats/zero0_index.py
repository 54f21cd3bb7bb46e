"""The optimizer entry of a checkpoint without ZeRO partitions (stage 0), in ``mp_rank_00_model_states.pt``.

Of its three layouts, *plain* (fp32) is the state dict alone: the weights in ``module`` are the masters. *Unfused*
(``FP16_UnfusedOptimizer``, fp16 and bf16) adds ``fp32_groups``, one master per parameter, and *fused*
(``FP16_Optimizer``) ``fp32_groups_flat``, one flat master per param group. All number their parameters. Sources:
``fp16/unfused_optimizer.py``, ``fp16/fused_optimizer.py``, ``torch.optim.Optimizer.state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from elastic_ckpt.core.state_kinds import StateOptions
from elastic_ckpt.errors import DamagedError, LayoutError
from elastic_ckpt.formats.classify import ELEMENTWISE_NAMES
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.saved_states import StatesOfOne, read_groups, sort_states
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

PLAIN, UNFUSED, FUSED = "plain", "unfused", "fused"
#: Entry with the masters, which is also the live optimizer's attribute -> layout.
MASTER_ENTRIES = {"fp32_groups": UNFUSED, "fp32_groups_flat": FUSED}


@dataclass(frozen=True)
class UnpartitionedState:
    """The optimizer entry, small enough to all-gather.

    Attributes:
        kind: :data:`PLAIN`, :data:`UNFUSED` or :data:`FUSED`.
        groups, masters: per param group, hyperparameters and fp32 masters (empty if plain).
        members: per param group, the numbers of its tensors: parameters, or the one flat tensor (fused).
        names: per param group, the parameters' names, if the optimizer was given named ones.
        states, scaler: number -> its states; entries about loss scaling.
    """

    kind: str
    groups: tuple[Mapping[str, Any], ...]
    members: tuple[tuple[int, ...], ...]
    names: tuple[tuple[str, ...], ...] | None
    masters: tuple[tuple[TensorRef, ...], ...]
    states: Mapping[int, StatesOfOne]
    scaler: Mapping[str, Any]


def index_unpartitioned(file: PickledFile, options: StateOptions) -> UnpartitionedState | None:
    """The optimizer entry of a file, ``None`` without one (under ZeRO); :class:`DamagedError` if it is malformed."""
    saved = file.tree.get("optimizer")
    if saved is None or (isinstance(saved, Mapping) and "base_optimizer_state" in saved):
        return None  # BF16_Optimizer of a pipeline writes a partition here, beside the files of all of them
    if not isinstance(saved, Mapping):
        raise _damaged(file, "a dict", type(saved).__name__)
    kind = next((kind for key, kind in MASTER_ENTRIES.items() if key in saved), PLAIN)
    state = saved if kind == PLAIN else saved.get("optimizer_state_dict")
    if not isinstance(state, Mapping) or "state" not in state or "param_groups" not in state:
        raise _damaged(file, "'state' and 'param_groups' of a torch optimizer", sorted(map(str, saved))[:8])
    masters: tuple[tuple[TensorRef, ...], ...] = ()
    if kind != PLAIN:
        raw = next(saved[key] for key in MASTER_ENTRIES if key in saved)
        masters = tuple(tuple(group) if kind == UNFUSED else (group,) for group in raw)
    for master in chain.from_iterable(masters):
        if not isinstance(master, TensorRef) or not master.is_contiguous:
            raise _damaged(file, "dense fp32 masters", str(master)[:200])
    groups = state["param_groups"]
    names = tuple(tuple(map(str, group.get("param_names") or ())) for group in groups)
    return UnpartitionedState(
        kind=kind,
        groups=read_groups(file, groups),
        members=tuple(tuple(group["params"]) for group in groups),
        names=names if kind != FUSED and all(names) else None,
        masters=masters,
        states={int(number): sort_states(file, states, options) for number, states in state["state"].items()},
        scaler={key: value for key, value in saved.items() if isinstance(value, (int, float, bool))},
    )


def saved_shape(states: StatesOfOne) -> tuple[int, ...] | None:
    """The shape of the parameter with these states, if they show it, else ``None``."""
    for key in ("state2", *sorted(ELEMENTWISE_NAMES)):  # of state1, some optimizers keep two rows
        if key in states.tensors:
            return states.tensors[key].shape
    if {"row_var", "col_var"} <= set(states.tensors):  # Adafactor
        return (*states.tensors["row_var"].shape[:-1], states.tensors["col_var"].shape[-1])
    points = [key for key in states.points if key in ELEMENTWISE_NAMES]
    others = [ref.shape for ref in states.tensors.values()]
    return () if points else next(iter(others), None)


def _damaged(file: PickledFile, expected: str, found: Any) -> DamagedError:
    return LayoutError(
        "the optimizer entry of this file is not one that DeepSpeed writes",
        file=file.path,
        expected=expected,
        found=found,
        remedy="the file is of another kind of run; take another tag, or load_optimizer_states=False",
    )
