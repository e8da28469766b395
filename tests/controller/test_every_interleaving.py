"""Every interleaving of a small day: two pods, three CPUs, and all that can come between.

The controller and the interceptors are the real ones. Threads, clock and runtime are played by an explorer:
what may happen next (a client's call, a job of a worker, the runtime doing what it was asked, its answer, a
timer, a pass of the comparison, a fault) is a list of actions, and each of them is followed from each state
that is reached. A state is rebuilt by living through its actions again; two states are one when everything
that the future depends on is alike: what controller, kernel, runtime and ledger hold, which jobs, calls and
timers wait, and where each coroutine is with what in its variables.

Pod ``a`` shares CPUs: its container is started or updated. Pod ``b`` gets a container with a CPU of its own,
which is started, or stopped; or the moves are made lasting meanwhile. On each way one fault may
happen: a kernel write is refused, the ledger cannot be written, a call fails at the runtime, or fails and is
done all the same, a client goes away and the runtime does it later, an update of ours hits its deadline and
is carried out later, or a pass of the comparison comes between. Timers fire when no job waits. And from every
state the daemon crashes, with what the runtime was at done later or never; a new one then starts on what is
left.

A start that hangs is a day of its own: the runtime makes the container's group with the set that the start
carries, writes that set again later, which the kernel reports, and executes the program last. What is not
promised is modelled as docs/applying.md has it: between the runtime's write and the daemon's answer to the
report only the runtime's own init is in the group, so a program is not executed before a living daemon has
answered, and only a container that has begun its program can be on an owner's CPUs.

What must hold in every state: no other container is on the CPU of a running owner, and no container is
without CPUs; after a crash no owner is lost, and each container gets to where it belongs.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import CoroutineType
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.controller import confinement, journal, worker
from proxy.controller.options import ControllerOptions
from proxy.controller.runtime_ports import RuntimeContainer, RuntimeDetail
from proxy.engine.invariants import violations
from proxy.engine.reservation_state import Reservation
from proxy.model.errors import CannotCreateError, CgroupError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.telemetry import metrics
from proxy.topology.build import described

THREE = described(1, 1, 3, 1)
Action = tuple[str, ...]
START, UPDATE = "StartContainer", "UpdateContainerResources"
DAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": ((START,), ("Create", START)),
    "update": ((START, "|", UPDATE), ("Create", START)),
    "stop": ((START,), ("Create", START, "|", "Stop")),
    "settle": ((START, "|"), ("Create", START, "Stop")),
    "hang": ((START,), ("Create", START)),
    "move": ((START, "|"), ("Create", START, "|", UPDATE)),
}
"""What the two clients do, each by itself; what stands before a bar is done when the day begins."""
NEVER_S = 1e6
"""Timers that are so far away do not fire: the kernel reports writes, so no clock is needed for them."""
LIMIT = 40_000
"""More states than there are."""


class Pool:
    """Stands for a worker's threads: jobs wait until the explorer has them done, in their order."""

    pools: list[Pool]

    def __init__(self, count: int, name: str) -> None:
        self.name = name
        self.jobs: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []
        Pool.pools.append(self)

    def submit(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        assert not kwargs
        future: Future[Any] = Future()
        self.jobs.append((future, job, args))
        return future

    def shutdown(self, limit: float) -> None:
        self.jobs.clear()

    def work(self) -> None:
        future, job, args = self.jobs.pop(0)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job(*args)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class Trip:
    """A call of a client: ``call`` waits at us, ``runtime`` at the runtime, ``answer`` on the way back.

    A start that hangs is in ``made`` once the container's group is there, and in ``set`` when that has been
    written for the last time before the program is executed.
    """

    def __init__(self, pod: str, call: Any) -> None:
        self.pod = pod
        self.call = call
        self.stage = "call"
        self.status = 0
        self.answer = b""


class Day:
    """One life of the node, action by action."""

    def __init__(self, loop: asyncio.AbstractEventLoop, world_type: Any, kind: str, day: str) -> None:
        self.pools = Pool.pools = []
        self.loop = loop
        self.start = loop.time()
        self.kind = kind
        self.settles, self.hangs = day == "settle", day == "hang"
        self.moves = self.may_move = day == "move"
        self.begun = False
        self.trips: dict[str, Trip] = {}
        self.left = {pod: list(calls) for pod, calls in zip("ab", DAYS[day], strict=True)}
        self.ids = {"a": "a-1"}
        self.ghosts: list[tuple[str, Callable[[], None]]] = []
        self.faults = 1
        self.denied: int | None = None
        self.full = False
        self.owner = CpuSet()
        self.asked: dict[str, Any] = {}
        self.serial = 1
        self.world = self.within(lambda: self._world(world_type))
        self.settle()

    def within(self, work: Callable[[], Any]) -> Any:
        """Do something inside of the loop, and let everything that is ready happen."""
        found: list[Any] = []

        def do() -> None:
            found.append(work())

        self.loop.call_soon(do)
        self.drain()
        return found[0]

    def drain(self) -> None:
        while True:
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            if not self.loop._ready:  # type: ignore[attr-defined]
                return

    # -- the world ----------------------------------------------------------------------------------------

    def _world(self, world_type: Any) -> Any:
        day = self

        class Small(world_type):  # type: ignore[misc]
            def boot(self) -> None:
                self.machine = THREE
                super().boot()
                self.settler = self.make_settler()
                if day.settles:
                    day.loop.create_task(self.settler.run())

        world = Small(ControllerOptions(call_timeout=5.0))
        world.controller.clock = lambda: self.loop.time()
        write, store = world.cgroups.write, world.ledger.write

        def deny(path: str, cpus: Any, mems: Any, *, inner: bool = True) -> bool:
            if self.denied is not None and world.cgroups.sets.get(path) != cpus:
                raise CgroupError(f"cannot write {path}: {os.strerror(self.denied)}", self.denied)
            return bool(write(path, cpus, mems, inner=inner))

        def fill(changes: Any) -> None:
            if self.full:
                raise CannotCreateError("cannot write the ledger: no space left")
            store(changes)

        def detail(container_id: str) -> RuntimeDetail:
            asked = self.asked[container_id]
            parent = world.parents[world.runtime.containers[container_id].sandbox_id]
            quota = asked.cpu_shares, asked.cpu_quota, asked.cpu_period
            return RuntimeDetail(f"/{parent}/{container_id}", *quota, 0, world.runtime.specs[container_id])

        world.cgroups.write, world.ledger.write = deny, fill
        world.runtime.detail = detail
        return world

    def settle(self) -> None:
        """Make the two pods and the container of the first."""
        world = self.world
        self.compare()
        world.log.clear()
        annotation = '{"cpuset":"1"}' if self.kind == "named" else ""
        for pod, qos, kube in (("a", "LS", "burstable/"), ("b", "LSE" if annotation else "", "")):
            config = pb.PodSandboxConfig(metadata=pb.PodSandboxMetadata(name=pod, uid=pod, namespace="ns"))
            config.linux.cgroup_parent = f"/kubepods/{kube}pod{pod}"
            if qos:
                config.labels["koordinator.sh/qosClass"] = qos
            if pod == "b" and annotation:
                config.annotations["scheduling.koordinator.sh/resource-status"] = annotation
            task = self.loop.create_task(self._sandbox(world, pod, config))
            self.finish()
            task.result()
        self.one("a", "Create")
        for pod, calls in self.left.items():
            while "|" in calls:
                if (what := calls.pop(0)) != "|":
                    self.one(pod, what)

    def one(self, pod: str, what: str) -> None:
        """Have a call made, done and answered."""
        trip = self.send(pod, what)
        self.finish()
        self.forwarded(trip)
        self.do(trip)
        self.answered(pod)
        self.finish()

    async def _sandbox(self, world: Any, pod: str, config: Any) -> None:
        call = await world.call("RunPodSandbox", pb.RunPodSandboxRequest(config=config))
        world.wire.response(call, pb.RunPodSandboxResponse(pod_sandbox_id=f"s-{pod}").SerializeToString())
        world.wire.finished(call, 0)
        world.cpu.quotas.setdefault(config.linux.cgroup_parent.strip("/"), -1)
        world.parents[f"s-{pod}"] = config.linux.cgroup_parent.strip("/")
        from proxy.controller.runtime_ports import RuntimePod

        facts = dict(config.labels), dict(config.annotations)
        world.runtime.pods[f"s-{pod}"] = RuntimePod(f"s-{pod}", pod, "ns", pod, 0, True, *facts)

    def compare(self) -> None:
        task = self.loop.create_task(self.world.sync.once())
        self.finish()
        assert task.done()
        task.result()

    def finish(self) -> None:
        """Have all jobs done in order."""
        self.drain()
        while any(pool.jobs for pool in self.pools):
            next(pool for pool in self.pools if pool.jobs).work()
            self.drain()

    # -- what may happen ----------------------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        """Give what may happen now."""
        may_fail = self.faults > 0
        for pod in self.left:
            trip = self.trips.get(pod)
            if trip is None:
                if self.left[pod] and (pod in self.ids or self.left[pod][0] == "Create"):
                    yield ("client", pod)
            elif trip.stage == "answer":
                yield ("answer", pod)
            elif trip.stage != "call":
                if trip.stage != "set" or self.reports_answered():
                    yield ("do", pod)
                if may_fail:
                    yield ("fail", pod)
                    yield ("lie", pod)
            if trip is not None and may_fail:
                yield ("lose", pod)
        yield from (("move",) for _ in range(self.may_move))
        if self.ghosts:
            yield ("late",)
        yield from self.jobs(may_fail=may_fail)
        if may_fail:
            yield ("pass",)
        if self.timers() and not any(pool.jobs for pool in self.pools):
            yield ("time",)

    def reports_answered(self) -> bool:
        """Return whether the daemon has done what reports of writes lead to."""
        tasks = {getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks(self.loop)}
        return "_narrow_again" not in tasks and not self.kernel.jobs

    def jobs(self, *, may_fail: bool) -> Iterator[Action]:
        for number, pool in enumerate(self.pools):
            if pool.jobs:
                yield ("job", str(number))
                name = pool.jobs[0][1].__name__
                if may_fail and name in ("enforce_pools", "enforce"):
                    yield ("deny", str(number), str(errno.EACCES))
                    yield ("deny", str(number), str(errno.EBUSY))
                if may_fail and name == "_write":
                    yield ("full", str(number))
                if may_fail and name == "update_cpuset":
                    yield ("deadline", str(number))

    @property
    def kernel(self) -> Pool:
        return next(pool for pool in self.pools if pool.name == "kernel")

    def timers(self) -> list[Any]:
        timers: list[Any] = self.loop._scheduled  # type: ignore[attr-defined]
        return [t for t in timers if not t._cancelled and t._when < self.loop.time() + NEVER_S / 2]

    def act(self, action: Action) -> None:
        """Let something happen."""
        what, *who = action
        self.faults -= what in ("fail", "lie", "lose", "deny", "full", "deadline", "pass")
        if what == "client":
            self.send(who[0], self.left[who[0]].pop(0))
        elif what == "do":
            self.step(self.trips[who[0]])
        elif what == "fail":
            trip = self.trips[who[0]]
            if trip.stage in ("made", "set"):
                self.world.cgroups.sets.pop(self.ids[trip.pod])
            trip.status, trip.stage = 13, "answer"
        elif what == "answer":
            self.answered(who[0])
        elif what in ("lie", "deadline", "lose"):
            self.unclear(what, who[0])
        elif what == "late":
            self.ghosts.pop(0)[1]()
        elif what in ("pass", "move"):
            beside = self.world.sync.once() if what == "pass" else self._move()
            self.loop.create_task(beside).add_done_callback(self._passed)
        elif what == "time":
            due = min(timer._when for timer in self.timers())
            self.loop.now = max(self.loop.time(), due) + 1e-9  # type: ignore[attr-defined]
        else:
            self.denied = int(who[1]) if what == "deny" else None
            self.full = what == "full"
            self.pools[int(who[0])].work()
            self.denied, self.full = None, False
        self.drain()
        while asked := next((pool for pool in self.pools if pool.name == "sync" and pool.jobs), None):
            asked.work()  # what the comparison reads; test_random has it interleaved
            self.drain()
        for trip in list(self.trips.values()):
            self.forwarded(trip)

    def unclear(self, what: str, who: str) -> None:
        """Let something happen after which the daemon cannot know what the runtime does."""
        if what == "lie":
            self.go_on(self.trips[who])
            self.trips[who].status = 13
        elif what == "deadline":
            future, job, args = self.pools[int(who)].jobs.pop(0)
            future.set_exception(UnavailableError("cannot update the cpuset: deadline exceeded"))
            self.ghosts.append((f"{job.__name__} {args}", functools.partial(job, *args)))
        elif what == "lose":
            trip = self.trips.pop(who)
            self.left[who] = []
            self.within(lambda: self.world.wire.finished(trip.call, None))
            trip.call.done = True
            self.forwarded(trip)
            if trip.stage not in ("call", "answer", "refused"):
                # The runtime does not know that its client has gone.
                self.ghosts.append((f"{trip.call.method} {trip.stage}", functools.partial(self.go_on, trip)))

    async def _move(self) -> None:
        self.may_move = False
        controller = self.world.controller
        owner = controller.state.containers["b-1"]
        target = CpuSet(list(controller.state.pools.shared)[-1:])
        assert target != owner.placement.exclusive
        await controller.owner_moves.move(owner.owner, target)

    def _passed(self, task: asyncio.Task[None]) -> None:
        assert task.cancelled() or task.exception() is None, task

    def forwarded(self, trip: Trip) -> None:
        """See whether a call was let go, or refused."""
        if trip.stage == "call" and trip.call.over.is_set():
            if trip.call.refused is not None:
                trip.stage = "refused"
                if self.trips.get(trip.pod) is trip:
                    del self.trips[trip.pod]
                    self.left[trip.pod] = []
                    self.within(lambda: self.world.wire.finished(trip.call, None))
            else:
                trip.stage = "runtime"

    def send(self, pod: str, what: str) -> Trip:
        world = self.world
        if what == "Create":
            request: Any = pb.CreateContainerRequest(pod_sandbox_id=f"s-{pod}")
            request.config.metadata.name = "c"
            if pod == "b":
                whole = pb.LinuxContainerResources(cpu_shares=1024, cpu_quota=100_000, cpu_period=100_000)
                request.config.linux.resources.CopyFrom(whole)
            what = "CreateContainer"
        elif what == "Stop":
            request, what = pb.StopContainerRequest(container_id=self.ids[pod]), "StopContainer"
        else:
            request = getattr(pb, f"{what}Request")(container_id=self.ids[pod])
        trip = self.within(lambda: Trip(pod, world.played(what, request)))
        self.trips[pod] = trip
        self.within(lambda: world.wire.request(trip.call))
        self.forwarded(trip)
        return trip

    def step(self, trip: Trip) -> None:
        """The runtime does what it was asked; a start that hangs goes one step on."""
        there = self.ids.get(trip.pod, "")
        if not (self.hangs and trip.pod == "a" and trip.call.method == START) or trip.stage == "set":
            self.do(trip, execute=trip.stage == "set")
            return
        self.world.cgroups.sets[there] = CpuSet.parse(self.world.runtime.specs[there])
        self.within(lambda: self.world.controller.confinement.written([there]))
        trip.stage = "set" if trip.stage == "made" else "made"

    def go_on(self, trip: Trip) -> None:
        """The runtime does what it was asked, to the end."""
        while trip.stage != "answer":
            if trip.stage == "set":
                while self.kernel.jobs:
                    self.kernel.work()
                    self.drain()
            self.step(trip)

    def do(self, trip: Trip, *, execute: bool = False) -> None:
        """The runtime does what it was asked.

        Args:
            trip: The call.
            execute: It is a start of which only the program is left to be executed.
        """
        world, pod = self.world, trip.pod
        runtime, body, trip.stage = world.runtime, trip.call.sent, "answer"
        if trip.call.method == "CreateContainer":
            got = pb.CreateContainerRequest.FromString(body)
            self.serial += 1
            new = self.ids[pod] = f"{pod}-1"
            runtime.specs[new] = got.config.linux.resources.cpuset_cpus
            runtime.containers[new] = RuntimeContainer(new, f"s-{pod}", "c", 0, "CREATED")
            self.asked[new] = got.config.linux.resources
            trip.answer = pb.CreateContainerResponse(container_id=new).SerializeToString()
            return
        there = self.ids[pod]
        if trip.call.method == "StartContainer":
            if not execute:
                world.cgroups.sets[there] = CpuSet.parse(runtime.specs[there])
            world._state(there, "RUNNING")
            self.begun = self.begun or pod == "a"
            self.owner = world.cgroups.sets[there] if pod == "b" else self.owner
        elif trip.call.method == "StopContainer":
            world.cgroups.sets.pop(there, None)
            world._state(there, "EXITED")
            self.owner = CpuSet() if pod == "b" else self.owner
        else:
            carried = pb.UpdateContainerResourcesRequest.FromString(body).linux.cpuset_cpus
            runtime.specs[there] = carried
            if there in world.cgroups.sets:
                world.cgroups.sets[there] = CpuSet.parse(carried)

    def answered(self, pod: str) -> None:
        trip = self.trips.pop(pod)
        if trip.status:
            self.left[pod] = []
        elif trip.answer:
            self.within(lambda: self.world.wire.response(trip.call, trip.answer))
        self.within(lambda: self.world.wire.finished(trip.call, trip.status))

    # -- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what must hold in every state."""
        world = self.world
        assert violations(world.controller.state) == []
        assert "answered twice" not in world.log
        assert world.controller.telemetry.value(metrics.INTERNAL_ERRORS) == 0, (
            world.controller.telemetry.problems()
        )
        sets = world.cgroups.sets
        assert all(sets.values()), sets
        if self.moves:
            self.owner = sets["b-1"]
        if self.owner and self.begun and "a-1" in sets:
            assert sets["a-1"].isdisjoint(self.owner), f"a runs on {sets['a-1']}, b owns {self.owner}"

    def crash(self, *, done: bool) -> None:
        """End the daemon, start another one, and see what becomes of all containers.

        Args:
            done: Whether the runtime does, after the new daemon's first pass, what it was asked before.
        """
        trips = [trip for trip in self.trips.values() if trip.stage in ("runtime", "made", "set")]
        waiting = [
            *(functools.partial(self.go_on, trip) for trip in trips),
            *(work for _, work in self.ghosts),
        ]
        # Jobs that have begun end with the process, and their calls may be carried out.
        updates = [(job, args) for pool in self.pools for _, job, args in pool.jobs[:1]]
        waiting += [functools.partial(job, *args) for job, args in updates if job.__name__ == "update_cpuset"]
        self.bury()
        self.pools = Pool.pools = []
        self.trips = {}
        self.within(self.world.boot)
        self.world.controller.clock = lambda: self.loop.time()
        self.compare()
        self.check()
        for work in waiting if done else ():
            work()
            self.check()
        for _ in range(2):
            self.loop.now += 3.0  # type: ignore[attr-defined]
            self.drain()
            self.compare()
            self.check()
        self.loop.now += 1.0  # type: ignore[attr-defined]
        self.finish()
        self.whole()

    def whole(self) -> None:
        """Each container is known and where it belongs."""
        world, state = self.world, self.world.controller.state
        live = {c.id: c for c in world.runtime.containers.values() if c.state != "EXITED"}
        if "b-1" in live:
            # The runtime is updated after the move.
            own = world.cgroups.sets["b-1"] if self.moves else CpuSet.parse(world.runtime.specs["b-1"])
            assert [owner.cpus for owner in state.owners.values()] == [own], "an owner is lost"
        else:
            assert not state.owners
        for container_id, cpus in world.cgroups.sets.items():
            assert cpus == state.wanted(state.containers[container_id]), container_id
        assert not [key for key in world.ledger.entries if key.startswith(("i/", "m/"))]
        assert not state.holds

    def bury(self) -> None:
        """Stop everything that is on its way."""
        for pool in self.pools:
            pool.jobs.clear()
        for timer in self.timers():
            timer.cancel()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.drain()

    # -- what a state is ----------------------------------------------------------------------------------

    def mark(self) -> str:
        """Say all that the future depends on."""
        world, controller = self.world, self.world.controller
        there = sorted(
            (c.id, c.phase.value, c.placement.pool.value, str(c.placement.exclusive))
            for c in controller.state.containers.values()
        )
        trips = sorted((pod, t.stage, t.call.method, t.status) for pod, t in self.trips.items())
        flights = sorted(
            (
                f.container_id,
                str(f.carries),
                f.is_start,
                f.overlapped,
                f.stray_since is None,
                f.refused,
                f.resend,
                f.confined,
                self.loop.time() - f.departed >= confinement.PATIENCE_S,
            )
            for f in itertools.chain.from_iterable(controller.state.inflight.calls.values())
        )
        jobs = [[(job.__name__, repr(args)) for _, job, args in pool.jobs] for pool in self.pools]
        entries = sorted((key, str(value.get("phase"))) for key, value in world.ledger.entries.items())
        now = self.loop.time()
        tasks = sorted(where(task.get_coro(), now) for task in asyncio.all_tasks(self.loop))
        timers = sorted(repr(getattr(t._callback, "__qualname__", "")) for t in self.timers())
        return repr(
            (
                *(there, trips, flights, jobs, entries, tasks, timers, self.left, self.faults),
                (self.may_move, sorted(controller.state.holds.items())),
                *(sorted(world.cgroups.sets.items()), sorted(world.runtime.specs.items())),
                sorted((c.id, c.state) for c in world.runtime.containers.values()),
                sorted(controller.state.runtime.saved.items()),
                sorted(controller.state.runtime.lost),
                sorted(controller.state.runtime.unsettled),
                sorted(controller.journal._waiting),
                (sorted(controller.enforcer._missed.items()), sorted(controller.enforcer._paths)),
                (controller.attention.is_set(), str(self.owner), [what for what, _ in self.ghosts]),
                (sorted(world.settler._silent._known), self.begun, sorted(controller.confinement._absent)),
            )
        )


def where(coroutine: Any, now: float) -> str:
    """Say where a coroutine is, with the plain variables of its frames, and how long it has waited."""
    found = []
    while isinstance(coroutine, CoroutineType) and coroutine.cr_frame is not None:
        frame = coroutine.cr_frame
        plain = {
            key: str(value)
            for key, value in frame.f_locals.items()
            if isinstance(value, str | int | float | CpuSet | Reservation | None)
            and key not in ("began", "seconds")
        }
        if frame.f_code is confinement.Confinement.wait.__code__:
            plain["began"] = f"{now - frame.f_locals['began']:.1f}"
        found.append((frame.f_code.co_name, frame.f_lineno, plain))
        coroutine = coroutine.cr_await
    return repr(found)


class Loop(asyncio.SelectorEventLoop):
    """A loop with a clock that stands still until it is set."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Explorer:
    """Follows every action from every state."""

    def __init__(self, world_type: Any, kind: str, day: str, faults: int, *, crashes: bool) -> None:
        self.world_type = world_type
        self.faults = faults
        self.may_crash = crashes
        self.kind = kind
        self.day = day
        self.seen: set[int] = set()
        self.steps = 0
        self.crashes = 0
        self.loops = (Loop(), Loop())

    def lived(self, actions: list[Action], loop: Loop) -> Day:
        """Live through some actions."""
        loop.now = 1000.0
        day = Day(loop, self.world_type, self.kind, self.day)
        day.faults = self.faults
        for action in actions:
            day.act(action)
        return day

    def explore(self) -> None:
        ahead: list[list[Action]] = [[]]
        while ahead:
            way = ahead.pop()
            day = self.lived(way, self.loops[0])
            try:
                while (mark := hash(day.mark())) not in self.seen:
                    self.seen.add(mark)
                    assert len(self.seen) < LIMIT
                    day.check()
                    if self.may_crash:
                        self.crash(way, day)
                    choices = list(day.actions())
                    if not choices:
                        break
                    ahead += [[*way, other] for other in choices[1:]]
                    way = [*way, choices[0]]
                    day.act(choices[0])
                    self.steps += 1
                self.steps += 1
            except AssertionError as error:
                raise AssertionError(f"after {' '.join('/'.join(step) for step in way)}: {error}") from error
            day.bury()

    def crash(self, way: list[Action], day: Day) -> None:
        outstanding = (
            day.ghosts
            or any(trip.stage in ("runtime", "made", "set") for trip in day.trips.values())
            or any(job.__name__ == "update_cpuset" for pool in day.pools for _, job, _ in pool.jobs[:1])
        )
        for done in (False, True) if outstanding else (False,):
            other = self.lived(way, self.loops[1])
            self.crashes += 1
            try:
                other.crash(done=done)
            except AssertionError as error:
                words = " ".join("/".join(step) for step in way)
                raise AssertionError(f"after {words} and a crash ({done=}): {error}") from error
            other.bury()


@pytest.fixture
def world_type(live: Callable[..., None]) -> Any:
    found: list[Any] = []

    async def day(w: Any) -> None:
        found.append(type(w))

    live(day, synced=False)
    return found[0]


# CPUs that an annotation names are not moved.
KINDS = tuple((kind, day) for kind in ("named", "chosen") for day in DAYS if (kind, day) != ("named", "move"))
CASES = (
    *((kind, day, 0, True) for kind, day in KINDS),
    *(("named", day, 1, False) for day in ("update", "stop")),
)
MORE = tuple((kind, day, 1, day != "hang") for kind, day in KINDS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "day", "faults", "crashes"), MORE if os.environ.get("TOPOPROXY_EXPLORE") else CASES
)
def test_every_interleaving(
    world_type: Any, kind: str, day: str, faults: int, *, crashes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``TOPOPROXY_EXPLORE=1`` crashes come after faults too, which takes some minutes."""
    monkeypatch.setattr(worker, "Threads", Pool)
    monkeypatch.setattr(confinement, "LOOK_S", 1.5)  # each look is a state
    monkeypatch.setattr(confinement, "WATCHED_S", NEVER_S)
    monkeypatch.setattr(confinement, "UNWATCHED_S", NEVER_S)
    monkeypatch.setattr(journal, "DELAY_S", 0.0)  # a job that waits is delay enough
    explorer = Explorer(world_type, kind, day, faults, crashes=crashes)
    try:
        explorer.explore()
    finally:
        for loop in explorer.loops:
            loop.close()
    print(f"{kind}, {day}: {len(explorer.seen)} states, {explorer.steps} steps, {explorer.crashes} crashes")
    assert len(explorer.seen) > 50
    assert (explorer.crashes > 50) == crashes
