"""The printed configuration is a configuration."""

from __future__ import annotations

import json

import yaml

from proxy.config import Config, as_mapping, as_yaml, parse
from proxy.config.schema import LogConfig, SettleConfig, keys


def test_printed_defaults_read_back_and_every_key_is_explained() -> None:
    text = as_yaml(Config())
    assert parse(text, "f") == Config()
    lines = text.splitlines()
    for part in (Config(), SettleConfig(), LogConfig()):
        for _, key, setting in keys(part):
            at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
            assert lines[at - 1].strip().startswith("# "), key
            assert setting is None or setting.doc.endswith(".")
    assert max(map(len, lines)) <= 100


def test_without_comments_only_settings_are_left() -> None:
    text = as_yaml(Config(), comments=False)
    assert "#" not in text
    assert "\n\n" not in text
    assert parse(text, "f") == Config()


def test_the_mapping_says_what_the_file_says() -> None:
    config = parse("reservedSystemCPUs: 0-1\nlisten: /a\nsettle: {perSecond: 3}\nstateDir: '/a b'", "f")
    mapping = as_mapping(config)
    assert json.loads(json.dumps(mapping)) == mapping
    assert mapping == {
        k: v for k, v in yaml.safe_load(as_yaml(config)).items() if k not in {"kind", "apiVersion"}
    }
    assert mapping["stateDir"] == "/a b"
