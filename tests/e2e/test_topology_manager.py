"""The topology manager in front of a real containerd: placements, rejections, reservations, explanations.

The tests use the host's CPUs and its first NUMA node, and two CPUs are enough: one can be owned, the other
one always stays in the shared pool. ``test_vm.py`` tests several NUMA nodes in virtual machines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri import EXITED, IMAGE, UNTIL_PROCEED, code, cpuset_of, online
from daemon import MIB, DaemonProcess, ModeledNode
from kubelet import KubeletServer
from private_runtime import CGROUPS, PrivateRuntime, hierarchies, wait_for

from proxy.model.idset import CpuSet, Mask

pytestmark = pytest.mark.e2e

ALL = online()
GIB = 1 << 30
NODES = Path("/sys/devices/system/node")
TOPOLOGY = "TopologyAffinityError: Resources cannot be allocated with Topology locality"
UNEXPECTED = "UnexpectedAdmissionError: Allocate failed due to "
REFUSED = "rejected a "
NO_MEMORY = UNEXPECTED + "[memorymanager] failed to "
"""If no set of nodes has the memory, kubelet's memory manager gives no hint, and rejects at allocation."""
COUNTED = {
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "256Mi"}}],
    "reconcilePeriod": "1h",  # the daemon learns of changes only from calls
}
CDI_DIRECTORY = Path("/var/run/cdi")


def whole_cpus(cpus: int, memory: int = 64 * MIB) -> dict[str, int]:
    """Return the resources that kubelet requests for a Guaranteed container with whole CPUs."""
    return {
        "cpu_period": 100_000,
        "cpu_quota": cpus * 100_000,
        "cpu_shares": cpus * 1024,
        "memory_limit_in_bytes": memory,
    }


def numa_nodes_of(cpus: CpuSet) -> Mask:
    """Return the NUMA nodes of CPUs from sysfs."""
    found = [
        int(directory.name[4:])
        for directory in NODES.glob("node[0-9]*")
        if not CpuSet.parse((directory / "cpulist").read_text()).isdisjoint(cpus)
    ]
    return Mask(found)


def refused(call: Callable[[], object]) -> str:
    """Make a call that must be rejected like kubelet's admission; returns the message."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert code(caught.value) is grpc.StatusCode.FAILED_PRECONDITION, caught.value
    assert code(caught.value).value[0] == 9
    message: str = caught.value.details()  # type: ignore[attr-defined]
    return message


def complete_state(node: ModeledNode) -> dict[str, object]:
    """Return all state that a rejection must not change: of the runtime, kernel, daemon and ledger."""
    status = node.daemon.status()
    groups = [
        directory
        for root in hierarchies()
        for directory, _, _ in os.walk(root / node.runtime.cgroup.lstrip("/"))
        if "memory" not in root.name
    ]
    state = node.daemon.directory / "state"
    return {
        "containers": sorted(c.id for c in node.cri.list()),
        "pods": sorted(p.id for p in node.cri.list_pods()),
        "groups": sorted(groups),
        "cpusets": {
            name: (Path(directory) / name).read_text()
            for directory in groups
            for name in ("cpuset.cpus", "cpuset.mems")
            if (Path(directory) / name).exists()
        },
        "state": {path.name: path.read_bytes() for path in sorted(state.iterdir())},
        "problems": [one for one in problems(node) if not one.startswith(REFUSED)],
        **{key: status[key] for key in ("pools", "exclusive", "containers", "memory", "violations")},
    }


def problems(node: ModeledNode) -> list[str]:
    """Return the problems in the daemon's status."""
    return [problem["what"] for problem in node.daemon.status()["problems"]]


def free_memory(node: ModeledNode) -> int:
    """Return the free memory of node 0 for Guaranteed pods, in bytes."""
    free: int = node.daemon.status()["memory"][0]["resources"]["memory"]["free"]
    return free


def decisions(node: ModeledNode, subject: str) -> list[dict[str, Any]]:
    """Return the decisions in the output of ``topoproxy explain --json``."""
    done = node.daemon.explain(subject, "--json")
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = [record["decision"] for record in json.loads(done.stdout)["records"]]
    return records


@pytest.fixture
def start_node(
    runtime: PrivateRuntime, start_daemon: Callable[..., DaemonProcess]
) -> Iterator[Callable[..., ModeledNode]]:
    """Start a daemon with these settings; return a node with a client of it."""
    clients = []

    def node(policy: str = "single-numa-node", **config: object) -> ModeledNode:
        daemon = start_daemon(topologyManagerPolicy=policy, **{**COUNTED, **config})
        client = daemon.client()
        clients.append(client)
        return ModeledNode(runtime, daemon, client)

    yield node
    for client in clients:
        client.close()
    runtime.clear()


