"""What is prescribed for the node on the status page: each value that somebody gives, and who.

As everywhere on that page, a part that is missing or something else than expected is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_DEFAULT = "default"


def prescribed(data: Mapping[str, object]) -> Iterable[str]:
    """Write the section; nothing where nobody prescribes anything and nothing is wrong.

    Args:
        data: ``prescribed`` of what ``/status`` answered.
    """
    listed = data.get("values")
    values = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    told = [each for each in values if each.get("source") != _DEFAULT or each.get("problem")]
    where, trouble = _text(data.get("nodeObject")), _text(data.get("problem"))
    if not told and not trouble:
        return
    yield ""
    yield f"Prescribed for the node{f' (Node object: {where})' if where else ''}"
    rows = [("VALUE", "IN FORCE", "FROM")]
    rows += [(_text(e.get("name")), _shown(e.get("value")), _text(e.get("source"))) for e in told]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows if told else ():
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for words in (trouble, *(_text(each.get("problem")) for each in told)):
        if words:
            yield f"  NOT FOLLOWED: {words}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _text(value) or "-"


def _text(value: object) -> str:
    """One line without control characters: what is shown came from users."""
    return "" if value is None else "".join(c if c.isprintable() else " " for c in str(value))
