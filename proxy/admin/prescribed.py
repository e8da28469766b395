"""The node's prescribed values on the status page: each value, and its source.

As everywhere on that page, a part that is missing or something else than expected is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from proxy.report.parts import as_list, one_line, table

_DEFAULT = "default"


def prescribed(data: Mapping[str, object]) -> Iterable[str]:
    """Write the section; nothing where nothing is prescribed and nothing is wrong.

    Args:
        data: ``prescribed`` of what ``/status`` answered.
    """
    values = [each for each in as_list(data.get("values")) if isinstance(each, Mapping)]
    reported = [each for each in values if each.get("source") != _DEFAULT or each.get("problem")]
    where, trouble = one_line(data.get("nodeObject")), one_line(data.get("problem"))
    if not reported and not trouble:
        return
    yield ""
    yield f"Prescribed for the node{f' (Node object: {where})' if where else ''}"
    rows = [("VALUE", "IN FORCE", "FROM")]
    rows += [(one_line(e.get("name")), _shown(e.get("value")), one_line(e.get("source"))) for e in reported]
    yield from table(rows) if reported else ()
    for words in (trouble, *(one_line(each.get("problem")) for each in reported)):
        if words:
            yield f"  NOT FOLLOWED: {words}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return one_line(value) or "-"
