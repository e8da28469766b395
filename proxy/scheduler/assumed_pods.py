"""Assumed pods: pods that are bound, or being bound, to a node whose object may not show them yet.

Theory. Between the bind of a pod and the moment at which the object of its node counts the pod's CPUs, the
object is stale, and a second pod could be given the same CPUs. kube-scheduler knows the same problem, and
*assumes* a pod on its node before the bind has taken effect (AssumePod in
pkg/scheduler/backend/cache/cache.go). Here each pod that is being bound or is bound is assumed, whichever
program binds it. An assumed pod is *pending*, and counts in addition to the object, until

- the object of the node shows the pod, with as many CPUs as its containers that stay hold;
- the fingerprint of the node's object names exactly the pods that are bound to the node, and the pod runs: an
  object that lists no pods says in this way which pods it counts;
- the pod has ended or is gone;
- the pod has run for ``GRACE_S`` and the object still does not show it: the object never shows such pods;
- the bind was never seen: ``LOST_S`` after it began.

A pod that is bound and does not run yet stays pending however long it takes: kubelet takes the CPUs when it
admits the pod, and an image may take hours.

Nothing here is stored. After a restart the assumed pods are those that are bound, which the API server has,
with the CPUs that an annotation names, if any.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from proxy.pools.annotations import RESOURCE_STATUS
from proxy.scheduler.node_facts import SchedulableNode
from proxy.scheduler.pod_demand import PodDemand, with_cpus

GRACE_S = 20.0
LOST_S = 60.0


class AssumedPod(Struct, frozen=True):
    """A pod that is assumed on a node.

    Attributes:
        node: The node.
        demand: The pod; with the CPUs that its annotation names, if any.
        sequence: A number that orders the assumed pods of a node as they were bound.
        since: The time when it was assumed, by the clock.
        bound: Whether the API server has shown the pod as bound.
        running_since: The time when the pod was first seen running; None before.
        counted: Whether a fingerprint has shown that the object of the node counts the pod.
    """

    node: str
    demand: PodDemand
    sequence: int
    since: float
    bound: bool = False
    running_since: float | None = None
    counted: bool = False

    @property
    def pod(self) -> str:
        """The key of the pod."""
        return self.demand.key

    def is_lost(self, now: float) -> bool:
        """Return whether the bind was never seen."""
        return not self.bound and now - self.since > LOST_S

    def is_pending(self, node: SchedulableNode, now: float) -> bool:
        """Return whether the pod counts in addition to the object of the node."""
        if self.counted or is_shown(node, self.demand):
            return False
        if self.running_since is None or (self.demand.pod.cpuset and not node.counts_named):
            # Koordinator's object leaves out CPUs that annotations of pods name: the scheduler counts them.
            return True
        return now - self.running_since <= GRACE_S


class AssumedPods:
    """The assumed pods, by node and by key of the pod."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, AssumedPod]] = {}
        self._node_of: dict[str, str] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._node_of)

    def assume(self, node: str, demand: PodDemand, now: float) -> AssumedPod:
        """Assume a pod on a node; it is no longer assumed on another node.

        Args:
            node: The node.
            demand: The pod.
            now: The clock.
        """
        self.drop(demand.key)
        self._sequence += 1
        assumed = AssumedPod(node, demand, self._sequence, now)
        self._put(assumed)
        return assumed

    def observe(self, demand: PodDemand, now: float, *, running: bool) -> str:
        """Record that the API server shows a pod as bound.

        Args:
            demand: The pod, with its node.
            now: The clock.
            running: Whether its containers run.

        Returns:
            The node whose assumed pods changed.
        """
        assumed = self.by_key(demand.key)
        if assumed is None or assumed.node != demand.node:
            assumed = self.assume(demand.node, demand, now)
        since = (now if assumed.running_since is None else assumed.running_since) if running else None
        after = replace(assumed, demand=_resized(assumed.demand, demand), bound=True, running_since=since)
        self._put(after)
        return demand.node

    def confirm(self, assumed: AssumedPod) -> None:
        """Record that the object of the node counts an assumed pod."""
        self._put(replace(assumed, counted=True))

    def drop(self, pod: str) -> str:
        """Forget a pod; returns its node, empty if the pod was not assumed."""
        node = self._node_of.pop(pod, "")
        if node:
            del self._by_node[node][pod]
            if not self._by_node[node]:
                del self._by_node[node]
        return node

    def of(self, node: str) -> tuple[AssumedPod, ...]:
        """Return the assumed pods of a node in their order."""
        return tuple(sorted(self._by_node.get(node, {}).values(), key=lambda assumed: assumed.sequence))

    def by_key(self, pod: str) -> AssumedPod | None:
        """Return the assumed pod with a key; None if it is not assumed."""
        node = self._node_of.get(pod)
        return None if node is None else self._by_node[node][pod]

    def _put(self, assumed: AssumedPod) -> None:
        self._by_node.setdefault(assumed.node, {})[assumed.pod] = assumed
        self._node_of[assumed.pod] = assumed.node


def _resized(assumed: PodDemand, observed: PodDemand) -> PodDemand:
    """Return the demand of an assumed pod; after a resize in place, with its new requests.

    The CPUs that the bind has named stay named if the Pod object does not name any.
    """
    if assumed.spec.requests == observed.spec.requests:
        return assumed
    named = assumed.spec.annotations.get(RESOURCE_STATUS)
    if named is None or RESOURCE_STATUS in observed.spec.annotations:
        return observed
    return with_cpus(observed, named)


def is_shown(node: SchedulableNode, demand: PodDemand) -> bool:
    """Return whether the object of a node counts all that a pod holds."""
    shown = node.shown.get(demand.key)
    return shown is not None and len(shown) >= demand.lasting_cpus > 0
