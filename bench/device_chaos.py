"""Ten thousand creates with devices while device plugins hang, crash, lie, flood and flap: a command

    make device-chaos                                      some minutes
    .venv/bin/python bench/device_chaos.py --calls 1000    fewer

Eight clients create containers that request devices from the real daemon. Seven device plugins run as
processes; one is correct, and each of the others misbehaves at random times in its own way. Halfway the
daemon is killed and restarted. The devices of a container are read from the request that reached the runtime:
no device may be in two containers at a time, none may be missing at the end, and no call may hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from crash import progress
from faulty_node import FaultyNode, new_node
from procs import BenchError, environment
from table import number, render

from proxy.api.kubelet import deviceplugin_pb2, pods_pb2
from proxy.demo.client import CriClient, DemoPod, StartedPod
from proxy.model.errors import RuntimeCallError, TopoproxyError
from proxy.model.workload import KubeQos
from tests.testkit.device_plugin import ScriptedPlugin, allocated, device

CALLS, CLIENTS, TIMEOUT_S = 10_000, 8, 0.5
DEVICES = 16
"""The devices of each plugin, on two NUMA nodes."""
HUNG_S = 10.0
"""A create that takes longer counts as hanging: its plugin has half a second, and creates wait for each
other."""
SHARE = 0.03
"""How often a plugin misbehaves in a call."""
KINDS = ("honest", "hangs", "crashes", "lies", "floods", "flaps", "stops")


def resource_of(kind: str) -> str:
    return f"chaos.example.com/{kind}"


# -- the plugins, each a process ----------------------------------------------------------------------------


def plugin(directory: Path, kind: str, seed: int) -> None:
    """Run as a device plugin that misbehaves in one way, until the process is killed."""
    dice = random.Random(seed)
    listed = [device(f"{kind}-{n}", n % 2) for n in range(DEVICES)]
    played = ScriptedPlugin(directory, listed, resource_of(kind), f"{kind}.sock")

    def misbehaved(ids: list[str]) -> Any:
        if dice.random() >= SHARE:
            return allocated(*ids)
        if kind == "hangs":
            time.sleep(dice.choice((1.0, 20.0)))
        if kind == "crashes":
            os._exit(1)
        if kind == "lies":
            response = deviceplugin_pb2.ContainerAllocateResponse()
            responses = [response] * dice.choice((0, 2))
            wrong = deviceplugin_pb2.AllocateResponse(container_responses=responses)
            return dice.choice((wrong, b"\xff", allocated("x" * 300_000)))
        return allocated(*ids)

    played.allocate = misbehaved
    played.start()
    if kind == "floods":
        threading.Thread(target=flood, args=(played, listed, dice), daemon=True).start()
    if kind == "flaps":
        threading.Thread(target=flap, args=(played, dice), daemon=True).start()
    server, known = directory / "kubelet.sock", None
    while True:
        time.sleep(0.1)
        with contextlib.suppress(OSError, grpc.RpcError):
            found = server.stat().st_mtime_ns
            if found != known:
                if not played.path.exists():
                    played.start()
                played.register(server)
                known = found


def flood(played: ScriptedPlugin, listed: list[Any], dice: random.Random) -> None:
    """Send an endless sequence of lists; in each of them some devices are unhealthy."""
    while True:
        for _ in range(500):
            played.update(*(device(d.ID, n % 2, healthy=dice.random() > 0.2) for n, d in enumerate(listed)))
        time.sleep(dice.random())


def flap(played: ScriptedPlugin, dice: random.Random) -> None:
    """End and start again, on the same socket."""
    while True:
        time.sleep(dice.uniform(0.5, 3))
        played.stop()
        time.sleep(dice.uniform(0, 0.5))
        played.start()


class PluginProcesses:
    """The processes of plugins: those that crash are restarted, and now and then one is stopped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self.deaths = 0
        self._keeper = threading.Thread(target=self._restart_and_stop)

    def __enter__(self) -> PluginProcesses:
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._keeper.join()
        for process in self._running.values():
            process.kill()
            process.wait()

    def calm(self) -> None:
        """Stop no further plugins."""
        self._stop.set()
        self._keeper.join()

    def _restart_and_stop(self) -> None:
        dice, seed = random.Random(5), 0
        while not self._stop.wait(0.2):
            for kind in KINDS:
                process = self._running.get(kind)
                if process is None or process.poll() is not None:
                    self.deaths += process is not None
                    seed += 1
                    self._running[kind] = self._start(kind, seed)
            if dice.random() < 0.05:
                self._running["stops"].send_signal(signal.SIGSTOP)
                self._stop.wait(dice.uniform(0.5, 3))
                self._running["stops"].send_signal(signal.SIGCONT)

    def _start(self, kind: str, seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--plugin", str(self._directory), kind, str(seed)]
        return subprocess.Popen(command, env=environment(malloc=False), stderr=subprocess.DEVNULL)


# -- kubelet's pods API ------------------------------------------------------------------------------------


class PodsApi:
    """A stand-in for kubelet's pods API, which returns the devices that a pod requests."""

    def __init__(self, path: Path) -> None:
        self.requests: dict[str, tuple[str, str, int]] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        handlers: dict[str, Any] = {"GetPod": grpc.unary_unary_rpc_method_handler(self._get)}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1alpha1.Pods", handlers),)
        )
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def _get(self, content: bytes, context: grpc.ServicerContext) -> bytes:
        uid = pods_pb2.GetPodRequest.FromString(content).pod_uid
        if uid not in self.requests:
            context.abort(grpc.StatusCode.NOT_FOUND, "pod not found")
        name, resource, count = self.requests[uid]
        amounts = {resource: pods_pb2.Quantity(string=str(count))}
        needed = pods_pb2.ResourceRequirements(limits=amounts, requests=amounts)
        pod = pods_pb2.Pod(
            metadata=pods_pb2.ObjectMeta(name=name, namespace="demo", uid=uid),
            spec=pods_pb2.PodSpec(containers=[pods_pb2.Container(name="main", resources=needed)]),
            status=pods_pb2.PodStatus(qos_class="Burstable"),
        )
        return pods_pb2.GetPodResponse(pod=pod).SerializeToString()

    def stop(self) -> None:
        self._server.stop(None)


