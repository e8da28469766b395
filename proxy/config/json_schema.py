"""The JSON Schema of the configuration file, from the dataclasses that read it (``--schema``)."""

from __future__ import annotations

from typing import Any

from proxy.config.schema import API_VERSION, KIND, Config
from proxy.config.setting import Setting, keys

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def configuration_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a configuration file and of a drop-in.

    It describes single values. What check-config checks beyond that (ranges of durations, settings that
    contradict each other, the machine) it does not.
    """
    header = {
        "apiVersion": {"description": "The version of this form.", "const": API_VERSION},
        "kind": {"description": "The kind of the file.", "const": KIND},
    }
    whole = _section(Config())
    return {
        "$schema": _DIALECT,
        "$id": f"urn:topoproxy:configuration:{API_VERSION.partition('/')[2]}",
        "title": "The configuration of topoproxy",
        "type": ["object", "null"],
        "properties": {**header, **whole["properties"]},
        "additionalProperties": False,
    }


def _section(part: Any) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for item, key, setting in keys(part):
        value = getattr(part, item.name)
        if setting is None:
            properties[key] = {"description": item.metadata["doc"], **_section(value)}
        else:
            properties[key] = _key(setting, value)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _key(setting: Setting, default: object) -> dict[str, Any]:
    shown = setting.kind.show(default)
    if "str" not in setting.kind.tags and not setting.kind.nested:
        shown = default
    return {
        "description": f"{setting.doc} {changes_words(setting)}",
        **setting.kind.schema,
        "default": shown,
        "x-live": setting.live,
    }


def changes_words(setting: Setting) -> str:
    """Return when a new value takes effect, as a sentence."""
    if not setting.live:
        return "Needs a restart."
    if setting.restart_for:
        words = " or ".join(sorted(setting.kind.show(value) for value in setting.restart_for))
        return f"Takes effect at a reload; from and to {words} it needs a restart."
    return "Takes effect at a reload."
