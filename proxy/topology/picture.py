"""The machine as a text picture for the terminal.

The parts of a machine (sockets, dies, NUMA nodes, L3 groups) are sets of CPUs. Which of two levels is the
larger differs from machine to machine: an L3 can be part of a NUMA node or span several nodes, and one node
can span four sockets. So the drawing assumes no order: parts are nested by inclusion, with the larger part
outside, and parts with the same CPUs become one line ("socket 0 · node 0 62.9 GiB · L3 32 MiB"). A part that
overlaps others without containing them is named below the tree, as are memory-only nodes and CPUs that do not
run.

The cores are drawn in the innermost parts. If the tree would be long, neighbours that differ only by their
position are drawn once.

Without owners, similar cores at equal steps form a run, ``[0 32] [1 33] … [15 47]``: brackets hold the
threads of one core. A run ends where the number of threads, the step, the kind of core or its isolation
changes, so that hybrid and partly isolated machines are visible as such. With owners, the cores form a strip:
one column per core, one row per thread, and in each cell the tag of the CPU's owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from proxy.model.idset import CpuSet, Mask
from proxy.model.machine import Machine
from proxy.model.phrases import counted
from proxy.topology.facts import has_nodes, has_packages, section
from proxy.topology.text import cache_size_text, distance_lines, ids_text, memory_text, size_text

_LONG_TREE_LINES = 40
"""If the tree has more lines than this, similar neighbours are drawn once."""
_UNCORE_LEVEL = 3
_MIN_WIDTH = 40
_CPUS_COLUMNS = 40
_ASCII = str.maketrans({"├": "|", "└": "`", "│": "|", "─": "-", "·": ".", "…": ".."})

_FULL_RUN_CORES = 6
"""Runs up to this many cores are written in full."""
_BLOCK_CORES = 8
"""Cores in a strip between two blanks."""


OwnerTag = Callable[[int], str]
"""Returns the tag of a CPU's owner, preferably one character."""


class _Core(Struct, frozen=True):
    """A core in the picture: its CPUs, ascending, and the properties by which it differs from others."""

    cpus: tuple[int, ...]
    note: str

    @property
    def key(self) -> tuple[object, ...]:
        return (self.note, *(cpu - self.cpus[0] for cpu in self.cpus))


def _cores(machine: Machine, cpus: CpuSet) -> list[_Core]:
    names = sorted({machine.by_id[cpu].core for cpu in cpus})
    kinds = [
        (criterion, value, CpuSet.parse(str(members)))
        for criterion, values in section(machine.extra, "kinds").items()
        if isinstance(values, dict) and criterion != "max_freq_khz"
        for value, members in values.items()
    ]
    cores: list[_Core] = []
    for name in names:
        threads = machine.cores[name] & cpus
        notes = [_kind_text(c, value) for c, value, members in kinds if threads <= members]
        if not threads.isdisjoint(machine.isolated):
            notes.append("isolated" if threads <= machine.isolated else "partly isolated")
        cores.append(_Core(tuple(threads), ", ".join(notes)))
    return cores


def _kind_text(criterion: str, value: str) -> str:
    return value if criterion == "device" else f"{criterion.removeprefix('cpu_')} {value}"


def shape(machine: Machine, cpus: CpuSet, owner: OwnerTag | None) -> object:
    """Return the appearance of cores without their ids; parts with equal appearance can be drawn once."""
    cores = _cores(machine, cpus)
    if owner is None:
        return tuple(core.key for core in cores)
    return tuple((core.key, tuple(owner(cpu) for cpu in core.cpus)) for core in cores)


def core_lines(
    machine: Machine, cpus: CpuSet, owner: OwnerTag | None, width: int, paint: Callable[[str], str] = str
) -> list[str]:
    """Draw the cores of a set of CPUs.

    Args:
        machine: The machine.
        cpus: The CPUs of the part.
        owner: Tag of each CPU's owner; None lists the cores.
        width: Columns that may be used.
        paint: Adds colour to a tag; must not change its visible text.
    """
    cores = _cores(machine, cpus)
    if owner is not None:
        return _strip(cores, owner, width, paint)
    return [line for run in _runs(cores) for line in _run_lines(machine, run, width)]


