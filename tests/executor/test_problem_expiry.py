"""Problems end with their pods, containers and causes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from proxy.executor.context import CANNOT_WRITE
from proxy.executor.drift.reporting import WRITE_CONFLICT
from proxy.executor.reconciler import NOT_RECONCILED
from proxy.executor.rejections import FORGET_S
from proxy.model.errors import CgroupError, RuntimeCallError
from proxy.telemetry.port import HOOK_FAILED, PROBLEM_LIMIT, Problem, Problems


def messages(world: Any) -> list[str]:
    return [str(problem["message"]) for problem in world.executor.telemetry.problems()]


def test_problems_of_containers_and_pods_that_are_gone_end(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        problem = world.executor.telemetry.problem
        problem(WRITE_CONFLICT, pod="ns/ls", container="c", containerID=ls)
        problem("of a container that is gone", pod="ns/ls", containerID="gone")
        problem("of a container that a hook names", hook="10-others", containerID="missing")
        problem("of the pod", pod="ns/ls")
        problem("of a pod that may come again", pod="ns/other")
        problem("of the node")
        problem(HOOK_FAILED, hook="10-others", reason="cannot set envs[A] of ns/gone/main")
        problem("cannot load a hook", hook="20-broken")
        await world.sync.once()
        of_hook = "of a container that a hook names"
        lasting = ["of the node", HOOK_FAILED, "cannot load a hook"]
        standing = [WRITE_CONFLICT, of_hook, "of the pod", "of a pod that may come again", *lasting]
        assert messages(world) == standing
        world.now += FORGET_S + 1
        await world.sync.once()
        assert messages(world) == [WRITE_CONFLICT, "of the pod", "of the node", "cannot load a hook"]

    run_scenario(scenario)


def test_a_reconcile_that_succeeds_ends_the_problem_of_one_that_failed(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        world.executor.telemetry.problem(NOT_RECONCILED, err=RuntimeCallError("cannot list pods", 2))
        await world.sync.once()
        assert messages(world) == []

    run_scenario(scenario)


def test_a_cpuset_that_is_written_after_all_is_no_problem_any_more(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        ls = await world.run(await world.pod("ls", "LS"))
        write = world.cgroups.write

        def refused(path: str, *args: Any, **more: Any) -> Any:
            if ls in path:
                raise CgroupError("cannot set CPUs: Permission denied", errno.EACCES)
            return write(path, *args, **more)

        world.cgroups.write = refused
        world.cgroups.sets[ls] = type(world.cgroups.sets[ls])((0,))
        await world.sync.once()
        assert CANNOT_WRITE in messages(world)
        world.cgroups.write = write
        await world.sync.once()
        assert CANNOT_WRITE not in messages(world)

    run_scenario(scenario)


def test_problems_of_pods_do_not_displace_others() -> None:
    """Authors of pods can cause as many as they like."""
    problems = Problems(lambda: 0.0)
    problems.note("of the node", {})
    for number in range(2 * PROBLEM_LIMIT):
        problems.note("cannot follow what a pod requests", {"pod": f"ns/job{number}"})
    page = problems.page()
    assert (len(page), page[0]["message"], page[1]["keys"]) == (
        PROBLEM_LIMIT,
        "of the node",
        {"pod": "ns/job101"},
    )
    kept: list[Problem] = []
    problems.remove_unless(lambda problem: kept.append(problem) is not None)
    assert (len(kept), problems.page()) == (PROBLEM_LIMIT, [])


def test_failures_of_a_hook_do_not_displace_others() -> None:
    """The reasons of failures quote pods, whose authors can cause any number of them."""
    problems = Problems(lambda: 0.0)
    problems.note("of the node", {})
    for number in range(2 * PROBLEM_LIMIT):
        problems.note(HOOK_FAILED, {"hook": "10-bad", "reason": f"cannot set envs[A] of ns/job{number}/main"})
    assert problems.note("cannot reach the runtime", {})
    found = [problem["message"] for problem in problems.page()]
    assert (len(found), found[0], found[-1]) == (PROBLEM_LIMIT, "of the node", "cannot reach the runtime")


def test_the_oldest_of_equal_problems_is_forgotten() -> None:
    problems = Problems(lambda: 0.0)
    for number in range(PROBLEM_LIMIT + 1):
        problems.note("of the node", {"path": str(number)})
    assert [problem["keys"] for problem in problems.page()] == [
        {"path": str(number)} for number in range(1, PROBLEM_LIMIT + 1)
    ]
