"""Writes a ``Machine`` as a sysfs tree into a directory, for ``--sysfs-root``.

The tree contains the files that the reader reads, under the current file names, as masks and as lists. Facts
that the kernel did not report about the machine (packages, node directories, the list of present CPUs) are
left out of the tree too. So the tree reads back as an equal machine with the same gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from proxy.model.idset import CpuSet, IdSet, Mask
from proxy.model.machine import Cpu, HugePages, Machine, NumaNode
from proxy.topology.cpus import CPU_DIR
from proxy.topology.facts import has_nodes, has_packages, section
from proxy.topology.nodes import NODE_DIR

_WORD_DIGITS = 8
_KB = 1024


def mask_text(ids: IdSet, width: int) -> str:
    """Write a set as a kernel mask: 32-bit words for ids below ``width``, the highest word first."""
    group_count = max(1, -(-max(width, ids.bits.bit_length()) // 32))
    digits = f"{ids.bits:0{group_count * _WORD_DIGITS}x}"
    return ",".join(digits[at : at + _WORD_DIGITS] for at in range(0, len(digits), _WORD_DIGITS))


def write_sysfs(machine: Machine, root: Path) -> None:
    """Write a machine below a directory: ``root/sys`` and, if its memory is known, ``root/proc/meminfo``.

    Args:
        machine: The machine to write.
        root: An empty or missing directory; afterwards ``read_machine(root)`` gives an equal machine.

    Raises:
        OSError: The directory cannot be written.
    """
    files = {**_cpu_lists(machine), **_nodes(machine), **_machine_memory(machine)}
    groups = {level: machine.groups(level) for level in ("core", "package", "die", "cluster")}
    ordinals = {level: {name: i for i, name in enumerate(groups[level])} for level in ("die", "cluster")}
    width = machine.possible.bits.bit_length()
    for cpu in machine.cpus:
        directory = f"sys/{CPU_DIR}/cpu{cpu.id}"
        files |= {
            f"{directory}/topology/{k}": v
            for k, v in _topology(machine, cpu, groups, ordinals, width).items()
        }
        files |= {f"{directory}/cache/{k}": v for k, v in _cache(machine, cpu, width).items()}
    directories: set[Path] = set()
    for name, text in files.items():
        path = root / name
        if path.parent not in directories:
            path.parent.mkdir(parents=True, exist_ok=True)
            directories.add(path.parent)
        path.write_text(f"{text}\n", encoding="ascii")


def _cpu_lists(machine: Machine) -> dict[str, str]:
    reported = section(machine.extra, "cpus")
    files: dict[str, str] = {}
    if reported.get("online_from", "file") == "file":
        files["online"] = str(machine.online)
    for name in ("present", "possible", "isolated"):
        if reported.get(name, "") is not None:
            files[name] = str(getattr(machine, name))
    if isinstance(reported.get("nohz_full"), str):
        files["nohz_full"] = str(reported["nohz_full"])
    for name in ("control", "active"):
        if (value := section(machine.extra, "smt").get(name)) is not None:
            files[f"smt/{name}"] = str(value)
    for cpu in machine.present:  # as in the kernel: an offline CPU keeps its directory, without topology
        files[f"cpu{cpu}/online"] = str(int(cpu in machine.online))
    return {f"sys/{CPU_DIR}/{name}": text for name, text in files.items()}


def _topology(
    machine: Machine,
    cpu: Cpu,
    groups: Mapping[str, Mapping[int, CpuSet]],
    ordinals: Mapping[str, Mapping[int, int]],
    width: int,
) -> dict[str, str]:
    """Return the files of one CPU's ``topology`` directory."""
    sets = {"core": groups["core"][cpu.core]}
    numbers: dict[str, int] = {}
    if cpu.core_id is not None:
        numbers["core_id"] = cpu.core_id
    if cpu.package_id is not None:
        numbers["physical_package_id"] = cpu.package_id
    if has_packages(machine):
        sets["package"] = groups["package"][cpu.package]
    if cpu.die is not None:
        sets["die"] = groups["die"][cpu.die]
        numbers["die_id"] = ordinals["die"][cpu.die]
    if cpu.cluster is not None:
        sets["cluster"] = groups["cluster"][cpu.cluster]
        numbers["cluster_id"] = ordinals["cluster"][cpu.cluster]
    files = {name: str(number) for name, number in numbers.items()}
    for level, cpus in sets.items():
        files[f"{level}_cpus"] = mask_text(cpus, width)
        files[f"{level}_cpus_list"] = str(cpus)
    return files


