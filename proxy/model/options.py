"""The options of the CPU and topology policies, under kubelet's names.

See kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_options.go and
pkg/kubelet/cm/topologymanager/policy_options.go.

kubelet's options are texts, read as Go reads them; numbers and booleans of a YAML file are accepted as well.
An option that is unknown or invalid is refused when it is loaded. So is one that contradicts another; the
message then names both.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping

from msgspec import Struct, structs

from proxy.model.errors import ConfigError


class TopologyPolicy(enum.StrEnum):
    """kubelet's ``topologyManagerPolicy``."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"

    @property
    def is_strict(self) -> bool:
        """Whether a pod whose resources cannot be aligned is rejected; if not, it runs unaligned."""
        return self in (TopologyPolicy.RESTRICTED, TopologyPolicy.SINGLE_NUMA_NODE)


class Scope(enum.StrEnum):
    """kubelet's ``topologyManagerScope``: whether containers or whole pods are decided."""

    CONTAINER = "container"
    POD = "pod"


KUBELET_MAX_NODES = 8
"""kubelet's default of ``max-allowable-numa-nodes``, and the smallest value that it accepts."""

_CPU = "cpuManagerPolicyOptions"
_TOPOLOGY = "topologyManagerPolicyOptions"
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})
_GO_INT = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class CpuOptions(Struct, frozen=True):
    """How the static CPU policy chooses CPUs; each field is kubelet's option with hyphens for underscores.

    Attributes:
        full_pcpus_only: Whole cores only, otherwise SMTAlignmentError.
        strict_cpu_reservation: Reserved CPUs are not in the shared pool either.
        prefer_align_cpus_by_uncorecache: Stay within a last-level cache if possible.
        distribute_cpus_across_numa: Spread evenly over the nodes that are needed.
        distribute_cpus_across_cores: One thread of each core before any second one.
        align_by_socket: Sockets instead of nodes count for hints and allocation.
    """

    full_pcpus_only: bool = False
    strict_cpu_reservation: bool = False
    prefer_align_cpus_by_uncorecache: bool = False
    distribute_cpus_across_numa: bool = False
    distribute_cpus_across_cores: bool = False
    align_by_socket: bool = False

    def as_kubelet(self) -> dict[str, bool]:
        """Return all options under kubelet's names."""
        return {name.replace("_", "-"): on for name, on in structs.asdict(self).items()}


_CPU_NAMES = {name.replace("_", "-"): name for name in CpuOptions.__struct_fields__}
_EXCLUSIVE = (
    frozenset({"full-pcpus-only", "distribute-cpus-across-cores"}),
    frozenset({"distribute-cpus-across-numa", "distribute-cpus-across-cores"}),
    frozenset({"prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"}),
    frozenset({"prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"}),
)


class TopologyOptions(Struct, frozen=True):
    """How the topology policies merge.

    Attributes:
        prefer_closest_numa_nodes: Nodes close to each other before lower ids.
        max_allowable_numa_nodes: Reject machines with more nodes. None if it is not set; then there is no
            limit here, while kubelet's limit is 8.
    """

    prefer_closest_numa_nodes: bool = False
    max_allowable_numa_nodes: int | None = None

    def as_kubelet(self) -> dict[str, bool | int]:
        """Return all options under kubelet's names, with the limit that kubelet would keep."""
        return {
            "prefer-closest-numa-nodes": self.prefer_closest_numa_nodes,
            "max-allowable-numa-nodes": self.max_allowable_numa_nodes or KUBELET_MAX_NODES,
        }


def parse_cpu_options(raw: Mapping[str, object] | None) -> CpuOptions:
    """Read ``cpuManagerPolicyOptions``.

    Raises:
        ConfigError: An option is unknown, is no boolean, or excludes another.
    """
    _known(_CPU, raw, _CPU_NAMES)
    on = {name: _go_bool(_CPU, name, value) for name, value in (raw or {}).items()}
    for option, other in itertools.combinations([name for name in _CPU_NAMES if on.get(name)], 2):
        if {option, other} in _EXCLUSIVE:
            raise ConfigError(f"cannot use {_CPU}: {option} and {other} exclude each other")
    return CpuOptions(**{_CPU_NAMES[name]: value for name, value in on.items()})


