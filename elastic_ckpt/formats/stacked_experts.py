"""Where a checkpoint of AutoEP has the experts that it stacks in one parameter."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from elastic_ckpt.core.text import counted
from elastic_ckpt.errors import AT_ITS_TOPOLOGY, LayoutError
from elastic_ckpt.formats.pickled import PickledFile
from elastic_ckpt.formats.torch_archive.charges import limit_error

#: Entries of a model-states file, of which the first that is not empty counts.
AUTOEP_LAYERS = ("ds_autoep_layers", "autoep_layers")
#: Experts of all layers together, of which a file may claim any number; the largest models have some 25,000.
_MOST_EXPERTS = 1 << 17


def refuse_many_experts(file: PickledFile, counts: Iterable[int]) -> None:
    """Raise :class:`UnsupportedError` for more experts in all layers than are reasonable: each has a name here."""
    if (count := sum(map(int, counts))) > _MOST_EXPERTS:
        raise limit_error(f"at most {_MOST_EXPERTS} experts in all layers", str(count)[:40], file.path)


def stacked_experts(file: PickledFile) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The experts on each expert-parallel rank, by the parameter in which they are stacked.

    Raises :class:`LayoutError` if a file does not place each of them on one rank.
    """
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    layers = next(filter(None, map(file.tree.get, AUTOEP_LAYERS)), ())
    refuse_many_experts(file, (layer["num_experts"] for layer in layers))
    for layer in layers:
        local, ep, count = (int(layer[key]) for key in ("num_local_experts", "ep_size", "num_experts"))
        local, ep = (local, ep) if 0 < local * ep == count <= _MOST_EXPERTS else (0, 0)
        placed = tuple(tuple(range(rank * local, (rank + 1) * local)) for rank in range(ep))
        if layer.get("expert_placement"):
            ranks = sorted(layer["expert_placement"]["ranks"], key=lambda each: each["rank"])
            placed = tuple(tuple(map(int, each["experts"])) for each in ranks)
        experts = sorted(chain.from_iterable(placed))
        if not 0 < count <= _MOST_EXPERTS or experts != list(range(count)) or len({*map(len, placed)}) > 1:
            problem = "experts of AutoEP are not placed on one expert-parallel rank each, in equal numbers"
            name = f"{layer['expert_key_prefix']}.*"
            expected = f"{counted(layer['num_experts'], 'expert')} on {counted(ep, 'rank')}"
            raise LayoutError(problem, file.path, expected, str(placed)[:200], parameter=name, remedy=AT_ITS_TOPOLOGY)
        found |= {f"{layer['expert_key_prefix']}.{weight}": placed for weight in ("w1", "w2", "w3")}
    return found
