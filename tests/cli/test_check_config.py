"""``topoproxy check-config``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli.check_config import check_config
from proxy.config import Config, parse
from proxy.config.cluster_config import FILE_NAME
from proxy.model.errors import ConfigError, UsageError
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 8 CPUs as a sysfs tree."""
    root = tmp_path / "machine"
    write_sysfs(regular_machine(sockets=1, nodes_per_socket=1, cores_per_node=4), root)
    return root


def run(*args: object) -> str:
    result = CliRunner().invoke(check_config, [str(w) for w in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "c.yaml").write_text(text)
    return tmp_path / "c.yaml"


def test_the_defaults_are_printed_as_a_commented_file() -> None:
    text = run("--defaults")
    assert "# CPUs that are never given to owners" in text
    assert parse(text, "f") == Config()


def test_the_effective_configuration_is_printed_as_a_file(tmp_path: Path, machine: Path) -> None:
    file = write(tmp_path, "cpuManagerPolicy: static\nreservedSystemCPUs: 0\n")
    out = run("--config", file, "--sysfs-root", machine, "--mode", "observe")
    left = "can have owners; the shared pool keeps at least 2 of them"
    assert out.splitlines()[:2] == [
        f"# from {file}",
        f"# checked against the machine: CPUs 0-7 are online, 1-7 {left}",
    ]
    config = parse(out, "again")
    assert (config.cpu_manager_policy, str(config.reserved_system_cpus), config.mode) == (
        "static",
        "0",
        "observe",
    )


def test_a_core_that_is_reserved_in_part_is_a_note(tmp_path: Path, machine: Path) -> None:
    options = "cpuManagerPolicyOptions: {full-pcpus-only: true}\n"
    file = write(tmp_path, f"cpuManagerPolicy: static\nreservedSystemCPUs: 0\n{options}")
    note = "# note: reservedSystemCPUs: it reserves a part of some cores, and their other threads (CPU 4)"
    assert note in run("--config", file, "--sysfs-root", machine)


def test_a_machine_that_does_not_fit_is_refused(tmp_path: Path, machine: Path) -> None:
    file = write(tmp_path, "reservedSystemCPUs: 0,8-9\n")
    with pytest.raises(
        ConfigError, match=r"c\.yaml: reservedSystemCPUs: there are no CPUs 8-9 \(online: 0-7\)"
    ):
        run("--config", file, "--sysfs-root", machine)


def test_settings_from_the_cluster_that_cannot_be_used_are_remarks(tmp_path: Path, machine: Path) -> None:
    tmp_path.chmod(0o700)
    cluster = tmp_path / "cluster"
    cluster.mkdir(mode=0o700)
    allowed = "[log.level, explainHistory, reservedSystemCPUs]"
    file = write(tmp_path, f"clusterConfig: {{allowed: {allowed}}}\nclusterFacts: {{directory: {cluster}}}\n")
    for text, why in (
        ("reservedSystemCPUs: 0-9\n", "there are no CPUs 8-9"),
        ("log: {level: loud}\nexplainHistory: few\n", "2 problems"),
    ):
        (cluster / FILE_NAME).write_text(text)
        output = run("--config", file, "--sysfs-root", machine)
        assert f"{why}" in output
        assert "# note: the settings from the cluster are ignored" in output
        assert str(parse(output, "output").reserved_system_cpus) == ""


def test_without_a_machine_the_rest_is_checked(tmp_path: Path) -> None:
    file = write(tmp_path, "reservedSystemCPUs: 4000\n")
    assert "# not checked against the machine: cannot read" in run("--config", file, "--sysfs-root", tmp_path)


def test_the_runtimes_socket_is_checked(tmp_path: Path, machine: Path) -> None:
    file = write(tmp_path, f"runtime: {tmp_path}/r.sock\n")
    assert f"# note: the runtime's socket {tmp_path}/r.sock: No such" in run(
        "--config", file, "--sysfs-root", machine
    )
    (tmp_path / "r.sock").write_text("")
    assert f"# note: {tmp_path}/r.sock is not a socket" in run("--config", file, "--sysfs-root", machine)
    (tmp_path / "r.sock").unlink()
    with socket.socket(socket.AF_UNIX) as runtime:
        runtime.bind(f"{tmp_path}/r.sock")
        assert "note" not in run("--config", file, "--sysfs-root", machine)


def test_invalid_configurations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: mode: 'x' is not"):
        run("--config", write(tmp_path, "mode: x"))
    with pytest.raises(UsageError, match="cannot use --mode: 'x' is not"):
        run("--config", write(tmp_path, ""), "--mode", "x")


def test_kubelets_settings_are_explained_shown_and_checked(tmp_path: Path, machine: Path) -> None:
    defaults = run("--defaults")
    for key in (
        "topologyManagerPolicy",
        "memoryManagerPolicy",
        "reservedMemory",
        "kubeReserved",
        "explainHistory",
    ):
        assert f"\n{key}:" in defaults
    file = write(
        tmp_path,
        "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {strict-cpu-reservation: 'true'}\n"
        "kubeReserved: {cpu: 700m}\nsystemReserved: {cpu: 700m}\n",
    )
    out = run("--config", file, "--sysfs-root", machine, "--topology-manager-policy", "restricted")
    assert "# checked against the machine: CPUs 0-7 are online, 2 of them are reserved for the system" in out
    assert "topologyManagerPolicy: restricted\n" in out
    config = parse(out, "again")
    assert (config.reserved_cpu_amount, config.cpu_manager_policy_options.strict_cpu_reservation) == (2, True)
    with pytest.raises(ConfigError, match="they reserve 8 of 8 CPUs"):
        run("--config", write(tmp_path, "kubeReserved: {cpu: 8}"), "--sysfs-root", machine)
