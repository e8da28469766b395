"""Moving interrupts off CPUs: ``/proc/irq/*/smp_affinity_list`` and ``/proc/irq/default_smp_affinity``.

Theory. The kernel may deliver an interrupt to any CPU of its affinity. To keep it off CPUs, they are removed
from its affinity. If no online CPU would be left, the affinity becomes all other online CPUs, because the
kernel refuses an affinity without an online CPU (kernel/irq/proc.c, write_irq_affinity and
default_affinity_write). Interrupts that appear later (a driver is loaded, a queue is opened) start with the
default affinity, so that is narrowed as well. Once the CPUs are free again, such an interrupt gets the
original default.

Interrupts that cannot be moved: those whose affinity the kernel manages itself (queues of many NVMe and
network drivers; a write fails with EIO), and per-CPU interrupts (timers, which are not in the list).

Several hooks may want CPUs kept clear. Each claims them under its own name, and interrupts stay off all
claimed CPUs; a state file holds the original values. irqbalance, if it runs, moves interrupts on its own: it
has to be configured separately (``IRQBALANCE_BANNED_CPULIST``).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from pathlib import Path

from proxy.hooks.kit.kernel_settings import AppliedSettings, KernelSettings, Put, put
from proxy.model.errnos import UNMOVABLE_IRQ, UNWRITABLE
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet

READ_ONLY = (
    "the unit makes it read-only (ProtectKernelTunables=): install the drop-in "
    "systemd/examples/topoproxy.service.d/30-irq-affinity.conf of the package's documentation"
)


@dataclass(frozen=True, slots=True)
class MovedIrqs:
    """The result of a claim.

    Attributes:
        written: Interrupts (and the default) that were written.
        stay: Interrupts that the kernel does not permit to move.
    """

    written: int = 0
    stay: int = 0


class Irqs:
    """The interrupts of a machine. Calls from several threads are serialized; see ``shared_irqs``.

    Args:
        proc: The proc file system: ``/proc``.
        state: The file that stores the original values.
        put: Writes a file of the kernel.
    """

    def __init__(self, proc: Path, state: Path, put: Put = put) -> None:
        self._directory = proc / "irq"
        self._default = self._directory / "default_smp_affinity"
        self._settings = KernelSettings(state, put)
        self._claims: dict[str, CpuSet] = {}
        self._known_files: frozenset[Path] | None = None
        self._lock = threading.Lock()

    def claim(self, name: str, cpus: CpuSet, online: CpuSet) -> MovedIrqs:
        """Keep interrupts off CPUs from now on, instead of those claimed under that name before.

        Args:
            name: The name of the claim.
            cpus: An empty set ends the claim.
            online: The CPUs that are online.

        Raises:
            HookError: The files cannot be written at all, or the original values cannot be stored.
        """
        with self._lock:
            if cpus:
                self._claims[name] = cpus
            else:
                self._claims.pop(name, None)
            banned = CpuSet()
            for claimed in self._claims.values():
                banned |= claimed
            try:
                applied = self._settings.apply(self._wanted_values(banned, online))
            except OSError as error:
                raise HookError(f"cannot remember the affinity of interrupts: {error}") from error
            return _result_of(applied)

    def _wanted_values(self, banned: CpuSet, online: CpuSet) -> dict[Path, str]:
        """Return the values of files while CPUs are banned; files that keep their own value are left out."""
        files = self._files()
        self._adopt_new_interrupts(files)
        wanted_values: dict[Path, str] = {}
        for file in (self._default, *sorted(files)):
            own = _parsed(file, self._settings.own(file))
            wanted = own - banned
            if wanted.isdisjoint(online):
                wanted = online - banned
            if not own or not wanted or wanted == own:
                continue
            now = _text(file)  # the kernel may write the same CPUs in another way, such as ff00 for 0000ff00
            if now is not None and _parsed(file, now) == wanted:
                wanted_values[file] = now
            else:
                wanted_values[file] = mask_text(wanted) if file is self._default else str(wanted)
        return wanted_values

    def _adopt_new_interrupts(self, files: frozenset[Path]) -> None:
        """Find interrupts that started with the narrowed default: their own value is the original default."""
        own = _parsed(self._default, self._settings.own(self._default))
        now = _parsed(self._default, _text(self._default))
        if self._known_files is not None and own != now:
            for file in files - self._known_files:
                if _parsed(file, _text(file)) == now:
                    self._settings.adopt(file, str(own))
        self._known_files = files

    def _files(self) -> frozenset[Path]:
        with contextlib.suppress(OSError):
            return frozenset(
                irq / "smp_affinity_list" for irq in self._directory.iterdir() if irq.name.isdigit()
            )
        return frozenset()


@functools.cache
def shared_irqs(proc: Path, state: Path) -> Irqs:
    """Return the instance of a state file: users of one file share it, so that claims add up."""
    return Irqs(proc, state)


def mask_text(cpus: CpuSet) -> str:
    """Write a set as the kernel's mask: groups of 32 bits in hexadecimal digits, the highest first."""
    bits = cpus.bits
    groups: list[str] = []
    while bits or not groups:
        groups.append(f"{bits & 0xFFFFFFFF:08x}")
        bits >>= 32
    return ",".join(reversed(groups))


def mask_from(text: str) -> CpuSet:
    """Read such a mask.

    Raises:
        ValueError: The text is not a mask.
    """
    first, *others = text.strip().split(",")
    return CpuSet.from_bits(int("".join((first, *(group.zfill(8) for group in others))), 16))


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return None


def _parsed(file: Path, text: str | None) -> CpuSet:
    """Parse the content of a file; return an empty set if it cannot be parsed."""
    with contextlib.suppress(ValueError):
        if text:
            return CpuSet.parse(text) if file.name == "smp_affinity_list" else mask_from(text)
    return CpuSet()


def _result_of(applied: AppliedSettings) -> MovedIrqs:
    """Count written and refused files; some refusals are normal, but the refusal of all files is an error.

    Raises:
        HookError: The files cannot be written.
    """
    for file, error in applied.refused.items():
        if error.errno in UNWRITABLE:
            raise HookError(f"cannot move interrupts by {file}: {error.strerror}; {READ_ONLY}")
        if error.errno not in UNMOVABLE_IRQ:
            raise HookError(f"cannot move interrupts by {file}: {error.strerror}")
    return MovedIrqs(len(applied.written), len(applied.refused))
