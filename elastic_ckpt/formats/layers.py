"""``layer_NN-model_MM-model_states.pt``: the weights and buffers of pipeline layers.

Source of the layout: ``PipelineModule.save_state_dict`` (pipe/module.py): the state dict of each layer, without its
number, which is the layer's number in the whole model, whatever the stage. Of a tied layer, the first occurrence has a
file, under the number of that layer, while its parameters are called ``tied_modules.<key>.*``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_ckpt.core.metadata import BUFFER, FROZEN, CheckpointMetadata, SourceFile
from elastic_ckpt.formats.merging import shard_by_shard
from elastic_ckpt.formats.metadata_builder import dense_tensor
from elastic_ckpt.formats.pickled import PickledFile, TensorRef

_TIED = re.compile(r"^tied_modules\.[^.]+\.")


@dataclass(frozen=True)
class LayerShard(SourceFile):
    """What one layer's file says: its entries with data, by name within the layer; ``tp_rank`` saved it."""

    layer: int
    tp_rank: int
    weights: Mapping[str, TensorRef]

    def named(self, known: frozenset[str]) -> dict[str, TensorRef]:
        """Its entries by their names in the model, of which some are known; of a tied layer, by the tied module's."""
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
    """Sort out the file of a layer of the model."""
    weights = {str(name): ref for name, ref in file.tree.items() if isinstance(ref, TensorRef)}
    return LayerShard(file.path, file.nbytes, layer, tp_rank, weights)


def with_layers(
    metadata: CheckpointMetadata,
    layers: Sequence[LayerShard],
    buffers: frozenset[str],
    tp: int,
    live_names: frozenset[str] = frozenset(),
) -> CheckpointMetadata:
    """The metadata with the layers' files behind its own: buffers, and parameters that no optimizer owned.

    Args:
        metadata: of the optimizer's parameters.
        layers: of all tensor-parallel ranks.
        buffers: names of the module's buffers.
        tp: tensor-parallel degree.
        live_names: of the live model: they name tied modules of which no optimizer owned anything.
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
    files = (*metadata.files, *(SourceFile(layer.path, layer.nbytes) for layer in layers))
    return replace(metadata, tensors=tensors, files=files)
