"""bitsandbytes' own quantization maps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from bitsandbytes.functional import create_dynamic_map

from elastic_ckpt.core.state_kinds import Codebook, codebook


@cache
def own_maps() -> Mapping[str, Codebook]:
    """The maps by state key: ``qmap1`` signed, ``qmap2`` not."""
    maps = {f"qmap{number}": create_dynamic_map(signed=number == 1) for number in (1, 2)}
    return {key: codebook(tuple(values.float().tolist())) for key, values in maps.items()}
