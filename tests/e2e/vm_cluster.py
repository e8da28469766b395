"""The scenario of a node in a cluster: containers run on the CPUs that the scheduler extender has reserved.

The node has 4 NUMA nodes; containerd, the daemon, the cluster agent and kubelet run on it. etcd, API server,
controllers, kube-scheduler and the extender run outside of the machine. The other nodes are objects: each has
enough free CPUs for a pod of the Deployment, but not on one NUMA node.

    python3 vm_cluster.py cgroupfs|systemd

Needs /in/kubelet (1.34 or later), /in/cluster as tests/cluster/joining_machine.py makes it, the packages of
the agent in /in/agent.tar, and /in/tests/cluster/api_client.py.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from cri import STATUS
from vm_guest import ALL, DIRECTORY, LONG_S, GuestDaemon, Place, group_of, place_in, step, wait
from vm_kubelet import MANIFESTS, KubeletNode, container, kubelet_settings, nodes_of

from proxy.model.idset import CpuSet
from tests.cluster.api_client import AdminApiClient, ApiError, Json, bound_token

INPUT = Path("/in/cluster")
CLUSTER = json.loads((INPUT / "cluster.json").read_text())
NODE = CLUSTER["node"]
PODS = "/api/v1/namespaces/fleet/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/fleet/deployments"
NUMATOPOLOGY = f"/apis/nodeinfo.volcano.sh/v1alpha1/numatopologies/{NODE}"
KUBECONFIG, AGENT_KUBECONFIG = INPUT / "kubeconfig", DIRECTORY / "agent.kubeconfig"
CONFIG, LOG = Path("/etc/kubelet/config.yaml"), Path("/out/kubelet.log")
RESERVED = CpuSet([0, 1])
SETTINGS: dict[str, object] = {
    "reservedSystemCPUs": str(RESERVED),
    "topologyManagerPolicy": "single-numa-node",
    "clusterFacts": {"directory": str(DIRECTORY / "cluster")},
}
SIZE, FITTING, WAITING = 4, 7, 2
"""Aligned pods: NUMA node 0 has room for one, because CPUs are reserved there, the others for two each. Each
node of the fleet has 7 free CPUs: a scheduler that counts CPUs would bind the waiting pods there."""
SMALL = 2
PODS_RUN_S = 3 * LONG_S
"""Many pods that start at once share the one CPU that emulates the machine."""


class JoinedKubeletNode(KubeletNode):
    """kubelet joins the cluster."""

    def join(self) -> None:
        for directory in (MANIFESTS, Path("/var/log/pods")):
            directory.mkdir(parents=True, exist_ok=True)
        settings = kubelet_settings(self.driver, signed=False) | {
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "featureGates": {},
        }
        CONFIG.write_text(json.dumps(settings))
        self._launch()

    def is_running(self) -> bool:
        """Whether kubelet runs; it is started again if the runtime did not answer it in time."""
        assert self.process is not None
        if self.process.poll() is not None:
            step(f"kubelet ended: {LOG.read_text()[-300:]}")
            self._launch()
            return False
        return True


class ClusterClient:
    """A client of the API server in the role of an administrator."""

    def __init__(self) -> None:
        self.api = AdminApiClient(CLUSTER["host"], CLUSTER["port"], 60)

    def deploy(self, name: str, cpu: str, replicas: int, *, here: bool = False, **labels: str) -> None:
        """Create a Deployment whose pods have one container.

        Args:
            name: Its name.
            cpu: The CPU request of a container.
            replicas: How many.
            here: Its pods must run on this node.
            labels: More labels of the pods.
        """
        own = {"app": name}
        spec = {
            "schedulerName": CLUSTER["scheduler"],
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container("main", cpu, "16Mi", "sleep", "36000")],
            **({"nodeSelector": {"kubernetes.io/hostname": NODE}} if here else {}),
        }
        template = {"metadata": {"labels": own | labels}, "spec": spec}
        value = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {"replicas": replicas, "selector": {"matchLabels": own}, "template": template},
        }
        self.api.create(DEPLOYMENTS, value)

    def pods(self, app: str) -> list[Json]:
        """List the pods of a Deployment that are not being deleted."""
        found: list[Json] = self.api.request("GET", f"{PODS}?labelSelector=app%3D{app}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def until(self, what: str, found: Callable[[], Any], limit: float = LONG_S) -> Any:
        """Wait until ``found`` returns a true value, and return it; failed requests are retried."""
        last: list[Any] = []

        def holds() -> bool:
            with suppress(OSError, ApiError, LookupError, TypeError):
                last[:] = [found()]
                return bool(last[0])
            return False

        wait(what, holds, limit)
        return last[0]

    def wait_for_pods(self, app: str, running: int, waiting: int) -> list[Json]:
        """Wait until these numbers of pods run and have found no node; returns those that run."""

        def running_pods() -> list[Json]:
            pods = self.pods(app)
            ended = [pod["status"] for pod in pods if pod["status"]["phase"] in ("Failed", "Succeeded")]
            assert not ended, ended
            ran = [pod for pod in pods if pod["status"]["phase"] == "Running"]
            return (
                ran
                if (len(ran), len([*filter(None, map(unschedulable_reason, pods))])) == (running, waiting)
                else []
            )

        ran: list[Json] = self.until(
            f"{running} pods of {app} to run, {waiting} to wait", running_pods, PODS_RUN_S
        )
        return ran

    def numatopology(self) -> Json:
        found: Json = self.api.request("GET", NUMATOPOLOGY)["spec"]
        return found

    def free(self) -> CpuSet:
        """The CPUs that the node's object shows as free."""
        return CpuSet.parse(self.numatopology()["numares"]["cpu"]["allocatable"])

    def allocations(self) -> Mapping[str, CpuSet]:
        """Return the CPUs of pods in the node's object, by uid."""
        return {
            each["uid"]: CpuSet.parse(each["containerAllocations"][0]["allocations"]["cpu"])
            for each in self.numatopology()["podAllocations"]
        }


