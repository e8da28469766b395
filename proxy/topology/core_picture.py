"""The innermost part of the machine's picture: cores and their threads.

Without owners, alike cores at even steps make a run, ``[0 32] [1 33] … [15 47]``: brackets hold the
threads of one core. A run ends where the number of threads, the step, the kind of core or its isolation
changes, so that hybrid and partly isolated machines show themselves. With owners, a strip: one column per
core, one row per thread, in each place the tag of the CPU's owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from msgspec import Struct

from proxy.model.idset import CpuSet
from proxy.model.machine import Machine
from proxy.model.phrases import counted
from proxy.topology.facts import section
from proxy.topology.text import ids_text

_WHOLE = 6
"""Runs up to this many cores are written in full."""
_BLOCK = 8
"""Columns of a strip between two blanks."""


Tags = Callable[[int], str]
"""Gives the tag of a CPU's owner, one character at best."""


class _Core(Struct, frozen=True):
    """A core as the picture sees it: its CPUs, ascending, and what makes it different from others."""

    cpus: tuple[int, ...]
    note: str

    @property
    def key(self) -> tuple[object, ...]:
        return (self.note, *(cpu - self.cpus[0] for cpu in self.cpus))


def _cores(machine: Machine, cpus: CpuSet) -> list[_Core]:
    found = sorted({machine.by_id[cpu].core for cpu in cpus})
    kinds = [
        (criterion, value, CpuSet.parse(str(members)))
        for criterion, values in section(machine.extra, "kinds").items()
        if isinstance(values, dict) and criterion != "max_freq_khz"
        for value, members in values.items()
    ]
    cores: list[_Core] = []
    for name in found:
        own = machine.cores[name] & cpus
        notes = [_kind_text(c, value) for c, value, members in kinds if own <= members]
        if not own.isdisjoint(machine.isolated):
            notes.append("isolated" if own <= machine.isolated else "partly isolated")
        cores.append(_Core(tuple(own), ", ".join(notes)))
    return cores


def _kind_text(criterion: str, value: str) -> str:
    return value if criterion == "device" else f"{criterion.removeprefix('cpu_')} {value}"


def shape(machine: Machine, cpus: CpuSet, owner: Tags | None) -> object:
    """Return what the cores look like apart from their ids: equal for parts that can be drawn once."""
    cores = _cores(machine, cpus)
    if owner is None:
        return tuple(core.key for core in cores)
    return tuple((core.key, tuple(owner(cpu) for cpu in core.cpus)) for core in cores)


def core_lines(
    machine: Machine, cpus: CpuSet, owner: Tags | None, width: int, paint: Callable[[str], str] = str
) -> list[str]:
    """Draw the cores of a set of CPUs.

    Args:
        machine: The machine.
        cpus: The CPUs of the part.
        owner: Tag of each CPU's owner; None lists the cores.
        width: Columns that may be used.
        paint: Adds colour to a tag; must not change what is seen of it.
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
    if len(boxes) > _WHOLE:
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


def _strip(cores: list[_Core], owner: Tags, width: int, paint: Callable[[str], str]) -> list[str]:
    tags = {cpu: owner(cpu) for core in cores for cpu in core.cpus}
    cell = max((len(tag) for tag in tags.values()), default=1)
    gap = " " if cell > 1 else ""
    room = 18
    columns = max(_BLOCK, (width - room) // ((cell + len(gap)) * _BLOCK + 1) * _BLOCK)
    lines: list[str] = []
    for at in range(0, len(cores), columns):
        part = cores[at : at + columns]
        for thread in range(max(len(core.cpus) for core in part)):
            row = [core.cpus[thread] if thread < len(core.cpus) else None for core in part]
            cells = ["".ljust(cell) if cpu is None else paint(tags[cpu].ljust(cell)) for cpu in row]
            blocks = [gap.join(cells[i : i + _BLOCK]) for i in range(0, len(cells), _BLOCK)]
            ids = ids_text(CpuSet(cpu for cpu in row if cpu is not None), room - 4)
            lines.append(f"{ids.ljust(room - 2)}{' '.join(blocks)}")
    return lines
