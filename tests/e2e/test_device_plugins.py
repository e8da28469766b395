"""Devices of plugins that registered with the daemon, in containers of a real containerd.

One plugin uses the device plugin kit and runs as a process; the other is the unmodified sample device
plugin of Kubernetes. The path of kubelet's socket is a constant in the sample, so it runs in a mount
namespace in which the daemon's directory is mounted there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from container_process import environment, inside
from cri import EXITED, UNTIL_PROCEED, code
from daemon import DaemonProcess, ModeledNode
from kubelet import KubeletServer
from private_runtime import PrivateRuntime, end_process, wait_for
from sample_plugin import built_sample_plugin

from proxy.admin.client import query_admin

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DEVICE = "example.com/device"
SAMPLE = "example.com/resource"
KUBELET_DIRECTORY = "/var/lib/kubelet/device-plugins"
PATIENCE_S = float(os.environ.get("TOPOPROXY_PATIENCE_S") or 30)


@dataclass
class PluginProcess:
    """The plugin of ``file_plugin.py``, with its devices."""

    directory: Path
    sockets: Path
    process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        (self.directory / "devices").mkdir(parents=True)
        (self.directory / "library").mkdir()
        (self.directory / "library/version").write_text("7")
        for number in range(3):
            self.device(f"dev{number}")

    def device(self, name: str, state: str = "healthy 0") -> None:
        """Set the state of a device."""
        draft = self.directory / name
        draft.write_text(state)
        draft.rename(self.directory / "devices" / name)

    def start(self) -> None:
        line = [sys.executable, str(Path(__file__).with_name("file_plugin.py"))]
        self.process = subprocess.Popen(
            [*line, str(self.directory), str(self.sockets), DEVICE],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def hold_allocate(self) -> None:
        """Make the plugin wait in the next Allocate."""
        (self.directory / "held").unlink(missing_ok=True)
        (self.directory / "hold").touch()

    def wait_until_held(self) -> None:
        """Wait until an Allocate is in progress."""
        wait_for("an Allocate", (self.directory / "held").exists, limit=PATIENCE_S)

    def release_allocate(self) -> None:
        (self.directory / "hold").unlink(missing_ok=True)


@dataclass
class DeviceScenario:
    """A daemon with a stand-in for kubelet, a plugin, and the containers of a test.

    Attributes:
        node: The daemon and its containers.
        kubelet: The server from which the daemon reads the pods.
        plugin: The plugin.
    """

    node: ModeledNode
    kubelet: KubeletServer
    plugin: PluginProcess
    given: dict[str, str] = field(default_factory=dict)

    def pod(self, name: str, count: int = 1, resource: str = DEVICE) -> str:
        """Run the sandbox of a pod that requests ``count`` devices, which may be 0."""
        limits = {"cpu": "500m", "memory": "64Mi", **({resource: str(count)} if count else {})}
        self.kubelet.add(name, **limits)
        return self.node.pod("part", name=name)

    def run(self, name: str, count: int = 1, resource: str = DEVICE) -> str:
        """Run a pod with one container."""
        return self.node.run(self.pod(name, count, resource))

    def healthy(self, resource: str = DEVICE) -> int:
        """Return the number of allocatable devices of a resource, in use or not."""
        page: Any = query_admin(self.node.daemon.directory / "admin.sock", "/devices/capacity", timeout=20)
        found = {each["name"]: int(each["allocatable"]) for each in page["resources"]}
        return found.get(resource, 0)

    def wait_until_served(self, count: int, resource: str = DEVICE) -> None:
        """Wait until the daemon knows this number of healthy devices."""
        wait_for(f"{count} devices", lambda: self.healthy(resource) == count, limit=PATIENCE_S)

    def holders(self) -> dict[str, list[str]]:
        """Return the containers that hold each device, as the daemon reports them."""
        page: Any = query_admin(self.node.daemon.directory / "admin.sock", "/devices", timeout=20)
        return {each["id"]: each["containers"] for each in page["managed"]}


def device_of(container: str) -> str:
    """Return the devices in the environment of a running container."""
    return environment(container)["DEVICES"]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    message: str = caught.value.details()  # type: ignore[attr-defined]
    assert code(caught.value) is not grpc.StatusCode.UNKNOWN, message
    return message


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletServer]:
    server = KubeletServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def scenario(
    runtime: PrivateRuntime,
    start_daemon: Callable[..., DaemonProcess],
    kubelet: KubeletServer,
    tmp_path: Path,
) -> Iterator[DeviceScenario]:
    sockets = tmp_path / "sockets"
    daemon = start_daemon(
        kubelet=kubelet.settings,
        devicePlugins={"enabled": True, "socketDirectory": str(sockets), "timeout": "5s"},
    )
    plugin = PluginProcess(tmp_path / "plugin", sockets)
    with daemon.client() as client:
        made = DeviceScenario(ModeledNode(runtime, daemon, client), kubelet, plugin)
        plugin.start()
        made.wait_until_served(3)
        yield made
    plugin.release_allocate()
    assert plugin.process is not None
    end_process(plugin.process)
    runtime.clear()


def test_a_container_gets_the_devices_of_the_plugins_response(scenario: DeviceScenario) -> None:
    container = scenario.run("db")
    name = device_of(container)
    assert name in {"dev0", "dev1", "dev2"}
    assert inside(container, f"/dev/{name}").is_char_device()
    assert inside(container, "/library/version").read_text() == "7"
    with pytest.raises(OSError, match="Read-only"):
        inside(container, "/library/version").write_text("8")
    assert scenario.holders()[name] == ["default/db/main"]
    both = scenario.run("both", 2)
    assert set(device_of(both).split(",")) == {"dev0", "dev1", "dev2"} - {name}
    scenario.node.check()


def test_pods_without_plugin_devices_are_not_changed(scenario: DeviceScenario) -> None:
    plain = scenario.run("plain", 0)
    assert "DEVICES" not in environment(plain)
    assert not inside(plain, "/library").exists()
    foreign = scenario.node.run(scenario.pod("foreign", 2, "nvidia.com/gpu"), device="/dev/full")
    assert "DEVICES" not in environment(foreign)
    assert inside(foreign, "/dev/full").is_char_device()
    mixed = scenario.node.run(scenario.pod("mixed"), device="/dev/full")
    assert inside(mixed, "/dev/full").is_char_device()
    assert inside(mixed, f"/dev/{device_of(mixed)}").is_char_device()


def test_no_device_is_allocated_twice_and_a_released_one_is_allocated_again(scenario: DeviceScenario) -> None:
    first = {name: scenario.run(name) for name in ("a", "b", "c")}
    given = {device_of(container) for container in first.values()}
    assert given == {"dev0", "dev1", "dev2"}
    pod = scenario.pod("d")
    message = refused(lambda: scenario.node.create(pod))
    assert DEVICE in message
    freed = device_of(first["b"])
    holding = scenario.node.containers[first["b"]].pod
    scenario.node.remove(first["b"])
    scenario.node.cri.stop_pod(holding)
    scenario.node.cri.remove_pod(holding)
    again = scenario.node.run(pod)
    assert device_of(again) == freed


def test_unhealthy_devices_are_not_allocated_and_running_containers_keep_theirs(
    scenario: DeviceScenario,
) -> None:
    holder = scenario.run("holder")
    for number in range(3):
        scenario.plugin.device(f"dev{number}", "unhealthy")
    scenario.wait_until_served(0)
    pod = scenario.pod("waits")
    assert DEVICE in refused(lambda: scenario.node.create(pod))
    assert scenario.holders()[device_of(holder)] == ["default/holder/main"]
    scenario.plugin.device("dev2")
    scenario.wait_until_served(1)
    if device_of(holder) != "dev2":
        assert device_of(scenario.node.run(pod)) == "dev2"


def test_a_restarted_container_keeps_its_device(scenario: DeviceScenario) -> None:
    pod = scenario.pod("db")
    first = scenario.node.run(pod, command=["sh", "-c", UNTIL_PROCEED])
    name = device_of(first)
    scenario.run("other")
    scenario.node.cri.proceed(first)
    wait_for("the end", lambda: scenario.node.cri.status(first).status.state == EXITED, limit=PATIENCE_S)
    del scenario.node.containers[first]
    second = scenario.node.run(pod, attempt=1)
    assert device_of(second) == name


def test_no_device_is_lost_if_the_plugin_is_killed_during_an_allocate(scenario: DeviceScenario) -> None:
    plugin = scenario.plugin
    pod = scenario.pod("db")
    plugin.hold_allocate()
    failures: list[str] = []
    call = threading.Thread(target=lambda: failures.append(refused(lambda: scenario.node.create(pod))))
    call.start()
    plugin.wait_until_held()
    plugin.kill9()
    call.join(PATIENCE_S)
    assert failures
    assert DEVICE in failures[0]
    plugin.release_allocate()
    assert scenario.healthy() == 0
    plugin.start()
    scenario.wait_until_served(3)
    everything = [scenario.node.run(pod), scenario.run("b"), scenario.run("c")]
    assert {device_of(container) for container in everything} == {"dev0", "dev1", "dev2"}


def test_a_hanging_plugin_fails_its_create_after_the_timeout_and_no_other_call(
    scenario: DeviceScenario,
) -> None:
    plugin, pod = scenario.plugin, scenario.pod("db")
    plugin.hold_allocate()
    begun = time.monotonic()
    failures: list[str] = []
    call = threading.Thread(target=lambda: failures.append(refused(lambda: scenario.node.create(pod))))
    call.start()
    plugin.wait_until_held()
    scenario.run("plain", 0)
    call.join(PATIENCE_S)
    assert time.monotonic() - begun < PATIENCE_S
    assert failures
    assert "within 5 s" in failures[0]
    plugin.release_allocate()
    assert device_of(scenario.node.run(pod))


# Kills of the daemon.


def check_all_allocated_once(scenario: DeviceScenario, *running: str) -> None:
    """Allocate the remaining devices: each device is in one container, and none is missing."""
    fillers = [scenario.run(f"filler{number}") for number in range(3 - len(running))]
    given = [device_of(container) for container in (*running, *fillers)]
    assert sorted(given) == ["dev0", "dev1", "dev2"]
    pod = scenario.pod("too-many")
    assert DEVICE in refused(lambda: scenario.node.create(pod))


def start_again(scenario: DeviceScenario) -> None:
    scenario.node.daemon.start()
    scenario.wait_until_served(3)


def test_a_daemon_killed_while_containers_run_loses_no_device(scenario: DeviceScenario) -> None:
    first, second = scenario.run("a"), scenario.run("b")
    scenario.node.daemon.kill9()
    start_again(scenario)
    assert sorted(len(names) for names in scenario.holders().values()) == [0, 1, 1]
    check_all_allocated_once(scenario, first, second)


def test_a_daemon_killed_between_create_and_start_loses_no_device(scenario: DeviceScenario) -> None:
    created = scenario.node.create(scenario.pod("a"))
    scenario.node.daemon.kill9()
    start_again(scenario)
    scenario.node.start(created)
    check_all_allocated_once(scenario, created)


def test_a_daemon_killed_during_an_allocate_loses_no_device(scenario: DeviceScenario) -> None:
    pod = scenario.pod("a")
    scenario.plugin.hold_allocate()
    with contextlib.suppress(grpc.RpcError):
        request = scenario.node.cri.create_request(pod)
        call = scenario.node.cri.method("CreateContainer").future(request, timeout=PATIENCE_S)
        scenario.plugin.wait_until_held()
        scenario.node.daemon.kill9()
        call.result()
    scenario.plugin.release_allocate()
    start_again(scenario)
    check_all_allocated_once(scenario, scenario.node.run(pod))


def test_a_daemon_killed_while_the_runtime_creates_the_container_loses_no_device(
    scenario: DeviceScenario,
) -> None:
    pod = scenario.pod("a")
    with contextlib.suppress(grpc.RpcError), scenario.node.runtime.frozen():
        request = scenario.node.cri.create_request(pod)
        # gRPC cancels a call without references, so keep one.
        call = scenario.node.cri.method("CreateContainer").future(request, timeout=PATIENCE_S)
        wait_for("the plugin's answer", (scenario.plugin.directory / "allocated").exists, limit=PATIENCE_S)
        time.sleep(0.5)
        scenario.node.daemon.kill9()
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    start_again(scenario)
    for container in scenario.node.cri.list():  # as kubelet does after a create without an answer
        scenario.node.cri.remove(container.id)
    check_all_allocated_once(scenario, scenario.node.run(pod, attempt=1))


def test_a_daemon_killed_before_a_pod_is_removed_loses_no_device(scenario: DeviceScenario) -> None:
    first = scenario.run("a")
    pod = scenario.node.containers[first].pod
    scenario.node.remove(first)
    scenario.node.daemon.kill9()
    with scenario.node.runtime.client() as direct:
        direct.stop_pod(pod)
        direct.remove_pod(pod)
    start_again(scenario)
    check_all_allocated_once(scenario)


# The sample plugin of Kubernetes.


@pytest.fixture(scope="module")
def sample_plugin(runtime: PrivateRuntime) -> Path:
    """The path of the sample plugin."""
    return built_sample_plugin()


@contextlib.contextmanager
def running_sample_plugin(program: Path, sockets: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the sample with the daemon's directory mounted at kubelet's path."""
    shim = (
        f"mount -t tmpfs none /var/lib && mkdir -p {KUBELET_DIRECTORY} && "
        f'mount --bind "$1" {KUBELET_DIRECTORY} && exec "$2"'
    )
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", shim, "sh", str(sockets)]
    with log.open("a") as out:
        process = subprocess.Popen([*command, str(program)], stdout=out, stderr=out, text=True)
    try:
        yield process
    finally:
        end_process(process)


