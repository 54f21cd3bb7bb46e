"""Pipelines without ZeRO: each stage numbers the states of its own parameters, whose weights are in files of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from elastic_ckpt.core.fqn import NumberedStates
from elastic_ckpt.core.local_state import TIED_MODULES
from elastic_ckpt.formats.merging import LayerShard
from elastic_ckpt.formats.model_states import ModelShard
from elastic_ckpt.formats.torch_archive.tensors import TensorRef


@dataclass(frozen=True)
class StageFiles:
    """One pipeline stage on one tensor-parallel rank."""

    model: ModelShard  # with the weights and buffers of all stages
    layers: Mapping[str, LayerShard]  # parameter or buffer of any stage -> the file with its values
    numbered: Sequence[NumberedStates]  # of all stages, in order
    number: int  # of this stage

    def files_of(self, names: Iterable[str | None], first_file: int) -> tuple[list[LayerShard], dict[str, int]]:
        """The files with the values of some parameters, and the number of each one's, from ``first_file`` on."""
        numbers: dict[str, int] = {}
        files: dict[str, LayerShard] = {}
        by_name: dict[str, int] = {}
        for name in names:
            if name is not None:
                layer = self.layers[name]
                files[layer.path] = layer
                by_name[name] = numbers.setdefault(layer.path, first_file + len(numbers))
        return list(files.values()), by_name


def with_layers(
    models: Sequence[ModelShard], layers: Iterable[LayerShard], live_names: frozenset[str]
) -> tuple[list[ModelShard], dict[str, LayerShard]]:
    """The stages of one tensor-parallel rank with the weights of all its layers, and the file of each weight.

    ``live_names`` tell what is in tied modules. These come first, then layers by number, as in a stage's optimizer.
    """
    listed = chain.from_iterable(model.optimizer.names or () for model in models if model.optimizer is not None)
    buffers = tuple(dict.fromkeys(chain.from_iterable(model.buffer_names for model in models)))
    known = live_names.union(buffers, *listed)
    weights: dict[str, TensorRef] = {}
    files: dict[str, LayerShard] = {}
    shared: dict[str, str] = {}
    for layer in sorted(layers, key=lambda each: each.layer):
        named = {name: ref for name, ref in layer.named(known).items() if name not in weights}
        weights |= named
        files |= dict.fromkeys(named, layer)
        shared |= {name: first for name, first in _shared(named).items() if name not in buffers}
    ordered = {name: ref for name, ref in weights.items() if name.startswith(TIED_MODULES)} | weights
    return [replace(model, weights=ordered, buffer_names=buffers, shared=shared) for model in models], files


def _shared(weights: Mapping[str, TensorRef]) -> dict[str, str]:
    """Later name -> first, of those in one file that are one tensor."""
    firsts: dict[TensorRef, str] = {}
    pairs = ((name, firsts.setdefault(ref, name)) for name, ref in weights.items() if ref.numel)
    return {name: first for name, first in pairs if first != name}