def _runs(cores: list[_Core]) -> list[list[_Core]]:
    runs: list[list[_Core]] = []
    for core in cores:
        run = runs[-1] if runs else []
        step = run[1].cpus[0] - run[0].cpus[0] if len(run) > 1 else None
        if run and run[-1].key == core.key and step in (None, core.cpus[0] - run[-1].cpus[0]):
            run.append(core)
        else:
            runs.append([core])
    return runs


def _run_lines(machine: Machine, run: list[_Core], width: int) -> list[str]:
    boxes = [f"[{' '.join(map(str, core.cpus))}]" for core in run]
    if len(boxes) > _FULL_RUN_CORES:
        boxes = [*boxes[:2], "…", boxes[-1]]
    notes = [counted(len(run), "core"), *_clusters(machine, run), *_frequencies(machine, run)]
    notes += [run[0].note] if run[0].note else []
    lines = [""]
    for box in boxes:
        if lines[-1] and len(lines[-1]) + len(box) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {box}".lstrip()
    lines[-1] += f"  {', '.join(notes)}"
    return lines


def _clusters(machine: Machine, run: list[_Core]) -> list[str]:
    names = [machine.by_id[core.cpus[0]].cluster for core in run]
    sizes = {len(list(same)) for name, same in itertools.groupby(names) if name is not None}
    if len(set(names)) < 2 or sizes == {1}:
        return []
    return [f"clusters of {sizes.pop()}" if len(sizes) == 1 else counted(len(set(names)), "cluster")]


def _frequencies(machine: Machine, run: list[_Core]) -> list[str]:
    reported = section(section(machine.extra, "kinds"), "max_freq_khz")
    first = CpuSet(core.cpus[0] for core in run)
    ghz = sorted(
        int(khz) / 1e6
        for khz, cpus in reported.items()
        if khz.isdigit() and not CpuSet.parse(str(cpus)).isdisjoint(first)
    )
    if not ghz:
        return []
    return [f"{ghz[0]:g} GHz" if len(ghz) == 1 else f"{ghz[0]:g}-{ghz[-1]:g} GHz"]


def _strip(cores: list[_Core], owner: OwnerTag, width: int, paint: Callable[[str], str]) -> list[str]:
    tags = {cpu: owner(cpu) for core in cores for cpu in core.cpus}
    cell = max((len(tag) for tag in tags.values()), default=1)
    gap = " " if cell > 1 else ""
    room = 18
    columns = max(_BLOCK_CORES, (width - room) // ((cell + len(gap)) * _BLOCK_CORES + 1) * _BLOCK_CORES)
    lines: list[str] = []
    for at in range(0, len(cores), columns):
        part = cores[at : at + columns]
        for thread in range(max(len(core.cpus) for core in part)):
            row = [core.cpus[thread] if thread < len(core.cpus) else None for core in part]
            cells = ["".ljust(cell) if cpu is None else paint(tags[cpu].ljust(cell)) for cpu in row]
            blocks = [gap.join(cells[i : i + _BLOCK_CORES]) for i in range(0, len(cells), _BLOCK_CORES)]
            ids = ids_text(CpuSet(cpu for cpu in row if cpu is not None), room - 4)
            lines.append(f"{ids.ljust(room - 2)}{' '.join(blocks)}")
    return lines


class _Name(Struct, frozen=True):
    """The name of a part: ``node``, ``3``, ``62.9 GiB``."""

    kind: str
    number: str
    rest: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.number, self.rest) if part)


@dataclass(slots=True)
class _Part:
    """A box of the picture: CPUs, the names that it has, and the boxes in it."""

    cpus: CpuSet
    names: list[_Name]
    inside: list[_Part] = field(default_factory=list)


class _Style(Struct, frozen=True):
    """The settings of one picture."""

    machine: Machine
    owner: OwnerTag | None
    paint: Callable[[str], str]
    short: bool


