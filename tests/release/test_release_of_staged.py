"""A release of a node on which some pods are only observed."""

from __future__ import annotations

import asyncio

from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.model.idset import CpuSet
from tests.reload.node import FileNode
from tests.staging.test_staged_daemon import ALL, CHOSEN, ENFORCE, OBSERVE, OWNERS, cpus, load, page, world
from tests.testkit.daemon import run, temporary_node
from tests.testkit.waiting import until

STAGED = ENFORCE.replace("{stepPeriod", "{podSelector: {matchLabels: {app: chosen}}, stepPeriod")


def stage(daemon: Daemon) -> object:
    assert daemon.parts.release is not None
    return daemon.parts.release.answer()["stage"]


def test_observed_pods_are_not_changed() -> None:
    with temporary_node(FileNode) as node:
        daemon = node.from_file(STAGED)
        ids: dict[str, str] = {}

        async def scenario() -> None:
            assert daemon.parts.release is not None
            ids["enforced"] = await node.launch(DemoPod("enforced", "LSE", cpuset="2-3", labels=CHOSEN))
            ids["observed"] = await node.launch(DemoPod("observed", "LS"))
            group = node.cgroups.find("", ids["observed"])
            assert group is not None
            node.cgroups.write(group, CpuSet((2, 4)), None)
            await daemon.parts.release.actions()["/release/start"]()
            await until(
                lambda: (
                    daemon.parts.release is not None and daemon.parts.release.answer()["stage"] == "released"
                )
            )
            assert (cpus(node, ids["enforced"]), cpus(node, ids["observed"])) == (ALL, "2,4")
            await daemon.parts.release.actions()["/release/undo"]()
            await until(lambda: cpus(node, ids["enforced"]) == "2-3")
            await asyncio.sleep(0.5)
            assert cpus(node, ids["observed"]) == "2,4"
            await daemon.parts.release.actions()["/release/start"]()
            await until(
                lambda: (
                    daemon.parts.release is not None and daemon.parts.release.answer()["stage"] == "released"
                )
            )

        run(daemon, scenario, reconciled=True)
        later = node.from_file(OBSERVE)

        async def observed() -> None:
            assert later.parts.release is not None
            await until(lambda: stage(later) == "released")
            await asyncio.sleep(0.7)
            assert stage(later) == "released"
            await later.parts.release.actions()["/release/undo"]()
            await until(lambda: "nothing" in later.parts.release.answer())
            await asyncio.sleep(0.7)
            assert (cpus(node, ids["enforced"]), cpus(node, ids["observed"])) == (ALL, "2,4")

        run(later, observed, reconciled=True)


def test_steps_continue_after_a_release_between_them() -> None:
    with temporary_node(FileNode) as node:
        daemon = node.from_file(OBSERVE)

        async def scenario() -> None:
            assert daemon.parts.release is not None
            ids = await load(node, 3)
            await node.reload(daemon, ENFORCE)
            await until(lambda: page(daemon)["enforced"] >= 1)
            await daemon.parts.release.actions()["/release/start"]()
            await until(lambda: stage(daemon) == "released")
            assert set(world(node, ids).values()) == {ALL}
            await asyncio.sleep(0.3)
            assert set(world(node, ids).values()) == {ALL}
            await daemon.parts.release.actions()["/release/undo"]()
            await until(lambda: page(daemon)["enforced"] == len(ids) and not page(daemon)["inStep"])
            await until(lambda: world(node, ids) == {**dict.fromkeys(ids, "0-1,6-15"), **OWNERS})

        run(daemon, scenario, reconciled=True)
