"""Weighted pipeline stages: ``partition_method="type:embed:2|transformer:1"``.

DeepSpeed's ``type:regex`` counts layers of one kind, each as one, and silently ignores what follows a second colon.
Here each alternative ``regex:weight`` weighs the layers whose class or function name it matches: case-insensitively,
anywhere in the name, first alternative first. Unmatched layers weigh nothing. ``weighted_type:`` is a synonym that
DeepSpeed alone refuses. DeepSpeed handles a ``type:`` without weights, and every other method.

Stages are consecutive layers. Of all partitions, :func:`partition_weights` takes the one with, in this order,

1. the lightest heaviest stage (DeepSpeed's ``partition_balanced`` often, not always, finds it),
2. the least sum of squared stage weights,
3. no stage without layers, if there are enough layers. This costs nothing: an empty stage can take a layer of
   another, which increases neither the heaviest stage nor the sum of squares,
4. the least sum of squared layer counts, since layers of no weight take time and memory too,
5. each cut as late as possible, so that layers of equal weight are cut as by ``uniform``.

Integer arithmetic gives every rank the same cuts. Once a ``PipelineModule`` is built with such a method,
``PipelineModule._partition_layers`` (0.19) is wrapped, which also serves ``DualPipeVModule``.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.utils import logger
from torch import nn

from elastic_ckpt.errors import ConfigError, listed
from elastic_ckpt.patches import argument, unwrap, wrap

_METHOD = "_partition_layers"
_PLAIN, _WEIGHTED = "type:", "weighted_type:"
_FORM = "'type:regex:weight|regex:weight', such as 'type:embed:2|transformer:1'"
#: An element of a regex, as far as groups matter: an escape, a set, or one character.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
#: At most three digits of exponent: "1e-999999999" is a fraction that fills the memory.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


def watch_pipe() -> None:
    """Watch for a ``PipelineModule`` with a weighted method. Idempotent."""
    wrap(PipelineModule, "__init__", _init)


def unwatch_pipe() -> None:
    """Undo :func:`watch_pipe` and what it has led to, unless another wrapper is around the patch."""
    unwrap(PipelineModule, "__init__")
    unwrap(PipelineModule, _METHOD)


def _init(original: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
    method = argument(original, "partition_method", (module, *args), kwargs)
    if isinstance(method, str) and is_weighted(method):
        wrap(PipelineModule, _METHOD, _partition_layers)
    original(module, *args, **kwargs)


def _partition_layers(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    method = args[0] if args else kwargs.get("method")
    if not isinstance(method, str) or not is_weighted(method):
        return original(module, *args, **kwargs)
    names = [layer_name(layer) for layer in module._layer_specs]
    weights = layer_weights(method, names)
    module.parts = partition_weights(weights, module.num_stages)
    if module.global_rank == 0:
        logger.info(f"Partitioning pipeline stages with method {method}")
        for stage, (start, stop) in enumerate(itertools.pairwise(module.parts)):
            logger.info(f"stage={stage} {_summary(start, names[start:stop], weights[start:stop])}")
    stage = module._topo.get_coord(module.global_rank).pipe
    return module._set_bounds(start=module.parts[stage], stop=module.parts[stage + 1])


def _summary(start: int, names: Sequence[str | None], weights: Sequence[Fraction]) -> str:
    total = sum(weights, Fraction(0))
    weight = Decimal(total.numerator) / total.denominator  # float(total) may overflow
    runs = [(name or "unnamed", len(list(run))) for name, run in itertools.groupby(names)]
    layers = ", ".join(name if count == 1 else f"{name} x {count}" for name, count in runs)
    return f"layers=[{start}, {start + len(names)}) weight={weight:.6g}: {layers or 'none'}"


def layer_name(layer: Any) -> str | None:
    """The name of a layer in DeepSpeed's ``_find_layer_type``; ``None`` if that ignores the layer."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return getattr(layer, "__name__", None)


def is_weighted(method: str) -> bool:
    """Whether a partition method is ours: ``weighted_type:``, or ``type:`` with a number after an alternative."""
    kind = method.lower()
    if kind.startswith(_WEIGHTED):
        return True
    return kind.startswith(_PLAIN) and any(_is_float(_cut_weight(text)[1]) for text in _alternatives(method))


def layer_weights(method: str, names: Sequence[str | None]) -> list[Fraction]:
    """The weight of each layer by a weighted partition method.

    Args:
        method: a method for which :func:`is_weighted` is true.
        names: of the layers; ``None`` weighs nothing.

    Raises:
        ConfigError: the method is malformed, one of its regexes matches no layer, or all weights are zero.
    """
    weighed = [_parse_alternative(text, method) for text in _alternatives(method)]
    for regex, _ in weighed:
        if not any(regex.search(name) for name in names if name is not None):
            raise ConfigError(
                f"the partition method names layers that the model does not have: '{regex.pattern}'",
                expected=f"a regex that matches one of: {listed({name for name in names if name})}",
                found=method,
                remedy="correct the regex, or leave out this alternative",
            )
    weights = [
        next((weight for regex, weight in weighed if name is not None and regex.search(name)), Fraction(0))
        for name in names
    ]
    if not any(weights):
        raise ConfigError(
            "by the partition method, all layers weigh nothing",
            expected="a weight above 0 for some layer",
            found=method,
            remedy="give a weight to the layers that take the most time",
        )
    return weights


