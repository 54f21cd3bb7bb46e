"""The shape of a parameter in a universal checkpoint, by its files and by what the model-states files list.

The converter may give all files of a parameter another shape than the listed one: without the padding of a vocabulary,
or put together from tensor-parallel shards. So files that agree count, and the listed shape tells which of others
differs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from elastic_ckpt.core.metadata import MASTER
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.formats.base import CONVERT_AGAIN


def parameter_shape(shapes: Mapping[str, Shape], listed: Shape, tp: int) -> Shape:
    """The shape of a parameter.

    ``shapes``: of its master and elementwise states, by key; ``listed``: of each of its ``tp`` tensor-parallel shards.
    """
    master = shapes.get(MASTER, listed)
    is_shaped = len(master) > 1 or len(listed) == 1  # from stage 3, they may be flat
    by_master = master if is_shaped else listed
    if all(holds(shape, by_master) for shape in shapes.values()):
        return by_master
    others = (shape for key, shape in shapes.items() if key != MASTER)
    every = [by_master, *(listed if tp == 1 and holds(shape, listed) else shape for shape in others)]
    fitting = [shape for shape in every if is_listed(shape, listed, tp)]
    ((most, _),) = Counter(fitting or every).most_common(1)  # the master's, of as many
    return most


def holds(found: Shape, shape: Shape) -> bool:
    """Whether a file's tensor may be one of a parameter: in its shape, flat, or with a plane for each of its values."""
    is_flat = len(found) == 1 and found[0] == math.prod(shape)
    return is_flat or found == shape or found[1:] == shape


def is_listed(shape: Shape, listed: Shape, tp: int) -> bool:
    """Whether shards of the listed shape make up a parameter of this one, maybe without padding."""
    differing = [(whole, shard) for whole, shard in zip(shape, listed, strict=False) if whole != shard]
    is_joined = all(shard <= whole <= shard * tp for whole, shard in differing)
    return len(shape) == len(listed) and len(differing) <= (tp > 1) and is_joined


def shape_error(name: str, key: str, path: str, shapes: tuple[Shape, Shape, Shape], tp: int) -> MismatchError:
    """The error for a file whose tensor has another shape; ``shapes``: expected, listed for each shard, and found."""
    expected, listed, found = shapes
    text = f"{expected}, as listed" if expected == listed else f"{expected}, of listed shards of {listed}"
    problem = f"{key} of this parameter does not have the shape that the model-states file lists"
    if not is_listed(expected, listed, tp):
        problem = f"{key} of this parameter has another shape than its other files"
        text = f"{expected}, as the others (the model-states file lists {listed})"
    remedy = f"files of two conversions are mixed, or vocabulary padding was stripped: {CONVERT_AGAIN}"
    return MismatchError(problem, path, text, found, parameter=name, remedy=remedy)
