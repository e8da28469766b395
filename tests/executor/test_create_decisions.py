"""A create that is decided twice is counted once, and no counter goes down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proxy.engine.container_events import CreateDelegated
from proxy.executor import decision_history as history_module
from proxy.model.explanation import Explanation
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, Request
from tests.testkit.changed_copy import changed_copy


def test_the_explanation_of_a_container_that_shares_is_made_on_request(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = history_module.explain_pooled

    def explained(container: Container, cpus: CpuSet, event: str) -> Explanation:
        made.append(container.ref)
        return real(container, cpus, event)

    monkeypatch.setattr(history_module, "explain_pooled", explained)

    async def scenario(world: Any) -> None:
        await world.run(await world.pod("ls", "LS"))
        assert made == []
        (record,) = world.executor.history.find("ls")
        assert made == ["ns/ls/c"]
        assert not record.explanation.applied
        assert str(record.explanation.cpus) == "0-15"

    run_scenario(scenario, mode=NodeMode.OBSERVE)


@pytest.mark.parametrize("second", ["4-5", "0-1"])
def test_no_counter_goes_down_when_a_create_is_decided_again(
    run_scenario: Callable[..., None], second: str
) -> None:
    """The second decision uses other CPUs or refuses the create: 0-1 have an owner by then."""

    async def scenario(world: Any) -> None:
        await world.run(await world.pod("a", "LSE", "", "0-1"))
        sandbox = await world.pod("b", "LSE", "", "2-3")
        executor, pod = world.executor, world.executor.state.pods[sandbox]
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

    run_scenario(scenario)
