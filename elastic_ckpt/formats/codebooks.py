"""bitsandbytes' quantization maps, and where its ``state_dict`` puts quantized tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache

import torch

from elastic_ckpt.core.state_kinds import Codebook, codebook

#: Entry under which ``state_dict`` hides the quantized tensors from FSDP since 0.49.2.
NESTED = "__bnb_optimizer_quant_state__"


@cache
def own_maps() -> Mapping[str, Codebook]:
    """bitsandbytes' own quantization maps by state key (``qmap1`` signed, ``qmap2`` not); empty without it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    from bitsandbytes.functional import create_dynamic_map  # noqa: PLC0415  an optional package

    return {f"qmap{number}": codebook_of(create_dynamic_map(signed=number == 1)) for number in (1, 2)}


def codebook_of(values: torch.Tensor) -> Codebook:
    """A saved quantization map as data."""
    return codebook(values.detach().float().cpu().view(-1).tolist())