# Placements.


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_a_container_with_whole_cpus_has_memory_of_their_node(
    start_node: Callable[..., ModeledNode], policy: str
) -> None:
    node = start_node(policy)
    before = free_memory(node)
    sharer, owner = node.spawn("ls"), node.run(node.pod("whole", name="db"), **whole_cpus(1, GIB))
    node.check()
    found = cpuset_of(owner)
    assert len(found.cpus) == 1
    assert found.mems == numa_nodes_of(found.cpus)
    assert cpuset_of(sharer).cpus == ALL - found.cpus
    assert free_memory(node) == before - GIB

    text = node.daemon.explain("default/db").stdout
    assert f"default/db/main was admitted with CPU {found.cpus} of its own and memory of node 0." in text
    assert re.search(rf"Policy {policy}, for the container, chose (any node|node 0) \(preferred\)", text)
    assert "From the CRI request: memory limit 1Gi." in text
    assert "default/ls-0/main" in text, "the explanation lists the moved container"

    node.remove(owner)
    node.wait_until_settled()
    assert free_memory(node) == before


def test_memory_of_a_container_without_own_cpus_is_counted(start_node: Callable[..., ModeledNode]) -> None:
    """A Guaranteed container with a fraction of a CPU shares CPUs, but its memory is reserved."""
    node = start_node()
    before = free_memory(node)
    sharer = node.spawn("part")
    node.check()
    assert free_memory(node) == before - 64 * MIB
    assert cpuset_of(sharer).mems == Mask([0])
    pod = node.pod("part")
    message = refused(lambda: node.create(pod, memory_limit_in_bytes=before))
    assert message.startswith(NO_MEMORY), "the node has enough memory, but it is reserved"


# Rejections.


@pytest.mark.parametrize(
    ("policy", "requested", "prefix"),
    [
        pytest.param("single-numa-node", whole_cpus(2), TOPOLOGY, id="CPUs, single-numa-node"),
        pytest.param("restricted", whole_cpus(2), TOPOLOGY, id="CPUs, restricted"),
        pytest.param("best-effort", whole_cpus(2), UNEXPECTED + "not enough cpus", id="CPUs, best-effort"),
        pytest.param("none", whole_cpus(2), UNEXPECTED + "not enough cpus", id="CPUs, none"),
        pytest.param("single-numa-node", whole_cpus(1, 1 << 50), NO_MEMORY, id="memory, single-numa-node"),
        pytest.param("best-effort", whole_cpus(1, 1 << 50), NO_MEMORY, id="memory, best-effort"),
    ],
)
def test_a_rejected_container_changes_no_state(
    start_node: Callable[..., ModeledNode], policy: str, requested: dict[str, int], prefix: str
) -> None:
    node = start_node(policy)
    node.spawn("ls")
    if requested["memory_limit_in_bytes"] < GIB:
        node.spawn("whole")
    pod = node.pod("whole", name="wide")
    before = complete_state(node)
    message = refused(lambda: node.create(pod, **requested))
    assert message.startswith(prefix)
    assert "default/wide/main" in message
    assert complete_state(node) == before
    (rejection,) = (one for one in problems(node) if one.startswith(REFUSED))
    assert "pod=default/wide container=main" in rejection
    node.check()
    (decision,) = decisions(node, "default/wide/main")
    verdict = decision["verdict"]
    assert (verdict["admitted"], verdict["code"], verdict["message"]) == (False, 9, message)
    assert verdict["reason"] == prefix.partition(":")[0]


def test_missing_huge_pages_are_rejected(start_node: Callable[..., ModeledNode]) -> None:
    """kubelet sends a limit for every page size of the machine, 0 if no pages are requested."""
    sizes = {path.name for path in (NODES / "node0/hugepages").glob("hugepages-*")}
    if not sizes:
        pytest.skip("this kernel has no huge pages")
    if "hugepages-2048kB" not in sizes:
        pytest.skip("this machine has no pages of 2 MiB")
    node = start_node()
    if node.runtime.name == "crio" and CGROUPS / "hugetlb" not in hierarchies():
        pytest.skip("CRI-O refuses a limit of huge pages where no cgroup v1 controller has them")
    pod = node.pod("whole", name="paged")
    before = complete_state(node)
    message = refused(lambda: node.create(pod, **whole_cpus(1), huge_pages={"2MB": 1 << 50, "1GB": 0}))
    assert message.startswith(NO_MEMORY)
    assert complete_state(node) == before
    owner = node.run(pod, **whole_cpus(1), huge_pages={"2MB": 0, "1GB": 0})
    node.check()
    assert "hugepages" not in node.daemon.explain(owner).stdout


