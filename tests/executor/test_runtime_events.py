"""What the runtime reports by itself, and what follows from it."""

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
    """A runtime's events; ``refusals`` are raised one by one before a stream stands."""

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


class Hears:
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
        self.executor.attention.clear()

    async def send(self, kind: str, about: str) -> None:
        """An event, and everything that follows at once."""
        self.events.send(kind, about)
        # The thread takes one after the other, so that after the mark it has handed over what was before.
        mark = f"mark-{time.monotonic_ns()}"
        self.events.send(EXIT, mark)
        await self.world.until(lambda: mark in self.runtime_events._exits)
        await self.world.quiet()

    async def moment(self) -> bool:
        """Wait until doubts are resolved; returns whether a comparison is asked for."""
        await self.world.until(lambda: self.runtime_events._resolve_timer is None)
        return bool(self.executor.attention.is_set())

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


def test_an_exit_gives_the_cpus_back(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, sharer = await owner_and_sharer(world)
        world.end(owner)
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        await hears.send(EXIT, owner)
        await hears.send(EXIT, owner)
        assert hears.phase(owner) is Phase.EXITED
        assert world.on(sharer) == ALL
        assert world.executor.telemetry.value(metrics.EXITS_BY_EVENT) == 1
        assert world.executor.telemetry.value(metrics.RECONCILES) == passes
        assert not world.executor.attention.is_set()
        world.check()

    run_scenario(scenario)


def test_an_exit_before_the_answer_to_the_start(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        sharer = await world.run(await world.pod("b", "LS"))
        owner = await world.create(await world.pod("a", "LSE", cpus=OWN))
        start = await world.call("StartContainer", pb.StartContainerRequest(container_id=owner))
        assert hears.phase(owner) is Phase.STARTING
        await hears.send(EXIT, owner)
        assert hears.phase(owner) is Phase.EXITED
        world.wire.finished(start, 0)
        await world.quiet()
        assert hears.phase(owner) is Phase.EXITED
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_the_next_container_may_have_the_cpus_at_once(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        first = await world.run(await world.pod("a", "LSE", cpus=OWN))
        other = await world.pod("c", "LSE", cpus=OWN)
        world.end(first)
        await hears.send(EXIT, first)
        second = await world.run(other)
        assert world.on(second) == OWN
        await hears.send(EXIT, first)  # sent again, it is about the first still
        assert hears.phase(second) is Phase.RUNNING
        world.check()

    run_scenario(scenario)


@pytest.mark.parametrize("state", ["RUNNING", "CREATED", "UNKNOWN"])
def test_a_list_that_is_behind_brings_no_container_back(
    run_scenario: Callable[..., None], state: str
) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, sharer = await owner_and_sharer(world)
        await hears.send(EXIT, owner)
        world.cgroups.sets.pop(owner)
        world._state(owner, state)
        await world.sync.once()
        await world.quiet()
        assert hears.phase(owner) is Phase.EXITED
        assert world.on(sharer) == ALL
        assert world.executor.telemetry.value(metrics.CONTAINERS_ADOPTED) == 0
        world.end(owner)
        await world.sync.once()
        assert hears.phase(owner) is Phase.EXITED

    run_scenario(scenario)


def test_after_a_while_the_list_is_right(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, _ = await owner_and_sharer(world)
        await hears.send(EXIT, owner)
        world.now += runtime_events.BEHIND_S + 1
        await world.sync.once()
        assert hears.phase(owner) is Phase.RUNNING
        assert not hears.runtime_events._exits

    run_scenario(scenario)


def test_an_exit_during_adoption(run_scenario: Callable[..., None]) -> None:
    """It was on the list, and ended while the runtime was asked about it."""

    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        sharer = await world.run(await world.pod("b", "LS"))
        sandbox = await world.pod("a", "LSE", cpus=OWN)
        world.runtime.containers["stranger"] = RuntimeContainer("stranger", sandbox, "c", 0, "RUNNING")
        detail = world.runtime.detail

        def ends(container_id: str) -> Any:
            hears.events.send(EXIT, container_id)
            end = time.monotonic() + 30
            while container_id not in hears.runtime_events._exits and time.monotonic() < end:
                time.sleep(0.005)
            return detail(container_id)

        world.runtime.detail = ends
        await world.sync.once()
        assert hears.phase("stranger") is Phase.EXITED
        await world.quiet()
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_an_exit_of_a_container_whose_create_was_not_answered(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        sharer = await world.run(await world.pod("b", "LS"))
        sandbox = await world.pod("a", "LSE", cpus=OWN)
        call = await world.begin(sandbox)
        world.wire.finished(call, None)  # the client went away
        world.runtime.containers["lost"] = RuntimeContainer("lost", sandbox, "c", 0, "RUNNING")
        await hears.send(EXIT, "lost")
        await world.sync.once()
        assert hears.phase("lost") is Phase.EXITED
        await world.quiet()
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_an_exit_of_an_unknown_container(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, _ = await owner_and_sharer(world)
        await world.remove(owner)
        state = world.executor.state
        await hears.send(EXIT, owner)
        await hears.send(EXIT, "missing")
        assert world.executor.state is state
        assert not await hears.moment()

    run_scenario(scenario)


@pytest.mark.parametrize("report", ["delete", "answer"])
def test_an_id_that_the_runtime_uses_again_is_not_taken_for_the_one_that_exited(
    run_scenario: Callable[..., None], report: str
) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, _ = await owner_and_sharer(world)
        await hears.send(EXIT, owner)
        if report == "delete":
            world.end(owner)
            del world.runtime.containers[owner]
            world.executor.lifecycle.removed([owner])
            await hears.send(EXIT, owner)  # late
            await hears.send(DELETE, owner)
        else:
            await world.remove(owner)
        again = world.finish(await world.begin(await world.pod("c", "LSE", cpus=OWN)), owner)
        await world.start(again)
        await world.sync.once()
        assert hears.phase(again) is Phase.RUNNING
        assert world.on(again) == OWN

    run_scenario(scenario)


def test_a_list_from_before_a_deletion_does_not_bring_a_container_back(
    run_scenario: Callable[..., None],
) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        sandbox = await world.pod("a", "LSE", cpus=OWN)
        world.runtime.containers["stranger"] = RuntimeContainer("stranger", sandbox, "c", 0, "RUNNING")
        await hears.send(EXIT, "stranger")
        listed = world.runtime.list_containers

        def deleted_meanwhile(*args: Any) -> Any:
            found = listed(*args)
            hears.events.send(DELETE, "stranger")
            end = time.monotonic() + 30
            while "stranger" in hears.runtime_events._exits and time.monotonic() < end:
                time.sleep(0.005)
            return found

        world.runtime.list_containers = deleted_meanwhile
        await world.sync.once()
        assert hears.phase("stranger") is None

    run_scenario(scenario)


def test_exits_of_strangers_are_forgotten(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_events, "EXITS_LIMIT", 3)

    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        for number in range(10):
            await hears.send(EXIT, f"stranger-{number}")
        assert len(hears.runtime_events._exits) == 3

    run_scenario(scenario)


# Sandboxes, and what is done behind our back.


def test_the_end_of_a_sandbox_is_compared(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, sharer = await owner_and_sharer(world)
        await hears.send(EXIT, "s-a")
        assert await hears.moment()
        assert hears.phase(owner) is Phase.RUNNING, "its containers may live on"
        world.end(owner)
        pod = world.runtime.pods["s-a"]
        world.runtime.pods["s-a"] = RuntimePod(pod.id, pod.uid, "ns", "a", 0, False, {}, {})
        await world.sync.once()
        await world.quiet()
        assert world.on(sharer) == ALL

    run_scenario(scenario)


def test_the_end_of_an_empty_sandbox(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, _ = await owner_and_sharer(world)
        await world.stop(owner)
        await hears.send(EXIT, "s-a")
        assert not await hears.moment()

    run_scenario(scenario)


@pytest.mark.parametrize("answered", [True, False])
def test_a_start_of_an_unknown_container(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        if answered:
            monkeypatch.setattr(runtime_events, "MOMENT_S", 1.0)
        await hears.send(START, "s-late")
        if answered:
            assert not world.executor.attention.is_set()
            await world.pod("late", "LS")
        assert await hears.moment() is not answered

    run_scenario(scenario)


@pytest.mark.parametrize("answered", [True, False])
def test_a_deletion_of_a_known_container(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, _ = await owner_and_sharer(world)
        await hears.send(START, owner)
        await hears.send(DELETE, "missing")
        assert not await hears.moment()
        if answered:
            monkeypatch.setattr(runtime_events, "MOMENT_S", 1.0)
        await hears.send(DELETE, owner)
        if answered:
            assert not world.executor.attention.is_set()
            await world.remove(owner)
        assert await hears.moment() is not answered

    run_scenario(scenario)


def test_more_in_doubt_than_are_remembered(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_events, "UNCLEAR_LIMIT", 2)
    monkeypatch.setattr(runtime_events, "LATER_S", 30)

    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, _ = await owner_and_sharer(world)
        for number in range(5):
            hears.runtime_events._handle(RuntimeEvent("start", f"stranger-{number}"))
        assert len(hears.runtime_events._unclear) == 2
        hears.runtime_events._unclear.clear()  # the remembered ones are in doubt no more
        assert await hears.moment()
        world.executor.attention.clear()
        await hears.send(DELETE, owner)
        assert not world.executor.attention.is_set(), "just now everything was compared"
        assert hears.runtime_events._resolve_timer is not None

    run_scenario(scenario)


# The stream.


def test_a_new_subscription_leads_to_a_reconcile(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world, start=False)
        assert hears.runtime_events.events_state.value == "waiting"
        runs = asyncio.ensure_future(world.sync.run())
        await world.until(lambda: hears.runtime_events.events_state is EventsState.CONNECTED)
        passes = world.executor.telemetry.value(metrics.RECONCILES)
        world.executor.attention.clear()
        hears.events.queued.put(UnavailableError("gone"))
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
        hears = Hears(world, start=False)
        hears.events.refusals = [
            UnavailableError("not there yet"),
            RuntimeCallError("cannot listen: too much", 8),
            KeyError("a fault of ours"),
        ]
        hears.runtime_events.start()
        await hears.connected()
        assert hears.events.listens == 4
        assert [p["what"] for p in world.executor.telemetry.problems()] == [
            'cannot receive the runtime\'s events err="cannot listen: too much"',
            "internal error fault=\"KeyError: 'a fault of ours'\"",
        ]
        for end in (None, UnavailableError("gone"), None):
            before = hears.events.listens
            hears.events.queued.put(end)
            await world.until(lambda before=before: hears.events.listens > before)
            await hears.connected()
        owner, _ = await owner_and_sharer(world)
        await hears.send(EXIT, owner)
        assert hears.phase(owner) is Phase.EXITED

    run_scenario(scenario)


def test_pauses_grow_and_are_bounded(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world, start=False)
        hears.events.refusals = [UnavailableError("not there")] * 10
        pauses: list[float] = []
        enough = threading.Event()
        listen = hears.events.listen

        def listens() -> Iterator[RuntimeEvent]:
            if len(pauses) == 8:
                world.now += runtime_events.PAUSES.steady + 1  # this one lasts
            return listen()

        def wait(seconds: float) -> bool:
            pauses.append(seconds)
            if len(pauses) == 10:
                hears.runtime_events._closing.set()
                enough.set()
            return False

        monkeypatch.setattr(hears.events, "listen", listens)
        monkeypatch.setattr(hears.runtime_events._closing, "wait", wait)
        hears.runtime_events.start()
        await world.until(enough.is_set)
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 0.1, 0.2]

    run_scenario(scenario)


def test_a_runtime_without_events_is_reported_once(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world, start=False)
        hears.events.refusals = [RuntimeCallError("cannot listen: unknown service", 12)]
        hears.runtime_events.start()
        await world.until(lambda: hears.runtime_events.events_state is EventsState.NOT_OFFERED)
        await world.quiet()
        assert hears.events.listens == 1
        assert world.executor.telemetry.problems() == []
        assert sum("not offered" in said for said in world.logged) == 1

    run_scenario(scenario)


def test_events_are_not_read_where_there_are_none(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        threads = threading.active_count()
        world.executor.runtime_events.start()
        assert world.executor.runtime_events.events_state is EventsState.OFF
        assert threading.active_count() == threads

    run_scenario(scenario)


def test_one_event_that_fails_costs_no_other(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, sharer = await owner_and_sharer(world)
        phase = world.executor.lifecycle.phase

        def fails(container_id: str, to: Phase) -> None:
            if container_id == sharer:
                raise KeyError("odd")
            phase(container_id, to)

        monkeypatch.setattr(world.executor.lifecycle, "phase", fails)
        await hears.send(EXIT, sharer)
        await hears.send(EXIT, owner)
        assert hears.phase(owner) is Phase.EXITED
        assert world.executor.telemetry.value(metrics.INTERNAL_ERRORS) == 1
        assert world.executor.attention.is_set()

    run_scenario(scenario)


def test_a_flood_leaves_the_loop_its_turns(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, sharer = await owner_and_sharer(world)
        count = runtime_events.QUEUE_LIMIT - 1
        for number in range(count):
            hears.runtime_events._put(RuntimeEvent("exit", f"stranger-{number}"))
        hears.events.send(EXIT, owner)
        turns = 0
        while hears.phase(owner) is not Phase.EXITED:
            await asyncio.sleep(0)
            turns += 1
        assert turns >= count // runtime_events.AT_ONCE
        await world.quiet()
        assert world.on(sharer) == ALL
        assert world.executor.telemetry.value(metrics.RUNTIME_EVENT_OVERFLOWS) == 0

    run_scenario(scenario)


def test_what_the_queue_cannot_hold_is_compared(
    run_scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_events, "QUEUE_LIMIT", 4)

    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        for number in range(50):
            hears.events.send(EXIT, f"stranger-{number}")
        hears.events.queued.put(None)
        end = time.monotonic() + 30
        while hears.events.listens < 2 and time.monotonic() < end:
            time.sleep(0.01)  # the loop has no turn until all of them have come
        await world.until(lambda: world.executor.telemetry.value(metrics.RUNTIME_EVENT_OVERFLOWS) == 1)
        assert world.executor.attention.is_set()
        assert len(hears.runtime_events._exits) == 4
        await hears.connected()

    run_scenario(scenario)


def test_close_ends_the_thread(run_scenario: Callable[..., None]) -> None:
    async def scenario(world: Any) -> None:
        hears = Hears(world)
        await hears.connected()
        owner, _ = await owner_and_sharer(world)
        hears.runtime_events._handle(RuntimeEvent("start", "stranger"))
        await world.executor.runtime_events.close()
        thread = hears.runtime_events._thread
        assert thread is not None
        assert not thread.is_alive()
        assert hears.runtime_events._resolve_timer is None or hears.runtime_events._resolve_timer.cancelled()
        hears.runtime_events._put(RuntimeEvent("exit", owner))
        await world.quiet()
        assert hears.phase(owner) is Phase.RUNNING

    run_scenario(scenario)
