"""The part of the agent that ends rejected pods, and marks the node while it has no room for them.

It follows the daemon, reads the pods that may be ended, and carries out the decisions of ``policy``. The API
server has the last word: an eviction respects disruption budgets, and every request names the uid of the pod,
so that another pod of the same name is never ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import Callable

from proxy.agent.api_client import ApiServerError, JsonObject
from proxy.agent.node_follower import DaemonNotice, NodeFollower
from proxy.agent.objects.node_page import NodePage, Rejection, read_node_page
from proxy.agent.objects.pod_events import PodEvent, event_object
from proxy.agent.rejections.node_mark import (
    KEY,
    NodeMark,
    free_cpus,
    from_annotation,
    is_over,
    marked,
    node_patch,
)
from proxy.agent.rejections.policy import (
    EVERYWHERE,
    EndedPods,
    EndPod,
    PodAtServer,
    decide,
    due,
    pod_at_server,
)
from proxy.agent.session import AgentSession
from proxy.config.cluster import RejectedPolicy
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import TopoproxyError, UnavailableError

PAUSES = Backoff(1.0, 60.0)
RECHECK_S = 5.0
"""Seconds until the number of rejections is read again: an increase alone causes no notice."""
KNOWN_S = 30.0
"""Seconds for which a pod that was read is used."""
TRIES = 3
"""How often a change of the Node object is tried where others change it at the same time."""
CANNOT_END, CANNOT_MARK = "cannot end a rejected pod", "cannot mark the node"
FAILED_AT = "topoproxy.io/failed-at"
_REASON = {RejectedPolicy.EVICT: "RejectedPodEvicted", RejectedPolicy.FAIL: "RejectedPodFailed"}


class EndingHistory:
    """The pods that were ended: a part of the agent that is restarted keeps to the limits.

    Attributes:
        done: The pods.
    """

    def __init__(self) -> None:
        """Begin with nothing done."""
        self.done = EndedPods()


async def end_rejected_pods(session: AgentSession, history: EndingHistory) -> None:
    """Handle rejected pods as configured, until cancelled; returns at once where nothing is configured."""
    ending = RejectedPodEnding(session, history)
    await ending.recover()
    if session.config.rejected_pods.policy is not RejectedPolicy.RETRY:
        await ending.run()


class RejectedPodEnding:
    """Ends rejected pods of one node."""

    def __init__(
        self,
        session: AgentSession,
        history: EndingHistory,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is requested yet.

        Args:
            session: The node, the daemon, the API server.
            history: The pods that were ended before.
            clock: Seconds that only grow.
            wall_clock: Seconds since the epoch.
        """
        self._session = session
        self._settings = session.config.rejected_pods
        self._clock = clock
        self._wall_clock = wall_clock
        self._changed = asyncio.Event()
        self._page: NodePage | None = None
        self._history = history
        self._skipped: dict[str, str] = {}
        self._pods: dict[str, tuple[PodAtServer | None, float]] = {}
        self._mark: NodeMark | None = None
        self._marked: NodeMark | None = None

    async def recover(self) -> None:
        """Continue with the mark of an earlier run; remove it if rejected pods are now retried for ever."""
        pauses = RetryDelays(PAUSES)
        while True:
            try:
                node = await self._session.api.get(f"/api/v1/nodes/{self._session.node}")
                text = ((node.get("metadata") or {}).get("annotations") or {}).get(KEY)
                taints = [taint.get("key") for taint in (node.get("spec") or {}).get("taints") or ()]
                if text is not None or KEY in taints:
                    self._marked = from_annotation(text or "") or NodeMark(self._wall_clock(), 0, {})
                    self._mark = self._marked
                    if self._settings.policy is RejectedPolicy.RETRY:
                        self._mark = None
                        if not await self._write_mark():
                            raise UnavailableError("cannot remove the mark from the node")
            except ApiServerError as error:
                if error.status in (403, 404):
                    return  # without the object, or the permission, there is no mark of this agent
            except TopoproxyError:
                pass  # the watches report it
            else:
                return
            await asyncio.sleep(pauses.next())

    async def run(self) -> None:
        """End rejected pods until cancelled."""
        session = self._session
        follower = NodeFollower(session.daemon, session.node, session.telemetry, self._followed, self._silent)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.run())
            tasks.create_task(self._work())

    def _followed(self, before: NodePage | None, page: NodePage, notices: list[DaemonNotice]) -> None:
        self._page = page
        self._changed.set()

    def _silent(self) -> None:
        self._page = None

    async def _work(self) -> None:
        later: float | None = RECHECK_S
        while True:
            try:
                async with asyncio.timeout(later):
                    await self._changed.wait()
            except TimeoutError:
                await self._read_page()
            self._changed.clear()
            later = await (self._without_page() if self._page is None else self.step(self._page))

    async def _read_page(self) -> None:
        """Read the page; where the daemon does not answer there is none: nothing is decided on old facts."""
        try:
            requested = {"node": self._session.node}
            self._page = read_node_page(await self._session.daemon.query("/node", requested))
        except TopoproxyError:  # the follower reports it
            self._page = None

    async def _without_page(self) -> float:
        """Remove the mark after its time: without the daemon nothing else is known."""
        keep_for = self._settings.keep_away_for
        if self._mark is not None and is_over(self._mark, {}, keep_for, self._wall_clock()):
            self._mark = None
        await self._write_mark()
        return RECHECK_S

    async def step(self, page: NodePage) -> float | None:
        """Perform the steps that are due now.

        Args:
            page: The node as the daemon describes it.

        Returns:
            Seconds after which there may be more to do; None for nothing before the node changes.
        """
        rejected = {rejection.uid for rejection in page.rejections}
        self._skipped = {uid: why for uid, why in self._skipped.items() if uid in rejected}
        self._pods = {uid: entry for uid, entry in self._pods.items() if uid in rejected}
        due_rejections = due(page.rejections, self._settings) if page.published else []
        due_rejections = [
            rejection
            for rejection in due_rejections
            if rejection.uid not in self._skipped and rejection.uid not in self._history.done.reported
        ]
        later = [] if await self._read(due_rejections) else [PAUSES.first]
        if page.published and rejected - self._skipped.keys() - self._history.done.reported:
            later.append(RECHECK_S)
        pods = {uid: pod for uid, (pod, _) in self._pods.items() if pod is not None}
        decided = decide(due_rejections, pods, self._settings, self._history.done, self._clock())
        self._history.done = decided.done
        for skipped in decided.skipped:
            self._skipped[skipped.rejection.uid] = skipped.why
            self._session.telemetry.event(
                "left a rejected pod alone", pod=skipped.rejection.pod, reason=skipped.why
            )
        later += [decided.later] if decided.later is not None else []
        # Before they end: a controller makes the next pod at once, and the scheduler binds it at once.
        later += await self._follow_mark(
            page, [rejection for rejection in decided.ends if not rejection.would]
        )
        for rejection in decided.ends:
            await self._end(rejection)
        return min(later, default=None)

    async def _read(self, rejections: list[Rejection]) -> bool:
        """Read the pods that are not known; return whether that has succeeded."""
        for rejection in rejections:
            cached = self._pods.get(rejection.uid)
            if cached is not None and self._clock() - cached[1] < KNOWN_S:
                continue
            self._pods.pop(rejection.uid, None)
            try:
                item = await self._session.api.get(_path(rejection))
            except ApiServerError as error:
                if error.status != 404:
                    self._session.telemetry.problem(CANNOT_END, pod=rejection.pod, err=error)
                    return False
                item = {}
            except TopoproxyError:  # the watches report it
                return False
            self._pods[rejection.uid] = self._meant(item, rejection), self._clock()
        return True

    def _meant(self, item: JsonObject, rejection: Rejection) -> PodAtServer | None:
        """Return the rejected pod; None where it is another pod of that name, or is bound elsewhere."""
        is_it = (item.get("metadata") or {}).get("uid") == rejection.uid
        is_here = (item.get("spec") or {}).get("nodeName") == self._session.node
        return pod_at_server(item) if is_it and is_here else None

    async def _end(self, end: EndPod) -> None:
        """End a pod."""
        telemetry, ref = self._session.telemetry, end.rejection.pod
        why = f"{end.rejection.reason}: {end.rejection.message}"
        if end.would:
            telemetry.event("would end a rejected pod", pod=ref, reason=why)
            return
        try:
            if end.policy is RejectedPolicy.FAIL:
                value = _failed(end.rejection, self._time())
                await self._session.api.merge(f"{_path(end.rejection)}/status", value)
            else:
                await self._evict(end.rejection)
        except TopoproxyError as error:
            telemetry.problem(CANNOT_END, pod=ref, err=error)
            return
        self._pods.pop(end.rejection.uid, None)
        telemetry.resolved(CANNOT_END, pod=ref)
        telemetry.event("ended a rejected pod", pod=ref, reason=why)
        await self._write_event(end)

    async def _evict(self, rejection: Rejection) -> None:
        namespace, _, name = rejection.pod.partition("/")
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": namespace, "name": name},
            "deleteOptions": {"preconditions": {"uid": rejection.uid}},
        }
        try:
            await self._session.api.create(f"{_path(rejection)}/eviction", eviction)
        except ApiServerError as error:
            if error.status == 404:
                return
            # Not for anything else: a pod with two disruption budgets is answered with 500.
            if error.status not in (403, 405) or not self._settings.delete_fallback:
                raise
            await self._session.api.delete(_path(rejection), uid=rejection.uid)

    async def _write_event(self, end: EndPod) -> None:
        """Write an Event about a pod that was ended."""
        if not self._session.config.cluster.events:
            return
        namespace, _, name = end.rejection.pod.partition("/")
        message = f"Rejected {end.rejection.count} times by topoproxy: {end.rejection.message}"
        event = PodEvent(namespace, name, end.rejection.uid, "", _REASON[end.policy], message, warning=True)
        at = self._time()
        value = event_object(event, self._session.node, at, at, 1)
        with contextlib.suppress(TopoproxyError):
            await self._session.api.apply(f"/api/v1/namespaces/{namespace}/events/{event.name}", value)

    def _time(self) -> str:
        return datetime.datetime.fromtimestamp(self._wall_clock(), datetime.UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        )

    # -- the mark -----------------------------------------------------------------------------------------

    async def _follow_mark(self, page: NodePage, ends: list[EndPod]) -> list[float]:
        """Set the mark for pods that end now, or remove it; return the seconds until it is checked again."""
        free, now, keep_for = free_cpus(page), self._wall_clock(), self._settings.keep_away_for
        cpus = [end.cpus for end in ends if end.rejection.reason not in EVERYWHERE]
        if cpus:
            self._mark = marked(self._mark, cpus, free, now)
        elif self._mark is not None and is_over(self._mark, free, keep_for, now):
            self._mark = None
        later = [] if await self._write_mark() else [PAUSES.first]
        return later if self._mark is None else [*later, max(1.0, self._mark.since + keep_for - now)]

    async def _write_mark(self) -> bool:
        """Write the mark into the Node object; return whether it is there."""
        session, mark = self._session, self._mark
        if mark == self._marked:
            return True
        path = f"/api/v1/nodes/{session.node}"
        for attempt in range(TRIES):
            try:
                patch = node_patch(await session.api.get(path), mark, self._settings.keep_away)
                if patch is not None:
                    await session.api.merge(path, patch)
            except ApiServerError as error:
                if error.status == 409 and attempt < TRIES - 1:
                    continue
                session.telemetry.problem(CANNOT_MARK, err=error)
                return False
            except TopoproxyError as error:
                session.telemetry.problem(CANNOT_MARK, err=error)
                return False
            break
        self._marked = mark
        session.telemetry.resolved(CANNOT_MARK)
        if mark is None:
            session.telemetry.event("the node has room again")
        else:
            session.telemetry.event("marked the node: no room")
        return True


def _path(rejection: Rejection) -> str:
    namespace, _, name = rejection.pod.partition("/")
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def _failed(rejection: Rejection, at: str) -> JsonObject:
    """Return the patch that fails a pod, as kubelet's admission does; for another pod it is a conflict.

    kubelet takes a change of nothing but the status for one of its own and may write its old status over it
    (kubernetes v1.36.2 pkg/kubelet/kubelet.go, HandlePodReconcile, and status/status_manager.go, syncPod). A
    change of an annotation has it look at the pod, and end one that has failed.
    """
    message = f"Pod was rejected: {rejection.message}"
    status = {"phase": "Failed", "reason": rejection.reason, "message": message}
    return {"metadata": {"uid": rejection.uid, "annotations": {FAILED_AT: at}}, "status": status}
