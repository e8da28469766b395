"""The part of the agent that ends rejected pods, and marks the node while the node has no room for them.

It follows the daemon, reads the pods that may be ended, and carries out the decisions of ``policy``. The API
server makes the final decision: an eviction respects disruption budgets, and every request names the uid of
the pod, so that another pod of the same name is never ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from proxy.agent.api_client import ApiServerError, JsonObject, retry_after
from proxy.agent.node_follower import DaemonNotice, NodeFollower
from proxy.agent.node_status import timestamp
from proxy.agent.objects.node_page import NodePage, Rejection, read_node_page
from proxy.agent.objects.pod_events import PodEvent, event_object, pod_path
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
    EndedPods,
    EndPod,
    PodAtServer,
    decide,
    frequent_rejections,
    pod_at_server,
    rejected_everywhere,
    without_former_pods,
)
from proxy.agent.session import AgentSession
from proxy.agent.watcher import REFUSALS_UNTIL_ABSENT
from proxy.config.cluster import RejectedPolicy
from proxy.model.backoff import Backoff, RetryDelays, RetryTimes
from proxy.model.errors import TopoproxyError

PAUSES = Backoff(1.0, 60.0)
RECHECK_S = 5.0
"""Seconds until the number of rejections is read again: an increase alone causes no notice."""
KNOWN_S = 30.0
"""Seconds for which a pod that was read is used."""
TRIES = 3
"""How often a change of the Node object is tried if others change it at the same time."""
CANNOT_END, CANNOT_MARK = "cannot end a rejected pod", "cannot mark the node"
MARKED = "marked the node: no room"
UNMARKED = "the node has room again"
MARK_RESTORED = "no rejected pod was terminated: the mark of the node is as before"
_READ, _MARK = "read", "mark"
"""The requests that are tried again at growing intervals."""
FAILED_AT = "topoproxy.io/failed-at"
_REASON = {RejectedPolicy.EVICT: "RejectedPodEvicted", RejectedPolicy.FAIL: "RejectedPodFailed"}


class TerminationHistory:
    """The pods that were ended. The record outlives a restart of this part of the agent, so the limits hold.

    Attributes:
        done: The pods.
    """

    def __init__(self) -> None:
        """Begin with nothing done."""
        self.done = EndedPods()


async def end_rejected_pods(session: AgentSession, history: TerminationHistory) -> None:
    """Handle rejected pods as configured, until cancelled; returns at once if nothing is configured."""
    ending = RejectedPodEnding(session, history)
    await ending.recover()
    if session.config.rejected_pods.policy is not RejectedPolicy.RETRY:
        await ending.run()


class RejectedPodEnding:
    """Ends rejected pods of one node."""

    def __init__(
        self,
        session: AgentSession,
        history: TerminationHistory,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is requested yet.

        Args:
            session: The node, the daemon, the API server.
            history: The pods that were ended before.
            clock: A monotonic clock, in seconds.
            wall_clock: Seconds since the epoch.
        """
        self._session = session
        self._settings = session.config.rejected_pods
        self._clock = clock
        self._wall_clock = wall_clock
        self._changed = asyncio.Event()
        self._page: NodePage | None = None
        self._history = history
        self._skipped: dict[str, tuple[str, bool]] = {}
        self._pods: dict[str, tuple[PodAtServer | None, float]] = {}
        self._mark: NodeMark | None = None
        self._marked: NodeMark | None = None
        self._in_doubt = False  # a write of the mark without an answer may have taken effect
        self._retries = RetryTimes[str](PAUSES)

    async def recover(self) -> None:
        """Continue with the mark of an earlier run; remove it if rejected pods are now retried for ever."""
        pauses, refusals = RetryDelays(PAUSES), 0
        while True:
            failure: TopoproxyError | None = None
            try:
                node = await self._session.api.get(f"/api/v1/nodes/{self._session.node}")
                text = ((node.get("metadata") or {}).get("annotations") or {}).get(KEY)
                taints = [taint.get("key") for taint in (node.get("spec") or {}).get("taints") or ()]
                if text is not None or KEY in taints:
                    self._marked = from_annotation(text or "") or NodeMark(self._wall_clock(), 0, {})
                    self._mark = self._marked
                    if self._settings.policy is RejectedPolicy.RETRY:
                        self._mark = None
                        failure = await self._put_mark(restores=False)
            except ApiServerError as error:
                refusals += error.status == 403
                if error.status == 404 or refusals >= REFUSALS_UNTIL_ABSENT:
                    return  # without the object or the permission, there is no mark of this agent
                failure = error
            except TopoproxyError as error:
                failure = error  # the watches report the error
            if failure is None:
                return
            await asyncio.sleep(max(pauses.next(), retry_after(failure)))

    async def run(self) -> None:
        """End rejected pods until cancelled."""
        session = self._session
        follower = NodeFollower(
            session.daemon, session.node, session.telemetry, self._page_changed, self._daemon_unreachable
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follower.run())
            tasks.create_task(self._decide_repeatedly())

    def _page_changed(self, before: NodePage | None, page: NodePage, notices: list[DaemonNotice]) -> None:
        self._page = page
        self._changed.set()

    def _daemon_unreachable(self, error: TopoproxyError) -> None:
        self._page = None

    async def _decide_repeatedly(self) -> None:
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
        """Read the page. If the daemon does not answer, there is none: nothing is decided on old facts."""
        try:
            requested = {"node": self._session.node}
            self._page = read_node_page(await self._session.daemon.query("/node", requested))
        except TopoproxyError:  # the follower reports it
            self._page = None

    async def _without_page(self) -> float:
        """Remove the mark after its time: without the daemon nothing else can be decided."""
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
        causes = {(rejection.uid, _cause(rejection)) for rejection in page.rejections}
        self._skipped = {uid: cause for uid, cause in self._skipped.items() if (uid, cause) in causes}
        self._pods = {uid: entry for uid, entry in self._pods.items() if uid in rejected}
        self._history.done = without_former_pods(self._history.done, rejected)
        undecided = [rejection for rejection in page.rejections if self._is_undecided(rejection)]
        due_rejections = frequent_rejections(undecided, self._settings) if page.published else []
        later = await self._read(due_rejections)
        if page.published and undecided:
            later.append(RECHECK_S)
        pods = {uid: pod for uid, (pod, _) in self._pods.items() if pod is not None}
        decided = decide(due_rejections, pods, self._settings, self._history.done, self._clock())
        self._history.done = decided.done
        for skipped in decided.skipped:
            self._skipped[skipped.rejection.uid] = _cause(skipped.rejection)
            self._session.telemetry.event(
                "left a rejected pod alone", pod=skipped.rejection.pod, reason=skipped.why
            )
        later += [decided.later] if decided.later is not None else []
        later += await self._end_all(page, decided.ends)
        return min(later, default=None)

    def _is_undecided(self, rejection: Rejection) -> bool:
        """Return whether a rejection may end its pod: the pod is not left alone, and no end was reported."""
        is_reported = not rejection.applied and rejection.uid in self._history.done.reported
        return rejection.uid not in self._skipped and not is_reported

    async def _read(self, rejections: list[Rejection]) -> list[float]:
        """Read the pods that are not known; return the seconds until the next attempt if that fails."""
        for rejection in rejections:
            cached = self._pods.get(rejection.uid)
            if cached is not None and self._clock() - cached[1] < KNOWN_S:
                continue
            self._pods.pop(rejection.uid, None)
            if not self._retries.due(_READ, self._clock()):
                return [self._retries.remaining(_READ, self._clock())]
            try:
                item = await self._session.api.get(_path(rejection))
            except TopoproxyError as error:
                item = {}
                if not _is_gone(error):
                    if isinstance(error, ApiServerError):  # the watches report others
                        self._session.telemetry.problem(CANNOT_END, pod=rejection.pod, err=error)
                    self._retries.failed(_READ, self._clock(), retry_after(error))
                    return [self._retries.remaining(_READ, self._clock())]
            self._retries.succeeded(_READ)
            self._pods[rejection.uid] = self._rejected_pod(item, rejection), self._clock()
        return []

    def _rejected_pod(self, item: JsonObject, rejection: Rejection) -> PodAtServer | None:
        """Return the rejected pod; None if the object is another pod of that name, or is bound elsewhere."""
        is_it = (item.get("metadata") or {}).get("uid") == rejection.uid
        is_here = (item.get("spec") or {}).get("nodeName") == self._session.node
        return pod_at_server(item) if is_it and is_here else None

    async def _end_all(self, page: NodePage, ends: Sequence[EndPod]) -> list[float]:
        """End pods, and set the mark for them, or remove it; return the seconds until it is checked again.

        If no pod could be ended, the mark stays as before: it lasts for a time after the last pod that was
        ended.
        """
        free, now, keep_for = free_cpus(page), self._wall_clock(), self._settings.keep_away_for
        before = self._mark
        if before is not None and (not page.published or is_over(before, free, keep_for, now)):
            before = None  # a daemon that publishes nothing rejects nothing
        lacking_room = [end for end in ends if not end.dry_run and not rejected_everywhere(end.rejection)]
        # Set the mark before they end: the controller makes the next pod at once, and it is bound at once.
        self._mark = marked(before, [end.cpus for end in lacking_room], free, now) if lacking_room else before
        later = await self._write_mark()
        ended = [end for end in ends if await self._end(end)]
        if lacking_room and not any(end in lacking_room for end in ended):
            self._mark = before
            later = await self._write_mark(restores=True)
        return later if self._mark is None else [*later, max(1.0, self._mark.since + keep_for - now)]

    async def _end(self, end: EndPod) -> bool:
        """End a pod; return whether the request has ended it."""
        telemetry, ref = self._session.telemetry, end.rejection.pod
        why = f"{end.rejection.reason}: {end.rejection.message}"
        if end.dry_run:
            telemetry.event("would end a rejected pod", pod=ref, reason=why)
            return False
        try:
            if end.policy is RejectedPolicy.FAIL:
                value = _failed_patch(end.rejection, timestamp(self._wall_clock()))
                await self._session.api.merge(f"{_path(end.rejection)}/status", value)
            else:
                await self._evict(end.rejection)
        except TopoproxyError as error:
            if _is_gone(error):
                self._pods.pop(end.rejection.uid, None)
                telemetry.resolved(CANNOT_END, pod=ref)
            else:
                telemetry.problem(CANNOT_END, pod=ref, err=error)
            return False
        self._pods.pop(end.rejection.uid, None)
        telemetry.resolved(CANNOT_END, pod=ref)
        telemetry.event("ended a rejected pod", pod=ref, reason=why)
        await self._write_event(end)
        return True

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
            # Not for other errors: for a pod with two disruption budgets, for example, the answer is 500.
            if error.status not in (403, 405) or not self._settings.delete_fallback:
                raise
            await self._session.api.delete(_path(rejection), uid=rejection.uid, must_exist=True)

    async def _write_event(self, end: EndPod) -> None:
        """Write an Event about a pod that was ended."""
        if not self._session.config.cluster.events:
            return
        namespace, _, name = end.rejection.pod.partition("/")
        message = f"Rejected {end.rejection.count} times by topoproxy: {end.rejection.message}"
        event = PodEvent(namespace, name, end.rejection.uid, "", _REASON[end.policy], message, warning=True)
        at = timestamp(self._wall_clock())
        value = event_object(event, self._session.node, at, at, 1)
        with contextlib.suppress(TopoproxyError):
            await self._session.api.apply(event.path, value)

    # -- the mark -----------------------------------------------------------------------------------------

    async def _write_mark(self, *, restores: bool = False) -> list[float]:
        """Write the mark, at growing intervals while that fails; return the seconds until the next attempt.

        Args:
            restores: Whether the mark is the one from before a termination that failed.
        """
        if self._mark == self._marked and not self._in_doubt:
            return []
        if self._retries.due(_MARK, self._clock()):
            failure = await self._put_mark(restores=restores)
            if failure is None:
                self._retries.succeeded(_MARK)
                return []
            self._retries.failed(_MARK, self._clock(), retry_after(failure))
        return [self._retries.remaining(_MARK, self._clock())]

    async def _put_mark(self, *, restores: bool) -> TopoproxyError | None:
        """Write the mark into the Node object; return why that failed, or None if it succeeded."""
        session, mark = self._session, self._mark
        path = f"/api/v1/nodes/{session.node}"
        self._in_doubt = True
        for attempt in range(TRIES):
            try:
                patch = node_patch(await session.api.get(path), mark, self._settings.keep_away)
                if patch is not None:
                    await session.api.merge(path, patch)
            except ApiServerError as error:
                if error.status == 409 and attempt < TRIES - 1:
                    continue
                session.telemetry.problem(CANNOT_MARK, err=error)
                return error
            except TopoproxyError as error:
                session.telemetry.problem(CANNOT_MARK, err=error)
                return error
            break
        session.telemetry.resolved(CANNOT_MARK)
        if mark != self._marked and restores:
            session.telemetry.event(MARK_RESTORED)
        elif mark != self._marked and mark is not None:
            session.telemetry.event(MARKED)
        elif mark != self._marked:
            session.telemetry.event(UNMARKED)
        self._marked, self._in_doubt = mark, False
        return None


def _cause(rejection: Rejection) -> tuple[str, bool]:
    """Return the part of a rejection that decides whether its pod is left alone."""
    return rejection.reason, rejected_everywhere(rejection)


def _is_gone(error: TopoproxyError) -> bool:
    """Return whether the API server has answered that there is no such pod."""
    return isinstance(error, ApiServerError) and error.status == 404


def _path(rejection: Rejection) -> str:
    namespace, _, name = rejection.pod.partition("/")
    return pod_path(namespace, name)


def _failed_patch(rejection: Rejection, at: str) -> JsonObject:
    """Return the patch that fails a pod, as kubelet's admission does; for another uid it conflicts.

    kubelet takes a change of only the status for one of its own, and may write its old status over it
    (kubernetes v1.36.2 pkg/kubelet/kubelet.go, HandlePodReconcile, and status/status_manager.go, syncPod). A
    change of an annotation makes kubelet examine the pod, and end it if it has failed.
    """
    message = f"Pod was rejected: {rejection.message}"
    status = {"phase": "Failed", "reason": rejection.reason, "message": message}
    return {"metadata": {"uid": rejection.uid, "annotations": {FAILED_AT: at}}, "status": status}
