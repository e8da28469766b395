"""What a pod needs at its worst moment."""

from __future__ import annotations

import pytest

from proxy.allocation.pod_requests import peak_request
from proxy.model.requests import Ask, Kind, PodAsk


def ask(kind: Kind, **amounts: int) -> Ask:
    return Ask(f"{kind}{len(amounts)}", kind, amounts)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([], {}),
        ([ask(Kind.APP, a=2), ask(Kind.APP, a=3, b=1)], {"a": 5, "b": 1}),
        ([ask(Kind.INIT, a=4), ask(Kind.INIT, a=6), ask(Kind.APP, a=5)], {"a": 6}),
        ([ask(Kind.SIDECAR, a=2), ask(Kind.INIT, a=4), ask(Kind.APP, a=3)], {"a": 6}),
        ([ask(Kind.INIT, a=4), ask(Kind.SIDECAR, a=2), ask(Kind.APP, a=3)], {"a": 5}),
        ([ask(Kind.SIDECAR, a=2), ask(Kind.SIDECAR, a=2), ask(Kind.APP, a=1)], {"a": 5}),
    ],
)
def test_the_worst_moment(containers: list[Ask], expected: dict[str, int]) -> None:
    assert peak_request(containers, lambda each: each.requests) == expected


def test_only_resources_of_some_containers() -> None:
    containers = [ask(Kind.INIT, a=9, b=9), ask(Kind.SIDECAR, b=1), ask(Kind.APP, a=1)]
    assert peak_request(containers, lambda each: each.requests, (Kind.APP,)) == {"a": 9}


def test_exact_requests() -> None:
    amounts = {"cpu": 1000, "memory": 5}
    assert Ask("c", requests=amounts, limits={**amounts, "x": 1}).exact
    assert not Ask("c", requests=amounts, limits={**amounts, "memory": 6}).exact
    assert not Ask("c", requests={"cpu": 0, "memory": 5}, limits={"cpu": 0, "memory": 5}).exact
    assert not Ask("c").exact


def test_containers_by_name_and_kind() -> None:
    init, app = Ask("i", Kind.INIT), Ask("a")
    pod = PodAsk("p", (init, app))
    assert (pod.named("a"), pod.of(Kind.INIT), pod.of(*Kind)) == (app, (init,), (init, app))
    with pytest.raises(KeyError):
        pod.named("x")
