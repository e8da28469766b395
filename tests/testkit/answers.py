"""The JSON Schemas of answers, and the check of an answer against the one that it names.

Published schemas allow further keys, so that a newer daemon does not break a reader. Tests close them: a key
that no schema describes is an error.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).parents[2] / "proxy/schemas"


@functools.cache
def schemas() -> dict[str, dict[str, Any]]:
    """Return all schemas by the id of the answers that they describe."""
    files = sorted(SCHEMAS.rglob("*.json"))
    return {str(path.relative_to(SCHEMAS).with_suffix("")): json.loads(path.read_text()) for path in files}


def parts(schema: object, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over a schema and all schemas in it, each with its path."""
    if not isinstance(schema, dict):
        return
    yield where, schema
    for key in ("properties", "$defs"):
        for name, part in schema.get(key, {}).items():
            yield from parts(part, f"{where}/{key}/{name}")
    for key in ("items", "additionalProperties"):
        yield from parts(schema.get(key), f"{where}/{key}")
    for key in ("prefixItems", "oneOf"):
        for number, part in enumerate(schema.get(key, [])):
            yield from parts(part, f"{where}/{key}/{number}")


@functools.cache
def _closed(name: str) -> jsonschema.protocols.Validator:
    schema = copy.deepcopy(schemas()[name])
    for _, part in parts(schema):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return jsonschema.Draft202012Validator(schema)


def check_answer(answer: Any) -> str:
    """Validate an answer against the schema that it names, and return the schema's id.

    Raises:
        AssertionError: It names none, or has a key that is missing in the schema or of another type.
    """
    assert isinstance(answer, dict), f"an answer is an object, not {type(answer).__name__}"
    name = answer.get("schema")
    assert name in schemas(), f"proxy/schemas has no {name}.json"
    found = [f"{error.json_path}: {error.message[:300]}" for error in _closed(name).iter_errors(answer)]
    assert not found, f"{name}: " + "\n".join(found)
    return str(name)
