"""Kubelet's CPU manager on the status page.

As everywhere on that page, a part that is missing or something else than expected is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    """Write the section: kubelet's settings, where each came from, and whom it gave CPUs.

    Args:
        data: ``kubelet`` of what ``/status`` answered; nothing is written where nothing is known.
    """
    sources = data.get("sources")
    told = sources if isinstance(sources, Mapping) else {}
    rows = [
        (_NAMES.get(key, key), value, _text(told.get(name)))
        for name, key in _SETTINGS
        if (value := _value(data.get(key)))
    ]
    held = data.get("held")
    entries = [entry for entry in held if isinstance(entry, Mapping)] if isinstance(held, list) else []
    if not rows and not entries:
        return
    yield ""
    yield "Kubelet's CPU manager"
    yield from _aligned([("SETTING", "VALUE", "FROM"), *rows])
    if entries:
        yield from _aligned(
            [("CPUS", "GIVEN BY KUBELET TO"), *((_text(e.get("cpus")), _who(e)) for e in entries)]
        )


def _who(entry: Mapping[str, object]) -> str:
    return f"{_text(entry.get('pod')) or _text(entry.get('uid'))}/{_text(entry.get('container'))}"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_text(name)}={_text(value[name])}" for name in sorted(value, key=str))
    return _text(value)


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()


def _text(value: object) -> str:
    """One line without control characters: what is shown came from others' files."""
    if value is None:
        return ""
    return "".join(c if c.isprintable() else " " for c in str(value))
