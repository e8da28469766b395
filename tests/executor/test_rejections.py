"""Rejections are problems once each, until they no longer apply."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.engine.node_events import ModeChanged
from proxy.executor.rejections import FORGET_S, LIMIT, Rejections
from proxy.executor.status_data import node_page
from proxy.model.mode import NodeMode
from proxy.model.workload import Pod, Verdict
from tests.testkit.captured_log import telemetry

NO_ROOM = Verdict(9, "CPUsInUse", "full")


def rejections(world: Any) -> list[str]:
    """Return the problems that are rejections."""
    problems = node_page(world.executor)["problems"]
    return [p["what"] for p in problems if "reject" in p["message"] or "cannot follow" in p["message"]]


def lines(world: Any) -> list[str]:
    """Return the log lines about rejections."""
    return [
        line for line in world.logged if "reject" in line or "cannot follow" in line or "cannot give" in line
    ]


async def too_large(world: Any) -> Any:
    """Request more whole CPUs than the machine has; the CPU count decides."""
    whole = {"cpu_shares": 40 * 1024, "cpu_quota": 40 * 100_000, "cpu_period": 100_000}
    return await world.begin(await world.pod("huge"), **whole)


async def rival(world: Any) -> Any:
    """Request CPUs that another container owns."""
    if not world.executor.state.owners:
        await world.run(await world.pod("lse", "LSE", "", "0-3"))
    return await world.begin(await world.pod("rival", "LSE", "", "2-3"))


@pytest.mark.parametrize("mode", [NodeMode.ENFORCE, NodeMode.OBSERVE])
def test_an_overlap_is_a_problem_once_and_logged_once(run_scenario: Any, mode: NodeMode) -> None:
    async def scenario(world: Any) -> None:
        for _ in range(3):
            await rival(world)
        done = "rejected" if mode is NodeMode.ENFORCE else "would reject"
        (problem,) = rejections(world)
        assert problem.startswith(f"{done} a container pod=ns/rival container=c err=")
        assert "CPUs 2-3 are owned by" in problem
        assert lines(world) == [problem]

    run_scenario(scenario, mode=mode)


@pytest.mark.parametrize("mode", [NodeMode.ENFORCE, NodeMode.OBSERVE])
def test_a_rejection_by_cpu_count_is_a_problem_once_and_logged_once(
    run_scenario: Any, mode: NodeMode
) -> None:
    async def scenario(world: Any) -> None:
        for _ in range(3):
            await too_large(world)
        done = "rejected" if mode is NodeMode.ENFORCE else "would reject"
        (problem,) = rejections(world)
        assert problem.startswith(f"{done} a container pod=ns/huge container=c err=")
        assert lines(world) == [problem]

    run_scenario(scenario, mode=mode)


class Rejected:
    """Rejections with a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.logged: list[str] = []
        self.telemetry = telemetry(self.logged)
        self.rejections = Rejections(self.telemetry, lambda: self.now)

    def problems(self) -> list[str]:
        return [str(problem["what"]) for problem in self.telemetry.problems()]


def pod(name: str = "web", sandbox: str = "s1") -> Pod:
    return Pod(sandbox_id=sandbox, namespace="ns", name=name, uid=name)


def test_a_rejection_ends_with_its_sandbox() -> None:
    world = Rejected()
    for end in (lambda: world.rejections.pod_stopped(pod()), lambda: world.rejections.pod_removed("s1")):
        world.rejections.rejected(pod(), "c", NO_ROOM)
        world.rejections.pod_removed("s2")
        assert world.problems() == ["rejected a container pod=ns/web container=c err=full"]
        end()
        assert world.problems() == []


def test_a_rejected_sandbox_is_forgotten_without_further_attempts() -> None:
    world = Rejected()
    world.rejections.rejected(pod(sandbox="pod-1"), "", NO_ROOM, applied=True)
    world.now += FORGET_S - 1
    world.rejections.rejected(pod(sandbox="pod-2"), "", NO_ROOM, applied=True)
    world.now += FORGET_S
    world.rejections.listed((), (), 0)
    assert len(world.problems()) == 1
    world.now += 1
    world.rejections.listed((), (), 0)
    assert world.problems() == []


