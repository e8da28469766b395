"""Decide which rejected pods are ended: a pure decision from rejections, pods, and earlier ends.

Theory (kubernetes#84869). A pod that the node rejects stays bound to the node, and kubelet tries it again and
again. Only if this pod ended would its controller make another pod, which the scheduler could place
elsewhere. But the scheduler does not see why the pod did not fit, so it may choose the same node again, and a
controller that retries at once makes thousands of pods. So:

- Nothing is done before a pod was rejected ``after`` times.
- At most ``per_minute`` pods of the node end in a minute. After each pod of one controller, the next one of
  the same controller has to wait twice as long, from one minute to half an hour.
- While the node has no room it is marked, so that the scheduler prefers other nodes (``node_mark``).
- A pod that would be rejected by every node, because of its own fields, is not evicted: that would only move
  the problem.
- Pods that no controller makes again are left alone unless the operator wants otherwise. Pods whose
  controller binds them to this very node (DaemonSets, static pods) are left alone in any case, and so are
  pods that end already, and system pods by priority class.
- ``fail`` sets the pod's phase to Failed, as kubelet's admission does before any container of the pod has
  run. So a pod with a container that has started is never failed.
- A pod to which the plan is not applied (mode ``observe``) continues; the agent only reports what it would
  do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from msgspec import Struct, structs

from proxy.agent.objects.node_page import Rejection
from proxy.allocation.cpu_request import requested_whole_cpus
from proxy.config.cluster import RejectedPodsConfig, RejectedPolicy
from proxy.model.admission import AdmissionRule
from proxy.model.backoff import Backoff
from proxy.model.errors import InputError
from proxy.pools.pod_spec import pod_spec

MINUTE_S = 60.0
CONTROLLER_S, CONTROLLER_LONGEST_S = 60.0, 1800.0
"""The pause between two pods of one controller: the first, and the longest."""
CONTROLLER_PAUSES = Backoff(CONTROLLER_S, CONTROLLER_LONGEST_S)
FORGET_S = 2 * CONTROLLER_LONGEST_S
"""If no further pod of a controller ends for this long, the controller begins again with the first pause."""
EVERYWHERE_REASONS = frozenset(
    {
        "InvalidCPUSet",
        "InvalidCPURequest",
        "RefusedByHook",
        *(
            rule.reason
            for rule in (
                AdmissionRule.NAMESPACE,
                AdmissionRule.SYSTEM_NAMESPACE,
                AdmissionRule.REQUEST,
                AdmissionRule.WHOLE_CPUS,
                AdmissionRule.POD_LIMIT,
            )
        ),
    }
)
"""Reasons for which every node of the same configuration rejects the pod."""
_NO_WHOLE_CORES = "not multiple cpus per core"
"""Words of a cause for which every node rejects the pod: of kubelet's SMTAlignmentError and of Koordinator's
CPUBindPolicyError. The other causes of these two are a lack of room."""
_SYSTEM = frozenset({"system-node-critical", "system-cluster-critical"})

_MIRROR = "kubernetes.io/config.mirror"
"""Annotation of the objects that kubelet makes for static pods."""


class PodAtServer(Struct, frozen=True):
    """A rejected pod, as the API server has it.

    Attributes:
        controller: Kind and uid of its controller; None if it has none.
        ends: Whether it is being deleted, or its phase is final.
        is_static: Whether kubelet has it from a file.
        priority_class: Of the pod.
        has_run: Whether one of its containers has ever started.
        cpus: Whole CPUs that it requests.
    """

    controller: tuple[str, str] | None = None
    ends: bool = False
    is_static: bool = False
    priority_class: str = ""
    has_run: bool = False
    cpus: int = 0


def pod_at_server(item: Mapping[str, Any]) -> PodAtServer:
    """Read a Pod object of the API server."""
    metadata, spec, status = (item.get(part) or {} for part in ("metadata", "spec", "status"))
    owners = [owner for owner in metadata.get("ownerReferences") or () if isinstance(owner, Mapping)]
    controller = next((owner for owner in owners if owner.get("controller")), None)
    return PodAtServer(
        None if controller is None else (str(controller.get("kind")), str(controller.get("uid"))),
        ends=bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Succeeded", "Failed"),
        is_static=_MIRROR in (metadata.get("annotations") or {})
        or any(o.get("kind") == "Node" for o in owners),
        priority_class=str(spec.get("priorityClassName") or ""),
        has_run=any(map(_has_run, _statuses(status))),
        cpus=_cpus(item),
    )


def _statuses(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in ("initContainerStatuses", "containerStatuses"):
        yield from (entry for entry in status.get(part) or () if isinstance(entry, Mapping))


def _has_run(status: Mapping[str, Any]) -> bool:
    state = status.get("state") or {}
    return bool(
        status.get("restartCount") or status.get("lastState") or state.keys() & {"running", "terminated"}
    )


def _cpus(item: Mapping[str, Any]) -> int:
    try:
        requests = pod_spec(item, listed=True).requests
    except InputError:
        return 0
    return requested_whole_cpus(requests)


class EndPod(Struct, frozen=True):
    """End a pod.

    Attributes:
        rejection: The pod, and why.
        policy: The way in which it is ended.
        cpus: Whole CPUs that it requests.
        dry_run: The end of the pod is only reported, not carried out.
    """

    rejection: Rejection
    policy: RejectedPolicy
    cpus: int
    dry_run: bool = False


class SkippedPod(Struct, frozen=True):
    """A rejected pod that is not ended, and why."""

    rejection: Rejection
    why: str


class EndedPods(Struct, frozen=True):
    """The pods that were ended before.

    Attributes:
        times: When pods ended in the last minute.
        reported: Uids of pods whose end was only reported, because the plan is not applied to them.
        controllers: Maps the uid of a controller to the number of its pods that ended, and the time when the
            last one did. A pod without a controller has its own uid here, with how often its end was tried.
    """

    times: tuple[float, ...] = ()
    reported: frozenset[str] = frozenset()
    controllers: Mapping[str, tuple[int, float]] = {}


class EndingDecision(Struct, frozen=True):
    """The decision about rejected pods.

    Attributes:
        ends: Pods to end, in this order.
        skipped: Pods that are never ended, and why.
        later: Seconds after which to decide again, because a limit holds back; None for none.
        done: The history after these ends.
    """

    ends: tuple[EndPod, ...]
    skipped: tuple[SkippedPod, ...]
    later: float | None
    done: EndedPods


def rejected_everywhere(rejection: Rejection) -> bool:
    """Return whether every node of the same configuration rejects the pod."""
    return rejection.reason in EVERYWHERE_REASONS or _NO_WHOLE_CORES in rejection.message


def frequent_rejections(rejections: Iterable[Rejection], settings: RejectedPodsConfig) -> list[Rejection]:
    """Return the rejections, one for each pod, that are frequent enough to end the pod if it permits that."""
    if settings.policy is RejectedPolicy.RETRY:
        return []
    by_pod: dict[str, Rejection] = {}
    for rejection in rejections:
        if rejection.uid and rejection.count >= max(
            settings.after, by_pod[rejection.uid].count if rejection.uid in by_pod else 0
        ):
            by_pod[rejection.uid] = rejection
    return list(by_pod.values())


def decide(
    rejections: Iterable[Rejection],
    pods: Mapping[str, PodAtServer],
    settings: RejectedPodsConfig,
    history: EndedPods,
    now: float,
) -> EndingDecision:
    """Decide which pods end now.

    Args:
        rejections: The rejections that are frequent enough (``frequent_rejections``).
        pods: The pods by uid that the API server has.
        settings: Of the operator.
        history: The pods that were ended before.
        now: Seconds that only grow.
    """
    history = _recent(history, now)
    ends: list[EndPod] = []
    skipped: list[SkippedPod] = []
    waits: list[float] = []
    for rejection in rejections:
        pod = pods.get(rejection.uid)
        if pod is None or pod.ends:
            continue
        if why := _obstacle(rejection, pod, settings):
            skipped.append(SkippedPod(rejection, why))
            continue
        if not rejection.applied:
            if rejection.uid not in history.reported:
                history = structs.replace(history, reported=history.reported | {rejection.uid})
                ends.append(EndPod(rejection, settings.policy, pod.cpus, dry_run=True))
            continue
        key = pod.controller[1] if pod.controller else rejection.uid
        wait = max(_node_wait(history, settings, now), _controller_wait(history, key, now))
        if wait > 0:
            waits.append(wait)
            continue
        ends.append(EndPod(rejection, settings.policy, pod.cpus))
        history = _counted(history, key, now)
    return EndingDecision(tuple(ends), tuple(skipped), min(waits, default=None), history)


def _obstacle(rejection: Rejection, pod: PodAtServer, settings: RejectedPodsConfig) -> str:
    """Return why a pod is permanently left alone; empty if it may be ended."""
    kind = pod.controller[0] if pod.controller else ""
    if pod.is_static:
        return "kubelet has it from a file of this node"
    if kind == "DaemonSet":
        return "its DaemonSet would create it on this node again"
    if pod.priority_class in _SYSTEM:
        return f"it is of priority class {pod.priority_class}"
    if not kind and not settings.without_controller:
        return "no controller would create it again (rejectedPods.withoutController)"
    if settings.policy is RejectedPolicy.EVICT and rejected_everywhere(rejection):
        return f"every node would reject it ({rejection.reason})"
    if settings.policy is RejectedPolicy.FAIL and pod.has_run:
        return "one of its containers has run"
    return ""


def without_former_pods(history: EndedPods, rejected: Set[str]) -> EndedPods:
    """Return the history without the reports on pods that are no longer rejected."""
    return structs.replace(history, reported=history.reported & rejected)


def _recent(history: EndedPods, now: float) -> EndedPods:
    times = tuple(at for at in history.times if now - at < MINUTE_S)
    controllers = {uid: entry for uid, entry in history.controllers.items() if now - entry[1] < FORGET_S}
    return structs.replace(history, times=times, controllers=controllers)


def _node_wait(history: EndedPods, settings: RejectedPodsConfig, now: float) -> float:
    if len(history.times) < settings.per_minute:
        return 0.0
    return history.times[-settings.per_minute] + MINUTE_S - now


def _controller_wait(history: EndedPods, key: str, now: float) -> float:
    if key not in history.controllers:
        return 0.0
    count, last = history.controllers[key]
    return max(0.0, last + CONTROLLER_PAUSES.delay(count) - now)


def _counted(history: EndedPods, key: str, now: float) -> EndedPods:
    count = history.controllers.get(key, (0, 0.0))[0]
    controllers = {**history.controllers, key: (count + 1, now)}
    return structs.replace(history, times=(*history.times, now), controllers=controllers)
