"""``topoproxy bundle``: secrets are planted in every source, and none is in the file."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.backends.ledger import format as fmt
from proxy.bundle import sources
from proxy.bundle.sources import pack
from proxy.cli.main import cli, run_command_line
from proxy.topology.reader import read_machine
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs
from tests.cli.conftest import _serving

COUNT = 40
SECRETS = [f"Zx{number:02d}qK9vTrW{number:02d}" for number in range(COUNT)]
MEMBERS = {
    *("manifest.json", "versions.json", "configuration.json", "topology.json", "doctor.json", "ledger.json"),
    *(*sources.PAGES, "decisions.json", "log.txt"),
}


class Planted:
    """Secrets, each of which is used once."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def __call__(self) -> str:
        self.used.append(SECRETS[len(self.used)])
        return self.used[-1]


@pytest.fixture
def secret() -> Planted:
    return Planted()


@pytest.fixture
def config(tmp_path: Path, secret: Planted) -> Path:
    write_sysfs(regular_machine(2, 1, 4, 2), tmp_path / "machine")
    for name in ("proc", "state", "cgroup/cpuset", "bin", "hooks"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "state").chmod(0o700)
    (tmp_path / "cgroup/cpuset/cpuset.cpus").write_text("0-15\n")
    (tmp_path / "hooks/50-bad.py").write_text(f"TOKEN = '{secret()}'\nraise ValueError('{secret()}')\n")
    none = tmp_path / "none"
    file = tmp_path / "c.yaml"
    file.write_text(
        f"listen: unix://{tmp_path}/cri.sock\nruntime: unix://{tmp_path}/runtime.sock\n"
        f"stateDir: {tmp_path}/state\nsysfsRoot: {tmp_path}/machine/sys\nprocfsRoot: {tmp_path}/proc\n"
        f"cgroupRoot: {tmp_path}/cgroup\nkubelet: {{stateDir: {none}, configFile: /etc/{secret()}}}\n"
        f"hooks: {{directory: {tmp_path}/hooks, vendorDirectory: {none}, serverDirectory: {none},"
        f" settings: {{50-bad: {{config: {{token: {secret()}}}}}}}}}\n"
    )
    file.chmod(0o600)
    return file


def ledger(directory: Path, secret: Planted) -> None:
    machine = read_machine(directory / "machine/sys", directory / "proc")
    pod = {
        "sandbox_id": "0123456789abcdef",
        "uid": "8f5c6a9e-1b0c-4d0e-9f00-000000000001",
        "namespace": "shop",
        "name": "web-0",
        "problem": f"annotation 'x/y' is {secret()!r}",
        "faults": [["cpu-list", f"cannot read the annotation: {secret()}"]],
        "labels": {"app": secret(), secret(): "the"},
        "cpuset": "0-3",
    }
    changes: dict[str, Any] = {"p/0123": pod, "hook/x": {"token": secret(), "env": [f"PASSWORD={secret()}"]}}
    packed, _ = fmt.pack(changes)
    (directory / "state/ledger.jsonl").write_bytes(fmt.header(machine.fingerprint) + fmt.batch(1, packed))


def log_text(secret: Planted) -> str:
    lines = [
        f'2026-11-23T10:11:12.345+00:00 INFO    placed pod=shop/web-0 cpus=0-3 reason="{secret()}"',
        f'ERROR cannot start the container pod=shop/web-0 err="env DB_PASSWORD={secret()} is refused"',
        f"I1123 10:11:12.345678 12 hook.py:1] {secret()!r} hook={secret()}",
        json.dumps({"ts": 1.5, "msg": "placed", "pod": "shop/web-0", "err": secret(), "token": secret()}),
        json.dumps({"msg": "placed", "value": "the pod of a user"}),
        json.dumps({"msg": secret(), "annotations": {secret(): secret()}}),
        f"Traceback: ValueError: {secret()}",
        f"{{broken json {secret()}",
    ]
    return "\n".join(lines) + "\n"


