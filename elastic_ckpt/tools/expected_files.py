"""Which files a checkpoint's folder should have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress

from elastic_ckpt.errors import ElasticCkptError
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.model_states import index_model_states
from elastic_ckpt.formats.pickled import open_pickled

#: More files than this are not enumerated, since numbers of ranks and experts are only claims of files and of names.
_MOST_EXPECTED = 1 << 17
#: What a file raises that reading the whole checkpoint reports.
UNREADABLE = (ElasticCkptError, TypeError, ValueError, AttributeError, LookupError)
_OF_LAYER = re.compile(r"(\d{1,6})\.")
_LAYER_OF_TP = re.compile(r"-model_\d+-model_states")


def expected_files(found: CheckpointInfo, trust_pickle: bool = False) -> Iterator[str]:
    """Plain names of the files that should be there, by the names of the others and a model-states file."""
    files = found.files
    if files.clashes or found.foreign:
        return
    model = None
    for name in (*files.model.values(), *files.model_zero3.values()):
        # the first that can be read: reading the whole checkpoint reports what is wrong with the others
        with suppress(*UNREADABLE):
            model = index_model_states(open_pickled(found.path(name), trust_pickle))
            break
    dp = 0 if model is None or files.is_universal else model.counters["dp_world_size"]
    model_parallel = 0 if model is None else math.prod(model.stated.borne_out(len(files.mp_ranks))[:2])
    claims = () if model is None else model.features.experts
    experts = [count for count in claims if isinstance(count, int) and count > 0]
    ranks = dp or 1 + max((rank for rank, _ in (*files.optimizer, *files.model_zero3)), default=0)
    mp_ranks = max([model_parallel, *(rank + 1 for rank in files.mp_ranks)], default=0) or 1
    ep_ranks = 1 + max((rank for rank, _ in files.expert_optimizers), default=-1)
    if ranks * mp_ranks + sum(experts) + ep_ranks > _MOST_EXPECTED:
        return
    dps = range(ranks)
    mps = range(mp_ranks)
    for mp in mps:
        if files.model_zero3 and mp not in files.model:
            yield from (f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" for dp in dps)
        else:
            yield from [f"mp_rank_{mp:02d}_model_states.pt"] if files.model else []
    if files.is_universal:
        return
    if files.experts and mp_ranks == 1:  # tensor-parallel ranks slice experts, or have different ones
        here = {(layer, n): name for (layer, n, _), name in files.experts.items()}
        for at in ((layer, n) for layer, count in enumerate(experts) for n in range(count)):
            yield here.get(at, f"layer_{at[0]}_expert_{at[1]}_mp_rank_00_model_states.pt")
        yield from (f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ep_ranks))
    if sample := next(iter(files.optimizer.values()), None):
        prefix = sample.partition("zero_pp_rank")[0]
        joint = "_" if "_optim_states" in sample else ""
        yield from (f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}{joint}optim_states.pt" for mp in mps for dp in dps)
    layers = {layer for layer, _ in files.layers} | _listed_layers(found, trust_pickle)
    tp = max((rank + 1 for _, rank in files.layers), default=0)
    with_rank = any(_LAYER_OF_TP.search(name) for name in files.layers.values())
    for layer in sorted(layers) if len(layers) * tp <= _MOST_EXPECTED else ():  # a layer is of every rank or of none
        yield from (f"layer_{layer:02d}-{f'model_{rank:02d}-' * with_rank}model_states.pt" for rank in range(tp))


def _listed_layers(found: CheckpointInfo, trust_pickle: bool) -> set[int]:
    """The numbers of the pipeline layers of which model-states files list parameters or buffers."""
    names = set[str]()
    for file in found.files.model.values() if found.files.layers else ():
        with suppress(*UNREADABLE):
            model = index_model_states(open_pickled(found.path(file), trust_pickle))
            names |= {*model.buffer_names, *(name for shapes in model.param_shapes for name, _ in shapes)}
    return {int(match[1]) for match in map(_OF_LAYER.match, names) if match}
