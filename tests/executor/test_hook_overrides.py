"""What hooks want of containers, done by the executor: state, ledger, kernel, CPUs that go, partitions."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.engine.narrowing import Narrowing
from proxy.engine.partition import shared_with
from proxy.engine.replacement_cpus import owners_missing_cpus
from proxy.executor.observer import Observer
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container
from proxy.topology.build import described
from tests.testkit.cri import FOUR_CPUS


def wish(cpus: str, **more: Any) -> Narrowing:
    return Narrowing(CpuSet.parse(cpus), by="10-x", **more)


def test_kernel_ledger_and_explain_follow(live) -> None:
    async def day(w) -> None:
        one = await w.run(await w.pod("ls", "LS"))
        assert w.executor.overrides.narrow(one, wish("4-5")) == ""
        await w.until(lambda: w.on(one) == "4-5")
        await w.quiet()
        assert w.ledger.entries[f"c/{one}"]["placement"]["narrowed"] == "4-5"
        assert (
            w.executor.history.find("ns/ls")[-1].explanation.reasons[-1]
            == "narrowed to CPUs 4-5 by hook 10-x"
        )
        w.log.clear()
        assert w.executor.overrides.narrow(one, wish("4-5")) == ""
        await w.quiet()
        assert w.log == [], "nothing is done that is so already"
        assert w.executor.overrides.narrow(one, Narrowing(clear=True, by="10-x")) == ""
        await w.until(lambda: w.on(one) == "0-15")
        reasons = w.executor.history.find("ns/ls")[-1].explanation.reasons
        assert reasons[-1] == "hooks do not narrow it any more"
        w.check()

    live(day)


@pytest.mark.parametrize("which", ["absent", "ended"])
def test_a_container_that_does_not_exist_is_not_narrowed(live, which) -> None:
    async def day(w) -> None:
        one = await w.run(await w.pod("ls", "LS"))
        await w.stop(one)
        words = w.executor.overrides.narrow(one if which == "ended" else "absent", wish("4-5"))
        assert "it is not there" in words

    live(day)


def test_unavailable_cpus_are_reported_and_the_rest_is_used(live) -> None:
    async def day(w) -> None:
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        one = await w.run(await w.pod("ls", "LS"))
        words = w.executor.overrides.narrow(one, wish("2-3", mems=Mask((1,))))
        assert "cannot narrow ns/ls/c to CPUs 2-3 by hook 10-x: it has 4-15" in words
        assert w.executor.state.containers[one].placement.mems == Mask((1,))
        await w.quiet()
        assert (w.on(one), w.on(lse)) == ("4-15", "0-3")
        w.check()

    live(day)


def test_a_narrowed_owner_that_loses_cpus_gets_and_returns_others(live) -> None:
    async def day(w) -> None:
        own = await w.run(await w.pod("g"), **FOUR_CPUS)
        assert w.on(own) == "0-1,8-9"
        assert w.executor.overrides.narrow(own, wish("0,8")) == ""
        await w.until(lambda: w.on(own) == "0,8")
        whole, smaller = w.machine, described(2, 1, 4, 1)  # CPUs 8 to 15 have gone
        w.machine = smaller
        await w.executor.hotplug.look()
        await w.until(lambda: len(w.executor.state.containers[own].placement.replacement) == 2)
        for _ in range(4):
            await w.executor.hotplug.mend()
            await w.quiet()
        container = w.executor.state.containers[own]
        assert len(container.placement.replacement) == 2, (
            "what stands in is not given back as long as it is needed"
        )
        assert w.on(own) == "0"
        w.check()
        w.machine = whole
        await w.executor.hotplug.look()
        await w.until(lambda: not owners_missing_cpus(w.executor.state))
        await w.until(lambda: w.on(own) == "0,8")
        w.check()

    live(day)


def test_cpus_that_hooks_gave_to_others_are_not_a_partition(live) -> None:
    async def day(w) -> None:
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        own = await w.run(await w.pod("own", "LSE", "", "4-5"))
        one = await w.run(await w.pod("ls", "LS"))

        def shared(container_id: str) -> str:
            state = w.executor.state
            container = state.containers[container_id]
            return shared_with(state, container)

        assert (shared(lse), shared(own)) == ("", "")
        assert w.executor.overrides.narrow(one, wish("3,6", owned=True)) == ""
        assert shared(lse) == "a hook lets ns/ls/c run on its CPUs"
        assert w.executor.overrides.narrow(own, wish("4,7", owned=True)) == ""
        assert shared(own) == "a hook has given it CPUs that are not its own"
        await w.until(lambda: (w.on(one), w.on(own)) == ("3,6", "4,7"))
        w.check()

    live(day)


def test_partitions_are_checked_again(live) -> None:
    async def day(w) -> None:
        one = await w.run(await w.pod("ls", "LS"))
        stirred: list[bool] = []

        class Partitions(Observer):
            def given(self, container: Container) -> None:
                stirred.append(True)

        w.executor.store.subscribe(Partitions())
        w.executor.overrides.narrow(one, wish("4-5"))
        w.executor.overrides.narrow(one, wish("4-5"))
        assert stirred == [True]

    live(day)


def test_a_foreign_write_to_a_narrowed_set_is_repaired(live) -> None:
    async def day(w) -> None:
        one = await w.run(await w.pod("ls", "LS"))
        w.executor.overrides.narrow(one, wish("4-5"))
        await w.until(lambda: w.on(one) == "4-5")
        w.cgroups.sets[one] = CpuSet.parse("0-15")
        await w.sync.once()
        assert w.on(one) == "4-5"

    live(day)


def test_cpus_that_hooks_gave_away_are_taken_back_where_they_may_no_more(live) -> None:
    async def day(w) -> None:
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        some, only = [await w.run(await w.pod(name, "LS")) for name in ("some", "only")]
        assert w.executor.overrides.narrow(some, wish("3-4", owned=True)) == ""
        assert w.executor.overrides.narrow(only, wish("2", owned=True)) == ""
        await w.until(lambda: (w.on(some), w.on(only)) == ("3-4", "2"))
        await w.close()
        w.boot()
        w.executor.overrides.take_back()
        await w.sync.once()
        await w.until(lambda: (w.on(some), w.on(only)) == ("4", "4-15"))
        await w.quiet()
        w.check()
        reasons = w.executor.state.containers[some].placement.reasons
        assert reasons[-1] == "narrowed to CPUs 3-4 by hook 10-x"
        problems = [each["what"] for each in w.executor.telemetry.problems()]
        assert any(
            "nothing is left of CPUs 2, to which a hook has narrowed ns/only" in what for what in problems
        )
        assert "beyond" not in w.ledger.entries[f"c/{some}"]["placement"]
        state = w.executor.state
        w.executor.overrides.take_back()
        assert w.executor.state is state

    live(day)
