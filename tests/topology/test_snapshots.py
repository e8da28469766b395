"""Every machine snapshot gives the facts that are recorded for it."""

from __future__ import annotations

import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.topology.description import machine_from_json
from proxy.topology.facts import machine_to_json
from proxy.topology.picture import render
from proxy.topology.reader import read_machine
from proxy.topology.sysfs_writer import write_sysfs

MACHINES = Path(__file__).resolve().parents[2].parent / "shared" / "machines"
ARCHIVES = sorted(MACHINES.glob("*.tar.bz2"))
FACTS = sorted([*MACHINES.glob("*.json"), *MACHINES.glob("synthetic/*.json")])
pytestmark = pytest.mark.skipif(not FACTS, reason="no machine snapshots in ../shared/machines")

CORE = ("cpus", "counts", "cpu_columns", "cpu_rows", "cores", "packages", "dies", "clusters")
CORE += ("llc", "numa", "smt", "memory")
COMPARED = (*CORE, "books", "drawers", "kinds", "files", "missing", "kernel")
NOT_IN_PROC = "the release is only in a file that the snapshot tool added; proc/version is not in the archive"
DIFFERENCES = {
    ("2pa-pcidomain32bits", "kernel"): NOT_IN_PROC,
    ("fakecpuid1f-64intel64-2p4d2n2c2t", "kernel"): NOT_IN_PROC,
}
WANTED = re.compile(
    r"sys/devices/system/cpu/(?!cpu\d+/node)|sys/devices/system/node/([^/]+$|node\d+/([a-z]+$|cpu\d+$|hugepages))"
    r"|sys/kernel/mm/hugepages|sys/bus/pci/devices$|sys/bus/pci/devices/[^/]+$|proc/(meminfo|version)$"
)
POLICY = re.compile(r"\.\./cpufreq/policy\d+")


def unpack(archive: Path, to: Path) -> None:
    """Unpack the files that are read. Links become empty files, except in cpufreq."""
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./").partition("/")[2]
            if not WANTED.match(name) or ".." in name:
                continue
            path = to / name
            if POLICY.fullmatch(member.linkname):
                path.symlink_to(member.linkname)
            elif member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.isfile() or member.islnk() or member.issym():
                path.parent.mkdir(parents=True, exist_ok=True)
                data = None if member.issym() else tar.extractfile(member)
                path.write_bytes(data.read() if data else b"")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory, in memory if possible, because thousands of small files are written."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def as_json(machine) -> dict:
    return json.loads(json.dumps(machine_to_json(machine)))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.bz2"))
def test_a_snapshot_gives_its_recorded_facts(archive: Path, directory: Path) -> None:
    facts = json.loads(archive.with_name(archive.name.replace(".tar.bz2", ".json")).read_text())
    unpack(archive, directory)
    machine = read_machine(directory)
    result = as_json(machine)
    different = {(facts["name"], key) for key in COMPARED if result.get(key) != facts.get(key)}
    assert different == {key for key in DIFFERENCES if key[0] == facts["name"]}
    assert machine_from_json(result) == machine
    assert machine_from_json(facts) == machine


@pytest.mark.parametrize("path", FACTS, ids=lambda path: path.stem)
def test_facts_survive_a_round_trip_through_a_machine(path: Path) -> None:
    facts = json.loads(path.read_text())
    machine = machine_from_json(facts)
    assert as_json(machine) == facts
    again = machine_from_json(as_json(machine))
    assert (again, again.extra) == (machine, machine.extra)


@pytest.mark.parametrize("path", FACTS, ids=lambda path: path.stem)
def test_machine_written_as_sysfs_reads_back_equal(path: Path, directory: Path) -> None:
    machine = machine_from_json(json.loads(path.read_text()))
    write_sysfs(machine, directory)
    result = read_machine(directory)
    assert result == machine
    want, have = as_json(machine), as_json(result)
    if (machine.extra["memory"] or {}).get("hugepages_source"):
        have["memory"]["hugepages_source"] = want["memory"][
            "hugepages_source"
        ]  # always written in today's place
    assert {key: have[key] for key in CORE} == {key: want[key] for key in CORE}


@pytest.mark.parametrize("path", FACTS, ids=lambda path: path.stem)
def test_picture_of_every_machine_fits_a_terminal(path: Path) -> None:
    machine = machine_from_json(json.loads(path.read_text()))
    for owner in (None, lambda cpu: "A" if cpu % 7 == 0 else "·"):
        lines = render(machine, owner, width=100).splitlines()
        assert len(lines) < 90
        assert all(len(line) <= 100 for line in lines if not line.startswith("problem: "))
    strip = render(machine, lambda cpu: "@", width=100)
    if "alike" not in strip:
        assert strip.count("@") == len(machine.cpus)
