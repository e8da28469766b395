"""The seven requests of Koordinator's protocol, answered on the event loop.

Each becomes the CRI call that it is about, and is decided as if that call passed through us, by the same
code: so all that holds for those holds here. Questions before a call may be refused; those after one only
have us look at the runtime, as the peer asks them after failed calls, too (Koordinator v1.8.0
pkg/runtimeproxy/server/cri/criserver.go, InterceptRuntimeRequest).
"""

from __future__ import annotations

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as pb
from proxy.controller.controller import Keeper
from proxy.controller.start_update import StartUpdate
from proxy.engine.quotas import CONTAINER
from proxy.frontends.cri.call import Trip
from proxy.frontends.hookserver.foreign_call import ForeignCall, HookCallRefusedError, Wire
from proxy.frontends.hookserver.lookup import RuntimeLookup
from proxy.frontends.hookserver.messages import (
    container_echo,
    create_answer,
    create_request,
    pod_echo,
    run_answer,
    run_request,
    update_answer,
    update_request,
)
from proxy.frontends.hookserver.pending_calls import Creation, PendingCalls
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.workload import Phase
from proxy.pools.facts import pod_facts

Container = pb.ContainerResourceHookRequest
ContainerAnswer = pb.ContainerResourceHookResponse


class Servicer:
    """Answers what is asked; all methods on the loop."""

    def __init__(self, keeper: Keeper, launch: StartUpdate, wire: Wire) -> None:
        """Prepare to answer.

        Args:
            keeper: The node.
            launch: Makes calls to the runtime on behalf of a call.
            wire: Decides on calls.
        """
        self._keeper = keeper
        self._launch = launch
        self._wire = wire
        self.under_way = PendingCalls(keeper, launch)
        self._find = RuntimeLookup(keeper, launch, self.under_way)

    # -- sandboxes ----------------------------------------------------------------------------------------

    async def pre_run_pod_sandbox(self, asked: pb.PodSandboxHookRequest) -> pb.PodSandboxHookResponse:
        """A sandbox is about to be made.

        Raises:
            RefusedError: It is not to be.
        """
        call = ForeignCall(self._wire, "RunPodSandbox", run_request(asked).SerializeToString())
        body = await call.decide()
        with call.or_lost():
            answer = run_answer(asked, call.original, body)
            if asked.pod_meta.uid and call.state is not None:
                self.under_way.add_pod(asked.pod_meta.uid, call)
            else:
                call.lost()
        return answer

    async def post_stop_pod_sandbox(self, asked: pb.PodSandboxHookRequest) -> pb.PodSandboxHookResponse:
        """A sandbox was stopped, or was not: the runtime knows."""
        keeper = self._keeper
        ours = self._find.sandboxes(asked.pod_meta.uid)
        if ours:
            try:
                listed = await self._launch.lookups.run(keeper.runtime.list_pods)
                ready = {pod.id for pod in listed if pod.ready}
                for sandbox_id in ours:
                    if sandbox_id not in ready:
                        keeper.sandboxes.stopped(sandbox_id)
            except (UnavailableError, RuntimeCallError) as error:
                self._find.look_later(error)
        return pod_echo(asked)

    # -- containers ---------------------------------------------------------------------------------------

    async def pre_create_container(self, asked: Container) -> ContainerAnswer:
        """A container is about to be made: it gets its CPUs, which are free when this returns.

        Raises:
            RefusedError: It is not to be.
        """
        if self._keeper.store.mode.is_leaving:
            return container_echo(asked)  # the node is released
        try:
            await self.under_way.settle_creates()  # the container may run already: others leave its CPUs
            found = await self._find.sandbox(asked.pod_meta)
        except (UnavailableError, RuntimeCallError) as error:
            return self._undecided(asked, str(error))
        if found is None:
            return self._undecided(asked, "the runtime does not know its sandbox")
        sandbox_id, attempt = found
        body = create_request(asked, sandbox_id, attempt).SerializeToString()
        call = ForeignCall(self._wire, "CreateContainer", body)
        body = await call.decide()
        with call.or_lost():
            answer, lost = create_answer(asked, call.original, body)
            self._entrust(call, answer, sandbox_id, asked.container_meta)
        if lost:
            self._keeper.telemetry.problem(
                "cannot change a container: Koordinator's hook protocol has no fields for it",
                pod=f"{asked.pod_meta.namespace}/{asked.pod_meta.name}",
                container=asked.container_meta.name,
                fields=", ".join(lost),
            )
        return answer

    def _entrust(
        self, call: ForeignCall, answer: ContainerAnswer, sandbox_id: str, meta: pb.ContainerMetadata
    ) -> None:
        """The create is the peer's from here on."""
        if isinstance(call.state, Trip):
            sent = answer.container_resources
            self._keeper.entrusted.give(call.state.target, sent.cpuset_cpus, sent.cpuset_mems, sent.cpu_quota)
            self.under_way.creates.add(Creation(sandbox_id, meta.name, meta.attempt), call)
            self.under_way.stir()
        else:
            call.lost()

    async def pre_start_container(self, asked: Container) -> ContainerAnswer:
        """A container is about to be started: the runtime has today's set for it when this returns.

        Raises:
            RefusedError: It is not to be.
        """
        container_id = asked.container_meta.id
        if container_id:
            await self._find.name(container_id)
            request = cri.StartContainerRequest(container_id=container_id)
            call = ForeignCall(self._wire, "StartContainer", request.SerializeToString())
            await call.decide()
            if call.state is not None:
                self.under_way.starts.add(container_id, call)
                self.under_way.stir()
            else:
                call.lost()
        return container_echo(asked)

    async def post_start_container(self, asked: Container) -> ContainerAnswer:
        """A container was started, or was not: the runtime knows."""
        container_id = asked.container_meta.id
        if container_id in self.under_way.starts or container_id in self._keeper.state.containers:
            seen = await self._find.seen(container_id)
            call = self.under_way.starts.take(container_id)
            if call is None:
                self._keeper.attention.set()
            elif seen is None:
                call.lost()
            else:
                call.over(0 if any(one.state != "CREATED" for one in seen) else GrpcStatus.UNKNOWN)
        return container_echo(asked)

    async def pre_update_container_resources(self, asked: Container) -> ContainerAnswer:
        """A container's resources are about to be changed: its CPUs are ours to say.

        Raises:
            RefusedError: They are not to be.
        """
        container_id = asked.container_meta.id
        if not container_id:
            return container_echo(asked)
        await self._find.name(container_id)
        quotas, container = self._keeper.quotas, self._keeper.state.containers.get(container_id)
        recorded = CONTAINER + container_id in quotas.known.records
        ours = recorded or (container is not None and quotas.off(container))
        request = update_request(asked, quota=not ours)
        call = ForeignCall(self._wire, "UpdateContainerResources", request.SerializeToString())
        body = await call.decide()
        call.lost()  # its end is never seen; afterwards the runtime gets the current set again
        return update_answer(asked, call.original, body)

    async def post_stop_container(self, asked: Container) -> ContainerAnswer:
        """A container was stopped, or was not: the runtime knows."""
        container_id = asked.container_meta.id
        if container_id in self._keeper.state.containers:
            seen = await self._find.seen(container_id)
            if seen is not None and all(one.state == "EXITED" for one in seen):
                self._keeper.lifecycle.phase(container_id, Phase.EXITED)
            else:
                self._keeper.attention.set()
        return container_echo(asked)

    # -- where nothing can be decided ---------------------------------------------------------------------

    def _undecided(self, asked: Container, why: str) -> ContainerAnswer:
        """Let a create go on as it is, unless its pod would rather not run."""
        keeper = self._keeper
        meta = asked.pod_meta
        words = f"cannot place {meta.namespace}/{meta.name}/{asked.container_meta.name}: {why}"
        keeper.telemetry.problem(
            "cannot place a container",
            pod=f"{meta.namespace}/{meta.name}",
            container=asked.container_meta.name,
            err=why,
        )
        keeper.attention.set()
        if keeper.store.mode.enforces and (keeper.options.refuse_on_error or self.is_strict(asked)):
            raise HookCallRefusedError(GrpcStatus.UNAVAILABLE, words)
        return container_echo(asked)

    def is_strict(self, asked: Container) -> bool:
        """Return whether a container's pod would rather not run than run anywhere."""
        meta = asked.pod_meta
        labels, annotations = asked.pod_labels, asked.pod_annotations
        parent, bounds = asked.pod_cgroup_parent, self._keeper.state.node.machine.bounds
        pod = pod_facts("", meta.uid, meta.namespace, meta.name, 0, labels, annotations, parent, bounds)
        return self._keeper.state.node.refuses_unplaced(pod)
