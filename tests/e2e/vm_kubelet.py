"""The scenario of a real kubelet, standalone on static pods, in a virtual machine of 4 NUMA nodes.

kubelet's own managers are off; the daemon decides, with ``restricted`` and scope ``pod``. It queries kubelet
for facts that the CRI does not carry: over TLS with a client certificate, at the read-only port, by the pods
API.

    python3 vm_kubelet.py cgroupfs|systemd

Needs /in/kubelet (1.34 or later) and /in/certs: ca.crt, and server and client as .crt and .key.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cri import IMAGE, RUNNING, Cri
from vm_guest import (
    ALL,
    LONG_S,
    RUNTIME,
    SOCKET,
    GuestDaemon,
    Place,
    group_of,
    node_cpus,
    place_in,
    refusal,
    step,
    wait,
)

from proxy.backends.kubelet.client import KubeletClient
from proxy.backends.kubelet.settings import KubeletSettings
from proxy.model.idset import CpuSet, Mask

MIB = 1 << 20
CERTS, MANIFESTS, ROOT = Path("/in/certs"), Path("/etc/kubelet/manifests"), Path("/var/lib/kubelet")
SECURE, READ_ONLY = "https://127.0.0.1:10250", "http://127.0.0.1:10255"
POD_RESOURCES, PODS_API = ROOT / "pod-resources/kubelet.sock", ROOT / "pods-api/pods-api.sock"
TLS = {
    "pods": SECURE,
    "caFile": str(CERTS / "ca.crt"),
    "certFile": str(CERTS / "client.crt"),
    "keyFile": str(CERTS / "client.key"),
}
BY_LIST, BY_API = "kubelet's list of pods", "kubelet's pods API"
SETTINGS = {
    "reservedSystemCPUs": "0-1",
    "topologyManagerPolicy": "restricted",
    "topologyManagerScope": "pod",
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "64Mi"}}],
}
ROUNDS = 20


def kubelet_settings(driver: str, *, signed: bool) -> dict[str, object]:
    """kubelet's configuration: its managers are off, and it accepts only client certificates.

    Args:
        driver: The cgroup driver.
        signed: Its server has a certificate of the test's authority; otherwise it creates its own.
    """
    certificate = {"tlsCertFile": str(CERTS / "server.crt"), "tlsPrivateKeyFile": str(CERTS / "server.key")}
    return {
        **(certificate if signed else {}),
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "cgroupDriver": driver,
        "failCgroupV1": False,
        "cpuManagerPolicy": "none",
        "memoryManagerPolicy": "None",
        "topologyManagerPolicy": "none",
        "reservedSystemCPUs": "0-1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(CERTS / "ca.crt")},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "readOnlyPort": 10255,
        "featureGates": {"PodsAPI": True},
        "staticPodPath": str(MANIFESTS),
        "fileCheckFrequency": "2s",
        "syncFrequency": "10s",
        "failSwapOn": False,
        "evictionHard": {"memory.available": "10Mi"},
        "imageGCHighThresholdPercent": 100,
        "runtimeRequestTimeout": "5m",
    }


def container(name: str, cpu: str, memory: str = "32Mi", *command: str, **more: object) -> dict[str, object]:
    """A container whose limits are its requests."""
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command) or ["sleep", "3600"],
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}},
        **more,
    }


def nodes_of(cpus: CpuSet) -> Mask:
    """The NUMA nodes of CPUs, as sysfs shows them."""
    return Mask([node for node in range(4) if not node_cpus(node).isdisjoint(cpus)])


@dataclass
class KubeletNode:
    """The daemon and kubelet, and queries of both and of the runtime."""

    driver: str
    daemon: GuestDaemon
    direct: Cri = field(default_factory=lambda: Cri(RUNTIME, ""))
    process: subprocess.Popen[bytes] | None = None
    arguments: tuple[str, ...] = ("--hostname-override", "bed")

    def start_kubelet(self, *, signed: bool = True) -> None:
        MANIFESTS.mkdir(parents=True, exist_ok=True)
        Path("/var/log/pods").mkdir(parents=True, exist_ok=True)
        config = Path("/etc/kubelet/config.yaml")
        config.write_text(json.dumps(kubelet_settings(self.driver, signed=signed)))
        self._launch()

        def answers() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:  # kubelet waits only 5 s for the runtime
                step(f"kubelet ended: {Path('/out/kubelet.log').read_text()[-300:]}")
                self._launch()
            return self.has_its_pods()

        step(f"kubelet answers after {wait('kubelet to answer', answers, LONG_S):.1f} s")

    def has_its_pods(self) -> bool:
        """Return whether kubelet answers and has read the manifests of all pods; it may answer before."""
        with suppress(OSError):
            manifests = {path.stem for path in MANIFESTS.glob("*.yaml")}
            return POD_RESOURCES.exists() and self.pods().keys() >= manifests
        return False

    def _launch(self) -> None:
        command = ["/in/kubelet", "--config", "/etc/kubelet/config.yaml", *self.arguments]
        with Path("/out/kubelet.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--v", "2"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMAXPROCS": "2"},
            )

    def stop_kubelet(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(LONG_S)

    def pods(self) -> dict[str, Any]:
        """Return the pods that kubelet reports."""
        with urllib.request.urlopen(f"{READ_ONLY}/pods", timeout=30) as answer:
            items = json.load(answer)["items"] or []
        return {pod["metadata"]["name"].removesuffix("-bed"): pod for pod in items}

    def add(self, name: str, *containers: Mapping[str, object], first: tuple[object, ...] = ()) -> None:
        """Give kubelet a static pod."""
        spec = {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 1,
            "initContainers": list(first),
            "containers": list(containers),
        }
        metadata = {"name": name, "namespace": "default"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        hidden = MANIFESTS / f".{name}"
        hidden.write_text(json.dumps(pod))
        hidden.rename(MANIFESTS / f"{name}.yaml")

    def ids(self) -> dict[str, str]:
        """Running containers by ``pod/container``."""
        return {
            f"{c.labels['io.kubernetes.pod.name'].removesuffix('-bed')}/{c.metadata.name}": c.id
            for c in self.direct.list()
            if c.state == RUNNING and "io.kubernetes.pod.name" in c.labels
        }

    def place(self, name: str, limit: float = LONG_S) -> Place:
        """Wait until a container runs, and return its place."""
        wait(f"{name} to run", lambda: name in self.ids(), limit)
        group, places = group_of(self.ids()[name]), list[Place]()

        def is_settled() -> bool:
            # The files are read one after the other: a cpuset that changes meanwhile is read in parts.
            places.append(place := place_in(group))
            return place.is_at(place.cpus, place.mems)

        wait(f"the tasks of {name} to have its cpuset", is_settled, LONG_S)
        return places[-1]

    def snapshot(self) -> dict[str, tuple[str, Place]]:
        return {name: (i, place_in(group_of(i))) for name, i in sorted(self.ids().items())}

    def records(self, subject: str) -> list[dict[str, Any]]:
        """Return the recorded decisions about a pod, the newest last."""
        text = self.daemon.cli("explain", subject, "--all", "--json").stdout
        return [record["decision"] for record in json.loads(text)["records"]] if text else []

    def sources(self, subject: str) -> set[str]:
        """Return the sources of the facts of the decisions about a pod."""
        return {fact["source"] for record in self.records(subject) for fact in record["facts"]}


def first_pods(node: KubeletNode) -> None:
    """An init container leaves its CPUs to the app; a sidecar with part of a CPU shares."""
    init = container("prepare", "4", "64Mi", "sleep", "3")
    node.add("init", container("main", "4", "64Mi"), first=(init,))
    sidecar = container("side", "250m", restartPolicy="Always")
    main = node.place("init/main")
    node.add("side", container("main", "2"), first=(sidecar,))
    assert (len(main.cpus), main.mems) == (4, nodes_of(main.cpus)), main
    assert len(nodes_of(main.cpus)) == 1, main
    by_name = {r["container"]: r for r in node.records("default/init-bed")}
    assert set(by_name) == {"", "prepare", "main"}, by_name
    assert by_name["prepare"]["cpus"] == by_name["main"]["cpus"] == str(main.cpus), by_name
    step(f"init: prepare had {by_name['prepare']['cpus']}, main has {main.cpus}, memory of {main.mems}")
    print(node.daemon.explain("default/init-bed"), flush=True)

    owner, sharer = node.place("side/main"), node.place("side/side")
    assert (len(owner.cpus), owner.mems) == (2, nodes_of(owner.cpus)), owner
    assert owner.cpus.isdisjoint(sharer.cpus | main.cpus), (owner, sharer)
    assert sharer.cpus == ALL - main.cpus - owner.cpus, sharer
    assert sharer.mems == owner.mems, (sharer, owner)
    step(f"side: main {owner.cpus}, memory of {owner.mems}; side {sharer.cpus}, memory of {sharer.mems}")
    sources = node.sources("default/init-bed") | node.sources("default/side-bed")
    assert any("kubelet" in source for source in sources), sources
    step(f"facts came from: {'; '.join(sorted(sources))}")


def a_refused_pod(node: KubeletNode) -> None:
    """A rejected pod waits at kubelet, and runs once CPUs are free."""
    node.add("big", container("c0", "8", "300Mi"), container("c1", "6", "300Mi"))
    places = [node.place("big/c0"), node.place("big/c1")]
    homes = nodes_of(places[0].cpus | places[1].cpus)
    assert len(homes) == 2, places
    step(f"big: {places[0].cpus} and {places[1].cpus}, memory of {places[0].mems} and {places[1].mems}")
    node.add("six", container("main", "6"))
    six = node.place("six/main")
    assert len(nodes_of(six.cpus)) == 1, six
    node.add("wide", container("main", "3"))
    log = Path("/out/kubelet.log")
    reason = "TopologyAffinityError: Resources cannot be allocated with Topology locality"
    wait("kubelet to log the rejection", lambda: reason in log.read_text(), LONG_S)
    status = node.pods()["wide"]["status"]
    (line, *_) = [line for line in log.read_text().splitlines() if reason in line]
    step(f"kubelet's log: {line[:600]}")
    step(f"kubelet reports: phase {status['phase']}, {json.dumps(status.get('containerStatuses'))}")
    step(
        f"conditions: {[(c['type'], c['status'], c.get('reason', '')) for c in status.get('conditions', [])]}"
    )
    assert status["phase"] == "Pending", status
    assert "wide/main" not in node.ids()
    sandboxes = [pod.metadata.name for pod in node.direct.list_pods()]
    assert "wide-bed" not in sandboxes, "a rejected sandbox does not reach the runtime"
    print(node.daemon.explain("default/wide-bed"), flush=True)
    (MANIFESTS / "six.yaml").unlink()
    place = node.place("wide/main", 2 * LONG_S)
    assert len(nodes_of(place.cpus)) == 1, place
    refusals = log.read_text().count('"RunPodSandbox from runtime service failed"')
    step(f"with free CPUs the pod runs after {refusals} rejections: {place.cpus}, memory of {place.mems}")


def restarts(node: KubeletNode) -> None:
    """A killed container is created again in its sandbox; daemon and kubelet are killed and restarted."""
    before, old = node.place("init/main"), node.ids()["init/main"]
    pid = int((group_of(old) / "cgroup.procs").read_text().split()[0])
    os.kill(pid, 9)
    wait("a new attempt", lambda: node.ids().get("init/main", old) != old, LONG_S)
    after = node.place("init/main")
    assert (after.cpus, after.mems) == (before.cpus, before.mems), (before, after)
    step(f"init/main was killed; its next attempt has {after.cpus}, memory of {after.mems} as before")
    everyone = node.snapshot()
    node.daemon.kill9()
    time.sleep(3)  # nothing must happen, which no event shows
    assert node.snapshot() == everyone
    node.daemon.start()
    wait("the daemon to be ready", lambda: bool(node.daemon.status()["ready"]))
    node.stop_kubelet()
    node.start_kubelet()
    time.sleep(15)  # more than kubelet's sync period of 10 s
    assert node.snapshot() == everyone
    step("the daemon was killed and kubelet restarted: the same containers in the same places")


def other_sources(node: KubeletNode) -> None:
    """The read-only port, the pods API, and TLS with the certificate that kubelet makes itself."""
    with Path("/etc/hosts").open("a") as hosts:
        hosts.write("127.0.0.1 bed\n")
    own = TLS | {"pods": "https://bed:10250", "caFile": str(ROOT / "pki/kubelet.crt")}
    for name, source, settings in (
        ("plain", BY_LIST, {"pods": READ_ONLY}),
        ("api", BY_API, {"podsApi": f"unix://{PODS_API}"}),
        ("own", BY_LIST, own),
    ):
        if name == "own":
            node.stop_kubelet()
            node.start_kubelet(signed=False)
            took = wait("kubelet to answer over TLS", lambda: answers_over_tls(node, own), LONG_S)
            step(f"kubelet answers with its own certificate after {took:.1f} s")
        node.daemon.stop()
        configure(node.daemon, settings)
        node.daemon.start()
        node.add(name, container("main", "1"))
        place = node.place(f"{name}/main")
        reported = node.sources(f"default/{name}-bed")
        assert source in reported, reported
        step(f"{name}: {place.cpus}, known from {'; '.join(sorted(reported))}")


def report(message: str, **context: object) -> None:
    """Print a problem of a client of kubelet."""
    print(message, context, flush=True)


def answers_over_tls(node: KubeletNode, settings: Mapping[str, str]) -> bool:
    """Whether kubelet answers within the daemon's time limit; after its start it is busy with its pods."""
    files = (settings[key] for key in ("caFile", "certFile", "keyFile"))
    client = KubeletClient(KubeletSettings(settings["pods"], "", "", "", *files, timeout=5.0), report)
    pod = node.pods()["init"]["metadata"]
    return client.pod_requests(pod["uid"], "default", pod["name"]) is not None