def parse_topology_options(raw: Mapping[str, object] | None) -> TopologyOptions:
    """Read ``topologyManagerPolicyOptions``.

    Raises:
        ConfigError: An option is unknown or has no value of its kind, or the limit is below kubelet's least.
    """
    closest, limit = "prefer-closest-numa-nodes", "max-allowable-numa-nodes"
    options = raw or {}
    _known(_TOPOLOGY, options, (closest, limit))
    most = _go_int(_TOPOLOGY, limit, options[limit]) if limit in options else None
    if most is not None and most < KUBELET_MAX_NODES:
        raise ConfigError(
            f"cannot use {_TOPOLOGY}: {limit} is {most}, it must be {KUBELET_MAX_NODES} or more"
        )
    return TopologyOptions(
        closest in options and _go_bool(_TOPOLOGY, closest, options[closest]),
        most,
    )


def check_cpu_options(options: CpuOptions, policy: TopologyPolicy, sockets: int, nodes: int) -> None:
    """Check the CPU options against the topology policy and the machine.

    Args:
        options: The options.
        policy: The topology policy.
        sockets: How many sockets the machine has.
        nodes: How many NUMA nodes it has.

    Raises:
        ConfigError: The options do not fit the policy or the machine.
    """
    if not options.align_by_socket:
        return
    if policy is TopologyPolicy.SINGLE_NUMA_NODE:
        raise ConfigError(
            f"cannot use {_CPU}: align-by-socket and topologyManagerPolicy {policy} exclude each other"
        )
    if sockets > nodes:
        raise ConfigError(
            f"cannot use {_CPU}: align-by-socket needs at least as many NUMA nodes as sockets, "
            f"this machine has {sockets} sockets and {nodes} NUMA nodes"
        )


def check_topology_options(
    options: TopologyOptions, policy: TopologyPolicy, nodes: int, *, distances: bool
) -> None:
    """Check the topology options against the machine.

    Args:
        options: The options.
        policy: The topology policy; under ``none`` no option is checked.
        nodes: How many NUMA nodes the machine has.
        distances: Whether it reports the distances between them.

    Raises:
        ConfigError: The options do not fit the policy or the machine.
    """
    if policy is TopologyPolicy.NONE:
        return
    most = options.max_allowable_numa_nodes
    if most is not None and nodes > most:
        raise ConfigError(
            f"cannot use topologyManagerPolicy {policy}: this machine has {nodes} NUMA nodes, "
            f"max-allowable-numa-nodes is {most}"
        )
    if options.prefer_closest_numa_nodes and not distances:
        raise ConfigError(
            f"cannot use {_TOPOLOGY}: prefer-closest-numa-nodes needs the distances between all NUMA nodes, "
            "this machine does not report them"
        )


def _known(where: str, raw: Mapping[str, object] | None, names: Mapping[str, str] | tuple[str, ...]) -> None:
    for name in raw or {}:
        if name not in names:
            raise ConfigError(f"cannot use {where}: {name!r} is unknown (known: {', '.join(names)})")


def _go_bool(where: str, name: str, value: object) -> bool:
    text = _text(value)
    if text in _TRUE or value is True:
        return True
    if text in _FALSE or value is False:
        return False
    raise ConfigError(f"cannot use {where}: {name} is {value!r}, which is not a boolean (true or false)")


def _go_int(where: str, name: str, value: object) -> int:
    text = _text(value)
    if text is None or not _GO_INT.fullmatch(text):
        raise ConfigError(f"cannot use {where}: {name} is {value!r}, which is not a whole number")
    return int(text)


def _text(value: object) -> str | None:
    """Return a text or number as text; None for anything else."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
