"""The topology manager in front of a real containerd: what it places, refuses, promises and explains.

The machine's own CPUs and its first NUMA node are used, so two CPUs are enough: one can be owned, the other
always remains to the shared pool. What takes several NUMA nodes is shown in a virtual machine, by
``test_vm.py``.
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
from bed import CGROUPS, Bed, hierarchies, wait_for
from cri import EXITED, IMAGE, UNTIL_PROCEED, code, cpuset_of, online
from daemon import MIB, Daemon, Node
from kubelet import Kubelet

from proxy.model.idset import CpuSet, Mask

pytestmark = pytest.mark.e2e

ALL = online()
GIB = 1 << 30
NODES = Path("/sys/devices/system/node")
TOPOLOGY = "TopologyAffinityError: Resources cannot be allocated with Topology locality"
UNEXPECTED = "UnexpectedAdmissionError: Allocate failed due to "
REFUSED = "refused a "
NO_MEMORY = UNEXPECTED + "[memorymanager] failed to "
"""Where no set of nodes has the memory, kubelet's memory manager has no hint, and so nothing against it."""
COUNTED = {
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "256Mi"}}],
    "reconcilePeriod": "1h",  # only the calls show the daemon what happens
}
CDI_FOLDER = Path("/var/run/cdi")


def whole(cpus: int, memory: int = 64 * MIB) -> dict[str, int]:
    """What kubelet writes into a request for a Guaranteed container with whole CPUs."""
    return {
        "cpu_period": 100_000,
        "cpu_quota": cpus * 100_000,
        "cpu_shares": cpus * 1024,
        "memory_limit_in_bytes": memory,
    }


def homes(cpus: CpuSet) -> Mask:
    """The NUMA nodes of CPUs, as sysfs shows them."""
    found = [
        int(directory.name[4:])
        for directory in NODES.glob("node[0-9]*")
        if not CpuSet.parse((directory / "cpulist").read_text()).isdisjoint(cpus)
    ]
    return Mask(found)


def refused(what: Callable[[], object]) -> str:
    """Make a call that must be refused as kubelet's admission refuses; returns the words."""
    with pytest.raises(grpc.RpcError) as caught:
        what()
    assert code(caught.value) is grpc.StatusCode.FAILED_PRECONDITION, caught.value
    assert code(caught.value).value[0] == 9
    words: str = caught.value.details()  # type: ignore[attr-defined]
    return words


