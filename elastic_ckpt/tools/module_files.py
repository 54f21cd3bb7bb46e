"""What files of a module's weights lack, where only a load would notice, or only one of weights alone.

A load under ZeRO takes its weights from the masters, whatever is in the files of pipeline layers. Without ZeRO, only a
live model tells parameters from what a module makes of itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from elastic_ckpt.core.wrappers import without_hidden
from elastic_ckpt.errors import ANOTHER_TAG, DamagedError, ElasticCkptError, Remedy
from elastic_ckpt.formats import CheckpointInfo
from elastic_ckpt.formats.merging import index_layer
from elastic_ckpt.formats.model_states import index_model_states
from elastic_ckpt.formats.pickled import open_pickled
from elastic_ckpt.tools.inspection import ERROR, UNCHECKED, Finding
from elastic_ckpt.tools.opened import OpenedCheckpoint

_OF_LAYER = re.compile(r"(\d{1,6})\.(.+)")
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Layers:
    """The shapes in the files of one tensor-parallel rank's layers; ``None`` for a file that cannot be read."""

    shapes: dict[int, dict[str, Shape] | None]

    @cached_property
    def by_name(self) -> Mapping[str, dict[Shape, None]] | None:
        """The shapes, each once, under a name in any of the files; ``None`` if one cannot be read."""
        found: dict[str, dict[Shape, None]] = {}
        for of_file in self.shapes.values():
            if of_file is None:
                return None
            for name, shape in of_file.items():
                found.setdefault(name, {})[shape] = None
        return found


def layer_findings(found: CheckpointInfo, trust_pickle: bool = False) -> Iterator[Finding]:
    """Findings on weights and buffers that the files of layers lack or hold in another shape, of each stage's list.

    Files that are missing or cannot be read are left to who reads the whole checkpoint.
    """
    if not found.files.layers or found.foreign:
        return
    shapes = {at: _shapes_in(found, at, trust_pickle) for at in found.files.layers}
    layers = [_Layers({}) for _ in range(1 + max(tp_rank for _, tp_rank in shapes))]
    for (layer, tp_rank), of_file in shapes.items():
        layers[tp_rank].shapes[layer] = of_file
    for mp, listed in _listed(found, trust_pickle).items():
        tp_rank = mp % len(layers)
        for name, expected in listed.items():
            yield from _of_name(found, name, expected, layers[tp_rank], tp_rank)


def refuse_lost_entries(opened: OpenedCheckpoint, is_wanted: Callable[[str], object] = lambda _: True) -> None:
    """Raise :class:`DamagedError` for buffers and frozen weights that the files of pipeline layers lack.

    These are nowhere else, so that what is written of the rest would lack them without a word. ``is_wanted``: by name.
    """
    found = opened.found
    findings = layer_findings(found, opened.config.trust_pickle)
    trained = opened.metadata.parameters
    lost = [each for each in findings if each.parameter not in trained and is_wanted(str(each.parameter))]
    if lost:
        problem = "files of pipeline layers lack buffers or frozen weights, or have them in another shape"
        expected = "those that the model-states files list"
        remedy = (Remedy("restore the file"), ANOTHER_TAG)
        names = sorted({str(each.parameter) for each in lost})
        raise DamagedError(problem, lost[0].file, expected, lost[0].text, parameter=names, remedy=remedy)


def odd_entries(found: CheckpointInfo, trust_pickle: bool = False) -> Iterator[Finding]:
    """Findings on module entries that are no tensors, where no name of the optimizer's shows whether they should be."""
    for file in found.files.model.values():
        with suppress(ElasticCkptError):
            model = index_model_states(open_pickled(found.path(file), trust_pickle))
            for name, what in model.other_entries.items():
                text = f"is no tensor, but {what}: only a load, which knows the live model, can tell if it is a weight"
                yield Finding(UNCHECKED, "not-checked", text, name, model.path)


def _of_name(found: CheckpointInfo, name: str, expected: Shape | None, layers: _Layers, tp: int) -> Iterator[Finding]:
    """The finding on one name, if any, in the files of a tensor-parallel rank; ``expected``: its shape, if known."""
    match = _OF_LAYER.fullmatch(name)
    tied = _TIED.fullmatch(name)
    if match is not None:
        of_layer = layers.shapes.get(int(match[1]))
        if of_layer is None:
            return
        path = found.path(found.files.layers[int(match[1]), tp])
        have = of_layer.get(match[2])
    elif tied is not None:  # in the file of its first layer, which nothing names
        if layers.by_name is None:
            return
        every = layers.by_name.get(tied[1], {})
        path = found.folder
        have = expected if expected in every else next(iter(every), None)
    else:
        return
    if have is None:
        text = "no tensor under this name in the file of its layer"
        yield Finding(ERROR, "incomplete", text, name, path)
    elif expected is not None and have != expected:
        text = "the file of its layer has it in another shape than the model-states file lists"
        yield Finding(ERROR, "damaged", text, name, path, expected=str(expected), found=str(have))


def _shapes_in(found: CheckpointInfo, at: tuple[int, int], trust_pickle: bool) -> dict[str, Shape] | None:
    """The shapes in the file of one layer and tensor-parallel rank; ``None`` if it cannot be read."""
    with suppress(ElasticCkptError):
        layer = index_layer(open_pickled(found.path(found.files.layers[at]), trust_pickle), *at)
        return {without_hidden(name): ref.shape for name, ref in layer.weights.items()}
    return None


def _listed(found: CheckpointInfo, trust_pickle: bool) -> dict[int, dict[str, Shape | None]]:
    """By model-parallel rank, what its model-states file lists: parameters with shapes, and buffers."""
    listed: dict[int, dict[str, Shape | None]] = {}
    for mp, name in found.files.model.items():
        with suppress(ElasticCkptError):
            model = index_model_states(open_pickled(found.path(name), trust_pickle))
            listed[mp] = dict.fromkeys(model.buffer_names)
            for shapes in (*model.param_shapes, model.frozen_shapes):
                listed[mp] |= dict(shapes)
    return listed
