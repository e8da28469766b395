"""The interface between the topology manager and every provider: the ``Provider`` protocol.

A provider answers for one kind of resource. For a container or a pod it reports which NUMA nodes can serve it
(hints), it allocates under the hint that the policy merged from all answers, and it explains
what was missing when a request was rejected. This is kubelet's ``HintProvider`` (kubernetes v1.36,
pkg/kubelet/cm/topologymanager/topology_manager.go: ``GetTopologyHints``, ``GetPodTopologyHints``,
``Allocate``), with three differences:

* A provider is a value. The node holds the providers with nothing granted, the state of the node holds them
  with the grants of its containers, and an allocation returns the provider after it. So a decision can be
  tried and dropped, and the next container of a pod is decided after the grants of the earlier ones.
* A provider reads the state of the node only through ``NodeView``, before a decision, in ``prepare``.
* A shortfall is explained in numbers. kubelet reports only that the topology manager rejected the request.

A new provider is one class that inherits from ``Provider`` (everything but ``name``, ``wants``, ``hints`` and
``allocate`` has a default) and one entry in ``proxy.engine.node.PROVIDERS``.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, Self

from msgspec import Struct, field

from proxy.model.explanation import Shortfall
from proxy.model.grants import Grants
from proxy.model.hint import Hints, TopologyHint
from proxy.model.idset import CpuSet, Mask
from proxy.model.kubelet import Held
from proxy.model.options import Scope
from proxy.model.requests import PodRequests
from proxy.model.workload import Container, LocatedDevice, Pod, Request

Preferences = Mapping[tuple[str, str], tuple[str, ...] | None]
"""Devices that plugins prefer, by container and resource."""
NO_PREFERENCES: Preferences = {}


class Serves(enum.Enum):
    """The containers without exclusive CPUs and without devices for which a provider has to be queried."""

    NONE = enum.auto()
    GUARANTEED = enum.auto()
    ALL = enum.auto()


class ProviderRequest(Struct, frozen=True):
    """A request as every provider reads it.

    Attributes:
        pod: The pod.
        requests: What its containers request, in the order of the pod.
        name: The container; empty for the pod as a whole, or for a container that represents the pod.
        cri_resources: The resources of the container or the sandbox in the CRI call.
        scope: Whether hints are requested for the container or for the pod as a whole.
        exclusive: Whether it may get exclusive CPUs.
        cpus: How many exclusive CPUs are requested.
        avoid: CPUs that must not be chosen.
        even: Whether CPUs are divided evenly over the NUMA nodes of the hint.
        unmerged: Whether the policy merges no hints (``none``), so that providers choose by themselves.
        under_pod_hint: Whether the hint is that of the pod, so that it applies to all containers of the pod.
        may_leave_hint: Whether the policy admits resources of other NUMA nodes than those of the hint.
        preferred: What device plugins prefer, by container and resource; None if the plugin has to be
            queried first. Plugins that are not named have no preference.
    """

    pod: Pod
    requests: PodRequests
    name: str
    cri_resources: Request
    scope: Scope = Scope.CONTAINER
    exclusive: bool = True
    cpus: int = 0
    avoid: CpuSet = field(default_factory=CpuSet)
    even: bool = False
    unmerged: bool = False
    under_pod_hint: bool = False
    may_leave_hint: bool = False
    preferred: Preferences = NO_PREFERENCES

    @property
    def whole(self) -> bool:
        """Whether the request is the sum over the containers of a pod."""
        return self.name == "" and self.requests.containers[0].name != ""

    @property
    def assigned_devices(self) -> tuple[LocatedDevice, ...]:
        """Devices that kubelet's device manager has assigned already."""
        return self.cri_resources.devices


