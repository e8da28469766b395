"""Reads a machine from a JSON description instead of sysfs.

The JSON is that of ``machine_to_json``. In a description written by hand, ``cpu_rows`` and ``numa.nodes`` are
enough. Everything that follows from the rows (groups, counts, CPU lists) is computed again. If the
description contains it too, both must agree: a description that contradicts itself would make every later
answer doubtful.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from proxy.model.errors import TopologyError
from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Cache, Cpu, HugePages, Machine, NumaNode
from proxy.model.strict_json import StrictJsonError, read_json
from proxy.open_file import open_file
from proxy.topology.facts import COLUMNS
from proxy.topology.files import MachineDeniedError

FILE_LIMIT_BYTES = 64 << 20
"""The most bytes that a description may have; a description of 65536 CPUs has about 5 MiB."""
_DERIVED = frozenset(
    {"schema", "counts", "cpu_columns", "cpu_rows", "cores", "packages", "dies", "clusters", "llc"}
)
_NUMA_DERIVED = frozenset(
    {"distance_ids", "memory_only", "cpu_only", "empty", "sparse", "overlapping", "distance_symmetric"}
    | {"nodes", "fallback"}
)
_LEVEL_OF = {"cores": "core", "packages": "package", "dies": "die", "clusters": "cluster"}


def load_machine(path: Path) -> Machine:
    """Read a machine description from a JSON file.

    Raises:
        TopologyError: The file cannot be read, or does not describe a machine.
    """
    try:
        with open_file(path) as stream:
            text = stream.read(FILE_LIMIT_BYTES + 1)
        if len(text) > FILE_LIMIT_BYTES:
            raise TopologyError(
                f"cannot read the machine description {path}: it is larger than {FILE_LIMIT_BYTES} bytes"
            )
        data = read_json(text.decode())
    except OSError as error:
        kind = MachineDeniedError if isinstance(error, PermissionError) else TopologyError
        raise kind(f"cannot read the machine description {path}: {error.strerror}") from error
    except RecursionError:
        raise TopologyError(f"cannot read the machine description {path}: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise TopologyError(
            f"cannot read the machine description {path}: byte {error.start} is not UTF-8"
        ) from error
    except StrictJsonError as error:
        raise TopologyError(f"cannot read the machine description {path}: {error}") from None
    except ValueError as error:
        raise TopologyError(f"cannot read the machine description {path}: not JSON: {error}") from error
    try:
        return machine_from_json(data)
    except TopologyError as error:
        raise TopologyError(
            f"cannot read the machine description {path}: {error.__cause__ or error}"
        ) from error


def machine_from_json(data: object) -> Machine:
    """Make a machine from its JSON description.

    Raises:
        TopologyError: The data does not describe a machine, is incomplete, or contradicts itself.
    """
    try:
        return _machine(_object(data, "the description"))
    except ValueError as error:
        raise TopologyError(f"cannot use the machine description: {error}") from error


def _machine(data: Mapping[str, object]) -> Machine:
    rows = _rows(data)
    numa = _object(data.get("numa") or {"source": "none"}, "numa")
    cpu_facts = _object(data.get("cpus") or {}, "cpus")
    online = CpuSet(cpu.id for cpu in rows)
    if "online" in cpu_facts and _cpus(cpu_facts["online"], "cpus.online") != online:
        raise ValueError(f"cpus.online is {cpu_facts['online']!r}, cpu_rows hold {str(online)!r}")
    claimed: dict[str, str] = {}
    if numa.get("source") == "none":
        nodes = _fallback(data, numa, online)
        rows = [structs.replace(cpu, numa=0) for cpu in rows]
    else:
        nodes, claimed = _nodes(numa, rows)
    missing = _missing(data, rows)
    if "package siblings" in missing:
        rows = [structs.replace(cpu, package=rows[0].id) for cpu in rows]
    present = online | _cpu_set(cpu_facts, "present") | _cpu_set(cpu_facts, "offline")
    raw_numa = {key: value for key, value in numa.items() if key not in _NUMA_DERIVED}
    own_data = {key: value for key, value in data.items() if key not in _DERIVED}
    reported = {key: value for key, value in cpu_facts.items() if key not in ("online", "offline", "absent")}
    numa_extra = {"numa": {**raw_numa, **({"claimed": claimed} if claimed else {})}}
    machine = Machine(
        cpus=tuple(rows),
        nodes=nodes,
        present=present,
        possible=present | _cpu_set(cpu_facts, "possible"),
        isolated=_cpu_set(cpu_facts, "isolated") & present,
        caches=_caches(data, rows),
        extra={**own_data, "cpus": reported, **numa_extra, **_smt(data), "missing": missing},
    )
    _check_groups(data, machine)
    return machine


def _rows(data: Mapping[str, object]) -> list[Cpu]:
    """Make the CPUs from the rows; a package of null becomes -1."""
    columns = data.get("cpu_columns", list(COLUMNS))
    table = data.get("cpu_rows")
    if not isinstance(columns, list) or not {"cpu", "core"} <= set(map(str, columns)) <= set(COLUMNS):
        raise ValueError(f"cpu_columns must be a list of 'cpu', 'core' and others of {', '.join(COLUMNS)}")
    if not isinstance(table, list) or not table:
        raise ValueError("cpu_rows must be a list with one row per online CPU")
    cpus: dict[int, Cpu] = {}
    for number, row in enumerate(table):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ValueError(f"cpu_rows[{number}] must be a list of {len(columns)} values")
        if not all(value is None or type(value) is int for value in row):
            raise ValueError(f"cpu_rows[{number}] may hold integers and null only: {row}")
        named = dict(zip(columns, row, strict=True))
        cpu, core, package = named.pop("cpu"), named.pop("core"), named.pop("package", None)
        if cpu is None or core is None or cpu in cpus:
            raise ValueError(f"cpu_rows[{number}] has no CPU or no core, or the CPU is there twice")
        cpus[cpu] = Cpu(id=cpu, core=core, package=-1 if package is None else package, **named)
    return [cpus[cpu] for cpu in sorted(cpus)]


def _missing(data: Mapping[str, object], rows: list[Cpu]) -> list[str]:
    """Return the levels that were not reported, with packages if no row names one."""
    missing = data.get("missing")
    names = [str(name) for name in missing] if isinstance(missing, list) else []
    if all(cpu.package < 0 for cpu in rows):
        return names if "package siblings" in names else [*names, "package siblings"]
    if any(cpu.package < 0 for cpu in rows):
        raise ValueError("cpu_rows must name a package for every CPU or for none")
    return [name for name in names if name != "package siblings"]


def _fallback(data: Mapping[str, object], numa: Mapping[str, object], online: CpuSet) -> tuple[NumaNode, ...]:
    """Make the node 0 of a machine without nodes."""
    memory = _object(data.get("memory") or {}, "memory")
    facts = _object(numa.get("fallback") or {"mem_bytes": memory.get("total_bytes")}, "numa.fallback")
    return (_node({"distance": [10], **facts, "id": 0}, online),)


def _nodes(numa: Mapping[str, object], rows: list[Cpu]) -> tuple[tuple[NumaNode, ...], dict[str, str]]:
    """Make the nodes; if their CPU maps contradict the rows, return the CPUs of the maps too."""
    table = numa.get("nodes")
    if not isinstance(table, list) or not table:
        raise ValueError("numa.nodes must be a list with one object per node (or numa.source 'none')")
    entries = [_object(entry, f"numa.nodes[{number}]") for number, entry in enumerate(table)]
    claims = {
        _number(entry, "id"): _cpus(entry.get("cpus"), f"node {entry.get('id')}: cpus") for entry in entries
    }
    ids = [_number(entry, "id") for entry in entries]
    if ids != sorted(claims):
        raise ValueError("numa.nodes must be in ascending order of id, each id once")
    if ids[-1] >= Mask.LIMIT:
        raise ValueError(f"the id of node {ids[-1]} must be less than {Mask.LIMIT}")
    by_row = dict.fromkeys(ids, CpuSet())
    for cpu in rows:
        if cpu.numa is not None and cpu.numa not in by_row:
            raise ValueError(f"CPU {cpu.id} is in node {cpu.numa}, which numa.nodes does not have")
        if cpu.numa is not None:
            by_row[cpu.numa] |= CpuSet([cpu.id])
    contradicting = [node for node in ids if claims[node] != by_row[node]]
    if contradicting and not numa.get("overlapping"):
        node_id = contradicting[0]
        raise ValueError(f"node {node_id} has CPUs {claims[node_id]}, cpu_rows put {by_row[node_id]} there")
    nodes = tuple(_node(entry, by_row[_number(entry, "id")]) for entry in entries)
    for node in nodes:
        if len(node.distance) not in (0, len(nodes)):
            raise ValueError(f"node {node.id} must have as many distances as there are nodes, or none")
    return nodes, {str(node): str(cpus) for node, cpus in claims.items()} if contradicting else {}


def _node(entry: Mapping[str, object], cpus: CpuSet) -> NumaNode:
    number = _number(entry, "id")
    mem, distance = entry.get("mem_bytes"), entry.get("distance") or []
    if not (mem is None or (type(mem) is int and mem >= 0)):
        raise ValueError(f"node {number}: mem_bytes must be a number of bytes or null")
    if not isinstance(distance, list) or not all(type(d) is int and d >= 0 for d in distance):
        raise ValueError(f"node {number}: distance must be a list of numbers or null")
    return NumaNode(number, cpus, mem, _hugepages(entry.get("hugepages"), number), tuple(distance))


def _hugepages(value: object, node: int) -> dict[int, HugePages] | None:
    if value is None:
        return None
    pages: dict[int, HugePages] = {}
    for size, entry in _object(value, f"node {node}: hugepages").items():
        counts = _object(entry, f"node {node}: hugepages of {size} kB")
        if not (size.isascii() and size.isdigit()):
            raise ValueError(f"node {node}: huge page size {size!r} is not a number of kB")
        optional = {k: None if counts.get(k) is None else _number(counts, k) for k in ("free", "surplus")}
        pages[int(size)] = HugePages(_number(counts, "nr"), **optional)
    return pages


def _caches(data: Mapping[str, object], rows: list[Cpu]) -> dict[int, Cache]:
    """Make the last-level caches; without an ``llc`` object, the groups in the rows count as level 3."""
    members: dict[int, CpuSet] = {}
    for cpu in rows:
        if cpu.llc is not None:
            members[cpu.llc] = members.get(cpu.llc, CpuSet()) | CpuSet([cpu.id])
    if data.get("llc") is None:
        return {name: Cache(cpus, 3) for name, cpus in sorted(members.items())}
    caches: dict[int, Cache] = {}
    for key, value in _object(data["llc"], "llc").items():
        entry = _object(value, f"llc {key}")
        size, number = entry.get("size"), entry.get("id")
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"llc {key}: the key is not the id of a CPU")
        caches[int(key)] = Cache(
            _cpus(entry.get("cpus"), f"llc {key}: cpus"),
            _number(entry, "level"),
            None if number is None else _number(entry, "id"),
            None if size is None else str(size),
        )
    if members != {name: cache.cpus for name, cache in caches.items()}:
        raise ValueError("llc and the column llc of cpu_rows do not agree")
    return dict(sorted(caches.items()))


def _smt(data: Mapping[str, object]) -> dict[str, object]:
    smt = _object(data.get("smt") or {}, "smt")
    return {"smt": {key: value for key, value in smt.items() if key != "threads_per_core"}}


def _check_groups(data: Mapping[str, object], machine: Machine) -> None:
    for level in (*_LEVEL_OF.values(), "llc"):
        for name, cpus in machine.groups(level).items():
            if name != cpus.first():
                raise ValueError(f"{level} {name} has CPUs {cpus}: a group is named by its lowest CPU")
    for key, level in _LEVEL_OF.items():
        if not (listed := data.get(key)):
            continue
        groups = {str(name): cpus for name, cpus in machine.groups(level).items()}
        if {name: _cpus(v, f"{key}: {name}") for name, v in _object(listed, key).items()} != groups:
            raise ValueError(f"{key} and the column {level} of cpu_rows do not agree")


def _object(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object")  # noqa: TRY004 - input, not an error of a type
    return value


def _number(entry: Mapping[str, object], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} must be a number that is not negative, not {value!r}")
    return value


def _cpus(value: object, name: str) -> CpuSet:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a list such as '0-3,8'")  # noqa: TRY004 - as above
    return CpuSet.parse(value)


def _cpu_set(facts: Mapping[str, object], name: str) -> CpuSet:
    value = facts.get(name)
    return CpuSet() if value is None else _cpus(value, f"cpus.{name}")
