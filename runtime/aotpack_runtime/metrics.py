"""A Prometheus collector of sessions: `REGISTRY.register(SessionCollector(session))`. Needs the extra `metrics`.

Nothing is counted for it: a scrape reads `session.status()`. Labels are bundles, versions, devices, entries, tiers and
kinds of reason, no shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from aotpack_runtime.errors import MissingDependency
from aotpack_runtime.session import Session

Json = Any
_OWNER = ("bundle", "version", "device")
_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dispatch": ("Calls by what served them", ("entry", "outcome")),
    "guard_miss": ("Calls judged and turned down", ("entry", "reason")),
    "jit_compiles": ("Variants compiled behind misses by this process", ()),
    "jit_failures": ("Compiles behind misses that failed", ()),
    "jit_found": ("Variants that another process had compiled", ()),
    "overlay_evictions": ("Variants removed to make place", ()),
}
_GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ready": ("1 when every hot variant that fits this host is loaded", ()),
    "variants_loaded": ("Artifacts that are loaded", ("entry",)),
    "jit_compile_seconds": ("Of the last compiles", ("quantile",)),
    "jit_running": ("Compiles that run now", ()),
    "jit_cpu_share": ("CPUs taken by compiles, on average", ()),
    "jit_breaker_open": ("1 when compiling has stopped", ()),
    "overlay_bytes": ("Variants of this bundle on disk", ()),
}


class SessionCollector:
    """What `session.status()` says of each session, as metrics.

    `sessions` may be replaced while scrapes go on: by the session of a new version, by those of two side by side. Two
    of one bundle, version and device cannot be told apart in one collector.
    """

    def __init__(self, *sessions: Session) -> None:
        try:
            self._families = import_module("prometheus_client.core")
        except ModuleNotFoundError as error:
            raise MissingDependency(
                "prometheus-client", needed_for="metrics of sessions", install="'aotpack-runtime[metrics]'"
            ) from error
        self.sessions = sessions

    def collect(self) -> Iterator[Any]:
        """The families, anew at each scrape."""
        bundles = self._families.InfoMetricFamily("aotpack_bundle", "The bundle that is served", labels=_OWNER[2:])
        families = {
            name: kind(f"aotpack_{name}", text, labels=[*_OWNER, *labels])
            for kind, table in (
                (self._families.CounterMetricFamily, _COUNTERS),
                (self._families.GaugeMetricFamily, _GAUGES),
            )
            for name, (text, labels) in table.items()
        }
        for session in self.sessions:
            status = session.status()
            bundle, device = status["bundle"], status["device"]
            bundles.add_metric([device], bundle)
            for name, labels, value in _samples(status):
                families[name].add_metric([bundle["name"], bundle["version"], device, *labels], float(value))
        yield from (bundles, *families.values())


def _samples(status: Json) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """(metric, its own labels, value) of one session."""
    yield "ready", (), status["ready"]
    for entry, counts in status["entries"].items():
        for tier, count in counts["hits_by_tier"].items():
            yield "dispatch", (entry, f"hit_{tier}"), count
        for tier, count in counts["misses_by_tier"].items():
            yield "dispatch", (entry, f"miss_{tier}"), count
        yield "dispatch", (entry, "error"), counts["errors"]
        for reason, count in counts["misses_by_reason"].items():
            yield "guard_miss", (entry, reason), count
        yield "variants_loaded", (entry,), len(counts["loaded"])
    jit = status["jit"]
    if jit is None:
        return
    for name in ("compiles", "failures", "found", "running"):
        yield f"jit_{name}", (), jit[name]
    for quantile in ("p50", "p95"):
        if jit["compile_seconds"][quantile] is not None:
            yield "jit_compile_seconds", (f"0.{quantile[1:]}",), jit["compile_seconds"][quantile]
    yield "jit_cpu_share", (), jit["compile_cpu_share"]
    yield "jit_breaker_open", (), jit["breaker"]["state"] == "open"
    yield "overlay_evictions", (), jit["overlay"]["evictions"]
    yield "overlay_bytes", (), jit["overlay"]["bytes"]
