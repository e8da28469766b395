"""YAML and JSON files of users, read into plain values, with their lines.

Theory. YAML is read as events, not as objects: so the line of every mapping is known, a repeated key is
found, and nothing can be built that is larger than what is allowed. An alias stands for the value that its
anchor names and counts with its whole size, so a few lines that mean a billion values are rejected before
they are expanded. Nesting costs no call depth.

Plain scalars become values as Kubernetes' reader makes them (YAML 1.1): numbers, booleans, null. Scalars that
only PyYAML converts stay strings: timestamps, and numbers to the base of 60 (``1:30``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import yaml
from yaml.resolver import Resolver

from proxy.model.errors import InputError, PermissionDeniedError
from proxy.model.strict_json import StrictJsonError, read_json
from proxy.open_file import open_file

SIZE_LIMIT = 64 << 20
"""Bytes of one file."""
VALUE_LIMIT = 2_000_000
"""Values of one document, those behind aliases counted each time."""
DEPTH_LIMIT = 60
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER = Resolver()
_WORDS = {"true": True, "yes": True, "on": True, "y": True, "false": False, "no": False, "off": False}
_MERGE = "<<"


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file.

    Attributes:
        value: Mappings, lists, strings, numbers, booleans, None.
        file: What the file is called in messages.
        line: The line where the document begins, from 1.
        lines: The line where each mapping begins, by the id of the mapping; empty for JSON.
    """

    value: object
    file: str
    line: int
    lines: dict[int, int] = field(default_factory=dict)

    def where(self, value: object = None) -> str:
        """Name the file and the line of a mapping of this document, or of the document."""
        return f"{self.file} line {self._line(value)}"

    def at(self, value: object = None) -> str:
        """Name file and line as ``where`` does, for messages that say what cannot be read there."""
        return f"{self.file}, line {self._line(value)}"

    def _line(self, value: object) -> int:
        return self.lines.get(id(value), self.line)


def shape_of(value: object) -> str:
    """Return the type of a value as text, for messages about a value that is not an object."""
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return "text" if isinstance(value, str) else f"the value {_short(str(value))}"


