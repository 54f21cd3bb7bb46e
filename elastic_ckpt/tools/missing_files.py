"""Which files of a checkpoint are missing, by the names of the others and what one of them states. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.formats.base import Found
from elastic_ckpt.formats.naming import UNIVERSAL_FOLDER, FolderFiles
from elastic_ckpt.formats.peek import Peeked

#: Files of more ranks than this are not enumerated, since the number is only a file's claim.
_MOST_EXPECTED = 1 << 17
_LAYER = re.compile(r"^(\d{1,6})\.")
_LAYER_OF_TP = re.compile(r"-model_\d+-model_states")


def expected_files(found: Found, dp: int, model_parallel: int, peeked: Peeked | None = None) -> Iterator[str]:
    """Plain names of the files that should be there; with ``*`` for what is unknown of a name.

    Args:
        found: the folder; nothing is expected of one with files of experts or of two saves, whose names show little.
        dp, model_parallel: how many ranks are claimed; there are at least those that have files.
        peeked: a model-states file, for what names do not show.
    """
    files = found.files
    if files.clashes or files.experts:
        return
    dps = range(max([dp, *(rank + 1 for rank, _ in (*files.optimizer, *files.model_zero3))], default=0) or 1)
    mps = range(max([model_parallel, *(rank + 1 for rank in files.mp_ranks)], default=0) or 1)
    if len(dps) * len(mps) > _MOST_EXPECTED:
        return
    for mp in mps:
        if files.model_zero3 and mp not in files.model:
            yield from (f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in dps)
        else:
            yield f"{'' if files.model else '*'}mp_rank_{mp:02d}_model_states.pt"
    if found.format == "universal":
        yield from (f"{UNIVERSAL_FOLDER}/{name}/{MASTER}.pt" for name in (peeked.parameters if peeked else ()))
        return
    if files.optimizer or (peeked is not None and not peeked.holds_optimizer):
        prefix, joint = _style(files, peeked)
        yield from (f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{joint}optim_states.pt" for mp in mps for dp in dps)
    yield from _expected_layers(files, peeked)


def _style(files: FolderFiles, peeked: Peeked | None) -> tuple[str, str]:
    """The text before ``zero_pp_rank`` and before ``optim_states`` in file names of this save."""
    sample = next(iter(files.optimizer.values()), None)
    if sample is not None:
        return sample.partition("zero_pp_rank")[0], "_" if "_optim_states" in sample else ""
    is_bf16 = peeked is not None and peeked.weight_dtypes[:1] == ("bfloat16",)
    return "bf16_" if is_bf16 else "", "_"


def _expected_layers(files: FolderFiles, peeked: Peeked | None) -> Iterator[str]:
    """A layer with parameters, or with a file of some rank, has one of every tensor-parallel rank."""
    if not files.layers:
        return
    named = (_LAYER.match(name) for name in (peeked.parameters if peeked else ()))
    layers = {layer for layer, _ in files.layers} | {int(match[1]) for match in named if match}
    tp = max((peeked.degrees.tp if peeked else 0) or 0, max(rank for _, rank in files.layers) + 1)
    with_rank = any(_LAYER_OF_TP.search(name) for name in files.layers.values())
    if len(layers) * tp > _MOST_EXPECTED:
        return
    for layer in sorted(layers):
        for rank in range(tp):
            yield f"layer_{layer:02d}-{f'model_{rank:02d}-' if with_rank else ''}model_states.pt"
