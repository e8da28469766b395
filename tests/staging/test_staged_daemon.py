"""A daemon whose mode and selection change while pods run: in steps, paused, resumed, reversed, restarted."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.engine.enforcement import applies_to
from proxy.model.backoff import Backoff
from proxy.model.errors import CgroupError, RuntimeCallError
from proxy.model.idset import CpuSet
from proxy.model.pod_selection import number_of
from proxy.model.workload import Container, KubeQos, Phase, Pool
from tests.reload.node import FileNode
from tests.testkit.daemon import run, temporary_node
from tests.testkit.waiting import until

OBSERVE = "mode: observe\nreconcilePeriod: 300ms\nenforce: {stepPeriod: 100ms}\n"
ENFORCE = OBSERVE.replace("observe", "enforce")
ALL = "0-15"
CHOSEN = (("app", "chosen"),)
OWNERS = {"lse-0": "2-3", "lse-1": "4-5"}


@pytest.fixture(params=[1, 2])
def node(request: pytest.FixtureRequest) -> Iterator[FileNode]:
    """A node with either version of cgroups."""
    with temporary_node(lambda directory: FileNode(directory, version=request.param)) as made:
        yield made


def cpus(node: FileNode, container_id: str) -> str:
    """Return the CPUs that a container may run on."""
    path = node.cgroups.find("", container_id)
    return "" if path is None else str(node.cgroups.read(path).effective_cpus)


async def load(node: FileNode, sharers: int = 6) -> dict[str, str]:
    """Run pods, of which two own CPUs; return their containers' ids by name."""
    pods = [DemoPod(name, "LSE", cpuset=own) for name, own in OWNERS.items()]
    pods += [DemoPod(f"ls-{at}", "LS") for at in range(sharers)]
    return {pod.name: await node.launch(pod) for pod in pods}


class Watch:
    """Repeated readings of the kernel's sets of containers to which the plan is applied."""

    def __init__(self, node: FileNode, daemon: Daemon) -> None:
        self._node, self._daemon = node, daemon
        self.wrong: list[str] = []
        self.most, self.looks = 0, 0
        self._applied: set[str] = set()

    def settled(self) -> dict[str, Container]:
        """Return the containers to which the plan is applied, without those of the current step."""
        executor = self._daemon.executor
        assert executor is not None
        state = executor.state
        return {
            c.id: c
            for c in state.containers.values()
            if c.phase is Phase.RUNNING
            and applies_to(state, c.pod)
            and c.pod.key not in state.enforcement.moving
        }

    def look(self) -> None:
        """Compare all enforced containers with each other."""
        before = self.settled()
        has = {
            i: self._node.cgroups.read(path).effective_cpus
            for i in before
            if (path := self._node.cgroups.find("", i))
        }
        both = {i: c for i, c in before.items() if i in self.settled()}
        owners = {i: has[i] for i, c in both.items() if c.placement.pool is Pool.OWN}
        self.wrong += [f"{both[i].ref} has no CPUs" for i in both if not has[i]]
        self.wrong += [
            f"{both[i].ref} is on {has[i]} of {both[owner].ref}"
            for i in both
            for owner, own in owners.items()
            if i != owner and has[i] & own
        ]
        self.looks += 1

    def count(self) -> None:
        """Compare the containers to which the plan is applied with those before the last event.

        Two steps may end between two looks: a step that took longer than the period is followed at once.
        """
        applied = set(self.settled())
        self.most = max(self.most, len(applied - self._applied))
        self._applied = applied

    @asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        """Read repeatedly while the block runs."""

        async def looking() -> None:
            while True:
                self.look()
                await asyncio.sleep(0.005)

        assert self._daemon.executor is not None
        store = self._daemon.executor.store
        handle = store.handle

        def handle_and_count(event: Any) -> Any:
            effects = handle(event)
            self.count()
            return effects

        store.handle = handle_and_count  # type: ignore[method-assign]
        task = asyncio.ensure_future(looking())
        try:
            yield
        finally:
            store.handle = handle  # type: ignore[method-assign]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def page(daemon: Daemon) -> dict[str, int]:
    assert daemon.parts.staging is not None
    pods = daemon.parts.staging.page()["pods"]
    assert isinstance(pods, dict)
    return pods


