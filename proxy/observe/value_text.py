"""Formats values for sentences: ids, amounts, lists, and texts from other programs.

Parts of the text were written by pods, plugins and the runtime, and any terminal must be able to show it. So
it is reduced to one line of printable ASCII.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.model import phrases
from proxy.model.idset import CpuSet, Mask

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def clean(text: str) -> str:
    """Return a text in one line of printable ASCII, with single blanks only."""
    return " ".join("".join(c if " " <= c <= "~" else " " if c.isspace() else "?" for c in text).split())


def sentence(text: str) -> str:
    """Return a text with a period at its end; an empty one stays empty."""
    body = clean(text).rstrip(" .:;,")
    return f"{body}." if body else ""


def capitalized(text: str) -> str:
    """Return a text with a capital letter, unless its first word is a name (``kubelet``, ``cpu:``)."""
    first = text.split(" ", 1)[0]
    plain = first.isalpha() and first.islower() and first not in ("kubelet", "cpu")
    return text[:1].upper() + text[1:] if plain else text


def nodes(mask: Mask | None) -> str:
    """Name NUMA nodes."""
    if mask is None:
        return "any node"
    return f"{'node' if len(mask) == 1 else 'nodes'} {mask}" if mask else "no node"


def node_set(mask: Mask | None) -> str:
    """Name NUMA nodes as one item of a list."""
    text = "any" if mask is None else str(mask)
    return f"{{{text}}}" if "," in text else text


def cpus(ids: CpuSet) -> str:
    """Name CPUs."""
    return phrases.cpus(ids) if ids else "no CPU"


def bytes_text(number: int) -> str:
    """Name bytes, exactly: in the largest unit of which they are a whole number."""
    unit = 0
    while number and number % 1024 == 0 and unit + 1 < len(_UNITS):
        number, unit = number // 1024, unit + 1
    return f"{number} {_UNITS[unit]}"


def join_first(items: Sequence[str], most: int = 10, gap: str = ", ") -> str:
    """Join the first ``most`` texts, and give only the number of the others."""
    shown = list(items[:most])
    return gap.join([*shown, f"and {len(items) - most} more"] if len(items) > most else shown)


def join_with_and(items: Sequence[str]) -> str:
    """Join texts with commas and ``and``."""
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else "".join(items)


def sentences(texts: Iterable[str]) -> tuple[str, ...]:
    """Make sentences of texts; empty ones are left out."""
    return tuple(complete for text in texts if (complete := sentence(text)))


def duration_text(seconds: float) -> str:
    """Write a duration: ``1d 2h``, ``5m 3s``."""
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (remainder, "s")]
    shown = [f"{n}{unit}" for n, unit in parts if n][:2]
    return " ".join(shown) or "0s"
