"""Kubelet's configuration file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from proxy.backends.kubelet.config_file import ConfigFile
from proxy.backends.kubelet.settings import KubeletError
from proxy.backends.kubelet.small_file import LARGEST
from proxy.model.idset import CpuSet

YAML = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}}
cpuManagerPolicy: static
cpuManagerPolicyOptions: {full-pcpus-only: "true"}
kubeReserved:
  cpu: 500m
reservedSystemCPUs: 0,8
---
kind: another document
"""


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    yaml, plain = tmp_path / "config.yaml", tmp_path / "config.json"
    yaml.write_text(YAML)
    config = {
        "kind": "KubeletConfiguration",
        "cpuManagerPolicy": "static",
        "cpuManagerPolicyOptions": {"full-pcpus-only": "true"},
        "kubeReserved": {"cpu": "500m"},
        "reservedSystemCPUs": "0,8",
    }
    plain.write_text(f" {json.dumps(config)}")
    got = ConfigFile(str(yaml)).read()
    assert got is not None
    assert (got.policy, got.reserved, got.reserved_milli) == ("static", CpuSet([0, 8]), 500)
    assert ConfigFile(str(plain)).read() == got


def test_no_file_says_nothing_and_a_new_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    file = ConfigFile(str(path))
    assert file.read() is None
    path.write_text("cpuManagerPolicy: none\n")
    first = file.read()
    assert first is not None
    assert file.read() is first, "not read again while it is the same"
    path.write_text("cpuManagerPolicy: static\n")
    again = file.read()
    assert again is not None
    assert again.policy == "static"
    path.unlink()
    assert file.read() is None


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"\xff", "it is not UTF-8: invalid start byte at byte 0"),
        (b"a: [", "expected"),
        (b"{", "Expecting property name"),
        (b"[" * 5000, "nested deeper"),
        (b'{"a":' * 5000, "not JSON: it is nested too deeply"),
        (b"- a", "it holds no KubeletConfiguration"),
        (b"", "it holds no KubeletConfiguration"),
        (b"kind: Pod", "it holds no KubeletConfiguration"),
        (b"a: b\n" * (LARGEST // 5 + 1), "it is larger than 1 MiB"),
    ],
    ids=["binary", "yaml", "json", "deep yaml", "deep json", "list", "empty", "pod", "large"],
)
def test_an_invalid_file_is_reported_as_often_as_it_is_requested(
    tmp_path: Path, content: bytes, cause: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    file = ConfigFile(str(path))
    for _ in range(2):
        with pytest.raises(KubeletError, match="cannot read kubelet's configuration") as caught:
            file.read()
        assert cause in str(caught.value)
    path.write_text(YAML)
    assert file.read() is not None


def test_a_missing_file_costs_no_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(KubeletError, match="it is not a regular file"):
            ConfigFile(str(path)).read()
    (tmp_path / "plain").write_text("x")
    with pytest.raises(KubeletError, match="Not a directory"):
        ConfigFile(str(tmp_path / "plain" / "config.yaml")).read()
