"""The daemon's description of the node (``GET /node``), as values from which the objects are made."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from proxy.model.errors import UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode


class PublishedContainer(Struct, frozen=True, rename="camel"):
    """A container; ``cpus`` are its exclusive CPUs."""

    name: str
    cpus: str = ""
    memory: tuple[dict[str, str | int], ...] = ()
    reasons: tuple[str, ...] = ()


class PublishedPod(Struct, frozen=True, rename="camel"):
    """A pod.

    Attributes:
        namespace, name, uid: The pod.
        applied: Whether the plan is applied to it.
        resource_status: Set if its CPUs were chosen on the node for the pod as a whole.
        set_aside: CPUs that are kept for it and that no running container of it owns.
        counted: Whether the amounts of the page include its CPUs: only after a container was placed.
        containers: Its running containers.
    """

    namespace: str
    name: str
    uid: str
    applied: bool = True
    resource_status: str = ""
    set_aside: str = ""
    counted: bool = True
    containers: tuple[PublishedContainer, ...] = ()


class PublishedNumaNode(Struct, frozen=True, rename="camel"):
    """A NUMA node; amounts are bytes."""

    id: int
    distances: dict[str, int] = field(default_factory=dict)
    memory: int = 0
    hugepages: dict[str, int] = field(default_factory=dict)


class Policies(Struct, frozen=True, rename="camel"):
    """The policies in effect, with kubelet's values; empty if the daemon does not report them."""

    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"
    cpu_manager_policy: str = "none"
    cpu_manager_policy_options: str = ""
    memory_manager_policy: str = ""
    topology_manager_policy_options: str = ""
    cpu_bind_policy: str = ""
    numa_allocate_strategy: str = ""
    pod_limit: str = field(default="", name="maxCPUsPerPod")
    namespace_limit: str = field(default="", name="maxCPUsPerNamespace")
    node_limit: str = field(default="", name="maxCPUsPerNode")
    owner_namespaces: str = ""
    floor: str = field(default="", name="sharedFloor")
    numa_floor: str = field(default="", name="sharedFloorPerNUMANode")

    def by_name(self) -> dict[str, str]:
        """Return the policies that are reported, by the names of attributes."""
        names = zip(self.__struct_encode_fields__, self.__struct_fields__, strict=True)
        return {name: value for name, member in names if (value := getattr(self, member))}


class PublishedZone(Struct, frozen=True, rename="camel"):
    """A zone of a NodeResourceTopology: quantities by resource, as texts."""

    name: str
    resources: tuple[dict[str, str], ...] = ()
    type: str = "Node"


class KoordinatorPart(Struct, frozen=True, rename="camel"):
    """The annotations and zones that Koordinator's agent writes into a NodeResourceTopology."""

    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    topology_policies: tuple[str, ...] = ()
    zones: tuple[PublishedZone, ...] = ()


class Rejection(Struct, frozen=True, rename="camel"):
    """A pod, or a container of it, that is rejected repeatedly.

    Attributes:
        pod, uid: The pod: namespace/name, and its uid.
        container: Empty for the pod as a whole.
        reason, message: Why.
        count: How often it was rejected.
        applied: Whether the plan is applied to the pod; if not, the pod continues in spite of the rejection.
        first, last: When it was rejected, in seconds since the epoch.
    """

    pod: str
    uid: str
    container: str = ""
    reason: str = ""
    message: str = ""
    count: int = 1
    applied: bool = True
    first: float = 0.0
    last: float = 0.0


class NodePage(Struct, frozen=True):
    """The node as the daemon describes it.

    Attributes:
        name: Of the Node object.
        mode: ``enforce``, ``observe``, ...
        published: False if the node is released, or about to be.
        applied: Whether the plan is applied on the node.
        policies: In effect.
        reserved: CPUs that no container owns.
        free: CPUs that a new owner may get.
        withheld: Of the reserved CPUs, those that the shared pool does not have either.
        floor: CPUs that are not free only because the shared pool needs some; None if the daemon does not
            report them.
        cpus: Online CPUs: id, core, socket, NUMA node.
        numa_nodes: In ascending order.
        memory: Bytes by NUMA node and resource, ``allocatable`` and ``free``; empty if none is promised.
        devices: The devices that topoproxy assigns, by zone.
        device_resources: The same devices, summed over the node.
        pods: The pods that run.
        koordinator: For Koordinator's scheduler.
        rejections: The rejections that are not over.
        version: The version of the changes that it includes.
    """

    name: str
    mode: str
    published: bool
    applied: bool
    policies: Policies
    reserved: str = field(name="reservedCPUs")
    free: str = field(name="freeCPUs")
    cpus: tuple[tuple[int, int, int, int], ...]
    numa_nodes: tuple[PublishedNumaNode, ...] = field(name="numaNodes")
    memory: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    devices: tuple[PublishedZone, ...] = ()
    device_resources: tuple[dict[str, str], ...] = field(default=(), name="deviceResources")
    pods: tuple[PublishedPod, ...] = ()
    koordinator: KoordinatorPart = field(default_factory=KoordinatorPart)
    rejections: tuple[Rejection, ...] = ()
    version: str = ""
    withheld: str = field(default="", name="withheldCPUs")
    floor: str | None = field(default=None, name="floorCPUs")


def passthrough_page(name: str) -> NodePage:
    """Return the description of a node whose daemon only relays calls and so has no description itself."""
    mode, policies = NodeMode.PASSTHROUGH.value, Policies()
    return NodePage(name, mode, False, False, policies, reserved="", free="", cpus=(), numa_nodes=())


def read_node_page(page: object) -> NodePage:
    """Read the answer of the daemon.

    Raises:
        UnavailableError: The answer has another form: the daemon is of another version.
    """
    try:
        return msgspec.convert(page, NodePage)
    except (msgspec.ValidationError, ValueError) as error:
        raise UnavailableError(f"cannot read the daemon's description of the node: {error}") from error


def all_cpus(lists: Iterable[str]) -> CpuSet:
    """Return the union of CPU lists."""
    cpus = CpuSet()
    for text in lists:
        cpus |= CpuSet.parse(text) if text else CpuSet()
    return cpus
