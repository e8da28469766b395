"""What a hook may answer: an adjustment, a veto, or nothing.

A hook cannot change what it receives; it sets fields in an answer. For each field there are three cases:
nothing (``LEAVE``, the default), a value, or ``CLEAR``: as if the client had not requested it. In maps a
missing key is left as it is, and a key whose value is ``CLEAR`` is removed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, TypeAlias

from proxy.hooks.facts import Device, Mount
from proxy.hooks.slot_init import slot_init
from proxy.model.idset import CpuSet, Mask


class Presence(enum.Enum):
    """A marker in place of a value: nothing is set, or the field is cleared."""

    LEAVE = "leave"
    CLEAR = "clear"

    def __repr__(self) -> str:
        return self.name


LEAVE: Final = Presence.LEAVE
CLEAR: Final = Presence.CLEAR

_LeaveOrClear: TypeAlias = Literal[Presence.LEAVE, Presence.CLEAR]
_Clear: TypeAlias = Literal[Presence.CLEAR]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The changes for another container, which exists already.

    Attributes:
        cpus: As ``Adjustment.cpus``.
        cpu_period, cpu_quota, cpu_shares, memory_limit, memory_swap_limit, oom_score_adj, unified: As in
            ``Adjustment``.
    """

    cpus: CpuSet | _LeaveOrClear = LEAVE
    cpu_period: int | _LeaveOrClear = LEAVE
    cpu_quota: int | _LeaveOrClear = LEAVE
    cpu_shares: int | _LeaveOrClear = LEAVE
    memory_limit: int | _LeaveOrClear = LEAVE
    memory_swap_limit: int | _LeaveOrClear = LEAVE
    oom_score_adj: int | _LeaveOrClear = LEAVE
    unified: Mapping[str, str] = field(default_factory=dict)


@slot_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """The changes that a hook requests.

    Attributes:
        cpus: The CPUs of the container: some of ``Decision.allowed``. They narrow the engine's
            decision for as long as the container lives. ``CLEAR``: the client's request is ignored.
        mems: Its memory nodes: some of ``Decision.allowed_mems``.
        cpu_period, cpu_quota: Microseconds; quota -1 for no limit.
        cpu_shares: Relative weight, from 2.
        memory_limit, memory_swap_limit: Bytes.
        oom_score_adj: -1000 to 1000.
        unified: Files of cgroup v2, such as ``memory.high``, and the values to write into them.
        annotations, labels: Of the pod in RunPodSandbox, of the container elsewhere.
        envs: Variables of the environment.
        devices, mounts: Path in the container to the device or the mount.
        cgroup_parent: The pod's cgroup, in RunPodSandbox; it cannot be changed later.
        updates: Runtime's id of another container to the changes for it.

    Each point lists the fields that it takes. A field that the CRI cannot change there is refused.
    """

    cpus: CpuSet | _LeaveOrClear = LEAVE
    mems: Mask | _LeaveOrClear = LEAVE
    cpu_period: int | _LeaveOrClear = LEAVE
    cpu_quota: int | _LeaveOrClear = LEAVE
    cpu_shares: int | _LeaveOrClear = LEAVE
    memory_limit: int | _LeaveOrClear = LEAVE
    memory_swap_limit: int | _LeaveOrClear = LEAVE
    oom_score_adj: int | _LeaveOrClear = LEAVE
    unified: Mapping[str, str | _Clear] = field(default_factory=dict)
    annotations: Mapping[str, str | _Clear] = field(default_factory=dict)
    labels: Mapping[str, str | _Clear] = field(default_factory=dict)
    envs: Mapping[str, str | _Clear] = field(default_factory=dict)
    devices: Mapping[str, Device | _Clear] = field(default_factory=dict)
    mounts: Mapping[str, Mount | _Clear] = field(default_factory=dict)
    cgroup_parent: str | _LeaveOrClear = LEAVE
    updates: Mapping[str, Update] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any field is set."""
        return next(self.set_fields(), None) is not None

    def set_fields(self) -> Iterator[tuple[str, object]]:
        """Iterate over the fields that are set, with their values; an empty map counts as not set."""
        for name in FIELDS:
            value = getattr(self, name)
            if value is not LEAVE and (name not in MAPS or value):
                yield name, value

    said = set_fields
    """The former name, for one release."""


@dataclass(frozen=True, slots=True)
class Veto:
    """A refusal: the call is answered with FAILED_PRECONDITION, the hook's name, and the reason.

    Attributes:
        reason: The reason that users read in the pod's event.
    """

    reason: str


Answer: TypeAlias = Adjustment | Veto | None

FIELDS: Final = tuple(item.name for item in fields(Adjustment))
"""All fields of an adjustment."""
MAPS: Final = frozenset(("unified", "annotations", "labels", "envs", "devices", "mounts", "updates"))
"""The fields whose keys are owned individually."""
NOTHING: Final = Adjustment()
"""An adjustment that sets no field."""