def _parse_alternative(text: str, method: str) -> tuple[re.Pattern[str], Fraction]:
    """A regex, and the weight of the layers whose names it matches."""
    pattern, number = _cut_weight(text)
    try:
        # not lowercased as by DeepSpeed, which turns \S into \s
        regex = re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError) as error:
        raise ConfigError(
            f"the partition method has a regex that does not compile: '{pattern}'",
            expected=_FORM,
            found=f"{method} ({error})",
            remedy="correct the regex",
        ) from error
    if not pattern or number is None:
        raise ConfigError(
            f"the partition method has an alternative without {'weight' if pattern else 'regex'}: '{text}'",
            expected=_FORM,
            found=method,
            remedy="write regex:weight in every alternative; layers that match none weigh 0",
        )
    # from the decimal digits, so that three times 0.1 is 0.3
    weight = Fraction(number) if _NUMBER.fullmatch(number) and math.isfinite(float(number)) else None
    if weight is None or weight < 0:
        raise ConfigError(
            f"the partition method has a weight that is no weight: '{number}', of '{pattern}'",
            expected="a finite number that is not negative, such as 2 or 0.5",
            found=method,
            remedy="correct the weight",
        )
    return regex, weight


def _alternatives(method: str) -> list[str]:
    """The alternatives of a method's regex; a ``|`` in a group belongs to the group."""
    text = method[method.index(":") + 1 :]
    bars = [position for position, token in _outside_groups(text) if token == "|"]
    return [text[start + 1 : stop] for start, stop in itertools.pairwise([-1, *bars, len(text)])]


def _cut_weight(text: str) -> tuple[str, str | None]:
    """Regex and weight of an alternative, separated by the last colon that is not in a group such as ``(?:a)``."""
    colons = [position for position, token in _outside_groups(text) if token == ":"]
    if not colons:
        return text.strip(), None
    return text[: colons[-1]].strip(), text[colons[-1] + 1 :].strip()


def _outside_groups(text: str) -> Iterator[tuple[int, str]]:
    """The characters of a regex, with positions, outside groups, sets and escapes."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        elif depth == 0:
            yield match.start(), token


def _is_float(text: str | None) -> bool:
    """Whether this was meant as a number, even if it is no valid weight, such as -1 or nan."""
    try:
        float(text or "")
    except ValueError:
        return False
    return True


def partition_weights(weights: Sequence[Fraction | int], num_parts: int) -> list[int]:
    """Cut layers into stages, as evenly as the module's docstring defines.

    Returns:
        ``num_parts + 1`` ints from 0 to the number of layers; stage ``s`` holds layers ``[parts[s], parts[s + 1])``.

    Raises:
        ValueError: a weight is negative, or there are no stages.
    """
    if num_parts < 1 or any(weight < 0 for weight in weights):
        raise ValueError(f"cannot cut layers of weights {list(weights)} into {num_parts} stages")
    count = len(weights)
    if count <= num_parts:
        return [min(stage, count) for stage in range(num_parts + 1)]
    scale = math.lcm(*(weight.denominator for weight in weights))
    sums = [0, *itertools.accumulate(int(weight * scale) for weight in weights)]
    bound = _least_bound(sums, num_parts)
    return _most_even(_cost(sums, bound), count, num_parts)


def _least_bound(sums: Sequence[int], num_parts: int) -> int:
    """The least possible weight of the heaviest stage; ``sums`` are the weights of the first 0, 1, 2, ... layers."""
    low = max(stop - start for start, stop in itertools.pairwise(sums))
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        position = 0
        for _ in range(num_parts):  # each stage takes all that it can carry
            position = bisect_right(sums, sums[position] + middle) - 1
        if position == len(sums) - 1:
            high = middle
        else:
            low = middle + 1
    return low


def _cost(sums: Sequence[int], bound: int) -> Callable[[int, int], int]:
    """The cost of a stage from one layer to another; the best partition has the least sum of costs.

    Three criteria in one number, each outweighing any sum of the following ones: weight beyond ``bound``, square of the
    weight, square of the number of layers. All are convex, and so is the sum, which :func:`_most_even` relies on;
    infinite costs would make all invalid partitions tie.
    """
    for_weight = len(sums) ** 2
    for_excess = for_weight * (sums[-1] ** 2 + 1)

    def cost(start: int, stop: int) -> int:
        weight = sums[stop] - sums[start]
        excess = for_excess * (weight - bound) if weight > bound else 0
        return excess + for_weight * weight * weight + (stop - start) ** 2

    return cost


def _most_even(cost: Callable[[int, int], int], count: int, num_parts: int) -> list[int]:
    """Dynamic programming: the best cuts of the first ``stop`` layers into ``stage`` non-empty stages.

    For a convex cost, the last cut does not move back when a layer is added, nor when a stage is added (Knuth and Yao).
    Searching between these bounds makes it quadratic in all; of equally good cuts, it takes the last.
    """
    best = [cost(0, stop) if stop else 0 for stop in range(count + 1)]
    cuts = [[0] * (count + 1)]
    for stage in range(2, num_parts + 1):
        before, fewer = best, cuts[-1]
        best, last = [0] * (count + 1), [0] * (count + 1)
        latest = count - 1
        for stop in range(count, stage - 1, -1):
            starts = range(max(fewer[stop], stage - 1), min(latest, stop - 1) + 1)
            best[stop], back = min((before[start] + cost(start, stop), -start) for start in starts)
            last[stop] = latest = -back
        cuts.append(last)
    parts = [count]
    for last in reversed(cuts):
        parts.append(last[parts[-1]])
    return parts[::-1]
