"""The online CPUs, and the core, package, die and cluster of each.

Only online CPUs count. The file ``cpu/online`` lists them. On a kernel without that file, each CPU is
checked: it is online if its directory ``cpuN`` has ``topology/`` (the kernel removes it while the CPU is
offline) and the file ``cpuN/online``, if there is one, is not 0 (cpu0 of many machines has none because it
cannot be taken offline).

The levels have two generations of file names (``core_cpus`` was ``thread_siblings`` before Linux 5.3). The
kernel's ids cannot serve as names: a package id can be -1, and core ids start again in every package or die.
A die or cluster id of -1 (65535 for a cluster on old kernels) means that the machine has no such level,
whatever the set next to it says.

The kernel reports a level (core, package, last-level cache ...) as one set per CPU: the CPUs that share it
with this CPU. On a live kernel those sets agree: all members of a set report that same set, and the sets are
the groups. They disagree while CPUs come and go, on some firmware, and in edited snapshots. In that case a
set has as many votes as it has members that report it, and each CPU joins the set with the most votes among
the sets that contain the CPU. Among sets with equally many votes, the CPU joins the set that it reports
itself; if that is not among them, the set that contains the lowest CPU. The CPUs that joined the same set are
a group.

Groups are named by their lowest CPU, because kernel ids start again in every package, or are -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from proxy.model.idset import CpuSet
from proxy.topology.files import SysfsTree

CPU_DIR = "devices/system/cpu"
_NO_CLUSTER = (-1, 65535)


def ids_in(bits: int) -> Iterable[int]:
    """Return the ids in a set of bits, ascending."""
    return CpuSet.from_bits(bits)


def lowest(bits: int) -> int:
    """Return the lowest id of a set that is not empty."""
    return (bits & -bits).bit_length() - 1


def group_cpus(reported: Mapping[int, int]) -> dict[int, int]:
    """Divide CPUs into groups, from the sets that they report.

    Args:
        reported: CPU to the set that it reports, which contains the CPU itself. CPUs that report no set are
            left out.

    Returns:
        CPU to its group, as bits; a group holds only CPUs of ``reported``.
    """
    votes: dict[int, int] = {}
    for cpu, bits in reported.items():
        votes[bits] = votes.get(bits, 0) | 1 << cpu
    if all(bits == members for bits, members in votes.items()):
        return dict(reported)
    group_of: dict[int, int] = {}
    for cpu, reported_set in reported.items():
        claims = [bits for bits in votes if bits >> cpu & 1]
        best = max(claims, key=lambda bits: (votes[bits].bit_count(), bits == reported_set, -lowest(bits)))
        group_of[best] = group_of.get(best, 0) | 1 << cpu
    return {cpu: members for members in group_of.values() for cpu in ids_in(members)}


def group_by_key(keys: Mapping[int, int]) -> dict[int, int]:
    """Group CPUs that have an equal key: CPU to its group, as bits."""
    members: dict[int, int] = {}
    for cpu, key in keys.items():
        members[key] = members.get(key, 0) | 1 << cpu
    return {cpu: members[key] for cpu, key in keys.items()}


class CpuLists(Struct, frozen=True):
    """The CPUs of a machine, as bits.

    Attributes:
        online: CPUs that run.
        source: ``file`` or ``cpu directories``.
        directories: CPUs that have a directory ``cpuN``.
    """

    online: int
    source: str
    directories: int


class Levels(Struct, frozen=True):
    """The contents of the ``topology`` directories.

    Attributes:
        groups: Level to CPU to group (bits). A level without data is an empty mapping, except ``core``.
        core_id, package_id: Raw kernel ids by CPU.
        missing: Levels that every machine has but the kernel does not report, by their names in the machine
            facts.
    """

    groups: Mapping[str, Mapping[int, int]]
    core_id: Mapping[int, int]
    package_id: Mapping[int, int]
    missing: tuple[str, ...]


def read_cpu_lists(tree: SysfsTree) -> CpuLists:
    """Find the online CPUs; the set is empty if the tree has none."""
    ids = tree.numbered(CPU_DIR, "cpu")
    directories = sum(1 << i for i in ids)
    online = tree.id_list(f"{CPU_DIR}/online")
    if online is not None:
        return CpuLists(online, "file", directories)
    bits = 0
    for i in ids:
        directory = f"{CPU_DIR}/cpu{i}"
        if tree.exists(f"{directory}/topology") and tree.number(f"{directory}/online") != 0:
            bits |= 1 << i
    return CpuLists(bits, "cpu directories", directories)


def _reported(tree: SysfsTree, online: int, cpus: Sequence[int], names: Sequence[str]) -> dict[int, int]:
    """Read each CPU's set for one level, from the first file of ``names`` whose set contains the CPU."""
    reported: dict[int, int] = {}
    for cpu in cpus:
        for name in names:
            bits = tree.id_set(f"{CPU_DIR}/cpu{cpu}/topology/{name}")
            if bits is not None and bits >> cpu & 1:
                reported[cpu] = bits & online
                break
    return reported


def _numbers(tree: SysfsTree, cpus: Sequence[int], name: str) -> dict[int, int]:
    numbers = ((cpu, tree.number(f"{CPU_DIR}/cpu{cpu}/topology/{name}")) for cpu in cpus)
    return {cpu: number for cpu, number in numbers if number is not None}


def _packages(tree: SysfsTree, online: int, cpus: Sequence[int], ids: Mapping[int, int]) -> dict[int, int]:
    reported = _reported(tree, online, cpus, ("package_cpus", "core_siblings"))
    # CPUs whose set is missing (old kernels; a CPU that was just brought up) are grouped by their package id.
    by_id = group_by_key({cpu: ids[cpu] for cpu in cpus if cpu not in reported and cpu in ids})
    return group_cpus({**reported, **by_id})


def read_levels(tree: SysfsTree, online: int) -> Levels:
    """Read all levels above the CPU, except the caches.

    Args:
        tree: The sysfs.
        online: The online CPUs as bits; groups hold no others.
    """
    cpus = list(ids_in(online))
    package_id = _numbers(tree, cpus, "physical_package_id")
    with_die = [cpu for cpu, die in _numbers(tree, cpus, "die_id").items() if die >= 0]
    clusters = _numbers(tree, cpus, "cluster_id")
    with_cluster = [cpu for cpu, cluster in clusters.items() if cluster not in _NO_CLUSTER]
    cores = _reported(tree, online, cpus, ("core_cpus", "thread_siblings"))
    packages = _packages(tree, online, cpus, package_id)
    groups = {
        "core": group_cpus({cpu: cores.get(cpu, 1 << cpu) for cpu in cpus}),
        "package": packages,
        "die": group_cpus(_reported(tree, online, with_die, ("die_cpus",))),
        "cluster": group_cpus(_reported(tree, online, with_cluster, ("cluster_cpus",))),
    }
    first = f"{CPU_DIR}/cpu{cpus[0]}/topology" if cpus else ""
    for level in ("book", "drawer"):  # mainframes only; one check saves all other machines two reads per CPU
        if tree.exists(f"{first}/{level}_siblings"):
            groups[level] = group_cpus(_reported(tree, online, cpus, (f"{level}_siblings",)))
    reported = (("thread siblings", cores), ("package siblings", packages))
    missing = tuple(name for name, level in reported if not level)
    return Levels(groups, _numbers(tree, cpus, "core_id"), package_id, missing)
