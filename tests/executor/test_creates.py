"""A create that is decided twice is counted once, and no counter goes down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proxy.engine.container_events import CreateDelegated
from proxy.model.idset import CpuSet
from proxy.model.workload import Request
from tests.testkit.changed_copy import changed_copy


@pytest.mark.parametrize("second", ["4-5", "0-1"])
def test_no_counter_goes_down_when_a_create_is_decided_again(live: Callable[..., None], second: str) -> None:
    """The second decision places the container on other CPUs, or refuses it: 0-1 have an owner."""

    async def day(w: Any) -> None:
        await w.run(await w.pod("a", "LSE", "", "0-1"))
        sandbox = await w.pod("b", "LSE", "", "2-3")
        executor, pod = w.executor, w.executor.state.pods[sandbox]
        first = executor.creates.place(pod, "c", 0, Request()).plan
        executor.store.handle(CreateDelegated(first.container.id, "2-3", "0", -1))
        before = executor.telemetry.registry.page()
        assert before["creates_placed"] == 2
        moved = changed_copy(pod, cpuset=CpuSet.parse(second))
        again = executor.creates.place(moved, "c", 0, Request()).plan
        assert again.verdict.admitted is (second == "4-5")
        after = executor.telemetry.registry.page()
        assert {name: (n, after.get(name, 0)) for name, n in before.items() if after.get(name, 0) < n} == {}
        assert after["creates_placed"] == 2
        assert after.get("creates_failed", 0) == 0
        assert after.get("creates_refused", 0) == (0 if again.verdict.admitted else 1)

    live(day)
