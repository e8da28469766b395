"""What hooks are told, from messages, from what is remembered, and from the state.

Nothing here is decoded that no hook looks at, but for what must be a plain value at once: image and resources
of a container that exists. Everything is made on the event loop and may be looked at from any thread.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from google.protobuf.message import DecodeError

from proxy.api.cri import api_pb2 as pb
from proxy.engine.state import NodeState
from proxy.frontends.cri.hook_bridge import config_fields
from proxy.frontends.cri.hook_bridge.config_fields import Unread, image_of
from proxy.frontends.cri.hook_bridge.lazy import LazyList, LazyMap
from proxy.frontends.cri.hook_bridge.lenient import TooManyFieldsError, read
from proxy.frontends.cri.hook_bridge.object_cache import RememberedContainer, RememberedPod
from proxy.frontends.cri.hook_bridge.resources import merged, recorded, resources_of
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts, Pools, Resources
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet, union
from proxy.model.workload import Container, Phase, Placement, Pod, Pool

__all__ = ["container_facts", "decision_of", "existing_facts", "pod_facts", "pools_of", "resources_of"]

_NO_CPUS = CpuSet()
_FIELDS: Final = tuple(each.name for each in fields(ContainerFacts))


class NewContainer(ContainerFacts):
    """A container that is to be made: its request is read when somebody looks at a first field.

    Most hooks look at few of the containers whose creates they see. As in ``lazy``, two first looks at the
    same time read the same; copies and pickles are plain.
    """

    __qualname__ = ContainerFacts.__qualname__  # it prints as one
    __slots__ = ("_body",)

    @classmethod
    def of(cls, body: bytes) -> NewContainer:
        """Make it from a CreateContainerRequest that is not read yet."""
        new = object.__new__(cls)
        object.__setattr__(new, "_body", body)
        return new

    def __getattr__(self, name: str) -> Any:
        """Fill the fields; Python comes here for one that has no value yet."""
        if name not in _FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        told = _read(self._body)
        for each in _FIELDS:
            object.__setattr__(self, each, getattr(told, each))
        return getattr(told, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContainerFacts):
            return NotImplemented
        return all(getattr(self, each) == getattr(other, each) for each in _FIELDS)

    __hash__ = ContainerFacts.__hash__

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return ContainerFacts, tuple(getattr(self, each) for each in _FIELDS)


def pod_facts(
    pod: Pod, config: bytes | pb.PodSandboxConfig | RememberedPod | None, handler: str = ""
) -> PodFacts:
    """Tell of a pod.

    Args:
        pod: The pod as the engine knows it.
        config: Where its labels and annotations are: its configuration, or what is remembered of it (then
            with what hooks set when its sandbox was made); None where nobody knows them.
        handler: Its runtime handler; what is remembered knows that itself.
    """
    unread: Unread[pb.PodSandboxConfig] | None = None
    if isinstance(config, bytes):
        unread = Unread(pb.PodSandboxConfig, config)
    elif isinstance(config, RememberedPod):
        unread, handler = Unread(pb.PodSandboxConfig, config.raw), config.handler
    elif config is not None:
        unread = Unread(pb.PodSandboxConfig, b"", config)
    return PodFacts(
        pod.sandbox_id,
        pod.uid,
        pod.namespace,
        pod.name,
        pod.attempt,
        pod.qos.value,
        pod.kube_qos.value,
        handler,
        pod.cgroup_parent,
        LazyMap(config_fields.labels_of, unread) if unread else {},
        LazyMap(config_fields.annotations_of, unread) if unread else {},
    )


def container_facts(body: bytes) -> ContainerFacts:
    """Tell of a container that is to be made.

    Args:
        body: Its CreateContainerRequest. If it is none it counts as empty: the runtime refuses it.
    """
    return NewContainer.of(body)


def _read(body: bytes) -> ContainerFacts:
    try:
        config = read(pb.CreateContainerConfig, body).config
    except TooManyFieldsError as error:
        raise HookError(f"cannot read a CreateContainer request: {error}") from None
    except DecodeError:
        config = pb.ContainerConfig()
    meta = config.metadata
    return _told(
        "",
        meta.name,
        meta.attempt,
        "creating",
        image_of(config.image),
        Unread(pb.ContainerConfig, b"", config),
        resources_of(config.linux.resources),
    )


def existing_facts(container: Container, known: RememberedContainer | None) -> ContainerFacts:
    """Tell of a container that has been made.

    Args:
        container: The container as the engine knows it.
        known: What is remembered of it; None where nothing is.
    """
    name, attempt, phase = container.name, container.attempt, container.phase.value
    container_id = "" if container.phase is Phase.CREATING else container.id
    if known is None:
        asked = recorded(container.request)
        return ContainerFacts(container_id, name, attempt, phase, resources=asked)
    asked = known.asked if known.whole else merged(recorded(container.request), known.asked)
    unread = Unread(pb.ContainerConfig, known.raw)
    return _told(container_id, name, attempt, phase, known.image, unread, asked)


def _told(
    container_id: str,
    name: str,
    attempt: int,
    phase: str,
    image: str,
    unread: Unread[pb.ContainerConfig],
    resources: Resources,
) -> ContainerFacts:
    return ContainerFacts(
        container_id,
        name,
        attempt,
        phase,
        image,
        LazyMap(config_fields.labels_of, unread),
        LazyMap(config_fields.annotations_of, unread),
        LazyMap(config_fields.envs_of, unread),
        LazyList(config_fields.command_of, unread),
        LazyList(config_fields.args_of, unread),
        LazyList(config_fields.mounts_of, unread),
        LazyList(config_fields.devices_of, unread),
        LazyList(config_fields.cdi_devices_of, unread),
        resources,
    )


def decision_of(state: NodeState, container: Container, owned_cpus: bool = False) -> Decision:
    """Tell what has been decided for a container.

    Args:
        state: The node.
        container: The container; it need not be in the state.
        owned_cpus: Hooks may give CPUs that have owners: they choose from all that are online and that the
            node does not keep for itself.
    """
    placement, machine = container.placement, state.node.machine
    cpus = state.wanted(container)
    offered = cpus if placement.hook_cpus is None else state.offered(container)
    own = _own(placement, cpus) if placement.pool is Pool.OWN else _NO_CPUS
    mems = state.wanted_mems(container) if placement.mems else None
    return Decision(
        placement.pool.value,
        cpus,
        own,
        mems,
        placement.cfs_quota_off,
        placement.reasons,
        offered | machine.online - state.node.reserved - state.node.withheld if owned_cpus else offered,
        mems if mems is not None and placement.blocks else machine.memory_nodes,
    )


def pools_of(state: NodeState) -> Pools:
    """Tell who may use which CPUs. A container that is being made has no id yet: its CPUs are owned."""
    owners = {
        container.id: _own(container.placement, state.wanted(container))
        for container in state.containers.values()
        if container.placement.pool is Pool.OWN and container.phase not in (Phase.CREATING, Phase.EXITED)
    }
    owned = CpuSet.from_bits(union(owner.cpus.bits for owner in state.owners.values()))
    return Pools(state.pools.shared, state.pools.of(Pool.BE), owned, owners)


def _own(placement: Placement, cpus: CpuSet) -> CpuSet:
    """Give those of an owner's CPUs that it runs on: without what is offline, or left out by hooks."""
    return cpus & (
        placement.exclusive | placement.replacement if placement.replacement else placement.exclusive
    )