def pages(secret: Planted) -> dict[str, Any]:
    status = {
        "version": "0.1.0",
        "pid": 12,
        "containers": [{"id": "c0ffee00", "ref": "shop/web-0/main", "cpus": "0-3", "reason": secret()}],
        "problems": [
            {"what": "cannot read", "message": f"cannot read {secret()}", "keys": {"err": secret()}}
        ],
        "enforcement": {"selection": {"matchLabels": {secret(): secret()}}},
    }
    facts = [{"what": "QoS class", "value": secret(), "source": f"the label {secret()!r}"}]
    hooks = {"hooks": [{"name": "50-bad", "last_error": secret(), "last_trace": f"x\n{secret()}\n"}]}
    metrics = f'topoproxy_hook_failures_total{{hook="{secret()}",extra="{secret()}"}} 1\n'
    return {
        "/status": lambda: status,
        "/explain": lambda params: {
            "pods": [{"pod": "shop/web-0", "uid": "u1", "when": 1.5}],
            "records": [{"decision": {"pod": "shop/web-0", "facts": facts}}] if params else [],
        },
        "/hooks": lambda: hooks,
        "/devices": lambda: {"devices": {secret(): [secret()]}},
        "/enforce": lambda: {"mode": "enforce"},
        "/metrics": lambda: metrics,
    }


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["bundle", *map(str, args)])