def test_a_running_pod_counts_as_rejected_only_hypothetically() -> None:
    world = Rejected()
    world.rejections.rejected(pod(sandbox="pod-1"), "", NO_ROOM)
    world.rejections.sandbox_runs(pod(), applied=True)
    assert world.problems() == []
    world.rejections.rejected(pod(sandbox="pod-2"), "", NO_ROOM, applied=False)
    world.rejections.sandbox_runs(pod(), applied=False)
    world.now += 2 * FORGET_S
    world.rejections.listed((), (), 0)
    assert world.problems() == ["would reject a pod pod=ns/web err=full"]
    world.rejections.pod_removed("s1")
    assert world.problems() == []


def test_a_rejection_that_is_applied_later_is_one_problem() -> None:
    world = Rejected()
    world.rejections.rejected(pod(), "c", NO_ROOM, applied=False)
    world.rejections.rejected(pod(), "c", NO_ROOM)
    assert world.problems() == ["rejected a container pod=ns/web container=c err=full"]


def test_the_number_of_remembered_rejections_is_bounded() -> None:
    world = Rejected()
    for number in range(LIMIT + 5):
        world.rejections.rejected(pod(f"p{number}"), "c", NO_ROOM)
    assert len(world.problems()) == LIMIT
    assert "ns/p4 " not in " ".join(world.problems())
    assert not [line for line in world.logged if line.startswith("resolved")], "they are still rejected"


def test_a_rejection_forgotten_for_lack_of_room_is_not_a_problem() -> None:
    world = Rejected()
    world.rejections.rejected(pod("p0"), "c", NO_ROOM)
    for number in range(LIMIT - 1):
        world.rejections.rejected(pod(f"q{number}"), "c", NO_ROOM)
    world.rejections.rejected(pod("p0"), "c", NO_ROOM)
    assert len(world.problems()) == LIMIT
    world.rejections.rejected(pod("last"), "c", NO_ROOM)
    assert len(world.problems()) == LIMIT
    assert "ns/q0 " not in " ".join(world.problems())
    assert "ns/p0 " in " ".join(world.problems())


def test_a_container_that_is_created_after_all_is_not_rejected(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        lse = await world.run(await world.pod("lse", "LSE", "", "0-3"))
        sandbox = await world.pod("rival", "LSE", "", "2-3")
        assert (await world.begin(sandbox)).refused is not None
        assert len(rejections(world)) == 1
        await world.stop(lse)
        world.finish(await world.begin(sandbox), "rival")
        assert rejections(world) == []

    run_scenario(scenario)


@pytest.mark.parametrize("mode", [NodeMode.ENFORCE, NodeMode.OBSERVE])
def test_the_status_counts_the_attempts_of_a_rejected_container(run_scenario: Any, mode: NodeMode) -> None:
    async def scenario(world: Any) -> None:
        assert node_page(world.executor)["rejections"] == []
        for _ in range(3):
            await rival(world)
        (row,) = node_page(world.executor)["rejections"]
        assert (row["pod"], row["container"], row["count"]) == ("ns/rival", "c", 3)
        assert row["applied"] is (mode is NodeMode.ENFORCE)
        assert row["reason"] == "CPUsInUse"
        assert "CPUs 2-3 are owned by" in (row["detail"] or row["message"])
        assert row["uid"]
        assert row["first"] <= row["last"]

    run_scenario(scenario, mode=mode)


def test_the_status_shows_to_which_pods_the_plan_is_applied(run_scenario: Any) -> None:
    async def scenario(world: Any) -> None:
        await rival(world)
        (row,) = node_page(world.executor)["rejections"]
        assert row["applied"] is True
        world.executor.store.handle(ModeChanged(NodeMode.OBSERVE))
        (row,) = node_page(world.executor)["rejections"]
        assert row["applied"] is False

    run_scenario(scenario)


def test_a_new_pod_of_the_same_name_starts_a_new_count() -> None:
    found = telemetry([])
    rejections = Rejections(found, lambda: 1.0, lambda: 5.0)
    verdict = Verdict(9, "CPUsInUse", "cannot place ns/web: CPUs 0-1 are owned by another pod")
    for uid in ("a", "a", "b"):
        rejections.rejected(Pod("", uid, "ns", "web"), "c", verdict)
    (row,) = rejections.page(lambda pod: True)
    assert (row["uid"], row["count"], row["first"], row["message"]) == ("b", 1, 5.0, verdict.message)
