"""The daemon on machines with several NUMA nodes, in virtual machines with cgroup v1 or v2.

They do not run by default, because a scenario takes minutes. To run all of them (the disk is built if
necessary):

    make test-vm
    make test-vm PYTEST_ARGS="-k topology"
    make test-vm SCENARIOS=quick

The quick ones cover most in the least time, on some kinds of machines; CI runs them. A new scenario is quick
only if ``QUICK`` marks it.

``TOPOPROXY_KUBELET=PROGRAM`` names a kubelet (1.34 or later) for the tests that need one, and
``TOPOPROXY_VM_DIR=DIRECTORY`` the directory of the disks (default: below the user's cache). The guest's
Python runs the built wheel with the dependencies of this environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "vm"))

import disk
import images
from crio import DIRECTORY as CRIO
from crio import crio_skip_reason
from machine import HOST, NETFILTER, VirtualMachine, import_images, run
from packaging.requirements import Requirement
from sample_plugin import built_sample_plugin

from tests.cluster.control_plane import control_plane_skip_reason
from tests.cluster.joining_machine import cluster_for_a_machine

HERE = Path(__file__).parent
REPO = HERE.parents[1]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
DISKS = Path(os.environ.get("TOPOPROXY_VM_DIR") or CACHE / "topoproxy-vm")
KUBELET = Path(os.environ.get("TOPOPROXY_KUBELET") or "absent")
NO_KUBELET = "no kubelet: name the program in TOPOPROXY_KUBELET"
LIMIT_S = 2700
FOUR_NODES = VirtualMachine(distances=True)
"""2 sockets with 2 NUMA nodes of 8 CPUs each."""
KINDS = ("v2-cgroupfs", "v2-systemd", "v1-cgroupfs")
RARE_KINDS = ("v1-systemd", "hybrid-cgroupfs", "hybrid-systemd")
SELECTED = os.environ.get("TOPOPROXY_VM") or ""
"""Which scenarios run: ``all`` (or ``1``), ``quick``, or none."""
QUICK = pytest.mark.quick


BUILD_DEB = """
import sys
from pathlib import Path
sys.path[:0] = [".", "packages"]
import deb
out, version, python = sys.argv[1:]
deb.build(Path(out), version, "amd64", 1795000000, (python,))
"""


def kinds(*quick: str) -> list[object]:
    """Return all kinds of machines as parameters; the named ones are marked as quick."""
    return [pytest.param(kind, marks=QUICK) if kind in quick else kind for kind in KINDS]


def skip_reason(test: pytest.Item) -> str:
    """Return why a scenario cannot run; an empty string if it can."""
    if SELECTED not in ("all", "1") and (SELECTED != "quick" or test.get_closest_marker("quick") is None):
        return "takes minutes: run it with make test-vm"
    if shutil.which("qemu-system-x86_64") is None:
        return "not installed: qemu-system-x86"
    return "" if disk.is_built(disk.place_in(DISKS)) else disk.why_not()


def needed(name: str, found: set[str]) -> set[str]:
    """Return the names of a distribution and its dependencies, without those of extras."""
    if name not in found:
        found.add(name)
        for requirement in map(Requirement, distribution(name).requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)
    return found


def add_distributions(tar: tarfile.TarFile, names: set[str]) -> None:
    """Add the files of distributions to a tar, in a directory ``site``."""
    for name in names:
        for file in distribution(name).files or []:
            path = Path(str(file.locate()))
            if ".." not in file.parts and path.is_file():
                tar.add(path, f"site/{file}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar with the wheel and its dependencies, with compiled modules, because the guest compiles slowly."""
    directory = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=REPO, check=True, capture_output=True, timeout=120)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(directory / "site")
    compiled = [sys.executable, "-m", "compileall", "-q", str(directory / "site")]
    subprocess.run(compiled, check=True, timeout=120)
    with tarfile.open(directory / "site.tar", "w") as tar:
        tar.add(directory / "site", "site")
        add_distributions(tar, needed("topoproxy", set()) - {"topoproxy"})
    return directory / "site.tar"


