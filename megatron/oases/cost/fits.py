"""From measured points to values between and beyond them, and how far such values are off."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Interpolation = Callable[[Sequence[float], Sequence[float], float], float]


@dataclass(frozen=True, kw_only=True)
class Line:
    """y = fixed + slope · x, neither of them negative; `residual` is the root mean square of the relative error."""

    fixed: float
    slope: float
    residual: float

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Least squares on relative error: minimises the sum of ((fixed + slope · x - y) / y)².

    Small points weigh as much as large ones, so that latency is not lost in the error of the largest size. All `ys`
    must be above 0. Points of one x only give a line through the origin.

    Raises:
        ValueError: there is no point.
    """
    if not xs:
        raise ValueError("a line through no point")
    s0 = sum(1 / y**2 for y in ys)
    sx = sum(x / y**2 for x, y in zip(xs, ys, strict=True))
    sxx = sum(x**2 / y**2 for x, y in zip(xs, ys, strict=True))
    sy = sum(1 / y for y in ys)
    sxy = sum(x / y for x, y in zip(xs, ys, strict=True))
    determinant = s0 * sxx - sx**2
    if len(set(xs)) < 2:
        fixed, slope = 0.0, sxy / sxx
    else:
        fixed, slope = (sxx * sy - sx * sxy) / determinant, (s0 * sxy - sx * sy) / determinant
    if fixed < 0:
        fixed, slope = 0.0, sxy / sxx
    if slope < 0:
        fixed, slope = sy / s0, 0.0
    squares = [((fixed + slope * x - y) / y) ** 2 for x, y in zip(xs, ys, strict=True)]
    return Line(fixed=fixed, slope=slope, residual=math.sqrt(sum(squares) / len(squares)))


def piecewise_linear(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at `x` on the line between its neighbours; beyond the ends on the line of the last two points.

    `xs` increase; there are at least two.
    """
    right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def piecewise_log(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """As `piecewise_linear`, with both axes logarithmic. All numbers are above 0."""
    return math.exp(piecewise_linear([math.log(each) for each in xs], [math.log(each) for each in ys], math.log(x)))


def held_out_errors(xs: Sequence[float], ys: Sequence[float], interpolate: Interpolation) -> list[float]:
    """For every point between two others: the relative error with which all the others give it."""
    errors = []
    for i in range(1, len(xs) - 1):
        given = interpolate([*xs[:i], *xs[i + 1 :]], [*ys[:i], *ys[i + 1 :]], xs[i])
        errors.append(abs(given - ys[i]) / ys[i])
    return errors
