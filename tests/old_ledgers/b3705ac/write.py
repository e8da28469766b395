"""Run the daemon of commit b3705ac, and keep what it wrote to its ledgers. README.md says how to run this.

It imports ``proxy`` of that commit. Each scenario ends as on a node whose daemon is killed: the ledger is
copied while the daemon runs. The rest of the node, that is the records of the runtime and the cgroup files,
is kept with it, so that a later daemon can start there.
"""

# ruff: noqa: I001  the packages that today's proxy lacks are not foreign
from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxy.apply.directory import FolderCgroups
from proxy.config.load import parse
from proxy.cri.pb import api_pb2 as pb
from proxy.daemon import Daemon
from proxy.demo.client import CriClient
from proxy.demo.runtime import StandInRuntime
from proxy.kubelet.rewriting import static_state
from proxy.model.idset import CpuSet
from proxy.topology.regular_machine import regular_machine

WHOLE = regular_machine(2, 1, 8, 2)
PERIOD = 100_000
MIB = 1 << 20
KOORDINATOR = "scheduling.koordinator.sh"
HOOK = """
from proxy.hooks.api import Adjustment, CpuSet

API_VERSION = 1

def pre_run_pod_sandbox(event):
    if event.pod.name == "moved":
        return Adjustment(cgroup_parent="/kubepods/burstable/elsewhere")

def pre_create_container(event):
    cpus = {"narrowed": "11-12", "beyond": "4,13"}.get(event.pod.name)
    return Adjustment(cpus=CpuSet.parse(cpus)) if cpus else None
"""
RUNNING = """
cpuManagerPolicy: static
topologyManagerPolicy: restricted
topologyManagerScope: pod
memoryManagerPolicy: Static
reservedSystemCPUs: 0-1
reservedMemory:
  - numaNode: 0
    limits: {memory: 64Mi}
apply: {partitions: isolated}
koordinator: {reservedCPUs: 0-1, systemCPUs: 30-31}
"""
SUPPRESSED = """
cpuManagerPolicy: static
memoryManagerPolicy: Static
reservedMemory:
  - numaNode: 0
    limits: {memory: 64Mi}
beSuppress: {mode: cfs-quota, period: 100ms}
"""


def without(machine: Any, text: str) -> Any:
    """Return the machine with CPUs offline."""
    gone = CpuSet.parse(text)
    nodes = tuple(dataclasses.replace(node, cpus=node.cpus - gone) for node in machine.nodes)
    cpus = tuple(cpu for cpu in machine.cpus if cpu.id not in gone)
    return dataclasses.replace(machine, cpus=cpus, nodes=nodes)


class Node:
    """A runtime and a cgroup tree in a directory."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version
        self.root = path / "cgroup"
        self.proc = path / "proc"
        self.cgroups = FolderCgroups(self.root, WHOLE.online, WHOLE.memory_nodes, version)
        self.runtime = StandInRuntime(path / "runtime.sock", self.cgroups).start()
        self.machine = WHOLE
        self.count = 0
        (path / "hooks.d").mkdir(mode=0o755)
        (path / "hooks.d/50-old.py").write_text(HOOK)
        self.proc.mkdir()
        (self.proc / "stat").write_text("cpu  1 1 1 1 1 1 1 1 0 0\n")
        if version == 1:
            (self.root / "cpuacct.usage").write_text("0\n")

    def run_scenario(self, text: str, scenario: Callable[[Daemon], Any]) -> None:
        """Run a daemon, and what happens meanwhile."""
        paths = f"""
reconcilePeriod: 200ms
procfsRoot: {self.proc}
cgroupRoot: {self.root}
listen: unix://{self.path}/cri.sock
adminSocket: unix://{self.path}/admin.sock
runtime: unix://{self.path}/runtime.sock
stateDir: {self.path}/state
hooks:
  folder: {self.path}/hooks.d
  vendorFolder: {self.path}/none
  serverFolder: {self.path}/none
  ownedCPUs: true
