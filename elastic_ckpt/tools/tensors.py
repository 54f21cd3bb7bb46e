"""A checkpoint's tensors by FQN, each read when it is asked for. No engine."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import torch

from elastic_ckpt.config import ElasticConfig
from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.io.coalesce import read_options
from elastic_ckpt.planning.planner import LoadOptions
from elastic_ckpt.tools.logical import (
    LogicalReader,
    Whole,
    refuse_unreadable_states,
    refuse_without_masters,
    scalars_of,
    weights_by_name,
)
from elastic_ckpt.tools.opened import Opened, config_of, open_checkpoint, open_folder

logger = logging.getLogger(__name__)


def open(  # shadows the built-in function here alone: it is elastic_ckpt.open
    folder: str | os.PathLike[str], *, tag: str | None = None, config: ElasticConfig | None = None
) -> CheckpointTensors:
    """Open a checkpoint as a mapping of FQNs to tensors. No engine and no GPU is needed.

    Reads the checkpoint's metadata; a tensor's bytes are read when it is asked for::

        checkpoint = elastic_ckpt.open("checkpoints")
        weight = checkpoint["model.layers.0.weight"]
        moments = checkpoint.optimizer_state("model.layers.0.weight")["exp_avg"]

    Args:
        folder: folder with a ``latest`` file, or the folder of one tag.
        tag: which checkpoint of the folder; ``None``: the latest.
        config: options of the load; rules of tensor parallelism, for example.

    Raises:
        ElasticCkptError: there is no checkpoint, or its metadata cannot be read.
    """
    return CheckpointTensors(open_folder(os.fspath(folder), tag, config or config_of(None), with_states=False))


class CheckpointTensors(Mapping[str, torch.Tensor]):
    """A checkpoint's parameters and buffers by FQN, tied names included; :func:`elastic_ckpt.open` returns it.

    Parameters are fp32 master weights where the checkpoint has them; frozen parameters and buffers are as the module
    had them. Every access reads the tensor anew, and no other, into memory of its own on the CPU; tensor-parallel
    shards are joined as in a load, and saved copies compared. Thread-safe. The files must not change meanwhile.

    Raises :class:`KeyError` for an unknown name, and :class:`ElasticCkptError` if a tensor cannot be read exactly.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._source = _Source(opened)
        refuse_without_masters(opened.metadata)
        self._weights = weights_by_name(self._source.wholes.values())
        self._weights |= {
            alias: self._weights[name] for alias, name in opened.metadata.aliases.items() if name in self._weights
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source.read(self._whole(name))

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def optimizer_state(self, name: str) -> dict[str, torch.Tensor | float]:
        """Optimizer states of a parameter, in its shape: ``{"step": tensor(3.), "exp_avg": ..., "exp_avg_sq": ...}``.

        8-bit states are dequantized to fp32. Scalar states are as they were saved, numbers or tensors. What belongs
        to whole partitions and no parameter is left out. Empty for a parameter that no step has updated.

        Raises :class:`KeyError` if no optimizer owned such a parameter, and :class:`ElasticCkptError` if states are
        damaged or of unknown layout, or the optimizer's parameters could not be named.
        """
        source, name = self._states, self._whole(name).name
        if name not in source.metadata.parameters:
            raise KeyError(f"no optimizer owned {name!r} when {source.metadata.source.folder} was saved")
        tensors = {key: whole for key in source.metadata.state_keys if (whole := source.wholes.get((name, key)))}
        return scalars_of(source.metadata, name) | {key: source.read(whole) for key, whole in tensors.items()}

    @cached_property
    def _states(self) -> _Source:
        """The source of optimizer states, without which weights can be read."""
        source = _Source(open_checkpoint(self._opened.found, self._opened.config))
        refuse_unreadable_states(source.metadata)
        return source

    def _whole(self, name: str) -> Whole:
        if name not in self._weights:
            nearest = ", ".join(difflib.get_close_matches(str(name), self._weights, n=3))
            folder = self._opened.metadata.source.folder
            raise KeyError(f"{folder} has no tensor {name!r}" + (f"; there are {nearest}" if nearest else ""))
        return self._weights[name]


class _Source:
    """Logical tensors of a checkpoint by name and key, and how they are read."""

    def __init__(self, opened: Opened) -> None:
        self.metadata = opened.metadata
        self._errors: dict[str, ElasticCkptError] = {}
        self._reader = LogicalReader(self.metadata, LoadOptions.of(opened.config), self._errors)
        self.wholes = {(whole.name, whole.key): whole for whole in self._reader.tensors()}
        self._options = replace(read_options(opened.config), progress=False)

    def read(self, whole: Whole) -> torch.Tensor:
        if whole.name in self._errors:
            raise self._errors[whole.name]
        for note in self._reader.compare_copies(self._options, whole):
            logger.warning("elastic_ckpt: %s", note)
        return self._reader.tensor(whole, self._options)
