"""``layer_NN-model_MM-model_states.pt``: the weights and buffers of pipeline layers.

Source: ``PipelineModule.save_state_dict`` (pipe/module.py): each layer's state dict, without the layer's number, which
counts through the whole model, whatever the stage. Of a tied layer only the first occurrence has a file, under that
layer's number, while its parameters are named ``tied_modules.<key>.*``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata, SourceFile
from elastic_ckpt.formats.merging import shard_by_shard
from elastic_ckpt.formats.metadata_builder import dense_tensor
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.tensor_ref import TensorRef

_TIED = re.compile(r"^tied_modules\.[^.]+\.")


@dataclass(frozen=True)
class LayerShard(SourceFile):
    """One layer's file, saved by tensor-parallel rank ``tp_rank``: its tensors by name within the layer."""

    OWN_FIELDS: ClassVar[tuple[str, ...]] = ("path", "nbytes", "records", "layer", "tp_rank")

    layer: int
    tp_rank: int
    weights: Mapping[str, TensorRef]

    def named(self, known: frozenset[str]) -> dict[str, TensorRef]:
        """Its tensors by FQN, some of which are ``known``; of a tied layer, by the tied module's name."""
        tied: dict[str, str] = {}
        for name in sorted(known):
            if _TIED.match(name):
                inner = _TIED.sub("", name)
                tied[inner] = "" if inner in tied else name  # ambiguous where two end in the same name
        found = {}
        for key, ref in self.weights.items():
            name = f"{self.layer}.{key}"
            found[name if name in known else tied.get(key) or name] = ref
        return found


def index_layer(file: PickledFile, layer: int, tp_rank: int) -> LayerShard:
    weights = {str(name): ref for name, ref in file.tree.items() if isinstance(ref, TensorRef)}
    return LayerShard(file.path, file.nbytes, layer, tp_rank, weights, records=file.records)


def with_layers(
    metadata: CheckpointMetadata,
    layers: Sequence[LayerShard],
    buffers: frozenset[str],
    tp: int,
    live_names: frozenset[str] = frozenset(),
) -> CheckpointMetadata:
    """``metadata`` extended by the layers' files: buffers, and parameters that no optimizer owned.

    ``layers`` are of all ``tp`` tensor-parallel ranks, ``buffers`` the names of the module's buffers, ``live_names``
    those of the live model, for tied modules of which no optimizer owned anything.
    """
    known = frozenset(metadata.parameters) | buffers | live_names
    shards: dict[str, list[tuple[int, int, TensorRef]]] = {}
    for number, layer in enumerate(layers):
        for name, ref in layer.named(known).items():
            if name not in metadata.parameters and ref.is_contiguous:
                shards.setdefault(name, []).append((layer.tp_rank, len(metadata.files) + number, ref))
    tensors = dict(metadata.tensors)
    for name, ranks in shards.items():
        ranks.sort(key=lambda item: item[0])
        if [rank for rank, _, _ in ranks] == list(range(tp)):
            key = BUFFER if name in buffers else FROZEN
            tensors[name, key] = shard_by_shard([dense_tensor(name, key, ref, file) for _, file, ref in ranks])
    files = (*metadata.files, *(SourceFile(layer.path, layer.nbytes, records=layer.records) for layer in layers))
    return replace(metadata, tensors=tensors, files=files)
