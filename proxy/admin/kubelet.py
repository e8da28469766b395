"""Kubelet's CPU manager on the status page.

As everywhere on that page, a part that is missing or something else than expected is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.report.parts import as_list, as_map, one_line, table

_SETTINGS = (
    ("policy", "cpuManagerPolicy"),
    ("options", "cpuManagerPolicyOptions"),
    ("reserved", "reservedSystemCPUs"),
    ("topology_policy", "topologyManagerPolicy"),
    ("topology_scope", "topologyManagerScope"),
    ("default", "default"),
)
_NAMES = {"default": "CPUs of all others"}


def kubelet(data: Mapping[str, object]) -> Iterable[str]:
    """Write the section: kubelet's settings, the source of each, and the CPUs that it assigned.

    Args:
        data: ``kubelet`` of what ``/status`` answered; nothing is written where nothing is known.
    """
    reported = as_map(data.get("sources"))
    rows = [
        (_NAMES.get(key, key), value, one_line(reported.get(name)))
        for name, key in _SETTINGS
        if (value := _value(data.get(key)))
    ]
    entries = [entry for entry in as_list(data.get("held")) if isinstance(entry, Mapping)]
    if not rows and not entries:
        return
    yield ""
    yield "Kubelet's CPU manager"
    yield from _indented([("SETTING", "VALUE", "FROM"), *rows])
    if entries:
        yield from _indented(
            [("CPUS", "GIVEN BY KUBELET TO"), *((one_line(e.get("cpus")), _holder(e)) for e in entries)]
        )


def _holder(entry: Mapping[str, object]) -> str:
    return f"{one_line(entry.get('pod')) or one_line(entry.get('uid'))}/{one_line(entry.get('container'))}"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{one_line(name)}={one_line(value[name])}" for name in sorted(value, key=str))
    return one_line(value)


def _indented(rows: list[tuple[str, ...]]) -> Iterable[str]:
    return (f"  {row}" for row in table(rows))
