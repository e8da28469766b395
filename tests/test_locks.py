"""The lock files: packages for a node are pinned, have hashes, and are those that the tests run with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ALL = "requirements.lock"
RUNTIME = "requirements-runtime.lock"
CLUSTER = "requirements-cluster.lock"
BUILD = "requirements-build.lock"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


class Pinned:
    """One package of a lock file."""

    def __init__(self, block: str) -> None:
        head, *rest = block.splitlines()
        line, _, marker = head.removesuffix("\\").strip().partition(" ; ")
        self.name, _, self.version = line.partition("==")
        self.marker = marker and Marker(marker)
        self.hashes = [word for word in "\n".join(rest).split() if word.startswith("--hash=sha256:")]
        via = "\n".join(rest).partition("# via")[2]
        self.via = set(re.findall(r"[a-z][\w.-]*", via.replace("-c requirements.lock", "")))


def read(name: str) -> dict[str, Pinned]:
    blocks = re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())
    found = [Pinned(block) for block in blocks]
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def closure(names: Iterable[str], lock: dict[str, Pinned]) -> set[str]:
    """Return the named packages with their dependencies, according to the comments in the lock file."""
    found = {canonicalize_name(Requirement(name).name) for name in names}
    while more := {one.name for one in lock.values() if one.via & found} - found:
        found |= more
    return found


@pytest.mark.parametrize("name", [ALL, RUNTIME, CLUSTER, BUILD])
def test_every_package_is_pinned_and_has_hashes(name: str) -> None:
    for one in read(name).values():
        assert re.fullmatch(r"[0-9][\w.!+]*", one.version), one.name
        assert one.hashes, one.name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in one.hashes), one.name
    assert "://" not in (ROOT / name).read_text()


def test_the_runtime_lock_is_the_closure_of_the_dependencies() -> None:
    wanted = PROJECT["project"]["dependencies"]
    lock = read(RUNTIME)
    assert set(lock) == closure(wanted, read(ALL))
    for text in wanted:
        requirement = Requirement(text)
        assert lock[canonicalize_name(requirement.name)].version in requirement.specifier, text


def test_the_lock_of_the_agent_is_the_closure_of_its_dependencies() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cluster"]]
    lock = read(CLUSTER)
    assert set(lock) == closure(wanted, read(ALL))
    for text in wanted:
        requirement = Requirement(text)
        assert lock[canonicalize_name(requirement.name)].version in requirement.specifier, text


def test_the_build_lock_is_the_closure_of_the_build_backend() -> None:
    group = PROJECT["dependency-groups"]["build"]
    assert set(PROJECT["build-system"]["requires"]) <= set(group)
    lock = read(BUILD)
    assert set(lock) == closure(group, read(ALL))
    for text in group:
        requirement = Requirement(text)
        assert lock[canonicalize_name(requirement.name)].version in requirement.specifier, text


@pytest.mark.parametrize("name", [RUNTIME, CLUSTER, BUILD])
def test_versions_and_hashes_are_those_of_the_development_lock(name: str) -> None:
    every = read(ALL)
    for one in read(name).values():
        assert (one.version, one.hashes) == (every[one.name].version, every[one.name].hashes)


def test_the_readme_installs_nothing_without_a_hash() -> None:
    reported = (ROOT / "README.md").read_text()
    lines = [line.strip() for line in reported.splitlines() if "pip install" in line]
    assert any(f"-r {RUNTIME}" in line for line in lines)
    assert any(f"-r {BUILD}" in line for line in lines)
    for line in lines:
        assert "--require-hashes" in line or "--no-deps --no-build-isolation" in line, line
        assert "--no-build-isolation" in line or "--only-binary :all:" in line, line


@pytest.mark.skipif(
    not os.environ.get("TOPOPROXY_INSTALL_TEST"), reason="needs an index: TOPOPROXY_INSTALL_TEST=1"
)
@pytest.mark.timeout(600)
def test_the_readmes_commands_install_only_the_locked_versions(tmp_path: Path) -> None:
    reported = (ROOT / "README.md").read_text()
    commands = [
        line.strip() for line in reported.splitlines() if "/opt/topoproxy" in line and "ln -s" not in line
    ]
    assert len(commands) == 4
    place, clone = tmp_path / "opt", tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True, timeout=60)
    for command in commands:
        command = command.replace("/opt/topoproxy", str(place)).replace("python3", sys.executable)
        subprocess.run(["sh", "-ec", command], cwd=clone, check=True, timeout=300)
    listed = [place / "bin/pip", "list", "--format=freeze", "--disable-pip-version-check"]
    done = subprocess.run(listed, capture_output=True, text=True, check=True, timeout=60)
    pairs = (line.partition("==") for line in done.stdout.split())
    installed = {canonicalize_name(name): version for name, _, version in pairs}
    wanted = {
        one.name: one.version
        for lock in (RUNTIME, BUILD)
        for one in read(lock).values()
        if not one.marker or one.marker.evaluate()
    }
    own = {"pip", "topoproxy", *(["setuptools"] if sys.version_info < (3, 12) else [])}
    assert {name: installed.get(name) for name in wanted} == wanted
    assert installed.keys() - wanted.keys() <= own
    subprocess.run([place / "bin/topoproxy", "--version"], cwd=tmp_path, check=True, timeout=60)
