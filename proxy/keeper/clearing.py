"""Seeing to it that CPUs are free before somebody owns them.

Everybody who shares is written first, those that no plan moves too: another create for the same owner may
still be on its way, and somebody may have written a cgroup behind our back. What the kernel refuses is asked
about again, and what it holds in the end is read: only who still runs on CPUs that the new
owner is to have is in its way. Then other CPUs are chosen where these were our own choice, a bounded number
of times; else the create is refused. Who had moved for it goes back with the withdrawn placement.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.keeper.confinement import Confinement, Wait
from proxy.keeper.context import NodeContext
from proxy.keeper.creates import Creates
from proxy.keeper.drift.finding import Drift
from proxy.keeper.kernel_writes import KernelWrites
from proxy.keeper.lifecycle import Lifecycle
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, union
from proxy.model.wording import listed
from proxy.model.workload import Container, Pool
from proxy.plan.admission import assigned_cpus
from proxy.plan.place import Plan, place
from proxy.plan.state import NodeState
from proxy.plan.write_errors import WriteAction, action_for, retry_pause
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.keeper.enforce import Enforced

STUCK = "cannot be freed"
"""Stands for whoever is on CPUs that cannot be freed, while others are chosen."""

_REFUSED = "the kernel refuses to move another container off them"


@dataclass(frozen=True, slots=True)
class ClearingFailure:
    """Why CPUs are not free.

    Attributes:
        words: Why, in words.
        cpus: All that those run on who cannot be moved.
        final: Other CPUs would not help.
        public: The words for the rejected client, where ``words`` name containers of other pods.
    """

    words: str
    cpus: CpuSet = field(default_factory=CpuSet)
    final: bool = False
    public: str = ""

    @property
    def client_words(self) -> str:
        """The words for the client whose call is refused."""
        return self.public or self.words


class Clearing:
    """Frees CPUs for a keeper's owners."""

    def __init__(
        self,
        keeper: NodeContext,
        writes: KernelWrites,
        confinement: Confinement,
        drift: Drift,
        lifecycle: Lifecycle,
        creates: Creates,
    ) -> None:
        self._keeper = keeper
        self._writes = writes
        self._confinement = confinement
        self._drift = drift
        self._lifecycle = lifecycle
        self._creates = creates

    def answer(self, obstacle: ClearingFailure) -> str:
        """Give the words for a client; they name other pods only where the configuration allows that."""
        return obstacle.words if self._keeper.state.node.admission.name_others else obstacle.client_words

    async def clear(self, container: Container) -> ClearingFailure | None:
        """Make a placement durable and have the others leave its CPUs; None when they are free."""
        clock = self._keeper.clock
        began = clock()
        if why := await self.write_down(container):
            return ClearingFailure(
                f"the placement is not written down: {why}", container.placement.own, final=True
            )
        obstacle = await self.barrier(container.placement.own, self._count)
        self._keeper.telemetry.observe(metrics.BARRIER_WAIT_SECONDS, clock() - began)
        return obstacle

    def _count(self, wait: Wait) -> None:
        """Count a create of an owner, and how it waited for calls in flight."""
        telemetry = self._keeper.telemetry
        telemetry.count(metrics.EXCLUSIVE_CREATES)
        if wait.seconds is not None:
            telemetry.count(metrics.CREATES_WAITED)
            telemetry.count(metrics.CREATES_WAITED_MS, round(wait.seconds * 1000))
        if wait.passed and not wait.late:
            telemetry.count(metrics.CREATES_PAST_HANGING_CALLS)

    async def write_down(self, container: Container) -> str:
        """Make the placement of a container that is to be created durable; gives why it is not."""
        return await self._keeper.journal.store(f"i/{container.id}", container)

    async def barrier(
        self, mine: CpuSet, waited: Callable[[Wait], None] = lambda wait: None
    ) -> ClearingFailure | None:
        """See to it that nobody runs on CPUs that are not his.

        Args:
            mine: CPUs of the owner who waits: who is elsewhere where he should not be is not in its way.
            waited: Called with how the wait for calls in flight ended.
        """
        keeper, confinement = self._keeper, self._confinement
        wait = await confinement.wait(mine)
        waited(wait)
        if wait.late:
            words, public = confinement.words(wait), confinement.public_words(wait)
            return ClearingFailure(words, wait.cpus, public=public)
        try:
            async with asyncio.timeout(keeper.options.call_timeout):
                done = await self._shrink()
                return (await self._obstacle(done, mine) if done.errors else None) or self._fought(mine)
        except TimeoutError:
            return ClearingFailure("the kernel does not take the others' CPUs in time", mine, final=True)

    async def _shrink(self) -> Enforced:
        """Write everybody who owns no CPUs, and what may succeed a moment later again."""
        keeper = self._keeper
        done = await keeper.kernel.run(keeper.enforcer.enforce_pools)
        tried = 1
        while (seconds := retry_pause(tried, [e.errno for e in done.refused.values()])) is not None:
            self._writes.moved(done)
            keeper.telemetry.count(metrics.CPUSET_WRITES_RETRIED)
            await asyncio.sleep(seconds)
            done = await keeper.kernel.run(keeper.enforcer.enforce_pools)
            tried += 1
        self._writes.moved(done)
        return done

    def _fought(self, mine: CpuSet) -> ClearingFailure | None:
        """Find out who is put onto the CPUs again and again by somebody else: he cannot be moved for long."""
        keeper = self._keeper
        contested = self._drift.contested(mine)
        if not contested:
            return None
        ref = keeper.state.containers[next(iter(contested))].ref
        cpus = CpuSet.from_bits(union(cpus.bits for cpus in contested.values()))
        words = f"somebody keeps writing the cpuset of {ref}: see drift in status"
        return ClearingFailure(
            words, cpus, public="the cpuset of another container is written by another program"
        )

    async def _obstacle(self, done: Enforced, mine: CpuSet) -> ClearingFailure | None:
        """Find out who is in the way after writes were refused; what is not is only told."""
        keeper = self._keeper
        keeper.attention.set()  # the machine may have changed, or who was refused has gone
        if not done.refused:
            # Groups above pods: which containers are on which CPUs is not known.
            return ClearingFailure(done.errors[0], mine, final=True, public=_REFUSED)
        held = await keeper.kernel.run(self._held, tuple(done.refused))
        there = keeper.state.containers
        in_the_way = [
            i for i, cpus in held.items() if i in there and (cpus - keeper.state.wanted(there[i])) & mine
        ]
        if not in_the_way:
            keeper.report_errors(done)
            return None
        final = any(action_for(done.refused[i].errno) is WriteAction.REFUSE for i in in_the_way)
        words = str(done.refused[in_the_way[0]])
        cpus = CpuSet.from_bits(union(cpus.bits for cpus in held.values()))
        return ClearingFailure(words, cpus, final, public=_REFUSED)

    def _held(self, ids: tuple[str, ...]) -> dict[str, CpuSet]:
        """Read which CPUs containers are on; runs in the kernel worker."""
        keeper, found = self._keeper, {}
        for container_id in ids:
            container = keeper.state.containers.get(container_id)
            path = None if container is None else keeper.enforcer.path_of(container)
            if path is None:
                continue
            try:
                found[container_id] = keeper.enforcer.cgroups.read(path).effective_cpus
            except CgroupError as error:
                if action_for(error.errno) is not WriteAction.LOOK:  # else it has left meanwhile
                    found[container_id] = keeper.state.node.machine.online  # it may be anywhere
        return found

    def elsewhere(self, container: Container, obstacle: ClearingFailure) -> Container | None:
        """Withdraw a placement whose CPUs cannot be freed, and make another one.

        Returns:
            The container as placed now, for which ``clear`` must be called; None where there is no other
            placement, and the one that was made still stands.
        """
        keeper = self._keeper
        if obstacle.final or container.id not in keeper.state.containers:
            return None
        state = keeper.state.changed(drop=(container.id,))
        plan = other(state, container, obstacle, keeper.token("call"))
        if plan is None:
            return None
        self._lifecycle.failed(container.id, again=True)
        keeper.telemetry.count(metrics.CREATES_ON_OTHER_CPUS)
        keeper.telemetry.problem(
            "cannot free CPUs", **subject(container), cpus=container.placement.own, err=obstacle.words
        )
        return self._creates.take(plan, again=True).container


