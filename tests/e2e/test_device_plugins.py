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
from daemon import Daemon, Node
from kubelet import Kubelet
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
class Plugin:
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

    def hold(self) -> None:
        """Make the plugin wait in the next Allocate."""
        (self.directory / "held").unlink(missing_ok=True)
        (self.directory / "hold").touch()

    def wait_held(self) -> None:
        """Wait until an Allocate is in progress."""
        wait_for("an Allocate", (self.directory / "held").exists, limit=PATIENCE_S)

    def let_go(self) -> None:
        (self.directory / "hold").unlink(missing_ok=True)


@dataclass
class DeviceNodes:
    """A daemon with a stand-in for kubelet, a plugin, and the containers of a test.

    Attributes:
        node: The daemon and its containers.
        kubelet: The server from which the daemon reads the pods.
        plugin: The plugin.
    """

    node: Node
    kubelet: Kubelet
    plugin: Plugin
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

    def served(self, count: int, resource: str = DEVICE) -> None:
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
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path)
    yield server
    server.close()


@pytest.fixture
def devices(
    runtime: PrivateRuntime, proxies: Callable[..., Daemon], kubelet: Kubelet, tmp_path: Path
) -> Iterator[DeviceNodes]:
    sockets = tmp_path / "sockets"
    daemon = proxies(
        kubelet=kubelet.settings,
        devicePlugins={"enabled": True, "socketDirectory": str(sockets), "timeout": "5s"},
    )
    plugin = Plugin(tmp_path / "plugin", sockets)
    with daemon.client() as client:
        made = DeviceNodes(Node(runtime, daemon, client), kubelet, plugin)
        plugin.start()
        made.served(3)
        yield made
    plugin.let_go()
    assert plugin.process is not None
    end_process(plugin.process)
    runtime.clear()


def test_a_container_gets_the_devices_of_the_plugins_response(devices: DeviceNodes) -> None:
    container = devices.run("db")
    name = device_of(container)
    assert name in {"dev0", "dev1", "dev2"}
    assert inside(container, f"/dev/{name}").is_char_device()
    assert inside(container, "/library/version").read_text() == "7"
    with pytest.raises(OSError, match="Read-only"):
        inside(container, "/library/version").write_text("8")
    assert devices.holders()[name] == ["default/db/main"]
    both = devices.run("both", 2)
    assert set(device_of(both).split(",")) == {"dev0", "dev1", "dev2"} - {name}
    devices.node.check()


def test_pods_without_plugin_devices_are_not_changed(devices: DeviceNodes) -> None:
    plain = devices.run("plain", 0)
    assert "DEVICES" not in environment(plain)
    assert not inside(plain, "/library").exists()
    foreign = devices.node.run(devices.pod("foreign", 2, "nvidia.com/gpu"), device="/dev/full")
    assert "DEVICES" not in environment(foreign)
    assert inside(foreign, "/dev/full").is_char_device()
    mixed = devices.node.run(devices.pod("mixed"), device="/dev/full")
    assert inside(mixed, "/dev/full").is_char_device()
    assert inside(mixed, f"/dev/{device_of(mixed)}").is_char_device()


def test_no_device_is_allocated_twice_and_a_released_one_is_allocated_again(devices: DeviceNodes) -> None:
    first = {name: devices.run(name) for name in ("a", "b", "c")}
    given = {device_of(container) for container in first.values()}
    assert given == {"dev0", "dev1", "dev2"}
    pod = devices.pod("d")
    message = refused(lambda: devices.node.create(pod))
    assert DEVICE in message
    freed = device_of(first["b"])
    holding = devices.node.members[first["b"]].pod
    devices.node.remove(first["b"])
    devices.node.cri.stop_pod(holding)
    devices.node.cri.remove_pod(holding)
    again = devices.node.run(pod)
    assert device_of(again) == freed


def test_unhealthy_devices_are_not_allocated_and_running_containers_keep_theirs(devices: DeviceNodes) -> None:
    holder = devices.run("holder")
    for number in range(3):
        devices.plugin.device(f"dev{number}", "unhealthy")
    devices.served(0)
    pod = devices.pod("waits")
    assert DEVICE in refused(lambda: devices.node.create(pod))
    assert devices.holders()[device_of(holder)] == ["default/holder/main"]
    devices.plugin.device("dev2")
    devices.served(1)
    if device_of(holder) != "dev2":
        assert device_of(devices.node.run(pod)) == "dev2"


def test_a_restarted_container_keeps_its_device(devices: DeviceNodes) -> None:
    pod = devices.pod("db")
    first = devices.node.run(pod, command=["sh", "-c", UNTIL_PROCEED])
    name = device_of(first)
    devices.run("other")
    devices.node.cri.proceed(first)
    wait_for("the end", lambda: devices.node.cri.status(first).status.state == EXITED, limit=PATIENCE_S)
    del devices.node.members[first]
    second = devices.node.run(pod, attempt=1)
    assert device_of(second) == name


def test_no_device_is_lost_if_the_plugin_is_killed_during_an_allocate(devices: DeviceNodes) -> None:
    plugin = devices.plugin
    pod = devices.pod("db")
    plugin.hold()
    failures: list[str] = []
    call = threading.Thread(target=lambda: failures.append(refused(lambda: devices.node.create(pod))))
    call.start()
    plugin.wait_held()
    plugin.kill9()
    call.join(PATIENCE_S)
    assert failures
    assert DEVICE in failures[0]
    plugin.let_go()
    assert devices.healthy() == 0
    plugin.start()
    devices.served(3)
    everything = [devices.node.run(pod), devices.run("b"), devices.run("c")]
    assert {device_of(container) for container in everything} == {"dev0", "dev1", "dev2"}