def _cache(machine: Machine, cpu: Cpu, width: int) -> dict[str, str]:
    """Return the files of one CPU's last-level cache only."""
    if cpu.llc is None:
        return {}
    cache = machine.caches[cpu.llc]
    files = {
        "level": str(cache.level),
        "type": "Unified",
        "shared_cpu_map": mask_text(cache.cpus, width),
        "shared_cpu_list": str(cache.cpus),
    }
    if cache.id is not None:
        files["id"] = str(cache.id)
    if cache.size is not None:
        files["size"] = cache.size
    return {f"index{cache.level}/{name}": text for name, text in files.items()}


def _nodes(machine: Machine) -> dict[str, str]:
    if not has_nodes(machine):
        return {}
    numa = section(machine.extra, "numa")
    files: dict[str, str] = {}
    if not numa:
        files["online"] = str(Mask(node.id for node in machine.nodes))
        files["has_cpu"] = str(Mask(node.id for node in machine.nodes if node.cpus))
    files |= {name: text for name, text in numa.items() if isinstance(text, str) and name != "source"}
    claimed = section(numa, "claimed")
    for node in machine.nodes:
        cpus = CpuSet.parse(str(claimed.get(str(node.id), node.cpus)))
        files |= {f"node{node.id}/{k}": v for k, v in _node(node, cpus, machine).items()}
    return {f"sys/{NODE_DIR}/{name}": text for name, text in files.items()}


def _node(node: NumaNode, claimed: CpuSet, machine: Machine) -> dict[str, str]:
    files = {"cpumap": mask_text(claimed, machine.possible.bits.bit_length()), "cpulist": str(claimed)}
    files |= {f"cpu{cpu}": "" for cpu in node.cpus}  # links in sysfs; the reader uses the names only
    if node.distance:
        files["distance"] = " ".join(map(str, node.distance))
    if node.mem_bytes is not None:
        files["meminfo"] = f"Node {node.id} MemTotal: {node.mem_bytes // _KB} kB"
    if node.hugepages is not None:
        files |= {f"hugepages/{name}": text for name, text in _hugepages(node.hugepages).items()}
    return files


def _hugepages(pages: Mapping[int, HugePages]) -> dict[str, str]:
    files: dict[str, str] = {}
    for size, counts in pages.items():
        reported = {"nr": counts.nr, "free": counts.free, "surplus": counts.surplus}
        for name, count in reported.items():
            if count is not None:
                files[f"hugepages-{size}kB/{name}_hugepages"] = str(count)
    return files


def _machine_memory(machine: Machine) -> dict[str, str]:
    """Return the files of the machine's memory: from its own facts, or if it has none, the nodes' sum."""
    memory = section(machine.extra, "memory")
    files: dict[str, str] = {}
    total = memory.get("total_bytes") if memory else sum(node.mem_bytes or 0 for node in machine.nodes)
    if isinstance(total, int):
        files["proc/meminfo"] = f"MemTotal: {total // _KB} kB"
    for size, counts in section(memory, "hugepages").items():
        for name in ("nr", "free"):
            if isinstance(counts, dict) and name in counts:
                files[f"sys/kernel/mm/hugepages/hugepages-{size}kB/{name}_hugepages"] = str(counts[name])
    return files
