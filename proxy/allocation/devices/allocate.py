"""Choose devices for a container.

Source: kubernetes v1.36, pkg/kubelet/cm/devicemanager/manager.go ``devicesToAllocate``, ``filterByAffinity``.
Devices are taken, until there are enough, from

1. the reusable ones of the pod's init containers;
2. if more are *aligned* (near to a node of the mask) than still needed: those of them that the plugin
   prefers, then the other aligned ones;
3. otherwise all aligned ones, then those that the plugin prefers among all available, then the *unaligned*
   ones (near to other nodes), finally those near to no node.

Without a mask, or if no device of the resource is near to a node, all devices count as near to no node.
Inside a set kubelet's choice is random; ours is by id, and among the reusable ones the aligned ones come
first.

A plugin's preference (GetPreferredAllocation) is an argument: the caller provides it. If the answer is not
known yet, ``PreferenceMissing`` ends the allocation with the query; the caller makes the query and allocates
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from proxy.allocation.devices.state import DeviceState
from proxy.allocation.rejection import AllocationRejectedError
from proxy.model.hint import TopologyHint
from proxy.model.idset import Mask
from proxy.model.phrases import numa_nodes_text
from proxy.model.requests import PodRequests

Prefer = Callable[[Sequence[str], Sequence[str], int], Iterable[str]]
"""Calls a plugin with the ids to choose from, the ids that must be included, and the total; returns ids."""


class DeviceRejectedError(AllocationRejectedError):
    """The device manager rejects the request; the message is kubelet's."""


class QueryPreference(Struct, frozen=True):
    """Query a device plugin for its preferred devices first, then allocate again with the answer.

    Attributes:
        container: The name of the container that the devices are for.
        resource: The resource.
        available: Ids to choose from, with those of ``must_include``.
        must_include: Ids that the container has already.
        size: How many ids are requested in all.
    """

    container: str
    resource: str
    available: frozenset[str]
    must_include: frozenset[str]
    size: int


class PreferenceMissing(Exception):  # noqa: N818 - a query, not an error
    """The preference of a plugin has to be read first.

    Attributes:
        query: The query that is needed.
    """

    def __init__(self, query: QueryPreference) -> None:
        super().__init__(f"which {query.size} of {query.resource} are preferred?")
        self.query = query


def answered_preference(
    container: str,
    resource: str,
    preferred: tuple[str, ...] | None,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> tuple[str, ...]:
    """Return a plugin's answered preference; with all arguments but the last three bound, a ``Prefer``.

    Raises:
        PreferenceMissing: The preference has not been read yet.
    """
    if preferred is None:
        available_ids, included_ids = frozenset(available), frozenset(must_include)
        raise PreferenceMissing(QueryPreference(container, resource, available_ids, included_ids, size))
    return preferred


class DeviceGrant(Struct, frozen=True):
    """The result of an allocation.

    Attributes:
        state: The new state.
        devices: Resource to the ids that the container holds, sorted.
        reasons: Sentences that explain the choice.
    """

    state: DeviceState
    devices: Mapping[str, tuple[str, ...]]
    reasons: tuple[str, ...]


@dataclass(slots=True)
class _Taking:
    """The devices taken so far, and how many are still needed."""

    needed: int
    taken: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)

    def take(self, ids: Iterable[str], text: str) -> bool:
        """Take as many of these as are needed, in their order; return whether there are enough now."""
        part = [i for i in dict.fromkeys(ids) if i not in self.taken][: self.needed]
        self.taken.update(part)
        self.needed -= len(part)
        if part:
            self.reasons.append(f"{', '.join(part)}: {text}")
        return self.needed == 0


