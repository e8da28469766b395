"""The section of hooks."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from proxy.config import as_mapping, as_yaml, load, parse
from proxy.config.hooks import HooksConfig
from proxy.model.errors import ConfigError

FULL = """\
hooks:
  directory: /a/hooks.d/
  serverDirectory: ""
  timeout: 1500ms
  failurePolicy: Fail
  skipLabel: example.com/skip=yes
  ownedCPUs: true
  serve: unix:///run/hooks.sock
  settings:
    10-quota:
      timeout: 20ms
      failurePolicy: Ignore
      config:
        percent: 50
        share: 0.5
        on: true
        name: "1.10"
        mode: 0o10
        names: [a, 2]
        more: {x: {y: [{z: no}]}}
    koordlet: {}
"""


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    return str(caught.value).removeprefix("cannot use the configuration f.yaml: ")


def test_an_empty_file_means_the_defaults_of_hooks() -> None:
    hooks = parse("", "f").hooks
    assert hooks == HooksConfig()
    assert (hooks.enabled, hooks.timeout, hooks.policy, hooks.owned_cpus) == (True, 0.5, "Ignore", False)
    assert [hooks.directory, hooks.vendor_directory, hooks.server_directory] == [
        Path("/etc/topoproxy/hooks.d"),
        Path("/usr/lib/topoproxy/hooks.d"),
        Path("/etc/runtime/hookserver.d"),
    ]
    assert (hooks.skip_label, hooks.serve) == ("runtimeproxy.koordinator.sh/skip-hookserver=true", None)
    assert not hooks.settings


def test_all_keys_are_read() -> None:
    hooks = parse(FULL, "f").hooks
    assert (hooks.directory, hooks.server_directory) == (Path("/a/hooks.d"), None)
    assert (hooks.timeout, hooks.policy, hooks.owned_cpus) == (1.5, "Fail", True)
    assert (hooks.skip_label, hooks.serve) == ("example.com/skip=yes", Path("/run/hooks.sock"))
    quota, koordlet = hooks.settings["10-quota"], hooks.settings["koordlet"]
    assert (quota.timeout, quota.policy) == (0.02, "Ignore")
    assert dict(quota.config or {}) == {
        "percent": 50,
        "share": 0.5,
        "on": True,
        "name": "1.10",
        "mode": "0o10",
        "names": ("a", 2),
        "more": {"x": {"y": ({"z": False},)}},
    }
    assert (koordlet.timeout, koordlet.policy, koordlet.config) == (None, None, None)
    hash(hooks)


def test_the_section_is_printed_as_it_was_written() -> None:
    config = parse(FULL, "f")
    mapping = as_mapping(config)
    assert json.loads(json.dumps(mapping)) == mapping
    assert yaml.safe_load(as_yaml(config))["hooks"]["settings"] == {
        "10-quota": {
            "timeout": "20ms",
            "failurePolicy": "Ignore",
            "config": {
                "percent": 50,
                "share": 0.5,
                "on": True,
                "name": "1.10",
                "mode": "0o10",
                "names": ["a", 2],
                "more": {"x": {"y": [{"z": False}]}},
            },
        },
        "koordlet": {},
    }
    assert parse(as_yaml(config), "f") == config


@pytest.mark.parametrize(
    "text", ["1e5", "010", "1:30", "0x1f", "1_000", ".inf", "1.0e+999", "2026-01-01", "0b1"]
)
def test_numbers_that_people_do_not_write_are_texts(text: str) -> None:
    config = parse(f"hooks: {{settings: {{a: {{config: {{k: {text}}}}}}}}}", "f")
    assert dict(config.hooks.settings["a"].config or {}) == {"k": text}
    assert parse(as_yaml(config), "f") == config


SETTINGS = "hooks:\n  settings:\n    10-x:"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hooks: {timeout: 0ms}", "line 1: hooks.timeout: 0ms is outside 1ms to 1m40s"),
        ("hooks: {timeout: 101s}", "line 1: hooks.timeout: 101s is outside 1ms to 1m40s"),
        ("hooks: {failurePolicy: fail}", "'fail' is not Fail or Ignore; did you mean Fail?"),
        ("hooks: {directory: hooks.d}", "line 1: hooks.directory: 'hooks.d' is not an absolute path"),
        ("hooks: {directories: /x}", "line 1: hooks.directories: unknown key; did you mean hooks.directory?"),
        ("ownedCPUs: true", "line 1: ownedCPUs: unknown key; did you mean hooks.ownedCPUs?"),
        ("hooks: {skipLabel: skip}", "line 1: hooks.skipLabel: 'skip' is not a label such as example.com/ke"),
        ("hooks: {serve: /run/topoproxy/cri.sock}", "hooks.serve: /run/topoproxy/cri.sock is in use for oth"),
        ("hooks: {serve: /run/topoproxy/admin.sock}", "hooks.serve: /run/topoproxy/admin.sock is in use for"),
        ("hooks: {settings: [10-x]}", "line 1: hooks.settings: must be names of hooks with keys, not a list"),
        ("hooks: {settings: {10-x.py: {}}}", "hooks.settings.10-x.py: a hook's name is that of its file, wi"),
        (f"{SETTINGS} 5", "line 3: hooks.settings.10-x: must be the keys timeout, failurePolicy, config, "),
        (f"{SETTINGS}\n      timeout: 2m", "line 4: hooks.settings.10-x.timeout: 2m is outside 1ms to 1m40s"),
        (f"{SETTINGS} {{failurePolicy: Fails}}", "hooks.settings.10-x.failurePolicy: 'Fails' is not Fail or"),
        (f"{SETTINGS} {{percent: 1}}", "hooks.settings.10-x.percent: unknown key; the hook's own keys"),
        (f"{SETTINGS} {{timeOut: 1}}", "hooks.settings.10-x.timeOut: unknown key; did you mean timeout?"),
        (f"{SETTINGS} {{config: yes}}", "line 3: hooks.settings.10-x.config: must be keys with values, not"),
        (f"{SETTINGS}\n      config:\n        a: [1, ]\n        b:", "line 6: hooks.settings.10-x.config.b:"),
        (f"{SETTINGS} {{config: {{a: 1, a: 2}}}}", "hooks.settings.10-x.config.a: given twice"),
        (f"{SETTINGS} {{config: &c {{a: *c}}}}", ".a.a: is nested too deep"),
        (f"{SETTINGS} {{config: {{a: {list(range(2000))}}}}}", ".a[998]: has more than 1000 values in it"),
    ],
)  # fmt: skip
def test_every_fault_names_its_key(text: str, message: str) -> None:
    assert message in refused(text)


def test_aliases_that_multiply_cost_nothing() -> None:
    bomb = "".join(f", &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]" for n in range(1, 9))
    many = "".join(f"    h{n}: {{config: *c}}\n" for n in range(2000))
    began = time.monotonic()
    refused(f"hooks:\n  settings:\n    a: {{config: {{x: [&b0 [x]{bomb}]}}}}\n")
    message = refused(f"hooks:\n  settings:\n    a: {{config: &c {{x: {list(range(900))}}}}}\n{many}")
    assert "there are more than 1000 hooks" in message
    assert time.monotonic() - began < 60


def test_former_keys_are_read_and_reported() -> None:
    config = parse("hooks: {folder: /a, vendorFolder: /b, serverFolder: ''}", "a file")
    hooks = config.hooks
    assert (str(hooks.directory), str(hooks.vendor_directory), hooks.server_directory) == ("/a", "/b", None)
    assert config.former_keys == (
        "hooks.folder is now hooks.directory: rename the key",
        "hooks.vendorFolder is now hooks.vendorDirectory: rename the key",
        "hooks.serverFolder is now hooks.serverDirectory: rename the key",
    )
    assert parse("hooks: {directory: /a}", "a file").former_keys == ()


def test_a_former_key_and_its_new_name_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"line 3: hooks.directory: given twice, first on line 2"):
        parse("hooks:\n  folder: /a\n  directory: /b\n", "a file")


@pytest.mark.parametrize(
    "odd", ["hooks: [folder]", "hooks: {[folder]: 1}", "[hooks]: {folder: /a}", "folder: /a"]
)
def test_only_a_key_of_the_section_is_a_former_key(odd: str) -> None:
    with pytest.raises(ConfigError):
        parse(odd, "a file")


def test_a_drop_in_replaces_a_value_under_its_former_key(tmp_path: Path) -> None:
    file, drop_in = tmp_path / "config.yaml", tmp_path / "config.d/50.yaml"
    drop_in.parent.mkdir()
    file.write_text("hooks: {folder: /a, vendorDirectory: /v}")
    drop_in.write_text("hooks: {directory: /b, vendorFolder: /w}")
    config = load(file)
    assert (str(config.hooks.directory), str(config.hooks.vendor_directory)) == ("/b", "/w")
    assert len(config.former_keys) == 2
