"""Events of the runtime, and their effects."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.executor import runtime_events
from proxy.executor.runtime_events import EventsState
from proxy.executor.runtime_ports import RuntimeContainer, RuntimeEvent, RuntimePod
from proxy.model.backoff import Backoff
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.workload import Phase
from proxy.telemetry import metrics

ALL, REST = "0-15", "0-5,8-13"
OWN = "6-7,14-15"
EXIT, START, DELETE = "exit", "start", "delete"


class PlayedEvents:
    """A runtime's events; ``refusals`` are raised one by one before a stream is established."""

    def __init__(self) -> None:
        self.queued: queue.SimpleQueue[RuntimeEvent | Exception | None] = queue.SimpleQueue()
        self.refusals: list[Exception] = []
        self.listens = 0

    def listen(self) -> Iterator[RuntimeEvent]:
        self.listens += 1
        if self.refusals:
            raise self.refusals.pop(0)
        return self._stream()

    def _stream(self) -> Iterator[RuntimeEvent]:
        while (what := self.queued.get()) is not None:
            if isinstance(what, Exception):
                raise what
            yield what

    def send(self, kind: Any, about: str) -> None:
        self.queued.put(RuntimeEvent(kind, about))

    def close(self) -> None:
        self.queued.put(UnavailableError("closed"))


class EventBed:
    """A world with a runtime that sends events."""

    def __init__(self, world: Any, *, start: bool = True) -> None:
        self.world, self.executor = world, world.executor
        self.events = PlayedEvents()
        self.runtime_events = self.executor.runtime_events
        self.runtime_events._events, self.runtime_events.events_state = self.events, EventsState.WAITING
        if start:
            self.runtime_events.start()

    async def connected(self) -> None:
        await self.world.until(lambda: self.runtime_events.events_state is EventsState.CONNECTED)
        self.executor.reconcile_requested.clear()

    async def send(self, kind: str, about: str) -> None:
        """Send an event, and wait for its immediate effects."""
        self.events.send(kind, about)
        # The thread takes events in order: after the mark it has handed over all earlier ones.
        mark = f"mark-{time.monotonic_ns()}"
        self.events.send(EXIT, mark)
        await self.world.until(lambda: mark in self.runtime_events._exits)
        await self.world.quiet()

    async def moment(self) -> bool:
        """Wait until unclear events are resolved; return whether a reconcile is requested."""
        await self.world.until(lambda: self.runtime_events._resolve_timer is None)
        return bool(self.executor.reconcile_requested.is_set())

    def phase(self, container_id: str) -> Phase | None:
        found = self.executor.state.containers.get(container_id)
        return None if found is None else found.phase


@pytest.fixture(autouse=True)
def short_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_events, "MOMENT_S", 0.05)
    monkeypatch.setattr(runtime_events, "LATER_S", 0.05)


async def owner_and_sharer(world: Any) -> tuple[str, str]:
    sharer = await world.run(await world.pod("b", "LS"))
    owner = await world.run(await world.pod("a", "LSE", cpus=OWN))
    assert world.on(sharer) == REST
    return owner, sharer


# Ends.


