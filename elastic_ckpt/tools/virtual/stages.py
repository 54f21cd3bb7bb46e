"""Assigns parameters to pipeline stages. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from elastic_ckpt.core.metadata import CheckpointMetadata
from elastic_ckpt.errors import UnsupportedError, listed

_LAYER = re.compile(r"^(\d+)\.")
_TIED = "tied_modules."
Stages = dict[str, tuple[int, ...]]


def stages_of(numels: Mapping[str, int], pp: int, metadata: CheckpointMetadata) -> Stages:
    """The stages of each parameter or buffer of a ``PipelineModule``, given the elements of each.

    At the saved degree, stages are as saved, and a buffer is where its layer's parameters are. At another, layers are
    balanced by parameters (``partition_method="parameters"``, DeepSpeed's default), and tied modules are on the first
    and last stage, except those that only one stage saved (BLOOM's norm behind the embedding).

    Raises :class:`UnsupportedError` if names do not show their layer, or a stage would have no parameter.
    """
    if pp == 1:
        return dict.fromkeys(numels, (0,))
    layer_of = {name: int(match[1]) for name in numels if (match := _LAYER.match(name))}
    tied = [name for name in numels if name.startswith(_TIED)]
    others = set(numels) - set(layer_of) - set(tied)
    if others or not layer_of:
        raise UnsupportedError(
            "a pipeline of several stages needs a model that is built of numbered layers (DeepSpeed's PipelineModule)",
            parameter=listed(others),
            file=metadata.source.folder,
            expected="names such as 3.self_attention.dense.weight",
            found="a model that is no PipelineModule",
            remedy="a pipeline-parallel degree of 1",
        )
    saved = metadata.stages
    if metadata.source.pp == pp:
        of_layer = {layer_of[name]: stages for name, stages in saved.items() if name in layer_of}
        as_saved = {name: saved.get(name) or of_layer.get(layer_of.get(name, -1), ()) for name in numels}
        if all(as_saved.values()):
            return as_saved
    stages = _balanced(numels, layer_of, tied, pp)
    stages |= {name: (0,) if len(saved.get(name, ())) == 1 else (0, pp - 1) for name in tied}
    if empty := set(range(pp)).difference(*stages.values()):
        raise UnsupportedError(
            "this pipeline would have stages without a parameter, for which no optimizer can be made",
            file=metadata.source.folder,
            expected=f"at most as many stages as layers have parameters: {len(set(layer_of.values()))}",
            found=f"{pp} stages, of which {len(empty)} are empty",
            remedy="a lower pipeline-parallel degree",
        )
    return stages


def _balanced(numels: Mapping[str, int], layer_of: Mapping[str, int], tied: Sequence[str], pp: int) -> Stages:
    weights = [0] * (max(layer_of.values()) + 1)
    for name, layer in layer_of.items():
        weights[layer] += numels[name]
    shift = 0
    if tied:  # a tied layer is both first and last, and both occurrences count
        ends, first = sum(numels[name] for name in tied), min(layer_of.values())
        shift = 0 if first else 1
        weights = [0] * shift + weights + [ends]
        weights[first + shift - 1] = ends
    bounds = [bound - shift for bound in _partition(tuple(weights), pp)]
    stage_of_layer = {layer: stage for stage in range(pp) for layer in range(bounds[stage], bounds[stage + 1])}
    return {name: (stage_of_layer[layer],) for name, layer in layer_of.items()}


@lru_cache(maxsize=32)
def _partition(weights: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """The layers at which stages begin, and the last one's end.

    As DeepSpeed's ``partition_balanced`` (``deepspeed/runtime/utils.py``): the difference of the heaviest and the
    lightest stage is least, of equal choices the last. Its dynamic program, with all choices at once.
    """
    count = len(weights)
    if count <= pp:
        return tuple(min(stage, count) for stage in range(pp + 1))
    until = np.concatenate([[0.0], np.cumsum(weights)])
    heaviest, lightest = np.full((2, count + 1), np.inf)
    heaviest[0] = 0.0  # no layers on no stages
    begins = np.zeros((pp + 1, count + 1), dtype=int)
    for stages in range(1, pp + 1):
        before, heaviest = heaviest, np.full(count + 1, np.inf)
        lightest_before, lightest = lightest, np.full(count + 1, np.inf)
        for stop in range(stages, count + 1):
            last = until[stop] - until[:stop]
            most, least = np.maximum(before[:stop], last), np.minimum(lightest_before[:stop], last)
            start = stop - 1 - int((most - least)[::-1].argmin())
            heaviest[stop], lightest[stop], begins[stages, stop] = most[start], least[start], start
    bounds = [count]
    for stages in range(pp, 0, -1):
        bounds.append(int(begins[stages, bounds[-1]]))
    return tuple(reversed(bounds))
