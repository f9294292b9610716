"""What samples say: a median with its interval, and when a compile pays for itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of `n` samples, and the bootstrap interval that holds it with 95 % confidence (percentile method,
    Efron 1979). Of one or two samples the interval is their range, and says little."""

    median: float
    low: float
    high: float
    n: int


def estimate(samples: Sequence[float]) -> Estimate:
    """The same samples give the same interval: resampling is seeded."""
    if len(samples) < 3:
        return Estimate(median(samples), min(samples), max(samples), len(samples))
    draw = random.Random(0)  # noqa: S311 - statistics, no secret
    medians = sorted(median(draw.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    low, high = _tails(medians)
    return Estimate(median(samples), low, high, len(samples))


def ratio(samples: Sequence[float], of: Sequence[float]) -> Estimate:
    """The median of `samples` over the median of `of`; the two are drawn apart, as their processes were."""
    found = median(samples) / median(of)
    least = min(len(samples), len(of))
    if least < 3:
        return Estimate(found, min(samples) / max(of), max(samples) / min(of), least)
    draw = random.Random(0)  # noqa: S311 - statistics, no secret
    ratios = sorted(
        median(draw.choices(samples, k=len(samples))) / median(draw.choices(of, k=len(of))) for _ in range(RESAMPLES)
    )
    low, high = _tails(ratios)
    return Estimate(found, low, high, least)


def _tails(resampled: Sequence[float]) -> tuple[float, float]:
    """The ends of what is left of sorted values when the tails are cut off."""
    tail = (1 - CONFIDENCE) / 2
    return resampled[int(tail * RESAMPLES)], resampled[int((1 - tail) * RESAMPLES) - 1]


def calls_to_pay(compile_s: float, generic_s: float, specialised_s: float) -> float | None:
    """H, the calls after which a compile of `compile_s` has been earned back: T_compile / (T_generic - T_specialised).

    None when the specialised call is not faster: it never pays. A compile that took no time costs no calls.
    """
    gain = generic_s - specialised_s
    return max(compile_s, 0.0) / gain if gain > 0 else None
