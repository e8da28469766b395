"""The scenario of devices beside a real kubelet that has device plugins too, in a machine of 4 NUMA nodes.

kubelet's CPU, memory and topology managers are off; its device manager is on. Two plugins register with
kubelet: virtual functions, two on each node, and the sample of Kubernetes, which reports no nodes. One
plugin registers with topoproxy. Under ``single-numa-node`` a pod's CPUs, memory and devices of topoproxy are
on the node of the devices that kubelet allocated. Then each resource is registered with both managers, and
daemon and kubelet are restarted. topoproxy must not change kubelet's sockets and checkpoint.

    python3 vm_devices_beside_kubelet.py cgroupfs|systemd

Needs /in/kubelet (1.34 or later), /in/sample-device-plugin and /in/network_vfs.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vm_devices import DEVICES, PLUGIN, RESOURCE, SOCKETS, GuestPluginProcess, healthy, holders
from vm_guest import ALL, DIRECTORY, LONG_S, GuestDaemon, group_of, step, wait
from vm_kubelet import MANIFESTS, POD_RESOURCES, READ_ONLY, ROOT, KubeletNode, container, nodes_of
from vm_takeover import LOG, TakeoverNode
from vm_topology import SETTINGS

from proxy.backends.kubelet.channel import UnixChannel
from proxy.backends.kubelet.pod_resources import PodResources
from proxy.model.idset import Mask

VF, SAMPLE = "example.com/vf", "example.com/resource"
SAMPLE_PLUGIN = ("sh", "-c", "until /in/sample-device-plugin; do sleep 1; done")
"""The sample ends if kubelet cannot connect to it within ten seconds; a DaemonSet starts it again."""
KUBELET_PLUGINS = ROOT / "device-plugins"
CHECKPOINT = KUBELET_PLUGINS / "kubelet_internal_checkpoint"
PCI = DIRECTORY / "sys/bus/pci/devices"
VFS = {f"0000:4{card}:00.{number}": 3 - card for card in range(4) for number in (1, 2)}
"""The NUMA node of each virtual function, in another order than CPUs are allocated."""
TOPOPROXY_SETTINGS: dict[str, object] = {
    **SETTINGS,
    "topologyManagerPolicy": "single-numa-node",
    "kubelet": {
        "stateDir": str(ROOT),
        "pods": READ_ONLY,
        "podResources": f"unix://{POD_RESOURCES}",
        "timeout": "5s",
    },
    "devicePlugins": {"enabled": True, "socketDirectory": str(SOCKETS), "timeout": "60s"},
}
REGISTERED = "Got registration request from device plugin with resource"
"""kubelet's log (kubernetes v1.36 pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go)."""
POD_RESOURCES_CLIENT = PodResources(UnixChannel(str(POD_RESOURCES), 60.0))


def plug_in_cards() -> None:
    """Make a PCI bus with a network card on each node, which has two virtual functions."""
    for card in range(4):
        net = PCI / f"0000:4{card}:00.0/net/eth{card}"
        net.mkdir(parents=True)
        (net / "operstate").write_text("up")
        (net.parents[1] / "class").write_text("0x020000")
    for name, node in VFS.items():
        function = PCI / name
        function.mkdir()
        (function / "numa_node").write_text(str(node))
        (function / "driver").symlink_to("../../drivers/iavf")
        (function / "physfn").symlink_to(f"../{name[:-1]}0")


def vfs_plugin(directory: Path) -> list[str]:
    """Return the command of the plugin for virtual functions."""
    place = ["--sysfs-root", str(PCI.parents[2]), "--directory", str(directory)]
    return [sys.executable, "network_vfs.py", "--resource", VF, *place]


@contextmanager
def running(name: str, *command: str) -> Iterator[Path]:
    """Run a program; gives the file with its log."""
    log = Path(f"/out/{name}.log")
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield log
        assert process.poll() is None, f"{name} ended: {log.read_text()[-2000:]}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(LONG_S)


