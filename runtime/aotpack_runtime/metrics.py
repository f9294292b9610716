"""A Prometheus collector of sessions: `REGISTRY.register(SessionCollector(session))`. Needs the extra `metrics`.

Nothing is counted for it: a scrape reads `session.status()`. Labels are entries, tiers and kinds of reason, no shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from aotpack_runtime.errors import MissingDependency
from aotpack_runtime.session import Session

Json = Any


class SessionCollector:
    """What `session.status()` says, as metrics."""

    def __init__(self, session: Session) -> None:
        try:
            self._families = import_module("prometheus_client.core")
        except ModuleNotFoundError as error:
            raise MissingDependency(
                "prometheus-client", needed_for="metrics of sessions", install="'aotpack-runtime[metrics]'"
            ) from error
        self._session = session

    def collect(self) -> Iterator[Any]:
        """The families, anew at each scrape."""
        status = self._session.status()
        yield self._families.InfoMetricFamily(
            "aotpack_bundle", "The bundle that is served", value=dict(status["bundle"])
        )
        yield self._gauge("aotpack_ready", "1 when every hot variant that fits this host is loaded", status["ready"])
        yield from self._of_entries(status["entries"])
        if status["jit"] is not None:
            yield from self._of_jit(status["jit"])

    def _of_entries(self, entries: Json) -> Iterator[Any]:
        dispatch = self._families.CounterMetricFamily(
            "aotpack_dispatch", "Calls by what served them", labels=["entry", "outcome"]
        )
        missed = self._families.CounterMetricFamily(
            "aotpack_guard_miss", "Calls judged and turned down", labels=["entry", "reason"]
        )
        loaded = self._families.GaugeMetricFamily(
            "aotpack_variants_loaded", "Artifacts that are loaded", labels=["entry"]
        )
        for name, counts in entries.items():
            outcomes = {f"hit_{tier}": count for tier, count in counts["hits_by_tier"].items()}
            outcomes |= {f"miss_{tier}": count for tier, count in counts["misses_by_tier"].items()}
            for outcome, count in {**outcomes, "error": counts["errors"]}.items():
                dispatch.add_metric([name, outcome], count)
            for reason, count in counts["misses_by_reason"].items():
                missed.add_metric([name, reason], count)
            loaded.add_metric([name], len(counts["loaded"]))
        yield from (dispatch, missed, loaded)

    def _of_jit(self, jit: Json) -> Iterator[Any]:
        for name, text in (
            ("compiles", "Variants compiled behind misses by this process"),
            ("failures", "Compiles behind misses that failed"),
            ("found", "Variants that another process had compiled"),
        ):
            family = self._families.CounterMetricFamily(f"aotpack_jit_{name}", text)
            family.add_metric([], jit[name])
            yield family
        evictions = self._families.CounterMetricFamily("aotpack_overlay_evictions", "Variants removed to make place")
        evictions.add_metric([], jit["overlay"]["evictions"])
        yield evictions
        seconds = self._families.GaugeMetricFamily(
            "aotpack_jit_compile_seconds", "Of the last compiles", labels=["quantile"]
        )
        for quantile in ("p50", "p95"):
            if jit["compile_seconds"][quantile] is not None:
                seconds.add_metric([f"0.{quantile[1:]}"], jit["compile_seconds"][quantile])
        yield seconds
        yield self._gauge("aotpack_jit_running", "Compiles that run now", jit["running"])
        yield self._gauge("aotpack_jit_cpu_share", "CPUs taken by compiles, on average", jit["compile_cpu_share"])
        yield self._gauge("aotpack_jit_breaker_open", "1 when compiling has stopped", jit["breaker"]["state"] == "open")
        yield self._gauge("aotpack_overlay_bytes", "Variants of this bundle on disk", jit["overlay"]["bytes"])

    def _gauge(self, name: str, text: str, value: float) -> Any:
        family = self._families.GaugeMetricFamily(name, text)
        family.add_metric([], float(value))
        return family
