"""The Events and the annotation ``resource-status`` that are written about pods.

There is an Event for an exclusive placement, a rejection, a repaired cpuset, and a hook that failed. The name
of an Event follows from the pod, the container and the reason, so that repetitions are one object with a
count.

A pod whose CPUs were chosen on the node gets the annotation ``resource-status``, as a scheduler writes it. A
key in it says that topoproxy wrote it: a later sandbox of the pod gets CPUs that are free at that time, and
is not bound to these (``proxy.pools.annotations``). Koordinator's scheduler does not read the key, and counts
the CPUs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from proxy.agent.objects.node_page import NodePage, PublishedPod, Rejection
from proxy.pools.annotations import CHOSEN_BY, RESOURCE_STATUS, THIS_NODE
from proxy.telemetry.port import HOOK_FAILED

SOURCE = "topoproxy"
_LONGEST_MESSAGE = 1024
"""Characters of a message (kubernetes pkg/apis/core/validation/events.go)."""
_ADVICE = {
    "TopologyAffinityError": "Fewer CPUs, another topology policy, or a node with more free CPUs on one NUMA "
    "node would help.",
    "UnexpectedAdmissionError": "Fewer CPUs or a node with more free CPUs would help.",
}
"""Remedies by the reason of a rejection; messages of admission already name theirs."""
_DRIFT = ("drift: another program wrote a cpuset: put back", "CpusetRepaired")
_CONFLICT = ("another program keeps writing the cpuset of a container", "CpusetConflict")

PODS = "/api/v1/pods"


def annotated_pods(page: NodePage) -> dict[str, dict[str, Any]]:
    """Return the JSON merge patches for pods whose CPUs were chosen on this node, by the pods' paths."""
    return {
        pod_path(pod.namespace, pod.name): _patch(pod) for pod in page.pods if pod.resource_status and pod.uid
    }


def pod_path(namespace: str, name: str) -> str:
    """Return the path of a pod at the API server."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _patch(pod: PublishedPod) -> dict[str, Any]:
    text = json.dumps({**json.loads(pod.resource_status), CHOSEN_BY: THIS_NODE}, separators=(",", ":"))
    return {"metadata": {"uid": pod.uid, "annotations": {RESOURCE_STATUS: text}}}


def removal_patch(patch: dict[str, Any]) -> dict[str, Any]:
    """Return the patch that removes the annotation of another patch."""
    return {"metadata": {"uid": patch["metadata"]["uid"], "annotations": {RESOURCE_STATUS: None}}}


def written_patches(pods: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the patches of annotations that topoproxy has written, from the pods at the API server."""
    patches = {}
    for pod in pods:
        metadata = pod.get("metadata") or {}
        text = (metadata.get("annotations") or {}).get(RESOURCE_STATUS)
        if _is_written_by_topoproxy(text):
            path = pod_path(metadata["namespace"], metadata["name"])
            patch = {"uid": metadata["uid"], "annotations": {RESOURCE_STATUS: text}}
            patches[path] = {"metadata": patch}
    return patches


def _is_written_by_topoproxy(text: object) -> bool:
    try:
        value = json.loads(str(text))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get(CHOSEN_BY) == THIS_NODE


class PodEvent(Struct, frozen=True):
    """An Event about a pod.

    Attributes:
        namespace, pod, uid: The pod.
        container: Empty for the pod as a whole.
        reason: In CamelCase.
        message: For people.
        warning: Whether it is a warning.
    """

    namespace: str
    pod: str
    uid: str
    container: str
    reason: str
    message: str
    warning: bool = False

    @property
    def name(self) -> str:
        """The name of the Event."""
        identity = "\0".join((self.uid, self.container, self.reason))
        return f"{self.pod[:200].rstrip('-.')}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    @property
    def path(self) -> str:
        """The path of the Event at the API server."""
        return f"/api/v1/namespaces/{self.namespace}/events/{self.name}"


def placed_events(before: NodePage | None, after: NodePage) -> Iterator[PodEvent]:
    """Yield an event for each container that has other exclusive CPUs than before.

    Args:
        before: The previous description; None after the start of the agent, so that there are no events about
            earlier placements.
        after: The newest description.
    """
    if before is None:
        return
    cpus_before = {
        (pod.uid, placed.name): placed.cpus for pod in before.pods for placed in pod.containers if placed.cpus
    }
    for pod in after.pods:
        for placed in pod.containers:
            if placed.cpus and cpus_before.get((pod.uid, placed.name)) != placed.cpus:
                why = f": {placed.reasons[0]}" if placed.reasons else ""
                message = f"Container {placed.name} has CPUs {placed.cpus} exclusively{why}"
                yield _event(pod, placed.name, "PlacedExclusively", message)


def rejection_event(rejection: Rejection) -> PodEvent:
    """Return the event of a rejection."""
    namespace, _, name = rejection.pod.partition("/")
    subject = f"Container {rejection.container}" if rejection.container else "The pod"
    verb = "is rejected" if rejection.applied else "would be rejected"
    advice = f" {_ADVICE[rejection.reason]}" if rejection.reason in _ADVICE else ""
    return PodEvent(
        namespace,
        name,
        rejection.uid,
        rejection.container,
        "PlacementRejected" if rejection.applied else "PlacementWouldBeRejected",
        f"{subject} {verb} by topoproxy: {rejection.message}{advice}",
        warning=rejection.applied,
    )


def notice_event(message: str, keys: Mapping[str, str], page: NodePage) -> PodEvent | None:
    """Return the event of a notice of the daemon; None if it concerns no running pod."""
    pod = next((pod for pod in page.pods if f"{pod.namespace}/{pod.name}" == keys.get("pod")), None)
    if pod is None:
        return None
    container = keys.get("container", "")
    for text_of_notice, reason in (_DRIFT, _CONFLICT):
        if message == text_of_notice:
            by = f" (probably {keys['probably']})" if keys.get("probably", "None") != "None" else ""
            text = (
                f"Another program{by} wrote the cpuset of container {container}: {keys.get('cpus', '')} is "
                "restored"
            )
            return _event(pod, container, reason, text, warning=True)
    if message == HOOK_FAILED:
        text = f"Hook {keys.get('hook', '')} failed: {keys.get('reason', '')}"
        return _event(pod, container, "HookFailed", text, warning=True)
    return None


def _event(
    pod: PublishedPod, container: str, reason: str, message: str, *, warning: bool = False
) -> PodEvent:
    return PodEvent(pod.namespace, pod.name, pod.uid, container, reason, message, warning)


def event_object(event: PodEvent, node: str, first: str, last: str, count: int) -> dict[str, Any]:
    """Return the object of an event.

    Args:
        event: The event.
        node: The name of the Node object.
        first: When it happened for the first time (RFC 3339).
        last: When it happened for the last time.
        count: How often it happened.
    """
    about = {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": event.namespace,
        "name": event.pod,
        "uid": event.uid,
    }
    if event.container:
        about["fieldPath"] = f"spec.containers{{{event.container}}}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event.name, "namespace": event.namespace},
        "involvedObject": about,
        "reason": event.reason,
        "message": event.message[:_LONGEST_MESSAGE],
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": SOURCE, "host": node},
        "reportingComponent": SOURCE,
        "reportingInstance": node,
        "firstTimestamp": first,
        "lastTimestamp": last,
        "count": count,
    }
