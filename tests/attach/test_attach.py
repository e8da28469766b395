"""Attach and detach: five layouts of kubelet, errors, interrupted steps, and the rescue script."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from proxy.attach import journal as journals
from proxy.attach.changes import FileChange, systemctl
from proxy.attach.detach import detach
from proxy.attach.endpoint_watch import attached_kubelet
from proxy.attach.node import RESCUE
from proxy.attach.service import ROLLED_BACK, attach, planned_changes
from proxy.model.errors import CannotCreateError, InputError, PermissionDeniedError, TopoproxyError
from proxy.topology.yaml_events import read_yaml
from tests.attach.conftest import (
    CHANGED,
    CONFIG,
    DISTRIBUTIONS,
    EMBEDDED,
    LAYOUTS,
    MICROK8S_RUNTIME,
    OURS,
    RESTARTED,
    RUNTIME,
    FakeNode,
    Killed,
)

Fake = Callable[[str], FakeNode]
STEPS = (
    *("journal", "enabled", "started", "changing", "file 1", "file 2", "reloaded", "restarted", "attached"),
    *("restored", "restarted again", "disabled"),
)
SHELLS = [["dash"], ["busybox", "sh"], ["bash", "--posix"]]


def nothing_is_left(fake: FakeNode, before: object) -> None:
    assert fake.hashes() == before
    assert list(fake.state.iterdir()) == []
    assert sorted([*fake.systemd.glob("on.*"), *fake.systemd.glob("runs.*")]) == []


def rescue(fake: FakeNode, *args: str, shell: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    script = [*(shell or ["sh"]), str(fake.state / RESCUE), "--root", str(fake.root), *args]
    return subprocess.run(script, capture_output=True, text=True, errors="replace", timeout=60, check=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_attached_and_restored(fake: Fake, layout: str) -> None:
    node = fake(layout)
    before = node.hashes()
    assert attach(node.node(), 20) == f"attached: kubelet uses {OURS}, and its calls arrive"
    changed = {path for path, facts in node.hashes().items() if facts and facts != before.get(path)}
    assert changed == {f"{node.root}{path}" for path in CHANGED[layout]}
    effective = node.node().files().effective
    assert effective is not None
    assert effective.text == OURS
    order = [line for line in node.log if not line.startswith(("show", "is-enabled"))]
    units = "topoproxy.socket topoproxy.service"
    assert order == [f"enable {units}", f"start {units}", "daemon-reload", "restart kubelet.service"]
    assert detach(node.node(), 20, force=False, release=True) == f"detached: kubelet uses {RUNTIME}"
    assert node.released
    nothing_is_left(node, before)
    assert "restart kubelet.service" in node.log[len(order) :]
    assert detach(node.node(), 20, force=False, release=True).startswith("kubelet is not attached")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_the_script_undoes_each_layout(fake: Fake, layout: str, shell: list[str]) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"not installed: {shell[0]}")
    node = fake(layout)
    before = node.hashes()
    attach(node.node(), 20)
    done = rescue(node, shell=shell)
    assert (done.returncode, done.stderr) == (0, "")
    nothing_is_left(node, before)


@pytest.mark.parametrize("way", ["detach", "attach", "rescue"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layout", ["instance-config", "unit"])
def test_an_attach_interrupted_at_any_step_is_repaired(fake: Fake, layout: str, step: str, way: str) -> None:
    node = fake(layout)
    before = node.hashes()
    node.raise_after = {step: Killed()}
    try:
        attach(node.node(), 20)
        detach(node.node(), 20, force=False, release=True)
    except Killed:
        pass
    else:
        assert step == "file 2"
        assert layout == "unit"
    node.raise_after = {}
    if way == "attach":
        assert attach(node.node(), 20).startswith(("attached", "kubelet is attached already"))
        assert node.uses_us()
        way = "detach"
    if way == "detach":
        detach(node.node(), 20, force=False, release=False)
    elif (node.state / RESCUE).exists():
        done = rescue(node)
        assert (done.returncode, done.stderr) == (0, "")
    nothing_is_left(node, before)


WRONG = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from proxy.attach.service import attach
from tests.attach.conftest import FakeNode
attach(FakeNode({layout!r}, Path({root!r}), Path({state!r}), Path({systemd!r})).node(), 20)
"""


