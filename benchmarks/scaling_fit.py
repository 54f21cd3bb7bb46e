"""Fits the coefficients of :mod:`elastic_ckpt.scaling`, and holds points back to check them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_ckpt.scaling import Factors, HeldOut

_TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class Measured:
    """One point: how often each coefficient is to be taken, how long it took, and on how many ranks."""

    factors: Factors
    seconds: float
    ranks: int


def nonnegative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with no negative coefficient: the active sets of Lawson and Hanson.

    Args:
        matrix: (points, coefficients); its columns should be of one size.
        target: (points,).
    """
    count = matrix.shape[1]
    found = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = matrix.T @ (target - matrix @ found)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= _TOLERANCE:
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            falling = passive & (trial <= 0)
            if not falling.any():
                break
            # as far towards the trial as none of them goes below zero
            step = float((found[falling] / (found[falling] - trial[falling])).min())
            found = found + step * (trial - found)
            passive &= found > _TOLERANCE
            found[~passive] = 0
        found = trial
    return found


def fit(points: Sequence[Measured]) -> dict[str, float]:
    """Coefficients by which relative errors are smallest, in the mean square.

    Raises:
        ValueError: no points, or of no duration.
    """
    if not points or min(point.seconds for point in points) <= 0:
        raise ValueError("a fit needs points that took some time")
    names = list(dict.fromkeys(name for point in points for name in point.factors))
    rows = [[point.factors.get(name, 0.0) / point.seconds for name in names] for point in points]
    matrix = np.array(rows, dtype=np.float64)
    sizes = np.linalg.norm(matrix, axis=0)
    sizes[sizes == 0] = 1
    found = nonnegative(matrix / sizes, np.ones(len(points))) / sizes
    return dict(zip(names, found.tolist(), strict=True))


def predicted(coefficients: Mapping[str, float], factors: Factors) -> float:
    """Seconds."""
    return sum(coefficients[name] * count for name, count in factors.items())


def errors(coefficients: Mapping[str, float], points: Sequence[Measured]) -> list[float]:
    """Relative ones: of a prediction that is half or twice as long as it took, 1/2 and 1."""
    return [abs(predicted(coefficients, point.factors) / point.seconds - 1) for point in points]


def held_out(points: Sequence[Measured], is_held: Callable[[int, Measured], bool]) -> HeldOut | None:
    """Fit without some points, and look at these; ``None``: there is nothing to fit, or nothing to look at."""
    held = [point for number, point in enumerate(points) if is_held(number, point)]
    rest = [point for number, point in enumerate(points) if not is_held(number, point)]
    if not held or not rest:
        return None
    found = errors(fit(rest), held)
    return HeldOut(points=len(found), median=float(np.median(found)), worst=max(found))


def checks(points: Sequence[Measured]) -> dict[str, HeldOut]:
    """Every third point, and the greatest number of ranks, by fits that do not know them."""
    most = max(point.ranks for point in points)
    found = {
        "every third point": held_out(points, lambda number, _: number % 3 == 2),
        f"{most} ranks, by fewer": held_out(points, lambda _, point: point.ranks == most),
    }
    return {name: result for name, result in found.items() if result is not None}
