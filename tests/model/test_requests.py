"""The peak request of a pod."""

from __future__ import annotations

import pytest

from proxy.model.requests import ContainerKind, ContainerResources, PodRequests, peak_request


def resources(kind: ContainerKind, **amounts: int) -> ContainerResources:
    return ContainerResources(f"{kind}{len(amounts)}", kind, amounts)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([], {}),
        ([resources(ContainerKind.APP, a=2), resources(ContainerKind.APP, a=3, b=1)], {"a": 5, "b": 1}),
        (
            [
                resources(ContainerKind.INIT, a=4),
                resources(ContainerKind.INIT, a=6),
                resources(ContainerKind.APP, a=5),
            ],
            {"a": 6},
        ),
        (
            [
                resources(ContainerKind.SIDECAR, a=2),
                resources(ContainerKind.INIT, a=4),
                resources(ContainerKind.APP, a=3),
            ],
            {"a": 6},
        ),
        (
            [
                resources(ContainerKind.INIT, a=4),
                resources(ContainerKind.SIDECAR, a=2),
                resources(ContainerKind.APP, a=3),
            ],
            {"a": 5},
        ),
        (
            [
                resources(ContainerKind.SIDECAR, a=2),
                resources(ContainerKind.SIDECAR, a=2),
                resources(ContainerKind.APP, a=1),
            ],
            {"a": 5},
        ),
    ],
)
def test_the_worst_moment(containers: list[ContainerResources], expected: dict[str, int]) -> None:
    assert peak_request(containers, lambda each: each.requests) == expected


def test_only_resources_of_some_containers() -> None:
    containers = [
        resources(ContainerKind.INIT, a=9, b=9),
        resources(ContainerKind.SIDECAR, b=1),
        resources(ContainerKind.APP, a=1),
    ]
    assert peak_request(containers, lambda each: each.requests, (ContainerKind.APP,)) == {"a": 9}


def test_requests_equal_limits_only_if_both_are_set_and_not_zero() -> None:
    amounts = {"cpu": 1000, "memory": 5}
    assert ContainerResources("c", requests=amounts, limits={**amounts, "x": 1}).requests_equal_limits
    assert not ContainerResources(
        "c", requests=amounts, limits={**amounts, "memory": 6}
    ).requests_equal_limits
    assert not ContainerResources(
        "c", requests={"cpu": 0, "memory": 5}, limits={"cpu": 0, "memory": 5}
    ).requests_equal_limits
    assert not ContainerResources("c").requests_equal_limits


def test_containers_by_name_and_kind() -> None:
    init, app = ContainerResources("i", ContainerKind.INIT), ContainerResources("a")
    pod = PodRequests("p", (init, app))
    assert (pod.named("a"), pod.of_kinds(ContainerKind.INIT), pod.of_kinds(*ContainerKind)) == (
        app,
        (init,),
        (init, app),
    )
    with pytest.raises(KeyError):
        pod.named("x")