def other(state: NodeState, container: Container, obstacle: ClearingFailure, token: str) -> Plan | None:
    """Decide a container again, without CPUs that cannot be freed.

    Args:
        state: The node without the container.
        container: What is to be placed, as it was placed.
        obstacle: The CPUs, and why.
        token: Its id until the runtime names it.

    Returns:
        A plan that gives it CPUs of its own; None where somebody else has named its CPUs, or set them aside
        for its pod, or where there are no others.
    """
    pod = state.pods.get(container.pod.sandbox_id) or container.pod
    if assigned_cpus(state.node, pod) or pod.aside is not None:
        return None
    walled = state.beside({**state.kubelet, STUCK: {"": obstacle.cpus}})
    plan = place(walled, pod, container.name, container.attempt, container.request, token)
    new = plan.container
    if new is None or new.placement.pool is not Pool.OWN or new.placement.own & obstacle.cpus:
        return None
    words = f"not on CPUs {listed(obstacle.cpus)}, which could not be freed: {obstacle.words}"
    placement = dataclasses.replace(new.placement, reasons=(*new.placement.reasons, words))
    new = dataclasses.replace(new, placement=placement)
    why = plan.explanation
    if why is not None:
        why = dataclasses.replace(why, reasons=(*why.reasons, words))
    after = plan.state.beside(state.kubelet).changed(put=(new,))
    return dataclasses.replace(plan, state=after, container=new, explanation=why)
