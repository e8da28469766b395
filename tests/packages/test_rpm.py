"""The RPM package, queried and installed into a directory by rpm."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import payload
import pytest
import rpm
from wheels import after

from proxy import __version__
from tests.packages.conftest import ARCH, EPOCH, VERSION, Built

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def package(built: Built) -> Path:
    if built.rpm is None:
        pytest.skip("there is no rpmbuild (Debian: apt-get install rpm)")
    return built.rpm


def query(package: Path, *args: str) -> str:
    command = ["rpm", "-qp", "--nosignature", *args, str(package)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_rpm_has_the_files_of_the_debian_package(built: Built, package: Path) -> None:
    listed = subprocess.run(["dpkg-deb", "-c", built.deb], capture_output=True, text=True, check=True).stdout
    ours = {line.split()[5][1:] for line in listed.splitlines() if line[0] != "d"}
    theirs = set(query(package, "-l").splitlines())
    differ = {"/usr/share/zsh/vendor-completions/_topoproxy", "/usr/share/doc/topoproxy/copyright"}
    assert ours - theirs == differ
    added = {
        path
        for path in theirs - ours
        if not path.startswith(("/usr/lib/topoproxy", "/usr/share/doc/topoproxy"))
    }
    assert added == {
        *("/usr/share/zsh/site-functions/_topoproxy", "/usr/share/licenses/topoproxy"),
        "/usr/share/licenses/topoproxy/LICENSE",
    }


def test_the_scripts_of_the_rpm_start_nothing_and_refuse_an_attached_node(package: Path) -> None:
    text = query(package, "--scripts")
    assert "systemctl start" not in text
    assert not re.search(r"\benable\b", text)
    assert "refuse_if_attached" in text
    parts = list(text.split("scriptlet (using /bin/sh):\n")[1:])
    assert len(parts) == 3
    for part in parts:
        body = "\n".join(line for line in part.splitlines() if "scriptlet (using" not in line)
        subprocess.run(
            ["sh", "-n"], input=body.rpartition("\npostuninstall")[0] or body, text=True, check=True
        )


def test_the_fields_of_the_rpm(built: Built, package: Path) -> None:
    assert query(package, "--queryformat", "%{NAME} %{VERSION} %{ARCH} %{LICENSE}") in (
        f"topoproxy {VERSION} x86_64 Apache-2.0",
        f"topoproxy {VERSION} aarch64 Apache-2.0",
    )
    only = built.pythons[0]
    required = query(package, "--requires")
    assert f"((python3 >= {only} with python3 < {after(only)}) or python{only})" in required
    assert set(query(package, "--queryformat", "[%{FILEUSERNAME}:%{FILEGROUPNAME}\n]").split()) == {
        "root:root"
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_rpm_is_installed_into_a_directory_and_erased(package: Path, tmp_path: Path) -> None:
    root, database = tmp_path / "root", tmp_path / "root/var/lib/rpm"
    database.mkdir(parents=True)
    base = ["rpm", "--root", str(root), "--nodeps", "--noscripts", "--nosignature"]
    subprocess.run([*base, "--ignorearch", "-i", package], check=True, capture_output=True)
    command = [
        root / "usr/lib/topoproxy/bin/python",
        "-IB",
        root / "usr/lib/topoproxy/bin/topoproxy",
        "version",
    ]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == f"topoproxy {__version__}\n"
    )
    subprocess.run([*base, "-e", "topoproxy"], check=True, capture_output=True)
    assert not list(root.rglob("*topoproxy*"))


def test_two_builds_have_the_same_files(built: Built, package: Path, tmp_path: Path) -> None:
    payload.program.cache_clear()
    again = rpm.build(tmp_path, VERSION, ARCH, EPOCH, built.pythons)
    assert query(again, "--dump") == query(package, "--dump")
    assert again.read_bytes() == package.read_bytes()
