"""Whether the taints of a node keep a pod away, as kube-scheduler's filters decide it.

kubernetes v1.36 pkg/scheduler/framework/plugins/tainttoleration/taint_toleration.go and
nodeunschedulable/node_unschedulable.go; staging/src/k8s.io/api/core/v1/toleration.go, ToleratesTaint
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

_EFFECTS = ("NoSchedule", "NoExecute")


class Taint(Struct, frozen=True):
    """A taint of a node."""

    key: str
    effect: str
    value: str = ""


class Toleration(Struct, frozen=True):
    """A toleration of a pod."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


UNSCHEDULABLE = Taint("node.kubernetes.io/unschedulable", "NoSchedule")
"""The taint that a cordoned node has in addition to those of its object."""


def taints_of(raw: Mapping[str, Any]) -> tuple[Taint, ...]:
    """Return the taints of a Node object that keep pods away.

    Raises:
        ValueError: A field has a wrong value.
    """
    spec = raw.get("spec") or {}
    taints = msgspec.convert(spec.get("taints") or (), tuple[Taint, ...])
    found = tuple(taint for taint in taints if taint.effect in _EFFECTS)
    return (*found, UNSCHEDULABLE) if spec.get("unschedulable") else found


def tolerations_of(raw: Mapping[str, Any]) -> tuple[Toleration, ...]:
    """Return the tolerations of a Pod object.

    Raises:
        ValueError: A field has a wrong value.
    """
    return msgspec.convert((raw.get("spec") or {}).get("tolerations") or (), tuple[Toleration, ...])


def tolerates(tolerations: tuple[Toleration, ...], taints: tuple[Taint, ...]) -> bool:
    """Return whether a pod with these tolerations may be scheduled to a node with these taints."""
    return all(any(_matches(toleration, taint) for toleration in tolerations) for taint in taints)


def _matches(toleration: Toleration, taint: Taint) -> bool:
    is_meant = toleration.effect in ("", taint.effect) and toleration.key in ("", taint.key)
    # The operators Lt and Gt compare numbers if a feature gate is on.
    return is_meant and (toleration.operator not in ("", "Equal") or toleration.value == taint.value)