"""
        daemon = Daemon(parse(text + paths, "old"), machine=self.machine, cgroups=self.cgroups)

        async def whole() -> None:
            await daemon.start()
            try:
                async with asyncio.timeout(60):
                    await daemon.keeper.synced.wait()
                    await scenario(daemon)
            finally:
                daemon._suppression = None  # it is killed: it puts nothing back
                await daemon.stop()

        asyncio.run(whole())

    def sandbox(self, name: str, parent: str, cpus: int, **keys: str) -> Any:
        """Return a pod's configuration as kubelet sends it."""
        self.count += 1
        uid = f"00000000-0000-0000-0000-{self.count:012d}"
        labels = {"io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": "old"}
        labels["io.kubernetes.pod.uid"] = uid
        if "qos" in keys:
            labels["koordinator.sh/qosClass"] = keys.pop("qos")
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace="old"),
            labels=labels,
            annotations={key.replace("__", "/"): value for key, value in keys.items()},
        )
        config.linux.resources.CopyFrom(resources(cpus, 1))
        config.linux.cgroup_parent = f"/kubepods{parent}/pod{uid}"
        return config

    def run(self, config: Any) -> str:
        """Run the sandbox of a pod."""
        with CriClient(str(self.path / "cri.sock")) as client:
            answer = client.call("RunPodSandbox", pb.RunPodSandboxRequest(config=config))
        return str(answer.pod_sandbox_id)

    def create(self, sandbox_id: str, sandbox: Any, cpus: int, mib: int = 64, name: str = "main") -> str:
        """Create a container."""
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name),
            image=pb.ImageSpec(image="localhost/busybox:1"),
            labels={**sandbox.labels, "io.kubernetes.container.name": name},
            linux=pb.LinuxContainerConfig(resources=resources(cpus, mib)),
        )
        request = pb.CreateContainerRequest(pod_sandbox_id=sandbox_id, config=config, sandbox_config=sandbox)
        with CriClient(str(self.path / "cri.sock")) as client:
            return str(client.call("CreateContainer", request).container_id)

    def launch(self, name: str, parent: str, cpus: int, **keys: str) -> str:
        """Run a pod with a running container."""
        sandbox = self.sandbox(name, parent, cpus, **keys)
        sandbox_id = self.run(sandbox)
        pod = sandbox.linux.cgroup_parent.strip("/")
        if cpus and (self.root / pod).is_dir():
            self.limit(pod, cpus)
        container = self.create(sandbox_id, sandbox, cpus)
        with CriClient(str(self.path / "cri.sock")) as client:
            client.start(container)
        return container

    def limit(self, pod: str, cpus: int) -> None:
        """Give the pod's cgroup the quota that kubelet gives it."""
        if self.version == 2:
            self.cgroups.files.write(pod, "cpu.max", f"{cpus * PERIOD} {PERIOD}")
        else:
            self.cgroups.files.write(pod, "cpu.cfs_quota_us", str(cpus * PERIOD))

    async def ledger(self) -> bytes:
        """Return the bytes of the ledger once it is written."""
        await asyncio.sleep(0.5)
        return (self.path / "state/ledger.jsonl").read_bytes()

    def rest(self) -> dict[str, Any]:
        """Return what the node has beside the ledger."""
        runtime = self.runtime
        with self.cgroups.files.locked():
            files = sorted(path for path in self.root.rglob("*") if path.is_file())
            texts = {str(path.relative_to(self.root)): path.read_text() for path in files}
        return {
            "version": self.version,
            "online": str(self.machine.online),
            "hook": HOOK,
            "cgroup": texts,
            "pods": [record(pod) for pod in runtime.pods.values()],
            "containers": [record(container) for container in runtime.containers.values()],
        }


def resources(cpus: int, mib: int) -> Any:
    """Return what kubelet sends for a container that requests whole CPUs; 0: none."""
    return pb.LinuxContainerResources(
        cpu_period=PERIOD,
        cpu_quota=PERIOD * cpus,
        cpu_shares=1024 * cpus or 2,
        memory_limit_in_bytes=mib * MIB,
    )


def record(value: Any) -> dict[str, Any]:
    """Return a record of the runtime as JSON: messages in base 64."""
    return {
        field.name: base64.b64encode(got.SerializeToString()).decode()
        if hasattr(got, "SerializeToString")
        else got
        for field in dataclasses.fields(value)
        for got in (getattr(value, field.name),)
    }


