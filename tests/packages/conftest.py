"""Packages for this machine's architecture and the distribution's Python, built once for all tests."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import deb
import pytest
import rpm

EPOCH = 1_795_000_000
VERSION = "0.9.0"
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "")
SYSTEM_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Built:
    """The packages that the tests examine."""

    directory: Path
    deb: Path
    next: Path
    rpm: Path | None
    pythons: tuple[str, ...]


def system_python() -> str:
    """Return the version of the distribution's Python, such as 3.11; empty if it has none."""
    try:
        command = [SYSTEM_PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pythons = (system_python(),)
    if not ARCH or pythons[0] not in deb.PYTHONS:
        pytest.skip("the distribution has no Python that packages are built for")
    out = tmp_path_factory.mktemp("packages")
    try:
        package = deb.build(out, VERSION, ARCH, EPOCH, pythons)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the wheels of the lock file cannot be downloaded: {error}")
    other = deb.build(out, "0.9.1", ARCH, EPOCH, pythons)
    found = rpm.build(out, VERSION, ARCH, EPOCH, pythons) if shutil.which("rpmbuild") else None
    return Built(out, package, other, found, pythons)