def read(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive:
            assert entry.isfile()
            assert entry.mode == 0o600
            content = archive.extractfile(entry)
            assert content is not None
            found[entry.name.partition("/")[2]] = content.read().decode()
    return found


def test_no_planted_secret_is_in_the_bundle(config: Path, tmp_path: Path, secret: Planted) -> None:
    ledger(tmp_path, secret)
    (tmp_path / "log").write_text(log_text(secret))
    with _serving(tmp_path / "admin.sock", pages(secret)):
        done = run(tmp_path / "b.tar.gz", "--config", config, "--log", tmp_path / "log")
    assert done.exit_code == 0, done.output
    members = read(tmp_path / "b.tar.gz")
    assert set(members) == MEMBERS, members["manifest.json"]
    assert len(secret.used) > 25
    for name, text in members.items():
        assert not [each for each in secret.used if each in text], name
    assert json.loads(members["manifest.json"])["redacted"] > 25
    assert "web-0" in members["ledger.json"]
    assert "0-3" in members["ledger.json"]
    assert "placed pod=shop/web-0 cpus=0-3" in members["log.txt"]
    assert "the pod of a user" not in members["log.txt"]
    assert "shop/web-0/main" in members["status.json"]


def test_a_bundle_is_made_without_daemon_journal_ledger_and_configuration(
    config: Path, tmp_path: Path, secret: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    config.write_text(f"mod: {secret()}\nlisten: {secret()}\n")
    done = run(tmp_path / "b.tar.gz", "--config", config)
    assert done.exit_code == 0, done.output
    members = read(tmp_path / "b.tar.gz")
    manifest = json.loads(members["manifest.json"])
    assert set(manifest["absent"]) >= {"log.txt", "decisions.json", *sources.PAGES}
    assert "mod" in manifest["configuration"]
    assert not [each for each in secret.used for text in members.values() if each in text]
    assert "without status.json: cannot query the daemon" in done.output
    assert "the defaults are described, because the configuration is refused: cannot use" in done.output


def test_what_is_printed_is_not_redacted_and_the_manifest_is(config: Path, tmp_path: Path) -> None:
    config.write_text("mod: zzqqxxyyzzqqxxyy\n")
    log = tmp_path / "zzqqxxyyzzqq.log"
    done = run(tmp_path / "b.tar.gz", "--config", config, "--log", log)
    manifest = json.loads(read(tmp_path / "b.tar.gz")["manifest.json"])
    assert f"without log.txt: cannot read {log}: No such file or directory" in done.output
    assert f"is refused: cannot use the configuration {config}: line 1: mod: unknown key" in done.output
    assert "zzqqxxyy" not in json.dumps(manifest)
    assert f", {manifest['redacted']} strings redacted" in done.output


@pytest.mark.parametrize("garbage", [b"", b"\x00\xff" * 500, b"00000000 {}\n", b"[" * 100_000])
def test_an_invalid_source_is_named_in_the_manifest(config: Path, tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "state/ledger.jsonl").write_bytes(garbage)
    (tmp_path / "log").write_bytes(garbage)
    odd = {"/status": lambda: "no JSON \ud83d", "/explain": lambda: {"records": 5}}
    with _serving(tmp_path / "admin.sock", odd):
        done = run(tmp_path / "b.tar.gz", "--config", config, "--log", tmp_path / "log")
    assert done.exit_code == 0, done.output
    manifest = json.loads(read(tmp_path / "b.tar.gz")["manifest.json"])
    assert "ledger.jsonl is not used" in manifest["absent"]["ledger.json"]
    assert {"hooks.json", "devices.json"} <= manifest["absent"].keys()


def test_a_member_is_bounded_and_the_end_of_the_log_is_kept(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MEMBER_LIMIT", 10_000)
    (tmp_path / "log").write_text("placed pod=a cpus=1\n" * 5000 + "placed pod=b cpus=777\n")
    many = {"containers": [{"cpus": "0-3"}] * 5000}
    with _serving(tmp_path / "admin.sock", {"/status": lambda: many}):
        assert run(tmp_path / "b.tar.gz", "--config", config, "--log", tmp_path / "log").exit_code == 0
    members = read(tmp_path / "b.tar.gz")
    assert max(map(len, members.values())) <= 10_000
    assert "cpus=777" in members["log.txt"]
    assert json.loads(members["manifest.json"])["cut"]["status.json"] > 10_000


@pytest.mark.parametrize("word", ["placed", "zzqqxxyyzzqqxxyyzzqqxxyyzz", "q"], ids=len)
def test_a_log_that_is_cut_begins_with_a_whole_line_and_its_size_is_in_the_manifest(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """Redacted, the log is as long as before, shorter or longer than what a member may have."""
    monkeypatch.setattr(sources, "MEMBER_LIMIT", 20_000)
    log = tmp_path / "log"
    log.write_text("".join(f"cpus={number} {word}\n" for number in range(3000)))
    with _serving(tmp_path / "admin.sock", {}):
        assert run(tmp_path / "b.tar.gz", "--config", config, "--log", log).exit_code == 0
    members = read(tmp_path / "b.tar.gz")
    first, *_, last = members["log.txt"].splitlines()
    assert first.startswith("cpus=")
    assert last.startswith("cpus=2999 ")
    assert len(members["log.txt"]) <= 20_000
    assert json.loads(members["manifest.json"])["cut"]["log.txt"] == log.stat().st_size


def test_the_journal_is_read_without_the_name_of_the_host(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {
        "__REALTIME_TIMESTAMP": "1795428743000000",
        "_HOSTNAME": "node-in-berlin",
        "MESSAGE": "placed cpus=1",
    }
    messages = [
        json.dumps({"ts": 1.5, "caller": "creates.py:107", "msg": "placed", "cpus": "0-3", "token": "the"}),
        'I1123 10:11:12.345678      12 creates.py:107] "cannot write the cpuset" cpus="0-3" err="hunter2"',
    ]
    program = tmp_path / "bin/journalctl"
    records = "\n".join(json.dumps({**record, "MESSAGE": each}) for each in (record["MESSAGE"], *messages))
    program.write_text(f"#!/bin/sh\n/bin/cat <<'E'\n{records}\nno json\nE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert run(tmp_path / "b.tar.gz", "--config", config).exit_code == 0
    first, in_json, klog = read(tmp_path / "b.tar.gz")["log.txt"].splitlines()
    assert first == "1795428743.000 placed cpus=1"
    assert in_json.startswith(
        '1795428743.000 {"ts": 1.5, "caller": "creates.py:107", "msg": "placed", "cpus": "0-3"'
    )
    head = '1795428743.000 I1123 10:11:12.345678      12 creates.py:107] "cannot write the cpuset" cpus="0-3"'
    assert re.fullmatch(rf'{re.escape(head)} err="<redacted:\d+>"', klog)


def test_the_file_is_private_and_replaces_no_other(config: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert run(tmp_path / "b.tar.gz", "--config", config).exit_code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "b.tar.gz").stat().st_mode) == 0o600
    data = (tmp_path / "b.tar.gz").read_bytes()
    assert run_command_line(["bundle", str(tmp_path / "b.tar.gz"), "--config", str(config)]) == 73
    assert (tmp_path / "b.tar.gz").read_bytes() == data
    assert run_command_line(["bundle", str(tmp_path / "no/b.tar.gz"), "--config", str(config)]) == 73
    assert not list(tmp_path.glob(".b.tar.gz*"))


def test_the_same_content_is_the_same_archive() -> None:
    members = {"a.json": b"{}", "log.txt": b"x" * 5000}
    data = pack("d", members, 1000.7)
    assert data == pack("d", members, 1000.2)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["d/a.json", "d/log.txt"]


@pytest.mark.parametrize("name", ["", "-"])
def test_a_bundle_needs_the_name_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command_line(["bundle", name]) == 2
    assert list(tmp_path.iterdir()) == []