# -- the clients -----------------------------------------------------------------------------


@dataclass
class DeviceChaos:
    """The results.

    Attributes:
        took: Seconds of each create, by whether its container was created.
        devices_given: Devices that containers got, by kind of plugin.
        refusals: Refused creates, by kind of plugin.
        without_devices: Containers that were created without the devices that they requested.
        wrong: Messages about violations.
        deaths: Plugins that have died.
    """

    took: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    devices_given: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    without_devices: int = 0
    wrong: list[str] = field(default_factory=list)
    deaths: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    holders: dict[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return len(self.took[True]) + len(self.took[False])

    @property
    def hung(self) -> int:
        return sum(seconds > HUNG_S for each in self.took.values() for seconds in each)


class DeviceClient(threading.Thread):
    """A client: pods with devices, some of them at a time."""

    def __init__(self, node: FaultyNode, api: PodsApi, chaos: DeviceChaos, number: int, calls: int) -> None:
        super().__init__()
        self.node, self.api, self.chaos = node, api, chaos
        self.dice = random.Random(number)
        self.number, self.left = number, calls
        self.pods: list[StartedPod] = []

    def run(self) -> None:
        try:
            with CriClient(str(self.node.socket), timeout=2 * HUNG_S) as client:
                while self.left > 0:
                    self.create(client)
                    while len(self.pods) > self.dice.randint(0, 4):
                        self.end(client, self.pods.pop(0))
                for pod in self.pods:
                    self.end(client, pod)
        except BaseException as error:  # noqa: BLE001 - reported by the measurement
            self.chaos.wrong.append(f"client {self.number}: {error!r}")

    def create(self, client: CriClient) -> None:
        kind, count = self.dice.choice(KINDS), self.dice.randint(1, 3)
        qos = self.dice.choice((KubeQos.BURSTABLE, KubeQos.GUARANTEED))
        self.left -= 1
        spec = DemoPod(f"dev-{self.number}-{self.left}", kube_qos=qos, cpus=qos is KubeQos.GUARANTEED)
        try:
            pod = client.run_pod(spec)
        except TopoproxyError:
            time.sleep(0.2)  # the daemon is being started again
            return
        self.api.requests[pod.config.metadata.uid] = (spec.name, resource_of(kind), count)
        begun = time.monotonic()
        try:
            client.create(pod)
        except TopoproxyError as error:
            self.record_duration(begun, created=False)
            with self.chaos.lock:
                self.chaos.refusals[kind if isinstance(error, RuntimeCallError) else "daemon"] += 1
        else:
            self.record_duration(begun, created=True)
            self.check_devices(pod, kind, count)
        self.pods.append(pod)

    def record_duration(self, begun: float, *, created: bool) -> None:
        with self.chaos.lock:
            self.chaos.took[created].append(time.monotonic() - begun)
            if self.chaos.calls % 1000 == 0:
                progress(f"{self.chaos.calls} creates")

    def check_devices(self, pod: StartedPod, kind: str, count: int) -> None:
        """Look up the devices of a container at the runtime, and check whether another container has them."""
        config = self.node.runtime.containers[pod.container_id].config
        files = [entry.host_path.removeprefix("/dev/") for entry in config.devices]
        with self.chaos.lock:
            if not files:
                self.chaos.without_devices += 1
            elif len(set(files)) != count or not all(name.startswith(f"{kind}-") for name in files):
                self.chaos.wrong.append(f"{pod.spec.name} requested {count} {kind}, and has {files}")
            for name in files:
                holder = self.chaos.holders.setdefault(name, pod.pod_id)
                if holder != pod.pod_id:
                    self.chaos.wrong.append(f"{name} is given to {pod.spec.name}, and another pod has it")
            self.chaos.devices_given[kind] += len(files)

    def end(self, client: CriClient, pod: StartedPod) -> None:
        with self.chaos.lock:
            mine = [name for name, holder in self.chaos.holders.items() if holder == pod.pod_id]
            for name in mine:
                del self.chaos.holders[name]
        for _ in range(50):
            try:
                client.end_pod(pod)
                with contextlib.suppress(OSError):  # as kubelet does; the kernel's rules cost time for each
                    self.node.cgroups.rmdir(pod.config.linux.cgroup_parent.strip("/"))
                break
            except TopoproxyError:
                time.sleep(0.2)
        else:
            self.chaos.wrong.append(f"{pod.spec.name} cannot be ended")


# -- the measurement -------------------------------------------------------------------------


@contextlib.contextmanager
def node_with_pods_api(base: Path) -> Iterator[tuple[FaultyNode, PodsApi, Path]]:
    """Set up a node with a pods API and a directory for device plugins."""
    directory = base / "plugins"
    with new_node(base) as node:
        file = base / "config.yaml"
        config = json.loads(file.read_text())
        # This process serves the API, and runs the clients and the stand-in runtime too.
        config["kubelet"] |= {"podsApi": f"unix://{base}/pods.sock", "timeout": "5s"}
        config["devicePlugins"] = {
            "enabled": True,
            "socketDirectory": str(directory),
            "timeout": f"{round(TIMEOUT_S * 1000)}ms",
        }
        file.write_text(json.dumps(config))
        api = PodsApi(base / "pods.sock")
        try:
            yield node, api, directory
        finally:
            api.stop()


def registered(node: FaultyNode, *states: str) -> set[str]:
    """Name the resources whose plugins are in one of these states; in any state if none is named."""
    listed = ((node.status() or {}).get("devicePlugins") or {}).get("resources", [])
    return {row["resource"] for row in listed if not states or row["state"] in states}


def measure(calls: int = CALLS, *, restart: bool = True) -> DeviceChaos:
    """Create this many containers."""
    chaos = DeviceChaos()
    with (
        tempfile.TemporaryDirectory(prefix="dc") as name,
        node_with_pods_api(Path(name)) as (node, api, directory),
    ):
        node.start()
        with PluginProcesses(directory) as plugins:
            node.wait_until(lambda: len(registered(node)) == len(KINDS), 60, "the device plugins")
            shares = (calls // 2, calls - calls // 2) if restart else (calls,)
            for part, share in enumerate(shares):
                clients = [
                    DeviceClient(node, api, chaos, part * CLIENTS + n, share // CLIENTS)
                    for n in range(CLIENTS)
                ]
                for client in clients:
                    client.start()
                if part:
                    time.sleep(0.5)
                    node.start()  # kills the former daemon, with calls in flight
                for client in clients:
                    client.join()
            plugins.calm()
            chaos.deaths = plugins.deaths
            check_no_device_is_lost(node, api, chaos)
        page = node.status() or {}
        chaos.wrong += [f"internal errors: {n}" for n in [page["counters"].get("internal_errors")] if n]
        chaos.wrong += page["violations"]
    return chaos


def check_no_device_is_lost(node: FaultyNode, api: PodsApi, chaos: DeviceChaos) -> None:
    """Check that one pod can get all devices of the correct plugin: none is lost."""
    node.wait_until(lambda: resource_of("honest") in registered(node, "serving"), 60, "the honest plugin")
    with CriClient(str(node.socket)) as client:
        pod = client.run_pod(DemoPod("all"))
        api.requests[pod.config.metadata.uid] = ("all", resource_of("honest"), DEVICES)
        try:
            client.create(pod)
        except TopoproxyError as error:
            chaos.wrong.append(f"devices are lost: {error}")
            return
        has = len(node.runtime.containers[pod.container_id].config.devices)
        if has != DEVICES:
            chaos.wrong.append(f"a pod that requested {DEVICES} devices has {has}")


HEAD = ("creates with devices", "calls", "created", "refused", "p50", "p99", "slowest", "hung", "wrong")


def rows(chaos: DeviceChaos) -> list[list[str]]:
    took = sorted(chaos.took[True] + chaos.took[False])
    return [
        [
            f"{len(KINDS)} plugins, {chaos.deaths} deaths, {CLIENTS} clients",
            str(chaos.calls),
            str(len(chaos.took[True])),
            str(len(chaos.took[False])),
            f"{number(1000 * took[len(took) // 2])} ms",
            f"{number(1000 * took[len(took) * 99 // 100])} ms",
            f"{number(1000 * took[-1])} ms",
            str(chaos.hung),
            str(len(chaos.wrong) + chaos.without_devices),
        ]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--plugin", nargs=3, metavar=("DIRECTORY", "KIND", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plugin:
        plugin(Path(args.plugin[0]), args.plugin[1], int(args.plugin[2]))
    try:
        chaos = measure(args.calls)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    print(render(HEAD, rows(chaos)))
    print("devices given:", ", ".join(f"{kind} {n}" for kind, n in sorted(chaos.devices_given.items())))
    print("creates refused:", ", ".join(f"{kind} {n}" for kind, n in sorted(chaos.refusals.items())))
    print("containers without their devices:", chaos.without_devices)
    for violation in chaos.wrong[:20]:
        print("WRONG:", violation)
    return int(bool(chaos.wrong or chaos.hung or chaos.without_devices))


if __name__ == "__main__":
    sys.exit(main())
