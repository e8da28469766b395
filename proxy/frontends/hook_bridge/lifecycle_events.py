"""The events that hooks are notified of afterwards, and the facts that are remembered for them.

Events come from the node's state, not from calls: a container that ends by itself has stopped, a container
that the runtime does not list any more is gone, and a create whose answer was lost has created the listed
container. So each event is sent once, whether a successful call, a failed call or no call caused it.

The facts of a removed container are dropped. (Koordinator's proxy forgets a container only with
StopContainer, which kubelet never calls for a container that has ended by itself: Koordinator v1.8.0
pkg/runtimeproxy/resexecutor/cri/container.go, DeleteCheckpointIfNeed).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.engine.node_effects import Change
from proxy.executor.observer import Observer
from proxy.frontends.hook_bridge.facts import (
    decision_of,
    existing_facts,
    hook_pools,
    remembered_pod_facts,
)
from proxy.frontends.hook_bridge.object_cache import ObjectCache
from proxy.hooks.events import (
    MachineChanged,
    Point,
    PoolsChanged,
    PostCreateContainer,
    PostRemoveContainer,
    PostRemovePodSandbox,
    PostRunPodSandbox,
    PostStartContainer,
    PostStopContainer,
    PostStopPodSandbox,
    PostUpdateContainerResources,
    Synchronize,
)
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Running
from proxy.model.errors import HookError
from proxy.model.workload import Container, Phase, Pod, Pool
from proxy.pools.facts import pod_facts
from proxy.wire.protobuf import decode_message

if TYPE_CHECKING:
    from proxy.executor.node_executor import NodeExecutor
    from proxy.frontends.hook_bridge.object_cache import RememberedContainer
    from proxy.frontends.hook_bridge.view import HookView
    from proxy.hooks.hook import HookCaller

_Entry = TypeVar("_Entry", pb.PodSandbox, pb.Container)


class LifecycleEvents(Observer):
    """Follows the node for hooks.

    Attributes:
        object_cache: The facts that calls do not carry.
        stopped: Sandboxes that have been stopped and still exist, by id.
        sent: The data kept of creates that are at the runtime, by token.
    """

    def __init__(
        self,
        executor: NodeExecutor,
        hooks: HookCaller,
        on_resumed: Callable[[], None] = lambda: None,
        on_facts_missing: Callable[[], None] = lambda: None,
        look_up: Callable[[str], Awaitable[None]] | None = None,
        *,
        owned_cpus: bool = False,
    ) -> None:
        """Begin without any facts.

        Args:
            executor: The node.
            hooks: Calls the hooks.
            on_resumed: Called at the end of a release, during which hooks were not notified.
            on_facts_missing: Called if a sandbox or container appeared without a call, so that few facts are
                known.
            look_up: Looks up the facts of one sandbox or container.
            owned_cpus: Hooks may assign CPUs that have owners.
        """
        self._executor = executor
        self._hooks = hooks
        self._owned_cpus = owned_cpus
        self._state = executor.state
        self._on_resumed = on_resumed
        self._on_facts_missing = on_facts_missing
        self._look_up = look_up
        self._was_in_release = False
        self._comparison_scheduled = False
        self.object_cache = ObjectCache()
        self.stopped: dict[str, Pod] = {}
        self.sent: dict[str, RememberedContainer | Callable[[], RememberedContainer]] = {}

    # -- facts --------------------------------------------------------------------------------------------

    def lacks_facts(self, target: str) -> bool:
        """Return whether labels and annotations of a container and its pod, or of a sandbox, are missing."""
        if self.object_cache.pod(target) is not None:
            return False
        container = self._executor.state.containers.get(target)
        if container is None:
            return self.find_pod(target) is not None
        return not self.object_cache.knows(target) or self.object_cache.pod(container.pod.sandbox_id) is None

    def find_pod(self, sandbox_id: str) -> Pod | None:
        """Return an existing sandbox, even if it has been stopped."""
        return self._executor.state.pods.get(sandbox_id) or self.stopped.get(sandbox_id)

    def pod(self, pod: Pod) -> PodFacts:
        """Return the facts of a sandbox."""
        return remembered_pod_facts(pod, self.object_cache.pod(pod.sandbox_id))

    def facts(self, container: Container) -> tuple[PodFacts, ContainerFacts]:
        """Return the facts of a container that has been created, and of its pod."""
        pod = self.find_pod(container.pod.sandbox_id) or container.pod
        return self.pod(pod), existing_facts(container, self.object_cache.container(container.id))

    def decision(self, container: Container) -> Decision:
        """Return the decision for a container."""
        return decision_of(self._executor.state, container, self._owned_cpus)

    def synchronize_event(self) -> Synchronize:
        """Return the event with the whole state of the node."""
        state = self._executor.state
        containers = [c for c in state.containers.values() if c.phase is not Phase.CREATING]
        pods = [*state.pods.values(), *self.stopped.values()]
        return Synchronize(
            state.node.machine,
            hook_pools(state),
            [
                self.pod(pod)
                for pod in pods
                if pod.sandbox_id not in self._executor.state.runtime.arriving_sandboxes
            ],
            [Running(*self.facts(c), self.decision(c)) for c in containers],
        )

    def read_lists(self, pods: bytes, containers: bytes, since: int) -> None:
        """Read the runtime's lists for sandboxes and containers that were created before there were hooks.

        Args:
            pods: A ListPodSandboxResponse.
            containers: A ListContainersResponse.
            since: The number of the newest change when they were requested. A sandbox that has changed since
                may have been removed.
        """
        changes = self._executor.state.runtime.changes
        sandboxes = _entries(pb.PodSandbox, pods)
        self.object_cache.add_listed(sandboxes, _entries(pb.Container, containers))
        for sandbox in sandboxes:
            is_unknown = sandbox.state == pb.SANDBOX_NOTREADY and self.find_pod(sandbox.id) is None
            if is_unknown and changes.is_unchanged(sandbox.id, since):
                meta = sandbox.metadata
                self.stopped[sandbox.id] = pod_facts(
                    sandbox.id,
                    meta.uid,
                    meta.namespace,
                    meta.name,
                    meta.attempt,
                    sandbox.labels,
                    sandbox.annotations,
                    "",
                )

    # -- notifying ----------------------------------------------------------------------------------------

    def notify(self, kind: type[Point], make: Callable[[], Point]) -> None:
        """Notify hooks of an event, if any of them handles its point."""
        executor = self._executor
        if kind.NAME not in self._hooks.points or executor.store.mode.in_release:
            return
        try:
            self._hooks.notify(make())
        except Exception as error:  # noqa: BLE001  a failed notification must not affect the node
            executor.report_internal_error(error)

    def pod_created(self, pod: Pod, view: HookView) -> None:
        """A sandbox has been created by a RunPodSandbox."""
        with contextlib.suppress(HookError):  # its labels cannot be read: the runtime's list may have them
            self.object_cache.add_pod(pod.sandbox_id, view.sandbox(pod)[0])
        self.notify(PostRunPodSandbox, lambda: PostRunPodSandbox(self.pod(pod)))

    def updated(self, container_id: str, view: HookView) -> None:
        """A container's resources have been changed by an UpdateContainerResources."""
        with contextlib.suppress(HookError):  # it cannot be read: the former resources stay
            self.object_cache.update_container(container_id, view.update()[0])
        container = self._executor.state.containers.get(container_id)
        if container is not None:
            self._notify(PostUpdateContainerResources, container)

    def _notify(
        self,
        kind: type[
            PostCreateContainer | PostStartContainer | PostStopContainer | PostUpdateContainerResources
        ],
        container: Container,
    ) -> None:
        self.notify(kind, lambda: kind(*self.facts(container), self.decision(container)))

    # -- events of the node -------------------------------------------------------------------------------

    def created(self, token: str, container: Container) -> None:
        """See ``Observer``."""
        request = self.sent.pop(token, None)
        if request is not None:
            self.object_cache.add_container(container.id, request)
        self._notify(PostCreateContainer, container)
        if container.placement.pool is Pool.OWN:
            self._compare_soon()  # the owner of its CPUs has an id now

    def failed(self, token: str) -> None:
        """See ``Observer``."""
        self.sent.pop(token, None)

    def entered(self, container: Container, phase: Phase) -> None:
        """See ``Observer``."""
        if phase is Phase.RUNNING:
            self._notify(PostStartContainer, container)
        elif phase is Phase.EXITED:
            self._notify(PostStopContainer, container)

    def removed(self, container: Container) -> None:
        """See ``Observer``."""
        if container.phase is Phase.RUNNING:
            self._notify(PostStopContainer, container.in_phase(Phase.EXITED))
        self.notify(PostRemoveContainer, lambda: PostRemoveContainer(*self.facts(container)))
        self.object_cache.forget(container.id)

    def pod_found(self, pod: Pod) -> None:
        """See ``Observer``."""
        self._executor.spawn(self._found(pod))

    async def _found(self, pod: Pod) -> None:
        if self._look_up is not None and self.lacks_facts(pod.sandbox_id):
            await self._look_up(pod.sandbox_id)
        self.notify(PostRunPodSandbox, lambda: PostRunPodSandbox(self.pod(pod)))

    def pod_stopped(self, pod: Pod) -> None:
        """See ``Observer``."""
        if pod.sandbox_id in self._executor.state.runtime.arriving_sandboxes:
            return  # it was never created
        self.stopped[pod.sandbox_id] = pod
        self.notify(PostStopPodSandbox, lambda: PostStopPodSandbox(self.pod(pod)))

    def pod_removed(self, sandbox_id: str) -> None:
        """See ``Observer``."""
        pod = self.stopped.pop(sandbox_id, None)
        if pod is not None:
            self.notify(PostRemovePodSandbox, lambda: PostRemovePodSandbox(self.pod(pod)))
        self.object_cache.forget(sandbox_id)

    def listed(self, pods: Collection[str], containers: Collection[str], since: int) -> None:
        """See ``Observer``."""
        state = self._executor.state
        was_in_release, self._was_in_release = self._was_in_release, self._executor.store.mode.in_release
        if was_in_release and not self._was_in_release:
            self._on_resumed()
        for sandbox_id in [
            i for i in self.stopped if i not in pods and state.runtime.changes.is_unchanged(i, since)
        ]:
            self.pod_removed(sandbox_id)
        self.object_cache.keep_only({*pods, *state.pods, *self.stopped}, {*containers, *state.containers})
        expected = [c.id for c in state.containers.values() if c.phase not in (Phase.CREATING, Phase.EXITED)]
        if any(i in containers and not self.object_cache.knows(i) for i in expected) or any(
            i in pods and self.object_cache.pod(i) is None for i in state.pods
        ):
            self._on_facts_missing()
        self.sent = {token: request for token, request in self.sent.items() if token in state.containers}

    # -- changes of the machine and the pools -------------------------------------------------------------

    def changed(self, change: Change) -> None:
        """See ``Observer``."""
        self._compare_soon()

    def _compare_soon(self) -> None:
        """Compare soon. Several changes before the loop's next turn are one event."""
        if not self._comparison_scheduled:
            self._comparison_scheduled = True
            asyncio.get_running_loop().call_soon(self._compare)

    def _compare(self) -> None:
        self._comparison_scheduled = False
        before, now = self._state, self._executor.state
        self._state = now
        was, machine = before.node.machine, now.node.machine
        if was is not machine and was != machine:
            self.notify(MachineChanged, lambda: MachineChanged(was, machine))
        if PoolsChanged.NAME in self._hooks.points:
            old, new = hook_pools(before), hook_pools(now)
            if old != new:
                self.notify(PoolsChanged, lambda: PoolsChanged(old, new))


def _entries(kind: type[_Entry], raw: bytes) -> list[_Entry]:
    """Read a list of the runtime. Entries that cannot be read are left out; reconciles report them."""
    found: list[_Entry] = []
    for entry in pb.ListEntries.FromString(raw).entries:
        with contextlib.suppress(DecodeError):
            found.append(decode_message(kind, entry))
    return found