def render(
    machine: Machine,
    owner: OwnerTag | None = None,
    width: int = 100,
    ascii: bool = False,  # noqa: A002 - named as the option of the command
    paint: Callable[[str], str] = str,
) -> str:
    """Draw a machine.

    Args:
        machine: The machine to draw.
        owner: Tag of each CPU's owner; without it the cores are listed.
        width: Columns of the terminal; lines stay within it if their words allow.
        ascii: Use ASCII characters only.
        paint: Adds colour to an owner's tag; must not change its visible text.

    Returns:
        Lines joined by newlines, without a newline at the end.
    """
    width = max(width, _MIN_WIDTH)
    tree, crossing = _nest(machine)
    lines = _inside(_Style(machine, owner, paint, short=False), tree, width)
    if len(lines) > _LONG_TREE_LINES:
        lines = _inside(_Style(machine, owner, paint, short=True), tree, width)
    lines = [_headline(machine), *lines, *_memory_only(machine)]
    lines += [f"{part.names[0]}: CPUs {part.cpus}, across the parts above" for part in crossing]
    lines += _cpu_notes(machine)
    lines += distance_lines(machine, width)
    text = "\n".join(line.rstrip() for line in lines)
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii else text


def _headline(machine: Machine) -> str:
    threads = sorted({len(core) for core in machine.cores.values()})
    parts = [counted(len(machine.packages), "socket")] if has_packages(machine) else []
    if has_nodes(machine):
        parts.append(counted(len(machine.nodes), "NUMA node"))
    parts += [counted(len(machine.cores), "core"), counted(len(machine.cpus), "CPU")]
    parts.append(f"{' or '.join(map(str, threads))} {'thread' if threads == [1] else 'threads'} per core")
    sizes = [node.mem_bytes for node in machine.nodes if node.mem_bytes is not None]
    if len(sizes) == len(machine.nodes):
        parts.append(size_text(sum(sizes)))
    return ", ".join(parts)


def _parts(machine: Machine) -> list[_Part]:
    """Return all parts that have CPUs, in the order of their rank from the outside to the inside."""
    parts: list[_Part] = []
    if has_packages(machine):
        parts += [_Part(cpus, [_Name("socket", str(i))]) for i, cpus in enumerate(machine.packages.values())]
    dies = machine.groups("die")
    if len(dies) > len(machine.packages):
        parts += [_Part(cpus, [_Name("die", str(i))]) for i, cpus in enumerate(dies.values())]
    for node in machine.nodes:
        if node.cpus:
            number = str(node.id) if has_nodes(machine) else "0 (assumed)"
            parts.append(_Part(node.cpus, [_Name("node", number, memory_text(node))]))
    for cache in machine.caches.values():
        if cache.level >= _UNCORE_LEVEL:
            size = cache_size_text(cache.size) if cache.size else ""
            parts.append(_Part(cache.cpus, [_Name(f"L{cache.level}", "", size)]))
    return parts


def _nest(machine: Machine) -> tuple[_Part, list[_Part]]:
    """Nest the parts by inclusion; return the tree, and the parts that overlap others without nesting."""
    top = _Part(machine.online, [])
    crossing: list[_Part] = []
    for part in sorted(_parts(machine), key=lambda part: -len(part.cpus)):
        outer = top
        while inner := next((p for p in outer.inside if part.cpus <= p.cpus), None):
            outer = inner
        if outer is not top and outer.cpus == part.cpus:
            outer.names += part.names
        elif all(part.cpus.isdisjoint(p.cpus) for p in outer.inside):
            outer.inside.append(part)
        else:
            crossing.append(part)
    _add_remaining_cpus(top)
    return top, crossing


def _add_remaining_cpus(part: _Part) -> None:
    """Order the inner parts, and make one more part for the CPUs that are in none of them."""
    if part.inside:
        remaining = part.cpus
        for inner in part.inside:
            remaining -= inner.cpus
        if remaining:
            part.inside.append(_Part(remaining, [_Name("others", "")]))
    part.inside.sort(key=lambda inner: inner.cpus.first())
    for inner in part.inside:
        _add_remaining_cpus(inner)


