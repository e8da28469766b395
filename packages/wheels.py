"""The wheels of the lock files, for other architectures and several versions of Python; kept in a cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tree import Entry, Tree

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "topoproxy/wheels"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's names of architectures, and those of wheels and RPMs."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Versions of Python for which packages have compiled libraries, in ascending order and without a gap."""
SOURCE_ONLY = "cgroupspy"
"""The only dependency that is published only as source: pure Python, built here."""
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def after(python: str) -> str:
    """Return the version of Python after another one."""
    major, minor = python.split(".")
    return f"{major}.{int(minor) + 1}"


def wheels(arch: str, python: str, lock: Path) -> list[Path]:
    """Return the wheels of a lock file for a machine, downloaded once and checked by their hashes.

    Args:
        arch: ``amd64`` or ``arm64``.
        python: Such as ``3.11``.
        lock: The lock file.

    Raises:
        CalledProcessError: The index lacks one of the wheels, or its hash differs.
    """
    text = lock.read_text()
    binary, source = _split(text)
    key = hashlib.sha256(f"{text}{arch}{python}".encode()).hexdigest()[:16]
    directory = CACHE / f"{arch}-{python}-{key}"
    if not (directory / "ready").exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "binary.lock").write_text(binary)
        platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_{MACHINES[arch]}")]
        abis = [word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
        options = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--implementation", "cp"]
        command = [*PIP, "download", *options, *platforms, *abis, "--python-version", python]
        subprocess.run([*command, "-r", directory / "binary.lock", "-d", directory], check=True)
        if source:
            _build(source, directory)
        (directory / "ready").touch()
    return sorted(directory.glob("*.whl"))


def _split(text: str) -> tuple[str, str]:
    """Divide a lock file into the packages with wheels and those without."""
    blocks = re.split(r"(?m)^(?=[a-z])", text)
    source = [block for block in blocks if block.startswith(f"{SOURCE_ONLY}==")]
    return "".join(block for block in blocks if block not in source), "".join(source)


def _build(lock: str, directory: Path) -> None:
    (directory / "source.lock").write_text(lock)
    command = [*PIP, "wheel", "--require-hashes", "--no-deps", "--no-build-isolation", "--use-pep517"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
    subprocess.run([*command, "-r", directory / "source.lock", "-w", directory], check=True, env=environment)


def unpacked(wheel: Path) -> Tree:
    """Return the files of a wheel at their paths in ``site-packages``."""
    tree: Tree = {}
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            top, _, rest = item.filename.partition("/")
            if item.is_dir() or (top.endswith(".data") and not rest.startswith(("purelib/", "platlib/"))):
                continue
            name = rest.partition("/")[2] if top.endswith(".data") else item.filename
            tree[name] = Entry(archive.read(item))
    return tree


def site_packages(arch: str, pythons: tuple[str, ...], lock: Path) -> Tree:
    """Return one directory that serves several versions of Python.

    Compiled modules have the version in their names, so those of all versions are next to each other. All
    other files are the same in each wheel.
    """
    tree: Tree = {}
    for python in pythons:
        for wheel in wheels(arch, python, lock):
            for name, entry in unpacked(wheel).items():
                info = name.partition("/")[0].endswith(".dist-info")
                if not info and name in tree and tree[name] != entry:
                    raise ValueError(f"cannot serve {', '.join(pythons)} from one directory: {name} differs")
                tree.setdefault(name, entry)
    return tree