def test_an_exit_releases_the_cpus(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, sharer = await owner_and_sharer(world)
        world.end(owner)
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        await event_bed.send(EXIT, owner)
        await event_bed.send(EXIT, owner)
        assert event_bed.phase(owner) is Phase.EXITED
        assert world.on(sharer) == ALL
        assert world.executor.telemetry.value(metrics.EXITS_BY_EVENT) == 1
        assert world.executor.telemetry.value(metrics.RECONCILES) == passes
        assert not world.executor.reconcile_requested.is_set()
        world.check()

    run_scenario(scenario)


def test_an_exit_before_the_answer_to_the_start(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        sharer = await world.run(await world.pod("b", "LS"))
        owner = await world.create(await world.pod("a", "LSE", cpus=OWN))
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=owner))
        assert event_bed.phase(owner) is Phase.STARTING
        await event_bed.send(EXIT, owner)
        assert event_bed.phase(owner) is Phase.EXITED
        world.wire.finished(start, 0)
        await world.quiet()
        assert event_bed.phase(owner) is Phase.EXITED
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_released_cpus_are_available_at_once(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        first = await world.run(await world.pod("a", "LSE", cpus=OWN))
        other = await world.pod("c", "LSE", cpus=OWN)
        world.end(first)
        await event_bed.send(EXIT, first)
        second = await world.run(other)
        assert world.on(second) == OWN
        await event_bed.send(EXIT, first)  # sent again, the event still concerns the first container
        assert event_bed.phase(second) is Phase.RUNNING
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize("state", ["RUNNING", "CREATED", "UNKNOWN"])
def test_an_outdated_list_does_not_revive_a_container(run_scenario: Callable[..., None], state: str) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, sharer = await owner_and_sharer(world)
        await event_bed.send(EXIT, owner)
        world.cgroups.sets.pop(owner)
        world._state(owner, state)
        await world.sync.once()
        await world.quiet()
        assert event_bed.phase(owner) is Phase.EXITED
        assert world.on(sharer) == ALL
        assert world.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 0
        world.end(owner)
        await world.sync.once()
        assert event_bed.phase(owner) is Phase.EXITED

    run_scenario(scenario)


def test_the_list_takes_precedence_over_an_old_exit_event(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        await event_bed.send(EXIT, owner)
        world.now += runtime_events.BEHIND_S + 1
        await world.sync.once()
        assert event_bed.phase(owner) is Phase.RUNNING
        assert not event_bed.runtime_events._exits

    run_scenario(scenario)


def test_a_container_that_exits_during_adoption_counts_as_exited(run_scenario: Callable[..., None]) -> None:
    """The container was on the list, and ended while the runtime was queried about it."""

    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        sharer = await world.run(await world.pod("b", "LS"))
        sandbox = await world.pod("a", "LSE", cpus=OWN)
        world.runtime.containers["stranger"] = RuntimeContainer("stranger", sandbox, "c", 0, "RUNNING")
        detail = world.runtime.detail

        def ends(container_id: str) -> Any:
            event_bed.events.send(EXIT, container_id)
            end = time.monotonic() + 30
            while container_id not in event_bed.runtime_events._exits and time.monotonic() < end:
                time.sleep(0.005)
            return detail(container_id)

        world.runtime.detail = ends
        await world.sync.once()
        assert event_bed.phase("stranger") is Phase.EXITED
        await world.quiet()
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_an_exit_of_a_container_whose_create_was_not_answered(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        sharer = await world.run(await world.pod("b", "LS"))
        sandbox = await world.pod("a", "LSE", cpus=OWN)
        call = await world.begin(sandbox)
        world.wire.finished(call, None)  # the client disconnected
        world.runtime.containers["lost"] = RuntimeContainer("lost", sandbox, "c", 0, "RUNNING")
        await event_bed.send(EXIT, "lost")
        await world.sync.once()
        assert event_bed.phase("lost") is Phase.EXITED
        await world.quiet()
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_an_exit_of_an_unknown_container_changes_nothing(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        await world.remove(owner)
        state = world.executor.state
        await event_bed.send(EXIT, owner)
        await event_bed.send(EXIT, "missing")
        assert world.executor.state is state
        assert not await event_bed.moment()

    run_scenario(scenario)


@pytest.mark.parametrize("report", ["delete", "answer"])
def test_an_id_that_the_runtime_uses_again_is_not_taken_for_the_one_that_exited(
    run_scenario: Callable[..., None], report: str
) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        await event_bed.send(EXIT, owner)
        if report == "delete":
            world.end(owner)
            del world.runtime.containers[owner]
            world.executor.lifecycle.removed([owner])
            await event_bed.send(EXIT, owner)  # late
            await event_bed.send(DELETE, owner)
        else:
            await world.remove(owner)
        again = world.finish(await world.begin(await world.pod("c", "LSE", cpus=OWN)), owner)
        await world.start(again)
        await world.sync.once()
        assert event_bed.phase(again) is Phase.RUNNING
        assert world.on(again) == OWN

    run_scenario(scenario)


def test_a_list_from_before_a_deletion_does_not_revive_a_container(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        sandbox = await world.pod("a", "LSE", cpus=OWN)
        world.runtime.containers["stranger"] = RuntimeContainer("stranger", sandbox, "c", 0, "RUNNING")
        await event_bed.send(EXIT, "stranger")
        listed = world.runtime.list_containers

        def deleted_meanwhile(*args: Any) -> Any:
            found = listed(*args)
            event_bed.events.send(DELETE, "stranger")
            end = time.monotonic() + 30
            while "stranger" in event_bed.runtime_events._exits and time.monotonic() < end:
                time.sleep(0.005)
            return found

        world.runtime.list_containers = deleted_meanwhile
        await world.sync.once()
        assert event_bed.phase("stranger") is None

    run_scenario(scenario)


def test_remembered_exits_of_unknown_containers_are_bounded(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_events, "EXITS_LIMIT", 3)

    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        for number in range(10):
            await event_bed.send(EXIT, f"stranger-{number}")
        assert len(event_bed.runtime_events._exits) == 3

    run_scenario(scenario)


# Sandboxes, and changes made without the proxy.


def test_the_end_of_a_sandbox_triggers_a_reconcile(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, sharer = await owner_and_sharer(world)
        await event_bed.send(EXIT, "s-a")
        assert await event_bed.moment()
        assert event_bed.phase(owner) is Phase.RUNNING, "its containers may still run"
        world.end(owner)
        pod = world.runtime.pods["s-a"]
        world.runtime.pods["s-a"] = RuntimePod(pod.id, pod.uid, "ns", "a", 0, False, {}, {})
        await world.sync.once()
        await world.quiet()
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_the_end_of_an_empty_sandbox(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        await world.stop(owner)
        await event_bed.send(EXIT, "s-a")
        assert not await event_bed.moment()

    run_scenario(scenario)


@pytest.mark.parametrize("answered", [True, False])
def test_a_start_of_an_unknown_container(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        if answered:
            monkeypatch.setattr(runtime_events, "MOMENT_S", 1.0)
        await event_bed.send(START, "s-late")
        if answered:
            assert not world.executor.reconcile_requested.is_set()
            await world.pod("late", "LS")
        assert await event_bed.moment() is not answered

    run_scenario(scenario)


@pytest.mark.parametrize("answered", [True, False])
def test_a_deletion_of_a_known_container(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        await event_bed.send(START, owner)
        await event_bed.send(DELETE, "missing")
        assert not await event_bed.moment()
        if answered:
            monkeypatch.setattr(runtime_events, "MOMENT_S", 1.0)
        await event_bed.send(DELETE, owner)
        if answered:
            assert not world.executor.reconcile_requested.is_set()
            await world.remove(owner)
        assert await event_bed.moment() is not answered

    run_scenario(scenario)


def test_more_unclear_events_than_the_limit_compare_everything(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_events, "UNCLEAR_LIMIT", 2)
    monkeypatch.setattr(runtime_events, "LATER_S", 30)

    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        for number in range(5):
            event_bed.runtime_events._handle(RuntimeEvent("start", f"stranger-{number}"))
        assert len(event_bed.runtime_events._unclear) == 2
        event_bed.runtime_events._unclear.clear()  # the remembered ones are resolved
        assert await event_bed.moment()
        world.executor.reconcile_requested.clear()
        await event_bed.send(DELETE, owner)
        assert not world.executor.reconcile_requested.is_set(), "everything has just been compared"
        assert event_bed.runtime_events._resolve_timer is not None

    run_scenario(scenario)


# The stream.


def test_a_new_subscription_leads_to_a_reconcile(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world, start=False)
        assert event_bed.runtime_events.events_state.value == "waiting"
        runs = asyncio.ensure_future(world.sync.run())
        await world.until(lambda: event_bed.runtime_events.events_state is EventsState.CONNECTED)
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        world.executor.reconcile_requested.clear()
        event_bed.events.queued.put(UnavailableError("gone"))
        await world.until(lambda: world.executor.telemetry.value(metrics.RUNTIME_EVENT_STREAMS) == 2)
        await world.until(lambda: world.executor.telemetry.value(metrics.RECONCILES) > passes)
        runs.cancel()
        await asyncio.gather(runs, return_exceptions=True)

    run_scenario(scenario, reconcile_period=3600.0)


def test_a_stream_that_ends_is_opened_again(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_events, "PAUSES", Backoff(0.01, 0.01))
    monkeypatch.setattr(runtime_events, "REFUSED_S", 0.01)

    async def scenario(world: Any) -> None:
        event_bed = EventBed(world, start=False)
        event_bed.events.refusals = [
            UnavailableError("not there yet"),
            RuntimeCallError("cannot listen: too much", 8),
            KeyError("a fault of ours"),
        ]
        event_bed.runtime_events.start()
        await event_bed.connected()
        assert event_bed.events.listens == 4
        assert [p["what"] for p in world.executor.telemetry.problems()] == [
            "internal error fault=\"KeyError: 'a fault of ours'\"",
        ]
        for end in (None, UnavailableError("gone"), None):
            before = event_bed.events.listens
            event_bed.events.queued.put(end)
            await world.until(lambda before=before: event_bed.events.listens > before)
            await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        await event_bed.send(EXIT, owner)
        assert event_bed.phase(owner) is Phase.EXITED

    run_scenario(scenario)


def test_pauses_grow_and_are_bounded(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world, start=False)
        event_bed.events.refusals = [UnavailableError("not there")] * 10
        pauses: list[float] = []
        enough = threading.Event()
        listen = event_bed.events.listen

        def listens() -> Iterator[RuntimeEvent]:
            if len(pauses) == 8:
                world.now += runtime_events.PAUSES.steady + 1  # this stream stays open
            return listen()

        def wait(seconds: float) -> bool:
            pauses.append(seconds)
            if len(pauses) == 10:
                event_bed.runtime_events._closing.set()
                enough.set()
            return False

        monkeypatch.setattr(event_bed.events, "listen", listens)
        monkeypatch.setattr(event_bed.runtime_events._closing, "wait", wait)
        event_bed.runtime_events.start()
        await world.until(enough.is_set)
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 0.1, 0.2]

    run_scenario(scenario)


def test_a_runtime_without_events_is_reported_once(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world, start=False)
        event_bed.events.refusals = [RuntimeCallError("cannot listen: unknown service", 12)]
        event_bed.runtime_events.start()
        await world.until(lambda: event_bed.runtime_events.events_state is EventsState.NOT_OFFERED)
        await world.quiet()
        assert event_bed.events.listens == 1
        assert world.executor.telemetry.problems() == []
        assert sum("not offered" in reported for reported in world.logged) == 1

    run_scenario(scenario)


def test_no_thread_reads_events_of_a_runtime_without_any(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        threads = set(threading.enumerate())
        world.executor.runtime_events.start()
        assert world.executor.runtime_events.events_state is EventsState.OFF
        assert set(threading.enumerate()) <= threads, "threads of other tests may end meanwhile"

    run_scenario(scenario)


def test_a_fault_of_one_event_does_not_affect_other_events(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, sharer = await owner_and_sharer(world)
        phase = world.executor.lifecycle.phase

        def fails(container_id: str, to: Phase) -> None:
            if container_id == sharer:
                raise KeyError("odd")
            phase(container_id, to)

        monkeypatch.setattr(world.executor.lifecycle, "phase", fails)
        await event_bed.send(EXIT, sharer)
        await event_bed.send(EXIT, owner)
        assert event_bed.phase(owner) is Phase.EXITED
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 1
        assert world.executor.reconcile_requested.is_set()

    run_scenario(scenario)


def test_a_flood_of_events_does_not_block_the_event_loop(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, sharer = await owner_and_sharer(world)
        count = runtime_events.QUEUE_LIMIT - 1
        for number in range(count):
            event_bed.runtime_events._put(RuntimeEvent("exit", f"stranger-{number}"))
        event_bed.events.send(EXIT, owner)
        turns = 0
        while event_bed.phase(owner) is not Phase.EXITED:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= count // runtime_events.AT_ONCE
        await world.quiet()
        assert world.on(sharer) == ALL
        assert world.executor.telemetry.value(metrics.RUNTIME_EVENT_OVERFLOWS) == 0

    run_scenario(scenario)


def test_an_overflow_of_the_event_queue_triggers_a_reconcile(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_events, "QUEUE_LIMIT", 4)

    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        for number in range(50):
            event_bed.events.send(EXIT, f"stranger-{number}")
        event_bed.events.queued.put(None)
        end = time.monotonic() + 30
        while event_bed.events.listens < 2 and time.monotonic() < end:
            time.sleep(0.01)  # the loop has no turn until all of them have come
        await world.until(lambda: world.executor.telemetry.value(metrics.RUNTIME_EVENT_OVERFLOWS) == 1)
        assert world.executor.reconcile_requested.is_set()
        assert len(event_bed.runtime_events._exits) == 4
        await event_bed.connected()

    run_scenario(scenario)


def test_close_ends_the_thread(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        event_bed = EventBed(world)
        await event_bed.connected()
        owner, _ = await owner_and_sharer(world)
        event_bed.runtime_events._handle(RuntimeEvent("start", "stranger"))
        await world.executor.runtime_events.close()
        thread = event_bed.runtime_events._thread
        assert thread is not None
        assert not thread.is_alive()
        assert (
            event_bed.runtime_events._resolve_timer is None
            or event_bed.runtime_events._resolve_timer.cancelled()
        )
        event_bed.runtime_events._put(RuntimeEvent("exit", owner))
        await world.quiet()
        assert event_bed.phase(owner) is Phase.RUNNING

    run_scenario(scenario)
