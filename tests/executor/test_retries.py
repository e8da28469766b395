"""A repeated create may return the container that an earlier one made (CRI-O does so)."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.engine import runtime_knowledge


async def made_by_the_first(world: Any, status: int | None) -> str:
    """A create fails, CPUs get an owner, and the next create returns the container of the first one."""
    sandbox = await world.pod("early", "LS")
    first = await world.begin(sandbox)
    world.wire.finished(first, status)
    await world.run(await world.pod("lse", "LSE", "", "0-3"))
    container: str = world.finish(await world.begin(sandbox), "made")
    world.runtime.specs[container] = "0-15"
    await world.clear_log()
    await world.start(container)
    return container


@pytest.mark.parametrize("status", [None, 4], ids=["the client is gone", "an error"])
def test_a_container_of_an_earlier_create_starts_with_the_current_set(
    run_scenario: Any, status: int | None
) -> None:
    async def scenario(world: Any) -> None:
        container = await made_by_the_first(world, status)
        calls = [entry for entry in world.log if not entry.startswith("ledger")]  # it may be late
        assert calls[0:2] == [f"runtime {container} 4-15", "forward StartContainer"]
        assert world.on(container) == "4-15"

    run_scenario(scenario)


def test_an_owner_of_an_earlier_create_starts_on_its_cpus(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        sandbox = await world.pod("lse", "LSE", "", "0-3")
        world.wire.finished(await world.begin(sandbox), 4)
        container = world.finish(await world.begin(sandbox), "made")
        world.runtime.specs[container] = "8-11"
        await world.start(container)
        assert f"runtime {container} 0-3 quota -1" in world.log

    run_scenario(scenario)


def test_a_container_created_at_once_is_not_updated(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        sandbox = await world.pod("early", "LS")
        world.wire.finished(await world.begin(sandbox, "other"), 4)
        container = await world.create(sandbox)
        await world.clear_log()
        await world.start(container)
        assert world.log[0] == "forward StartContainer"

    run_scenario(scenario)


def test_the_oldest_failed_creates_are_forgotten(run_scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_knowledge, "REMEMBERED_FAILURES", 2)

    async def scenario(world: Any) -> None:
        sandbox = await world.pod("early", "LS")
        for name in ("a", "b", "c"):
            world.wire.finished(await world.begin(sandbox, name), 4)
        await world.clear_log()
        for name, updated in (("a", False), ("b", True), ("c", True)):
            container = await world.run(sandbox, name)
            assert (f"runtime {container} 0-15" in world.log) is updated

    run_scenario(scenario)
