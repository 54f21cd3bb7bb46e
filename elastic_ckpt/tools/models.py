"""Well-known models as universal checkpoints that nobody has to have: their metadata, for plans."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from elastic_ckpt.core.chunks import StorageChunk, chunks_of
from elastic_ckpt.core.flat_ranges import FlatRange
from elastic_ckpt.core.metadata import (
    ITEMSIZE,
    MASTER,
    CheckpointMetadata,
    SavedParameter,
    SourceFacts,
    SourceFile,
    TensorMetadata,
)
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER

ModelName = Literal["70b", "104b"]
#: What such a run trains with, as in a DeepSpeed config.
DEEPSPEED_CONFIG = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


@dataclass(frozen=True)
class _Model:
    """A model of Megatron-DeepSpeed: GPT with biases, learned positions and tied embeddings, or, ``gated``, Llama."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    vocabulary: int
    positions: int = 0
    gated: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The parameters of its pipeline module, in order."""
        hidden = self.hidden
        fused = self.hidden + 2 * self.hidden // self.heads * self.key_value_heads
        layer = {
            "input_layernorm": (hidden,),
            "self_attention.query_key_value": (fused, hidden),
            "self_attention.dense": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.dense_h_to_4h": (self.feed_forward * (1 + self.gated), hidden),
            "mlp.dense_4h_to_h": (hidden, self.feed_forward),
        }
        embedding = "1" if self.gated else "tied_modules.embed"
        last = self.layers + 2
        yield f"{embedding}.word_embeddings.weight", (self.vocabulary, hidden)
        if self.positions:
            yield f"{embedding}.position_embeddings.weight", (self.positions, hidden)
        modules = {f"{number}.{name}": shape for number in range(2, last) for name, shape in layer.items()}
        for name, shape in (modules | {str(last): (hidden,)}).items():
            yield f"{name}.weight", shape
            if not self.gated:
                yield f"{name}.bias", shape[:1]
        if self.gated:
            yield f"{last + 1}.lm_head.weight", (self.vocabulary, hidden)


_MODELS: dict[str, _Model] = {
    "70b": _Model(80, 8192, 28672, 64, 8, 32000, gated=True),
    "104b": _Model(32, 16384, 65536, 128, 128, 50688, positions=2048),
}


def model_metadata(name: ModelName) -> CheckpointMetadata:
    """A model's masters and Adam states, of which each is a file, and the arguments that prove its preset."""
    model = _MODELS[name]
    files = list[SourceFile]()
    tensors = {}
    shapes = dict(model.shapes())
    heads = {"num_key_value_heads": model.key_value_heads}
    for parameter, shape in shapes.items():
        for key in (MASTER, "exp_avg", "exp_avg_sq"):
            numel = math.prod(shape)
            path = os.path.join(name, UNIVERSAL_FOLDER, parameter, f"{key}.pt")
            chunks = chunks_of(StorageChunk(FlatRange(0, numel), len(files), 0))
            tensors[parameter, key] = TensorMetadata(parameter, key, shape, "float32", chunks)
            files.append(SourceFile(path, numel * ITEMSIZE["float32"]))
    return CheckpointMetadata(
        source=SourceFacts("universal", "", name, 1, 1, "", by_rank=False),
        files=tuple(files),
        parameters={each: SavedParameter(shape, int(len(shape) < 2), ()) for each, shape in shapes.items()},
        tensors=tensors,
        groups=({}, {}),
        run={"padded_vocab_size": model.vocabulary, "moe_expert_parallel_size": 1, "swiglu": model.gated, **heads},
    )
