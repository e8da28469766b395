"""Parsing of CRI-O's annotations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.hooks.kit.crio import CrioSettings, crio_settings


@pytest.mark.parametrize(
    ("annotations", "settings"),
    [
        ({}, CrioSettings()),
        ({"cpu-quota.crio.io": "disable"}, CrioSettings(quota_off=True)),
        ({"cpu-quota.crio.io": "true"}, CrioSettings(quota_off=True)),
        ({"irq-load-balancing.crio.io": "disable"}, CrioSettings(irqs="disable")),
        ({"irq-load-balancing.crio.io": "true"}, CrioSettings(irqs="disable")),
        ({"irq-load-balancing.crio.io": "housekeeping"}, CrioSettings(irqs="housekeeping")),
        ({"cpu-load-balancing.crio.io": "disable"}, CrioSettings(balance_off=True)),
        ({"cpu-c-states.crio.io": "enable"}, CrioSettings(latency="0")),
        ({"cpu-c-states.crio.io": "disable"}, CrioSettings(latency="n/a")),
        ({"cpu-c-states.crio.io": "max_latency:010"}, CrioSettings(latency="10")),
        ({"cpu-c-states.crio.io": "max_latency:1"}, CrioSettings(latency="1")),
        ({"cpu-freq-governor.crio.io": "performance"}, CrioSettings(governor="performance")),
        ({"cpu-quota.crio.iox": "disable", "x.crio.io": "y"}, CrioSettings()),
        ({"cpu-shared.crio.io/main": "disable"}, CrioSettings()),
    ],
)
def test_annotations_are_parsed(annotations: dict[str, str], settings: CrioSettings) -> None:
    assert crio_settings(annotations) == (settings, [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu-quota.crio.io", "enable"),
        ("irq-load-balancing.crio.io", "off"),
        ("cpu-load-balancing.crio.io", ""),
        ("cpu-c-states.crio.io", "max_latency:0"),
        ("cpu-c-states.crio.io", "max_latency:-1"),
        ("cpu-c-states.crio.io", "max_latency:99999999"),
        ("cpu-c-states.crio.io", "x max_latency:1"),
        ("cpu-freq-governor.crio.io", "../../x"),
        ("cpu-shared.crio.io/main", "enable"),
    ],
)
def test_settings_that_cannot_be_followed_are_reported_and_kept(key: str, value: str) -> None:
    settings, (problem,) = crio_settings({key: value})
    assert settings == CrioSettings()
    assert problem.startswith(key.partition(".")[0])


@given(st.dictionaries(st.sampled_from(["cpu-c-states.crio.io", "cpu-freq-governor.crio.io"]), st.text()))
def test_only_valid_values_of_the_kernel_are_accepted(annotations: dict[str, str]) -> None:
    settings, _ = crio_settings(annotations)
    assert settings.latency in ("", "0", "n/a") or settings.latency.isdecimal()
    assert settings.governor.replace("_", "").isalpha() or not settings.governor
