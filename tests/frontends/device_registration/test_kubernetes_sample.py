"""The sample device plugin of Kubernetes, unmodified, with a daemon.

Its path of kubelet's socket is fixed, so it runs in a mount namespace with the daemon's directory there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.executor.device_ports import DevicePluginError
from proxy.model.devices import DeviceMount
from tests.testkit.daemon import DaemonNode, run, temporary_node
from tests.testkit.waiting import until

RESOURCE = "example.com/resource"
SCRIPT = Path(__file__).parents[2] / "e2e/build_sample_plugin.sh"
PLACE = "/var/lib/kubelet/device-plugins"
SHIM = f'mount -t tmpfs none /var/lib && mkdir -p {PLACE} && mount --bind "$1" {PLACE} && exec "$2"'
UNSHARE = ("unshare", "--mount", "--propagation", "private", "sh", "-c", SHIM, "sh")

pytestmark = [
    pytest.mark.timeout(1300),  # for the build
    pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root"),
]


@pytest.fixture(scope="module")
def program() -> Path:
    done = subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return Path(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def sampled(program: Path, sockets: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*UNSHARE, str(sockets), str(program)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def healthy(daemon: Any) -> set[str]:
    return set(daemon.executor.state.devices.healthy(RESOURCE))


def test_the_sample_plugin_registers_allocates_and_registers_again(program: Path) -> None:
    with temporary_node(DaemonNode) as node:
        sockets = node.directory / "plugins"
        sockets.mkdir()
        text = f"devicePlugins: {{enabled: true, socketDirectory: {sockets}}}\n"

        async def served(daemon: Any) -> None:
            await until(lambda: healthy(daemon) == {"Dev-1", "Dev-2"})
            plugins = daemon.executor.device_plugins
            answer = await plugins.allocate(RESOURCE, ("Dev-2",))
            assert answer.mounts == (DeviceMount("/tmp/Dev-2", "/tmp/Dev-2"),)
            with pytest.raises(DevicePluginError, match="non-existing device Dev-9"):
                await plugins.allocate(RESOURCE, ("Dev-9",))
            assert not plugins.offers_preference(RESOURCE)
            assert not plugins.needs_pre_start(RESOURCE)

        first = node.daemon(text)
        with contextlib.ExitStack() as running:

            async def begun() -> None:
                await until((sockets / "kubelet.sock").exists)
                running.enter_context(sampled(program, sockets))
                await served(first)

            run(first, begun)
            second = node.daemon(text)

            async def again() -> None:  # the plugin checks ten seconds after the creation of kubelet.sock
                await until(lambda: healthy(second), 60)
                await served(second)
                running.close()
                await until(lambda: healthy(second) == set())

            run(second, again)
