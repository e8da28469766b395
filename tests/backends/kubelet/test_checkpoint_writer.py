"""Writing kubelet's CPU state file: values of real kubelets, what kubelet demands, atomic writes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.kubelet import checkpoint_writer as module
from proxy.backends.kubelet.checkpoint_writer import (
    CPU_STATE_FILE,
    none_state,
    pod_level_cpus,
    read_cpu_state,
    remove_draft,
    replace_file,
    static_state,
    write_cpu_state,
)
from proxy.backends.kubelet.checkpoints import CheckpointError, held_cpus, read_cpu_checkpoint
from proxy.model.errors import CannotCreateError
from proxy.model.idset import CpuSet

EIGHT = CpuSet(range(8))


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def test_the_file_for_policy_none_equals_that_of_real_nodes() -> None:
    assert none_state() == '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'


def test_a_file_for_policy_static() -> None:
    held = {"b": {"z": cpus("4-5"), "y": cpus("2-3")}, "a": {"x": cpus("1")}}
    text = static_state(EIGHT, held, reserved=cpus("0"))
    assert text.startswith(
        '{"policyName":"static","defaultCpuSet":"0,6-7",'
        '"entries":{"a":{"x":"1"},"b":{"y":"2-3","z":"4-5"}},"checksum":'
    )
    found = read_cpu_checkpoint(text)
    assert (found.version, found.policy, held_cpus(found).held) == (2, "static", held)


def test_strictly_reserved_cpus_are_in_no_set() -> None:
    text = static_state(EIGHT, {"a": {"x": cpus("2")}}, reserved=cpus("0-1"), strict=True)
    assert json.loads(text)["defaultCpuSet"] == "3-7"


def test_pods_with_cpus_of_their_own_need_version_3() -> None:
    text = static_state(EIGHT, {"a": {"x": cpus("2")}}, pods={"a": cpus("2-4")}, version=3)
    found = read_cpu_checkpoint(text)
    assert (found.version, json.loads(text)["defaultCpuSet"]) == (3, "0-1,5-7")
    assert pod_level_cpus(found) == {"a": cpus("2-4")}
    with pytest.raises(CheckpointError, match="cannot read kubelet's cpu_manager_state"):
        pod_level_cpus(read_cpu_checkpoint('{"podEntries":{"a":{"cpuSet":"x"}}}'))


def test_version_1_has_container_ids() -> None:
    text = static_state(EIGHT, {"": {"id": cpus("2")}}, version=1)
    assert json.loads(text)["entries"] == {"id": "2"}
    assert read_cpu_checkpoint(text).version == 1


@pytest.mark.parametrize(
    ("held", "reserved", "message"),
    [
        ("8", "", "CPUs 8 of containers are not online"),
        ("1-2", "0-1", "CPUs 1 of containers are reserved by kubelet"),
        ("0-7", "", "no CPU is left for its default set"),
    ],
)
def test_a_file_that_kubelet_would_reject_is_not_written(held: str, reserved: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot write kubelet's cpu_manager_state: {message}"):
        static_state(EIGHT, {"a": {"x": cpus(held)}}, reserved=cpus(reserved))


names = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(st.dictionaries(names, st.dictionaries(names, st.sampled_from(range(1, 8)), min_size=1), max_size=3))
def test_a_file_with_any_names_reads_back(held: dict[str, dict[str, int]]) -> None:
    sets = {uid: {name: CpuSet([cpu]) for name, cpu in pod.items()} for uid, pod in held.items()}
    for version in (2, 3):
        found = read_cpu_checkpoint(static_state(EIGHT, sets, version=version))
        cpus = held_cpus(found)
        assert (found.version, cpus.held) == (version, sets)
        taken = CpuSet(cpu for pod in held.values() for cpu in pod.values())
        assert cpus.default == EIGHT - taken


def test_a_written_file_is_private_and_leaves_no_other_file(tmp_path: Path) -> None:
    (tmp_path / CPU_STATE_FILE).write_text("old")
    (tmp_path / CPU_STATE_FILE).chmod(0o644)
    (tmp_path / f".{CPU_STATE_FILE}.topoproxy").write_text("of a write that was cut off")
    write_cpu_state(tmp_path, "new")
    assert read_cpu_state(tmp_path) == "new"
    assert stat.S_IMODE((tmp_path / CPU_STATE_FILE).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [CPU_STATE_FILE]
    replace_file(tmp_path / "copy", "text", tmp_path / ".copy")
    (tmp_path / f".{CPU_STATE_FILE}.topoproxy").write_text("cut off")
    remove_draft(tmp_path)
    remove_draft(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["copy", CPU_STATE_FILE]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CPU_STATE_FILE).write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotCreateError, match=r"cannot write .*cpu_manager_state: No space left"):
        write_cpu_state(tmp_path, "new")
    assert (read_cpu_state(tmp_path), os.listdir(tmp_path)) == ("old", [CPU_STATE_FILE])


def test_no_file_and_no_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_cpu_state(tmp_path) is None
    with pytest.raises(CannotCreateError, match="No such file"):
        write_cpu_state(tmp_path / "absent", "new")
    (tmp_path / CPU_STATE_FILE).write_text("long")
    monkeypatch.setattr(module, "_FILE_LIMIT_BYTES", 3)
    with pytest.raises(CheckpointError, match="it is larger than"):
        read_cpu_state(tmp_path)
    (tmp_path / CPU_STATE_FILE).unlink()
    (tmp_path / CPU_STATE_FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*: it is not a regular file"):
        read_cpu_state(tmp_path)
    (tmp_path / CPU_STATE_FILE).rmdir()
    os.mkfifo(tmp_path / CPU_STATE_FILE)
    with pytest.raises(CheckpointError, match=r"cannot read .*: it is not a regular file"):
        read_cpu_state(tmp_path)  # and not wait until another program writes to it


def test_a_file_that_does_not_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_checksum", lambda fields, version: 1)
    with pytest.raises(CheckpointError, match="does not read back"):
        none_state()