@pytest.mark.parametrize("command", ["is-enabled", "enable", "start", "daemon-reload", "restart"])
def test_the_journal_of_a_killed_process_is_sufficient(
    fake: Fake, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = fake("kubeadm-flags")
    before = node.hashes()
    monkeypatch.setenv("FAKE_KILL", command)
    paths = {"root": str(node.root), "state": str(node.state), "systemd": str(node.systemd)}
    code = WRONG.format(tests=str(Path(__file__).parents[2]), layout=node.layout, **paths)
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    monkeypatch.delenv("FAKE_KILL")
    if (node.state / RESCUE).exists():
        assert rescue(node).returncode == 0
    assert node.hashes() == before
    assert not node.uses_us()


def test_a_failed_attach_is_undone_in_time_with_the_reason(fake: Fake) -> None:
    node = fake("instance-config")
    before = node.hashes()

    def refused(message: str, timeout: float = 3) -> None:
        begin = time.monotonic()
        with pytest.raises(TopoproxyError) as error:
            attach(node.node(), timeout)
        assert message in str(error.value)
        assert f"all changes were rolled back: kubelet uses {RUNTIME}" in str(error.value)
        assert time.monotonic() - begin < timeout + 2
        nothing_is_left(node, before)

    node.ready = False
    refused("topoproxy is not ready: no socket")
    assert "restart kubelet.service" not in node.log, (
        "kubelet is not restarted where none of its files changed"
    )
    node.ready, node.answers = True, False
    refused("no process listens there")
    node.answers, node.runtime = True, "/run/crio/crio.sock"
    refused("topoproxy forwards to /run/crio/crio.sock")
    node.runtime = RUNTIME.removeprefix("unix://")
    listening, node.listening = node.listening, "/run/topoproxy/other.sock"
    refused("the daemon listens on /run/topoproxy/other.sock, and its configuration says /run/topoproxy/cri")
    node.listening = listening
    (node.systemd / "no-start").touch()
    refused("Job for topoproxy.socket failed.")
    (node.systemd / "no-start").unlink()
    node.calls = False
    refused("no calls from kubelet arrived: 0 clients connected, 0 of kubelet; kubelet.service is active")
    node.calls, node.caller = True, 99
    refused("no calls from kubelet arrived: 1 client connected, 0 of kubelet; kubelet.service is active")
    node.calls = False
    (node.systemd / "refuses").touch()
    refused("kubelet.service is activating (auto-restart, result exit-code, 3 restarts)")


def test_an_attach_of_an_attached_node_undoes_its_release(fake: Fake) -> None:
    node = fake("instance-config")
    attach(node.node(), 20)
    node.released = True
    assert attach(node.node(), 20) == f"kubelet is attached already, and uses {OURS}"
    assert not node.released
    assert node.reported == ["containers are placed again: the release of the last detach is undone"]


def test_a_detach_that_fails_after_the_release_names_the_way_back(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = fake("instance-config")
    attach(node.node(), 20)

    def denied(*_: object) -> None:
        raise CannotCreateError("cannot restore the file: Read-only file system")

    monkeypatch.setattr(journals, "restore", denied)
    for release in (True, False):
        with pytest.raises(CannotCreateError, match="Read-only file system") as error:
            detach(node.node(), 20, force=False, release=release)
        assert ("topoproxy release --undo" in str(error.value)) is release


def test_a_detach_killed_before_the_time_of_a_file_is_set_restores_it_when_repeated(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = fake("instance-config")
    before = node.hashes()
    attach(node.node(), 20)
    with monkeypatch.context() as patch:

        def killed(*_: object, **__: object) -> None:
            raise Killed

        patch.setattr(os, "utime", killed)
        with pytest.raises(Killed):
            detach(node.node(), 20, force=False, release=False)
    detach(node.node(), 20, force=False, release=False)
    nothing_is_left(node, before)


def test_a_failed_attach_keeps_the_exit_code_of_its_cause(fake: Fake) -> None:
    node = fake("instance-config")
    before = node.hashes()
    full = "cannot write it: No space left on device"
    node.raise_after = {"file 1": CannotCreateError(full)}
    with pytest.raises(CannotCreateError, match=f"^{full}; {ROLLED_BACK}: kubelet uses"):
        attach(node.node(), 20)
    nothing_is_left(node, before)
    denied = PermissionDeniedError("cannot query the daemon")
    node.raise_after = {"file 1": CannotCreateError(full), "restored": denied}
    with pytest.raises(PermissionDeniedError, match=f"^{full}; undoing it failed: cannot query the daemon; "):
        attach(node.node(), 20)
    attach(node.node(), 20)
    (node.root / CONFIG).write_text(LAYOUTS["instance-config"][CONFIG])
    node.raise_after = {"started": CannotCreateError(full)}
    with pytest.raises(CannotCreateError, match=f"^{full}; no file was changed"):
        attach(node.node(), 20)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EROFS, CannotCreateError), (errno.EACCES, PermissionDeniedError)]
)
def test_a_rescue_script_that_cannot_be_installed_ends_an_attach(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TopoproxyError]
) -> None:
    node = fake("instance-config")
    before = node.hashes()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("proxy.atomic_write.write_file", refuse)
    with pytest.raises(kind, match=f"cannot install .*: {os.strerror(number)}$"):
        attach(node.node(), 20)
    assert node.hashes() == before


