"""Is a compile worth it? Pure: seconds in, a verdict out.

What the fallback serves in `d` seconds a variant of its own would have served in `d * ratio`. The rule is that of
renting or buying: compile when what was lost, `d * (1 - ratio)`, reaches a share of the compile seconds. A shape that
came so often is expected to come as often again, so half of the seconds are enough; which share is best depends on the
traffic (of shapes that stay, the sooner the better; of shapes that come once, never), so once some shapes are known it
is the one that would be best for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

When = Literal["pays", "at_once", "never"]
SHARES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, math.inf)
"""What a shape must have lost before it is compiled, in compile seconds."""
ENOUGH = 4
"""Shapes to have seen before another share is believed than the one that follows from `AGAIN`."""
AGAIN = 2.0
"""All the calls of a shape, over those that were seen: half of its life is over, for all that is known."""
UNKNOWN_COMPILE_S = 20.0
"""Until something was compiled: what a small model takes on two cores (torch 2.13), and niced for a larger one."""
UNKNOWN_RATIO = 0.6
"""Until something was compiled: the variant's seconds over the fallback's."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a compile is expected to take, and the seconds of its variant over the fallback's. `from_` says where both
    come from."""

    compile_s: float = UNKNOWN_COMPILE_S
    ratio: float = UNKNOWN_RATIO
    source: str = "nothing compiled yet"

    @property
    def gain(self) -> float:
        """Seconds saved for each second of the fallback; 0 or less when a variant is no faster."""
        return 1.0 - self.ratio


Past = Sequence[tuple[float, float, float]]
"""(compile, fallback, variant) seconds of what was compiled before."""


def estimate(own: Past, siblings: Past) -> Estimate:
    """From what was compiled for this entry, else for the other entries of the bundle: the medians."""
    for past, source in ((own, "this entry"), (siblings, "other entries")):
        ratios = [variant / fallback for _, fallback, variant in past if fallback > 0]
        if past and ratios:
            return Estimate(median(compile_s for compile_s, _, _ in past), median(ratios), source)
    return Estimate()


def due_s(when: When, known: Estimate, share: float = 1 / AGAIN) -> float:
    """Seconds of the fallback after which a compile is worth it; infinite for never."""
    if when == "at_once":
        return 0.0
    if when == "never" or known.gain <= 0:
        return math.inf
    return share * known.compile_s / known.gain


def best_share(demands: Iterable[float], known: Estimate) -> float:
    """Of `SHARES`, the one with which shapes of these demands (seconds that the fallback took, or would have taken, for
    all of their calls) will have cost the least when they have come as often again."""
    expected = [AGAIN * demand for demand in demands]
    if len(expected) < ENOUGH or known.gain <= 0:
        return 1 / AGAIN
    return min(SHARES, key=lambda share: sum(cost_s(demand, known, share) for demand in expected))


def cost_s(demand_s: float, known: Estimate, share: float) -> float:
    """Seconds that a shape of this demand costs in all, its compile included."""
    due = due_s("pays", known, share)
    if demand_s <= due:
        return demand_s
    return due + known.compile_s + (demand_s - due) * known.ratio
