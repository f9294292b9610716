"""Is a compile worth it: the rule, what it is estimated from, and replayed traffic against the best choice in hindsight."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from aotpack_runtime.jit.budget import OPEN_AT, OPEN_S, Breaker, pause_s
from aotpack_runtime.jit.decide import AGAIN, SHARES, Estimate, best_share, cost_s, due_s, estimate

COMPILE_S, FALLBACK_S, RATIO = 20.0, 0.10, 0.25


@pytest.mark.parametrize(
    ("when", "ratio", "wanted"),
    [
        pytest.param("at_once", 0.5, 0.0, id="at-once"),
        pytest.param("at_once", 2.0, 0.0, id="at-once-is-an-order"),
        pytest.param("never", 0.1, math.inf, id="never"),
        pytest.param("pays", 0.5, 40.0, id="half-the-seconds"),
        pytest.param("pays", 0.0, 20.0, id="for-nothing"),
        pytest.param("pays", 1.0, math.inf, id="no-faster"),
        pytest.param("pays", 3.0, math.inf, id="slower"),
    ],
)
def test_a_compile_is_due_when_what_was_lost_reaches_its_seconds(when: str, ratio: float, wanted: float) -> None:
    assert due_s(when, Estimate(20.0, ratio), 1.0) == pytest.approx(wanted)  # type: ignore[arg-type]


def test_estimates_come_from_the_entry_then_from_its_siblings_then_from_nothing() -> None:
    own, siblings = [(10.0, 0.5, 0.25), (14.0, 0.5, 0.125), (12.0, 0.5, 0.0625)], [(3.0, 0.01, 0.009)]
    found = estimate(own, siblings)
    assert found == Estimate(12.0, 0.25, "this entry")
    found = estimate([], siblings)
    assert found == Estimate(3.0, pytest.approx(0.9), "other entries")  # type: ignore[arg-type]
    assert estimate([], []) == Estimate()


@pytest.mark.parametrize(("failures", "wanted"), [(0, 0), (1, 60), (2, 240), (3, 960), (4, 3840), (9, 21600)])
def test_a_key_that_failed_is_left_alone_for_longer_each_time(failures: int, wanted: float) -> None:
    assert pause_s(failures) == wanted


def test_the_breaker_opens_when_most_compiles_fail_and_closes_after_one_that_is_well() -> None:
    now = [0.0]
    breaker = Breaker(clock=lambda: now[0])
    for number in range(OPEN_AT):
        assert breaker.allows(), number
        breaker.note(ok=False)
    assert not breaker.allows()
    assert breaker.record()["state"] == "open"
    now[0] += OPEN_S
    assert [breaker.allows(), breaker.allows()] == [True, False]  # one at a time tries
    breaker.note(ok=False)
    assert not breaker.allows()
    now[0] += OPEN_S
    assert breaker.allows()
    breaker.note(ok=True)
    assert [breaker.allows(), breaker.allows()] == [True, True]
    assert breaker.record()["state"] == "closed"


# ---------------------------------------------------------------------------------------------- replayed traffic


def zipf(seed: int, calls: int, shapes: int, power: float) -> list[int]:
    """Shapes by popularity, as request lengths and batch sizes are."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) ** power for rank in range(shapes)]
    return draw.choices(range(shapes), weights, k=calls)


def drifting(seed: int, calls: int) -> list[int]:
    """Five shapes at a time, which another five follow."""
    draw = random.Random(seed)
    return [5 * (number * 6 // calls) + draw.randrange(5) for number in range(calls)]


def once_each(seed: int, calls: int) -> list[int]:
    """A few shapes that stay, among many that come a few times and never again."""
    draw = random.Random(seed)
    return [draw.randrange(3) if draw.random() < 0.5 else 1000 + number // 40 for number in range(calls)]


def with_share(trace: list[int], share: float) -> float:
    """Seconds that the trace takes, compiles included, with this share of what is known beforehand."""
    known = Estimate(COMPILE_S, RATIO)
    return sum(cost_s(calls * FALLBACK_S, known, share) for calls in Counter(trace).values())


def by_the_rule(trace: list[int]) -> float:
    """The same by the rule, which knows what was compiled so far and which shapes it has seen."""
    known, share, total = Estimate(), 1 / AGAIN, 0.0
    calls: Counter[int] = Counter()
    compiled: set[int] = set()
    for shape in trace:
        calls[shape] += 1
        if shape in compiled:
            total += FALLBACK_S * RATIO
        elif (calls[shape] - 1) * FALLBACK_S < due_s("pays", known, share):
            total += FALLBACK_S
        else:
            total += COMPILE_S + FALLBACK_S * RATIO
            compiled.add(shape)
            known = Estimate(COMPILE_S, RATIO)
            share = best_share((count * FALLBACK_S for count in calls.values()), known)
    return total


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(zipf(1, 200_000, 40, 1.1), id="zipf"),
        pytest.param(zipf(2, 50_000, 300, 0.8), id="zipf-long-tail"),
        pytest.param(zipf(3, 200_000, 10, 0.0), id="ten-alike"),
        pytest.param(drifting(4, 200_000), id="drifting"),
        pytest.param(once_each(5, 200_000), id="many-once"),
    ],
)
def test_replayed_traffic_takes_at_most_a_tenth_more_than_with_the_best_threshold_in_hindsight(
    trace: list[int],
) -> None:
    best = min(with_share(trace, share) for share in SHARES)
    assert by_the_rule(trace) <= 1.10 * best


def test_shapes_that_nearly_pay_cost_at_most_half_more_than_knowing_it() -> None:
    """The worst traffic for any rule: 300 shapes that each come just often enough, as only the end shows."""
    trace = zipf(2, 200_000, 300, 0.8)
    assert by_the_rule(trace) <= 1.5 * min(with_share(trace, share) for share in SHARES)


def test_the_share_is_the_best_for_the_shapes_seen() -> None:
    known = Estimate(COMPILE_S, RATIO)
    busy, rare = [500.0] * 8, [5.0] * 8
    assert best_share(busy, known) == 0.0
    assert best_share(rare, known) >= 0.25
    assert best_share([5.0], known) == 1 / AGAIN  # too few to say
    for demands in (busy, rare, busy + rare):
        chosen, expected = best_share(demands, known), [AGAIN * demand for demand in demands]
        assert sum(cost_s(one, known, chosen) for one in expected) == min(
            sum(cost_s(one, known, share) for one in expected) for share in SHARES
        )