class NodeView(Protocol):
    """The part of a node's state that a provider may read before a decision."""

    @property
    def pods(self) -> Mapping[str, Pod]:
        """Sandboxes by id."""

    @property
    def containers(self) -> Mapping[str, Container]:
        """Containers by id."""

    @property
    def kubelet_cpus(self) -> Held:
        """CPUs that kubelet's own CPU manager holds for containers."""

    def in_sandbox(self, sandbox_id: str) -> list[Container]:
        """Return the containers of a sandbox."""

    def exclusive_cpus(self, pod_key: str) -> tuple[dict[str, CpuSet], CpuSet]:
        """Return exclusive CPUs: those of a pod by container name, and those of all other pods."""

    def last_cpus(self, owner: str) -> CpuSet:
        """Return the CPUs that an owner holds, or held when it ended."""

    def promised_cpus(self, owner: str) -> CpuSet:
        """Return CPUs to which ended containers of other owners may come back."""


class Allocation(Struct, frozen=True):
    """The result of one provider's allocation.

    Attributes:
        provider: The provider after the grant.
        grants: All grants of the container, including this one.
        steps: The steps of the allocator, in sentences.
    """

    provider: Provider
    grants: Grants
    steps: Sequence[str] = ()


class Provider(Protocol):
    """One kind of resource: hints, allocation, and the explanation of a shortfall."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Name in records and explanations, such as ``cpu``."""

    @property
    def serves(self) -> Serves:
        """Which containers without exclusive CPUs and devices it has to be queried for."""
        return Serves.NONE

    @property
    def accounts(self) -> bool:
        """Whether it keeps account of running containers, so that ``account`` has to be called."""
        return False

    def account(
        self,
        pods: Mapping[str, Pod],
        containers: Mapping[str, Container],
        changed_pods: Collection[Pod],
        changed: Collection[Container],
    ) -> Self:
        """Return the provider after containers have changed: new grants are charged, ended ones released.

        Args:
            pods: All sandboxes by id.
            containers: All containers by id.
            changed_pods: Sandboxes that came, changed or went, as before and as now.
            changed: Containers that came, changed or went, as before and as now.
        """
        return self

    def prepare(self, view: NodeView, request: ProviderRequest) -> Self:
        """Return the provider for one decision: with the grants of others, and those that the pod may reuse.

        Raises:
            AllocationRejectedError: The request contradicts the settings of the node.
        """
        return self

    def wants(self, request: ProviderRequest) -> bool:
        """Return whether the request contains anything that this provider grants."""

    def hints(self, request: ProviderRequest) -> Hints:
        """Return the hints for the container, or in scope ``pod`` for the pod as a whole, by resource."""

    def allocate(self, request: ProviderRequest, hint: TopologyHint, grants: Grants) -> Allocation:
        """Allocate for a container under the merged hint.

        Args:
            request: The request; ``request.name`` is the container.
            hint: The merged hint.
            grants: The grants of the providers before this one.

        Raises:
            AllocationRejectedError: The request cannot be served.
        """

    def holds(self, request: ProviderRequest, name: str, grants: Grants) -> Grants:
        """Return the grants of a container after later containers of its pod have been served.

        A later container may take over part of an init container's grants.
        """
        return grants

    def release(self, grants: Grants) -> Grants:
        """Return the grants that an ended init container keeps once a later container has started."""
        return grants

    def adopt(self, pod: Pod, request: Request, mems: Mask, grants: Grants, *, running: bool) -> Grants:
        """Return the grants of a container that was created without a decision, or under other settings.

        Args:
            pod: The pod.
            request: The container's resources, from the CRI call or from the runtime.
            mems: Its memory nodes.
            grants: Its recorded grants.
            running: Whether it uses its resources already, whatever is recorded.
        """
        return grants

    def explain_shortfall(self, request: ProviderRequest, node: int) -> tuple[Shortfall, ...] | None:
        """Return the resources that a NUMA node is short of for the request.

        Returns:
            Empty if the node has enough; None if the node could not serve the request even if it were empty.
        """
        return ()
