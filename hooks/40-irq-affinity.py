"""Keeps interrupts of devices away from CPUs that containers own.

The kernel may deliver the interrupts of disks and network cards to any CPU, including exclusive CPUs of a
container, whose program then stalls for a few microseconds. This hook removes exclusive CPUs from the
affinity of all interrupts (``/proc/irq/*/smp_affinity_list``) and from the default for new interrupts
(``/proc/irq/default_smp_affinity``). The original values are restored when no container owns those CPUs any
more, and when the daemon stops or the hook is removed (``give_back``).

It needs the drop-in ``systemd/examples/topoproxy.service.d/30-irq-affinity.conf``, because otherwise the unit
has ``/proc/irq`` read-only.

What it cannot do:

- Interrupts whose affinity the kernel manages itself, such as those of NVMe queues: they stay, and the log
  reports how many. ``isolcpus=managed_irq,...`` on the kernel's command line keeps them off CPUs.
- Timers and interprocessor interrupts: they belong to each CPU.
- irqbalance, if it runs, moves interrupts on its own. Stop it, or configure the CPUs that may be owned:
  ``IRQBALANCE_BANNED_CPULIST=2-31``. Interrupts that it has moved are moved back when an owner
  is added or removed.
- If this hook is removed while the daemon is stopped, the affinities remain until the next boot.

Everything happens in the background, and no call waits for it. A container's CPUs are usually free of
interrupts before its program starts.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from proxy.hooks.api import (
    Configure,
    CpuSet,
    MachineChanged,
    PodFacts,
    PoolsChanged,
    PostCreateContainer,
    PostRemoveContainer,
    PostStartContainer,
    PostStopContainer,
    Shutdown,
    Synchronize,
)
from proxy.hooks.kit.irqs import shared_irqs
from proxy.hooks.kit.owners import OwnerTracker
from proxy.logs import log

API_VERSION = 1
TIMEOUT = 10.0  # a machine may have thousands of interrupts

RECHECK_S = 30.0
"""After this time the files are checked again although the owners are the same."""


@dataclass(frozen=True)
class Settings:
    """The containers whose CPUs are kept free of interrupts."""

    annotation: str = field(
        default="",
        metadata={"help": "Only of pods with this annotation: key=value, or any value. Empty: all owners."},
    )
    give_back: bool = field(
        default=True,
        metadata={"help": "Restore interrupts when the daemon stops, not only when the hook is removed."},
    )
    proc: str = field(default="/proc", metadata={"help": "Where the kernel has its interrupts."})
    state: str = field(
        default="/run/topoproxy/hooks/irqs.json",
        metadata={
            "help": "The file with the original affinities; hooks that name the same one work together."
            " Change it only while no container owns CPUs."
        },
    )


class _State:
    """The known owners, and the last changes."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.owners: OwnerTracker[bool] = OwnerTracker(self.applies_to)
        self.lock = threading.Lock()
        self.claimed_cpus: CpuSet | None = None
        self.claimed_at = 0.0
        self.stay = 0

    def applies_to(self, pod: PodFacts) -> bool | None:
        key, equals, value = self.settings.annotation.partition("=")
        if not key:
            return True
        return True if key in pod.annotations and (not equals or pod.annotations[key] == value) else None


_state = _State("40-irq-affinity", Settings())


def configure(event: Configure) -> None:
    """Take the settings."""
    global _state
    _state = _State(event.name, event.settings)


def synchronize(event: Synchronize) -> None:
    """Keep interrupts off the CPUs of all current owners, and off no others."""
    _handle(event)


def machine_changed(event: MachineChanged) -> None:
    """Record which CPUs are online."""
    _handle(event)


def pools_changed(event: PoolsChanged) -> None:
    """React to owners whose CPUs have changed."""
    _handle(event)


def post_create_container(event: PostCreateContainer) -> None:
    """Keep interrupts off a new owner's CPUs."""
    _handle(event)


def post_start_container(event: PostStartContainer) -> None:
    """Keep interrupts off the owner's CPUs now at the latest."""
    _handle(event)


def post_stop_container(event: PostStopContainer) -> None:
    """Release the interrupts of the container."""
    _handle(event)


def post_remove_container(event: PostRemoveContainer) -> None:
    """Release the interrupts that were kept off for a container that never ran."""
    _handle(event)


def shutdown(event: Shutdown) -> None:
    """Release the interrupts, unless a new version of this file has taken over."""
    if event.reason == "removed" or (event.reason == "stop" and _state.settings.give_back):
        _claim(CpuSet(), force=True)


def _handle(
    event: Synchronize
    | MachineChanged
    | PoolsChanged
    | PostCreateContainer
    | PostStartContainer
    | PostStopContainer
    | PostRemoveContainer,
) -> None:
    _state.owners.handle(event)
    _claim(_state.owners.cpus(), force=isinstance(event, Synchronize | MachineChanged))


def _claim(cpus: CpuSet, *, force: bool) -> None:
    state, settings = _state, _state.settings
    with state.lock:
        now = time.monotonic()
        if (
            not force
            and cpus == (state.claimed_cpus or CpuSet())
            and (not cpus or now < state.claimed_at + RECHECK_S)
        ):
            return
        irqs = shared_irqs(Path(settings.proc), Path(settings.state))
        moved = irqs.claim(state.name, cpus, state.owners.online)
        state.claimed_cpus, state.claimed_at = cpus, now
        if moved.written or moved.stay != state.stay:
            log.info("moved interrupts", off=str(cpus), written=moved.written, stay=moved.stay)
        state.stay = moved.stay