def explained(daemon: Daemon, container_id: str) -> tuple[bool, int]:
    """Return whether the plan is applied according to explain, and how often that has changed."""
    assert daemon.executor is not None
    why = daemon.executor.history.find(container_id)[-1].explanation
    return why.applied, sum("applied since" in reason or "given back at" in reason for reason in why.reasons)


def world(node: FileNode, ids: dict[str, str]) -> dict[str, str]:
    return {name: cpus(node, container_id) for name, container_id in ids.items()}


def test_from_observe_to_enforce_and_back_on_a_loaded_node(node: FileNode) -> None:
    daemon = node.from_file(OBSERVE)

    async def scenario() -> None:
        assert daemon.parts.staging is not None
        ids = await load(node)
        assert set(world(node, ids).values()) == {ALL}
        watch = Watch(node, daemon)
        async with watch.on():
            done = await node.reload(daemon, ENFORCE)
            assert (done["reload"]["result"], done["restart"]) == ("applied", [])
            await until(lambda: page(daemon)["enforced"] >= 2)
            daemon.parts.staging._set_paused(paused=True)
            await until(lambda: not page(daemon)["inStep"])
            there, before = page(daemon), world(node, ids)
            await asyncio.sleep(0.4)
            assert (page(daemon), world(node, ids)) == (there, before)
            assert 2 <= there["enforced"] < len(ids)
            assert [before[name] for name in OWNERS] == [ALL, ALL]  # containers that share CPUs come first
            daemon.parts.staging._set_paused(paused=False)
            await until(lambda: page(daemon)["enforced"] == len(ids) and not page(daemon)["inStep"])
            assert world(node, ids) == {**dict.fromkeys(ids, "0-1,6-15"), **OWNERS}
            assert [explained(daemon, ids[name]) for name in ("lse-0", "ls-0")] == [(True, 1), (True, 1)]
            await node.reload(daemon, OBSERVE)
            await until(lambda: page(daemon)["observed"] == len(ids) and not page(daemon)["inStep"])
            assert set(world(node, ids).values()) == {ALL}
            assert [explained(daemon, ids[name]) for name in ("lse-0", "ls-0")] == [(False, 2), (False, 2)]
        assert watch.wrong == []
        assert watch.most == 1, "more than podsPerStep pods changed together"
        assert watch.looks > 20

    run(daemon, scenario, reconciled=True)


def test_calls_of_observed_pods_pass_and_their_cgroups_are_not_written(node: FileNode) -> None:
    chosen = ENFORCE.replace("{stepPeriod", "{podSelector: {matchLabels: {app: chosen}}, stepPeriod")
    daemon = node.from_file(chosen)

    async def scenario() -> None:
        watched = await node.launch(DemoPod("watched", "LS"))
        owner = await node.launch(DemoPod("owner", "LSE", cpuset="2-3"))
        rival = await node.launch(DemoPod("rival", "LSE", cpuset="2-3"))  # it would be rejected
        enforced = await node.launch(DemoPod("enforced", "LS", labels=CHOSEN))
        pinned = await node.launch(DemoPod("pinned", "LSE", cpuset="4-5", labels=CHOSEN))
        with pytest.raises(RuntimeCallError):
            await node.launch(DemoPod("refused", "LSE", cpuset="4-5", labels=CHOSEN))
        await asyncio.sleep(1)
        assert [cpus(node, i) for i in (watched, owner, rival)] == [ALL] * 3
        assert (cpus(node, enforced), cpus(node, pinned)) == ("0-1,6-15", "4-5")
        node.cgroups.write(node.cgroups.find("", watched), CpuSet((2, 4)), None)
        node.cgroups.write(node.cgroups.find("", enforced), CpuSet((2, 4)), None)
        await until(lambda: cpus(node, enforced) == "0-1,6-15")
        await asyncio.sleep(0.7)
        assert cpus(node, watched) == "2,4"  # drift of an observed container is not repaired
        assert page(daemon) == {"enforced": 2, "observed": 3, "toEnforce": 0, "toGiveBack": 0, "inStep": 0}

    run(daemon, scenario, reconciled=True)