def test_devices_of_the_kubernetes_sample_plugin_are_allocated_once(
    scenario: DeviceScenario, sample_plugin: Path, tmp_path: Path
) -> None:
    sockets = scenario.plugin.sockets
    with running_sample_plugin(sample_plugin, sockets, tmp_path / "sample.log") as process:
        scenario.wait_until_served(2, SAMPLE)
        running = [scenario.run(name, 1, SAMPLE) for name in ("a", "b")]
        mounted = [
            [name for name in ("Dev-1", "Dev-2") if inside(container, f"/tmp/{name}").exists()]
            for container in running
        ]
        assert sorted(mounted) == [["Dev-1"], ["Dev-2"]]
        pod = scenario.pod("c", 1, SAMPLE)
        assert SAMPLE in refused(lambda: scenario.node.create(pod))
        process.terminate()
        process.wait(20)
        scenario.wait_until_served(0, SAMPLE)
    holders = scenario.holders()
    assert sorted(holders[name] for name in ("Dev-1", "Dev-2")) == [["default/a/main"], ["default/b/main"]]


def test_the_kubernetes_sample_plugin_registers_again_after_a_kill_of_the_daemon(
    scenario: DeviceScenario, sample_plugin: Path, tmp_path: Path
) -> None:
    """The plugin watches kubelet.sock, and registers ten seconds after its creation."""
    with running_sample_plugin(sample_plugin, scenario.plugin.sockets, tmp_path / "sample.log"):
        scenario.wait_until_served(2, SAMPLE)
        running = scenario.run("a", 1, SAMPLE)
        scenario.node.daemon.kill9()
        scenario.node.daemon.start()
        wait_for("both", lambda: scenario.healthy(SAMPLE) == 2, limit=30 + PATIENCE_S)
        other = scenario.run("b", 1, SAMPLE)
        for name in ("Dev-1", "Dev-2"):
            assert inside(running, f"/tmp/{name}").exists() is not inside(other, f"/tmp/{name}").exists()