def cpuset(text: str) -> dict[str, str]:
    """Return the annotation of a scheduler that chose CPUs."""
    return {f"{KOORDINATOR}__resource-status": json.dumps({"cpuset": text})}


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    while not condition():
        await asyncio.sleep(0.02)


def launch_all(node: Node) -> None:
    """Run one pod of each kind."""
    spec, status = f"{KOORDINATOR}__resource-spec", f"{KOORDINATOR}__resource-status"
    on_node_1 = json.dumps({"numaNodeResources": [{"node": 1, "resources": {"cpu": "2"}}]})
    bound = json.dumps({"preferredCPUBindPolicy": "FullPCPUs", "preferredCPUExclusivePolicy": "PCPULevel"})
    required = json.dumps({"requiredCPUBindPolicy": "FullPCPUs"})
    alone = json.dumps({"numaTopologyPolicy": "Restricted", "singleNUMANodeExclusive": "Preferred"})
    volcano = {"volcano.sh__numa-topology-policy": "best-effort"}
    volcano["volcano.sh__topology-decision"] = json.dumps({"numa": {"1": {"cpu": "2"}}})
    node.launch("lse", "", 2, qos="LSE", **cpuset("2-3"))
    node.launch("lsr", "", 2, qos="LSR", **cpuset("4-5"), **{spec: bound})
    node.launch("chosen", "", 2, qos="LSE", **{spec: required})
    node.launch("guaranteed", "", 2)
    node.launch("aligned", "", 2, **{f"{KOORDINATOR}__numa-topology-spec": alone})
    node.launch("volcano", "", 2, **volcano)
    node.launch("ls", "/burstable", 0, qos="LS")
    node.launch("ls-node", "/burstable", 0, qos="LS", **{status: on_node_1})
    node.launch("faulty", "/burstable", 0, qos="LS", **cpuset("not CPUs"), **{spec: "{"})
    node.launch("be", "/besteffort", 0, qos="BE")
    node.launch("be-node", "/besteffort", 0, qos="BE", **{status: on_node_1})
    node.launch("be-cpus", "/besteffort", 0, qos="BE", **cpuset("12-14"))
    node.launch("system", "/burstable", 0, qos="SYSTEM")
    node.launch("plain", "/besteffort", 0)
    node.launch("narrowed", "/burstable", 0, qos="LS")
    node.launch("beyond", "/burstable", 0, qos="LS")
    node.launch("moved", "/burstable", 0, qos="LS")
    ended = node.launch("ended", "/burstable", 0)
    node.runtime.exit(ended)
    created = node.sandbox("created", "/burstable", 0)
    node.create(node.run(created), created, 0)
    two = node.sandbox("two", "", 4)
    sandbox_id = node.run(two)
    node.create(
        sandbox_id, two, 2, name="first"
    )  # its second container comes later: CPUs are set aside for it


