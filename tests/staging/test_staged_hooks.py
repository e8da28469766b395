"""Hooks on a node on which some pods are only observed: they change and refuse enforced pods alone."""

from __future__ import annotations

import pytest

from proxy.demo.client import DemoPod
from proxy.model.errors import RuntimeCallError
from tests.reload.node import FileNode
from tests.staging.test_staged_daemon import ALL, CHOSEN, ENFORCE, OBSERVE, cpus
from tests.testkit.daemon import run, temporary_node
from tests.testkit.waiting import until

HOOK = """
from proxy.hooks.api import Adjustment, CpuSet, Veto

API_VERSION = 1

def pre_run_pod_sandbox(event):
    if event.pod.name.startswith("bad"):
        return Veto("as a test wants")

def pre_create_container(event):
    return Adjustment(cpus=CpuSet((0, 1)))
"""


def test_hooks_begin_with_enforcement_and_leave_observed_pods_alone() -> None:
    with temporary_node(FileNode) as node:
        directory = node.directory / "hooks.d"
        directory.mkdir(mode=0o755)
        (directory / "10-mine.py").write_text(HOOK)
        nothing = node.directory / "none"
        section = (
            f"hooks: {{directory: {directory}, vendorDirectory: {nothing}, serverDirectory: {nothing}}}\n"
        )
        daemon = node.from_file(OBSERVE + section)

        async def scenario() -> None:
            first = await node.launch(DemoPod("bad-first", "LS"))
            assert daemon.parts.hooks is None
            staged = ENFORCE.replace("{stepPeriod", "{podSelector: {matchLabels: {app: chosen}}, stepPeriod")
            await node.reload(daemon, staged + section)
            await until(lambda: daemon.parts.pages.hooks()["hooks"])
            observed = await node.launch(DemoPod("bad-second", "LS"))
            enforced = await node.launch(DemoPod("good", "LS", labels=CHOSEN))
            with pytest.raises(RuntimeCallError, match="as a test wants"):
                await node.launch(DemoPod("bad-third", "LS", labels=CHOSEN))
            assert [cpus(node, each) for each in (first, observed, enforced)] == [ALL, ALL, "0-1"]

        run(daemon, scenario, reconciled=True)
