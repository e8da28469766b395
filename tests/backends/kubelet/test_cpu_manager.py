"""The state of kubelet's CPU manager: its sources, their precedence, and contradictions between them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.kubelet.checkpoint_writer import none_state, static_state, write_cpu_state
from proxy.backends.kubelet.checkpoints import fnv1a
from proxy.backends.kubelet.cpu_manager import (
    POD_LEVEL_NAME,
    QUERY_AGAIN_S,
    ConfigFile,
    KubeletCpuManagerReader,
)
from proxy.backends.kubelet.settings import KubeletError, KubeletSettings
from proxy.backends.kubelet.small_file import FILE_LIMIT_BYTES
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(2, 1, 4, 2)
TOPOLOGY = CpuTopology.of(MACHINE)
LONG_TIMEOUT_S = 60.0
STATIC = static_state(MACHINE.online, {"u": {"c": CpuSet([2, 3]), "d": CpuSet([4])}})
HELD = {"u": {"c": CpuSet([2, 3]), "d": CpuSet([4])}}

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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reader(directory: Path, clock: Clock | None = None, **settings: Any) -> KubeletCpuManagerReader:
    kubelet_settings = KubeletSettings(**{"timeout": LONG_TIMEOUT_S, **settings})
    return KubeletCpuManagerReader(kubelet_settings, str(directory), "", lambda: TOPOLOGY, clock or Clock())


def refreshed(source: KubeletCpuManagerReader) -> CpuManager:
    source.refresh()
    return source.read()


def test_without_kubelet_the_result_is_empty(tmp_path: Path) -> None:
    assert refreshed(reader(tmp_path)) == CpuManager()


def test_the_state_file_alone_gives_policy_and_cpus(tmp_path: Path) -> None:
    write_cpu_state(tmp_path, STATIC)
    result = refreshed(reader(tmp_path))
    file = f"{tmp_path}/cpu_manager_state"
    assert (result.policy, result.held, str(result.default)) == ("static", HELD, "0-1,5-15")
    assert result.sources == {"policy": file, "held": file, "default": file}
    assert (result.options, result.topology_policy, result.problems) == ({}, "", ())


def test_a_file_of_policy_none_holds_nothing(tmp_path: Path) -> None:
    write_cpu_state(tmp_path, none_state())
    result = refreshed(reader(tmp_path))
    assert (result.policy, result.held, result.default, result.problems) == ("none", {}, CpuSet(), ())


def test_missing_settings_have_kubelets_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("kind: KubeletConfiguration\n")
    result = refreshed(reader(tmp_path))
    assert (result.policy, result.topology_policy, result.topology_scope) == ("none", "none", "container")
    assert set(result.sources.values()) == {f"kubelet's default, {path} does not set it"}


@pytest.mark.parametrize(
    ("reserve", "cpus", "source"),
    [
        ("reservedSystemCPUs: 1,9\nkubeReserved: {cpu: 4}", "1,9", ""),
        ("kubeReserved: {cpu: 1500m}\nsystemReserved: {cpu: 200m}", "0,8", ", 2 of them, as kubelet chooses"),
        ("kubeReserved: {cpu: 1}\nevictionHard: {cpu: 1}", "0,8", ", 2 of them, as kubelet chooses"),
        ("kubeReserved: {memory: 1Gi}", "", None),
    ],
)
def test_the_reserved_cpus_are_read_or_computed(
    tmp_path: Path, reserve: str, cpus: str, source: str | None
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"cpuManagerPolicy: static\n{reserve}\n")
    result = refreshed(reader(tmp_path))
    assert str(result.reserved) == cpus
    assert result.sources.get("reserved") == (None if source is None else f"{path}{source}")


def test_a_reserve_that_cannot_be_computed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("cpuManagerPolicy: static\nkubeReserved: {cpu: 99}\n")
    result = refreshed(reader(tmp_path))
    assert result.reserved == CpuSet()
    assert result.problems[0].startswith("cannot determine which 99 CPUs kubelet reserves: ")


def test_an_unknown_policy_option_is_kept(tmp_path: Path) -> None:
    options = 'cpuManagerPolicyOptions: {full-pcpus-only: "true", from-tomorrow: "yes"}'
    (tmp_path / "config.yaml").write_text(f"cpuManagerPolicy: static\nkubeReserved: {{cpu: 1}}\n{options}\n")
    result = refreshed(reader(tmp_path))
    assert result.options == {"full-pcpus-only": "true", "from-tomorrow": "yes"}
    assert (str(result.reserved), result.problems) == ("0", ())


def test_a_contradicting_state_file_is_reported_and_its_cpus_count(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("cpuManagerPolicy: none\n")
    write_cpu_state(tmp_path, STATIC)
    result = refreshed(reader(tmp_path))
    assert (result.policy, result.held) == ("none", HELD), "kubelet has not read the new file yet"
    by, file = f"{tmp_path}/config.yaml", f"{tmp_path}/cpu_manager_state"
    message = f"kubelet's CPU manager has policy none by {by}, but {file} was written under policy static"
    assert result.problems == (message,)


def test_the_running_kubelet_takes_precedence_over_its_file(
    tmp_path: Path, pods_server: Any, answer: Any
) -> None:
    config = {"kubeletconfig": {"cpuManagerPolicy": "none", "topologyManagerScope": 5}}
    pods_server.reply = answer(200, json.dumps(config).encode())
    (tmp_path / "config.yaml").write_text("cpuManagerPolicy: static\n")
    write_cpu_state(tmp_path, STATIC)
    result = refreshed(reader(tmp_path, configz=pods_server.url))
    assert (result.policy, result.held, result.sources["policy"]) == ("none", {}, "kubelet's configz")
    assert len(result.problems) == 2
    assert "topologyManagerScope: 5 is not one of" in result.problems[0]
    assert "was written under policy static" in result.problems[1]


def test_the_file_is_used_while_kubelet_does_not_answer(
    tmp_path: Path, pods_server: Any, answer: Any
) -> None:
    pods_server.reply = answer(500, b"no")
    (tmp_path / "config.yaml").write_text("cpuManagerPolicy: static\n")
    clock = Clock()
    found = reader(tmp_path, clock, configz=pods_server.url)
    result = refreshed(found)
    assert (result.policy, result.sources["policy"]) == ("static", f"{tmp_path}/config.yaml")
    assert "it answers 500" in result.problems[0]
    pods_server.reply = answer(200, b'{"kubeletconfig": {"cpuManagerPolicy": "none"}}')
    assert (refreshed(found).policy, refreshed(found).problems) == ("none", ())
    pods_server.reply = answer(500, b"no")
    clock.now += QUERY_AGAIN_S
    result = refreshed(found)
    assert (result.policy, result.sources["policy"]) == ("none", "kubelet's configz"), (
        "the last answer stays in effect"
    )
    assert "it answers 500" in result.problems[0]


def test_an_answer_is_valid_for_a_while_unless_kubelet_restarted(
    tmp_path: Path, pods_server: Any, answer: Any
) -> None:
    pods_server.reply = answer(200, b'{"kubeletconfig": {"cpuManagerPolicy": "static"}}')
    write_cpu_state(tmp_path, STATIC)
    clock = Clock()
    found = reader(tmp_path, clock, configz=pods_server.url)
    first = refreshed(found)
    for _ in range(3):
        assert refreshed(found) is first
    assert len(pods_server.seen) == 1
    clock.now += QUERY_AGAIN_S
    assert refreshed(found) is first, "an unchanged answer gives the same object"
    assert len(pods_server.seen) == 2
    pods_server.reply = answer(200, b'{"kubeletconfig": {"cpuManagerPolicy": "none"}}')
    write_cpu_state(tmp_path, none_state())
    found.read()
    result = refreshed(found)
    assert (result.policy, result.problems, len(pods_server.seen)) == ("none", (), 3)


def test_a_kubelet_that_hangs_is_not_queried_for_a_while(tmp_path: Path, pods_server: Any) -> None:
    pods_server.reply = lambda handler: pods_server.over.wait(LONG_TIMEOUT_S)
    clock = Clock()
    found = reader(tmp_path, clock, configz=pods_server.url, timeout=0.05)
    for _ in range(5):
        result = refreshed(found)
        assert "no complete answer within 0.05 s" in result.problems[0]
    queries = len(pods_server.seen)
    assert queries <= 2
    clock.now += 60
    refreshed(found)
    assert found.read().problems


def with_checksum(fields: dict[str, Any], text: str) -> str:
    return json.dumps({**fields, "checksum": fnv1a(text)})


def test_a_file_that_names_no_pods_is_reported(tmp_path: Path) -> None:
    text = (
        "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0"
        " Entries:(map[string]string)map[id:1] Checksum:(checksum.Checksum)0}"
    )
    old = {"policyName": "static", "defaultCpuSet": "0", "entries": {"id": "1"}}
    (tmp_path / "cpu_manager_state").write_text(with_checksum(old, text))
    result = refreshed(reader(tmp_path))
    assert (result.policy, result.held) == ("static", {})
    assert "it is of a kubelet before 1.18" in result.problems[0]


def test_cpus_assigned_to_a_whole_pod_are_held_too(tmp_path: Path) -> None:
    held, pods = {"u": {"c": CpuSet([4])}}, {"u": CpuSet([4, 5, 6]), "v": CpuSet([7])}
    write_cpu_state(tmp_path, static_state(MACHINE.online, held, pods=pods, version=3))
    result = refreshed(reader(tmp_path))
    assert result.held == {
        "u": {"c": CpuSet([4]), POD_LEVEL_NAME: CpuSet([5, 6])},
        "v": {POD_LEVEL_NAME: CpuSet([7])},
    }


def test_an_invalid_set_is_reported_although_the_checksum_is_right(tmp_path: Path) -> None:
    text = (
        "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0"
        " Entries:(map[string]map[string]string)map[u:map[c:x]] Checksum:(checksum.Checksum)0}"
    )
    bad = {"policyName": "static", "defaultCpuSet": "0", "entries": {"u": {"c": "x"}}}
    (tmp_path / "cpu_manager_state").write_text(with_checksum(bad, text))
    result = refreshed(reader(tmp_path))
    assert result.held == {}
    assert result.problems[0].startswith(f"cannot use {tmp_path}/cpu_manager_state")


def test_yaml_and_json_give_the_same_settings(tmp_path: Path) -> None:
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
    result = ConfigFile(str(yaml)).read()
    assert result is not None
    assert (result.policy, result.reserved, result.reserved_milli) == ("static", CpuSet([0, 8]), 500)
    assert ConfigFile(str(plain)).read() == result


def test_a_missing_file_gives_nothing_and_a_new_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    file = ConfigFile(str(path))
    assert file.read() is None
    path.write_text("cpuManagerPolicy: none\n")
    first = file.read()
    assert first is not None
    assert file.read() is first, "an unchanged file is not read again"
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
        (b"a: b\n" * (FILE_LIMIT_BYTES // 5 + 1), "it is larger than 1 MiB"),
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


def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(KubeletError, match="it is not a regular file"):
            ConfigFile(str(path)).read()
    (tmp_path / "plain").write_text("x")
    with pytest.raises(KubeletError, match="Not a directory"):
        ConfigFile(str(tmp_path / "plain" / "config.yaml")).read()
