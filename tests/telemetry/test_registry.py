"""Counters only go up, and every declared metric is exported under its names."""

from __future__ import annotations

import threading

import pytest

from proxy.engine.likely_writer import WriterKind
from proxy.telemetry import metrics
from proxy.telemetry.exposition import family
from proxy.telemetry.registry import Counter, Gauge, Histogram, Registry
from tests.testkit.captured_log import telemetry


def test_a_counter_never_goes_down() -> None:
    registry = Registry()
    registry.add(metrics.RECONCILES, 2, {})
    with pytest.raises(ValueError, match="a counter never goes down"):
        registry.add(metrics.RECONCILES, -1, {})
    assert registry.value(metrics.RECONCILES, {}) == 2


def test_labels_are_those_of_the_declaration() -> None:
    port = telemetry()
    for labels in ({}, {"kind": "x"}, {"author": "runc", "kind": "x"}):
        with pytest.raises(ValueError, match="cannot use labels"):
            port.count(metrics.DRIFT_REPAIRED, **labels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot use labels"):
        port.count(metrics.RECONCILES, author="runc")
    with pytest.raises(ValueError, match="cannot use labels"):
        family(metrics.POOL_CPUS, [({"node": 0}, 1)])


def test_the_values_of_labels_can_be_encoded() -> None:
    metric = next(
        each for each in metrics.DAEMON_METRICS if isinstance(each, Gauge) and len(each.labels) == 1
    )
    text = family(metric, [({metric.labels[0]: 'a"\\\n\udcff'}, 1)])
    assert r'="a\"\\\n\\udcff"} 1' in text
    text.encode()


def test_names_are_unique_and_well_formed() -> None:
    names = [m.full_name(n) for m in metrics.DAEMON_METRICS for n in (m.name, m.former) if n]
    assert len(names) == len(set(names))
    assert not [n for n in names if not n.replace("_", "").isalnum() or n != n.lower()]
    assert not [m.name for m in metrics.DAEMON_METRICS if not m.help.endswith(".") or "\n" in m.help]
    keys = [
        key
        for m in metrics.DAEMON_METRICS
        if isinstance(m, Counter) and m not in metrics.HOOK_METRICS
        for key in (m.status_key or m.name, m.former)
        if key
    ]
    assert len(keys) == len(set(keys))


def test_every_counter_is_exported_from_the_start_also_as_before() -> None:
    text = Registry().text()
    for metric in metrics.DAEMON_METRICS:
        if isinstance(metric, Gauge) or metric in metrics.HOOK_METRICS:
            continue
        kind = "histogram" if isinstance(metric, Histogram) else "counter"
        for name in (metric.name, metric.former):
            if name:
                assert f"# TYPE {metric.full_name(name)} {kind}\n" in text
                assert metric.labels or f"\n{metric.full_name(name)}" in text
    assert "topoproxy_reconciles_total 0\n" in text
    assert "topoproxy_passes_total 0\n" in text


def test_the_status_has_what_was_counted_under_both_keys() -> None:
    registry = Registry()
    registry.add(metrics.RECONCILES, 3, {})
    registry.add(metrics.CPUSETS_REPAIRED, 1, {})
    registry.add(metrics.DRIFT_REPAIRED, 2, {"author": WriterKind.RUNC})
    registry.add(metrics.ADMISSION_LIMITS, 4, {"verdict": "shared", "rule": "whole-cpus"})
    assert registry.page() == {
        "reconciles": 3,
        "passes": 3,
        "drift_repaired": 1,
        "drift_by_runc": 2,
        "admission_whole-cpus_shared": 4,
    }


def test_a_histogram_counts_into_buckets() -> None:
    registry = Registry()
    bounds = metrics.BARRIER_WAIT_SECONDS.buckets
    assert list(bounds) == sorted(bounds)
    for seconds in (0.0, bounds[0], bounds[0] * 1.01, 9.9, 1000.0):
        registry.observe(metrics.BARRIER_WAIT_SECONDS, seconds, {})
    name = "topoproxy_barrier_wait_seconds"
    text = registry.text()
    assert f'{name}_bucket{{le="{bounds[0]}"}} 2\n{name}_bucket{{le="{bounds[1]}"}} 3\n' in text
    assert f'{name}_bucket{{le="10"}} 4\n{name}_bucket{{le="+Inf"}} 5\n{name}_sum 1009.9' in text
    assert f"{name}_count 5\n" in text


def test_threads_lose_no_count() -> None:
    registry = Registry()

    def work() -> None:
        for _ in range(5000):
            registry.add(metrics.CPUSETS_WRITTEN, 1, {})
            registry.observe(metrics.KERNEL_WRITE_SECONDS, 0.001, {})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.value(metrics.CPUSETS_WRITTEN, {}) == 20_000
    assert "topoproxy_kernel_write_seconds_count 20000\n" in registry.text()
