"""Every JSON answer names a schema, and every schema describes the real answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from proxy.model import schema_ids
from tests.answers.conftest import Answers
from tests.testkit.answers import SCHEMAS, check_answer, parts, schemas
from tests.testkit.commands import commands

PAGE = (Path(__file__).parents[2] / "docs/json.md").read_text()
IDS = sorted(value for name, value in vars(schema_ids).items() if name.isupper())
ROWS = [line.split("|")[1:4] for line in PAGE.splitlines() if re.search(r"/[0-9]+` \|$", line)]
"""Commands, pages of the admin socket and the id of each row of the table."""
TEXT_PAGES = {"/healthz", "/livez", "/metrics", "/readyz", "/successor"}
TEXT_ACTIONS = {"/successor"}
KUBERNETES_PAGES = {"/report"}
ANY_VALUE = {"/properties/problems/items/properties/keys/additionalProperties"}
"""Values of a log record, whose type depends on the name."""


def test_the_ids_are_those_of_the_files_and_of_the_docs() -> None:
    assert sorted(schemas()) == IDS == sorted(row[2].strip(" `") for row in ROWS)
    assert len(set(IDS)) == len(IDS)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*/[0-9]+", name) for name in IDS)


@pytest.mark.parametrize("name", sorted(schemas()))
def test_a_schema_is_one_and_describes_the_answers_that_name_it(name: str) -> None:
    schema = schemas()[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"urn:topoproxy:{name.replace('/', ':')}"
    consts = {part["const"] for where, part in parts(schema) if where.endswith("/properties/schema")}
    assert consts == {name}


@pytest.mark.parametrize("name", sorted(schemas()))
def test_a_key_has_one_type(name: str) -> None:
    for where, part in parts(schemas()[name]):
        if where in ANY_VALUE or "$ref" in part:
            continue
        kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
        assert len([kind for kind in kinds if kind != "null"]) == 1, where
        assert ("items" in part) == ("array" in kinds), where
        reported = part.keys() & {"properties", "additionalProperties", "oneOf"}
        assert ("object" in kinds) == bool(reported), where
        assert set(part.get("required", ())) <= part.get("properties", {}).keys(), where


def test_parts_that_schemas_share_are_the_same() -> None:
    found: dict[str, Any] = {}
    for name, schema in schemas().items():
        used = {ref for _, part in parts(schema) if (ref := part.get("$ref"))}
        assert used == {f"#/$defs/{part}" for part in schema.get("$defs", {})}, name
        for part, content in schema.get("$defs", {}).items():
            assert found.setdefault(part, content) == content, (name, part)


def test_every_answer_is_as_its_schema_says(answers: Answers) -> None:
    wrong = []
    for source, answer in answers.each:
        try:
            check_answer(answer)
        except AssertionError as error:
            wrong.append(f"{source}: {error}")
    assert not wrong, "\n".join(wrong[:20])
    assert {answer["schema"] for _, answer in answers.each} == set(IDS)


def test_an_invalid_answer_is_reported(answers: Answers) -> None:
    page = next(answer for _, answer in answers.each if answer["schema"] == schema_ids.STATUS)
    for wrong in ({**page, "pid": "1"}, {**page, "more": 1}, {k: v for k, v in page.items() if k != "mode"}):
        with pytest.raises(AssertionError):
            check_answer(wrong)


def test_optional_keys_are_there_in_some_answer(answers: Answers) -> None:
    """A schema has no unused keys: each key of the status page is in some answer."""
    pages = [answer for _, answer in answers.each if answer["schema"] == schema_ids.STATUS]
    described = schemas()[schema_ids.STATUS]["properties"].keys()
    assert described - {key for page in pages for key in page} == set()


def test_every_command_with_json_is_in_the_table() -> None:
    named = {word for row in ROWS for word in re.findall(r"`([^`]+)`", row[0])}
    with_json = {
        name for name, command in commands().items() if any("--json" in p.opts for p in command.params)
    }
    assert {word.partition(" --")[0] for word in named} == with_json


def test_every_page_of_the_admin_socket_is_in_the_table(answers: Answers) -> None:
    named = {word.partition("?")[0] for row in ROWS for word in re.findall(r"`((?:GET|POST) [^`]+)`", row[1])}
    gets = answers.routes - TEXT_PAGES - KUBERNETES_PAGES
    posts = answers.actions - TEXT_ACTIONS
    assert named == {f"GET {path}" for path in gets} | {f"POST {path}" for path in posts}


def test_the_directory_has_nothing_else() -> None:
    assert {path.suffix for path in SCHEMAS.rglob("*") if path.is_file()} == {".json"}
