"""A pod to place: the amounts that a scheduler counts, and the request to the node's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from proxy.engine.pod_dry_run import ArrivingPod
from proxy.model.workload import Request
from proxy.pools.cri_resources import cri_request, pod_of, sandbox_total
from proxy.pools.pod_spec import PodSpec, counted_by_scheduler, without_named_cpus

SOURCE = "the pod's manifest"


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """The template of a pod: what all copies have in common.

    Attributes:
        spec: The pod.
        needs: Resource to amount that the scheduler subtracts from a node.
        total: The request of its sandbox.
        requests: The requests of its containers, by name.
        node_name: The node that the pod names; empty for any.
        where: File and line that it came from, for messages.
        names_node: Whether ``node_name`` is its ``nodeName``, so that no scheduler chooses a node for it.
    """

    spec: PodSpec
    needs: Mapping[str, int]
    total: Request
    requests: tuple[tuple[str, Request], ...]
    node_name: str
    where: str
    names_node: bool = False

    def copy(self, name: str, number: int, node_name: str = "") -> SimulatedPod:
        """Make a pod.

        Args:
            name: Its name.
            number: Distinguishes it from all other pods of the simulation.
            node_name: The node that it must run on; that of the template if empty.
        """
        uid = f"{self.spec.uid or 'pod'}-{number}"
        spec = replace(self.spec, uid=uid, name=name, requests=replace(self.spec.requests, uid=uid))
        arrival = ArrivingPod(pod_of(spec, f"sandbox-{number}", SOURCE), self.total, self.requests)
        return SimulatedPod(arrival, self, node_name or self.node_name)


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """A pod to place on a node.

    Attributes:
        arrival: The pod as its node's engine gets it; the sandbox id is unique among all pods.
        pod_template: The part that it has in common with its copies.
        node_name: The node that the pod names; empty for any.
    """

    arrival: ArrivingPod
    pod_template: PodTemplate
    node_name: str = ""

    @property
    def ref(self) -> str:
        """``namespace/name``."""
        return self.arrival.pod.ref

    @property
    def names_node(self) -> bool:
        """Whether ``node_name`` is its ``nodeName``: no scheduler chooses a node for it."""
        return self.pod_template.names_node

    @property
    def needs(self) -> Mapping[str, int]:
        """The amounts that the scheduler subtracts from a node."""
        return self.pod_template.needs

    @property
    def where(self) -> str:
        """File and line that it came from."""
        return self.pod_template.where


def pod_template_of(
    spec: PodSpec, node_name: str = "", where: str = "", *, is_bound: bool = False, names_node: bool = False
) -> PodTemplate:
    """Return the template of a pod: its request to the scheduler, and to the engine of its node.

    Args:
        spec: The pod.
        node_name: The node that it must run on; empty for any.
        where: File and line that it came from, for messages.
        is_bound: Whether this very pod runs on ``node_name``. If not, the CPUs that its annotation
            ``resource-status`` names are dropped, because a scheduler chose them on that node and for one
            pod.
        names_node: Whether ``node_name`` is its ``nodeName``.
    """
    if not is_bound:
        spec = without_named_cpus(spec)
    requests = tuple(
        (container.name, cri_request(container, spec.requests.pod_level_limits))
        for container in spec.requests.containers
    )
    total = sandbox_total(spec.requests, spec.requests.pod_level_limits)
    return PodTemplate(spec, needs_of(spec), total, requests, node_name, where, names_node)


def needs_of(spec: PodSpec) -> dict[str, int]:
    """Return the amounts that a scheduler subtracts from a simulated node, by resource, without zeros."""
    needs = counted_by_scheduler(spec)
    return {resource: amount for resource, amount in needs.items() if amount and resource not in _UNCOUNTED}


_UNCOUNTED = ("ephemeral-storage",)
"""Machine descriptions do not contain disks."""
