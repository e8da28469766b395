"""The types in the output of ``topoproxy upgrade --describe``: a file may come from another version."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct


class _Configuration(Struct):
    defaults: dict[str, str] = {}
    effective: dict[str, str] = {}
    options: dict[str, str] = {}


class _Ledger(Struct):
    writes: int | None = None
    reads: list[int] = []


class _Description(Struct):
    version: str
    configuration: _Configuration | None = None
    ledger: _Ledger | None = None
    hooks: list[int | str] = []
    answers: list[str] = []
    metrics: list[str] = []


def description_fault(description: Mapping[str, object]) -> str:
    """Return which part of a description has the wrong type; empty if none has.

    Args:
        description: Decoded JSON.
    """
    try:
        msgspec.convert(description, _Description)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