def test_a_restart_in_the_middle_of_a_rollout_continues_it(node: FileNode) -> None:
    first = node.from_file(OBSERVE)
    ids: dict[str, str] = {}
    seen: dict[str, str] = {}

    async def half() -> None:
        assert first.parts.staging is not None
        ids.update(await load(node))
        await node.reload(first, ENFORCE)
        await until(lambda: page(first)["enforced"] >= 3)
        first.parts.staging._set_paused(paused=True)
        await until(lambda: not page(first)["inStep"])
        seen.update(world(node, ids))

    run(first, half, reconciled=True)
    second = node.from_file(ENFORCE)

    async def rest() -> None:
        assert second.parts.staging is not None
        await asyncio.sleep(0.7)
        assert world(node, ids) == seen  # the rollout is still paused, and no container has changed
        assert sum(has != ALL for has in seen.values()) == page(second)["enforced"] >= 3
        second.parts.staging._set_paused(paused=False)
        await until(lambda: page(second)["enforced"] == len(ids))
        await until(lambda: world(node, ids)["lse-1"] == "4-5")

    run(second, rest, reconciled=True)
    third = node.from_file(OBSERVE)

    async def back() -> None:
        await until(lambda: set(world(node, ids).values()) == {ALL})
        assert page(third)["enforced"] == 0

    run(third, back, reconciled=True)


def test_a_percentage_selects_the_same_pods_again(node: FileNode) -> None:
    daemon = node.from_file(ENFORCE.replace("{stepPeriod", "{percent: 0, stepPeriod"))

    async def scenario() -> None:
        assert daemon.executor is not None
        ids = await load(node, 8)
        keys = {c.id: c.pod.key for c in daemon.executor.state.containers.values()}
        for percent in (30, 70, 100, 70, 30, 0):
            await node.reload(daemon, ENFORCE.replace("{stepPeriod", f"{{percent: {percent}, stepPeriod"))
            wanted = {name for name, i in ids.items() if number_of(keys[i]) < percent}
            await until(
                lambda: (
                    not (page(daemon)["toEnforce"] or page(daemon)["toGiveBack"] or page(daemon)["inStep"])
                )
            )
            assert {name for name, has in world(node, ids).items() if has != ALL} == wanted

    run(daemon, scenario, reconciled=True)


def refuse_writes(node: FileNode, group: str | None, but: CpuSet | None = None) -> Callable[[], None]:
    """Make the kernel refuse all cpusets of a group, except one; return a function that ends this."""
    write = node.cgroups.write

    def refuse(path: str, cpus: CpuSet | None, *rest: Any, **more: Any) -> bool:
        if path == group and cpus is not None and cpus != but:
            raise CgroupError(f"cannot write {path}", errno.EACCES)
        return write(path, cpus, *rest, **more)

    def end() -> None:
        node.cgroups.write = write  # type: ignore[method-assign]

    node.cgroups.write = refuse  # type: ignore[method-assign]
    return end


def problems(daemon: Daemon) -> dict[str, str]:
    """Return the problems of pods on the page of steps, which must match the reported ones."""
    assert daemon.parts.staging is not None
    assert daemon.executor is not None
    listed = {row["pod"]: row["reason"] for row in daemon.parts.staging.page()["problems"]}  # type: ignore[attr-defined]
    messages = ("cannot apply the plan to a running pod", "cannot give a pod back")
    reported = [row["keys"] for row in daemon.executor.telemetry.problems() if row["message"] in messages]
    assert {keys["pod"] for keys in reported} == listed.keys()  # type: ignore[index]
    return listed