def crictl() -> str:
    """Build crictl if necessary and return its path; skip the test if the build fails."""
    script = Path(__file__).with_name("build_critest.sh")
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return str(Path(done.stdout.strip().splitlines()[-1]) / "crictl")


@pytest.mark.timeout(700)
def test_crictl_shows_reason_and_status(start_node: Callable[..., ModeledNode], tmp_path: Path) -> None:
    node, program = start_node(), crictl()
    pod = {
        "metadata": {"name": "tool", "namespace": "default", "uid": "uid-tool", "attempt": 0},
        "linux": {
            "cgroup_parent": f"{node.runtime.cgroup}/kubepods/poduid-tool",
            "security_context": {"namespace_options": {"network": 2}},
        },
    }
    container = {
        "metadata": {"name": "main"},
        "image": {"image": IMAGE},
        "command": ["sleep", "60"],
        "linux": {"resources": whole_cpus(len(ALL) + 6)},
    }
    files = [tmp_path / "pod.json", tmp_path / "container.json"]
    for file, content in zip(files, (pod, container), strict=True):
        file.write_text(json.dumps(content))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [program, "-r", f"unix://{node.daemon.socket}", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    sandbox = run("runp", str(files[0])).stdout.strip()
    assert sandbox
    done = run("create", sandbox, str(files[1]), str(files[0]))
    assert done.returncode != 0
    assert "code = FailedPrecondition" in done.stderr
    assert TOPOLOGY in done.stderr
    assert run("ps", "-a", "-q").stdout == ""


# Explanations.


def test_explain_shows_admitted_rejected_and_removed_containers(
    start_node: Callable[..., ModeledNode],
) -> None:
    node = start_node()
    owner = node.spawn("whole")
    wide = node.pod("whole", name="wide")
    message = refused(lambda: node.create(wide, **whole_cpus(2)))
    node.remove(owner)
    cpus = decisions(node, "default/whole-0")[0]["cpus"]
    text = node.daemon.explain("wide").stdout
    assert "default/wide/main was rejected: Resources cannot be allocated with Topology locality." in text
    assert "Rejected with TopologyAffinityError (gRPC status 9, FAILED_PRECONDITION)." in text
    assert "What would help" in text
    assert message.partition(" (")[0] == TOPOLOGY
    assert f"with CPU {cpus} of its own" in node.daemon.explain(owner[:12]).stdout
    page = node.daemon.explain("").stdout
    assert re.search(r"default/whole-0 +1 +main", page)
    assert re.search(r"default/wide +1 +main +REJECTED: TopologyAffinityError", page)
    unknown = node.daemon.explain("default/wine")
    assert unknown.returncode == 1
    assert "did you mean default/wide" in unknown.stderr


def test_a_killed_daemon_keeps_containers_and_reasons(start_node: Callable[..., ModeledNode]) -> None:
    """Placements and rules are in the ledger; hints and rejections are not."""
    node = start_node()
    owner, sharer = node.run(node.pod("whole", name="db"), **whole_cpus(1, GIB)), node.spawn("part")
    refused(lambda: node.create(node.pod("whole", name="wide"), **whole_cpus(2)))
    before, free = cpuset_of(owner), free_memory(node)
    node.daemon.kill9()
    node.daemon.start()
    assert cpuset_of(owner) == before
    wait_for("the daemon to be ready", lambda: node.daemon.status()["ready"])
    assert free_memory(node) == free
    (decision,) = decisions(node, "default/db")
    assert decision["cpus"] == str(before.cpus)
    assert decision["mems"] == [0]
    assert any("Guaranteed container with 1 whole CPU, policy static" in why for why in decision["reasons"])
    assert decisions(node, sharer[:12])[0]["mems"] == [0]
    assert node.daemon.explain("wide").returncode == 1
    message = refused(lambda: node.create(node.pod("part", name="more"), memory_limit_in_bytes=free + MIB))
    assert message.startswith(NO_MEMORY), "the node has enough memory, but it is reserved"
    node.check()


# Scope pod.


def test_a_pod_is_decided_with_its_sandbox(start_node: Callable[..., ModeledNode]) -> None:
    node = start_node(topologyManagerScope="pod")
    before = free_memory(node)
    sharer = node.spawn("ls")
    pod = node.pod("whole", name="pair", total=whole_cpus(1, GIB))
    (decision,) = decisions(node, "default/pair")
    assert (decision["event"], decision["merge"]["scope"]) == ("RunPodSandbox", "pod")
    assert free_memory(node) == before - GIB
    assert cpuset_of(sharer).cpus == ALL, "the pools keep the CPUs until a container owns them"

    late = node.pod("whole", name="late")
    state = complete_state(node)
    for requested in (whole_cpus(1), whole_cpus(1, before)):
        message = refused(lambda requested=requested: node.pod("whole", name="other", total=requested))
        assert "default/other" in message
        assert complete_state(node) == state
    assert refused(lambda: node.create(late, **whole_cpus(1)))
    assert complete_state(node) == state

    owner = node.run(pod, **whole_cpus(1, GIB))
    node.check()
    assert cpuset_of(owner).mems == Mask([0])
    assert free_memory(node) == before - GIB, "the container uses the reservation of its pod"
    text = node.daemon.explain("default/pair/main").stdout
    assert "set aside for its pod" in text


def test_a_rejected_sandbox_changes_no_state(start_node: Callable[..., ModeledNode]) -> None:
    node = start_node("restricted", topologyManagerScope="pod")
    node.spawn("ls")
    before = complete_state(node)
    message = refused(lambda: node.pod("whole", name="wide", total=whole_cpus(len(ALL) + 1)))
    assert message.startswith(TOPOLOGY)
    assert "default/wide" in message
    assert complete_state(node) == before
    text = node.daemon.explain("default/wide").stdout
    assert "RunPodSandbox" in text
    assert "Pod default/wide was rejected" in text
    counters = node.daemon.status()["counters"]
    assert counters["pods_refused"] == 1


def test_a_reservation_survives_a_kill_of_the_daemon(start_node: Callable[..., ModeledNode]) -> None:
    node = start_node(topologyManagerScope="pod")
    total = free_memory(node)
    pod = node.pod("whole", name="db", total=whole_cpus(1, GIB))
    wait_for("the ledger", lambda: b'"aside"' in b"".join(complete_state(node)["state"].values()))
    node.daemon.kill9()
    node.daemon.start()
    wait_for("the daemon to be ready", lambda: node.daemon.status()["ready"])
    assert free_memory(node) == total - GIB
    assert refused(lambda: node.pod("whole", name="other", total=whole_cpus(1, GIB)))
    owner = node.run(pod, **whole_cpus(1, GIB))
    node.check()
    node.remove(owner)
    node.cri.stop_pod(pod)
    node.cri.remove_pod(pod)
    assert free_memory(node) == total
    node.pod("whole", name="other", total=whole_cpus(1, GIB))


def test_a_recreated_container_keeps_its_place(start_node: Callable[..., ModeledNode]) -> None:
    """When a container dies, kubelet creates attempt 1 in the same sandbox before it removes attempt 0."""
    node = start_node(topologyManagerScope="pod")
    total = free_memory(node)
    pod = node.pod("whole", name="db", total=whole_cpus(1, GIB))
    first = node.run(pod, command=["sh", "-c", UNTIL_PROCEED], **whole_cpus(1, GIB))
    place = cpuset_of(first)
    node.cri.proceed(first)
    wait_for("the container to exit", lambda: node.cri.status(first).status.state == EXITED, limit=10)
    del node.containers[first]
    second = node.run(pod, attempt=1, **whole_cpus(1, GIB))
    assert (cpuset_of(second).cpus, cpuset_of(second).mems) == (place.cpus, place.mems)
    assert free_memory(node) == total - GIB
    node.check()


# Pods from kubelet.


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletServer]:
    server = KubeletServer(tmp_path)
    yield server
    server.close()