def test_only_calls_from_the_cgroup_of_kubelets_unit_count(fake: Fake) -> None:
    node = fake("unit")
    node.caller = 99
    (node.root / "proc/99").mkdir()
    for group, counts in (("crictl.scope", False), ("kubelet.service", True)):
        (node.root / "proc/99/cgroup").write_text(f"0::/system.slice/{group}\n")
        with (
            nullcontext() if counts else pytest.raises(TopoproxyError, match="no calls from kubelet arrived")
        ):
            attach(node.node(), 3)


def test_an_endpoint_that_an_upgrade_reset_is_repaired(fake: Fake) -> None:
    node = fake("instance-config")
    attach(node.node(), 20)
    config = node.root / CONFIG
    config.write_text(LAYOUTS["instance-config"][CONFIG].replace("110", "250"))
    reset = config.read_bytes()
    assert not node.uses_us()
    assert [str(change.path) for change in planned_changes(node.node())] == [f"/{CONFIG}"]
    assert attach(node.node(), 20).startswith("attached")
    assert node.uses_us()
    assert detach(node.node(), 20, force=False, release=True).startswith("detached")
    assert config.read_bytes() == reset
    instance = node.root / "var/lib/kubelet/instance-config.yaml"
    assert instance.read_text() == LAYOUTS["instance-config"]["var/lib/kubelet/instance-config.yaml"]


def attached_and_reset(fake: Fake) -> tuple[FakeNode, dict[str, tuple[object, ...]]]:
    """Return a node whose endpoint kubeadm has reset, and its files; kubelet still uses topoproxy."""
    node = fake("instance-config")
    attach(node.node(), 20)
    (node.root / CONFIG).write_text(f"{LAYOUTS['instance-config'][CONFIG]}# by kubeadm\n")
    files = node.hashes()
    (node.systemd / "log").unlink()
    return node, files


def kubelet_left_topoproxy_before_its_end(node: FakeNode) -> None:
    order = [line for line in node.log if line.startswith(("restart", "disable"))]
    stopped = "disable --now topoproxy.s"
    assert order[-1].startswith(stopped), order
    assert order[[line.startswith(stopped) for line in order].index(True) - 1] == "restart kubelet.service"
    assert sorted([*node.systemd.glob("on.*"), *node.systemd.glob("runs.*")]) == []
    assert list(node.state.iterdir()) == []