def allocate(
    state: DeviceState,
    pod: PodRequests,
    name: str,
    merged: TopologyHint,
    prefer: Mapping[str, Prefer] | None = None,
    *,
    keeps_held: bool = False,
) -> DeviceGrant:
    """Allocate the devices of a container's limits.

    Args:
        state: The state before; it is not changed.
        pod: The pod, with all its containers in order.
        name: The container.
        merged: The merged hint; ``TopologyHint(None, False)`` without a topology policy.
        prefer: By resource, the plugins that have a preference.
        keeps_held: Whether a container keeps its devices even if they are no longer healthy or registered, as
            while kubelet runs. If False, the devices are checked, as after a reboot.

    Raises:
        DeviceRejectedError: There are not enough devices; the text is kubelet's.
        PreferenceMissing: From ``prefer``.
        KeyError: The pod has no container of that name.
    """
    granted: dict[str, tuple[str, ...]] = {}
    reasons: list[str] = []
    for resource, count in pod.named(name).limits.items():
        held = state.of_container(pod.uid, name, resource)
        if resource not in state.registered and not held:
            continue
        if not keeps_held or len(held) != count:
            _check(state, resource, count, held, f'pod "{pod.uid}" container "{name}"')
        if held or count <= 0:
            reasons += [f"{resource}: it holds its devices already"] if held else []
            chosen = held
        else:
            plugin = (prefer or {}).get(resource)
            taking = _choose(state, resource, count, merged.affinity, state.reusable(pod, resource), plugin)
            reasons += [f"{resource}: {reason}" for reason in taking.reasons]
            chosen = frozenset(taking.taken)
            state = state.give(pod.uid, name, resource, chosen)
        granted[resource] = tuple(sorted(chosen))
    return DeviceGrant(state, granted, tuple(reasons))


def _check(state: DeviceState, resource: str, count: int, held: frozenset[str], container: str) -> None:
    if held and len(held) != count:
        raise DeviceRejectedError(
            f'{container} changed request for resource "{resource}" from {len(held)} to {count}'
        )
    if resource not in state.registered:
        raise DeviceRejectedError(f"cannot allocate unregistered device {resource}")
    healthy = state.healthy(resource)
    if not healthy:
        raise DeviceRejectedError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
    if not held <= healthy:
        raise DeviceRejectedError(
            "previously allocated devices are no longer healthy;"
            f" cannot allocate unhealthy devices {resource}"
        )


def _choose(
    state: DeviceState,
    resource: str,
    count: int,
    mask: Mask | None,
    reusable: frozenset[str],
    prefer: Prefer | None,
) -> _Taking:
    taking = _Taking(count)
    near, far, _ = _parted(state, resource, reusable, mask)
    if taking.take([*near, *far, *sorted(reusable)], "taken over from init containers"):
        return taking
    available = state.available(resource).difference(taking.taken)
    if len(available) < taking.needed:
        raise DeviceRejectedError(
            f"requested number of devices unavailable for {resource}."
            f" Requested: {taking.needed}, Available: {len(available)}"
        )
    aligned, unaligned, nowhere = _parted(state, resource, available, mask)
    where = numa_nodes_text(mask) if mask else "no nodes"
    if taking.needed < len(aligned):
        choice = _preferred(prefer, aligned, taking, count)
        enough = taking.take(choice, "the plugin prefers them among those near the nodes decided on")
        enough = enough or taking.take(aligned, f"near {where}")
    else:
        enough = taking.take(aligned, f"near {where}")
        if not enough:
            choice = _preferred(prefer, sorted(available), taking, count)
            enough = taking.take(choice, "the plugin prefers them")
        enough = enough or taking.take(unaligned, f"near others than {where}")
        enough = enough or taking.take(nowhere, "any will do")
    assert enough, "there were enough available"
    return taking


def _parted(
    state: DeviceState, resource: str, ids: frozenset[str], mask: Mask | None
) -> tuple[list[str], list[str], list[str]]:
    """Divide devices into those near to the mask, those near to other nodes, and the rest; each sorted."""
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    devices = state.registered[resource]
    for i in sorted(ids):
        nodes = devices[i].nodes if i in devices else None
        if mask is None or not nodes:
            parts[2].append(i)
        else:
            parts[1 if nodes.isdisjoint(mask) else 0].append(i)
    return parts


def _preferred(prefer: Prefer | None, among: list[str], taking: _Taking, count: int) -> list[str]:
    """Return the devices that the plugin prefers; ids that are not in ``among`` are ignored."""
    if prefer is None:
        return []
    must = sorted(taking.taken)
    preferred = set(prefer(tuple(sorted({*among, *must})), tuple(must), count))
    return [i for i in among if i in preferred]
