"""CRI-O's annotations for low latency, for pods on containerd.

The names and values are those of CRI-O's high-performance hooks (crio.conf(5)). As in CRI-O, the pod sets
them, and they apply to containers that own CPUs:

``cpu-quota.crio.io: disable``
    No CFS quota for the container and the pod's cgroup.
``irq-load-balancing.crio.io: disable`` or ``housekeeping``
    Interrupts of devices stay off the container's CPUs, or (``housekeeping``) off all except the threads of
    the first CPU's core, which the variable ``OPENSHIFT_HOUSEKEEPING_CPUS`` names then. The limits that the
    hook 40-irq-affinity describes apply here too; both hooks may run.
``cpu-c-states.crio.io: disable``, ``enable`` or ``max_latency:N``
    How deeply its CPUs may sleep: not at all, without limit, or so that they wake within N microseconds.
``cpu-freq-governor.crio.io: performance`` (or another governor that the kernel offers)
    The frequency governor of its CPUs.
``cpu-load-balancing.crio.io: disable``
    On cgroup v2 the hook does nothing but log that ``apply.partitions: isolated`` in topoproxy's
    configuration does this, for all owners of CPUs. On cgroup v1 ``cpuset.sched_load_balance`` of the
    container is turned off once it runs. That has an effect only if the groups above it are not balanced
    either. A hook must not change those, so the log names the groups that are balanced.
``cpu-shared.crio.io/NAME: enable``
    Not supported, and logged: a hook cannot add CPUs to the decision.

As in CRI-O, ``true`` means ``disable`` in the first two and in load balancing. Invalid values are logged and
ignored. If CRI-O itself is the runtime, leave this hook disabled: CRI-O does all of this. The hook
20-quota-off sets the same field: if both hooks choose a container, only the answer of 20-quota-off is
accepted.

The original settings of interrupts, sleep and governors are restored when the container ends, and when the
daemon stops. These features need the drop-in ``systemd/examples/topoproxy.service.d/30-irq-affinity.conf``,
because otherwise the unit has ``/proc/irq`` and ``/sys`` read-only. A feature that is not available is
logged; the others still work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from proxy.hooks.api import (
    Adjustment,
    Configure,
    CpuSet,
    Decision,
    MachineChanged,
    PodFacts,
    PoolsChanged,
    PostCreateContainer,
    PostRemoveContainer,
    PostStartContainer,
    PostStopContainer,
    PreCreateContainer,
    PreStartContainer,
    PreUpdateContainerResources,
    Shutdown,
    Synchronize,
)
from proxy.hooks.kit.crio import CrioSettings, crio_settings
from proxy.hooks.kit.groups import disable_load_balancing, open_quota
from proxy.hooks.kit.irqs import shared_irqs
from proxy.hooks.kit.owners import OwnerTracker
from proxy.hooks.kit.power import Power
from proxy.logs import log
from proxy.model.errors import HookError
from proxy.model.machine import Machine

API_VERSION = 1
TIMEOUT = 10.0  # a machine may have thousands of interrupts, which are moved in the background


@dataclass(frozen=True)
class Settings:
    """The containers whose annotations count, and where the kernel's files are."""

    handlers: tuple[str, ...] = field(
        default=(), metadata={"help": "Only pods of these runtime classes' handlers. Empty: all pods."}
    )
    cgroup_root: str = field(
        default="/sys/fs/cgroup", metadata={"help": "Where cgroups are mounted: cgroupRoot of topoproxy."}
    )
    proc: str = field(default="/proc", metadata={"help": "Where the kernel has its interrupts."})
    sysfs: str = field(default="/sys", metadata={"help": "Where the kernel has its CPUs."})
    irq_state: str = field(
        default="/run/topoproxy/hooks/irqs.json",
        metadata={
            "help": "The file with the original affinities: the same one as 40-irq-affinity."
            " Change it only while no container owns CPUs."
        },
    )
    power_state: str = field(
        default="/run/topoproxy/hooks/power.json",
        metadata={"help": "The file with the original latency limits and governors; as irq_state."},
    )


class _State:
    """The state of the hook."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.owners: OwnerTracker[CrioSettings] = OwnerTracker(self.settings_of)
        self.power = Power(Path(settings.sysfs), Path(settings.power_state))
        self.machine: Machine | None = None
        self.lock = threading.Lock()
        self.cpus_without_irqs = CpuSet()

    def settings_of(self, pod: PodFacts) -> CrioSettings | None:
        """Return the settings that a pod requests; None if there is no work in the background."""
        handlers = self.settings.handlers
        if handlers and pod.runtime_handler not in handlers:
            return None
        settings, problems = crio_settings(pod.annotations)
        for problem in problems:
            log.say_once(
                (self.name, pod.uid, problem),
                "warning",
                "cannot follow an annotation",
                pod=pod.ref,
                err=problem,
            )
        return settings if settings != CrioSettings() else None


_state = _State("50-crio-annotations", Settings())


def configure(event: Configure) -> None:
    """Take the settings."""
    global _state
    _state = _State(event.name, event.settings)


def pre_create_container(event: PreCreateContainer) -> Adjustment | None:
    """Remove the container's quota, and set its housekeeping CPUs."""
    settings = _requested_settings(event.pod, event.decision)
    if settings is None:
        return None
    off = settings.quota_off and event.container.resources.cpu_quota > 0
    envs = {}
    if settings.irqs == "housekeeping" and _HOUSEKEEPING not in event.container.envs:
        envs[_HOUSEKEEPING] = str(_housekeeping(event.decision.own))
    return Adjustment(cpu_quota=-1, envs=envs) if off else Adjustment(envs=envs)