def test_a_pod_that_cannot_be_enforced_is_released_and_retried(
    node: FileNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.staging.service.RETRY_BACKOFF", Backoff(0.3, 0.3))
    daemon = node.from_file(OBSERVE)

    async def scenario() -> None:
        ids = await load(node, 2)
        end = refuse_writes(node, node.cgroups.find("", ids["ls-0"]), CpuSet.parse(ALL))
        await node.reload(daemon, ENFORCE)
        await until(lambda: problems(daemon))
        await until(lambda: page(daemon)["enforced"] == len(ids) - 1 and not page(daemon)["inStep"])
        assert cpus(node, ids["ls-0"]) == ALL
        assert page(daemon)["toEnforce"] == 1
        await asyncio.sleep(1)  # retried some more times, and released each time
        assert [*problems(daemon)] == ["demo/ls-0"]
        assert "cannot write" in problems(daemon)["demo/ls-0"]
        end()
        await until(lambda: page(daemon)["enforced"] == len(ids) and not page(daemon)["inStep"])
        assert problems(daemon) == {}

    run(daemon, scenario, reconciled=True)


@pytest.mark.parametrize("ends", ["another target", "the pod is gone"])
def test_a_problem_ends_with_its_pod_and_with_the_target(node: FileNode, ends: str) -> None:
    daemon = node.from_file(OBSERVE)

    async def scenario() -> None:
        assert daemon.executor is not None
        ids = await load(node, 2)
        refuse_writes(node, node.cgroups.find("", ids["ls-0"]), CpuSet.parse(ALL))
        await node.reload(daemon, ENFORCE)
        await until(lambda: page(daemon)["enforced"] == len(ids) - 1 and not page(daemon)["inStep"])
        assert [*problems(daemon)] == ["demo/ls-0"]
        if ends == "another target":
            await node.reload(daemon, OBSERVE)
        else:
            daemon.executor.lifecycle.removed([ids["ls-0"]])
        await until(lambda: problems(daemon) == {})

    run(daemon, scenario, reconciled=True)


def test_a_pod_that_cannot_be_released_does_not_block_other_pods(
    node: FileNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pods are not reported for it either."""
    monkeypatch.setattr("proxy.staging.service.ROUNDS", 2)
    enforce = ENFORCE.replace("{stepPeriod", "{podsPerStep: 10, stepPeriod")
    daemon = node.from_file(enforce)

    async def scenario() -> None:
        ids = await load(node, 3)
        end = refuse_writes(node, node.cgroups.find("", ids["ls-1"]))
        await node.reload(daemon, enforce.replace("enforce\n", "observe\n"))
        await until(lambda: page(daemon)["observed"] == len(ids) and page(daemon)["inStep"] == 1)
        assert [*problems(daemon)] == ["demo/ls-1"]
        assert {name for name, has in world(node, ids).items() if has != ALL} == {"ls-1"}
        end()
        await until(lambda: not page(daemon)["inStep"])
        assert problems(daemon) == {}
        assert set(world(node, ids).values()) == {ALL}

    run(daemon, scenario, reconciled=True)


def test_a_rollout_does_not_need_to_know_guaranteed_pods(node: FileNode) -> None:
    daemon = node.from_file(f"{OBSERVE}cpuManagerPolicy: static\nreservedSystemCPUs: '0'\n")

    async def scenario() -> None:
        own = await node.launch(DemoPod("own", kube_qos=KubeQos.GUARANTEED, cpus=2))
        other = await node.launch(DemoPod("other", "LS"))
        await node.reload(daemon, f"{ENFORCE}cpuManagerPolicy: static\nreservedSystemCPUs: '0'\n")
        await until(lambda: page(daemon)["enforced"] == 2 and not page(daemon)["inStep"])
        assert len(CpuSet.parse(cpus(node, own))) == 2
        assert CpuSet.parse(cpus(node, own)).isdisjoint(CpuSet.parse(cpus(node, other)))

    run(daemon, scenario, reconciled=True)
