"""Redaction by an allow-list: unknown text is replaced.

Theory. The texts of topoproxy (log messages, reasons, faults) consist of words that its published source
has, of numbers, and of names: pods, containers, paths of the configuration. These are kept. Everything else
came from outside: a value of an annotation or of an environment, a token, a message of the runtime, what a
hook has written. It is replaced by ``<redacted:N>``. The same text has the same N in one bundle, so that
two places can be compared. N is a number in order of appearance and says nothing about the text.

Stricter rules for what is typically from outside, even if its words are known:

* a text in quotes in a message: it is kept only if it is one known name, word or number;
* ``KEY=VALUE`` with a key that records of the log do not have, such as a variable of an environment;
* a URL with a user in it, and what follows ``Bearer`` or ``Basic``;
* values of the keys in ``SECTIONS``, and of keys that neither the source nor a JSON schema has: they are
  replaced as a whole. In records of the log and in ``keys`` of problems, so are those of all keys that are
  not in ``LOG_KEYS``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from proxy.telemetry import metrics
from proxy.telemetry.exposition import names

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = frozenset(
    {"annotations", "args", "command", "env", "envs", "environment", "labels", "settings", "values"}
)
"""Keys whose values come from users."""
OWN_SECTIONS = frozenset({("", "settings"), ("nodePolicy", "values")})
"""Such keys whose values are topoproxy's own, each after the key that it is below."""
LOG_KEYS = frozenset(
    (
        "advice", "author", "availableMiB", "be_may_use", "before", "by", "came", "changed",
        "check", "code", "container", "containerID", "containers", "count", "cpus", "device",
        "done", "err", "error", "found", "hook", "keys", "kind", "le", "left_out", "limit",
        "listen", "logger", "lost", "mems", "method", "mode", "node", "now", "object", "observedPods", "of",
        "offline", "other", "owner", "owners", "path", "peer", "pid", "pod", "pods", "point",
        "pool", "probably", "processes", "promisedMiB", "putBack", "quiet", "reason", "record",
        "repeated", "resource", "result", "rule", "runtime", "sandboxID", "seconds", "sharedPool", "signal",
        "source", "stage", "state", "step", "times", "unit", "verdict", "version", "went", "what",
        "worker", "workers",
    )
)  # fmt: skip
"""Keys of the log and labels of metrics whose values are checked word by word.

The values of all others are replaced: those of ``field``, ``fields``, ``points``, ``trace``, ``value`` and
``values`` come from hooks, their servers and objects of the cluster.
"""
RECORD_KEYS = frozenset({"caller", "msg", "severity", "stacktrace", "ts", "v"})
"""Keys that each record of the log has in the format json (``proxy.logs``)."""
PROBLEM_FIELDS = "keys"
"""The key of a problem in the status that holds its fields, as a record of the log has them."""
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(
    r"[-+]?\d{1,16}(?:\.\d{1,9})?(?:[eE][-+]?\d{1,3})?(?:%|[kKMGTPE]i?B?|B|[mnuµ]s?|s|min|h|d|[kMG]?Hz)?"
)
_VERSION = re.compile(
    r"v\d{1,3}(?:(?:alpha|beta)\d{1,2})?"
    r"|v?\d{1,4}(?:\.\d{1,4}){1,2}(?:[-+~.]?(?:alpha|beta|dev|post|rc)\.?\d{1,3})?"
    r"(?:[-+~](?:\d{1,3}|"
    r"(?:(?:amd|aws|azure|cloud|deb|ds|eks|el|fc|gcp|generic|gke|k3s|rke2r|ubuntu|u)\d{0,3}){1,2})){0,5}"
)
_ENDINGS = ("", "_bucket", "_count", "_sum")
"""What the exposition format adds to the names of histograms."""
_KLOG_DAY = re.compile(r"[IWEF][01]\d[0-3]\d")
_CPUS = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?|\d\d:\d\d:\d\d(?:[.,]\d+)?"
)
_SOURCE_LINE = re.compile(r"[a-z_]+\.py:\d+")
_HARMLESS = _NUMBER, _CPUS, _TIME, _SOURCE_LINE, _VERSION, _KLOG_DAY
_PIECES = re.compile(
    r"""(?P<credential>(?i:\b(?:bearer|basic)[ \t]+)(?P<token>[^\s"',;]+))"""
    r"""|(?P<pair>(?P<dashes>-{0,2})(?P<key>[A-Za-z_][\w.-]*)=(?P<value>"(?:\\.|[^"\\])*"|'[^']*'|[^\s,;"']*))"""
    r"""|(?P<quoted>"(?:\\.|[^"\\])*"|(?<!\w)'(?:\\.|[^'\\])*'|`[^`]*`)"""
    r"""|(?P<chunk>[^\s"',;()\[\]{}<>=`|]+)"""
)
_KLOG = re.compile(r"""(?P<head>[IWEF]\d{4} \S+ +\d+ \S+\] )"(?P<message>(?:\\.|[^"\\])*)\"""")
"""The beginning of a record in the format klog; its message is quoted (``proxy.logs``)."""
_ESCAPED = re.compile(r"""\\(["\\])""")
_PUNCTUATION = ".:!?"
_SHORTEST_WORD = 3
"""Shorter words between digits or symbols may be parts of a secret: all single letters are in the source."""
_MOST_SYMBOLS = 3
"""More symbols without a letter or digit may be a secret; up to this many are signs such as ``#``."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,251}[a-z0-9])?")
"""DNS subdomains, uids and ids."""


@functools.cache
def vocabulary() -> frozenset[str]:
    """Return the words that the source of topoproxy has, in lower case."""
    words: set[str] = set()
    for file in sorted(ROOT.rglob("*.py")):
        if "api" in file.relative_to(ROOT).parts[:1]:
            continue  # generated: the CRI's messages, not our words
        words.update(word.lower() for word in _WORD.findall(file.read_text(encoding="utf-8")))
    return frozenset(words)


@functools.cache
def identifiers() -> frozenset[str]:
    """Return the keys of topoproxy's JSON schemas and the names of its metrics."""
    found: set[str] = set()
    for file in (ROOT / "schemas").rglob("*.json"):
        found.update(_properties(json.loads(file.read_text(encoding="utf-8"))))
    for name, _ in chain.from_iterable(map(names, metrics.DAEMON_METRICS)):
        found.update(f"{name}{ending}" for ending in _ENDINGS)
    return frozenset(found)


