"""Derive the state of kubelet's CPU manager from its settings and its state file.

Three sources, the best first. ``/configz`` is what kubelet runs with. Its configuration file is what it would
run with if flags and drop-in files do not override it. Its state file names the policy that last wrote it,
and kubelet does not start where that differs from its configuration (kubernetes v1.36
pkg/kubelet/cm/cpumanager/state/state_checkpoint.go, restoreState). A difference between two of them is
reported.

The assigned CPUs are in the state file alone, and count where the file itself has policy ``static``. Only the
running kubelet's own report of another policy makes the file obsolete. The configuration file does not: it
may be changed long before kubelet is restarted, and until then the assigned CPUs are in effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.allocation.cpu_policy import CpuPolicy, CpuStateError
from proxy.backends.kubelet.manager_settings import ManagerSettings
from proxy.backends.kubelet.state_files import StateFileContents
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager, Held
from proxy.model.options import CpuOptions, parse_cpu_options

if TYPE_CHECKING:
    from proxy.allocation.cpu_topology import CpuTopology
    from proxy.backends.kubelet.checkpoints import Checkpoint

STATIC = "static"
_DEFAULTS = {"policy": "none", "topology_policy": "none", "topology_scope": "container"}
_NO_PODS: Held = {}
REST = "(pod)"
"""In place of a container's name where CPUs are a pod's as a whole; no container can be called so."""


class KubeletSettingsReport(Struct, frozen=True):
    """Kubelet's settings, from kubelet or its configuration file.

    Attributes:
        settings: None where they are unknown.
        source: Where they came from, in words.
        problems: Why a source could not be read.
        live: True where they are from the running kubelet.
    """

    settings: ManagerSettings | None = None
    source: str = ""
    problems: tuple[str, ...] = ()
    live: bool = False


def put_together(
    reported: KubeletSettingsReport, seen: StateFileContents, path: str, topology: Callable[[], CpuTopology]
) -> CpuManager:
    """Return the state of kubelet's CPU manager.

    Args:
        reported: Its settings.
        seen: Its state file.
        path: Where that file is.
        topology: Returns the machine, for reserves that are given as an amount.
    """
    settings, checkpoint = reported.settings, seen.checkpoint
    written = checkpoint.policy if checkpoint else ""
    values, sources, problems = _values(reported)
    problems += [seen.problem] if seen.problem else []
    policy = values.get("policy", written)
    if checkpoint is not None and settings is None:
        sources["policy"] = path
    elif checkpoint is not None and written != policy:
        problems.append(
            f"kubelet's CPU manager has policy {policy} by {sources['policy']},"
            f" but {path} was written under policy {written or '?'}"
        )
    reserved, sources["reserved"], fault = _reserved(reported, policy, topology)
    default, held, other = CpuSet(), _NO_PODS, ""
    if checkpoint is not None and written == STATIC and not (reported.live and policy != STATIC):
        default, held, other = _held(checkpoint, path)
        sources["default"] = sources["held"] = "" if other else path
    return CpuManager(
        policy,
        (settings.options or {}) if settings else {},
        reserved,
        values.get("topology_policy", ""),
        values.get("topology_scope", ""),
        default,
        held,
        {name: source for name, source in sources.items() if source},
        (*problems, *(words for words in (fault, other) if words)),
    )


def _values(reported: KubeletSettingsReport) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return settings that have a default, where settings came from, and what is wrong with them."""
    settings, problems = reported.settings, [*reported.problems]
    if settings is None:
        return {}, {}, problems
    values, sources = {}, {"options": reported.source if settings.options is not None else ""}
    for name, default in _DEFAULTS.items():
        value = getattr(settings, name)
        values[name] = value or default
        sources[name] = reported.source if value else f"kubelet's default, {reported.source} does not set it"
    return (
        values,
        sources,
        [*problems, *(f"cannot use what {reported.source} says of {w}" for w in settings.problems)],
    )


def _reserved(
    reported: KubeletSettingsReport, policy: str, topology: Callable[[], CpuTopology]
) -> tuple[CpuSet, str, str]:
    """Return the CPUs that are kept back, where they came from, and what is wrong.

    Only policy ``static`` turns an amount into CPUs, as its allocator would choose them (kubernetes v1.36
    pkg/kubelet/cm/cpumanager/policy_static.go, NewStaticPolicy).
    """
    settings = reported.settings
    if settings is None:
        return CpuSet(), "", ""
    if settings.reserved is not None:
        return settings.reserved, reported.source, ""
    if not settings.reserved_milli or policy != STATIC:
        return CpuSet(), "", ""
    amount = -(-settings.reserved_milli // 1000)
    try:
        options = parse_cpu_options(settings.options)
    except ConfigError:  # a kubelet newer than we know
        options = CpuOptions()
    try:
        cpus = CpuPolicy.of(topology(), options, None, amount).reserved
    except CpuStateError as error:
        return CpuSet(), "", f"cannot determine which {amount} CPUs kubelet keeps back: {error}"
    return cpus, f"{reported.source}, {amount} of them, as kubelet chooses", ""


def _held(checkpoint: Checkpoint, path: str) -> tuple[CpuSet, Held, str]:
    """Read the CPUs that kubelet assigned: its default set, the holders, and what is wrong."""
    from proxy.backends.kubelet.checkpoint_contents import held_cpus
    from proxy.backends.kubelet.checkpoint_writer import pods_of
    from proxy.backends.kubelet.checkpoints import CheckpointError

    if checkpoint.version == 1 and checkpoint.fields.get("entries"):
        return CpuSet(), {}, f"cannot use {path}: it is of a kubelet before 1.18, and names no pods"
    try:
        found, pods = held_cpus(checkpoint), pods_of(checkpoint)
    except CheckpointError as error:
        return CpuSet(), {}, f"cannot use {path}: {error}"
    held = {uid: {n: c for n, c in names.items() if c} for uid, names in found.held.items()}
    for uid, cpus in pods.items():
        rest = cpus
        for each in held.get(uid, {}).values():
            rest -= each
        if rest:
            held.setdefault(uid, {})[REST] = rest
    return found.default, {uid: names for uid, names in held.items() if names}, ""
