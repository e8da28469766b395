"""``topoproxy devices``: with and without a daemon, as text and as JSON; docs/devices.md shows this node."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from proxy.allocation.devices.state import RegisteredDevice
from proxy.api.kubelet import podresources_pb2 as pb
from proxy.cli.main import cli, run_command_line
from proxy.demo.client import DemoPod
from proxy.engine.node_events import DevicesChanged
from proxy.model.errors import InputError
from proxy.model.idset import Mask
from proxy.model.workload import KubeQos
from proxy.topology.sysfs_writer import write_sysfs
from tests.testkit.answers import check_answer
from tests.testkit.daemon import MACHINE, DaemonNode, run, temporary_node
from tests.testkit.pci_tree import PciTree

PAGE = Path(__file__).parents[2] / "docs/devices.md"
CONSOLE = re.compile(r"^```console\n\$ (topoproxy devices[^\n]*)\n(.*?)^```", re.M | re.S)
UUIDS = [f"GPU-{n}1111111-2222-3333-4444-555555555555" for n in (0, 1)]
VFS = ["0000:5e:00.2", "0000:5e:00.3"]
TRAIN = DemoPod("train", kube_qos=KubeQos.GUARANTEED, cpus=2)
SERVE = DemoPod("serve", kube_qos=KubeQos.GUARANTEED, cpus=2)


def write_machine(root: Path) -> Path:
    """Two GPUs, a network card with two virtual functions, a disk, a bridge, an onboard graphics chip."""
    write_sysfs(MACHINE, root)
    pci, nvidia = PciTree(root / "sys"), "0x10de:0x2330"
    pci.add("0000:00:00.0", "0x060000", ids="0x8086:0x09a2")
    pci.add("0000:02:00.0", "0x030000", ids="0x1a03:0x2000", driver="ast", names=("drm/card0",))
    pci.add("0000:3b:00.0", "0x030200", "0", ids=nvidia, driver="nvidia")
    pci.add("0000:5e:00.0", "0x020000", "0", driver="mlx5_core", names=("net/eth1", "infiniband/mlx5_0"))
    for vf in VFS:
        pci.add(vf, "0x020000", "0", ids="0x15b3:0x1018", driver="vfio-pci", physical="0000:5e:00.0")
    pci.add("0000:81:00.0", "0x010802", "1", ids="0x144d:0xa80a", driver="nvme", names=("nvme/nvme0",))
    pci.add("0000:86:00.0", "0x030200", "1", ids=nvidia, driver="nvidia")
    for minor, address in enumerate(("0000:3b:00.0", "0000:86:00.0")):
        information = root / "proc/driver/nvidia/gpus" / address / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"GPU UUID: \t {UUIDS[minor]}\nDevice Minor: \t {minor}\n")
    return root / "sys"


def group(resource: str, device: str, node: int) -> pb.ContainerDevices:
    return pb.ContainerDevices(
        resource_name=resource,
        device_ids=[device],
        topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)]),
    )


GPUS = [group("nvidia.com/gpu", uuid, node) for node, uuid in enumerate(UUIDS)]
CARDS = [group("example.com/vf", vf, 0) for vf in VFS]


class Kubelet:
    """kubelet's pod-resources API."""

    def __init__(self, path: Path) -> None:
        main = pb.ContainerResources(name="main", devices=[GPUS[0], CARDS[0]])
        claim = pb.ClaimResource(driver_name="nvme.example.com", pool_name="node-1", device_name="nvme-0")
        claim.cdi_devices.add(name="example.com/nvme=0")
        disk = pb.DynamicResource(claim_name="scratch", claim_namespace="demo", claim_resources=[claim])
        serve = pb.ContainerResources(name="main", dynamic_resources=[disk])
        self.pods = {
            name: pb.PodResources(name=name, namespace="demo", containers=[container])
            for name, container in (("train", main), ("serve", serve))
        }
        self.fails = False
        self.server = grpc.server(ThreadPoolExecutor(4))
        methods = {
            "Get": self._get,
            "List": lambda _: pb.ListPodResourcesResponse(pod_resources=self.pods.values()),
            "GetAllocatableResources": lambda _: pb.AllocatableResourcesResponse(devices=[*GPUS, CARDS[0]]),
        }
        handlers = {n: grpc.unary_unary_rpc_method_handler(self._method(m)) for n, m in methods.items()}
        service = grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)
        self.server.add_generic_rpc_handlers((service,))
        assert self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def _get(self, content: bytes) -> Any:
        name = pb.GetPodResourcesRequest.FromString(content).pod_name
        return pb.GetPodResourcesResponse(pod_resources=self.pods[name])

    def _method(self, answer: Callable[[bytes], Any]) -> Callable[[bytes, Any], bytes]:
        def handler(content: bytes, context: Any) -> bytes:
            if self.fails:
                context.abort(grpc.StatusCode.INTERNAL, "out of order")
            result: bytes = answer(content).SerializeToString()
            return result

        return handler


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonNode]:
    with temporary_node() as created:
        directory = created.directory
        (directory / "cdi").mkdir()
        nodes = [{"path": "/sys/bus/pci/devices/0000:81:00.0"}]
        spec = {
            "kind": "example.com/nvme",
            "devices": [{"name": "0", "containerEdits": {"deviceNodes": nodes}}],
        }
        (directory / "cdi/nvme.json").write_text(json.dumps(spec))
        monkeypatch.setattr("proxy.topology.cdi.CDI_ROOTS", (directory / "cdi",))
        write_machine(directory / "machine")
        created.settings = (
            "cpuManagerPolicy: static\ntopologyManagerPolicy: best-effort\nreconcilePeriod: 200ms\n"
            f"sysfsRoot: {directory}/machine/sys\nprocfsRoot: {directory}/machine/proc\n"
        )
        yield created