def _properties(schema: object) -> Iterator[str]:
    """Return the names of all properties in a schema."""
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            yield from properties
    parts = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    for part in parts:
        yield from _properties(part)


class Redactor:
    """Replaces unknown text; see the module.

    Attributes:
        replaced: How many texts were replaced.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Begin with nothing replaced.

        Args:
            names: Texts that are kept as they are, such as paths of the configuration.
        """
        self.replaced = 0
        self._words = vocabulary()
        self._identifiers = identifiers()
        self._names = {name for name in names if name}
        self._marks: dict[str, str] = {}

    def add_names(self, names: Iterable[object]) -> None:
        """Keep names of pods and containers from now on: DNS names, uids and ids, and paths made of them."""
        for name in names:
            if isinstance(name, str) and all(_NAME.fullmatch(part) for part in name.split("/")):
                self._names.add(name)
                self._names.update(name.split("/"))

    def redact_value(self, value: object, key: str = "", above: str | None = None) -> object:
        """Return a value of a JSON document with unknown text replaced.

        Args:
            value: Texts, numbers, lists and objects.
            key: The key that it belongs to.
            above: The key that this one is below; None for the document.
        """
        if isinstance(value, bool | int | float) or value is None or value in ("", [], {}):
            return value
        if key in SECTIONS and (above, key) not in OWN_SECTIONS:
            return self._replace(str(value))
        if isinstance(value, Mapping):
            if key == PROBLEM_FIELDS:
                return self.redact_fields(value)
            return {self._key(str(name)): self._of_key(str(name), part, key) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_value(part, f"{key}[]") for part in value]
        return self.redact_text(str(value))

    def redact_fields(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Return the fields of a record of the log in the format json, or of a problem."""
        known = LOG_KEYS | RECORD_KEYS
        return {
            self._key(name): self.redact_value(field) if name in known else self._of_user(field)
            for name, field in fields.items()
        }

    def redact_text(self, text: str) -> str:
        """Return a text with unknown words replaced; line breaks stay."""
        return _PIECES.sub(self._piece, text)

    def redact_record(self, line: str) -> str:
        """Return a record of the log in the format klog or text with unknown text replaced.

        The quotes around the message of klog do not make it a quoted text.
        """
        match = _KLOG.match(line)
        if match is None:
            return self.redact_text(line)
        message = self.redact_text(_ESCAPED.sub(r"\1", match["message"]))
        quoted = message.replace("\\", "\\\\").replace('"', '\\"')
        return f'{self.redact_text(match["head"])}"{quoted}"{self.redact_text(line[match.end() :])}'

    def _of_key(self, key: str, value: object, above: str) -> object:
        if self._is_known(key):
            return self.redact_value(value, key, above)
        return self._of_user(value)

    def _of_user(self, value: object) -> object:
        return value if isinstance(value, bool | int | float) or value is None else self._replace(str(value))

    def _key(self, key: str) -> str:
        return key if self._is_known(key) else self._replace(key)

    def _piece(self, match: re.Match[str]) -> str:
        if match["credential"] is not None:
            return match["credential"].removesuffix(match["token"]) + self._replace(match["token"])
        if match["chunk"] is not None:
            return self._chunk(match["chunk"])
        if match["quoted"] is not None:
            return self._quoted(match["quoted"])
        key, value = match["key"], match["value"]
        if key not in LOG_KEYS:
            kept = key if self._is_known(key) else self._replace(key)
            return f"{match['dashes']}{kept}={self._replace(value) if value else ''}"
        if value[:1] == '"':
            return f'{match["dashes"]}{key}="{self.redact_text(value[1:-1])}"'
        return f"{match['dashes']}{key}={self.redact_text(value)}"

    def _quoted(self, text: str) -> str:
        inner = text[1:-1]
        known = not inner or (len(inner.split()) == 1 and self._is_known(inner) and not inner.isdigit())
        return text if known else f"{text[0]}{self._replace(inner)}{text[-1]}"

    def _chunk(self, chunk: str) -> str:
        bare = chunk.rstrip(_PUNCTUATION)
        return chunk if not bare or self._is_known(bare) else self._replace(bare) + chunk[len(bare) :]

    def _is_known(self, chunk: str) -> bool:
        if chunk in self._identifiers or chunk in self._names or chunk.removeprefix("unix://") in self._names:
            return True
        if any(pattern.fullmatch(chunk) for pattern in _HARMLESS):
            return True
        if len(chunk) <= _MOST_SYMBOLS and not any(map(str.isalnum, chunk)):
            return True
        if "://" in chunk and "@" in chunk:
            return False
        if "/" in chunk:
            return all(not part or self._is_known(part) for part in chunk.removeprefix("unix:").split("/"))
        return self._is_words_of_source(chunk)

    def _is_words_of_source(self, chunk: str) -> bool:
        """Return whether a chunk consists of words of the source, with short numbers between them."""
        words = _WORD.findall(chunk)
        if not words or sum(character.isdigit() for character in chunk) > 4:
            return False
        shortest = _SHORTEST_WORD if words != [chunk] else 1
        known = all(len(word) >= shortest and word.lower() in self._words for word in words)
        return known and chunk.isascii()

    def _replace(self, text: str) -> str:
        self.replaced += 1
        return self._marks.setdefault(text, f"<redacted:{len(self._marks) + 1}>")
