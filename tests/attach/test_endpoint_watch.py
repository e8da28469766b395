"""The daemon detects that an upgrade with kubeadm has reset kubelet's endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from proxy.admin.status_text import render
from proxy.attach.detach import detach
from proxy.attach.endpoint_watch import RESET, EndpointWatch, attached_kubelet
from proxy.attach.service import attach
from proxy.observe.metrics import metrics
from proxy.telemetry import metrics as named
from tests.attach.conftest import CHANGED, LAYOUTS, OURS, RUNTIME, FakeNode
from tests.testkit.captured_log import telemetry
from tests.testkit.daemon import run, temporary_node
from tests.testkit.waiting import until

Fake = Callable[[str], FakeNode]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reset_endpoint_is_reported_until_attach_repairs_it(fake: Fake, layout: str) -> None:
    node, reported = fake(layout), list[str]()
    talk = telemetry(reported)
    watch = EndpointWatch(
        talk, lambda: attached_kubelet(node.state, node.root / "var/lib/kubelet", node.root)
    )

    def problems() -> list[str]:
        asyncio.run(watch.check())
        return [str(each["what"]) for each in talk.problems()]

    assert problems() == []
    assert watch.page() == {}, "a node that is not attached"
    attach(node.node(), 10)
    assert problems() == []
    assert watch.page() == {"endpoint": OURS, "reset": ""}
    file = node.root / CHANGED[layout][0].lstrip("/")
    attached = file.read_text()
    file.write_text(attached.replace(OURS, RUNTIME))
    (problem,) = problems()
    assert problem.startswith(RESET)
    assert f"{file} names {RUNTIME}" in problem
    problems()
    assert len(reported) == 1, "it is logged once"
    status = {"attach": watch.page()}
    assert f"ENDPOINT RESET: {file} names {RUNTIME}" in render(status)
    assert f"topoproxy_{named.KUBELET_ENDPOINT_RESET.name} 1" in metrics(status)
    attach(node.node(), 10)
    assert problems() == []
    assert "kubelet" in render({"attach": watch.page()})
    assert f"topoproxy_{named.KUBELET_ENDPOINT_RESET.name} 0" in metrics({"attach": watch.page()})
    detach(node.node(), 10, force=False, release=False)
    assert problems() == []
    assert watch.page() == {}


def test_a_removed_endpoint_means_kubelets_default(fake: Fake) -> None:
    node = fake("config-file")
    attach(node.node(), 10)
    (node.root / "etc/kubelet.json").write_text("{}")
    found = attached_kubelet(node.state, node.root / "var/lib/kubelet", node.root)
    assert found is not None
    assert found.reset.startswith("no file names an endpoint")


def test_nothing_is_reported_during_an_attach(fake: Fake) -> None:
    node = fake("config-file")
    attach(node.node(), 10)
    (node.state / "attach/state").write_text("changing\n")
    assert attached_kubelet(node.state, node.root / "var/lib/kubelet", node.root) is None


def test_the_daemon_reports_a_reset_endpoint() -> None:
    with temporary_node() as node:
        kubelet, journal = node.directory / "kubelet", node.directory / "state/attach"
        for directory in (kubelet, journal):
            directory.mkdir(parents=True)
        (kubelet / "config.yaml").write_text(f"containerRuntimeEndpoint: {RUNTIME}\n")
        (journal / "state").write_text("attached\n")
        (journal / "endpoint").write_text(f"{OURS}\n")
        daemon = node.daemon(f"kubelet: {{stateDir: {kubelet}}}\n")

        async def scenario() -> None:
            await until(lambda: daemon.parts.pages.status()["problems"])
            page = daemon.parts.pages.status()
            assert page["attach"] == {
                "endpoint": OURS,
                "reset": f"{kubelet}/config.yaml names {RUNTIME}",
            }
            (problem,) = page["problems"]
            assert problem["message"] == RESET

        run(daemon, scenario)
