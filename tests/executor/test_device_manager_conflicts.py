"""A resource with another manager is refused, or withdrawn when the manager is detected later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.node_events import DevicesChanged
from proxy.executor import device_manager_conflicts
from proxy.executor.device_manager_conflicts import (
    GONE_S,
    PROBLEM,
    ManagedElsewhere,
    OtherManagers,
    conflict_of,
)

if TYPE_CHECKING:
    import pytest

VF, GPU = "example.com/vf", "example.com/gpu"
FUNCTION = "0000:5e:00.2"
SOCKET = Path("/var/lib/topoproxy/device-plugins/vf.sock")
CLAIM = "claim ml/train, driver gpu.example.com"


def test_a_resource_of_kubelet_is_refused_with_the_cause_and_the_remedy() -> None:
    message = conflict_of(VF, (), ManagedElsewhere({VF: {"a", "b"}}))
    assert message == (
        f"cannot manage {VF}: kubelet's device manager manages it too (2 devices); "
        "let its plugin register with kubelet or with topoproxy"
    )


def test_a_device_of_a_claim_is_found_by_its_pci_address() -> None:
    elsewhere = ManagedElsewhere(claimed={FUNCTION: CLAIM})
    assert conflict_of(VF, ["other", FUNCTION.upper()], elsewhere) == (
        f"cannot manage {VF}: its device {FUNCTION.upper()} is also managed by DRA ({CLAIM})"
    )


names = st.sampled_from([VF, GPU, "example.com/fpga"])
ids = st.sets(st.sampled_from(["a", "b", FUNCTION]))


@given(names, ids, st.dictionaries(names, ids))
def test_resources_of_other_names_are_not_in_conflict(
    resource: str, devices: set[str], plugged: dict[str, set[str]]
) -> None:
    assert bool(conflict_of(resource, devices, ManagedElsewhere(plugged))) == (resource in plugged)


class Others:
    """Other device managers, and the resources withdrawn because of them."""

    def __init__(self, world: Any) -> None:
        self.elsewhere: ManagedElsewhere | None = ManagedElsewhere()
        self.withdrawn: list[tuple[str, str]] = []
        self.telemetry = world.executor.telemetry
        self._store = world.executor.store
        self.listens = True
        self.managers = OtherManagers(
            world.executor, lambda: self.elsewhere, self._withdraw, lambda socket: self.listens
        )

    def register(self, resource: str, *devices: str) -> None:
        self._store.handle(DevicesChanged(resource, {name: RegisteredDevice(name) for name in devices}))

    async def _withdraw(self, resource: str, reason: str) -> None:
        self.withdrawn.append((resource, reason))
        self._store.handle(DevicesChanged(resource, None))

    def problems(self) -> list[Any]:
        return [each["keys"] for each in self.telemetry.problems() if each["message"] == PROBLEM]


def test_a_registration_is_refused_until_the_other_manager_has_given_the_resource_up(
    run_scenario: Any,
) -> None:
    async def scenario(world: Any) -> None:
        others = Others(world)
        assert await others.managers.conflict(VF, SOCKET) == ""
        others.elsewhere = ManagedElsewhere({VF: {"a"}})
        assert "kubelet's device manager" in await others.managers.conflict(VF, SOCKET)
        assert await others.managers.conflict(GPU, SOCKET) == ""
        assert [each["resource"] for each in others.problems()] == [VF]
        others.elsewhere = ManagedElsewhere()
        assert await others.managers.conflict(VF, SOCKET) == ""
        assert others.problems() == []

    run_scenario(scenario)


def test_a_resource_that_kubelet_has_later_is_withdrawn_once(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        others = Others(world)
        others.register(VF, "a")
        others.register(GPU, "g")
        await others.managers.withdraw_conflicting_resources()
        assert others.withdrawn == []
        others.elsewhere = ManagedElsewhere({VF: {"a"}})
        for _ in range(3):
            await others.managers.withdraw_conflicting_resources()
        assert [resource for resource, _ in others.withdrawn] == [VF]
        assert world.executor.state.devices.registered.keys() == {GPU}
        (problem,) = others.problems()
        assert (problem["resource"], problem["err"]) == (VF, others.withdrawn[0][1])

    run_scenario(scenario)


def test_a_device_of_a_claim_keeps_its_resource_refused_after_the_withdrawal(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        others = Others(world)
        others.register(VF, FUNCTION)
        others.elsewhere = ManagedElsewhere(claimed={FUNCTION: CLAIM})
        await others.managers.withdraw_conflicting_resources()
        await others.managers.withdraw_conflicting_resources()
        assert CLAIM in await others.managers.conflict(VF, SOCKET)
        assert [each["resource"] for each in others.problems()] == [VF]
        assert len(others.withdrawn) == 1
        others.elsewhere = ManagedElsewhere()
        assert await others.managers.conflict(VF, SOCKET) == ""
        others.elsewhere = ManagedElsewhere(claimed={FUNCTION: CLAIM})
        assert await others.managers.conflict(VF, SOCKET) == "", "its plugin may list other devices"

    run_scenario(scenario)


def test_other_managers_that_do_not_answer_end_no_refusal(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        others = Others(world)
        others.register(VF, "a")
        others.elsewhere = None
        assert await others.managers.conflict(VF, SOCKET) == ""
        others.elsewhere = ManagedElsewhere({VF: {"a"}})
        await others.managers.withdraw_conflicting_resources()
        others.elsewhere = None
        await others.managers.withdraw_conflicting_resources()
        assert "kubelet's device manager" in await others.managers.conflict(VF, SOCKET)
        assert [each["resource"] for each in others.problems()] == [VF]

    run_scenario(scenario)


def test_the_first_list_of_a_resource_is_compared_at_once(
    run_scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_manager_conflicts, "LISTED_S", 0.01)

    async def scenario(world: Any) -> None:
        others = Others(world)
        others.elsewhere = ManagedElsewhere(claimed={FUNCTION: CLAIM})
        others.register(VF)
        watching = asyncio.create_task(others.managers.run())
        await asyncio.sleep(0.1)
        assert others.withdrawn == [], "it has not listed its devices"
        others.register(VF, FUNCTION)
        await world.until(lambda: others.withdrawn)
        watching.cancel()

    run_scenario(scenario)


def test_a_problem_ends_without_another_registration(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        others = Others(world)
        others.register(VF, FUNCTION)
        others.elsewhere = ManagedElsewhere(claimed={FUNCTION: CLAIM})
        await others.managers.withdraw_conflicting_resources()
        assert CLAIM in others.problems()[0]["err"]
        others.elsewhere = ManagedElsewhere()
        await others.managers.withdraw_conflicting_resources()
        assert others.problems() == []

    run_scenario(scenario)


def test_a_refusal_ends_when_its_plugin_has_been_absent_for_long(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        others = Others(world)
        others.elsewhere = ManagedElsewhere({VF: {"a"}})
        assert await others.managers.conflict(VF, SOCKET)
        others.listens = False
        await others.managers.withdraw_conflicting_resources()
        world.now += GONE_S - 1
        await others.managers.withdraw_conflicting_resources()
        assert await others.managers.conflict(VF, SOCKET), "the plugin has registered again"
        for listens in (True, False):
            others.listens = listens
            await others.managers.withdraw_conflicting_resources()
            world.now += GONE_S - 1
            await others.managers.withdraw_conflicting_resources()
            assert [each["resource"] for each in others.managers.page()] == [VF]
        world.now += 1
        await others.managers.withdraw_conflicting_resources()
        assert (others.managers.page(), others.problems()) == ([], [])
        await others.managers.withdraw_conflicting_resources()
        assert "kubelet's device manager" in await others.managers.conflict(VF, SOCKET)

    run_scenario(scenario)


def test_a_plugin_of_an_earlier_run_that_does_not_register_again_is_forgotten(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        others = Others(world)
        others.register(VF, "a")
        others.elsewhere = ManagedElsewhere({VF: {"a"}})
        await others.managers.withdraw_conflicting_resources()
        await others.managers.withdraw_conflicting_resources()
        assert len(others.problems()) == 1
        world.now += GONE_S
        await others.managers.withdraw_conflicting_resources()
        assert (others.managers.page(), others.problems()) == ([], [])

    run_scenario(scenario)