def kubelet_lists() -> dict[str, set[str]]:
    """Return kubelet's allocatable devices by resource."""
    found: dict[str, set[str]] = {}
    for group in POD_RESOURCES_CLIENT.allocatable_resources().devices:
        found.setdefault(group.resource_name, set()).update(group.device_ids)
    return {resource: ids for resource, ids in found.items() if ids}


def kubelet_allocations() -> dict[str, dict[str, set[str]]]:
    """Return the devices of each pod by resource, as kubelet reports them."""
    return {
        pod.name.removesuffix("-bed"): {
            resource: {
                name for each in main.devices if each.resource_name == resource for name in each.device_ids
            }
            for resource in {each.resource_name for each in main.devices}
        }
        for pod in POD_RESOURCES_CLIENT.pods().pod_resources
        for main in pod.containers
    }


def kubelets_files() -> dict[str, object]:
    """Return the files in kubelet's plugin directory, its checkpoint, and the number of registrations.

    Waits until kubelet has written nothing there for a second. kubelet writes its checkpoint shortly after it
    lists the devices, to a temporary file that it renames.
    """
    found: list[dict[str, object]] = []

    def unchanged() -> bool:
        try:
            files = {
                file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in KUBELET_PLUGINS.iterdir()
            }
        except FileNotFoundError:
            found.clear()
            return False
        found.append(
            {**files, "checkpoint": CHECKPOINT.read_bytes(), "registered": LOG.read_text().count(REGISTERED)}
        )
        if found[-2:-1] == found[-1:]:
            return True
        time.sleep(1)
        return False

    wait("kubelet to have written its files", unchanged)
    return found[-1]


def environment(node: KubeletNode, pod: str, name: str) -> set[str]:
    """Return the devices in a variable of the container's process."""
    procs, found = group_of(node.ids()[f"{pod}/main"]) / "cgroup.procs", set[str]()

    def is_there() -> bool:
        """Return whether the process already runs the container's program, with its environment."""
        environ = Path(f"/proc/{procs.read_text().split()[0]}/environ").read_text()
        for entry in environ.split("\0"):
            if entry.startswith(f"{name}="):
                found.update(entry.partition("=")[2].split(","))
        return bool(found)

    wait(f"the environment of {pod}", is_there)
    return found


def add(node: KubeletNode, pod: str, cpus: int, **devices: int) -> None:
    """Add a pod that requests devices: ``vf``, ``card``, ``resource``."""
    limits = {"cpu": str(cpus), "memory": "32Mi", **{f"example.com/{n}": str(k) for n, k in devices.items()}}
    node.add(pod, container("main", str(cpus)) | {"resources": {"requests": limits, "limits": limits}})


def phase_of(node: KubeletNode, pod: str) -> str:
    """The phase of a pod as kubelet reports it; empty if kubelet does not list the pod yet."""
    return str(node.pods().get(pod, {}).get("status", {}).get("phase", ""))


def check_aligned(node: KubeletNode, pod: str) -> Mask:
    """Check that CPUs, memory and devices of a pod are on the node of kubelet's devices; returns the node."""
    place = node.place(f"{pod}/main", 2 * LONG_S)
    vfs = environment(node, pod, "PCIDEVICE_EXAMPLE_COM_VF")
    assert kubelet_allocations()[pod] == {VF: vfs}, (pod, kubelet_allocations(), vfs)
    home = Mask({VFS[name] for name in vfs})
    assert len(home) == 1, f"kubelet asks the plugin, which prefers functions of one card: {vfs}"
    assert (nodes_of(place.cpus), place.mems) == (home, home), f"{pod}: {place}, {vfs}"
    cards = {card for card, containers in holders().items() if containers == [f"default/{pod}-bed/main"]}
    assert {DEVICES[card] for card in cards} <= set(home), f"{pod}: {cards}, {vfs}"
    devices = " ".join(sorted(vfs | cards))
    step(f"{pod}: CPUs {place.cpus}, memory of {place.mems}, {devices}")
    return home