def running(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A busy node on cgroup v2: all kinds of pods, a CPU that went offline, two creates in flight."""
    node = Node(path, 2)

    async def first(daemon: Daemon) -> None:
        await asyncio.to_thread(launch_all, node)
        await until(lambda: any(key.startswith("x/") for key in daemon._ledger.entries))

    node.run_scenario(RUNNING, first)
    node.machine = without(WHOLE, "2,8")
    held = [threading.Event(), threading.Event()]
    found: list[bytes] = []
    cgroups: dict[str, str] = {}

    async def second(daemon: Daemon) -> None:
        pods = [
            node.sandbox(name, "", 2, qos="LSE", **cpuset(cpus))
            for name, cpus in (("in-flight", "26-27"), ("never-made", "28-29"))
        ]
        ids = [await asyncio.to_thread(node.run, pod) for pod in pods]
        arrived = []

        def hold(request: Any) -> None:
            index = ids.index(request.pod_sandbox_id)
            arrived.append(index)
            held[index].wait(60)

        release = node.runtime.before("CreateContainer", hold)
        calls = [
            asyncio.create_task(asyncio.to_thread(node.create, sandbox_id, pod, 2))
            for sandbox_id, pod in zip(ids, pods, strict=True)
        ]
        await until(lambda: len(arrived) == 2)
        await until(lambda: any("instead" in str(value) for value in daemon._ledger.entries.values()))
        found.append(await node.ledger())
        cgroups.update(node.rest()["cgroup"])
        count = len(node.runtime.containers)
        held[0].set()
        await until(lambda: len(node.runtime.containers) > count)
        rest.update(node.rest(), cgroup=cgroups)
        held[1].set()
        await asyncio.gather(*calls, return_exceptions=True)
        release()

    rest: dict[str, Any] = {}
    node.run_scenario(RUNNING, second)
    node.runtime.stop()
    return found[0], {**rest, "settings": RUNNING}


def suppressed(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A node on cgroup v1 whose BE pods have a CFS quota, and whose owners have none."""
    node, found = Node(path, 1), []

    def pods() -> None:
        node.launch("be", "/besteffort", 0, qos="BE")
        node.launch("ls", "/burstable", 0, qos="LS")
        node.launch("lse", "", 2, qos="LSE", **cpuset("2-3"))
        node.launch("guaranteed", "", 2)

    async def scenario(daemon: Daemon) -> None:
        await asyncio.to_thread(pods)
        used = 0
        while not any(key == "b/suppress" for key in daemon._ledger.entries):
            used += 10_000_000
            for pod in (node.root / "kubepods/burstable").iterdir():
                if pod.is_dir():
                    (pod / "cpuacct.usage").write_text(f"{used:020d}\n")
            await asyncio.sleep(0.02)
        found.append((await node.ledger(), {**node.rest(), "settings": SUPPRESSED}))

    node.run_scenario(SUPPRESSED, scenario)
    node.runtime.stop()
    return found[0]


def released(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A node that was released."""
    node, found = Node(path, 2), []

    async def scenario(daemon: Daemon) -> None:
        await asyncio.to_thread(node.launch, "lse", "", 2, qos="LSE", **cpuset("2-3"))
        await asyncio.to_thread(node.launch, "ls", "/burstable", 0)
        await daemon._leaving._start()
        await until(lambda: daemon._leaving.answer()["stage"] == "released")
        await until(lambda: daemon._ledger.entries.get("r/release", {}).get("stage") == "released")
        found.append((await node.ledger(), {**node.rest(), "settings": ""}))

    node.run_scenario("", scenario)
    node.runtime.stop()
    return found[0]


def taken_over(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A node whose CPUs were kubelet's static CPU manager's, after ``takeover start``."""
    node, found = Node(path, 2), []
    kubelet = path / "kubelet"
    kubelet.mkdir()
    settings = {"kind": "KubeletConfiguration", "cpuManagerPolicy": "static", "reservedSystemCPUs": "0"}
    (kubelet / "config.yaml").write_text(json.dumps(settings))
    text = f"cpuManagerPolicy: static\nkubelet: {{stateDir: {kubelet}}}\n"
    uid = f"00000000-0000-0000-0000-{1:012d}"
    held = {uid: {"main": CpuSet.parse("1-2")}}
    state = static_state(WHOLE.online, held, reserved=CpuSet([0]))
    (kubelet / "cpu_manager_state").write_text(state)

    async def scenario(daemon: Daemon) -> None:
        await asyncio.to_thread(node.launch, "held", "", 2)
        await daemon._takeover.get().act("start", {})
        await asyncio.to_thread(node.launch, "ours", "", 2)
        rest = {**node.rest(), "settings": "cpuManagerPolicy: static\n"}
        rest["kubelet"] = {file.name: file.read_text() for file in kubelet.iterdir()}
        found.append((await node.ledger(), rest))

    node.run_scenario(text, scenario)
    node.runtime.stop()
    return found[0]


def main(target: Path) -> None:
    """Write what each scenario leaves."""
    for scenario in (running, suppressed, released, taken_over):
        with tempfile.TemporaryDirectory(prefix="tp-") as name:
            ledger, rest = scenario(Path(name))
        (target / f"{scenario.__name__}.jsonl").write_bytes(ledger)
        (target / f"{scenario.__name__}.json").write_text(json.dumps(rest, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
