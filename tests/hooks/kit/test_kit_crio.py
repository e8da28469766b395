"""What CRI-O's annotations say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.hooks.kit.crio import Wish, wish_of


@pytest.mark.parametrize(
    ("annotations", "wish"),
    [
        ({}, Wish()),
        ({"cpu-quota.crio.io": "disable"}, Wish(quota_off=True)),
        ({"cpu-quota.crio.io": "true"}, Wish(quota_off=True)),
        ({"irq-load-balancing.crio.io": "disable"}, Wish(irqs="disable")),
        ({"irq-load-balancing.crio.io": "true"}, Wish(irqs="disable")),
        ({"irq-load-balancing.crio.io": "housekeeping"}, Wish(irqs="housekeeping")),
        ({"cpu-load-balancing.crio.io": "disable"}, Wish(balance_off=True)),
        ({"cpu-c-states.crio.io": "enable"}, Wish(latency="0")),
        ({"cpu-c-states.crio.io": "disable"}, Wish(latency="n/a")),
        ({"cpu-c-states.crio.io": "max_latency:010"}, Wish(latency="10")),
        ({"cpu-c-states.crio.io": "max_latency:1"}, Wish(latency="1")),
        ({"cpu-freq-governor.crio.io": "performance"}, Wish(governor="performance")),
        ({"cpu-quota.crio.iox": "disable", "x.crio.io": "y"}, Wish()),
        ({"cpu-shared.crio.io/main": "disable"}, Wish()),
    ],
)
def test_what_hooks_receive(annotations: dict[str, str], wish: Wish) -> None:
    assert wish_of(annotations) == (wish, [])


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
    wish, (problem,) = wish_of({key: value})
    assert wish == Wish()
    assert problem.startswith(key.partition(".")[0])


@given(st.dictionaries(st.sampled_from(["cpu-c-states.crio.io", "cpu-freq-governor.crio.io"]), st.text()))
def test_only_words_of_the_kernel_get_through(annotations: dict[str, str]) -> None:
    wish, _ = wish_of(annotations)
    assert wish.latency in ("", "0", "n/a") or wish.latency.isdecimal()
    assert wish.governor.replace("_", "").isalpha() or not wish.governor
