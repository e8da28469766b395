from __future__ import annotations

from proxy.model.requests import ContainerKind, ContainerResources, PodRequests
from proxy.model.workload import QosClass
from proxy.pools.ownership import ownership_problem


def ask(
    name: str, cpu: int, limit: int | None = None, kind: ContainerKind = ContainerKind.APP
) -> ContainerResources:
    return ContainerResources(name, kind, {"cpu": cpu}, {"cpu": cpu if limit is None else limit})


def test_whole_cpus_and_no_more_than_they_ask_for() -> None:
    assert not ownership_problem(QosClass.LSE, PodRequests("u", (ask("a", 1500), ask("b", 500))))
    init = ask("i", 300, kind=ContainerKind.INIT)
    assert not ownership_problem(
        QosClass.LSR, PodRequests("u", (init, ask("s", 700, kind=ContainerKind.SIDECAR), ask("a", 300)))
    )
    assert not ownership_problem(QosClass.LS, PodRequests("u", (ask("a", 1500, 9000),)))


def test_why_a_pod_may_not_own_cpus() -> None:
    uneven = ownership_problem(QosClass.LSE, PodRequests("u", (ask("a", 1000), ask("b", 1000, 2000))))
    assert uneven == "LSE pod: container b requests 1000m CPU and is limited to 2000m; the two must be equal"
    broken = ownership_problem(QosClass.LSR, PodRequests("u", (ask("a", 1500),)))
    assert broken == "LSR pod: its containers request 1500m CPU together; it must be whole CPUs"
    assert "request 0m CPU" in ownership_problem(QosClass.LSR, PodRequests("u", (ContainerResources("a"),)))
