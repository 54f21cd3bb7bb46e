"""Weighted pipeline stages: ``partition_method="type:embed:2|transformer:1"``.

DeepSpeed's ``type:regex`` counts layers of one kind, each as one, and silently ignores what follows a second colon.
Here each alternative ``regex:weight`` weighs the layers whose class or function name it matches: case-insensitively,
anywhere in the name, first alternative first. Unmatched layers weigh nothing. ``weighted_type:`` means the same.
DeepSpeed handles a ``type:`` without weights, and every other method.

Stages are consecutive layers. Of all partitions, :func:`partition_weights` takes the one with the lightest heaviest
stage, then the least sum of squared weights, then of squared layer counts, then with each cut as late as possible.

Once a ``PipelineModule`` is built with such a method, its ``_partition_layers`` (0.19) is wrapped, which also serves
``DualPipeVModule``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.utils import logger
from torch import nn

from elastic_ckpt.errors import ConfigError, listed
from elastic_ckpt.patches import argument, unwrap, wrap

_METHOD = "_partition_layers"
#: How a method of ours begins. DeepSpeed knows ``type:``, too.
_PREFIXES = ("type:", _OWN_PREFIX := "weighted_type:")
#: Between alternatives; a bar in a group belongs to the group.
_BAR = re.compile(r"\|(?![^(]*\))")
#: At most three digits of exponent: "1e-999999999" is a fraction that fills the memory.
_NUMBER = re.compile(r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


def watch_pipe() -> None:
    """Watch for a ``PipelineModule`` with a weighted method. Idempotent."""
    wrap(PipelineModule, "__init__", _init)


def unwatch_pipe() -> None:
    """Undo :func:`watch_pipe` and what it has led to, unless another wrapper is around the patch."""
    unwrap(PipelineModule, "__init__")
    unwrap(PipelineModule, _METHOD)


def _init(original: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
    method = argument(original, "partition_method", (module, *args), kwargs)
    if is_weighted(method):
        wrap(PipelineModule, _METHOD, _partition_layers)
    original(module, *args, **kwargs)


def _partition_layers(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    method: Any = args[0] if args else kwargs.get("method")
    if not is_weighted(method):
        return original(module, *args, **kwargs)
    weights = layer_weights(method, [layer_name(layer) for layer in module._layer_specs])
    module.parts = partition_weights(weights, module.num_stages)
    if module.global_rank == 0:
        logger.info(f"Partitioning pipeline stages with method {method}")
        for stage, (start, stop) in enumerate(itertools.pairwise(module.parts)):
            weight = float(sum(weights[start:stop], Fraction(0)))
            logger.info(f"stage={stage} layers=[{start}, {stop}) weight={weight:.6g}")
    stage = module._topo.get_coord(module.global_rank).pipe
    return module._set_bounds(start=module.parts[stage], stop=module.parts[stage + 1])


def layer_name(layer: Any) -> str | None:
    """The name of a layer in DeepSpeed's ``_find_layer_type``; ``None`` if that ignores the layer."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", None)


def _alternatives(method: str) -> Iterator[tuple[str, str]]:
    """Regex and weight of each alternative; an empty one if it has none."""
    for text in _BAR.split(method.partition(":")[2]):
        regex, _, weight = text.rpartition(":")
        yield (regex.strip(), weight.strip()) if regex or text.startswith(":") else (weight.strip(), "")


def is_weighted(method: Any) -> bool:
    """Whether a partition method is ours: ``weighted_type:``, or ``type:`` with a number after an alternative."""
    if not isinstance(method, str) or not method.lower().startswith(_PREFIXES):
        return False
    if method.lower().startswith(_OWN_PREFIX):
        return True
    for _, weight in _alternatives(method):
        with suppress(ValueError):  # valid as a weight or not, which layer_weights says
            float(weight)
            return True
    return False


def layer_weights(method: str, names: Sequence[str | None]) -> list[Fraction]:
    """The weight of each layer by a weighted partition method; the name ``None`` weighs nothing.

    Raises :class:`ConfigError` if it is malformed, one of its regexes matches no layer, or all weights are zero.
    """
    weighed: list[tuple[re.Pattern[str], Fraction]] = []
    for pattern, weight in _alternatives(method):
        try:
            # not lowercased as by DeepSpeed, which turns \S into \s
            regex = re.compile(pattern, re.IGNORECASE)
        except (re.error, OverflowError) as error:
            raise _wrong(method, f"{pattern!r} does not compile: {error}") from error
        if not pattern or not _NUMBER.fullmatch(weight) or not math.isfinite(float(weight)):
            raise _wrong(method, f"an alternative without a regex and a weight that is a number: '{pattern}:{weight}'")
        if not any(regex.search(name) for name in names if name is not None):
            raise _wrong(method, f"no layer matches '{pattern}', of {listed({name for name in names if name})}")
        weighed.append((regex, Fraction(weight)))  # of the decimal digits, so that three times 0.1 is 0.3
    weights = [
        next((weight for regex, weight in weighed if name is not None and regex.search(name)), Fraction(0))
        for name in names
    ]
    if not any(weights):
        raise _wrong(method, "all layers weigh nothing")
    return weights


def _wrong(method: str, found: str) -> ConfigError:
    problem = f"the partition method {method!r} cannot be used"
    expected = "'type:regex:weight|regex:weight', such as 'type:embed:2|transformer:1'"
    remedy = "write a regex that matches layers, and a weight from 0 on, in every alternative"
    return ConfigError(problem, expected=expected, found=found, remedy=remedy)


def partition_weights(weights: Sequence[Fraction | int], num_parts: int) -> list[int]:
    """The bounds of each stage, as even as the module's docstring defines: stage ``s`` starts at layer ``parts[s]``."""
    count = len(weights)
    if count <= num_parts:
        return [min(stage, count) for stage in range(num_parts + 1)]
    scale = math.lcm(*(weight.denominator for weight in weights))
    sums = [0, *itertools.accumulate(int(weight * scale) for weight in weights)]
    bounds = sums  # by number of layers, the least possible weight of the heaviest stage
    for _ in range(num_parts - 1):
        bounds = [
            min(max(bounds[start], sums[stop] - sums[start]) for start in range(stop + 1)) for stop in range(count + 1)
        ]
    bound = bounds[-1]
    # by number of layers: the least sums of squared weights and of squared layer counts, and minus the last cut
    best = {0: (0, 0, 0)}
    cuts = []
    for _ in range(num_parts):
        found = {
            stop: [
                (squares + (sums[stop] - sums[start]) ** 2, counts + (stop - start) ** 2, -start)
                for start, (squares, counts, _) in best.items()
                if start < stop and sums[stop] - sums[start] <= bound
            ]
            for stop in range(1, count + 1)
        }
        best = {stop: min(each) for stop, each in found.items() if each}
        cuts.append(best)
    parts = [count]
    for best in reversed(cuts):
        parts.append(-best[parts[-1]][2])
    return parts[::-1]
