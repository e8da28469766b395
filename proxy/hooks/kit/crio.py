"""CRI-O's annotations for low latency (crio.conf(5); its high-performance runtime handler hooks)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SUFFIX = ".crio.io"
_OFF = ("disable", "true")
_LONGEST_US = 10_000_000
_GOVERNOR = re.compile(r"[a-z][a-z_]{0,30}")


@dataclass(frozen=True, slots=True)
class CrioSettings:
    """The settings that a pod requests for its containers that own CPUs.

    Attributes:
        quota_off: No CFS quota.
        irqs: Empty; ``disable``: no interrupts on its CPUs; ``housekeeping``: only on the first core's.
        balance_off: No load balancing.
        latency: The value for ``pm_qos_resume_latency_us`` of its CPUs; empty for none.
        governor: Frequency governor; empty for nothing.
    """

    quota_off: bool = False
    irqs: str = ""
    balance_off: bool = False
    latency: str = ""
    governor: str = ""


def crio_settings(annotations: Mapping[str, str]) -> tuple[CrioSettings, list[str]]:
    """Read a pod's annotations.

    Returns:
        The requested settings, and sentences about those that cannot be applied.
    """
    problems: list[str] = []
    values = {key.removesuffix(SUFFIX): value for key, value in annotations.items() if key.endswith(SUFFIX)}
    problems += [
        f"{key}: a hook cannot add CPUs to what was decided"
        for key, value in annotations.items()
        if key.startswith(f"cpu-shared{SUFFIX}/") and value == "enable"
    ]
    settings = CrioSettings(
        quota_off=_off(values, "cpu-quota", problems),
        irqs=_irqs(values, problems),
        balance_off=_off(values, "cpu-load-balancing", problems),
        latency=_latency(values, problems),
        governor=_governor(values, problems),
    )
    return settings, problems


# The former names, for one release: copies of a shipped hook on nodes import them.
Wish = CrioSettings
wish_of = crio_settings


def _wrong(name: str, value: str, problems: list[str], wants: str) -> None:
    problems.append(f"{name}{SUFFIX} is {value[:40]!r}, and can be {wants}")


def _off(values: Mapping[str, str], name: str, problems: list[str]) -> bool:
    value = values.get(name)
    if value is None or value in _OFF:
        return value is not None
    _wrong(name, value, problems, "disable")
    return False


def _irqs(values: Mapping[str, str], problems: list[str]) -> str:
    value = values.get("irq-load-balancing", "")
    if value in ("", "housekeeping"):
        return value
    return "disable" if _off(values, "irq-load-balancing", problems) else ""


def _latency(values: Mapping[str, str], problems: list[str]) -> str:
    """Return the value for the kernel's file: ``n/a`` permits no latency at all, 0 sets no limit."""
    value = values.get("cpu-c-states")
    if value is None:
        return ""
    if value in ("enable", "disable"):
        return "0" if value == "enable" else "n/a"
    head, _, number = value.partition("max_latency:")
    if not head and re.fullmatch(r"[0-9]{1,8}", number) and 0 < int(number) <= _LONGEST_US:
        return str(int(number))
    _wrong("cpu-c-states", value, problems, "enable, disable or max_latency:MICROSECONDS")
    return ""


def _governor(values: Mapping[str, str], problems: list[str]) -> str:
    value = values.get("cpu-freq-governor", "")
    if not value or _GOVERNOR.fullmatch(value):
        return value
    _wrong("cpu-freq-governor", value, problems, "the name of a governor")
    return ""