def pre_start_container(event: PreStartContainer) -> None:
    """Remove the quota of the pod's cgroup."""
    settings = _requested_settings(event.pod, event.decision)
    if settings is not None and settings.quota_off:
        _try(event.pod, lambda: open_quota(Path(_state.settings.cgroup_root), event.pod))


def pre_update_container_resources(event: PreUpdateContainerResources) -> Adjustment | None:
    """Keep the quota off when kubelet sets one."""
    settings = _requested_settings(event.pod, event.decision)
    if settings is None or not settings.quota_off or event.asked.cpu_quota < 1:
        return None
    return Adjustment(cpu_quota=-1)


def synchronize(event: Synchronize) -> None:
    """Apply the settings of all owners' pods, and restore the values of all other CPUs."""
    _state.machine = event.machine
    _handle(event, force=True)


def machine_changed(event: MachineChanged) -> None:
    """Record which CPUs are online."""
    _state.machine = event.after
    _handle(event, force=True)


def pools_changed(event: PoolsChanged) -> None:
    """React to owners whose CPUs have changed."""
    _handle(event)


def post_create_container(event: PostCreateContainer) -> None:
    """Prepare the CPUs of a new owner."""
    _handle(event)


def post_start_container(event: PostStartContainer) -> None:
    """Prepare the CPUs now at the latest, and take the container out of load balancing."""
    _handle(event)
    settings = _requested_settings(event.pod, event.decision)
    if settings is not None and settings.balance_off:
        _try(event.pod, lambda: _disable_load_balancing(event))


def post_stop_container(event: PostStopContainer) -> None:
    """Restore the settings."""
    _handle(event)


def post_remove_container(event: PostRemoveContainer) -> None:
    """Restore the settings of a container that never ran."""
    _handle(event)


def shutdown(event: Shutdown) -> None:
    """Restore all settings, unless a new version of this file has taken over."""
    if event.reason != "replaced":
        with _state.lock:
            _try(None, lambda: _irqs(CpuSet()))
            _try(None, lambda: _state.power.apply(()))


_HOUSEKEEPING = "OPENSHIFT_HOUSEKEEPING_CPUS"
_Event = (
    Synchronize
    | MachineChanged
    | PoolsChanged
    | PostCreateContainer
    | PostStartContainer
    | PostStopContainer
    | PostRemoveContainer
)


def _requested_settings(pod: PodFacts, decision: Decision) -> CrioSettings | None:
    return _state.settings_of(pod) if decision.own else None


def _handle(event: _Event, *, force: bool = False) -> None:
    state = _state
    state.owners.handle(event)
    with state.lock:
        cpus = state.owners.cpus(_cpus_without_irqs)
        if force or cpus != state.cpus_without_irqs:
            _try(None, lambda: _irqs(cpus))
        _try(None, lambda: state.power.apply((own, settings) for own, settings in state.owners.all()))


def _cpus_without_irqs(settings: CrioSettings, own: CpuSet) -> CpuSet:
    if settings.irqs == "housekeeping":
        return own - _housekeeping(own)
    return own if settings.irqs else CpuSet()


def _housekeeping(own: CpuSet) -> CpuSet:
    """Return the first CPU and the threads of its core."""
    first = own.first() if own else -1
    cpu = _state.machine.by_id.get(first) if _state.machine is not None else None
    core = _state.machine.cores[cpu.core] if _state.machine is not None and cpu is not None else CpuSet()
    return own & (core | CpuSet((first,) if own else ()))


def _irqs(cpus: CpuSet) -> None:
    settings = _state.settings
    moved = shared_irqs(Path(settings.proc), Path(settings.irq_state)).claim(
        _state.name, cpus, _state.owners.online
    )
    _state.cpus_without_irqs = cpus
    if moved.written:
        log.info("moved interrupts", off=str(cpus), written=moved.written, stay=moved.stay)


def _disable_load_balancing(event: PostStartContainer) -> None:
    above = disable_load_balancing(Path(_state.settings.cgroup_root), event.pod, event.container.id)
    if above:
        raise HookError(
            "cpu-load-balancing.crio.io has no effect: the scheduler balances the CPUs of the groups above, "
            + ", ".join(above)
        )


def _try(pod: PodFacts | None, do: Callable[[], object]) -> None:
    """Apply one setting; a failure is logged, at most once a minute."""
    try:
        do()
    except HookError as error:
        keys = {"pod": pod.ref} if pod is not None else {}
        log.say_once((_state.name, str(error)), "warning", "cannot follow an annotation", err=error, **keys)
