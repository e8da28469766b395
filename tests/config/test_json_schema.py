"""The JSON Schema of the configuration: it accepts and rejects the same as check-config."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings

from proxy.cli.main import cli
from proxy.config import Config, as_yaml, parse
from proxy.config.reference import configuration_schema
from proxy.config.schema import keys
from proxy.model.errors import ConfigError
from tests.config.test_roundtrip import parts

ROOT = Path(__file__).parents[2]
SCHEMA = configuration_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


class Yaml12(yaml.SafeLoader):
    """Reads plain words as in YAML 1.2, where ``off``, ``010`` and dates are texts."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


Yaml12.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|false)$"), list("tf"))
Yaml12.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("(null|~|)$"), ["n", "~", ""])
Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile("[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")
)
Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?$"), list("-+0123456789")
)


def accepts(text: str) -> bool:
    return bool(VALIDATOR.is_valid(yaml.load(text, Yaml12)))


def is_good(text: str) -> bool:
    try:
        parse(text, "f")
    except ConfigError:
        return False
    return True


def all_keys(part: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for item, key, setting in keys(part or Config()):
        if setting is None:
            yield from all_keys(getattr(Config(), item.name), f"{key}.")
        else:
            yield prefix + key, setting


def line(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    return f"{section}: {{{name}: {value}}}\n" if section else f"{key}: {value}\n"


def examples() -> Iterator[str]:
    """Yield the configurations in the documentation: indented or fenced blocks that begin with a key."""
    first = {key for _, key, _ in keys(Config())} | {"apiVersion"}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in re.findall(
            r"(?:^    .*\n|^    \n|^\n)+|```yaml\n(?:.*\n)*?```", page.read_text(), re.MULTILINE
        ):
            text = textwrap.dedent(block.replace("```yaml", "").replace("```", "")).strip("\n")
            if text.partition(":")[0] in first:
                yield text


def test_the_schema_is_valid_and_the_command_prints_it() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    done = CliRunner().invoke(cli, ["check-config", "--schema"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, json.loads(json.dumps(SCHEMA)))


def test_each_key_is_described_and_has_its_default() -> None:
    for key, setting in all_keys():
        part: Any = SCHEMA
        for name in key.split("."):
            part = part["properties"][name]
        assert part.keys() & {"type", "enum", "anyOf"}, key
        assert part["x-live"] is setting.live
        assert VALIDATOR.evolve(schema=part).is_valid(part["default"]), key


def test_the_defaults_are_accepted() -> None:
    assert accepts(as_yaml(Config()))
    assert accepts("")
    assert accepts(as_yaml(Config(), comments=False).replace("topoproxy/v1", '"topoproxy/v1"'))


def test_the_examples_of_the_documentation_are_accepted() -> None:
    found = list(examples())
    assert len(found) >= 10
    good = [text for text in found if is_good(text)]
    assert len(good) > len(found) / 2
    assert [text for text in good if not accepts(text)] == []


@settings(max_examples=60, deadline=None)
@given(parts(Config()))
def test_any_written_configuration_is_accepted(config: Config) -> None:
    with mock.patch("proxy.config.load.check", return_value=[]):
        text = as_yaml(config, comments=False)
        assert parse(text, "f") == config
    VALIDATOR.validate(yaml.load(text, Yaml12))


VALUES = (
    *(
        "enforce",
        "none",
        "None",
        "Static",
        "true",
        "false",
        "0",
        "1",
        "7",
        "8",
        "100",
        "-1",
        "1.5",
        "65536",
        "99999999",
    ),
    *(
        '""',
        '" "',
        "10s",
        "1m30s",
        "500ms",
        "10",
        '"0"',
        "0s",
        "24h",
        "soon",
        "/a",
        "a/b",
        "unix:///a",
        "unix:a",
        "/a/",
    ),
    *(
        "0-3,8",
        "0-",
        "3-1x",
        "1Gi",
        "500m",
        "-2",
        "1e3",
        "2KiB",
        "auto",
        "https://127.0.0.1:10250",
        "http://x",
        "ftp://x:1",
    ),
    *(
        "debug",
        "json",
        "loud",
        "a=b",
        "a",
        "{}",
        "[]",
        "[a, b]",
        "[A_B]",
        "[1, 2]",
        "[-1]",
        "{memory.available: 1Gi}",
    ),
    *("{full-pcpus-only: true}", "{full-pcpus-only: maybe}", "{prefer-closest-numa-nodes: true}", "{a: b}"),
    *(
        "{max-allowable-numa-nodes: 16}",
        "{max-allowable-numa-nodes: 2}",
        "[{numaNode: 0, limits: {memory: 1Gi}}]",
    ),
    *(
        "[{numaNode: 0}]",
        "[{numaNode: -1, limits: {memory: 1}}]",
        "[{numaNode: 0, limits: {cpu: 1}}]",
        "{x: {timeout: 1s}}",
    ),
    *(
        "{x: {timeout: 1}}",
        "{x: {config: {a: [1]}}}",
        "{x.py: {}}",
        "{x: {failurePolicy: Fail}}",
        "{x: {other: 1}}",
        "null",
    ),
)


@pytest.mark.parametrize("key", [key for key, _ in all_keys()])
def test_the_schema_rejects_no_valid_configuration(key: str) -> None:
    """If the schema were stricter, an editor would mark a working configuration as invalid."""
    with mock.patch("proxy.config.load.check", return_value=[]):
        wrong = [value for value in VALUES if is_good(line(key, value)) and not accepts(line(key, value))]
    assert wrong == []


CANNOT_SAY = ("24h", "0s", "10s", "1m30s", "500ms", "500m")
"""Durations that may be out of their bounds."""


@pytest.mark.parametrize("key", [key for key, _ in all_keys()])
def test_the_schema_rejects_invalid_configurations(key: str) -> None:
    with mock.patch("proxy.config.load.check", return_value=[]):
        missed = [value for value in VALUES if not is_good(line(key, value)) and accepts(line(key, value))]
    if key == "beSuppress.mode":
        missed.remove("false")  # the value that readers of YAML 1.1 give for "off"
    assert [value for value in missed if value not in CANNOT_SAY] == []


@pytest.mark.parametrize(
    "text",
    [
        "moed: observe\n",
        "log: {colour: red}\n",
        "apiVersion: topoproxy/v2\n",
        "kind: Other\n",
        "- a\n",
        "log: debug\n",
        "hooks: {settings: {10-a: {timeout: 1s, confg: {}}}}\n",
    ],
)
def test_the_schema_rejects_what_check_config_rejects(text: str) -> None:
    assert not is_good(text)
    assert not accepts(text)
