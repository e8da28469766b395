"""Draws a step: CPUs from left to right, containers from top to bottom.

Each socket is a block of columns, each core a group of CPUs. The first rows show the owner of a CPU, before
the step and after it; then every container has a row that shows its cgroup file: the CPUs that it has, those
that it left in this step and those that it gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from proxy.demo.snapshot import ContainerCpuset, Snapshot
from proxy.demo.terminal import CLASS_COLOURS, Screen
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine

_LEFT_COLUMNS = 22
_TEXT_COLUMNS = 16


class SnapshotPicture:
    """Draws snapshots of one machine."""

    def __init__(self, screen: Screen, machine: Machine) -> None:
        self._screen = screen
        self._machine = machine
        self._digits = len(str(max(machine.online)))
        spare = screen.width - _LEFT_COLUMNS - _TEXT_COLUMNS
        self._cell_columns = self._digits + (1 if self._columns(self._digits + 1) <= spare else 0)
        self._bands = self._fold_into_bands(spare)

    def _columns(self, cell: int) -> int:
        """Columns that all CPUs take: a gap after each core, a wider one after each socket."""
        machine = self._machine
        return cell * len(machine.cpus) + len(machine.cores) + len(machine.packages)

    def _fold_into_bands(self, spare: int) -> list[list[list[CpuSet]]]:
        """Break the machine into bands of sockets (each a list of cores) that fit next to the names."""
        bands: list[list[list[CpuSet]]] = [[]]
        used = 0
        for package in self._machine.packages.values():
            cores = [core for core in self._machine.cores.values() if core <= package]
            if used and used + sum(map(self._core_columns, cores)) + 1 > spare:
                bands.append([])
                used = 0
            bands[-1].append([])
            for core in cores:
                if used and used + self._core_columns(core) + 1 > spare:
                    bands.append([[]])
                    used = 0
                bands[-1][-1].append(core)
                used += self._core_columns(core)
            used += 1
        return bands

    def _core_columns(self, core: CpuSet) -> int:
        return len(core) * self._cell_columns + 1

    def draw(self, before: Snapshot, after: Snapshot, when: str = "after") -> None:
        """Show one step; ``when`` names the moment of the second snapshot."""
        owners = [[snapshot.owner_of(cpu) for cpu in self._machine.online] for snapshot in (before, after)]
        still = [[owner and owner.name for owner in row] for row in owners]
        for band in self._bands:
            self._screen.line()
            self._draw_headings(band)
            if still[0] == still[1]:
                self._draw_owners("owners", "unchanged" if when == "after" else when, after, band)
            else:
                self._draw_owners("owners", "before", before, band)
                self._draw_owners("", when, after, band)
            self._screen.line()
            for name in dict.fromkeys((*before.names, *after.names)):
                self._draw_container(_find(before, name), _find(after, name), band)

    def _draw_headings(self, band: list[list[CpuSet]]) -> None:
        heads = []
        for cores in band:
            cpus = CpuSet(cpu for core in cores for cpu in core)
            nodes = self._machine.nodes_of(cpus)
            package = list(self._machine.packages).index(self._machine.by_id[cpus.first()].package)
            size = sum(map(self._core_columns, cores))
            texts = (
                f"socket {package}, node{'s' if len(nodes) > 1 else ''} {nodes}",
                f"socket {package}",
                "",
            )
            heads.append(next(text for text in texts if len(text) < size or not text).ljust(size))
        if any(map(str.strip, heads)):
            self._screen.line(
                " " * (_LEFT_COLUMNS + self._cell_columns - 1) + self._screen.paint(" ".join(heads), "2")
            )
        tight = self._cell_columns == self._digits > 1
        firsts = {core.first() for cores in band for core in cores}
        ids = self._cells(band, lambda cpu: ("" if tight and cpu not in firsts else str(cpu), ("2",)))
        self._draw_row("", "", ids)

    def _draw_owners(self, label: str, when: str, snapshot: Snapshot, band: list[list[CpuSet]]) -> None:
        free = self._screen.glyph("·", ".")

        def cell(cpu: int) -> tuple[str, tuple[str, ...]]:
            owner = snapshot.owner_of(cpu)
            if owner is None:
                return free, ("2",)
            return owner.name[:1].upper(), (CLASS_COLOURS[owner.label], "1")

        named = list(dict.fromkeys(o.name for c in self._machine.online if (o := snapshot.owner_of(c))))
        text = (
            ", ".join(named) if len(", ".join(named)) <= self._text_columns(band) else f"{len(named)} owners"
        )
        self._draw_row(label, when, self._cells(band, cell), text if named else "none")

    def _text_columns(self, band: list[list[CpuSet]]) -> int:
        used = sum(self._core_columns(core) for cores in band for core in cores) + len(band)
        return max(_TEXT_COLUMNS, self._screen.width - _LEFT_COLUMNS - used)

    def _draw_container(
        self, before: ContainerCpuset | None, after: ContainerCpuset | None, band: list[list[CpuSet]]
    ) -> None:
        container = after or before
        assert container is not None
        had = before.cpus if before else CpuSet()
        has = after.cpus if after else CpuSet()
        colour = CLASS_COLOURS[container.label]
        glyph = self._screen.glyph
        new = before is None

        def cell(cpu: int) -> tuple[str, tuple[str, ...]]:
            if cpu in has:
                gained = cpu not in had and not new
                mark = glyph("▲", "+") if gained else glyph("■", "#")
                return mark, (colour, "1") if gained else (colour,)
            if cpu in had:
                return glyph("✗", "x"), ("2",)
            return " ", ()

        self._draw_row(
            container.name,
            container.label,
            self._cells(band, cell),
            self._cpuset_text(before, after, band),
            colour,
        )

    def _cpuset_text(
        self, before: ContainerCpuset | None, after: ContainerCpuset | None, band: list[list[CpuSet]]
    ) -> str:
        """Return the files' text; with the text before the step and the memory nodes, if there is room."""
        if after is None:
            return "gone"
        texts = [f"{after.cpus}", f"{after.cpus} mem {after.mems}"]
        if before is not None and before.cpus != after.cpus:
            arrow = self._screen.glyph("→", "->")
            texts += [f"{before.cpus} {arrow} {text}" for text in texts]
        return next(
            text for text in (*reversed(texts), "") if len(text) <= self._text_columns(band) or not text
        )

    def _cells(
        self, band: list[list[CpuSet]], cell: Callable[[int], tuple[str, Sequence[str]]]
    ) -> Iterable[str]:
        for cores in band:
            for core in cores:
                for cpu in core:
                    text, codes = cell(cpu)
                    yield " " * (self._cell_columns - len(text)) + self._screen.paint(text, *codes)
                yield " "
            yield " "

    def _draw_row(
        self, name: str, label: str, cells: Iterable[str], text: str = "", colour: str = ""
    ) -> None:
        paint = self._screen.paint
        left = "  " + paint(f"{name:<8.8}", "1") + " " + paint(f"{label:<11.11}", colour or "2")
        self._screen.line(left + "".join(cells) + text)


def _find(snapshot: Snapshot, name: str) -> ContainerCpuset | None:
    return next((container for container in snapshot.containers if container.name == name), None)