def listed_devices(node: KubeletNode) -> dict[str, dict[str, Any]]:
    """Return the devices in the output of ``topoproxy devices``, by resource and id."""
    page = json.loads(node.daemon.cli("devices", "--json").stdout)
    assert page["kubelet"] == {"asked": True, "problem": ""}, page
    return {
        f"{plug['resource']}={plug['id']}": each for each in page["devices"] for plug in each["resources"]
    }


def check_listed_devices(node: KubeletNode) -> None:
    """Check that each device is listed with its manager, node, health and container."""
    print(node.daemon.cli("devices").stdout, flush=True)
    found, gave, ours = listed_devices(node), kubelet_allocations(), holders()
    names = {VF: VFS, SAMPLE: {"Dev-1": None, "Dev-2": None}}
    for resource, nodes in names.items():
        for name, numa_node in nodes.items():
            has = [f"default/{pod}-bed/main" for pod, has in gave.items() if name in has.get(resource, ())]
            each = found[f"{resource}={name}"]
            assert (each["managers"], each["containers"]) == (["kubelet"], has), each
            assert (each["numa"], each["health"]) == (
                None if numa_node is None else [numa_node],
                "healthy",
            ), each
    for name, numa_node in DEVICES.items():
        each = found[f"{RESOURCE}={name}"]
        assert (each["managers"], each["containers"]) == (["topoproxy"], ours[name]), each
        assert (each["numa"], each["health"]) == ([numa_node], "healthy"), each


def refusals(node: KubeletNode) -> dict[str, str]:
    """Return the resources that the daemon rejects, with the reasons; the status reports them, too."""
    status = node.daemon.status()
    found = {each["resource"]: each["reason"] for each in status["devicePlugins"]["refused"]}
    reported = " ".join(problem["what"] for problem in status["problems"])
    assert all(reason in reported for reason in found.values()), (found, reported)
    return found


def register_kubelets_resource_with_the_daemon(node: KubeletNode) -> None:
    """A plugin whose resource kubelet manages is rejected."""
    before, gave = kubelets_files(), kubelet_allocations()
    reason = f"cannot manage {VF}: kubelet's device manager manages it too ({len(VFS)} devices)"
    with running("vfs-here", *vfs_plugin(SOCKETS)) as log:
        wait("the plugin to be rejected", lambda: reason in log.read_text())
        assert refusals(node)[VF].startswith(reason), refusals(node)
        assert "register with kubelet or with topoproxy" in refusals(node)[VF]
        assert reason in node.daemon.cli("devices").stdout
        check_listed_devices(node)
    assert (kubelets_files(), kubelet_allocations()) == (before, gave)
    step(f"refused: {refusals(node)[VF]}")


def register_the_daemons_resource_with_kubelet(node: KubeletNode) -> None:
    """topoproxy withdraws its resource while kubelet manages it too; containers keep their devices."""
    ours, gave, everyone = holders(), kubelet_allocations(), node.snapshot()
    reason = f"cannot manage {RESOURCE}: kubelet's device manager manages it too ({len(DEVICES)} devices)"
    with running(
        "cards-there", sys.executable, "file_plugin.py", str(PLUGIN), str(KUBELET_PLUGINS), RESOURCE
    ):
        wait("the resource to be withdrawn", lambda: RESOURCE in refusals(node))
        assert refusals(node)[RESOURCE].startswith(reason), refusals(node)
        assert healthy() == 0
        step(f"withdrawn: {refusals(node)[RESOURCE]}")
    wait("the resource to be served again", lambda: healthy() == len(DEVICES))
    assert RESOURCE not in refusals(node)
    assert (holders(), kubelet_allocations(), node.snapshot()) == (ours, gave, everyone)
    step("kubelet has lost the resource: topoproxy serves it again, and containers kept their devices")

    add(node, "early", 1, card=1)
    wait("kubelet to reject a pod", lambda: phase_of(node, "early") == "Failed")
    status = node.pods()["early"]["status"]
    assert RESOURCE in status["message"], status
    step(f"for five minutes kubelet rejects such pods: {status['reason']}: {status['message']}")


