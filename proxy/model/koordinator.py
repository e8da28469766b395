"""Koordinator's CPU bind policies: the values that pods request and nodes prescribe.

The values are the texts of labels and annotations (Koordinator v1.8.0 apis/extension/numa_aware.go).
Koordinator's document on CPU orchestration specifies more values than its code implements:
``ConstrainedBurst`` and ``DistributeEvenly`` are only constants in the code. Here they mean what the document
says.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from proxy.model.options import TopologyPolicy


class BindPolicy(enum.StrEnum):
    """How CPUs are chosen for a pod that owns CPUs; ConstrainedBurst narrows the pool of a sharing pod."""

    NONE = ""
    DEFAULT = "Default"
    FULL_PCPUS = "FullPCPUs"
    SPREAD_BY_PCPUS = "SpreadByPCPUs"
    CONSTRAINED_BURST = "ConstrainedBurst"


class ExclusivePolicy(enum.StrEnum):
    """The pods of the same policy that a pod would rather not share cores, or NUMA nodes, with."""

    NONE = ""
    DEFAULT = "Default"
    PCPU_LEVEL = "PCPULevel"
    NUMA_NODE_LEVEL = "NUMANodeLevel"


class NodeBindPolicy(enum.StrEnum):
    """The bind policy that a node prescribes for all pods that own CPUs."""

    NONE = ""
    FULL_PCPUS_ONLY = "FullPCPUsOnly"
    SPREAD_BY_PCPUS = "SpreadByPCPUs"


class NumaStrategy(enum.StrEnum):
    """Which NUMA nodes are filled first."""

    NONE = ""
    MOST_ALLOCATED = "MostAllocated"
    LEAST_ALLOCATED = "LeastAllocated"
    DISTRIBUTE_EVENLY = "DistributeEvenly"


class NumaPolicy(enum.StrEnum):
    """How resources are aligned to NUMA nodes."""

    NONE = ""
    BEST_EFFORT = "BestEffort"
    RESTRICTED = "Restricted"
    SINGLE_NUMA_NODE = "SingleNUMANode"


KUBERNETES: Mapping[NumaPolicy, TopologyPolicy] = {
    NumaPolicy.NONE: TopologyPolicy.NONE,
    NumaPolicy.BEST_EFFORT: TopologyPolicy.BEST_EFFORT,
    NumaPolicy.RESTRICTED: TopologyPolicy.RESTRICTED,
    NumaPolicy.SINGLE_NUMA_NODE: TopologyPolicy.SINGLE_NUMA_NODE,
}
"""The topology policy of Kubernetes for each of them."""


class NumaExclusive(enum.StrEnum):
    """Whether a pod on one NUMA node stays apart from pods that span nodes."""

    NONE = ""
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class KeepQuota(enum.StrEnum):
    """Which pods that own CPUs keep their CFS quota."""

    NEVER = "never"
    SEVERAL_CONTAINERS = "several-containers"
    ALWAYS = "always"


class SuppressMode(enum.StrEnum):
    """How BE pods are limited to the CPU time that others leave idle."""

    OFF = "off"
    CPUSET = "cpuset"
    QUOTA = "cfs-quota"


class BeCpuset(enum.StrEnum):
    """How BE containers are kept on the BE pool."""

    NARROW = "narrow"
    ERASE = "erase"
