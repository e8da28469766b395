"""Overrides of containers by hooks, applied by the executor: state, ledger, kernel, hotplug, partitions."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.engine.hook_narrowing import Narrowing
from proxy.engine.partition import shared_with
from proxy.engine.replacement_cpus import owners_missing_cpus
from proxy.executor.observer import Observer
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container
from proxy.topology.regular_machine import regular_machine
from tests.testkit.cri import FOUR_CPUS


def narrowing(cpus: str, **more: Any) -> Narrowing:
    return Narrowing(CpuSet.parse(cpus), by="10-x", **more)


def test_kernel_ledger_and_explain_follow_a_narrowed_set(run_scenario) -> None:
    async def scenario(world) -> None:
        one = await world.run(await world.pod("ls", "LS"))
        assert world.executor.overrides.narrow(one, narrowing("4-5")) == ""
        await world.until(lambda: world.on(one) == "4-5")
        await world.quiet()
        assert world.ledger.entries[f"c/{one}"]["placement"]["narrowed"] == "4-5"
        assert (
            world.executor.history.find("ns/ls")[-1].explanation.reasons[-1]
            == "narrowed to CPUs 4-5 by hook 10-x"
        )
        await world.clear_log()
        assert world.executor.overrides.narrow(one, narrowing("4-5")) == ""
        await world.quiet()
        assert world.log == [], "an unchanged set is not written"
        assert world.executor.overrides.narrow(one, Narrowing(clear=True, by="10-x")) == ""
        await world.until(lambda: world.on(one) == "0-15")
        reasons = world.executor.history.find("ns/ls")[-1].explanation.reasons
        assert reasons[-1] == "hooks do not narrow it any more"
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize("which", ["absent", "ended"])
def test_a_container_that_does_not_exist_is_not_narrowed(run_scenario, which) -> None:
    async def scenario(world) -> None:
        one = await world.run(await world.pod("ls", "LS"))
        await world.stop(one)
        error = world.executor.overrides.narrow(one if which == "ended" else "absent", narrowing("4-5"))
        assert "it is not there" in error

    run_scenario(scenario)


def test_unavailable_cpus_are_reported_and_the_remaining_ones_used(run_scenario) -> None:
    async def scenario(world) -> None:
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        one = await world.run(await world.pod("ls", "LS"))
        error = world.executor.overrides.narrow(one, narrowing("2-3", mems=Mask((1,))))
        assert "cannot narrow ns/ls/c to CPUs 2-3 by hook 10-x: it has 4-15" in error
        assert world.executor.state.containers[one].placement.mems == Mask((1,))
        await world.quiet()
        assert (world.on(one), world.on(lse)) == ("4-15", "0-3")
        world.check()

    run_scenario(scenario)


def test_a_narrowed_owner_gets_replacements_for_lost_cpus_and_returns_them(run_scenario) -> None:
    async def scenario(world) -> None:
        own = await world.run(await world.pod("g"), **FOUR_CPUS)
        assert world.on(own) == "0-1,8-9"
        assert world.executor.overrides.narrow(own, narrowing("0,8")) == ""
        await world.until(lambda: world.on(own) == "0,8")
        whole, smaller = world.machine, regular_machine(2, 1, 4, 1)  # CPUs 8 to 15 are offline
        world.machine = smaller
        await world.executor.hotplug.reread()
        await world.until(lambda: len(world.executor.state.containers[own].placement.replacement) == 2)
        for _ in range(4):
            await world.executor.hotplug.update_replacements()
            await world.quiet()
        container = world.executor.state.containers[own]
        assert len(container.placement.replacement) == 2, (
            "replacement CPUs are kept as long as they are needed"
        )
        assert world.on(own) == "0"
        world.check()
        world.machine = whole
        await world.executor.hotplug.reread()
        await world.until(lambda: not owners_missing_cpus(world.executor.state))
        await world.until(lambda: world.on(own) == "0,8")
        world.check()

    run_scenario(scenario)


def test_owned_cpus_that_hooks_gave_to_other_containers_are_not_a_partition(run_scenario) -> None:
    async def scenario(world) -> None:
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        own = await world.run(await world.pod("own", "LSE", "", "4-5"))
        one = await world.run(await world.pod("ls", "LS"))

        def shared(container_id: str) -> str:
            state = world.executor.state
            container = state.containers[container_id]
            return shared_with(state, container)

        assert (shared(lse), shared(own)) == ("", "")
        assert world.executor.overrides.narrow(one, narrowing("3,6", owned=True)) == ""
        assert shared(lse) == "a hook lets ns/ls/c run on its CPUs"
        assert world.executor.overrides.narrow(own, narrowing("4,7", owned=True)) == ""
        assert shared(own) == "a hook has given it CPUs that are not its own"
        await world.until(lambda: (world.on(one), world.on(own)) == ("3,6", "4,7"))
        world.check()

    run_scenario(scenario)


def test_partitions_are_checked_again(run_scenario) -> None:
    async def scenario(world) -> None:
        one = await world.run(await world.pod("ls", "LS"))
        stirred: list[bool] = []

        class Partitions(Observer):
            def cpus_assigned(self, container: Container) -> None:
                stirred.append(True)

        world.executor.store.subscribe(Partitions())
        world.executor.overrides.narrow(one, narrowing("4-5"))
        world.executor.overrides.narrow(one, narrowing("4-5"))
        assert stirred == [True]

    run_scenario(scenario)


def test_a_foreign_write_to_a_narrowed_set_is_repaired(run_scenario) -> None:
    async def scenario(world) -> None:
        one = await world.run(await world.pod("ls", "LS"))
        world.executor.overrides.narrow(one, narrowing("4-5"))
        await world.until(lambda: world.on(one) == "4-5")
        world.cgroups.sets[one] = CpuSet.parse("0-15")
        await world.sync.once()
        assert world.on(one) == "4-5"

    run_scenario(scenario)


def test_owned_cpus_given_away_by_hooks_are_reclaimed_when_no_longer_allowed(run_scenario) -> None:
    async def scenario(world) -> None:
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
        some, only = [await world.run(await world.pod(name, "LS")) for name in ("some", "only")]
        assert world.executor.overrides.narrow(some, narrowing("3-4", owned=True)) == ""
        assert world.executor.overrides.narrow(only, narrowing("2", owned=True)) == ""
        await world.until(lambda: (world.on(some), world.on(only)) == ("3-4", "2"))
        await world.close()
        world.boot()
        world.executor.overrides.withdraw_extra_cpus()
        await world.sync.once()
        await world.until(lambda: (world.on(some), world.on(only)) == ("4", "4-15"))
        await world.quiet()
        world.check()
        reasons = world.executor.state.containers[some].placement.reasons
        assert reasons[-1] == "narrowed to CPUs 3-4 by hook 10-x"
        problems = [each["what"] for each in world.executor.telemetry.problems()]
        assert any(
            "nothing is left of CPUs 2, to which a hook has narrowed ns/only" in what for what in problems
        )
        assert "beyond" not in world.ledger.entries[f"c/{some}"]["placement"]
        state = world.executor.state
        world.executor.overrides.withdraw_extra_cpus()
        assert world.executor.state is state

    run_scenario(scenario)
