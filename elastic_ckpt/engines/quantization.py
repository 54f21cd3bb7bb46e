"""What describes how live frozen weights are quantized, in a module's state dict."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from elastic_ckpt.core.local_state import QuantizationEntry
from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.engines.optimizers import dtype_name


def quantization_entries(
    module: torch.nn.Module, described: Mapping[str, str], saved: Mapping[str, Any]
) -> tuple[tuple[QuantizationEntry, ...], dict[str, torch.Tensor]]:
    """The entries that describe quantized weights, and those of them that are live memory, by name.

    Scales are what the module computes with, and can be written in place. Others are made anew by each call of
    ``state_dict`` (the packed ``quant_state``, a copy of the nested map), so that writing them would change nothing; or
    weights may share them.

    Args:
        described: name of an entry -> the weight that it describes.
        saved: the module's state dict, with its own tensors (``keep_vars``).
    """
    tensors = {name: saved[name] for name in sorted(described) if isinstance(saved[name], torch.Tensor)}
    if not tensors:
        return (), {}
    again = module.state_dict(keep_vars=True)
    uses = Counter(tensor.data_ptr() for tensor in tensors.values())
    entries: list[QuantizationEntry] = []
    in_memory: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        address = tensor.data_ptr()
        is_alone = uses[address] == 1
        is_live = is_alone and tensor.numel() > 0 and again[name].data_ptr() == address
        if is_live:
            in_memory[name] = tensor
        crc32 = None if is_live else _crc32(tensor)
        entries.append(QuantizationEntry(name, described[name], dtype_name(tensor), tuple(tensor.shape), crc32))
    return tuple(entries), in_memory


def loaded_by_modules(model: torch.nn.Module, entries: Iterable[str]) -> frozenset[str]:
    """Those of some entries, neither parameters nor buffers, that a module loads in a way of its own, as HQQ's does."""
    owners = {
        without_hidden(path)
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
    }
    return frozenset(name for name in entries if name.rpartition(".")[0] in owners)


def _crc32(tensor: torch.Tensor) -> int:
    """That of a tensor's bytes, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