def test_the_daemon_reads_a_pod_from_kubelet_over_tls(
    start_node: Callable[..., ModeledNode], kubelet: KubeletServer
) -> None:
    """The sums in the sandbox's config alone do not show that the pod has an init container."""
    node = start_node(topologyManagerScope="pod", kubelet=kubelet.settings)
    total = free_memory(node)
    kubelet.add("db", init=(("prepare", "1", "1Gi"),), cpu="1", memory="64Mi")
    pod = node.pod("whole", name="db", total=whole_cpus(1, GIB))
    assert kubelet.request_count == 1
    assert free_memory(node) == total - GIB
    first = node.run(pod, "prepare", command=["sh", "-c", UNTIL_PROCEED], **whole_cpus(1, GIB))
    place = cpuset_of(first)
    node.cri.proceed(first)
    wait_for("the container to exit", lambda: node.cri.status(first).status.state == EXITED, limit=10)
    del node.containers[first]
    second = node.run(pod, "main", **whole_cpus(1))
    assert cpuset_of(second).cpus == place.cpus, "the container has the CPUs of the init container"
    node.check()
    (record, *_) = [r for r in decisions(node, "default/db") if r["container"] == "main"]
    assert "kubelet's list of pods" in {fact["source"] for fact in record["facts"]}
    assert kubelet.request_count == 1
    assert node.daemon.status()["problems"] == []


