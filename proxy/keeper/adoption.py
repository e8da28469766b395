"""Taking in containers that we do not know: made behind our back, or before we came.

What the list says of them is not enough (it has neither CPUs nor a cgroup), so each is asked about, some
at a time; then ``plan.adopt`` lets them have what they run on, and the journal keeps it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.keeper.keeper import Keeper
from proxy.keeper.runtime_ports import Runtime, RuntimeContainer, RuntimeDetail, RuntimePod
from proxy.keeper.worker import Worker
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Fault, KubeQos, Phase, Pod, Pool, Request
from proxy.plan.adopt import adopt
from proxy.pools.facts import parent_of, pod_facts

SILENT_LIMIT = 3
"""When so many status calls in a row get no answer, it is the runtime that does not answer."""
ADOPT_AT_ONCE = 64
"""So many containers are looked at, taken in and recorded in one go: neither memory nor the loop feels it."""
PHASES = {"CREATED": Phase.CREATED, "RUNNING": Phase.RUNNING, "EXITED": Phase.EXITED}


@dataclass(frozen=True, slots=True)
class Listing:
    """What the runtime has."""

    pods: Mapping[str, RuntimePod]
    containers: Mapping[str, RuntimeContainer]

    def is_dead(self, container: RuntimeContainer) -> bool:
        """Tell whether a container was made in a sandbox that has ended, and so will never start."""
        pod = self.pods.get(container.sandbox_id)
        return container.state == "CREATED" and pod is not None and not pod.ready


def listed(runtime: Runtime, container_id: str = "") -> Listing:
    """Ask for all pods, and for all containers or one; runs in a worker.

    Pods first: a container whose pod is not listed yet waits for the next pass.
    """
    pods = {p.id: p for p in runtime.list_pods()}
    return Listing(pods, {c.id: c for c in runtime.list_containers(container_id)})


@functools.lru_cache(maxsize=64)
def saved_cpus(text: str) -> CpuSet | None:
    """Read what the runtime has saved; None where that is no list. Most containers have the same."""
    try:
        return CpuSet.parse(text)
    except ValueError:
        return None


class Adoption:
    """Asks the runtime about containers and takes them in."""

    def __init__(self, keeper: Keeper, worker: Worker, lookups: Worker) -> None:
        """Prepare to ask.

        Args:
            keeper: Who takes them in.
            worker: Who asks for comparisons.
            lookups: Who asks in the way of a call, which is not to wait for a comparison.
        """
        self._keeper = keeper
        self._worker = worker
        self._lookups = lookups

    async def adopt_one(self, container_id: str) -> bool:
        """Take in one container that a call names and that we do not know.

        Returns:
            True when it is known now.
        """
        keeper = self._keeper
        began = keeper.news.number
        try:
            listing = await self._lookups.run(listed, keeper.runtime, container_id)
            listing = keeper.watching.corrected(listing)
            await self._adopt(list(listing.containers.values()), listing, began, self._lookups)
        except (UnavailableError, RuntimeCallError) as error:
            keeper.problems.note(str(error))
        return container_id in keeper.state.containers

    async def adopt(self, found: list[RuntimeContainer], listing: Listing, began: int) -> None:
        """Take in containers of a list, those whose pod is in it and of which the runtime tells more.

        Args:
            found: Whom.
            listing: The list.
            began: The news' number when it was asked for: who has ended since is not taken in.

        Raises:
            UnavailableError: The runtime does not answer any more.
        """
        await self._adopt(found, listing, began, self._worker)

    async def _adopt(
        self, found: list[RuntimeContainer], listing: Listing, began: int, worker: Worker
    ) -> None:
        keeper = self._keeper
        if found:
            await keeper.beside.look()
        for start in range(0, len(found), ADOPT_AT_ONCE):
            some = found[start : start + ADOPT_AT_ONCE]
            details = await worker.run(self._details, [c.id for c in some])
            for seen in some:
                pod, detail = listing.pods.get(seen.sandbox_id), details.get(seen.id)
                new = seen.id not in keeper.state.containers and keeper.news.none(seen.id, began)
                if pod is not None and detail is not None and new and keeper.news.none(pod.id, began):
                    self._take_in(seen, self._pod(pod, detail), detail)
            await keeper.journal.flush()

    def _details(self, ids: list[str]) -> dict[str, RuntimeDetail]:
        """Runs in the worker. A container that has just gone, or that hangs, is left for the next pass."""
        found: dict[str, RuntimeDetail] = {}
        silent = 0
        for container_id in ids:
            try:
                found[container_id] = self._keeper.runtime.detail(container_id)
                silent = 0
            except RuntimeCallError:
                continue
            except UnavailableError as error:
                silent += 1
                if silent >= SILENT_LIMIT:
                    raise
                self._keeper.complain(str(error))
        return found

    def _pod(self, listed: RuntimePod, detail: RuntimeDetail) -> Pod:
        known = self._keeper.state.pods.get(listed.id)
        if known is not None and known.cgroup_parent:
            return known
        pod = pod_facts(
            listed.id,
            listed.uid,
            listed.namespace,
            listed.name,
            listed.attempt,
            listed.labels,
            listed.annotations,
            parent_of(detail.cgroups_path),
        )
        if not detail.cgroups_path:
            # Without a cgroup parent Kubernetes' class is not known, and "Guaranteed" would be a claim.
            pod = dataclasses.replace(pod, kube_qos=KubeQos.BURSTABLE)
        return pod

    def _take_in(self, seen: RuntimeContainer, pod: Pod, detail: RuntimeDetail) -> None:
        keeper = self._keeper
        if pod.sandbox_id not in keeper.state.pods:
            keeper.go_on(keeper.state.with_pod(pod))
            keeper.journal.put(f"p/{pod.sandbox_id}", pod)
        fields = {f.name for f in dataclasses.fields(Request)}
        request = Request(**{k: v for k, v in dataclasses.asdict(detail).items() if k in fields})
        phase = PHASES.get(seen.state, Phase.RUNNING)
        plan = adopt(keeper.state, seen.id, pod, seen.name, seen.attempt, request, phase)
        assert plan.container is not None
        keeper.go_on(plan.state)
        keeper.remember(plan)
        keeper.counters["adopted"] += 1
        keeper.bad_input.judge(pod, plan)
        if plan.problem and not isinstance(plan.problem, Fault):
            keeper.problems.note(f"{plan.container.ref}: {plan.problem}")
        saved = saved_cpus(detail.cpuset_cpus)
        if saved is not None:
            keeper.saved[seen.id] = saved
        keeper.journal.put(f"c/{seen.id}", plan.container)
        say = keeper.voice.info if plan.container.placement.pool is Pool.OWN else keeper.voice.debug
        say(f"adopted {plan.container.ref}: {plan.container.placement.reasons[0]}")
