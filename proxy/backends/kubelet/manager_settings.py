"""The settings of the CPU and topology managers in a configuration of kubelet.

The same object, KubeletConfiguration (kubernetes v1.36 staging/src/k8s.io/kubelet/config/v1beta1/types.go),
is in kubelet's file and in the answer of ``/configz``; the answer has all defaults filled in. Its other
fields change from version to version, some even in type (koordinator-sh/koordinator issue 1801). So only the
fields that are used are read; if one of them cannot be read, it counts as not set and is reported. Values
from a file can be strings, because a YAML reader without types returns them so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field

from proxy.model.idset import CpuSet
from proxy.model.quantity import parse_quantity

CPU_POLICIES = ("none", "static")
TOPOLOGY_POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
SCOPES = ("container", "pod")
CPU_RESERVES = ("kubeReserved", "systemReserved", "evictionHard")
"""Settings that reserve CPUs. Kubelet documents no CPU threshold for the last; if one is set, it counts."""

_MOST_CPUS = 8192
_SHOWN_CHARACTERS = 60

T = TypeVar("T")


class ManagerSettings(Struct, frozen=True):
    """Settings of kubelet's managers; None if the configuration does not contain one.

    Attributes:
        policy: ``cpuManagerPolicy``.
        options: ``cpuManagerPolicyOptions``.
        topology_policy, topology_scope: ``topologyManagerPolicy`` and ``topologyManagerScope``.
        reserved: ``reservedSystemCPUs``; it overrides the amounts.
        reserved_milli: Milli-CPUs that are kept for the system: the sum of all amounts.
        problems: Why fields cannot be read, one text for each such field.
    """

    policy: str | None = None
    options: Mapping[str, str] | None = None
    topology_policy: str | None = None
    topology_scope: str | None = None
    reserved: CpuSet | None = None
    reserved_milli: int | None = None
    problems: tuple[str, ...] = field(default=())


def manager_settings(raw: Mapping[str, Any]) -> ManagerSettings:
    """Read a KubeletConfiguration from the value that a JSON or YAML reader returns."""
    problems: list[str] = []

    def read(name: str, kind: Callable[[Any], T]) -> T | None:
        value = raw.get(name)
        if value is None:
            return None
        try:
            return kind(value)
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {error}")
            return None

    amounts = [amount for name in CPU_RESERVES if (amount := read(name, _cpu)) is not None]
    return ManagerSettings(
        read("cpuManagerPolicy", lambda value: _one_of(value, CPU_POLICIES)),
        read("cpuManagerPolicyOptions", _options),
        read("topologyManagerPolicy", lambda value: _one_of(value, TOPOLOGY_POLICIES)),
        read("topologyManagerScope", lambda value: _one_of(value, SCOPES)),
        read("reservedSystemCPUs", _cpus),
        sum(amounts) if amounts else None,
        tuple(problems),
    )


def _shown(value: object) -> str:
    if not isinstance(value, str | int | float | bool):
        return "nothing" if value is None else "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _one_of(value: object, known: tuple[str, ...]) -> str | None:
    if value == "":
        return None
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{_shown(value)} is not one of {', '.join(known)}")
    return value


def _options(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{_shown(value)} is not a list of options")  # noqa: TRY004 - as all bad input here
    options: dict[str, str] = {}
    for name, on in value.items():
        if not isinstance(name, str) or not isinstance(on, str | bool | int):
            raise ValueError(f"{_shown(on)} is not a value of {_shown(name)}")  # noqa: TRY004 - the same
        options[name] = str(on).lower() if isinstance(on, bool) else str(on)
    return options


def _cpus(value: object) -> CpuSet | None:
    if not isinstance(value, str):
        # A reader with types returns a single CPU without quotes as a number.
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{_shown(value)} is not a list of CPUs")  # noqa: TRY004 - the same
        value = str(value)
    cpus = CpuSet.parse(value)
    if cpus and cpus.bits.bit_length() > _MOST_CPUS:
        raise ValueError(f"{_shown(value)} names CPUs that no machine has")
    return cpus or None


def _cpu(value: object) -> int | None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{_shown(value)} is not a list of amounts")  # noqa: TRY004 - as all bad input here
    amount = value.get("cpu")
    if amount is None:
        return None
    milli = parse_quantity(amount, milli=True)
    if not 0 <= milli <= _MOST_CPUS * 1000:
        raise ValueError(f"{_shown(amount)} CPUs cannot be reserved")
    return milli