@pytest.fixture(scope="module")
def directory() -> Path:
    """The directory of the disk, which is built if necessary."""
    place = disk.place_in(DISKS)
    disk.build(place, import_images)
    return place


@pytest.fixture
def scenario(request: pytest.FixtureRequest, tmp_path: Path) -> VmScenario:
    """Runs scenarios in machines; the first one builds the disk and the tar."""
    if reason := skip_reason(request.node):
        pytest.skip(reason)
    return VmScenario(request.getfixturevalue("directory"), request.getfixturevalue("site"), tmp_path / "out")


@dataclass(frozen=True)
class VmScenario:
    """Runs a scenario in a machine.

    Attributes:
        directory: The directory of the disk.
        site: The tar of the fixture ``site``.
        out: The directory for the guest's results.
    """

    directory: Path
    site: Path
    out: Path

    def ends_well(
        self,
        kind: str,
        job: str,
        machine: VirtualMachine = FOUR_NODES,
        carried: Mapping[str, Path] | None = None,
        end: str = "all is given back",
        limit: float = LIMIT_S,
    ) -> None:
        """Run a scenario, which must succeed.

        Args:
            kind: Cgroup version and driver, as ``v2-systemd``; the driver is the scenario's argument.
            job: The scenario's file.
            machine: The other properties of the machine.
            carried: Further files of the scenario.
            end: The message that the scenario prints last.
            limit: Seconds that it may take.
        """
        cgroup, driver = kind.split("-")
        helpers = [HERE / "cri.py", *HERE.glob("vm_*.py")]
        carry = {path.name: path for path in (self.site, *helpers)} | dict(carried or {})
        settings = "TOPOPROXY_PATIENCE_S=600 PYTHONPATH=/opt/site"
        status, output = run(
            replace(machine, cgroup=cgroup, driver=driver),
            self.directory,
            f"tar xf site.tar -C /opt && {settings} python3 {job} {driver}",
            carry,
            self.out,
            limit,
            lambda line: print(f"  {kind}  {line}", flush=True),
        )
        log = self.out / "proxy.log"
        log_text = log.read_text()[-3000:] if log.is_file() else output
        assert status == 0, f"status {status}: {log_text}"
        assert end in output


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd"])
def test_partitions(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_partitions.py", VirtualMachine(1, 2, 4, 1))


@pytest.mark.parametrize("kind", [*kinds("v2-systemd", "v1-cgroupfs"), *RARE_KINDS])
def test_pools(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_pools.py")


@pytest.fixture(scope="module")
def crio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CRI-O's programs, and their dependencies that the disk lacks."""
    if reason := crio_skip_reason() if CRIO else "no CRI-O: name its directory in TOPOPROXY_CRIO":
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("crio") / "crio-programs"
    directory.mkdir()
    conmon = shutil.which("conmon") or "conmon"
    output = subprocess.check_output(["ldd", conmon], text=True)
    libraries = re.findall(r"=> (/\S+)", output)
    for file in (Path(CRIO, "crio"), Path(CRIO, "pinns"), conmon, "/bin/busybox", *libraries):
        shutil.copy(file, directory)
    return directory


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd"])
def test_pools_on_crio(scenario: VmScenario, crio: Path, kind: str) -> None:
    carried = {
        path.name: path
        for path in (crio, HERE / "private_runtime.py", HERE / "crio.py", Path(images.__file__))
    }
    scenario.ends_well(kind, "vm_crio.py vm_pools.py", carried=carried)


def test_pools_when_some_controllers_are_on_v2(scenario: VmScenario) -> None:
    """Some controllers are on v2 only: the daemon must use cpuset, cpu and memory of v1."""
    mixed = VirtualMachine(kernel="cgroup_no_v1=blkio,hugetlb,pids")
    scenario.ends_well("hybrid-cgroupfs", "vm_pools.py", mixed)


@pytest.mark.parametrize("kind", KINDS)
def test_topology_manager(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_topology.py", replace(FOUR_NODES, cards=(3,)))


@pytest.mark.parametrize("kind", KINDS)
def test_devices(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_devices.py", carried={"file_plugin.py": HERE / "file_plugin.py"})


@pytest.mark.parametrize("kind", KINDS)
def test_suppression(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_be_suppression.py")


@pytest.mark.parametrize("kind", KINDS)
def test_quotas(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_quota.py")


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd", "v1-cgroupfs"])
def test_release(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_release.py")


@pytest.mark.parametrize("kind", kinds("v2-cgroupfs"))
def test_odd_machine(scenario: VmScenario, kind: str) -> None:
    odd = VirtualMachine(
        cores=2, memory_only=1, without_memory=(2,), distances=True, cards=(3,), kernel="isolcpus=12-13"
    )
    scenario.ends_well(kind, "vm_odd_machine.py", odd)


@pytest.mark.parametrize("kind", KINDS)
def test_machine_changes(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_hotplug.py", VirtualMachine(nodes=1, plugged=256, distances=True))


@pytest.mark.parametrize("kind", kinds("v2-cgroupfs"))
def test_kills_during_calls(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_crash.py", VirtualMachine(sockets=2, nodes=1))


@pytest.mark.parametrize("kind", ["v2-systemd"])
def test_cpusets_last(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_unit_properties.py", VirtualMachine(sockets=2, nodes=1))


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd"])
def test_drift(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_drift.py", VirtualMachine(sockets=2, nodes=1))


@pytest.mark.parametrize("kind", ["v2-systemd", "v1-systemd"])
def test_shipped_units(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_unit.py", VirtualMachine(sockets=2, nodes=1), {"systemd": REPO / "systemd"})


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd"])
def test_hooks(scenario: VmScenario, kind: str) -> None:
    scenario.ends_well(kind, "vm_hooks.py", VirtualMachine(sockets=2, nodes=1))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority, and its certificates for kubelet's server and for the daemon's client."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("certs")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    signed = ["-CA", str(directory / "ca.crt"), "-CAkey", str(directory / "ca.key")]
    for name, subject, more in (
        ("ca", "/CN=made-authority", []),
        ("server", "/CN=bed", [*signed, "-addext", "subjectAltName=IP:127.0.0.1,DNS:bed"]),
        ("client", "/O=topoproxy/CN=topoproxy", [*signed, "-addext", "extendedKeyUsage=clientAuth"]),
    ):
        files = ["-keyout", str(directory / f"{name}.key"), "-out", str(directory / f"{name}.crt")]
        run = [openssl, "req", "-x509", *key, "-subj", subject, *more, *files]
        subprocess.run(run, check=True, capture_output=True)
    return directory


def beside_kubelet(scenario: VmScenario, kind: str, job: str, **carried: Path) -> None:
    """Run a scenario that needs a real kubelet."""
    if not KUBELET.is_file():
        pytest.skip(NO_KUBELET)
    machine = replace(FOUR_NODES, modules=NETFILTER)
    scenario.ends_well(kind, job, machine, {"kubelet": KUBELET, **carried}, "the scenario ends well")


@pytest.mark.parametrize("kind", ["v2-cgroupfs"])
def test_kubelet(scenario: VmScenario, certificates: Path, kind: str) -> None:
    beside_kubelet(scenario, kind, "vm_kubelet.py", certs=certificates)


@pytest.mark.parametrize("kind", ["v2-cgroupfs"])
def test_takeover(scenario: VmScenario, kind: str) -> None:
    beside_kubelet(scenario, kind, "vm_takeover.py")


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v1-cgroupfs", "v2-systemd"])
def test_beside_kubelet(scenario: VmScenario, kind: str) -> None:
    beside_kubelet(scenario, kind, "vm_beside_kubelet.py")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two directories with a Debian package each: this version and a later one."""
    made = {}
    for name in ("old", "new"):
        copy, out = tmp_path_factory.mktemp("copy") / "tree", tmp_path_factory.mktemp(name)
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=REPO, text=True).split("\0")
        for file in filter(None, tracked):
            if not file.startswith("tests/"):
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / file, copy / file)
        init = copy / "proxy/__init__.py"
        version = re.search(r'__version__ = "(.*)"', init.read_text())
        assert version is not None
        number = version[1] if name == "old" else "99.0.0"
        init.write_text(init.read_text().replace(version[1], number))
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        command = [sys.executable, "-c", BUILD_DEB, str(out), number, python]
        subprocess.run(command, cwd=copy, check=True, timeout=300)
        made[name] = out
    return made


@pytest.mark.parametrize("kind", ["v2-systemd"])
@pytest.mark.parametrize("way", ["hand", "chart"])
def test_a_node_from_the_package_to_the_purge(
    scenario: VmScenario, request: pytest.FixtureRequest, way: str, kind: str
) -> None:
    if not KUBELET.is_file():
        pytest.skip(NO_KUBELET)
    packages: dict[str, Path] = request.getfixturevalue("packages")  # built only if they are used
    machine = VirtualMachine(sockets=2, nodes=1, threads=1, memory=1024, modules=NETFILTER)
    carried = {
        "kubelet": KUBELET,
        **packages,
        "README.md": REPO / "README.md",
        "chart/node.sh": REPO / "deploy/helm/topoproxy/files/node.sh",
        "chart/turn.py": REPO / "deploy/helm/topoproxy/files/turn.py",
        "chart/leases.py": REPO / "tests/deploy/leases.py",
    }
    scenario.ends_well(kind, f"vm_node.py {way}", machine, carried, "the scenario ends well")


@pytest.mark.parametrize("kind", ["v2-systemd"])
def test_attach_in_each_layout(scenario: VmScenario, kind: str) -> None:
    if not KUBELET.is_file():
        pytest.skip(NO_KUBELET)
    machine = VirtualMachine(sockets=2, nodes=1, cores=2, threads=1, memory=1024, modules=NETFILTER)
    carried = {
        "kubelet": KUBELET,
        "systemd": REPO / "systemd",
        "chart/leases.py": REPO / "tests/deploy/leases.py",
    }
    scenario.ends_well(kind, "vm_attach.py", machine, carried, "the scenario ends well", 1500)


@pytest.fixture
def plugins() -> list[Path]:
    """The programs of the device plugins."""
    if not KUBELET.is_file():
        pytest.skip(NO_KUBELET)
    return [built_sample_plugin(), HERE / "file_plugin.py", REPO / "examples/network_vfs.py"]


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd", "v1-cgroupfs"])
def test_devices_beside_kubelet(scenario: VmScenario, plugins: list[Path], kind: str) -> None:
    beside_kubelet(scenario, kind, "vm_devices_beside_kubelet.py", **{path.name: path for path in plugins})


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd"])
def test_cluster(scenario: VmScenario, tmp_path: Path, kind: str) -> None:
    """A node in a cluster in which no other NUMA node has enough free CPUs; the control plane runs here."""
    reason = control_plane_skip_reason("kube-scheduler", "kube-controller-manager")
    if reason or not KUBELET.is_file():
        pytest.skip(reason or NO_KUBELET)
    with tarfile.open(tmp_path / "agent.tar", "w") as tar:
        add_distributions(tar, needed("lightkube", set()))
    with cluster_for_a_machine(tmp_path, HOST) as (bed, given):
        carried = {
            "kubelet": KUBELET,
            "agent.tar": tmp_path / "agent.tar",
            "cluster": given,
            "tests/cluster/api_client.py": REPO / "tests/cluster/api_client.py",
        }
        machine = replace(FOUR_NODES, modules=NETFILTER, network=True)
        scenario.ends_well(kind, "vm_cluster.py", machine, carried, "the scenario ends well", 1500)
        assert not bed.fleet.rejected
        assert bed.fleet.double_bookings() == 0
