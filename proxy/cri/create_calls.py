"""CreateContainer: the call that everything here is about."""

from __future__ import annotations

from proxy.cri.pb import api_pb2 as pb
from proxy.cri.rewrite import create_suffix
from proxy.cri.trips import FAILED_PRECONDITION, Call, Hold, Trip
from proxy.cri.views import pod_of, request_of
from proxy.keeper.keeper import Keeper
from proxy.model.workload import Container, Pool
from proxy.plan.place import Plan


class CreateCalls:
    """CreateContainer."""

    def __init__(self, keeper: Keeper, hold: Hold) -> None:
        self.keeper = keeper
        self.requests = {"CreateContainer": self._create}
        self.finished = {"CreateContainer": self._create_done}
        self._hold = hold

    def _create(self, call: Call) -> None:
        message = pb.CreateContainerFacts.FromString(call.body)
        config = message.config
        pod = self.keeper.state.pods.get(message.pod_sandbox_id)
        if pod is None or not pod.cgroup_parent:
            pod = pod_of(pb.PodSandboxConfig.FromString(message.sandbox_config), message.pod_sandbox_id)
            if pod.uid:
                self.keeper.state = self.keeper.state.with_pod(pod)
                self.keeper.journal.put(f"p/{pod.sandbox_id}", pod)
        meta = config.metadata
        plan = self.keeper.place(pod, meta.name, meta.attempt, request_of(config.linux.resources))
        if plan.container is None:
            if self.keeper.options.enforce:
                call.refuse(plan.verdict.code, plan.verdict.message)
            else:
                call.release()
            return
        call.state = Trip(target=plan.container.id)
        if not self.keeper.options.enforce:
            call.release()
        elif plan.container.placement.pool is Pool.OWN:
            self._hold(call, self._create_owner(call, plan, plan.container))
        else:
            cpus = self.keeper.state.wanted(plan.container)
            call.release(call.body + create_suffix(cpus, plan.container.placement.mems))

    async def _create_owner(self, call: Call, plan: Plan, container: Container) -> None:
        obstacle = await self.keeper.clear(plan)
        if obstacle:
            self.keeper.problems.note(obstacle)
            self.keeper.failed(container.id)
            call.refuse(FAILED_PRECONDITION, f"cannot free CPUs for {container.ref}: {obstacle}")
            return
        call.release(call.body + create_suffix(container.placement.own, container.placement.mems))

    def answered(self, trip: Trip, message: bytes) -> None:
        """The runtime has made the container and named it."""
        container_id = pb.CreateContainerResponse.FromString(message).container_id
        if container_id:
            trip.named = True
            self.keeper.created(trip.target, container_id)

    def _create_done(self, trip: Trip, status: int | None) -> None:
        if trip.named:
            return
        if status is None:
            self.keeper.uncertain(trip.target)
        else:
            self.keeper.failed(trip.target)