def unschedulable_reason(pod: Json) -> str:
    """Return the scheduler's reasons why a pod is unschedulable; empty if it is not."""
    conditions = pod["status"].get("conditions", ())
    found = [str(c["message"]) for c in conditions if c.get("reason") == "Unschedulable"]
    return found[0] if found and not pod["spec"].get("nodeName") else ""


def here(pods: list[Json]) -> list[Json]:
    return [pod for pod in pods if pod["spec"]["nodeName"] == NODE]


def uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def name_of(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def node_is_known() -> bool:
    """Whether the extender has the objects of all nodes."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(f"{CLUSTER['extender']}/metrics", timeout=60, context=context) as answer:
        text = str(answer.read().decode())
    return f'nodes{{state="known"}} {1 + len(CLUSTER["fleet"])}\n' in text


@contextmanager
def agent(api: AdminApiClient) -> Iterator[subprocess.Popen[bytes]]:
    """Run the cluster agent with the configuration of the daemon, and the rights of its pod on this node."""
    values = yaml.safe_load(KUBECONFIG.read_text())
    values["users"][0]["user"]["token"] = bound_token(api, NODE)
    AGENT_KUBECONFIG.write_text(yaml.safe_dump(values))
    subprocess.run(["tar", "xf", "/in/agent.tar", "-C", "/opt"], check=True)
    (DIRECTORY / "cluster").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "proxy", "agent", "--config", str(DIRECTORY / "config.yaml")]
    command += ["--node", NODE, "--kubeconfig", str(AGENT_KUBECONFIG)]
    with Path("/out/agent.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
        process.terminate()
        assert process.wait(LONG_S) == 0, Path("/out/agent.log").read_text()[-2000:]
    finally:
        process.kill()


def check_owner_cpus(node: KubeletNode, pod: Json, size: int) -> Place:
    """Check that a pod has CPUs of one NUMA node: in its file, in effect and for each task."""
    place = node.place(f"{name_of(pod)}/main")
    assert len(place.cpus) == size, place
    assert place.mems == nodes_of(place.cpus), place
    assert len(place.mems) == 1, place
    assert place.tasks == {place.cpus}, place
    return place


def check_aligned(node: KubeletNode, cluster: ClusterClient, pods: list[Json]) -> CpuSet:
    """Each pod runs here on the CPUs of the annotation that the extender wrote; returns all of them."""
    taken = CpuSet()
    for pod in pods:
        assert pod["spec"]["nodeName"] == NODE, pod["spec"]
        reserved = CpuSet.parse(json.loads(pod["metadata"]["annotations"][STATUS])["cpuset"])
        place = check_owner_cpus(node, pod, SIZE)
        assert place.cpus == reserved, (reserved, place)
        assert place.cpus.isdisjoint(taken | RESERVED), (place, taken)
        taken |= place.cpus
        step(f"{name_of(pod)}: reserved {reserved}, in the kernel {place.cpus}")
    expected = {uid(pod): node.place(f"{name_of(pod)}/main").cpus for pod in pods}
    cluster.until("the object to show them", lambda: expected.items() <= cluster.allocations().items())
    return taken


def check_shared(node: KubeletNode, pods: list[Json], cpus: CpuSet) -> None:
    """The pods that share run on these CPUs, and so do their tasks."""
    for pod in pods:
        group = group_of(node.ids()[f"{name_of(pod)}/main"])
        wait(f"{name_of(pod)} to run on {cpus}", lambda group=group: place_in(group).is_at(cpus, None))
    step(f"the {len(pods)} pods that share run on {cpus}")


def check_no_rejection(node: KubeletNode) -> None:
    assert not node.daemon.status()["rejections"], node.daemon.status()["rejections"]


def aligned_pods(node: KubeletNode, cluster: ClusterClient, shared: list[Json]) -> CpuSet:
    cluster.deploy("aligned", str(SIZE), FITTING + WAITING, **{"koordinator.sh/qosClass": "LSR"})
    ran = cluster.wait_for_pods("aligned", FITTING, WAITING)
    taken = check_aligned(node, cluster, ran)
    check_shared(node, shared, ALL - taken)
    refused = f"{len(CLUSTER['fleet'])} TopologyAffinityError"

    def reasons() -> list[str]:
        found = [reason for reason in map(unschedulable_reason, cluster.pods("aligned")) if refused in reason]
        return found if len(found) == WAITING else []

    (reason, *_) = cluster.until(f"the other pods to be reported with {refused}", reasons)
    step(f"{FITTING} aligned pods run, {WAITING} wait: {reason}")
    cluster.api.delete(f"{PODS}/{name_of(ran[0])}")
    ran = cluster.wait_for_pods("aligned", FITTING, WAITING)
    taken = check_aligned(node, cluster, ran)
    check_shared(node, shared, ALL - taken)
    check_no_rejection(node)
    return taken


def small_pods(node: KubeletNode, cluster: ClusterClient, shared: list[Json], taken: CpuSet) -> None:
    """Pods without a class, whose CPUs the node chooses: they fill what is left here and in the fleet."""
    # Each node of the fleet has one CPU left on NUMA node 0, and two on each of the others.
    others = 3 * len(CLUSTER["fleet"])
    cluster.deploy("small", str(SMALL), others + 2)
    ran = cluster.wait_for_pods("small", others + 1, 1)
    (own,) = here(ran)
    place = check_owner_cpus(node, own, SMALL)
    assert place.cpus == ALL - RESERVED - taken, place
    cluster.until("the object to show it", lambda: cluster.allocations()[uid(own)] == place.cpus)
    check_shared(node, shared, RESERVED)
    assert not cluster.free()
    check_no_rejection(node)
    step(f"{others} small pods run in the fleet, and {name_of(own)} here on {place.cpus}")


def main() -> None:
    version = subprocess.check_output(["/in/kubelet", "--version"], text=True).strip()
    step(f"{version}, CPUs {ALL}")
    cluster = ClusterClient()
    node = JoinedKubeletNode(
        sys.argv[1],
        GuestDaemon(**SETTINGS),
        arguments=("--hostname-override", NODE, "--kubeconfig", str(KUBECONFIG)),
    )
    node.join()

    def is_ready() -> bool:
        conditions = cluster.api.request("GET", f"/api/v1/nodes/{NODE}")["status"]["conditions"]
        return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)

    cluster.until("the node to be ready", lambda: node.is_running() and is_ready(), PODS_RUN_S)
    step("the node is ready")
    with agent(cluster.api):
        cluster.until("the node's object", lambda: cluster.free() == ALL - RESERVED, PODS_RUN_S)
        cluster.until("the extender to know the node", node_is_known)
        step(f"the cluster knows the node: {cluster.free()} are free")
        cluster.deploy("shared", "0", 2, here=True)  # the owners request all allocatable CPUs
        shared = cluster.wait_for_pods("shared", 2, 0)
        check_shared(node, shared, ALL)
        taken = aligned_pods(node, cluster, shared)
        small_pods(node, cluster, shared, taken)
        for name in ("aligned", "small"):
            cluster.api.request(
                "DELETE",
                f"{DEPLOYMENTS}/{name}",
                {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"},
            )
        cluster.until("all CPUs to be free", lambda: cluster.free() == ALL - RESERVED, PODS_RUN_S)
        check_shared(node, shared, ALL)
    status = node.daemon.status()
    assert not status["violations"], status["violations"]
    problems = [each["what"] for each in status["problems"]]
    assert not any("Node object" in problem for problem in problems), problems
    step(f"problems: {'; '.join(problems) or 'none'}")
    node.stop_kubelet()
    assert node.daemon.stop() == 0
    step("the scenario ends well")


if __name__ == "__main__":
    main()