@pytest.fixture
def kubelet(node: DaemonNode) -> Iterator[Kubelet]:
    created = Kubelet(node.directory / "kubelet.sock")
    node.settings += f"kubelet: {{podResources: 'unix://{node.directory}/kubelet.sock', timeout: 5s}}\n"
    yield created
    created.server.stop(None).wait()


def run_devices(node: DaemonNode, *args: str) -> Result:
    """Run the command with the configuration of the node."""
    config = node.directory / "config.yaml"
    config.write_text(node.configuration())
    config.chmod(0o600)
    return CliRunner().invoke(cli, ["devices", *args, "--config", str(config)], env={"COLUMNS": "160"})


def listed_devices(node: DaemonNode, *args: str) -> dict[str, Any]:
    result = run_devices(node, *args, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    check_answer(answer)
    return {"daemon": answer["daemon"], "kubelet": answer["kubelet"]} | {
        d["name"]: d for d in answer["devices"]
    }


def run_pods_then(daemon: Any, node: DaemonNode, then: Callable[[], Any]) -> None:
    """Run two pods with devices, end one of them, and then call a function in a thread."""

    async def scenario() -> None:
        await node.launch(TRAIN)
        await node.launch(SERVE)
        await asyncio.to_thread(then)

    run(daemon, scenario, reconciled=True)


def test_without_a_daemon_only_the_machine_is_listed(node: DaemonNode) -> None:
    found = listed_devices(node)
    assert not found["daemon"]["answered"]
    assert "no process listens there" in found["daemon"]["problem"]
    gpu, disk = found["0000:3b:00.0"], found["0000:81:00.0"]
    assert (gpu["kind"], gpu["numa"], gpu["l3"]) == ("3D controller", [0], ["0-3,8-11"])
    assert (disk["cdi"], disk["interfaces"]) == (["example.com/nvme=0"], ["nvme0"])
    assert all((d["managers"], d["containers"], d["health"]) == ([], [], None) for d in (gpu, disk))
    assert "0000:00:00.0" not in found
    assert "0000:00:00.0" in listed_devices(node, "--all")
    result = run_devices(node)
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("0000:3b:00.0"))
    assert row.split() == ["0000:3b:00.0", "3D", "controller", "-", "0", "0-3,8-11", *["unknown"] * 3]
    assert "Only the machine is shown: cannot query the daemon" in result.stdout


def test_with_kubelet_containers_managers_and_health_are_known(node: DaemonNode, kubelet: Kubelet) -> None:
    def then() -> None:
        found = listed_devices(node)
        gpu, other = found["0000:3b:00.0"], found["0000:86:00.0"]
        assert (gpu["managers"], gpu["containers"], gpu["health"]) == (
            ["kubelet"],
            ["demo/train/main"],
            "healthy",
        )
        assert (other["containers"], other["containersKnown"]) == ([], True)
        disk = found["0000:81:00.0"]
        assert (disk["managers"], disk["containers"]) == (["DRA"], ["demo/serve/main"])
        assert disk["claims"][0]["claim"] == "demo/scratch"
        assert [h["container"] for h in gpu["history"]] == ["demo/train/main"]
        assert found["0000:5e:00.3"]["health"] is None, "kubelet does not list it"
        assert found["0000:5e:00.3"]["managers"] == []

    run_pods_then(node.daemon(), node, then)


def test_the_history_names_removed_containers(node: DaemonNode, kubelet: Kubelet) -> None:
    daemon: Any = node.daemon()

    async def scenario() -> None:
        container = await node.launch(TRAIN)
        with node.client() as client:
            sandbox = daemon.executor.state.containers[container].pod.sandbox_id
            await asyncio.to_thread(client.end_pod, sandbox)
        del kubelet.pods["train"]
        gpu = (await asyncio.to_thread(listed_devices, node))["0000:3b:00.0"]
        assert (gpu["containers"], gpu["containersKnown"]) == ([], True)
        assert [(h["container"], h["exists"]) for h in gpu["history"]] == [("demo/train/main", False)]
        text = (await asyncio.to_thread(run_devices, node, UUIDS[0])).stdout
        assert re.search(r"history     \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  demo/train/main \(gone\)", text)
        assert "container   none" in text

    run(daemon, scenario, reconciled=True)