def test_a_repeated_attach_that_fails_before_it_changes_a_file_leaves_kubelet_and_topoproxy(
    fake: Fake,
) -> None:
    node, files = attached_and_reset(fake)
    journal = journals.load(node.state)

    def as_before() -> None:
        assert node.hashes() == files
        assert journals.load(node.state) == journal
        assert (node.state / RESCUE).exists()
        assert [line for line in node.log if line.startswith(("disable", "stop", "restart"))] == []

    unchanged = "no file was changed, and kubelet was not restarted"
    node.ready = False
    with pytest.raises(TopoproxyError, match=f"topoproxy is not ready: no socket; {unchanged}$"):
        attach(node.node(), 2)
    as_before()
    node.ready = True
    for end in (KeyboardInterrupt(), SystemExit(143), ZeroDivisionError("bug")):
        assert interrupted_at(node, {"started": end}) is end
        as_before()
    assert node.reported[:2] == [f"attach was interrupted: {unchanged}"] * 2
    assert node.reported[2:] == [f"attach failed with an internal error: {unchanged}"]
    assert attach(node.node(), 20).startswith("attached")


@pytest.mark.parametrize("way", ["detach", "attach", "rescue"])
@pytest.mark.parametrize(
    "step", ["enabled", "started", "changing", "file 1", "reloaded", "restarted", "attached", "restored"]
)
def test_a_repeated_attach_that_is_killed_is_undone_with_a_restart_of_kubelet(
    fake: Fake, step: str, way: str
) -> None:
    node, _ = attached_and_reset(fake)
    reset = (node.root / CONFIG).read_bytes()
    node.raise_after = {step: Killed()}
    node.calls = step != "restored"
    with pytest.raises(Killed):
        attach(node.node(), 2)
    node.raise_after, node.calls = {}, True
    if way == "attach":
        attach(node.node(), 20)
        assert node.uses_us()
    # Up to here the file is as kubeadm wrote it, and the journal is that of the first attach.
    force = way != "attach" and step in ("enabled", "started")
    if way == "rescue":
        done = rescue(node, *(["--force"] if force else []))
        assert (done.returncode, done.stderr) == (0, "")
    else:
        detach(node.node(), 20, force=force, release=True)
        assert node.released
    assert (node.root / CONFIG).read_bytes() == reset
    kubelet_left_topoproxy_before_its_end(node)


def test_a_repeated_attach_that_fails_later_undoes_the_earlier_one_too(fake: Fake) -> None:
    node, _ = attached_and_reset(fake)
    reset = (node.root / CONFIG).read_bytes()
    node.calls = False
    with pytest.raises(TopoproxyError) as error:
        attach(node.node(), 2)
    assert str(error.value).endswith(
        f"; all changes were rolled back, also those of the earlier attach: kubelet uses {RUNTIME};"
        " containers keep their cpusets (topoproxy release --offline)"
    )
    assert (node.root / CONFIG).read_bytes() == reset
    kubelet_left_topoproxy_before_its_end(node)


@pytest.mark.parametrize("endpoint", [OURS, OURS.removeprefix("unix://")])
def test_an_endpoint_of_topoproxy_that_no_attach_set_is_not_taken_for_the_runtime(
    fake: Fake, endpoint: str
) -> None:
    node = fake("instance-config")
    config = node.root / CONFIG
    config.write_text(config.read_text().replace(RUNTIME, endpoint))
    before = node.hashes()
    for action in (lambda: planned_changes(node.node()), lambda: attach(node.node(), 3)):
        with pytest.raises(TopoproxyError) as error:
            action()
        assert str(error.value) == (
            f"cannot attach kubelet: {config} names {endpoint}, and topoproxy attach did not set it;"
            f" {node.root}/var/lib/kubelet/instance-config.yaml names {RUNTIME}: set {OURS} there by hand,"
            " too"
        )
    assert node.hashes() == before
    assert not node.state.exists()
    assert node.log == []
    (node.root / "var/lib/kubelet/instance-config.yaml").unlink()
    if endpoint == OURS:
        assert attach(node.node(), 3).endswith("topoproxy attach did not set it: nothing is changed")
    else:
        with pytest.raises(TopoproxyError, match=r"did not set it: nothing is changed$"):
            attach(node.node(), 3)


