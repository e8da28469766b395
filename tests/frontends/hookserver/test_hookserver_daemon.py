"""The daemon with ``hooks.serve``: it runs its hooks for a peer and removes its socket at the end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from proxy.demo.client import DemoPod
from proxy.telemetry import metrics

HOOK = """
from proxy.hooks.api import CLEAR, Adjustment, PreCreateContainer, PreRunPodSandbox
from proxy.telemetry import metrics

API_VERSION = 1


def pre_run_pod_sandbox(event: PreRunPodSandbox) -> Adjustment:
    return Adjustment(labels={"koordinator.sh/qosClass": CLEAR})


def pre_create_container(event: PreCreateContainer) -> Adjustment:
    own = {"OWN": str(event.decision.own)}
    return Adjustment(envs=own, annotations={"seen": event.pod.name}, labels={"hooked": "yes"})
"""


def test_the_hook_server_runs_the_hooks_of_the_daemon(node: Any, in_thread: Any) -> None:
    directory = node.directory / "hooks.d"
    directory.mkdir(mode=0o755)
    (directory / "10-own.py").write_text(HOOK)
    # The daemon's own registration may be in the directory of hook servers: it does not call itself.
    servers = node.directory / "hookserver.d"
    servers.mkdir(mode=0o755)
    (servers / "topoproxy.json").write_text(
        json.dumps({"remote-endpoint": str(node.socket), "runtime-hooks": ["PreCreateContainer"]})
    )
    text = f"""
cpuManagerPolicy: static
reconcilePeriod: 200ms
listen: unix://{node.directory}/cri.sock
adminSocket: unix://{node.directory}/admin.sock
runtime: unix://{node.directory}/runtime.sock
stateDir: {node.directory}/state
hooks: {{directory: {directory}, vendorDirectory: {directory}-no, serverDirectory: {servers},
  serve: {node.socket}}}
"""

    async def run() -> None:
        daemon: Any = node.make_daemon(text)
        await daemon.start()
        peer = node.peer_of(node.directory / "runtime.sock")
        try:
            lse = await in_thread(peer.launch, DemoPod("lse", "LSE", cpuset="2-3", cpus=2))
            assert node.cpus(lse.container_id) == "2-3"
            config = node.config(lse.container_id)
            assert [(e.key, e.value) for e in config.envs] == [("OWN", b"2-3")]
            assert config.annotations["seen"] == "lse"
            assert daemon.executor.telemetry.value(metrics.HOOK_SERVER_REQUESTS) == len(peer.log)
            problems = [p["what"] for p in daemon.executor.telemetry.problems()]
            assert not [p for p in problems if "topoproxy.json" in p]
            reason = "Koordinator's hook protocol has no fields for it"
            expected = f"cannot change a container: {reason} pod=demo/lse container=main fields=labels"
            assert expected in problems
            fields = '"labels[koordinator.sh/qosClass]"'
            assert f"cannot change a sandbox: {reason} pod=demo/lse fields={fields}" in problems
            hooks = daemon.parts.hooks
            assert hooks is not None
            assert hooks.page()["serving"] == {"socket": str(node.socket), "listening": True}
        finally:
            peer.close()
            await daemon.stop()

    asyncio.run(run())
    assert not node.socket.exists()