def everything(node: Node) -> dict[str, object]:
    """All that a refusal must leave as it was: runtime, kernel, what the daemon holds and has written."""
    status = node.daemon.status()
    groups = [
        directory
        for root in hierarchies()
        for directory, _, _ in os.walk(root / node.bed.cgroup.lstrip("/"))
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


def problems(node: Node) -> list[str]:
    """What the daemon reports as problems."""
    return [problem["what"] for problem in node.daemon.status()["problems"]]


def free_memory(node: Node) -> int:
    """What is left of the memory of node 0 for Guaranteed pods, in bytes."""
    free: int = node.daemon.status()["memory"][0]["resources"]["memory"]["free"]
    return free


def reported(node: Node, subject: str) -> list[dict[str, Any]]:
    """The decisions that ``topoproxy explain --json`` reports."""
    done = node.daemon.explain(subject, "--json")
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = [record["decision"] for record in json.loads(done.stdout)["records"]]
    return records


@pytest.fixture
def make(bed: Bed, proxies: Callable[..., Daemon]) -> Iterator[Callable[..., Node]]:
    """Make a daemon with settings, and a client of it."""
    clients = []

    def node(policy: str = "single-numa-node", **config: object) -> Node:
        daemon = proxies(topologyManagerPolicy=policy, **{**COUNTED, **config})
        client = daemon.client()
        clients.append(client)
        return Node(bed, daemon, client)

    yield node
    for client in clients:
        client.close()
    bed.clear()


# What is placed.


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_a_container_with_whole_cpus_and_counted_memory(make: Callable[..., Node], policy: str) -> None:
    node = make(policy)
    before = free_memory(node)
    sharer, owner = node.spawn("ls"), node.run(node.pod("whole", name="db"), **whole(1, GIB))
    node.check()
    found = cpuset_of(owner)
    assert len(found.cpus) == 1
    assert found.mems == homes(found.cpus)
    assert cpuset_of(sharer).cpus == ALL - found.cpus
    assert free_memory(node) == before - GIB

    text = node.daemon.explain("default/db").stdout
    assert f"default/db/main was admitted with CPU {found.cpus} of its own and memory of node 0." in text
    assert re.search(rf"Policy {policy}, for the container, chose (any node|node 0) \(preferred\)", text)
    assert "From the CRI request: memory limit 1Gi." in text
    assert "default/ls-0/main" in text, "it had to move"

    node.remove(owner)
    node.settle()
    assert free_memory(node) == before


def test_memory_is_counted_without_cpus_too(make: Callable[..., Node]) -> None:
    """A Guaranteed container with part of a CPU shares the CPUs, and its memory is promised all the same."""
    node = make()
    before = free_memory(node)
    sharer = node.spawn("part")
    node.check()
    assert free_memory(node) == before - 64 * MIB
    assert cpuset_of(sharer).mems == Mask([0])
    pod = node.pod("part")
    said = refused(lambda: node.create(pod, memory_limit_in_bytes=before))
    assert said.startswith(NO_MEMORY), "there is as much memory, but it is not free"


# What is refused.


@pytest.mark.parametrize(
    ("policy", "asked", "words"),
    [
        pytest.param("single-numa-node", whole(2), TOPOLOGY, id="CPUs, single-numa-node"),
        pytest.param("restricted", whole(2), TOPOLOGY, id="CPUs, restricted"),
        pytest.param("best-effort", whole(2), UNEXPECTED + "not enough cpus", id="CPUs, best-effort"),
        pytest.param("none", whole(2), UNEXPECTED + "not enough cpus", id="CPUs, none"),
        pytest.param("single-numa-node", whole(1, 1 << 50), NO_MEMORY, id="memory, single-numa-node"),
        pytest.param("best-effort", whole(1, 1 << 50), NO_MEMORY, id="memory, best-effort"),
    ],
)
def test_what_cannot_be_had_is_refused_and_leaves_nothing(
    make: Callable[..., Node], policy: str, asked: dict[str, int], words: str
) -> None:
    node = make(policy)
    node.spawn("ls")
    if asked["memory_limit_in_bytes"] < GIB:
        node.spawn("whole")
    pod = node.pod("whole", name="wide")
    before = everything(node)
    said = refused(lambda: node.create(pod, **asked))
    assert said.startswith(words)
    assert "default/wide/main" in said
    assert everything(node) == before
    (rejection,) = (one for one in problems(node) if one.startswith(REFUSED))
    assert "pod=default/wide container=main" in rejection
    node.check()
    (decision,) = reported(node, "default/wide/main")
    verdict = decision["verdict"]
    assert (verdict["admitted"], verdict["code"], verdict["message"]) == (False, 9, said)
    assert verdict["reason"] == words.partition(":")[0]


def test_huge_pages_that_are_not_there(make: Callable[..., Node]) -> None:
    """kubelet names every page size of the machine, with a limit of 0 where none are asked for."""
    sizes = {path.name for path in (NODES / "node0/hugepages").glob("hugepages-*")}
    if not sizes:
        pytest.skip("this kernel has no huge pages")
    if "hugepages-2048kB" not in sizes:
        pytest.skip("this machine has no pages of 2 MiB")
    node = make()
    if node.bed.name == "crio" and CGROUPS / "hugetlb" not in hierarchies():
        pytest.skip("CRI-O refuses a limit of huge pages where no cgroup v1 controller has them")
    pod = node.pod("whole", name="paged")
    before = everything(node)
    said = refused(lambda: node.create(pod, **whole(1), huge_pages={"2MB": 1 << 50, "1GB": 0}))
    assert said.startswith(NO_MEMORY)
    assert everything(node) == before
    owner = node.run(pod, **whole(1), huge_pages={"2MB": 0, "1GB": 0})
    node.check()
    assert "hugepages" not in node.daemon.explain(owner).stdout


def crictl() -> str:
    """The program crictl, where it is at hand already."""
    script = Path(__file__).with_name("build_critest.sh")
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return str(Path(done.stdout.strip().splitlines()[-1]) / "crictl")


@pytest.mark.timeout(700)
def test_crictl_shows_reason_and_status(make: Callable[..., Node], tmp_path: Path) -> None:
    node, program = make(), crictl()
    pod = {
        "metadata": {"name": "tool", "namespace": "default", "uid": "uid-tool", "attempt": 0},
        "linux": {
            "cgroup_parent": f"{node.bed.cgroup}/kubepods/poduid-tool",
            "security_context": {"namespace_options": {"network": 2}},
        },
    }
    container = {
        "metadata": {"name": "main"},
        "image": {"image": IMAGE},
        "command": ["sleep", "60"],
        "linux": {"resources": whole(len(ALL) + 6)},
    }
    files = [tmp_path / "pod.json", tmp_path / "container.json"]
    for file, content in zip(files, (pod, container), strict=True):
        file.write_text(json.dumps(content))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [program, "-r", f"unix://{node.daemon.socket}", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    sandbox = run("runp", str(files[0])).stdout.strip()
    assert sandbox
    done = run("create", sandbox, str(files[1]), str(files[0]))
    assert done.returncode != 0
    assert "code = FailedPrecondition" in done.stderr
    assert TOPOLOGY in done.stderr
    assert run("ps", "-a", "-q").stdout == ""


# What is remembered.


def test_explain_admitted_refused_and_removed(make: Callable[..., Node]) -> None:
    node = make()
    owner = node.spawn("whole")
    wide = node.pod("whole", name="wide")
    said = refused(lambda: node.create(wide, **whole(2)))
    node.remove(owner)
    cpus = reported(node, "default/whole-0")[0]["cpus"]
    text = node.daemon.explain("wide").stdout
    assert "default/wide/main was rejected: Resources cannot be allocated with Topology locality." in text
    assert "Rejected with TopologyAffinityError (gRPC status 9, FAILED_PRECONDITION)." in text
    assert "What would help" in text
    assert said.partition(" (")[0] == TOPOLOGY
    assert f"with CPU {cpus} of its own" in node.daemon.explain(owner[:12]).stdout
    page = node.daemon.explain("").stdout
    assert re.search(r"default/whole-0 +1 +main", page)
    assert re.search(r"default/wide +1 +main +REJECTED: TopologyAffinityError", page)
    unknown = node.daemon.explain("default/wine")
    assert unknown.returncode == 1
    assert "did you mean default/wide" in unknown.stderr


def test_a_killed_daemon_knows_containers_and_reasons_again(make: Callable[..., Node]) -> None:
    """AssumedPods and rules stay known; what was weighed, and which pods were refused, does not."""
    node = make()
    owner, sharer = node.run(node.pod("whole", name="db"), **whole(1, GIB)), node.spawn("part")
    refused(lambda: node.create(node.pod("whole", name="wide"), **whole(2)))
    before, free = cpuset_of(owner), free_memory(node)
    node.daemon.kill9()
    node.daemon.start()
    assert cpuset_of(owner) == before
    wait_for("the comparison", lambda: node.daemon.status()["ready"])
    assert free_memory(node) == free
    (decision,) = reported(node, "default/db")
    assert decision["cpus"] == str(before.cpus)
    assert decision["mems"] == [0]
    assert any("Guaranteed container with 1 whole CPUs, policy static" in why for why in decision["reasons"])
    assert reported(node, sharer[:12])[0]["mems"] == [0]
    assert node.daemon.explain("wide").returncode == 1
    words = refused(lambda: node.create(node.pod("part", name="more"), memory_limit_in_bytes=free + MIB))
    assert words.startswith(NO_MEMORY), "there is as much memory, but it is not free"
    node.check()


# A pod as a whole.


def test_a_pod_is_decided_with_its_sandbox(make: Callable[..., Node]) -> None:
    node = make(topologyManagerScope="pod")
    before = free_memory(node)
    sharer = node.spawn("ls")
    pod = node.pod("whole", name="pair", total=whole(1, GIB))
    (decision,) = reported(node, "default/pair")
    assert (decision["event"], decision["merge"]["scope"]) == ("RunPodSandbox", "pod")
    assert free_memory(node) == before - GIB
    assert cpuset_of(sharer).cpus == ALL, "pools use the CPUs until a container owns them"

    late = node.pod("whole", name="late")
    state = everything(node)
    for asked in (whole(1), whole(1, before)):
        said = refused(lambda asked=asked: node.pod("whole", name="other", total=asked))
        assert "default/other" in said
        assert everything(node) == state
    assert refused(lambda: node.create(late, **whole(1)))
    assert everything(node) == state

    owner = node.run(pod, **whole(1, GIB))
    node.check()
    assert cpuset_of(owner).mems == Mask([0])
    assert free_memory(node) == before - GIB, "the container takes from what was set aside"
    text = node.daemon.explain("default/pair/main").stdout
    assert "set aside for its pod" in text


def test_a_refused_sandbox(make: Callable[..., Node]) -> None:
    node = make("restricted", topologyManagerScope="pod")
    node.spawn("ls")
    before = everything(node)
    said = refused(lambda: node.pod("whole", name="wide", total=whole(len(ALL) + 1)))
    assert said.startswith(TOPOLOGY)
    assert "default/wide" in said
    assert everything(node) == before
    text = node.daemon.explain("default/wide").stdout
    assert "RunPodSandbox" in text
    assert "Pod default/wide was rejected" in text
    counters = node.daemon.status()["counters"]
    assert counters["pods_refused"] == 1


def test_what_is_set_aside_survives_a_killed_daemon(make: Callable[..., Node]) -> None:
    node = make(topologyManagerScope="pod")
    total = free_memory(node)
    pod = node.pod("whole", name="db", total=whole(1, GIB))
    wait_for("the ledger", lambda: b'"aside"' in b"".join(everything(node)["state"].values()))
    node.daemon.kill9()
    node.daemon.start()
    wait_for("the comparison", lambda: node.daemon.status()["ready"])
    assert free_memory(node) == total - GIB
    assert refused(lambda: node.pod("whole", name="other", total=whole(1, GIB)))
    owner = node.run(pod, **whole(1, GIB))
    node.check()
    node.remove(owner)
    node.cri.stop_pod(pod)
    node.cri.remove_pod(pod)
    assert free_memory(node) == total
    node.pod("whole", name="other", total=whole(1, GIB))


def test_a_container_made_again_keeps_its_place(make: Callable[..., Node]) -> None:
    """As kubelet does when a container dies: attempt 1 in the same sandbox, before attempt 0 is removed."""
    node = make(topologyManagerScope="pod")
    total = free_memory(node)
    pod = node.pod("whole", name="db", total=whole(1, GIB))
    first = node.run(pod, command=["sh", "-c", UNTIL_PROCEED], **whole(1, GIB))
    place = cpuset_of(first)
    node.cri.proceed(first)
    wait_for("the end", lambda: node.cri.status(first).status.state == EXITED, limit=10)
    del node.members[first]
    second = node.run(pod, attempt=1, **whole(1, GIB))
    assert (cpuset_of(second).cpus, cpuset_of(second).mems) == (place.cpus, place.mems)
    assert free_memory(node) == total - GIB
    node.check()


# What kubelet reports.


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    server = Kubelet(tmp_path)
    yield server
    server.close()


def test_kubelet_describes_a_pod_over_tls(make: Callable[..., Node], kubelet: Kubelet) -> None:
    """The sum of the sandbox would be the same for one container that wants all of it."""
    node = make(topologyManagerScope="pod", kubelet=kubelet.settings)
    total = free_memory(node)
    kubelet.add("db", init=(("prepare", "1", "1Gi"),), cpu="1", memory="64Mi")
    pod = node.pod("whole", name="db", total=whole(1, GIB))
    assert kubelet.request_count == 1
    assert free_memory(node) == total - GIB
    first = node.run(pod, "prepare", command=["sh", "-c", UNTIL_PROCEED], **whole(1, GIB))
    place = cpuset_of(first)
    node.cri.proceed(first)
    wait_for("the end", lambda: node.cri.status(first).status.state == EXITED, limit=10)
    del node.members[first]
    second = node.run(pod, "main", **whole(1))
    assert cpuset_of(second).cpus == place.cpus, "it takes over from the init container"
    node.check()
    (record, *_) = [r for r in reported(node, "default/db") if r["container"] == "main"]
    assert "kubelet's list of pods" in {fact["source"] for fact in record["facts"]}
    assert kubelet.request_count == 1
    assert node.daemon.status()["problems"] == []


def test_a_kubelet_that_is_gone_is_done_without(make: Callable[..., Node], kubelet: Kubelet) -> None:
    node = make(topologyManagerScope="pod", kubelet={**kubelet.settings, "pods": "https://127.0.0.1:9"})
    owner = node.run(node.pod("whole", name="db", total=whole(1)), **whole(1))
    node.check()
    assert len(cpuset_of(owner).cpus) == 1
    (problem,) = node.daemon.status()["problems"]
    assert "https://127.0.0.1:9" in problem["what"]


# Devices.


@pytest.fixture
def cdi_spec() -> Iterator[Callable[[str], str]]:
    """Make a CDI device of a device file; returns its name."""
    made: list[Path] = []
    there = CDI_FOLDER.exists()

    def make(path: str) -> str:
        CDI_FOLDER.mkdir(exist_ok=True)
        file = CDI_FOLDER / f"topoproxy-test-{os.getpid()}.json"
        made.append(file)
        device = {"name": "one", "containerEdits": {"deviceNodes": [{"path": path}]}}
        file.write_text(
            json.dumps({"cdiVersion": "0.5.0", "kind": "topoproxy.test/thing", "devices": [device]})
        )
        return "topoproxy.test/thing=one"

    yield make
    for file in made:
        file.unlink(missing_ok=True)
    if not there and CDI_FOLDER.exists():
        CDI_FOLDER.rmdir()


def test_devices_without_a_place(make: Callable[..., Node]) -> None:
    """A file that says nothing by its very name is no device to weigh; nothing is asked or reported."""
    node = make()
    owner = node.run(node.pod("whole", name="null"), device="/dev/null", **whole(1))
    node.check()
    assert "/dev/null" not in json.dumps(reported(node, owner[:12]))


def test_a_device_and_its_cdi_name(make: Callable[..., Node], cdi_spec: Callable[[str], str]) -> None:
    node = make()
    disk = next((p for p in ("/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0") if Path(p).exists()), "")
    if not disk:
        pytest.skip("no disk here")
    name = cdi_spec(disk)
    owner = node.run(node.pod("whole", name="disk"), device=disk, cdi=[name], **whole(1))
    node.check()
    facts = {fact["what"]: fact for decision in reported(node, owner[:12]) for fact in decision["facts"]}
    assert disk in str(facts)
    assert name in str(facts)
    assert str(CDI_FOLDER) in str(facts), "the spec is named as the source"
    shown = node.cri.status(owner).status
    assert shown.id == owner


@pytest.mark.parametrize("scope", ["container", "pod"])
def test_an_init_container_leaves_its_place_to_the_next(make: Callable[..., Node], scope: str) -> None:
    """kubelet makes the next container as soon as an init container has ended, before any comparison."""
    node = make(topologyManagerScope=scope)
    total = free_memory(node)
    pod = node.pod("whole", name="db", total=whole(1, GIB))
    first = node.run(pod, "prepare", command=["sh", "-c", UNTIL_PROCEED], **whole(1, GIB))
    place = cpuset_of(first)
    node.cri.proceed(first)
    wait_for("the end", lambda: node.cri.status(first).status.state == EXITED, limit=10)
    del node.members[first]
    second = node.run(pod, "main", **whole(1, GIB))
    assert cpuset_of(second).mems == place.mems
    if scope == "pod":  # else the first may be one that crashed, and its CPUs are kept if others are free
        assert cpuset_of(second).cpus == place.cpus
    assert free_memory(node) == total - GIB
    node.check()
