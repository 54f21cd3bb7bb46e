"""What the states that optimizers keep under known names may be: one rule for all formats.

Moments are tensors of real numbers, and a step is one real number. Anything else under these names is damage of the
file, unless ``"states"`` of the config says what another optimizer keeps there. A load without states judges none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_ckpt.core.metadata import is_floating
from elastic_ckpt.core.state_kinds import MOMENTS, StateOptions
from elastic_ckpt.core.strided import Shape
from elastic_ckpt.core.values import TensorValue, numbers
from elastic_ckpt.errors import DamagedError

STEP = "step"
MOMENTUM = "momentum_buffer"
_KNOWN = (STEP, *MOMENTS, MOMENTUM)
_PROBLEM = "an optimizer state of this file is not what optimizers keep under its name"
_A_STEP = "a real number, finite and not negative"
_A_MOMENT = "a tensor of real numbers"


def _is_judged(key: str, options: StateOptions) -> bool:
    """Whether a state has to be what is known under its name: it is restored, and the user says nothing of it."""
    return options.are_restored and options.layout(key) is None


def is_real(dtype: str) -> bool:
    """Whether a dtype's values are real numbers that optimizers count and compute with, which float8 are not."""
    return dtype != "bool" and not dtype.startswith(("complex", "float8"))


def check_tensor(
    path: str, key: str, dtype: str, shape: Shape, options: StateOptions, parameter: str | None = None
) -> None:
    """Raise :class:`DamagedError` for a tensor under a known name that has another dtype, or steps that are several.

    ``path``: its file; ``parameter``: the FQN of its parameter, where that is known. Local.
    """
    if not _is_judged(key, options):
        return
    found = f"a tensor of {dtype}, shape {shape}"
    if key == STEP and (not is_real(dtype) or math.prod(shape) != 1):
        raise _error(path, key, _A_STEP, found, parameter)
    if key in (*MOMENTS, MOMENTUM) and not is_floating(dtype):
        raise _error(path, key, _A_MOMENT, found, parameter)


def check_value(path: str, key: str, value: Any, options: StateOptions, parameter: str | None = None) -> None:
    """Raise :class:`DamagedError` for a value under a known name that is not a tensor, or counts no steps.

    ``value``: as Python has it, or a tensor without dimensions as :class:`TensorValue`. torch's SGD keeps ``None`` for
    a momentum that it does not use. Local.
    """
    if not _is_judged(key, options):
        return
    if key == STEP and not _counts(value):
        raise _error(path, key, _A_STEP, value_text(value), parameter)
    is_point = isinstance(value, TensorValue)
    if (key in MOMENTS and not is_point) or (key == MOMENTUM and not is_point and value is not None):
        raise _error(path, key, _A_MOMENT, value_text(value), parameter)


def check_scalars(
    path: str, scalars: Iterable[tuple[str, Any]], options: StateOptions, parameter: str | None = None
) -> None:
    """Raise :class:`DamagedError` for a moment that is one number, beside a parameter that has dimensions. Local."""
    for key, value in scalars:
        if key in (*MOMENTS, MOMENTUM) and value is not None and _is_judged(key, options):
            raise _error(path, key, _A_MOMENT, value_text(value), parameter)


def check_key(path: str, key: str, options: StateOptions, parameter: str | None = None) -> None:
    """Raise :class:`DamagedError` for the key of an item of a collection that has the place of a known state.

    ``torch.distributed.checkpoint`` saves each item of a dictionary as an entry of its own. Local.
    """
    above, _, item = key.partition(".")
    if item and above in _KNOWN and _is_judged(key, options) and _is_judged(above, options):
        expected = _A_STEP if above == STEP else _A_MOMENT
        raise _error(path, above, expected, f"a collection with {item[:40]!r}", parameter)


def check_shapes(path: str, states: Mapping[str, Shape], own: Shape, options: StateOptions, parameter: str) -> None:
    """Raise :class:`DamagedError` for moments of one parameter that differ in shape, ``own`` being the parameter's.

    Whatever the shape is in which an optimizer keeps them, it is that of all; some keep several planes of it.
    """
    shapes = {key: states[key] for key in MOMENTS if key in states and _is_judged(key, options)}
    single = {key: own if shape[1:] == own and shape[:1] > (1,) else shape for key, shape in shapes.items()}
    if len(set(single.values())) > 1:
        found = ", ".join(f"{key} of shape {shape}" for key, shape in shapes.items())
        problem = "the moments of a parameter do not fit together"
        raise DamagedError(problem, path, f"one shape for all, as {own}", found, parameter=parameter)


def check_master(path: str, dtype: str, shape: Shape, parameter: str) -> None:
    """Raise :class:`DamagedError` for the weights of a trained parameter that are no real numbers."""
    if not is_floating(dtype):
        found = f"a tensor of {dtype}, shape {shape}"
        raise DamagedError("this trained parameter has no real numbers", path, _A_MOMENT, found, parameter=parameter)


def value_text(value: Any) -> str:
    """A value in short, whatever it is."""
    if value is None or isinstance(value, (bool, float, complex, TensorValue)):
        return str(value)
    if isinstance(value, int) and abs(value) < 1 << 64:
        return str(value)
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return f"an object of type {type(value).__name__}"


def _counts(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, TensorValue) and not is_real(value.dtype):
        return False
    found: Iterable[float] = numbers(value)
    return bool(found) and all(math.isfinite(each) and each >= 0 for each in found)


def _error(path: str, key: str, expected: str, found: str, parameter: str | None) -> DamagedError:
    words = f'{expected}; for what another optimizer keeps under this name, "states" names {key}'
    return DamagedError(_PROBLEM, path, f"optimizer state {key}: {words}", found, parameter=parameter)
