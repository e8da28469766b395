"""Reads a small YAML file of another program with little memory, long after the start of the process.

``yaml.load`` has two faults for this use. First, its C loader recurses on the C stack, so a file that
contains only brackets crashes the process. Second, the daemon unloads ``yaml`` once it has read its
configuration (``memory_trim``); when ``yaml`` is imported again, its C part still creates nodes of the
unloaded classes, which its Python part does not recognise. The event parser, on which the loaders are built,
has neither fault: it returns a flat sequence of events, which are distinguished by name here. Every scalar
stays text; tags are ignored.
"""

from __future__ import annotations

_DEPTH_LIMIT = 32


def read_yaml(text: str) -> object:
    """Read the first document of a YAML text, as dictionaries, lists and strings; None if there is none.

    Raises:
        ValueError: The text is not YAML, or is nested too deeply (``_DEPTH_LIMIT``).
    """
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    builder = _EventBuilder()
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.add(event)
            if builder.is_complete:
                break
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - YAMLError can be of an unloaded class, see above
        raise ValueError(" ".join(str(error).split())) from None
    return builder.root


class _EventBuilder:
    """Builds one value from a sequence of events."""

    def __init__(self) -> None:
        self.root: object = None
        self.is_complete = False
        self._anchors: dict[str, object] = {}
        self._open: list[tuple[dict[object, object] | list[object], list[object]]] = []

    def add(self, event: object) -> None:
        """Take the next event."""
        name = type(event).__name__
        if name == "ScalarEvent":
            self._put(event, getattr(event, "value", ""))
        elif name in ("MappingStartEvent", "SequenceStartEvent"):
            if len(self._open) >= _DEPTH_LIMIT:
                raise ValueError(f"it is nested deeper than {_DEPTH_LIMIT} levels")
            new: dict[object, object] | list[object] = {} if name.startswith("M") else []
            self._put(event, new)
            self._open.append((new, []))
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            self._open.pop()
        elif name == "AliasEvent":
            anchor = getattr(event, "anchor", "")
            if anchor not in self._anchors:
                raise ValueError(f"the alias {anchor!r} has no anchor")
            self._put(None, self._anchors[anchor])
        elif name == "DocumentEndEvent":
            self.is_complete = True

    def _put(self, event: object, value: object) -> None:
        anchor = getattr(event, "anchor", None)
        if anchor:
            self._anchors[anchor] = value
        if not self._open:
            self.root = value
            return
        target, key = self._open[-1]
        if isinstance(target, list):
            target.append(value)
        elif not key:
            key.append(value)
        else:
            name = key.pop()
            # In YAML a key may be a list, which cannot be a dictionary key; no spec has such keys.
            target[name if isinstance(name, str) else str(id(name))] = value
