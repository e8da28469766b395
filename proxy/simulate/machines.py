"""The machines of the command line: described in JSON files, as sysfs trees, or this one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.model.errors import InputError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.phrases import cpus as named
from proxy.topology.description import load_machine
from proxy.topology.facts import section
from proxy.topology.reader import read_machine

MOST_MACHINES = 100_000


@dataclass(frozen=True, slots=True)
class Named:
    """A machine and what it is called."""

    name: str
    machine: Machine


def described_machines(words: Iterable[str]) -> list[Named]:
    """Read machine descriptions.

    Args:
        words: ``FILE`` or ``NAME=FILE``; without a name the file's name without its ending is taken.

    Raises:
        InputError: A file cannot be read or does not describe a machine that could be; one line.
    """
    found: list[Named] = []
    for word in words:
        name, sign, file = word.partition("=")
        if not sign or "/" in name or Path(word).exists():
            name, file = Path(word).stem, word
        if not name or not file:
            raise InputError(f"cannot use the machine {word!r}: write FILE or NAME=FILE")
        machine = load_machine(Path(file))
        _sound(machine, file)
        found.append(Named(name, machine))
    return found


def sysfs_machine(root: Path, procfs: Path | None) -> Named:
    """Read the machine of a sysfs tree.

    Raises:
        InputError: The tree holds no machine.
    """
    return Named("machine", read_machine(root, procfs))


def copies(machines: Sequence[Named], count: int) -> list[Named]:
    """Return the machines of each kind, ``NAME-1`` and on where there are several.

    Raises:
        InputError: Two machines would have one name, or there would be too many.
    """
    if len(machines) * count > MOST_MACHINES:
        raise InputError(f"cannot simulate {len(machines) * count} machines: at most {MOST_MACHINES}")
    made = [
        Named(f"{named.name}-{number}" if count > 1 else named.name, named.machine)
        for named in machines
        for number in range(1, count + 1)
    ]
    names = [named.name for named in made]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"cannot use two machines of the name {twice}: write NAME=FILE to give them names")
    return made


def _sound(machine: Machine, file: str) -> None:
    """Refuse a description that a real machine can only have by mistake.

    ``serve`` works with a machine whose firmware reports such things (it has no other); a description is
    meant to answer what would happen, and no answer about such a machine could be trusted.
    """
    if section(machine.extra, "numa").get("claimed"):
        raise _unsound(file, f"NUMA nodes overlap: {_overlap(machine)}")
    homeless = machine.online - machine.cpus_of(Mask(machine.node_by_id))
    if homeless:
        raise _unsound(file, f"{named(homeless)} in no NUMA node")
    for node in machine.nodes:
        pages = sum(kib * counts.nr for kib, counts in (node.hugepages or {}).items()) << 10
        if node.mem_bytes is not None and pages > node.mem_bytes:
            raise _unsound(
                file, f"node {node.id}: huge pages of {pages} bytes, but memory of {node.mem_bytes} bytes"
            )


def _unsound(file: str, cause: str) -> InputError:
    return InputError(f"cannot use the machine description {file}: {cause}")


def _overlap(machine: Machine) -> str:
    claimed = section(machine.extra, "numa").get("claimed")
    assert isinstance(claimed, dict)
    sets = [(node, CpuSet.parse(str(cpus))) for node, cpus in claimed.items()]
    for at, (node, cpus) in enumerate(sets):
        for other, others in sets[at + 1 :]:
            if cpus & others:
                return f"CPUs {cpus & others} are in node {node} and in node {other}"
    return "their CPUs are not those of the rows"
