"""Calls that the peer makes to the runtime after we have answered it.

Theory. A call that passes through us ends with an answer that we see. A peer's call ends elsewhere. So each
is remembered, and resolved by the first of these events:

- a later request that names its result: a start names the container that a create has created;
- the runtime's own list, which is polled while a call is pending, at first at short intervals;
- a timeout. Then the call is lost, like a call whose client disconnected (``uncertain``): the CPUs that it
  reserved are freed, unless the list shows that it succeeded after all. A container that appears later is
  adopted like any container created without us, and gets its CPUs before its start.

A repeated request replaces the pending one: the peer makes one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from proxy.engine.call_events import SavedCpusLearned
from proxy.engine.runtime_knowledge import CreateKey
from proxy.executor.node_executor import NodeExecutor
from proxy.executor.runtime_ports import RuntimeContainer, RuntimePod
from proxy.frontends.hookserver.foreign_call import ForeignCall
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.workload import Phase

POD_TIMEOUT_S, CREATE_TIMEOUT_S, START_TIMEOUT_S = 120.0, 30.0, 10.0
"""How long a call may be pending: a network plugin may take a minute, a busy disk some seconds."""
POLLS = Backoff(0.3, 2.0)
"""Seconds between two queries of the runtime's list."""
MOST_PENDING = 512
"""The number of calls of one kind that are remembered; the oldest are lost first."""

K = TypeVar("K")


@dataclass(slots=True)
class _Entry:
    call: ForeignCall
    until: float


class CallTable(Generic[K]):
    """Calls of one kind."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._open: dict[K, _Entry] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, key: object) -> bool:
        return key in self._open

    def add(self, key: K, call: ForeignCall) -> None:
        """Add a pending call; an earlier one for the same target counts as lost."""
        before = self._open.pop(key, None)
        if before is None and len(self._open) >= MOST_PENDING:
            before = self._open.pop(next(iter(self._open)))
        self._open[key] = _Entry(call, self._clock() + self._timeout_s)
        if before is not None:
            before.call.lost()

    def take(self, key: K) -> ForeignCall | None:
        """Return a call, which is then resolved; None if there is none."""
        entry = self._open.pop(key, None)
        return None if entry is None else entry.call

    def lose(self, key: K) -> None:
        """The outcome of a call will never be known."""
        if (call := self.take(key)) is not None:
            call.lost()

    def expire(self) -> None:
        """Lose the calls whose outcome was not found in time."""
        now = self._clock()
        for key in [key for key, entry in self._open.items() if entry.until <= now]:
            self.lose(key)


class PendingCalls:
    """All calls of the peer whose outcome is not known.

    Attributes:
        pods: By the pod's uid: sandboxes that are being created.
        creates: Containers that are being created.
        starts: By container id: containers that are being started.
    """

    def __init__(self, executor: NodeExecutor) -> None:
        self._executor = executor
        self.pods = CallTable[str](POD_TIMEOUT_S, executor.clock)
        self.creates = CallTable[CreateKey](CREATE_TIMEOUT_S, executor.clock)
        self.starts = CallTable[str](START_TIMEOUT_S, executor.clock)
        self._older_sandboxes: dict[str, frozenset[str]] = {}
        self._wake_event = asyncio.Event()

    def add_pod(self, uid: str, call: ForeignCall) -> None:
        """Add a pod whose sandbox is being created; its present sandboxes are older ones."""
        self.pods.add(uid, call)
        existing = self._executor.state.pods.items()
        self._older_sandboxes = {
            known: ids for known, ids in self._older_sandboxes.items() if known in self.pods
        }
        self._older_sandboxes[uid] = frozenset(i for i, pod in existing if pod.uid == uid)
        self.wake()

    def wake(self) -> None:
        """A new call is pending: the list is read soon."""
        self._wake_event.set()

    async def run(self) -> None:
        """Look for the outcome of pending calls until cancelled."""
        pauses = RetryDelays(POLLS)
        while True:
            if not (self.pods or self.creates or self.starts):
                await self._wake_event.wait()
            if self._wake_event.is_set():
                self._wake_event.clear()
                pauses.reset()
            await asyncio.sleep(pauses.next())
            await self.check()

    async def check(self) -> None:
        """Query the runtime for the outcome of pending calls; those past their timeout are lost."""
        executor, run_lookup = self._executor, self._executor.call_tracker.lookups.run
        try:
            if self.creates or self.starts:
                for container in await run_lookup(executor.runtime.list_containers):
                    self.handle_listed_container(container)
            if self.pods:
                for pod in await run_lookup(executor.runtime.list_pods):
                    self.handle_listed_pod(pod)
        except (UnavailableError, RuntimeCallError) as error:
            executor.telemetry.problem("cannot list what the runtime has", err=error)
        for calls in (self.pods, self.creates, self.starts):
            calls.expire()

    async def check_creates(self) -> None:
        """Read the outcome of creates.

        Raises:
            UnavailableError, RuntimeCallError: The runtime does not answer.
        """
        if self.creates:
            run_lookup = self._executor.call_tracker.lookups.run
            for container in await run_lookup(self._executor.runtime.list_containers):
                self.handle_listed_container(container)

    def handle_listed_pod(self, pod: RuntimePod) -> None:
        """The runtime lists a sandbox."""
        if not pod.ready or pod.id in self._older_sandboxes.get(pod.uid, ()):
            return
        call = self.pods.take(pod.uid)
        if call is not None and pod.id in self._executor.state.pods:
            call.lost()  # known already: it has passed through us, too
        elif call is not None:
            call.answered(pod.id)

    def handle_listed_container(self, container: RuntimeContainer) -> None:
        """The runtime lists a container."""
        call = self.creates.take(CreateKey(container.sandbox_id, container.name, container.attempt))
        if call is not None and container.id in self._executor.state.containers:
            call.lost()  # known already: it has passed through us, too
        elif call is not None:
            call.answered(container.id)
            # Others may have changed the request after us.
            self._executor.store.handle(SavedCpusLearned(container.id, None))
            if container.phase in (Phase.RUNNING, Phase.EXITED):  # started without a request to us
                self._executor.lifecycle.phase(container.id, container.phase)
                self._executor.writes.write_soon([container.id])
        if container.phase is not Phase.CREATED and (start := self.starts.take(container.id)) is not None:
            start.ended(0)  # it runs, or has run
