"""Structured values: lists and mappings, each piece with its line in the file.

The pieces are read one by one, and the first error ends the reading. So a file whose aliases multiply into
billions of pieces costs no more than the pieces up to that error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from proxy.config.frozen_mapping import FrozenMapping

_CLASHES = {"str": "text", "int": "a number", "float": "a number", "bool": "true or false", "null": "nothing"}
_DEPTH, _PIECES = 16, 1000
WORDS = frozenset({"str", "int", "float", "bool"})


class SettingError(ValueError):
    """A fault in a piece of a value.

    Attributes:
        line: Its line.
        path: Its place below its key, such as ``[0].limits``; empty for the whole value.
    """

    def __init__(self, line: int, path: str, cause: str) -> None:
        super().__init__(cause)
        self.line = line
        self.path = path


class YamlNode:
    """A node of the file (a yaml.Node, which is not imported here), seen from the key that it belongs to."""

    __slots__ = ("_node", "_path")

    def __init__(self, node: Any, path: str = "") -> None:
        self._node = node
        self._path = path

    def fault(self, cause: object) -> SettingError:
        """Return the error for a fault in this node."""
        return SettingError(self._node.start_mark.line + 1, self._path, str(cause))

    def text(self, wants: str, tags: Iterable[str] = WORDS) -> str:
        """Return the text as it is written in the file.

        Args:
            wants: A description of a valid value.
            tags: YAML's short types that are valid.

        Raises:
            SettingError: It is empty, or of another type.
        """
        tag = self._node.tag.rpartition(":")[2]
        if self._node.id != "scalar" or tag not in tags:
            raise self.fault(
                "has no value" if tag == "null" else f"must be {wants}, not {type_text(self._node)}"
            )
        return str(self._node.value)

    def entries(self, wants: str = "keys with values") -> Iterator[tuple[str, YamlNode]]:
        """Iterate over keys and their values.

        Raises:
            SettingError: It has none, or a key is not a string or occurs twice.
        """
        if self._node.id != "mapping":
            raise self.fault(f"must be {wants}, not {type_text(self._node)}")
        names = set()
        for name, value in self._node.value:
            key = name.value if name.id == "scalar" else "?"
            tree = YamlNode(value, f"{self._path}.{key}")
            if name.id != "scalar" or key in names:
                raise tree.fault("given twice" if key in names else "a key must be a word")
            names.add(key)
            yield key, tree

    def members(self, wants: str = "a list") -> Iterator[YamlNode]:
        """Iterate over the members of a list.

        Raises:
            SettingError: It is not a list.
        """
        if self._node.id != "sequence":
            raise self.fault(f"must be {wants}, not {type_text(self._node)}")
        for at, value in enumerate(self._node.value):
            yield YamlNode(value, f"{self._path}[{at}]")

    def plain(self, depth: int = _DEPTH) -> Any:
        """Return the whole content as plain values that cannot change.

        Returns:
            A string, a number, a boolean, a tuple, or a ``FrozenMapping`` with strings as keys. A text that
            only YAML 1.1 reads as a number (``010``, ``1:30``, ``0x1f``) stays the text that was written.

        Raises:
            SettingError: A piece has no value or is nested too deep, or there are too many pieces.
        """
        return self._plain(depth, [_PIECES])

    def _plain(self, depth: int, budget: list[int]) -> Any:
        budget[0] -= 1
        if budget[0] < 0 or not depth:
            raise self.fault("is nested too deep" if not depth else f"has more than {_PIECES} values in it")
        if self._node.id == "mapping":
            return FrozenMapping({key: value._plain(depth - 1, budget) for key, value in self.entries()})
        if self._node.id == "sequence":
            return tuple(value._plain(depth - 1, budget) for value in self.members())
        tag = self._node.tag.rpartition(":")[2]
        if tag == "null":
            raise self.fault("has no value")
        return _scalar(tag, str(self._node.value))


def _scalar(tag: str, text: str) -> str | int | float | bool:
    if tag == "bool":
        return text.lower() in {"true", "yes", "on"}
    if tag == "int" and re.fullmatch(r"[+-]?(?:0|[1-9][0-9]{0,17})", text):
        return int(text)
    if tag == "float" and re.fullmatch(r"[+-]?[0-9]+\.[0-9]*(?:[eE][+-][0-9]+)?", text):
        return float(text) if math.isfinite(float(text)) else text
    return text


def type_text(node: Any) -> str:
    """Return the type of a node as text, for a message about a wrong type."""
    if node.id == "scalar":
        tag = node.tag.rpartition(":")[2]
        return f"{_CLASHES.get(tag, tag)} ({node.value[:40]!r})" if tag != "null" else "nothing"
    return "a list" if node.id == "sequence" else "keys with values"


def suggestion(key: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the word that was probably intended; empty if none is similar."""
    import difflib

    lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(key.lower()[:80], lower, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{lower[close[0]]}?" if close else ""
