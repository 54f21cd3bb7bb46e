"""A small writer of DataStates-LLM's format, with the interface that DeepSpeed's engine uses.

The library itself needs CUDA. Layout after ``save_background`` of its ``datastates/llm/checkpointing.py``.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch


def save(state: dict[str, Any], path: str | Path) -> None:
    """Write one file."""
    header: dict[str, Any] = {}
    data = bytearray()

    def lean(key: str, node: Any) -> Any:
        below = f"{key}|" if key else ""
        if torch.is_tensor(node):
            raw = node.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            offsets = [len(data), len(data) + len(raw)]
            header[key] = {"dtype": str(node.dtype), "shape": tuple(node.shape), "data_offsets": offsets}
            data.extend(raw)
            return f"TENSOR|{key}"
        if isinstance(node, list):
            return [lean(f"{below}{number}", item) for number, item in enumerate(node)]
        if isinstance(node, dict):
            return {name: lean(f"{below}{name}", item) for name, item in node.items()}
        return node

    pickled = pickle.dumps(lean("", state), protocol=pickle.HIGHEST_PROTOCOL)
    write(path, header, bytes(data), pickled)


def write(path: str | Path, header: dict[str, Any], data: bytes, pickled: bytes) -> None:
    """Put the parts of a file together."""
    offsets = [len(data), len(data) + len(pickled)]
    text = json.dumps({**header, "datastates_metadata": {"data_offsets": offsets}}).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data + pickled)


class CheckpointEngine:
    """``datastates.CheckpointEngine``, which saves at once: nothing is left to wait for."""

    def __init__(self, config: Any, rank: int) -> None:
        self.config, self.rank = config, rank

    def save(self, state: dict[str, Any], path: str) -> bool:
        save(state, path)
        return True

    def wait(self, persist: bool = False) -> None:
        """Nothing is pending."""