def _shape(style: _Style, part: _Part) -> object:
    """Return the appearance of a part without its position."""
    inside = [_shape(style, inner) for inner in part.inside] or shape(style.machine, part.cpus, style.owner)
    return [(name.kind, name.rest) for name in part.names], inside


def _inside(style: _Style, part: _Part, width: int) -> list[str]:
    """Draw the content of a part: its inner parts, or its cores if it has none."""
    if not part.inside:
        return core_lines(style.machine, part.cpus, style.owner, width, style.paint)
    runs = [[inner] for inner in part.inside]
    if style.short:
        pairs = [(_shape(style, inner), inner) for inner in part.inside]
        runs = [[inner for _, inner in run] for _, run in itertools.groupby(pairs, key=lambda pair: pair[0])]
    boxes: list[tuple[str, list[str]]] = []
    for run in runs:
        boxes.append((_title(run[0], width - 3), _inside(style, run[0], width - 3)))
        if len(run) > 1:
            boxes.append((_similar_parts_line(run[1:], width - 3), []))
    lines: list[str] = []
    for at, (title, body) in enumerate(boxes):
        last = at == len(boxes) - 1
        lines.append(f"{'└─' if last else '├─'} {title}")
        lines += [f"{'   ' if last else '│  '}{line}" for line in body]
    return lines


def _title(part: _Part, width: int) -> str:
    names = " · ".join(map(str, part.names))
    return f"{names}  {_cpus_text(part.cpus, width - len(names) - 7)}"


def _cpus_text(cpus: CpuSet, room: int) -> str:
    return f"{'CPU' if len(cpus) == 1 else 'CPUs'} {ids_text(cpus, min(max(room, 12), _CPUS_COLUMNS))}"


def _similar_parts_line(run: Sequence[_Part], width: int) -> str:
    """Return the line for parts that look like the part drawn above them."""
    first, last = run[0].names[0], run[-1].names[0]
    names = f"{first.kind} {first.number}".rstrip()
    if len(run) > 1:
        ends = f"{first.kind}s {first.number} to {last.number}"
        names = ends if first.number else f"{len(run)} more {first.kind}"
    cpus = CpuSet.from_bits(sum(part.cpus.bits for part in run))
    return f"{names}: {'alike' if len(run) == 1 else 'each alike'}  {_cpus_text(cpus, width - 30)}"


def _memory_only(machine: Machine) -> list[str]:
    """Name the nodes without CPUs; nodes with the same size and distance share a line."""
    groups: dict[str, list[int]] = {}
    empty: list[int] = []
    for at, node in enumerate(machine.nodes):
        if node.mem_bytes == 0 and not node.cpus:
            empty.append(node.id)
        elif not node.cpus:
            near = [
                (other.distance[at], other.id) for other in machine.nodes if other.cpus and other.distance
            ]
            nearest = f", nearest to node {min(near)[1]} at {min(near)[0]}" if near else ""
            groups.setdefault(f"{memory_text(node)}{nearest}", []).append(node.id)
    lines = [
        f"memory only: {_nodes_text(ids)} {'each ' if len(ids) > 1 else ''}{text}"
        for text, ids in groups.items()
    ]
    return [*lines, *([f"no CPUs, no memory: {_nodes_text(empty)}"] if empty else [])]


def _nodes_text(ids: Sequence[int]) -> str:
    return f"{'node' if len(ids) == 1 else 'nodes'} {Mask(ids)}"


def _cpu_notes(machine: Machine) -> list[str]:
    offline = machine.present - machine.online
    isolated = machine.isolated & machine.online
    notes = [
        f"{label}: {_cpus_text(ids, 40)}"
        for label, ids in (("offline", offline), ("isolated", isolated))
        if ids
    ]
    problems = machine.extra.get("problems")
    notes += [f"problem: {problem}" for problem in problems] if isinstance(problems, list) else []
    return notes