def configure(daemon: GuestDaemon, kubelet: Mapping[str, object]) -> None:
    more = {"podResources": f"unix://{POD_RESOURCES}", "timeout": "5s"} if kubelet else {}
    daemon.configure(**SETTINGS, kubelet={**kubelet, **more})


def median_ms(what: Callable[[], object]) -> str:
    """Time a call: median and range of many, in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        what()
        times.append((time.perf_counter() - begin) * 1000)
    return f"{statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"


def timings(node: KubeletNode) -> None:
    """Measure a query of kubelet, and a refused sandbox (no runtime delays it) with a query and without."""
    pod = node.pods()["init"]["metadata"]
    tls = KubeletSettings(SECURE, "", "", "", TLS["caFile"], TLS["certFile"], TLS["keyFile"], timeout=60.0)
    queries = {
        "the list over TLS": tls,
        "the list at the read-only port": KubeletSettings(READ_ONLY, timeout=60.0),
        "the pods API": KubeletSettings("", str(PODS_API), timeout=60.0),
    }
    for what, settings in queries.items():
        # A new client for each list: a client caches the list for a second.
        shared = KubeletClient(settings, report)

        def query(settings: KubeletSettings = settings, shared: KubeletClient = shared) -> None:
            client = KubeletClient(settings, report) if settings.pods_url else shared
            assert client.pod_requests(pod["uid"], "default", pod["name"]) is not None

        query()
        step(f"{what}: {median_ms(query)}")
    client = KubeletClient(KubeletSettings(pod_resources=str(POD_RESOURCES), timeout=60.0), report)
    assert client.devices("default", pod["name"], "main") is not None
    step(f"pod resources: {median_ms(lambda: client.devices('default', pod['name'], 'main'))}")
    total = {"cpu_period": 100_000, "cpu_quota": 4_000_000, "cpu_shares": 40_960}
    for what, kubelet in (
        ("kubelet is not queried", {}),
        ("the list over TLS", TLS),
        ("the pods API", {"podsApi": f"unix://{PODS_API}"}),
    ):
        node.daemon.stop()
        configure(node.daemon, kubelet)
        node.daemon.start()
        wait("the daemon to be ready", lambda: bool(node.daemon.status()["ready"]))
        with Cri(SOCKET, "") as client_:
            names = iter(f"t{i}" for i in range(ROUNDS + 1))

            def one(client_: Cri = client_, names: Iterator[str] = names) -> None:
                status, _ = refusal(lambda: client_.run_pod(next(names), resources=total))
                assert status is grpc.StatusCode.FAILED_PRECONDITION

            one()
            step(f"a rejected RunPodSandbox, {what}: {median_ms(one)}")


def main() -> None:
    version = subprocess.check_output(["/in/kubelet", "--version"], text=True).strip()
    step(f"{version}, CPUs {ALL}, nodes {' '.join(str(node_cpus(n)) for n in range(4))}")
    kubelet = {**TLS, "podResources": f"unix://{POD_RESOURCES}", "timeout": "5s"}
    node = KubeletNode(sys.argv[1], GuestDaemon(**SETTINGS, kubelet=kubelet))
    node.start_kubelet()
    first_pods(node)
    a_refused_pod(node)
    restarts(node)
    timings(node)
    other_sources(node)
    node.stop_kubelet()
    assert node.daemon.stop() == 0
    step("the scenario ends well")


if __name__ == "__main__":
    main()
