"""The printed configuration is a valid configuration."""

from __future__ import annotations

import json

import yaml

from proxy.config import Config, as_mapping, as_yaml, parse
from proxy.config.schema import KubeletConfig, LogConfig, ReserveConfig, SettleConfig, keys


def test_printed_defaults_read_back_and_every_key_is_explained() -> None:
    text = as_yaml(Config())
    assert parse(text, "f") == Config()
    lines = text.splitlines()
    for part in (Config(), KubeletConfig(), ReserveConfig(), SettleConfig(), LogConfig()):
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


def test_the_mapping_equals_the_file() -> None:
    config = parse("reservedSystemCPUs: 0-1\nlisten: /a\nsettle: {perSecond: 3}\nstateDir: '/a b'", "f")
    mapping = as_mapping(config)
    assert json.loads(json.dumps(mapping)) == mapping
    assert mapping == {
        k: v for k, v in yaml.safe_load(as_yaml(config)).items() if k not in {"kind", "apiVersion"}
    }
    assert mapping["stateDir"] == "/a b"


def test_structured_values_are_written_as_in_kubelets_configuration() -> None:
    config = parse(
        "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: true, align-by-socket: f}\n"
        "topologyManagerPolicyOptions: {max-allowable-numa-nodes: 16}\nexplainHistory: 7\n"
        "kubeReserved: {cpu: 0.5, memory: 1536Mi}\nmemoryManagerPolicy: Static\n"
        "evictionHard: {memory.available: 0}\n"
        "reservedMemory: [{numaNode: 1, limits: {hugepages-2Mi: 2Mi}},\n"
        "  {numaNode: 0, limits: {memory: 1.5Gi}}]",
        "f",
    )
    text = as_yaml(config, comments=False)
    assert 'reservedMemory:\n  - numaNode: 0\n    limits:\n      memory: "1536Mi"\n  - numaNode: 1\n' in text
    assert 'cpuManagerPolicyOptions:\n  full-pcpus-only: "true"\nreserved' in text
    mapping = as_mapping(config)
    assert mapping["reservedMemory"] == [
        {"numaNode": 0, "limits": {"memory": "1536Mi"}},
        {"numaNode": 1, "limits": {"hugepages-2Mi": "2Mi"}},
    ]
    assert mapping["kubeReserved"] == {"cpu": "500m", "memory": "1536Mi", "ephemeral-storage": "", "pid": ""}
    assert (mapping["explainHistory"], mapping["topologyManagerPolicyOptions"]) == (
        7,
        {"max-allowable-numa-nodes": "16"},
    )
    read = yaml.safe_load(as_yaml(config))
    assert mapping == {k: v for k, v in read.items() if k not in {"kind", "apiVersion"}}