def test_pods_are_placed_while_kubelet_is_unreachable(
    start_node: Callable[..., ModeledNode], kubelet: KubeletServer
) -> None:
    node = start_node(topologyManagerScope="pod", kubelet={**kubelet.settings, "pods": "https://127.0.0.1:9"})
    owner = node.run(node.pod("whole", name="db", total=whole_cpus(1)), **whole_cpus(1))
    node.check()
    assert len(cpuset_of(owner).cpus) == 1
    (problem,) = node.daemon.status()["problems"]
    assert "https://127.0.0.1:9" in problem["what"]


# Devices.


@pytest.fixture
def make_cdi_device() -> Iterator[Callable[[str], str]]:
    """Return a function that creates a CDI device for a device file and returns its name."""
    made: list[Path] = []
    there = CDI_DIRECTORY.exists()

    def start_node(path: str) -> str:
        CDI_DIRECTORY.mkdir(exist_ok=True)
        file = CDI_DIRECTORY / f"topoproxy-test-{os.getpid()}.json"
        made.append(file)
        device = {"name": "one", "containerEdits": {"deviceNodes": [{"path": path}]}}
        file.write_text(
            json.dumps({"cdiVersion": "0.5.0", "kind": "topoproxy.test/thing", "devices": [device]})
        )
        return "topoproxy.test/thing=one"

    yield start_node
    for file in made:
        file.unlink(missing_ok=True)
    if not there and CDI_DIRECTORY.exists():
        CDI_DIRECTORY.rmdir()


def test_a_device_without_a_numa_node_is_ignored(start_node: Callable[..., ModeledNode]) -> None:
    """Device files like /dev/null are known to have no node: nothing is queried or reported."""
    node = start_node()
    owner = node.run(node.pod("whole", name="null"), device="/dev/null", **whole_cpus(1))
    node.check()
    assert "/dev/null" not in json.dumps(decisions(node, owner[:12]))


def test_a_device_and_its_cdi_name_are_explained(
    start_node: Callable[..., ModeledNode], make_cdi_device: Callable[[str], str]
) -> None:
    node = start_node()
    disk = next((p for p in ("/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0") if Path(p).exists()), "")
    if not disk:
        pytest.skip("no disk here")
    name = make_cdi_device(disk)
    owner = node.run(node.pod("whole", name="disk"), device=disk, cdi=[name], **whole_cpus(1))
    node.check()
    facts = {fact["what"]: fact for decision in decisions(node, owner[:12]) for fact in decision["facts"]}
    assert disk in str(facts)
    assert name in str(facts)
    assert str(CDI_DIRECTORY) in str(facts), "the source of the fact is the CDI spec"
    status = node.cri.status(owner).status
    assert status.id == owner


@pytest.mark.parametrize("scope", ["container", "pod"])
def test_the_next_container_gets_the_place_of_an_init_container(
    start_node: Callable[..., ModeledNode], scope: str
) -> None:
    """kubelet creates the next container as soon as an init container has exited, before any reconcile."""
    node = start_node(topologyManagerScope=scope)
    total = free_memory(node)
    pod = node.pod("whole", name="db", total=whole_cpus(1, GIB))
    first = node.run(pod, "prepare", command=["sh", "-c", UNTIL_PROCEED], **whole_cpus(1, GIB))
    place = cpuset_of(first)
    node.cri.proceed(first)
    wait_for("the container to exit", lambda: node.cri.status(first).status.state == EXITED, limit=10)
    del node.containers[first]
    second = node.run(pod, "main", **whole_cpus(1, GIB))
    assert cpuset_of(second).mems == place.mems
    if scope == "pod":  # in scope container the CPUs of an exited container are kept if others are free
        assert cpuset_of(second).cpus == place.cpus
    assert free_memory(node) == total - GIB
    node.check()
