"""Megatron Core's own layout of a ``torch.distributed.checkpoint`` folder (``dist_checkpointing``, ``torch_dist``).

Names are those of the model. Layers of one kind are stacked in one tensor (``decoder.layers.mlp.linear_fc2.weight``),
and states are named ``optimizer.state.<key>.<name>``. ``common.pt`` has what is not sharded: step and hyperparameters,
without the members of param groups. Source: ``mapping.py``, ``optimizer.py`` and ``strategies/torch.py`` of
``megatron/core/dist_checkpointing``, and ``optimizer/distrib_optimizer.py``, 0.16.1.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_ckpt.errors import UnsupportedError
from elastic_ckpt.formats.dcp_entries import Entries, add_state
from elastic_ckpt.formats.dcp_metadata import DcpContents, StoredItem
from elastic_ckpt.formats.objects import materialise
from elastic_ckpt.formats.pickled import named_errors, open_pickled, unreadable
from elastic_ckpt.formats.values import hyperparameters

COMMON = "common.pt"
#: States of one parameter; of the optimizer's flat buffers, which only Megatron's own loader takes apart.
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_BUFFERS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_STACKED = re.compile(r"((?:.+\.)?layers)\.(?!\d)(.+)")
_MASTER = "fp32_param"
_FLAT = "the distributed optimizer's flat buffers; save with --dist-ckpt-optim-fully-reshardable"


@dataclass(frozen=True)
class Common:
    """What of ``common.pt`` has a meaning here.

    Attributes:
        groups: hyperparameters of the param groups, whose members are not recorded.
        step: the optimizer's step, one for all parameters.
        iteration, samples, run, others: of the training loop; Megatron's arguments; all but the optimizer's.
    """

    groups: tuple[Mapping[str, Any], ...] = ()
    step: float | None = None
    iteration: int | None = None
    samples: int | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_one_group(self) -> bool:
        """Whether all parameters have the same hyperparameters."""
        return bool(self.groups) and all(group == self.groups[0] for group in self.groups)


def read_common(folder: str, trust_pickle: bool) -> Common | None:
    """Read ``common.pt``; ``None`` where there is none, as in folders of other writers. Local."""
    path = os.path.join(folder, COMMON)
    if not os.path.lexists(path):
        return None
    file = open_pickled(path, trust_pickle)
    with named_errors(path):
        others = {str(key): materialise(file, value) for key, value in file.tree.items() if key != "optimizer"}
        optimizer = hyperparameters(file, {"": file.tree.get("optimizer", {})})[""]
        chained = list(optimizer.values()) if set(map(type, optimizer)) == {int} else [optimizer]
        parts = [part.get("optimizer", part) for part in chained]  # of mixed precision
        groups = [group for part in parts for group in part.get("param_groups", ())]
        steps = [part["state"]["common_step"] for part in parts if "common_step" in part.get("state", {})]
        steps += [group["step"] for group in groups if "step" in group]  # as the distributed optimizer keeps it
        run = vars(others["args"]) if isinstance(others.get("args"), Namespace) else {}
        iteration, samples = others.get("iteration"), run.get("consumed_train_samples")
        return Common(
            tuple({key: value for key, value in group.items() if key not in ("params", "step")} for group in groups),
            max(map(float, steps), default=None),
            iteration if isinstance(iteration, int) else None,
            samples if isinstance(samples, int) else None,
            run,
            others,
        )


def unstacked(contents: DcpContents, folder: str) -> DcpContents:
    """The contents with a tensor for each layer.

    Raises :class:`UnsupportedError` for a chunk of several layers, :class:`DamagedError` if a layer has none.
    """
    tensors = {name: entry for name, entry in contents.tensors.items() if not _STACKED.fullmatch(name)}
    layers: dict[str, set[int]] = {name: set() for name in contents.tensors.keys() - tensors.keys()}

    def of_layer(item: StoredItem) -> StoredItem:
        if item.name not in layers or item.sizes is None:
            return item
        dtype, shape = contents.tensors[item.name]
        if item.sizes[:1] != (1,):
            raise UnsupportedError(
                "a chunk of this torch.distributed.checkpoint folder has not one layer, as Megatron Core saves them",
                folder,
                "one layer of a stack of them, by the name: layers without a number",
                f"a chunk of {item.sizes} of {shape}",
                parameter=item.name,
                remedy="save with --ckpt-format torch_dist; a module that is no stack of layers needs another name",
            )
        layers[item.name].add(item.offsets[0])
        name = _STACKED.sub(rf"\g<1>.{item.offsets[0]}.\g<2>", item.name)
        tensors[name] = dtype, shape[1:]
        return replace(item, name=name, offsets=item.offsets[1:], sizes=item.sizes[1:])

    files = {file: tuple(map(of_layer, items)) for file, items in contents.files.items()}
    for name, found in layers.items():
        if len(found) != contents.tensors[name][1][0]:
            raise unreadable(folder, f"{len(found)} layers of {name}, of shape {contents.tensors[name][1]}")
    objects = [name for name in contents.paths if name not in contents.tensors]
    paths = {name: (name,) for name in (*tensors, *objects)}
    return replace(contents, tensors=tensors, paths=paths, files=files)


def sort_megatron_entries(contents: DcpContents, folder: str) -> Entries:
    """Sort the entries of Megatron Core. Masters in fp32 take the place of weights of lower precision."""
    weights: dict[str, str] = {}
    states: dict[tuple[str, str], str] = {}
    opaque: dict[str, str] = {}
    for entry in contents.tensors:
        state = _STATE.fullmatch(entry)
        if state is not None:
            add_state(states, (state[2], state[1]), entry, folder)
        elif _BUFFERS.match(entry):
            opaque["optimizer.distributed"] = _FLAT
        else:
            weights[entry] = entry
    for (name, key), entry in states.items():
        if name not in weights or contents.tensors[entry][1] != contents.tensors[weights[name]][1]:
            opaque[key] = f"{entry} of shape {contents.tensors[entry][1]}: not that of its parameter ({_FLAT})"
    others = [entry for entry in contents.paths if entry not in contents.tensors]
    weights |= {name: entry for (name, key), entry in states.items() if key == _MASTER and key not in opaque}
    states = {place: entry for place, entry in states.items() if place[0] in weights and place[1] != _MASTER}
    return Entries(weights, states, others=tuple(others), opaque=opaque)