def main() -> None:
    version = subprocess.check_output(["/in/kubelet", "--version"], text=True).strip()
    step(f"{version}, CPUs {ALL}")
    plug_in_cards()
    (PLUGIN / "devices").mkdir(parents=True)
    (PLUGIN / "library").mkdir()
    ours = GuestPluginProcess()
    for name in DEVICES:
        ours.device(name, "healthy")
    node = TakeoverNode(sys.argv[1], GuestDaemon(**TOPOPROXY_SETTINGS))
    node.start_with_policy("none")
    os.environ["GOMAXPROCS"] = "2"
    with running("vfs", *vfs_plugin(KUBELET_PLUGINS)), running("sample", *SAMPLE_PLUGIN):
        kubelets = {VF: set(VFS), SAMPLE: {"Dev-1", "Dev-2"}}
        wait("kubelet's plugins", lambda: kubelet_lists() == kubelets)
        before = kubelets_files()
        ours.start()
        wait("topoproxy's plugin", lambda: healthy() == len(DEVICES))
        assert kubelets_files() == before
        step("kubelet has two plugins, topoproxy has one")

        homes = Mask()
        for pod in ("a", "b", "c"):
            add(node, pod, 4, vf=2)
            homes |= check_aligned(node, pod)
        add(node, "both", 4, vf=2, card=2)
        homes |= check_aligned(node, "both")
        assert homes == Mask(range(4)), "kubelet has allocated the functions of every node"
        assert len(environment(node, "both", "DEVICES")) == 2
        print(node.daemon.explain("default/both-bed"), flush=True)
        add(node, "plain", 1, resource=1)
        node.place("plain/main")
        check_listed_devices(node)
        register_kubelets_resource_with_the_daemon(node)

        everyone, gave, holders_before, files = (
            node.snapshot(),
            kubelet_allocations(),
            holders(),
            kubelets_files(),
        )
        node.daemon.kill9()
        node.daemon.start()
        wait("topoproxy's plugin to register again", lambda: healthy() == len(DEVICES))
        assert (node.snapshot(), kubelet_allocations(), holders()) == (everyone, gave, holders_before)
        assert kubelets_files() == files
        step("the daemon was killed: kubelet's sockets, checkpoint and registrations are unchanged")
        node.stop_kubelet()
        assert CHECKPOINT.read_bytes() == files["checkpoint"]
        node.start_with_policy("none")
        wait("kubelet's plugins to register again", lambda: kubelet_lists() == kubelets)
        wait("kubelet's account of its pods", lambda: kubelet_allocations() == gave)
        assert (node.snapshot(), kubelet_allocations(), holders()) == (everyone, gave, holders_before)
        assert healthy() == len(DEVICES)
        assert refusals(node) == {}
        check_listed_devices(node)
        step("kubelet was restarted: the same containers with the same devices")

        (freed,) = {VFS[name] for name in gave["both"][VF]}
        (MANIFESTS / "both.yaml").unlink()
        wait(
            "the devices to be free",
            lambda: "both" not in kubelet_allocations() and not any(holders().values()),
            2 * LONG_S,
        )
        add(node, "next", 4, vf=2, card=2)
        assert check_aligned(node, "next") == Mask([freed])
        check_listed_devices(node)
        register_the_daemons_resource_with_kubelet(node)
        assert node.daemon.status()["violations"] == []
        ours.kill9()
    node.stop_kubelet()
    assert node.daemon.stop() == 0
    step("the scenario ends well")


if __name__ == "__main__":
    main()