def test_a_rollback_waits_as_long_as_the_unit_may_take_to_stop(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def recorded(arguments: list[str], limit: float) -> str:
        limits[arguments[0]] = limit
        return systemctl(arguments, limit)

    monkeypatch.setattr("proxy.attach.detach.systemctl", recorded)
    node = fake("unit")
    node.ready = False
    with pytest.raises(
        TopoproxyError, match="topoproxy is not ready: no socket; all changes were rolled back"
    ):
        attach(node.node(), 2)
    unit = (Path(__file__).parents[2] / "systemd/topoproxy.service").read_text()
    stops = re.search(r"(?m)^TimeoutStopSec=(\d+)$", unit)
    assert stops is not None
    assert limits == {"disable": limits["disable"]}
    assert limits["disable"] > int(stops[1])


@pytest.mark.parametrize("way", ["failure", "detach", "rescue", "kill"])
@pytest.mark.parametrize(
    "running", [["topoproxy.service"], ["topoproxy.service", "topoproxy.socket"]], ids=len
)
def test_a_unit_that_ran_before_is_disabled_and_not_stopped(fake: Fake, running: list[str], way: str) -> None:
    node = fake("unit")
    before = node.hashes()
    for unit in running:
        (node.systemd / f"runs.{unit}").touch()
    if way == "failure":
        node.ready = False
        with pytest.raises(TopoproxyError, match="topoproxy is not ready"):
            attach(node.node(), 2)
    elif way == "kill":
        node.raise_after = {"started": Killed()}
        with pytest.raises(Killed):
            attach(node.node(), 2)
        node.raise_after = {}
        assert rescue(node).returncode == 0
    else:
        attach(node.node(), 20)
        if way == "detach":
            detach(node.node(), 20, force=False, release=True)
        else:
            assert rescue(node).returncode == 0
    assert sorted(path.name for path in node.systemd.glob("runs.*")) == [f"runs.{unit}" for unit in running]
    for path in node.systemd.glob("runs.*"):
        path.unlink()
    nothing_is_left(node, before)


@pytest.mark.parametrize("way", ["failure", "detach", "rescue"])
def test_a_unit_that_was_enabled_and_did_not_run_is_stopped_and_stays_enabled(fake: Fake, way: str) -> None:
    node = fake("unit")
    before = node.hashes()
    for name in ("on.topoproxy.socket", "on.topoproxy.service", "runs.topoproxy.socket"):
        (node.systemd / name).touch()
    units = sorted(node.systemd.iterdir())
    if way == "failure":
        node.calls = False
        with pytest.raises(TopoproxyError, match="no calls from kubelet arrived"):
            attach(node.node(), 2)
    else:
        attach(node.node(), 20)
        assert (node.systemd / "runs.topoproxy.service").exists()
        (node.root / CHANGED["unit"][0].lstrip("/")).unlink()
        attach(node.node(), 20)  # a repeated attach keeps the state of the units before the first one
        if way == "detach":
            detach(node.node(), 20, force=False, release=True)
        else:
            assert rescue(node).returncode == 0
    (node.systemd / "log").unlink()
    assert sorted(node.systemd.iterdir()) == units
    for unit in units:
        unit.unlink()
    nothing_is_left(node, before)


def test_a_journal_of_an_earlier_version_stops_the_units_that_the_attach_enabled(fake: Fake) -> None:
    node = fake("unit")
    before = node.hashes()
    for way in ("detach", "rescue"):
        attach(node.node(), 20)
        (node.state / "attach/running").unlink()
        (node.state / "attach/started").unlink()
        if way == "detach":
            detach(node.node(), 20, force=False, release=True)
        else:
            assert rescue(node).returncode == 0
        nothing_is_left(node, before)


@pytest.mark.parametrize("way", ["detach", "rescue"])
def test_a_removal_of_the_journal_that_was_cut_off_hinders_no_detach(fake: Fake, way: str) -> None:
    node = fake("config-file")
    before = node.hashes()
    attach(node.node(), 20)
    shutil.copytree(node.state / "attach", node.state / "attach.gone")
    if way == "detach":
        detach(node.node(), 20, force=False, release=False)
    else:
        assert rescue(node).returncode == 0
    nothing_is_left(node, before)


def test_a_journal_that_cannot_be_removed_is_reported(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    node = fake("config-file")
    attach(node.node(), 20)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if target.name == "attach.gone":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(
        CannotCreateError, match=r"cannot remove the journal of the attach in .*: Input/output"
    ):
        detach(node.node(), 20, force=False, release=False)
    assert journals.load(node.state) is not None


@pytest.mark.parametrize("way", ["detach", "rescue"])
def test_a_file_that_another_program_changed_needs_force(fake: Fake, way: str) -> None:
    node = fake("config-file")
    attach(node.node(), 20)
    file = node.root / "etc/kubelet.json"
    file.write_text(file.read_text().replace("{", '{"maxPods": 7,', 1))
    wanted = file.read_text().replace(OURS, RUNTIME)
    if way == "detach":
        with pytest.raises(
            TopoproxyError, match=r"another program changed /etc/kubelet.json since the attach"
        ):
            detach(node.node(), 20, force=False, release=True)
        assert not node.released, "nothing is changed before the error"
        detach(node.node(), 20, force=True, release=True)
    else:
        done = rescue(node)
        assert done.returncode == 1
        assert "another program changed /etc/kubelet.json since the attach" in done.stderr
        assert rescue(node, "--force").returncode == 0
    assert file.read_text() == wanted
    assert list(node.state.iterdir()) == []


def test_an_endpoint_that_kubeadm_carried_to_another_file_is_found(fake: Fake) -> None:
    node = fake("kubeadm-flags")
    attach(node.node(), 20)
    (node.root / "var/lib/kubelet/kubeadm-flags.env").write_text('KUBELET_KUBEADM_ARGS="--v=2"\n')
    (node.root / "var/lib/kubelet/instance-config.yaml").write_text(f'containerRuntimeEndpoint: "{OURS}"\n')
    (node.root / CONFIG).write_text(f"containerRuntimeEndpoint: {OURS}\n")
    with pytest.raises(TopoproxyError, match=r"kubeadm-flags.env, .*config.yaml"):
        detach(node.node(), 20, force=False, release=True)
    detach(node.node(), 20, force=True, release=True)
    assert (node.root / CONFIG).read_text() == f"containerRuntimeEndpoint: {RUNTIME}\n"
    effective = node.node().files().effective
    assert effective is not None
    assert effective.text == RUNTIME


def test_a_journal_that_this_user_may_not_read_is_reported(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(PermissionDeniedError, match="cannot read the journal of the attach in"):
            journals.load(state)
    finally:
        os.seteuid(user)


def test_a_file_that_an_attach_changed_and_this_user_may_not_read_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    change = FileChange(Path("/etc/kubelet.yaml"), b"", b"")
    journal = journals.AttachJournal(journals.ATTACHED, "u", OURS, RUNTIME, (), (change,))
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(PermissionDeniedError, match=r"cannot read /etc/kubelet\.yaml: Permission denied"):
        journals.files_changed_by_others(journal, Path("/"))


@pytest.mark.parametrize("name", ["state", "unit", "complete", "1/path", "1/before", "1/sums", "1/after"])
@pytest.mark.parametrize("content", [b"\xff\x00garbage\n", None])
def test_a_damaged_journal_changes_nothing(fake: Fake, name: str, content: bytes | None) -> None:
    node = fake("kubeadm-flags")
    attach(node.node(), 20)
    file = node.state / "attach" / name
    file.unlink()
    if content is not None:
        if name == "complete":
            pytest.skip("its content has no meaning")
        file.write_bytes(content)
    before = node.hashes()
    if (name, content is None) != ("unit", False):
        with pytest.raises(InputError, match="cannot read the journal of the attach"):
            detach(node.node(), 20, force=False, release=True)
        with pytest.raises(InputError):
            attach(node.node(), 20)
    if name != "state":  # without a state the script restarts kubelet
        done = rescue(node)
        assert (done.returncode, "rescue-detach: cannot" in done.stderr) == (1, True), done
        assert node.hashes() == before


def test_the_script_needs_no_python(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = fake("unit")
    before = node.hashes()
    attach(node.node(), 20)
    few = tmp_path / "few"
    few.mkdir()
    for name in ("sh", "cat", "dirname", "sha256sum", "cp", "mv", "rm", "rmdir", "sed", "sync", "touch"):
        (few / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{few}")
    done = subprocess.run(
        [str(few / "sh"), str(node.state / RESCUE), "--root", str(node.root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": f"{tmp_path}/bin:{few}", "FAKE_SYSTEMD": os.environ["FAKE_SYSTEMD"]},
    )
    assert (done.returncode, done.stderr) == (0, "")
    nothing_is_left(node, before)


@pytest.mark.parametrize("way", ["detach", "rescue"])
@pytest.mark.parametrize("layout", DISTRIBUTIONS)
def test_kubelet_inside_a_distribution_is_attached_and_restored(fake: Fake, layout: str, way: str) -> None:
    node = fake(layout)
    unit, runtime = RESTARTED[layout]
    node.runtime = runtime.replace("${SNAP_COMMON}", "/var/snap/microk8s/common").removeprefix("unix://")
    before = node.hashes()
    (path,) = (node.root / name.lstrip("/") for name in CHANGED[layout])
    text = path.read_text() if path.exists() else ""
    assert attach(node.node(), 20) == f"attached: kubelet uses {OURS}, and its calls arrive"
    if layout == "microk8s":
        assert path.read_text() == text.replace(f"endpoint={MICROK8S_RUNTIME}", f"endpoint={OURS}")
    else:
        assert read_yaml(path.read_text()) == {"kubelet-arg+": [f"container-runtime-endpoint={OURS}"]}
        assert {path for path, facts in node.hashes().items() if facts and facts != before.get(path)} == {
            str(path)
        }
    assert attach(node.node(), 20).startswith("kubelet is attached already")
    if way == "rescue":
        assert rescue(node).returncode == 0
    else:
        assert detach(node.node(), 20, force=False, release=True) == f"detached: kubelet uses {runtime}"
    nothing_is_left(node, before)
    assert [line for line in node.log if line.startswith("restart")] == [f"restart {unit}"] * 2


def test_a_flag_removed_from_k3s_is_detected_and_set_again(fake: Fake) -> None:
    node = fake("k3s-server")
    node.runtime = EMBEDDED.removeprefix("unix://")
    before = node.hashes()
    attach(node.node(), 20)
    (path,) = (node.root / name.lstrip("/") for name in CHANGED["k3s-server"])
    path.unlink()
    found = attached_kubelet(node.state, node.root / "var/lib/kubelet", node.root)
    assert found is not None
    assert found.reset == f"no file names an endpoint, and kubelet's default is {EMBEDDED}"
    assert attach(node.node(), 20).startswith("attached: ")
    assert node.uses_us()
    detach(node.node(), 20, force=False, release=True)
    nothing_is_left(node, before)


def test_a_configuration_that_names_no_endpoint_gets_one(fake: Fake) -> None:
    node = fake("kubeadm-flags")
    (node.root / "var/lib/kubelet/kubeadm-flags.env").unlink()
    (node.root / CONFIG).write_text("kind: KubeletConfiguration\nmaxPods: 9")
    (change,) = planned_changes(node.node())
    assert change.after.endswith(f"maxPods: 9\ncontainerRuntimeEndpoint: {OURS}\n".encode())
    assert f"+containerRuntimeEndpoint: {OURS}\n" in change.diff()
    (node.root / CONFIG).unlink()
    with pytest.raises(TopoproxyError, match="no file names its runtime endpoint"):
        planned_changes(node.node())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{}: ""\n', '{}: "{}"\n'),
        ("maxPods: 9\n{}: '' # none\n", "maxPods: 9\n{}: '{}' # none\n"),
        ("{}:\nmaxPods: 9\n", "{}: {}\nmaxPods: 9\n"),
        ("{}: # none\nmaxPods: 9", "{}: {} # none\nmaxPods: 9"),
        ("maxPods: 9\r\n{}:\r\n", "maxPods: 9\r\n{}: {}\r\n"),
        ('"{}":   ', '"{}": {}   '),
        ('{{\n "maxPods": 9,\n "{}": ""\n}}', '{{\n "maxPods": 9,\n "{}": "{}"\n}}'),
        ('{{"{}":"", "maxPods": 9}}', '{{"{}":"{}", "maxPods": 9}}'),
        ("{{maxPods: 9, {}: }}", "{{maxPods: 9, {}: {} }}"),
        ("{}: null\nmaxPods: 9\n", '{}: "{}"\nmaxPods: 9\n'),
        ("maxPods: 9\n{}: ~ # none", 'maxPods: 9\n{}: "{}" # none'),
        ("{}: NULL\r\n", '{}: "{}"\r\n'),
        ('{{"{}":null}}', '{{"{}":"{}"}}'),
        ('{{"{}": null, "maxPods": 9}}', '{{"{}": "{}", "maxPods": 9}}'),
    ],
)
def test_an_empty_endpoint_is_replaced_where_it_is(fake: Fake, before: str, after: str) -> None:
    node = fake("kubeadm-flags")
    (node.root / "var/lib/kubelet/kubeadm-flags.env").unlink()
    key = "containerRuntimeEndpoint"
    (node.root / CONFIG).write_bytes(before.format(key).encode())
    (change,) = planned_changes(node.node())
    assert change.after.decode() == after.format(key, OURS)


def test_an_endpoint_on_the_line_after_its_key_is_not_written_twice(fake: Fake) -> None:
    node = fake("kubeadm-flags")
    (node.root / "var/lib/kubelet/kubeadm-flags.env").unlink()
    (node.root / CONFIG).write_text(f"containerRuntimeEndpoint:\n  {RUNTIME}\n")
    with pytest.raises(TopoproxyError, match="its containerRuntimeEndpoint is written in an unusual way"):
        planned_changes(node.node())


def test_the_last_flag_of_the_command_line_takes_effect(fake: Fake) -> None:
    node = fake("kubeadm-flags")
    (node.root / "etc/default").mkdir()
    extra = node.root / "etc/default/kubelet"
    extra.write_text("KUBELET_EXTRA_ARGS='--container_runtime_endpoint unix:///run/last.sock'\n")
    effective = node.node().files().effective
    assert effective is not None
    assert (effective.path, effective.text) == (extra, "unix:///run/last.sock")
    assert journals.load(node.state) is None


@pytest.mark.parametrize(
    ("state", "shown"),
    [("not-found", "not installed (not-found)"), ("", "not installed"), ("masked", "masked")],
)
def test_a_unit_that_cannot_be_enabled_is_named(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, state: str, shown: str
) -> None:
    monkeypatch.setattr("proxy.attach.service.enabled_state", lambda unit: state)
    with pytest.raises(TopoproxyError) as error:
        attach(fake("unit").node(), 3)
    assert f"topoproxy.socket is {shown}; after a reboot kubelet would have no runtime" in str(error.value)


def interrupted_at(node: FakeNode, steps: dict[str, BaseException]) -> BaseException:
    """Attach, and raise exceptions after steps; return the one with which it ends."""
    node.raise_after = steps
    with pytest.raises(BaseException) as caught:
        attach(node.node(), 20)
    return caught.value


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143), ZeroDivisionError("bug")], ids=repr)
@pytest.mark.parametrize("step", ["started", "file 1", "restarted"])
def test_an_interrupted_attach_is_rolled_back_with_a_message(
    fake: Fake, step: str, end: BaseException
) -> None:
    node = fake("instance-config")
    before = node.hashes()
    assert interrupted_at(node, {step: end}) is end
    nothing_is_left(node, before)
    cause = f"attach {'failed with an internal error' if isinstance(end, Exception) else 'was interrupted'}"
    assert node.reported == [
        f"{cause}: its changes are being rolled back",
        f"{cause}: all changes were rolled back: kubelet uses {RUNTIME}",
    ]


def test_a_rollback_that_is_interrupted_names_the_way_out(fake: Fake) -> None:
    node = fake("instance-config")
    before = node.hashes()
    second = KeyboardInterrupt()
    assert interrupted_at(node, {"restarted": KeyboardInterrupt(), "restored": second}) is second
    assert node.reported[-1] == (
        "attach was interrupted; its rollback is incomplete: topoproxy detach undoes the attach"
    )
    detach(node.node(), 20, force=False, release=False)
    nothing_is_left(node, before)
