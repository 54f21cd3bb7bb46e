"""Well-known models as universal checkpoints that nobody has to have: their metadata, for plans."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from elastic_ckpt.core.chunks import StorageChunk, listed
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
        hidden, wide, biases = self.hidden, self.feed_forward * (1 + self.gated), not self.gated
        fused = hidden + 2 * hidden // self.heads * self.key_value_heads
        matrices = {
            "self_attention.query_key_value": (fused, hidden),
            "self_attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (wide, hidden),
            "mlp.dense_4h_to_h": (hidden, self.feed_forward),
        }
        embedding = "1" if self.gated else "tied_modules.embed"
        yield f"{embedding}.word_embeddings.weight", (self.vocabulary, hidden)
        if self.positions:
            yield f"{embedding}.position_embeddings.weight", (self.positions, hidden)
        for layer in range(2, self.layers + 2):
            for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
                yield from ((f"{name}.{kind}", (hidden,)) for kind in ("weight", "bias")[: 1 + biases])
            for name, shape in matrices.items():
                yield f"{layer}.{name}.weight", shape
                if biases:
                    yield f"{layer}.{name}.bias", shape[:1]
        yield from ((f"{self.layers + 2}.{kind}", (hidden,)) for kind in ("weight", "bias")[: 1 + biases])
        if self.gated:
            yield f"{self.layers + 3}.lm_head.weight", (self.vocabulary, hidden)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of its run, by which its preset is recognized."""
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.key_value_heads}
        of_code = {"padded_vocab_size": self.vocabulary, "moe_expert_parallel_size": 1, "swiglu": self.gated}
        return {"hidden_size": self.hidden, "kv_channels": self.hidden // self.heads, **heads, **of_code}


_MODELS: dict[str, _Model] = {
    "70b": _Model(80, 8192, 28672, 64, 8, 32000, gated=True),
    "104b": _Model(32, 16384, 65536, 128, 128, 50688, positions=2048),
}


def model_metadata(name: ModelName) -> CheckpointMetadata:
    """A model's masters and Adam states, of which each is a file."""
    shapes, files, tensors = dict(_MODELS[name].shapes()), list[SourceFile](), {}
    for parameter, shape in shapes.items():
        for key in (MASTER, "exp_avg", "exp_avg_sq"):
            numel, path = math.prod(shape), os.path.join(name, UNIVERSAL_FOLDER, parameter, f"{key}.pt")
            chunks = listed(StorageChunk(FlatRange(0, numel), len(files), 0))
            tensors[parameter, key] = TensorMetadata(parameter, key, shape, "float32", chunks)
            files.append(SourceFile(path, numel * ITEMSIZE["float32"]))
    return CheckpointMetadata(
        source=SourceFacts("universal", "", name, 1, 1, "", by_rank=False),
        files=tuple(files),
        parameters={each: SavedParameter(shape, int(len(shape) < 2), ()) for each, shape in shapes.items()},
        tensors=tensors,
        groups=({}, {}),
        run=_MODELS[name].arguments,
    )
