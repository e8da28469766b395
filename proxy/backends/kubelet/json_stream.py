"""Reading a long list of objects out of JSON, one object at a time.

Theory. ``json.loads`` lets no other thread run until it has finished, which for a list of hundreds of pods
takes tens of milliseconds, in which no call passes the proxy. Here only the outermost object and its list
``items`` are walked in Python, and each item is decoded by itself: other threads run in between, and what is
not kept of an item is gone before the next one is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_SPACE = re.compile(r"[ \t\n\r]*")


def read_items(content: bytes, kind: str) -> Iterator[object]:
    """Return the items of a list as Kubernetes writes it, ``{"kind": KIND, "items": [...]}``.

    Args:
        content: JSON in UTF-8.
        kind: The kind of the list; the content may leave it out.

    Raises:
        ValueError: It is not JSON, or no such list; items before the fault were given.
        RecursionError: It is nested too deeply.
    """
    text = _Text(content.decode())
    for key in text.fields():
        if key == "items" and text.takes("["):
            yield from text.rest_of_list()
            continue
        value = text.value()
        if (key == "kind" and value != kind) or (key == "items" and value is not None):
            raise ValueError(f"it is not a {kind}")
    if text.next():
        raise ValueError(f"there is more behind its end at character {text.at}")


class _Text:
    """JSON text, and how far it is read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._decode = json.JSONDecoder().raw_decode
        self.at = 0

    def next(self) -> str:
        """Return the next character behind blanks; empty at the end."""
        blanks = _SPACE.match(self._text, self.at)
        self.at = blanks.end() if blanks else self.at
        return self._text[self.at : self.at + 1]

    def takes(self, mark: str) -> bool:
        """Step over a mark if it comes next."""
        found = self.next() == mark
        self.at += found
        return found

    def need(self, mark: str) -> None:
        if not self.takes(mark):
            raise ValueError(f"{mark!r} is missing at character {self.at}")

    def value(self) -> object:
        self.next()
        value: object
        value, self.at = self._decode(self._text, self.at)
        return value

    def fields(self) -> Iterator[str]:
        """Return the keys of an object; the caller reads the value of a key before the next key."""
        self.need("{")
        ended = self.takes("}")
        while not ended:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"a key is missing before character {self.at}")  # noqa: TRY004 - as above
            self.need(":")
            yield key
            ended = self.takes("}")
            if not ended:
                self.need(",")

    def rest_of_list(self) -> Iterator[object]:
        """Return the items of a list whose bracket was taken."""
        ended = self.takes("]")
        while not ended:
            yield self.value()
            ended = self.takes("]")
            if not ended:
                self.need(",")