def test_without_an_answer_of_kubelet_no_device_is_free(node: DaemonNode, kubelet: Kubelet) -> None:
    def then() -> None:
        kubelet.fails = True
        found = listed_devices(node)
        assert "out of order" in found["kubelet"]["problem"]
        assert (found["0000:86:00.0"]["managers"], found["0000:86:00.0"]["containersKnown"]) == ([], False)
        gpu = found["0000:3b:00.0"]
        assert (gpu["containers"], gpu["containersKnown"]) == (["demo/train/main"], False), "by its request"
        assert gpu["health"] is None
        assert "are unknown: cannot query kubelet" in run_devices(node).stdout

    run_pods_then(node.daemon(), node, then)


@pytest.mark.parametrize("mode", ["observe", "passthrough"])
def test_kubelets_assignments_are_listed_in_other_modes(
    node: DaemonNode, kubelet: Kubelet, mode: str
) -> None:
    daemon: Any = node.daemon(f"mode: {mode}")

    async def scenario() -> None:
        found = await asyncio.to_thread(listed_devices, node)
        assert found["0000:3b:00.0"]["containers"] == ["demo/train/main"]

    run(daemon, scenario)


def test_devices_that_topoproxy_manages_are_shown_and_those_of_two_managers_are_named(
    node: DaemonNode, kubelet: Kubelet
) -> None:
    daemon: Any = node.daemon()
    disk, fast = "0000:81:00.0", VFS[1]
    devices = {
        disk: RegisteredDevice(disk, Mask([1])),
        fast: RegisteredDevice(fast, Mask([0]), healthy=False),
    }

    def then() -> None:
        daemon.executor.store.handle(DevicesChanged("example.com/fast", devices))
        found = listed_devices(node)
        assert (found[fast]["managers"], found[fast]["health"]) == (["topoproxy"], "unhealthy")
        assert found[disk]["managers"] == ["DRA", "topoproxy"]
        text = run_devices(node).stdout
        assert f"Several managers have: {disk}. Only one of them may assign a device" in text
        assert "manager     DRA,topoproxy (conflict: only one" in run_devices(node, disk).stdout

    run_pods_then(daemon, node, then)


NO_DAEMON = (
    "cannot query the daemon at {}: no process listens there"
    " (systemctl status topoproxy shows whether it runs, --admin names another socket)"
)


def test_a_device_is_found_by_each_of_its_names(node: DaemonNode) -> None:
    for name in ("0000:81:00.0", "nvme0", "example.com/nvme=0"):
        assert list(listed_devices(node, name))[2:] == ["0000:81:00.0"]
    result = run_devices(node, "eth7")
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == (
        "cannot show the device eth7: there is no such device among those that are known."
        f" Only the machine is shown: {NO_DAEMON.format(node.directory / 'admin.sock')}"
    )


def test_a_device_that_only_the_daemon_may_know_is_not_denied_without_the_daemon(tmp_path: Path) -> None:
    admin = f"unix://{tmp_path}/admin.sock"
    result = CliRunner().invoke(cli, ["devices", "example.com/gpu", "--admin", admin])
    assert isinstance(result.exception, InputError)
    assert "there is no such device among those that are known. Only the machine is shown:" in str(
        result.exception
    )


def test_another_machine_is_listed_without_this_nodes_daemon_and_specs(
    node: DaemonNode, kubelet: Kubelet
) -> None:
    def then() -> None:
        found = listed_devices(node, "--sysfs-root", str(node.directory / "machine"))
        assert found["daemon"] == {"answered": False, "problem": "--sysfs-root is given"}
        assert found["0000:3b:00.0"]["containers"] == []
        assert found["0000:81:00.0"]["cdi"] == []

    run_pods_then(node.daemon(), node, then)


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not there")
def test_the_page_has_the_output_of_the_command(node: DaemonNode, kubelet: Kubelet) -> None:
    consoles = dict(CONSOLE.findall(PAGE.read_text()))
    assert len(consoles) == 2

    def then() -> None:
        for line, expected in consoles.items():
            reported = run_devices(node, *line.split()[2:]).stdout
            assert re.sub(r"\d{4}-\d\d-\d\d [\d:]{8}", "2026-11-20 10:00:00", reported) == expected

    run_pods_then(node.daemon(), node, then)


def test_an_empty_name_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert run_command_line(["devices", ""]) == 2
    assert capsys.readouterr().err == "topoproxy: cannot show a device without a name\n"


@pytest.mark.usefixtures("removed_directory")
def test_a_relative_sysfs_in_a_directory_that_was_removed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["devices", "--sysfs-root", "sys"]) == 2
    error = "topoproxy: cannot use --sysfs-root sys: the current directory was removed\n"
    assert capsys.readouterr().err == error
    assert run_command_line(["devices", "--sysfs-root", str(write_machine(tmp_path))]) == 0
