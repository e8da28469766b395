"""The keeper of a node: the one place where its state changes.

It lives on the event loop. Deciding is pure and done at once; everything that can block (ledger, kernel,
runtime) is done by workers and awaited. The order of a create that gives CPUs away:

    decide (the state already says that the CPUs are taken)
    -> ledger: the placement, in flight
    -> wait for calls in flight that carry wider sets (flights)
    -> kernel: others leave the CPUs, read back
    -> the request goes on; the runtime's id arrives -> ledger: the placement, for good

A create that fails takes its container out of the state again, and whoever had moved is moved back. Because
every kernel write asks for the newest state, plans of different pods need no lock between them. What is done
when somebody cannot be moved is in ``clearing``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from proxy.keeper.bad_input import LIMITED, BadInput
from proxy.keeper.beside import BesideKubelet
from proxy.keeper.clearing import Clearing
from proxy.keeper.confinement import Confinement
from proxy.keeper.drift.finding import Drift
from proxy.keeper.ending import CLOSE_S, Ending
from proxy.keeper.enforce import Enforced, Enforcer
from proxy.keeper.entrusted import Entrusted
from proxy.keeper.health import STUCK_S, Health
from proxy.keeper.history import History
from proxy.keeper.hooked import tell_lost
from proxy.keeper.household import Household
from proxy.keeper.journal import Journal, Record
from proxy.keeper.kernel_ports import Cgroups
from proxy.keeper.machine.hotplug import Hotplug
from proxy.keeper.mems import MemoryNodes
from proxy.keeper.onlooker import NOBODY, Onlooker
from proxy.keeper.options import Options, Voice
from proxy.keeper.ports import Ledger
from proxy.keeper.prescriptions import Prescriptions
from proxy.keeper.quotas.quotas import Quotas
from proxy.keeper.runtime_ports import Runtime
from proxy.keeper.sandboxes import Sandboxes
from proxy.keeper.scout import Scout
from proxy.keeper.store import Change, Follow, NodeStore
from proxy.keeper.systemd.lasting import Lasting
from proxy.keeper.throttle import Throttle
from proxy.keeper.watching import JOIN_S, Watching
from proxy.keeper.whereabouts import Whereabouts
from proxy.keeper.worker import Worker
from proxy.model.admission import CLAIMED, Rule
from proxy.model.machine import Machine
from proxy.model.workload import Container, Fault, Phase, Pod, Pool, Request
from proxy.plan.node import Node
from proxy.plan.place import Plan, place
from proxy.plan.state import NodeState

if TYPE_CHECKING:
    from proxy.keeper.partitions.owners import OwnersPartitions


class Keeper(Household):
    """Keeps a node's containers where they belong."""

    def __init__(
        self,
        node: Node,
        cgroups: Cgroups,
        runtime: Runtime,
        ledger: Ledger | None,
        options: Options,
        voice: Voice,
        clock: Callable[[], float],
        wall: Callable[[], float] | None = None,
        hardware: Callable[[Machine], Machine | None] = lambda known: None,
        scout: Scout | None = None,
    ) -> None:
        """Begin with an empty state.

        Args:
            node: What does not change.
            cgroups: The kernel's side.
            runtime: The runtime's side.
            ledger: Where placements are kept; None to keep none.
            options: How to behave.
            voice: Where to speak.
            clock: Seconds that never jump.
            wall: Seconds since the epoch, for people; ``clock`` if None.
            hardware: Gives the machine if it is another than the known one now; called in a thread.
            scout: Who finds out what the CRI does not carry; nobody if None.
        """
        self.wall = wall or clock
        super().__init__(self.wall, voice.warn)
        self.options = options
        self.voice = voice
        self.refusals = Throttle(clock, voice.info)
        self.clock = clock
        self.runtime = runtime
        self.health = Health(self.problems.note, self._goes_on)
        self.recorder = Worker("ledger", self.broken)
        self.journal = Journal(
            ledger if options.mode.enforces else None,
            self.recorder,
            self.complain,
            self.counters,
            options.call_timeout,
        )
        self.store = store = NodeStore(NodeState.empty(node), self.journal, self.broken, options.mode)
        store.subscribe(self)
        self.saved, self.lost, self.unsettled = store.saved, store.lost, store.unsettled
        self.news, self.flights, self.retries = store.news, store.flights, store.retries
        self.synced, self.attention, self.to_settle = store.synced, store.attention, store.to_settle
        self.history = History(options.history)
        self.scout = scout or Scout(None, None, self.broken)
        self.beside = BesideKubelet(self, None)
        self.sandboxes = Sandboxes(self)
        self.quotas = Quotas(self)
        self.mems = MemoryNodes(self)
        self.partitions: OwnersPartitions | None = None
        self.onlooker: Onlooker = NOBODY
        self.lasting = Lasting(self)
        self.watching = Watching(self, None)
        self.hotplug = Hotplug(self, hardware)
        self.where = Whereabouts(self)
        self.clearing = Clearing(self)
        self.drift = Drift(self)
        self.bad_input = BadInput(self.counters, self.problems.note)
        self.prescriptions = Prescriptions(self, node)
        self.confinement = Confinement(self)
        self.entrusted = Entrusted(self)
        self._put_off = set[str]()
        self.kernel = Worker("kernel", self.broken)
        self.enforcer = Enforcer(
            cgroups,
            lambda: store.state,
            self.flights.busy,
            self.flights.is_confined,
            lambda: store.mode.is_leaving,
        )
        self.health.watch(self.kernel, STUCK_S, vital=True)
        self.health.watch(self.recorder, STUCK_S, vital=True)
        self.health.watch(self.scout.worker)
        self._calls = 0
        self._boot = f"{int(clock() * 1000):x}"

    @property
    def state(self) -> NodeState:
        """The node as it is now; ``store.change`` replaces it."""
        return self.store.state

    # -- placing ------------------------------------------------------------------------------------------

    def place(self, pod: Pod, name: str, attempt: int, request: Request) -> Plan:
        """Decide a create and take the CPUs; ``clearing.clear`` must follow where the container owns some."""
        request, again = self.entrusted.back(pod, name, attempt, request)
        token = self.token("call")
        plan = place(self.state, pod, name, attempt, request, token)
        if plan.problem or pod.faults or plan.container is None:
            plan = self._judged(plan, pod, name)
        if plan.container is None:
            self.counters["creates_refused"] += 1
            if plan.explanation is not None:
                self.history.note(self.wall(), plan.explanation)
            self.refusals.say((pod.ref, name), f"refused {pod.ref}/{name}: {plan.verdict.operator_message}")
            return plan
        return self.take(plan, again=again)

    def take(self, plan: Plan, *, again: bool = False) -> Plan:
        """Have what a plan that admits says be so; ``again``: it was placed, and counted, before."""
        container = plan.container
        assert container is not None
        # ``clear`` writes the containers that leave an owner's CPUs, and waits for that.
        follow = Follow.CALLER if container.placement.pool is Pool.OWN else Follow.MOVED
        self.store.change(plan.state, "container placed", follow=follow)
        wanted = self.saved[container.id] = self.state.wanted(container)
        self.remember(plan)
        if not again:
            self.counters["creates_placed"] += 1
        if container.placement.pool is Pool.OWN or self.voice.chatty:
            say = self.voice.info if container.placement.pool is Pool.OWN else self.voice.debug
            say(f"placed {container.ref} on {wanted}: {container.placement.reasons[0]}")
        return plan

    def _judged(self, plan: Plan, pod: Pod, name: str) -> Plan:
        """Tell what was wrong with what was asked, here and in the record."""
        self.bad_input.judge(pod, plan)
        words = plan.problem or plan.verdict.operator_message
        self.limited(pod, plan.limit, words, admitted=plan.verdict.admitted)
        if not plan.problem:
            return plan
        if not isinstance(plan.problem, Fault):
            self.problems.note(f"{pod.ref}/{name}: {plan.problem}")
        why = plan.explanation
        if why is None or plan.problem in pod.faults or any(plan.problem in told for told in why.reasons):
            return plan
        return dataclasses.replace(
            plan, explanation=dataclasses.replace(why, reasons=(*why.reasons, plan.problem))
        )

    def limited(self, pod: Pod, limit: Rule | None, words: str, *, admitted: bool) -> None:
        """Count and report a claim that went beyond a rule of admission."""
        if limit is not None:
            self.counters[f"{LIMITED}{limit}_{'shared' if admitted else 'rejected'}"] += 1
            if admitted or limit in CLAIMED:
                self.bad_input.beyond(pod, words)

    def remember(self, plan: Plan) -> None:
        """Keep the record of a decision."""
        assert plan.container is not None
        if plan.explanation is not None:
            self.history.note(self.wall(), plan.explanation, plan.container.id)
        else:
            self.history.note_simple(self.wall(), plan.container, self.state.wanted(plan.container))

    def token(self, kind: str) -> str:
        """Give a name for what the runtime has not named yet."""
        self._calls += 1
        return f"{kind}-{self._boot}-{self._calls}"

    async def clear_sandboxes(self) -> None:
        """Have sandboxes, a new one among them, leave CPUs that are owned."""
        self.moved(await self.kernel.run(self.enforcer.enforce_sandboxes))

    async def _enforce(self, ids: Iterable[str]) -> Enforced:
        done = await self.kernel.run(self.drift.enforce, ids)
        self.moved(done)
        return done

    def moved(self, done: Enforced, *, look_again: bool = True) -> None:
        """Take note of what an enforcement did; ``look_again``: ask the runtime about who has no cgroup."""
        self.counters["cpusets_written"] += len(done.written)
        self.counters["sandboxes_written"] = self.enforcer.pauses.written
        self.drift.note(done)
        for note in done.notes:
            self.problems.note(note)
        for container_id in done.written:
            self.settle_later(container_id)
        if done.written:
            self.lasting.changed(done.written)
        self.where.absent.update(done.absent)
        there = (self.state.containers.get(container_id) for container_id in done.absent)
        if look_again and any(c is not None and c.phase is Phase.RUNNING for c in there):
            self.attention.set()  # who is only starting has no cgroup yet

    def settle_later(self, container_id: str) -> None:
        """Have the runtime told the set of a container, some time."""
        self.store.settle_later(container_id)

    def created(self, token: str, container_id: str) -> None:
        """The runtime has made the container and named it."""
        container = self.state.containers.get(token)
        if container is None:
            return
        container = container.in_phase(Phase.CREATED, container_id)
        records: dict[str, Record | None] = {f"c/{container_id}": container}
        if container.placement.pool is Pool.OWN or container.placement.narrowed is not None:
            records[f"i/{token}"] = None
        self.store.change(self.state.renamed(token, container), "container created", records=records)
        self.history.renamed(token, container_id)
        self.news.touch(container_id)
        saved = self.saved.pop(token, None)
        if saved is not None and not self.retries.settle(container):
            self.saved[container_id] = saved
        else:
            self.saved.pop(container_id, None)
        self.quotas.created(container)
        self.onlooker.created(token, container)

    def failed(self, token: str, *, again: bool = False) -> None:
        """The create failed, or is decided ``again``: the containers that moved for it go back."""
        self.lost.pop(token, None)
        self.saved.pop(token, None)
        self.history.gone(token)
        if token in self.state.containers:
            self.retries.note(self.state.containers[token])
            if not again:
                self.counters["creates_failed"] += 1
            self._retire("create failed", (), (token,), {f"i/{token}": None})
            self.onlooker.failed(token)

    def uncertain(self, token: str) -> None:
        """The create was cancelled under way: the runtime may have made the container or not. Ask it soon."""
        if token in self.state.containers:
            self.retries.note(self.state.containers[token])
            self.lost[token] = self.clock()
            self.attention.set()

    # -- living -------------------------------------------------------------------------------------------

    def phase(self, container_id: str, phase: Phase) -> None:
        """A container has entered a phase; a container that has exited gives its CPUs back."""
        container = self.state.containers.get(container_id)
        if container is None and phase is Phase.EXITED:
            self.news.left(container_id)
        if container is None or container.phase in (phase, Phase.EXITED):
            return  # nobody comes back from the dead; what a runtime says later is taken in as new
        self.news.touch(container_id)
        changed = container.in_phase(phase)
        self._retire(f"container {phase.value}", (changed,), (), {f"c/{container_id}": changed})
        if phase is Phase.RUNNING:
            sandbox_id, after = changed.pod.sandbox_id, self.state.started(changed)
            pod = after.pods.get(sandbox_id)
            renewed = pod is not None and pod is not self.state.pods.get(sandbox_id)
            records = {f"p/{sandbox_id}": pod} if renewed else {}
            self.store.change(after, "init containers let go of memory", records=records)
            if self.partitions is not None and changed.placement.pool is Pool.OWN:
                self.partitions.stir()
        if phase is Phase.RUNNING:
            self.onlooker.started(changed)
        elif phase is Phase.EXITED:
            self.onlooker.ended(changed)

    # -- going --------------------------------------------------------------------------------------------

    def removed(self, ids: Iterable[str]) -> None:
        """Containers are gone."""
        ids = list(ids)
        gone = {i: self.state.containers[i] for i in ids if i in self.state.containers}
        self._retire("container removed", (), gone, {f"c/{container_id}": None for container_id in gone})
        for container_id in gone:
            self.saved.pop(container_id, None)
            self.unsettled.pop(container_id, None)
            self.history.gone(container_id)
        for container_id in ids:
            self.news.left(container_id)
        for container in gone.values():
            self.onlooker.gone(container)

    def _retire(
        self,
        reason: str,
        put: Iterable[Container],
        drop: Iterable[str],
        records: Mapping[str, Record | None],
    ) -> None:
        self.store.change(self.state.changed(put=put, drop=drop), reason, records=records)
        self.quotas.stir()

    def changed(self, change: Change) -> None:
        """Have hooks, reports and the kernel follow a change of pools or rules; see ``StateObserver``."""
        self.onlooker.stirred()
        rules_differ = change.before.node is not change.after.node
        tell_lost(self, change.after.containers if rules_differ else change.shrink)
        if change.follow is Follow.ALL:
            self.later(list(change.after.containers))
        elif change.follow is Follow.MOVED and change.moved:
            self.later(change.moved)

    def later(self, ids: list[str]) -> None:
        """Have the kernel follow the state for some containers, soon; at a start, once it is complete."""
        if not self.store.mode.enforces:
            return
        if self.synced.is_set():
            self.spawn(self.follow(ids))
        else:
            self._put_off.update(ids)

    def in_step(self) -> None:
        """All who run are known. Before, CPUs that seem free may be those of one whom nobody has recorded."""
        self.synced.set()
        ids, self._put_off = self._put_off, set()
        self.later([i for i in ids if i in self.state.containers])

    async def follow(self, ids: list[str]) -> None:
        """Have the kernel follow the state for some containers, now."""
        # What is in flight would undo the write for a moment; who lands is followed then.
        flights = self.flights
        ids = [i for i in ids if not flights.awaited(i) or flights.is_confined(i)]
        if ids:
            for error in (await self._enforce(ids)).errors:
                self.problems.note(error)

    def _goes_on(self, words: str) -> None:
        """A worker that was stuck goes on: what it wrote late may be outdated, so everything is compared."""
        self.voice.warn(words)
        self.attention.set()

    async def close(self, limit: float = CLOSE_S) -> None:
        """Write what waits and end the workers, in so many seconds; one that is stuck is left behind."""
        ending = Ending(limit, self.voice.warn)
        await ending.step("stop listening to the runtime", self.watching.close(), JOIN_S)
        self.hotplug.close()
        await ending.step("end tasks", self.end_tasks())
        await ending.step("write the ledger", self.journal.close(), limit, least=1.0)
        await ending.step("take fences away", self.lasting.close())
        workers = (self.recorder, self.kernel, self.scout, self.prescriptions, self.beside, self.mems)
        closing = (asyncio.to_thread(part.close) for part in workers)
        await ending.step("end the workers", asyncio.gather(*closing), limit)
        await ending.step("stop looking at writes", self.drift.close())
        if self.partitions is not None:
            self.partitions.close()