def documents(data: bytes, file: str) -> list[Document]:
    """Read the documents of a file; empty ones are left out.

    Raises:
        InputError: The file is neither YAML nor JSON, is too large, or gives a key twice; one line, with the
            line.
    """
    if len(data) > SIZE_LIMIT:
        raise InputError(f"cannot read {file}: it is larger than {SIZE_LIMIT} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"cannot read {file}, line {line}: byte {error.start} is not UTF-8") from None
    if text.lstrip()[:1] in ("{", "["):
        json_documents = _json(text, file)
        if json_documents is not None:
            return json_documents
    return [document for document in _DocumentBuilder(text, file).documents() if document.value is not None]


def _json(text: str, file: str) -> list[Document] | None:
    """Read one JSON value; None if the text is not JSON and may be YAML."""
    try:
        value = read_json(text)
    except StrictJsonError as error:
        raise InputError(f"cannot read {file}: {error}") from None
    except RecursionError:
        raise InputError(f"cannot read {file}: it is nested too deeply") from None
    except ValueError as error:
        if file.endswith(".json"):
            raise InputError(f"cannot read {file}: not JSON: {error}") from None
        return None
    return [Document(value, file, 1)]


@dataclass(slots=True)
class _Open:
    """A list or mapping that is being read."""

    value: list[object] | dict[str, object]
    anchor: str | None
    line: int
    size: int = 1
    key: str | None = None
    merging: bool = False
    merged: list[dict[str, object]] = field(default_factory=list)


class _DocumentBuilder:
    """Values from the events of one file."""

    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self._file = file
        self._anchors: dict[str, tuple[object, int]] = {}
        self._lines: dict[int, int] = {}
        self._open: list[_Open] = []
        self._root: tuple[object, int] = (None, 0)

    def documents(self) -> Iterator[Document]:
        line = 1
        for event in self._events():
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors, self._lines, self._root = {}, {}, (None, 0)
                line = 0
            elif isinstance(event, yaml.DocumentEndEvent):
                yield Document(self._root[0], self._file, line or 1, self._lines)
            elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
                mark: Any = event.start_mark
                here = mark.line + 1
                line = line or here
                self._take(event, here)

    def _events(self) -> Iterator[yaml.Event]:
        try:
            yield from yaml.parse(self._text, Loader=_LOADER)
        except yaml.MarkedYAMLError as error:
            mark: Any = error.problem_mark or error.context_mark
            self._fail(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}")
        except yaml.YAMLError as error:
            at = getattr(error, "position", 0)
            line = self._text.count("\n", 0, at) + 1
            self._fail(line, f"not YAML: {str(error).splitlines()[0]}")

    def _take(self, event: yaml.Event, line: int) -> None:
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, line)
            self._add(value, 1, event.anchor, line, text=event.value, plain=not event.style)
        elif isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            if name not in self._anchors:
                self._fail(line, f"the alias {_short('*' + name)} names nothing that is complete")
            value, size = self._anchors[name]
            self._add(value, size, None, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()
        else:
            assert isinstance(event, yaml.CollectionStartEvent)
            if len(self._open) >= DEPTH_LIMIT:
                self._fail(line, f"nested deeper than {DEPTH_LIMIT} levels")
            is_list = isinstance(event, yaml.SequenceStartEvent)
            self._open.append(_Open([] if is_list else {}, event.anchor, line))

    def _add(
        self, value: object, size: int, anchor: str | None, line: int, text: str = "", plain: bool = False
    ) -> None:
        """Add a complete value to the mapping or list that contains it."""
        if anchor:
            self._anchors[anchor] = (value, size)
        if not self._open:
            self._root = (value, size)
            return
        top = self._open[-1]
        top.size += size
        if top.size > VALUE_LIMIT:
            self._fail(line, f"more than {VALUE_LIMIT} values, those behind aliases counted each time")
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.merging:
            top.merging = False
            self._merge(top, value, line)
        elif top.key is not None:
            top.value[top.key] = value
            top.key = None
        elif plain and text == _MERGE:
            top.merging = True
        else:
            top.key = self._key(top.value, value, text, line)

    def _key(self, members: dict[str, object], value: object, text: str, line: int) -> str:
        if isinstance(value, list | dict):
            self._fail(line, "a key must be a text")
        key = value if isinstance(value, str) else text or str(value)
        if key in members:
            self._fail(line, f"the key {_short(key)} is there twice")
        return key

    def _merge(self, top: _Open, value: object, line: int) -> None:
        for source in value if isinstance(value, list) else [value]:
            if not isinstance(source, dict):
                self._fail(line, "<< merges mappings only")
            top.merged.append(source)

    def _close(self) -> None:
        closed = self._open.pop()
        if isinstance(closed.value, dict):
            self._lines[id(closed.value)] = closed.line
            # A key of the mapping itself takes precedence, then the first source.
            for source in closed.merged:
                for key, inner in source.items():
                    closed.value.setdefault(key, inner)
        self._add(closed.value, closed.size, closed.anchor, closed.line)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> object:
        text: str = event.value
        tag = event.tag
        if tag is None or tag == "!":
            if not event.implicit[0]:
                return text
            # PyYAML has no types for this call.
            tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        kind = str(tag).removeprefix("tag:yaml.org,2002:")
        if kind in ("str", "timestamp", "merge", "value"):
            return text
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if kind in ("int", "float"):
            return _number(text, kind)
        return self._fail(line, f"the tag {_short(str(event.tag))} is not one of plain YAML")

    def _fail(self, line: int, cause: str) -> Never:
        raise InputError(f"cannot read {self._file}, line {line}: {cause}")


def _number(text: str, kind: str) -> object:
    if ":" in text:
        return text
    try:
        body = text.replace("_", "").lower()
        if kind == "float":
            return float(body.replace(".inf", "inf").replace(".nan", "nan"))
        sign, digits = (body[0], body[1:]) if body[:1] in "+-" else ("", body)
        octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
        return int(sign + digits, 8) if octal else int(sign + digits, 0)
    except ValueError:
        return text


def _short(text: str) -> str:
    """Quote a text of a user, truncated if it is long."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


STDIN = "-"
_ENDINGS = (".yaml", ".yml", ".json")


def name_of(path: Path | str) -> str:
    """Return what a file is called in messages."""
    return "standard input" if str(path) == STDIN else str(path)


def found_files(paths: Iterable[str]) -> list[Path]:
    """Return the named files, and of named directories all YAML and JSON files, sorted.

    Raises:
        InputError: A path does not exist, or a directory holds no such file.
        PermissionDeniedError: A directory may not be searched.
    """
    files: list[Path] = []
    for path_text in paths:
        path = Path(path_text)
        if path_text != STDIN and _is_directory(path):
            inside = _inside(path)
            if not inside:
                raise InputError(
                    f"cannot read pods from {path_text}: no file in it ends in {', '.join(_ENDINGS)}"
                )
            files += inside
        else:
            files.append(path)
    return files


def _inside(directory: Path) -> list[Path]:
    """Return the YAML and JSON files of a directory and of those in it."""

    def fail(error: OSError) -> Never:
        raise error

    try:
        found = [Path(place, name) for place, _, names in os.walk(directory, onerror=fail) for name in names]
        return sorted(path for path in found if path.suffix.lower() in _ENDINGS and path.is_file())
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read {error.filename}: {error.strerror}") from error
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def read_bytes(path: Path) -> bytes:
    """Read a file, or standard input for ``-``, up to the limit on its size.

    Raises:
        InputError: It cannot be read.
        PermissionDeniedError: It is not readable for this user.
    """
    try:
        if str(path) == STDIN:
            if sys.stdin is None:
                raise InputError("cannot read the manifests: standard input is closed")
            return sys.stdin.buffer.read(SIZE_LIMIT + 1)
        with open_file(path) as stream:
            return stream.read(SIZE_LIMIT + 1)
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
