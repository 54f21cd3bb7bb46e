"""Scalar states and hyperparameters in which the ranks of a save differ: each rank's own, or none. Pure.

An optimizer computes them of what its rank holds. A rank that holds just that again gets them back. Of another
partition they say nothing: they are left out if each step computes them before it uses them, else refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from elastic_ckpt.config import ElasticConfig, state_options
from elastic_ckpt.core.chunks import ChunkSource
from elastic_ckpt.core.local_state import SAVED_OPTIMIZER, LocalState
from elastic_ckpt.core.metadata import ITEMSIZE, MASTER, CheckpointMetadata
from elastic_ckpt.core.read_plan import Outcome
from elastic_ckpt.core.values import PerRank, common, differing, of_rank
from elastic_ckpt.errors import UnsupportedError, listed

_RMS = frozenset({"RMS"})
#: Scalar states that each step of an optimizer computes before it uses them, by its class.
_RECOMPUTED: Mapping[str, frozenset[str]] = {
    "transformers.optimization.Adafactor": _RMS,
    "galore_torch.adafactor.Adafactor": _RMS,
    "came_pytorch.CAME.CAME": _RMS,
    "pytorch_optimizer.optimizer.adafactor.AdaFactor": _RMS,
    "pytorch_optimizer.optimizer.came.CAME": _RMS,
    "pytorch_optimizer.optimizer.lamb.Lamb": frozenset({"weight_norm", "adam_norm", "trust_ratio"}),
}
_FRESH, _ANEW = '"states" says so', "each step computes it of what the rank holds, before it uses it"


def with_own_values(
    metadata: CheckpointMetadata, local_state: LocalState, config: ElasticConfig
) -> tuple[CheckpointMetadata, tuple[Outcome, ...]]:
    """The metadata with this rank's values alone, and those that are left out.

    Raises :class:`UnsupportedError` for a value of ranks that held something else, unless it is computed anew or the
    user leaves it out.
    """
    shared = {id(saved.scalars): saved.scalars for saved in metadata.parameters.values()}  # by those of a flat tensor
    states = {number: dict(scalars) for number, scalars in shared.items()}
    own = differing(chain(states.values(), metadata.groups))
    fresh = frozenset(key for key, word in state_options(config).schema.items() if word == "fresh")
    named = fresh.intersection(chain.from_iterable(chain(states.values(), metadata.groups)))
    every = frozenset(chain.from_iterable(_RECOMPUTED.values()))
    recomputed = (
        every if local_state.optimizer == SAVED_OPTIMIZER else _RECOMPUTED.get(local_state.optimizer, frozenset())
    )
    anew = recomputed.intersection(chain.from_iterable(states.values())) - fresh
    if not (own or named or anew):
        return metadata, ()
    file, notes = own_file(metadata, local_state), metadata.notes
    left_out = named if file is not None else named | anew
    if file is None:
        _refuse(metadata, "optimizer state", states.values(), left_out)
        if config.param_groups == "match":
            _refuse(metadata, "hyperparameter", metadata.groups, named)
    elif own:
        notes += (f"ranks were saved with values of their own, and each has them again: {listed(own)}",)
    taken = {number: tuple(_taken(values, left_out, file).items()) for number, values in states.items()}
    parameters = {name: replace(saved, scalars=taken[id(saved.scalars)]) for name, saved in metadata.parameters.items()}
    of_live = {name: each.hyperparameters for each in local_state.groups for name in each.names}
    live = {saved.group: of_live[name] for name, saved in metadata.parameters.items() if name in of_live}
    groups = []
    for number, group in enumerate(metadata.groups):
        taken_here, own_now = _taken(group, named, file), live.get(number, {})
        groups.append({key: taken_here.get(key, own_now.get(key)) for key in group if key in {**own_now, **taken_here}})
    outcomes = tuple(Outcome(key, "fresh", (), _FRESH if key in named else _ANEW) for key in sorted(left_out))
    return replace(metadata, parameters=parameters, groups=tuple(groups), notes=notes), outcomes


def _taken(values: Mapping[str, Any], left_out: Collection[str], file: int | None) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in left_out}
    return common(kept) if file is None else of_rank(kept, file)


def _refuse(
    metadata: CheckpointMetadata, what: str, values: Collection[Mapping[str, Any]], left_out: Collection[str]
) -> None:
    """Refuse values in which ranks differ and that are not left out."""
    keys = [key for key in differing(values) if key not in left_out]
    if not keys:
        return
    source, key = metadata.source, keys[0]
    how = "as a new optimizer has them" if what == "hyperparameter" else "out, if the optimizer's next step needs none"
    raise metadata.error(
        UnsupportedError,
        f"{what} {key!r} differs between ranks: each computed it of its own partition, and partitions are others now",
        keys,
        f"the save's {source.partition_degree} partitions (ZeRO-{source.zero_stage}, TP={source.tp})",
        str(next(value for each in values if isinstance(value := each.get(key), PerRank)))[:200],
        remedy=f'"elastic_checkpoint": {{"states": {json.dumps(dict.fromkeys(keys, "fresh"))}}} leaves them {how}; or '
        "load at the topology it was saved with",
    )


def own_file(metadata: CheckpointMetadata, local_state: LocalState) -> int | None:
    """The file of the rank that held just what this rank holds, in the same flat tensors; ``None``: there is none."""
    at, fragments = local_state.model.coordinates, local_state.fragments
    if not metadata.source.by_rank:
        return None

    def masters(name: str) -> Iterator[tuple[ChunkSource, int]]:
        tensor = metadata.tensors.get((name, MASTER))
        for copy in () if tensor is None else (tensor, *metadata.replicas.get((name, MASTER), ())):
            if len(copy.sources) == at.tp:
                yield copy.sources[at.tp_rank], ITEMSIZE[copy.dtype]

    begins: dict[int, list[tuple[int, int]]] = {}  # by file: of each fragment, its flat tensor and where that begins
    for each in fragments:
        for source, itemsize in masters(each.name):
            for chunk in source.within(each.range.start, each.range.stop):
                if chunk.range == each.range:
                    begin = chunk.byte_offset - each.flat_offset * itemsize
                    begins.setdefault(chunk.file, []).append((each.flat, begin))
    for file, found in begins.items():
        flats = set(found)
        if len(found) == len(fragments) and len(flats) == len(dict(flats)) == len({begin for _, begin in flats}):
            every = (source.in_files({file}) for name in metadata.parameters for source, _ in masters(name))
            return file if sum(map(len, map(list, every))) == len(fragments) else None
    return None
