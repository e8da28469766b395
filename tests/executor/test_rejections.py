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


def rejections(w: Any) -> list[str]:
    """Return the problems that are rejections."""
    problems = node_page(w.executor)["problems"]
    return [p["what"] for p in problems if "refuse" in p["message"] or "cannot follow" in p["message"]]


def lines(w: Any) -> list[str]:
    """Return the log lines that speak of a rejection."""
    return [line for line in w.logged if "refuse" in line or "cannot follow" in line or "cannot give" in line]


async def too_large(w: Any) -> Any:
    """Ask for more whole CPUs than there are; the CPU count decides."""
    whole = {"cpu_shares": 40 * 1024, "cpu_quota": 40 * 100_000, "cpu_period": 100_000}
    return await w.begin(await w.pod("huge"), **whole)


async def rival(w: Any) -> Any:
    """Ask for CPUs that another container owns."""
    if not w.executor.state.owners:
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
    return await w.begin(await w.pod("rival", "LSE", "", "2-3"))


@pytest.mark.parametrize("mode", [NodeMode.ENFORCE, NodeMode.OBSERVE])
def test_an_overlap_is_a_problem_once_and_logged_once(live: Any, mode: NodeMode) -> None:
    async def day(w: Any) -> None:
        for _ in range(3):
            await rival(w)
        done = "refused" if mode is NodeMode.ENFORCE else "would refuse"
        (problem,) = rejections(w)
        assert problem.startswith(f"{done} a container pod=ns/rival container=c err=")
        assert "CPUs 2-3 are owned by" in problem
        assert lines(w) == [problem]

    live(day, mode=mode)


@pytest.mark.parametrize("mode", [NodeMode.ENFORCE, NodeMode.OBSERVE])
def test_a_rejection_by_cpu_count_is_a_problem_once_and_logged_once(live: Any, mode: NodeMode) -> None:
    async def day(w: Any) -> None:
        for _ in range(3):
            await too_large(w)
        done = "refused" if mode is NodeMode.ENFORCE else "would refuse"
        (problem,) = rejections(w)
        assert problem.startswith(f"{done} a container pod=ns/huge container=c err=")
        assert lines(w) == [problem]

    live(day, mode=mode)


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


def test_it_is_over_when_its_sandbox_has_ended() -> None:
    w = Rejected()
    for end in (lambda: w.rejections.pod_stopped(pod()), lambda: w.rejections.pod_gone("s1")):
        w.rejections.rejected(pod(), "c", NO_ROOM)
        w.rejections.pod_gone("s2")
        assert w.problems() == ["refused a container pod=ns/web container=c err=full"]
        end()
        assert w.problems() == []


def test_a_rejected_sandbox_is_forgotten_when_no_try_comes() -> None:
    w = Rejected()
    w.rejections.rejected(pod(sandbox="pod-1"), "", NO_ROOM, applied=True)
    w.now += FORGET_S - 1
    w.rejections.rejected(pod(sandbox="pod-2"), "", NO_ROOM, applied=True)
    w.now += FORGET_S
    w.rejections.listed((), (), 0)
    assert len(w.problems()) == 1
    w.now += 1
    w.rejections.listed((), (), 0)
    assert w.problems() == []


def test_a_pod_that_runs_is_not_rejected_unless_it_only_would_be() -> None:
    w = Rejected()
    w.rejections.rejected(pod(sandbox="pod-1"), "", NO_ROOM)
    w.rejections.sandbox_runs(pod(), applied=True)
    assert w.problems() == []
    w.rejections.rejected(pod(sandbox="pod-2"), "", NO_ROOM, applied=False)
    w.rejections.sandbox_runs(pod(), applied=False)
    w.now += 2 * FORGET_S
    w.rejections.listed((), (), 0)
    assert w.problems() == ["would refuse a pod pod=ns/web err=full"]
    w.rejections.pod_gone("s1")
    assert w.problems() == []


def test_one_that_is_applied_later_has_one_problem() -> None:
    w = Rejected()
    w.rejections.rejected(pod(), "c", NO_ROOM, applied=False)
    w.rejections.rejected(pod(), "c", NO_ROOM)
    assert w.problems() == ["refused a container pod=ns/web container=c err=full"]


def test_as_many_are_remembered_as_there_is_room() -> None:
    w = Rejected()
    for number in range(LIMIT + 5):
        w.rejections.rejected(pod(f"p{number}"), "c", NO_ROOM)
    assert len(w.problems()) == LIMIT
    assert "ns/p4 " not in " ".join(w.problems())
    assert not [line for line in w.logged if line.startswith("resolved")], "they are still rejected"


def test_one_that_is_forgotten_for_lack_of_room_is_no_problem_any_more() -> None:
    w = Rejected()
    w.rejections.rejected(pod("p0"), "c", NO_ROOM)
    for number in range(LIMIT - 1):
        w.rejections.rejected(pod(f"q{number}"), "c", NO_ROOM)
    w.rejections.rejected(pod("p0"), "c", NO_ROOM)
    assert len(w.problems()) == LIMIT
    w.rejections.rejected(pod("last"), "c", NO_ROOM)
    assert len(w.problems()) == LIMIT
    assert "ns/q0 " not in " ".join(w.problems())
    assert "ns/p0 " in " ".join(w.problems())


def test_a_container_that_is_created_after_all_is_not_rejected(live: Any) -> None:
    async def day(w: Any) -> None:
        lse = await w.run(await w.pod("lse", "LSE", "", "0-3"))
        sandbox = await w.pod("rival", "LSE", "", "2-3")
        assert (await w.begin(sandbox)).refused is not None
        assert len(rejections(w)) == 1
        await w.stop(lse)
        w.finish(await w.begin(sandbox), "rival")
        assert rejections(w) == []

    live(day)


@pytest.mark.parametrize("mode", [NodeMode.ENFORCE, NodeMode.OBSERVE])
def test_the_status_counts_the_tries_of_a_rejected_container(live: Any, mode: NodeMode) -> None:
    async def day(w: Any) -> None:
        assert node_page(w.executor)["rejections"] == []
        for _ in range(3):
            await rival(w)
        (row,) = node_page(w.executor)["rejections"]
        assert (row["pod"], row["container"], row["count"]) == ("ns/rival", "c", 3)
        assert row["applied"] is (mode is NodeMode.ENFORCE)
        assert row["reason"] == "CPUsInUse"
        assert "CPUs 2-3 are owned by" in (row["detail"] or row["message"])
        assert row["uid"]
        assert row["first"] <= row["last"]

    live(day, mode=mode)


def test_the_status_says_to_what_the_plan_is_applied_now(live: Any) -> None:
    async def day(w: Any) -> None:
        await rival(w)
        (row,) = node_page(w.executor)["rejections"]
        assert row["applied"] is True
        w.executor.store.handle(ModeChanged(NodeMode.OBSERVE))
        (row,) = node_page(w.executor)["rejections"]
        assert row["applied"] is False

    live(day)


def test_a_pod_of_the_same_name_begins_to_count_again() -> None:
    found = telemetry([])
    rejections = Rejections(found, lambda: 1.0, lambda: 5.0)
    verdict = Verdict(9, "CPUsInUse", "cannot place ns/web: CPUs 0-1 are owned by another pod")
    for uid in ("a", "a", "b"):
        rejections.rejected(Pod("", uid, "ns", "web"), "c", verdict)
    (row,) = rejections.page(lambda pod: True)
    assert (row["uid"], row["count"], row["first"], row["message"]) == ("b", 1, 5.0, verdict.message)
