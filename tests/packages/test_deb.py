"""The Debian package, installed into a directory by dpkg: its files, and that purge removes everything."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import deb
import payload
import pytest

from proxy import __version__
from tests.packages.conftest import ARCH, EPOCH, VERSION, Built

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shutil.which("dpkg-deb") or os.geteuid() != 0, reason="needs root and dpkg"),
]
MAINTAINED = ("postinst", "prerm", "postrm")
ATTACHED = "containerRuntimeEndpoint: unix:///run/topoproxy/cri.sock\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with dpkg's database of an empty system."""
    for name in ("updates", "info", "triggers", "parts"):
        (tmp_path / "root/var/lib/dpkg" / name).mkdir(parents=True)
    for name in ("status", "available"):
        (tmp_path / "root/var/lib/dpkg" / name).touch()
    (tmp_path / "root/etc/kubernetes").mkdir(parents=True)
    (tmp_path / "root/etc/kubernetes/kubelet.conf").write_text("a file of the node\n")
    return tmp_path / "root"


def dpkg(root: Path, *args: object) -> subprocess.CompletedProcess[str]:
    forced = ["--force-depends", "--force-script-chrootless", "--force-unsafe-io"]
    command = ["dpkg", f"--root={root}", *forced, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def files(root: Path) -> dict[str, str]:
    """Return kind, mode and hash of everything below a directory, except dpkg's own."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if not name.startswith("var/lib/dpkg"):
            mode = oct(path.lstat().st_mode)
            text = str(path.readlink()) if path.is_symlink() else ""
            if path.is_file() and not text:
                text = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = f"{mode} {text}"
    return found


def installed(root: Path) -> str:
    programs = root / "usr/lib/topoproxy/bin"
    command = [programs / "python", "-I", programs / "topoproxy", "version"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_package_is_installed_upgraded_downgraded_and_purged_completely(built: Built, root: Path) -> None:
    before = files(root)
    for package in (built.deb, built.deb, built.next, built.deb):
        done = dpkg(root, "--install", package)
        assert done.returncode == 0, done.stdout + done.stderr
    assert installed(root) == f"topoproxy {__version__}\n"
    assert list((root / "usr/lib/topoproxy").rglob("*.pyc")), "compiled at installation"
    for name in ("etc/topoproxy/config.d", "var/lib/topoproxy", "etc/systemd/system/topoproxy.service.d"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("as a node has it\n")
    assert dpkg(root, "--remove", "topoproxy").returncode == 0
    assert (root / "etc/topoproxy/config.d/file").exists(), "remove keeps the configuration"
    assert not (root / "usr/lib/topoproxy").exists()
    assert dpkg(root, "--purge", "topoproxy").returncode == 0
    left = {name for name in files(root).keys() - before.keys() if not (root / name).is_dir()}
    assert not left
    shared = {"etc/systemd", "etc/systemd/system", "var/lib", "var", "run", "etc", "usr"}
    assert set(files(root).keys() - before.keys()) <= shared
    assert {name: text for name, text in files(root).items() if name in before} == before


@pytest.mark.parametrize(
    "place",
    ["var/lib/kubelet/config.yaml", "etc/kubernetes/kubelet.conf.d/20-x.conf", "var/lib/topoproxy/attach"],
)
def test_the_package_is_not_removed_while_kubelet_uses_it(built: Built, root: Path, place: str) -> None:
    assert dpkg(root, "--install", built.deb).returncode == 0
    (root / place).parent.mkdir(parents=True)
    (root / place).write_text(f"# {ATTACHED}{ATTACHED}")
    done = dpkg(root, "--purge", "topoproxy")
    assert done.returncode != 0
    assert f"{place} says so" in done.stderr
    assert installed(root)
    assert dpkg(root, "--install", built.next).returncode == 0, "an upgrade is possible"
    (root / place).write_text(f"# {ATTACHED}")
    if place.endswith("attach"):
        (root / place).unlink()
    assert dpkg(root, "--purge", "topoproxy").returncode == 0
    assert not (root / "usr/lib/topoproxy").exists()


def test_a_state_directory_elsewhere_is_checked_and_kept(built: Built, root: Path) -> None:
    assert dpkg(root, "--install", built.deb).returncode == 0
    (root / "etc/topoproxy/config.d").mkdir(parents=True)
    file = root / "etc/topoproxy/config.d/10-state.yaml"
    file.write_text("mode: observe\nstateDir: '/data/topo/' # ours\n")
    (root / "data/topo/attach").mkdir(parents=True)
    done = dpkg(root, "--purge", "topoproxy")
    assert done.returncode != 0
    assert "data/topo/attach says so" in done.stderr
    (root / "data/topo/attach").rmdir()
    done = dpkg(root, "--purge", "topoproxy")
    assert done.returncode == 0
    assert "the state directory /data/topo is kept" in done.stderr
    assert (root / "data/topo").is_dir()


@pytest.mark.parametrize("name", ["attach", "attach.old"])
def test_a_purge_keeps_the_files_to_detach_an_attached_node(
    built: Built, root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dpkg(root, "--install", built.deb).returncode == 0
    state = root / "var/lib/topoproxy"
    (state / name).mkdir(parents=True)
    (state / "rescue-detach").write_text("#!/bin/sh\n")
    assert dpkg(root, "--purge", "topoproxy").returncode != 0
    monkeypatch.setenv("TOPOPROXY_REMOVE_ATTACHED", "yes")
    done = dpkg(root, "--purge", "topoproxy")
    assert done.returncode == 0
    assert "rescue-detach there detaches kubelet" in done.stderr
    assert {path.name for path in state.iterdir()} == {name, "rescue-detach"}


def test_two_builds_are_the_same_bytes(built: Built, tmp_path: Path) -> None:
    payload.program.cache_clear()
    assert deb.build(tmp_path, VERSION, ARCH, EPOCH, built.pythons).read_bytes() == built.deb.read_bytes()


def test_the_fields_and_the_files(built: Built) -> None:
    def query(*args: str) -> str:
        return subprocess.run(["dpkg-deb", *args], capture_output=True, text=True, check=True).stdout

    assert query("-f", str(built.deb), "Package", "Version", "Architecture") == (
        f"Package: topoproxy\nVersion: {VERSION}\nArchitecture: {ARCH}\n"
    )
    lines = [line.split() for line in query("-c", str(built.deb)).splitlines()]
    paths = {fields[5].removeprefix("./") for fields in lines}
    assert {fields[1] for fields in lines} == {"root/root"}
    for path in (
        *(
            "usr/bin/topoproxy",
            "usr/lib/systemd/system/topoproxy.service",
            "usr/lib/tmpfiles.d/topoproxy.conf",
        ),
        *("usr/share/man/man8/topoproxy-status.8.gz", "usr/share/fish/vendor_completions.d/topoproxy.fish"),
        *("usr/share/bash-completion/completions/topoproxy", "usr/share/zsh/vendor-completions/_topoproxy"),
        *(
            "usr/lib/topoproxy/lib/python3/site-packages/proxy/__main__.py",
            "usr/share/doc/topoproxy/copyright",
        ),
    ):
        assert path in paths
    assert not [path for path in paths if "__pycache__" in path]


def test_the_bounds_of_python_are_those_of_the_compiled_libraries() -> None:
    assert b"python3 (>= 3.11), python3 (<< 3.15)," in (deb.control({}, VERSION, ARCH)["control"].data or b"")
    one = deb.control({}, VERSION, ARCH, ("3.12",))["control"].data
    assert b"python3 (>= 3.12), python3 (<< 3.13)," in (one or b"")


def test_the_scripts_are_posix_shell_and_start_nothing() -> None:
    for name in MAINTAINED:
        text = deb.script(name)
        subprocess.run(["sh", "-n"], input=text, check=True)
        assert b"systemctl start" not in text
        assert b"systemctl enable" not in text
        assert b"topoproxy attach" not in text.replace(
            b"# Nothing is enabled, started or attached here: that is topoproxy attach.", b""
        )
