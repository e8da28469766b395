"""Formats the configuration for users: as commented YAML, or as a mapping for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from proxy.config.kinds import float_text, quote
from proxy.config.schema import API_VERSION, KIND, Config, keys


def as_yaml(config: Config, comments: bool = True) -> str:
    """Write a configuration file that reads back as the same configuration."""
    lines = [f"apiVersion: {API_VERSION}", f"kind: {KIND}"]
    lines += _lines(config, "", comments)
    return "\n".join(lines) + "\n"


def as_mapping(config: Config) -> dict[str, object]:
    """Return the settings by key; sections are mappings, and values are written as in the file."""
    return _mapping(config)


def _mapping(part: Any) -> dict[str, object]:
    result: dict[str, object] = {}
    for item, key, setting in keys(part):
        value = getattr(part, item.name)
        if setting is None:
            result[key] = _mapping(value)
        else:
            text = "str" in setting.kind.tags or setting.kind.nested
            result[key] = setting.kind.show(value) if text else value
    return result


def _lines(part: Any, indent: str, comments: bool) -> Iterator[str]:
    for item, key, setting in keys(part):
        value = getattr(part, item.name)
        if comments:
            yield from [""] if not indent else []
            doc = item.metadata["doc"] if setting is None else setting.doc
            if setting is not None and setting.kind.shows_wants:
                doc += f" ({setting.kind.wants})"
            if setting is not None and not setting.live:
                doc += " Needs a restart."
            yield from textwrap.wrap(doc, 96, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if setting is None:
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ", comments)
        elif setting.kind.nested:
            yield from _block(setting.kind.show(value), f"{indent}{key}:", indent)
        else:
            text = setting.kind.show(value)
            yield f"{indent}{key}: {quote(text) if 'str' in setting.kind.tags else text}"


def _block(value: Any, head: str, indent: str) -> Iterator[str]:
    """Write a dictionary, or a list of them, below the line that opens it; an empty one on that line."""
    if isinstance(value, dict):
        yield head if value else f"{head} {{}}"
        for key, inner in value.items():
            yield from _block(inner, f"{indent}  {quote(key)}:", indent + "  ")
    elif isinstance(value, list):
        yield head if value else f"{head} []"
        for inner in value:
            head, *lines = _block(inner, "", indent + "  ")
            first, *rest = lines or [head]
            yield f"{indent}  - {first.lstrip()}"
            yield from rest
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, float):
        return float_text(value)
    return str(value).lower()