def test_a_hanging_plugin_fails_its_create_after_the_timeout_and_no_other_call(devices: DeviceNodes) -> None:
    plugin, pod = devices.plugin, devices.pod("db")
    plugin.hold()
    begun = time.monotonic()
    failures: list[str] = []
    call = threading.Thread(target=lambda: failures.append(refused(lambda: devices.node.create(pod))))
    call.start()
    plugin.wait_held()
    devices.run("plain", 0)
    call.join(PATIENCE_S)
    assert time.monotonic() - begun < PATIENCE_S
    assert failures
    assert "within 5 s" in failures[0]
    plugin.let_go()
    assert device_of(devices.node.run(pod))


# Kills of the daemon.


def check_all_allocated_once(devices: DeviceNodes, *running: str) -> None:
    """Allocate the remaining devices: each device is in one container, and none is missing."""
    fillers = [devices.run(f"filler{number}") for number in range(3 - len(running))]
    given = [device_of(container) for container in (*running, *fillers)]
    assert sorted(given) == ["dev0", "dev1", "dev2"]
    pod = devices.pod("too-many")
    assert DEVICE in refused(lambda: devices.node.create(pod))


def start_again(devices: DeviceNodes) -> None:
    devices.node.daemon.start()
    devices.served(3)


def test_a_daemon_killed_while_containers_run_loses_no_device(devices: DeviceNodes) -> None:
    first, second = devices.run("a"), devices.run("b")
    devices.node.daemon.kill9()
    start_again(devices)
    assert sorted(len(names) for names in devices.holders().values()) == [0, 1, 1]
    check_all_allocated_once(devices, first, second)


def test_a_daemon_killed_between_create_and_start_loses_no_device(devices: DeviceNodes) -> None:
    created = devices.node.create(devices.pod("a"))
    devices.node.daemon.kill9()
    start_again(devices)
    devices.node.start(created)
    check_all_allocated_once(devices, created)


def test_a_daemon_killed_during_an_allocate_loses_no_device(devices: DeviceNodes) -> None:
    pod = devices.pod("a")
    devices.plugin.hold()
    with contextlib.suppress(grpc.RpcError):
        request = devices.node.cri.create_request(pod)
        call = devices.node.cri.method("CreateContainer").future(request, timeout=PATIENCE_S)
        devices.plugin.wait_held()
        devices.node.daemon.kill9()
        call.result()
    devices.plugin.let_go()
    start_again(devices)
    check_all_allocated_once(devices, devices.node.run(pod))


def test_a_daemon_killed_while_the_runtime_creates_the_container_loses_no_device(
    devices: DeviceNodes,
) -> None:
    pod = devices.pod("a")
    with contextlib.suppress(grpc.RpcError), devices.node.runtime.frozen():
        request = devices.node.cri.create_request(pod)
        # gRPC cancels a call without references, so keep one.
        call = devices.node.cri.method("CreateContainer").future(request, timeout=PATIENCE_S)
        wait_for("the plugin's answer", (devices.plugin.directory / "allocated").exists, limit=PATIENCE_S)
        time.sleep(0.5)
        devices.node.daemon.kill9()
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    start_again(devices)
    for container in devices.node.cri.list():  # as kubelet does after a create without an answer
        devices.node.cri.remove(container.id)
    check_all_allocated_once(devices, devices.node.run(pod, attempt=1))


def test_a_daemon_killed_before_a_pod_is_removed_loses_no_device(devices: DeviceNodes) -> None:
    first = devices.run("a")
    pod = devices.node.members[first].pod
    devices.node.remove(first)
    devices.node.daemon.kill9()
    with devices.node.runtime.client() as direct:
        direct.stop_pod(pod)
        direct.remove_pod(pod)
    start_again(devices)
    check_all_allocated_once(devices)


# The sample plugin of Kubernetes.


@pytest.fixture(scope="module")
def sample(runtime: PrivateRuntime) -> Path:
    """The path of the sample plugin."""
    return built_sample_plugin()


@contextlib.contextmanager
def sampled(program: Path, sockets: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
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
    devices: DeviceNodes, sample: Path, tmp_path: Path
) -> None:
    sockets = devices.plugin.sockets
    with sampled(sample, sockets, tmp_path / "sample.log") as process:
        devices.served(2, SAMPLE)
        running = [devices.run(name, 1, SAMPLE) for name in ("a", "b")]
        mounted = [
            [name for name in ("Dev-1", "Dev-2") if inside(container, f"/tmp/{name}").exists()]
            for container in running
        ]
        assert sorted(mounted) == [["Dev-1"], ["Dev-2"]]
        pod = devices.pod("c", 1, SAMPLE)
        assert SAMPLE in refused(lambda: devices.node.create(pod))
        process.terminate()
        process.wait(20)
        devices.served(0, SAMPLE)
    holders = devices.holders()
    assert sorted(holders[name] for name in ("Dev-1", "Dev-2")) == [["default/a/main"], ["default/b/main"]]


def test_the_kubernetes_sample_plugin_registers_again_after_a_kill_of_the_daemon(
    devices: DeviceNodes, sample: Path, tmp_path: Path
) -> None:
    """The plugin watches kubelet.sock, and registers ten seconds after its creation."""
    with sampled(sample, devices.plugin.sockets, tmp_path / "sample.log"):
        devices.served(2, SAMPLE)
        running = devices.run("a", 1, SAMPLE)
        devices.node.daemon.kill9()
        devices.node.daemon.start()
        wait_for("both", lambda: devices.healthy(SAMPLE) == 2, limit=30 + PATIENCE_S)
        other = devices.run("b", 1, SAMPLE)
        for name in ("Dev-1", "Dev-2"):
            assert inside(running, f"/tmp/{name}").exists() is not inside(other, f"/tmp/{name}").exists()
