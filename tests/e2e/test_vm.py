"""The daemon on a machine with four NUMA nodes, in a virtual machine with cgroup v1 or v2.

Not run by default, because a run takes minutes and a disk must be built before:

    python3 ../shared/testbed/vm-bed.py build --dir FOLDER
    TOPOPROXY_VM=1 TOPOPROXY_VM_DIR=FOLDER make test PYTEST_ARGS=tests/e2e/test_vm.py

``TOPOPROXY_KUBELET=PROGRAM`` names a kubelet (1.34 or later) for the test that wants one. What is tested is
the built wheel, with the dependencies of this environment, on the guest's Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
REPO = HERE.parents[1]
BED = REPO.parent / "shared/testbed/vm-bed.py"
DISK = Path(os.environ.get("TOPOPROXY_VM_DIR") or Path(tempfile.gettempdir(), "vm-bed"))
KUBELET = Path(os.environ.get("TOPOPROXY_KUBELET") or "absent")
GUEST_PYTHON = (3, 11)
LIMIT_S = 1200


def why_not() -> str:
    """Give the reason why no virtual machine can be had, or an empty string."""
    if os.environ.get("TOPOPROXY_VM") != "1":
        return "takes minutes: asked for with TOPOPROXY_VM=1"
    if not BED.is_file():
        return f"no {BED.name} in {BED.parent}"
    if not (DISK / "disk.img").is_file():
        return f"no disk in {DISK}: build one with {BED.name}, and name its folder in TOPOPROXY_VM_DIR"
    if sys.version_info[:2] != GUEST_PYTHON:
        return f"the guest has Python {'.'.join(map(str, GUEST_PYTHON))}, and compiled modules come from here"
    return ""


def needed(name: str, found: set[str]) -> set[str]:
    """The distributions that one needs, itself included (those of extras left out)."""
    if name not in found:
        found.add(name)
        for line in distribution(name).requires or []:
            requirement = re.match(r"[\w.-]+", line)
            if requirement and ";" not in line:
                needed(requirement[0], found)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar with the wheel and what it needs. Compiled files go along: to compile in the guest takes long."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=REPO, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    compiled = [sys.executable, "-m", "compileall", "-q", str(folder / "site")]
    subprocess.run(compiled, check=True, timeout=120)
    with tarfile.open(folder / "site.tar", "w") as tar:
        tar.add(folder / "site", "site")
        for name in needed("topoproxy", set()) - {"topoproxy"}:
            for file in distribution(name).files or []:
                path = Path(str(file.locate()))
                if ".." not in file.parts and path.is_file():
                    tar.add(path, f"site/{file}")
    return folder / "site.tar"


def in_machine(site: Path, out: Path, kind: str, job: str, *more: str) -> str:
    """Run a story in a machine of 2 sockets with 2 NUMA nodes of 8 CPUs each.

    Args:
        site: The tar of ``site``.
        out: Where the guest's results go.
        kind: Cgroup version and driver.
        job: The story's command line.
        more: Arguments of the machine.

    Returns:
        What the story printed.
    """
    cgroup, driver = kind.split("-")
    init = "systemd" if driver == "systemd" else "script"
    helpers = [HERE / "cri.py", *HERE.glob("vm_*.py")]
    carry = [word for path in (site, *helpers) for word in ("--carry", str(path))]
    command = f"tar xf site.tar -C /opt && TOPOPROXY_PATIENCE_S=180 PYTHONPATH=/opt/site python3 {job}"
    done = subprocess.run(
        [
            *(sys.executable, str(BED), "run", "--dir", str(DISK), "--topo", "2x2x4x2"),
            *("--cgroup", cgroup, "--driver", driver, "--init", init),
            *(*carry, *more, "--out", str(out), "--timeout", str(LIMIT_S), "--", command),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 200,
    )
    print(done.stdout, done.stderr)
    log = out / "proxy.log"
    assert done.returncode == 0, log.read_text()[-3000:] if log.is_file() else "no log came back"
    return done.stdout


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd", "v1-cgroupfs"])
def test_pools(site: Path, tmp_path: Path, kind: str) -> None:
    said = in_machine(site, tmp_path / "out", kind, f"vm_pools.py {kind[3:]}")
    assert "all is given back" in said


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd", "v1-cgroupfs"])
def test_topology_manager(site: Path, tmp_path: Path, kind: str) -> None:
    story = f"vm_topology.py {kind[3:]}"
    said = in_machine(site, tmp_path / "out", kind, story, "--pci", "3:net")
    assert "all is given back" in said


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd", "v1-cgroupfs"])
def test_suppression(site: Path, tmp_path: Path, kind: str) -> None:
    said = in_machine(site, tmp_path / "out", kind, f"vm_suppress.py {kind[3:]}")
    assert "all is given back" in said


@pytest.mark.parametrize("kind", ["v2-cgroupfs", "v2-systemd", "v1-cgroupfs"])
def test_quotas(site: Path, tmp_path: Path, kind: str) -> None:
    said = in_machine(site, tmp_path / "out", kind, f"vm_quota.py {kind[3:]}")
    assert "all is given back" in said


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates of it for kubelet's server and for our client."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certs")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30"]
    signed = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    for name, subject, more in (
        ("ca", "/CN=made-authority", []),
        ("server", "/CN=bed", [*signed, "-addext", "subjectAltName=IP:127.0.0.1,DNS:bed"]),
        ("client", "/O=topoproxy/CN=topoproxy", [*signed, "-addext", "extendedKeyUsage=clientAuth"]),
    ):
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        run = [openssl, "req", "-x509", *key, "-subj", subject, *more, *files]
        subprocess.run(run, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("kind", ["v2-cgroupfs"])
def test_kubelet(site: Path, certificates: Path, tmp_path: Path, kind: str) -> None:
    if not KUBELET.is_file():
        pytest.skip("no kubelet: name the program in TOPOPROXY_KUBELET")
    carried = ["--carry", f"{KUBELET}=kubelet", "--carry", f"{certificates}=certs", "--netfilter"]
    said = in_machine(site, tmp_path / "out", kind, f"vm_kubelet.py {kind[3:]}", *carried)
    assert "the story ends well" in said


@pytest.mark.parametrize("kind", ["v2-cgroupfs"])
def test_takeover(site: Path, tmp_path: Path, kind: str) -> None:
    if not KUBELET.is_file():
        pytest.skip("no kubelet: name the program in TOPOPROXY_KUBELET")
    carried = ["--carry", f"{KUBELET}=kubelet", "--netfilter"]
    said = in_machine(site, tmp_path / "out", kind, f"vm_takeover.py {kind[3:]}", *carried)
    assert "the story ends well" in said


@pytest.mark.parametrize("kind", ["v2-cgroupfs"])
def test_beside_kubelet(site: Path, tmp_path: Path, kind: str) -> None:
    if not KUBELET.is_file():
        pytest.skip("no kubelet: name the program in TOPOPROXY_KUBELET")
    carried = ["--carry", f"{KUBELET}=kubelet", "--netfilter"]
    said = in_machine(site, tmp_path / "out", kind, f"vm_beside.py {kind[3:]}", *carried)
    assert "the story ends well" in said
