"""The installer's script on an imitated node: its actions, their order, and what it undoes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import image
import pytest

from tests.deploy.leases import Leases
from tests.testkit.waiting import wait_until

FILES = Path(__file__).parents[2] / "deploy/helm/topoproxy/files"
PROGRAM = r"""#!/bin/sh
# Programs of the node: what they are asked is recorded, and files below $NODE say what they answer.
name=${0##*/}
echo "$name $*" >>"$NODE/calls"
for fault in "$NODE"/faults/*; do
    [ -e "$fault" ] || continue
    read -r code text <"$fault"
    case "$name $*" in *"$text"*) rm "$fault"; exit "$code" ;; esac
done
case "$name $*" in
"dpkg-query"*) [ -e "$NODE/installed" ] && echo "install ok installed" || exit 1 ;;
"dpkg --force-downgrade --install "*)
    shift 2; cp "$1" "$NODE/installed"
    [ -e "$NODE/pid" ] && [ ! -e "$NODE/not-replaced" ] && echo "1$(cat "$NODE/pid")" >"$NODE/pid" || : ;;
"systemctl show "*) cat "$NODE/pid" 2>/dev/null || echo 0 ;;
"dpkg --purge topoproxy") rm -f "$NODE/installed" ;;
"rpm --quiet -q topoproxy") [ -e "$NODE/installed" ] || exit 1 ;;
"rpm --upgrade --oldpackage --replacepkgs "*) cp "$4" "$NODE/installed" ;;
"rpm --erase topoproxy") rm -f "$NODE/installed" ;;
"uname -m") echo x86_64 ;;
"topoproxy reload --json")
    cat "$NODE/reload" ;;
"topoproxy attach"*)
    while [ -e "$NODE/attach-waits" ]; do sleep 0.05; done
    mkdir -p "$NODE/root$STATE/attach"
    echo attached >"$NODE/root$STATE/attach/state"
    [ -e "$NODE/pid" ] || echo 7 >"$NODE/pid" ;;
"topoproxy upgrade --now") echo "2$(cat "$NODE/pid")" >"$NODE/pid"; echo '{"restart": []}' >"$NODE/reload" ;;
"topoproxy detach --yes") rm -r "$NODE/root$STATE/attach" ;;
esac
"""
HOST = r"""#!/bin/sh
# Run a command as if on the node: its absolute paths are below $NODE/root.
PATH=$NODE_PATH
for word; do
    shift
    case $word in
    /var/lib/topoproxy* | /etc/topoproxy* | /data*) word=$NODE/root$word ;;
    esac
    set -- "$@" "$word"
done
exec "$@"
"""


class Node:
    """An imitated node, and the image's programs for the script."""

    def __init__(self, directory: Path, api: str, busybox: str = "") -> None:
        self.directory = directory
        self.api = api
        self.state = "/var/lib/topoproxy"
        for name in ("bin", "faults", "image", "packages", "scripts", "root"):
            (directory / name).mkdir()
        for name in image.APPLETS:
            if program := busybox or shutil.which(name):
                (directory / "image" / name).symlink_to(program)
        self.scripts = list[subprocess.Popen[str]]()
        self.running()
        for name in ("dpkg", "dpkg-query", "uname", "topoproxy", "systemctl"):
            (directory / "bin" / name).write_text(PROGRAM)
            (directory / "bin" / name).chmod(0o755)
        (directory / "host").write_text(HOST)
        (directory / "host").chmod(0o755)
        (directory / "scripts/turn.py").write_bytes((FILES / "turn.py").read_bytes())
        self.package("one")
        self.configure("mode: observe\n")

    def package(self, content: str) -> None:
        (self.directory / "packages/topoproxy_0.1.0_amd64.deb").write_text(content)

    def configure(self, text: str) -> None:
        (self.directory / "scripts/config.yaml").write_text(text)

    def fault(self, text: str, code: int = 1) -> None:
        faults = self.directory / "faults"
        (faults / str(len(list(faults.iterdir())))).write_text(f"{code} {text}\n")

    def running(self, *restart: str) -> None:
        """Let a reload report these keys as ones that need a restart."""
        rows = [{"key": key, "before": "1", "after": "2"} for key in restart]
        page = {"schema": "topoproxy-reload/1", "restart": rows, "reload": {}}
        (self.directory / "reload").write_text(json.dumps(page, indent=1) + "\n")

    def start(self, state: str, **changed: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.directory}/image",
            "NODE_PATH": f"{self.directory}/bin:{os.environ['PATH']}",
            "NODE": str(self.directory),
            "STATE": self.state,
            "HOST": str(self.directory / "host"),
            "PACKAGES": str(self.directory / "packages"),
            "SCRIPTS": str(self.directory / "scripts"),
            "READY": str(self.directory / "ready"),
            "PYTHON": sys.executable,
            "NODE_NAME": "node-a",
            "TURN": "kube-system/turn",
            "TURN_SECONDS": "900",
            "TURN_API": self.api,
            "TURN_POLL": "0.05",
            "ATTACH_TIMEOUT": "30",
            "ONCE": "yes",
            **changed,
        }
        (self.directory / "calls").write_text("")
        script = subprocess.Popen(
            [self.directory / "image/sh", FILES / "node.sh", state],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.scripts.append(script)
        return script

    def run(self, state: str) -> tuple[int, str]:
        return end(self.start(state))

    @property
    def calls(self) -> list[str]:
        """Return the commands that changed something, without queries."""
        lines = (self.directory / "calls").read_text().replace(str(self.directory), "").splitlines()
        return [line for line in lines if not line.startswith(("dpkg-query", "uname", "systemctl show"))]

    @property
    def installed(self) -> str:
        path = self.directory / "installed"
        return path.read_text() if path.exists() else ""

    @property
    def attached(self) -> bool:
        return (self.directory / f"root{self.state}/attach").exists()

    @property
    def drop_in(self) -> str:
        path = self.directory / "root/etc/topoproxy/config.d/90-helm.yaml"
        return path.read_text() if path.exists() else ""


def end(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str]:
    """Return exit code and output; the output ends when no process of the script is left."""
    reported, _ = process.communicate(timeout=timeout)
    return process.returncode, reported


@pytest.fixture
def leases() -> Iterator[Leases]:
    made = Leases()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.answers.set()
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture(params=["sh", "busybox"])
def node(request: pytest.FixtureRequest, tmp_path: Path, leases: Leases) -> Iterator[Node]:
    busybox = shutil.which("busybox")
    if request.param == "busybox" and busybox is None:
        pytest.skip("there is no busybox")
    api = f"http://127.0.0.1:{leases.server.server_port}"
    made = Node(tmp_path, api, busybox or "" if request.param == "busybox" else "")
    yield made
    for script in made.scripts:
        with script:
            script.kill()


INSTALL = "dpkg --force-downgrade --install /root/var/lib/topoproxy-installer/next.deb"
BACK = "dpkg --force-downgrade --install /root/var/lib/topoproxy-installer/current.deb"


def test_a_node_is_installed_and_attached_and_the_lease_released(node: Node, leases: Leases) -> None:
    code, reported = node.run("attached")
    assert code == 0, reported
    assert node.calls == [
        INSTALL,
        "topoproxy check-config",
        "topoproxy attach --yes --timeout 30",
        "topoproxy status --wait-ready=30s",
    ]
    assert (node.installed, node.attached, node.drop_in) == ("one", True, "mode: observe\n")
    assert leases.holder == ""
    assert (node.directory / "ready").exists()
    assert reported.splitlines() == ["node node-a: is attached"], "the image has each program"


def test_a_second_run_changes_nothing(node: Node) -> None:
    node.run("attached")
    assert node.run("attached")[0] == 0
    assert node.calls == [
        "topoproxy check-config",
        "topoproxy reload --json",
        "topoproxy attach --yes --timeout 30",
        "topoproxy status --wait-ready=30s",
    ]


def test_an_update_installs_the_next_package(node: Node) -> None:
    node.run("attached")
    node.package("two")
    assert node.run("attached")[0] == 0
    assert node.calls[0] == INSTALL
    assert node.calls.index("topoproxy reload --json") < node.calls.index(
        "topoproxy attach --yes --timeout 30"
    )
    assert node.installed == "two"


@pytest.mark.parametrize("stored", ["", "2733410413 3"])
def test_a_package_without_a_known_sum_is_installed_again(node: Node, stored: str) -> None:
    """Earlier installers stored nothing, or the answer of cksum."""
    node.run("attached")
    file = node.directory / "root/var/lib/topoproxy-installer/sum"
    file.write_text(f"{stored}\n")
    assert node.run("attached")[0] == 0
    assert node.calls[0] == INSTALL
    assert len(file.read_text().split()[0]) == 64


def test_settings_that_need_a_restart_replace_the_daemon(node: Node) -> None:
    node.run("attached")
    node.running("callTimeout", "stateDir")
    code, reported = node.run("attached")
    assert code == 0
    assert node.calls[1:] == [
        "topoproxy reload --json",
        "topoproxy upgrade --now",
        "topoproxy attach --yes --timeout 30",
        "topoproxy status --wait-ready=30s",
    ]
    assert "settings need a restart" in reported


@pytest.mark.parametrize("state", ["attached", "installed"])
@pytest.mark.parametrize("code", [0, 1, 69])
def test_a_daemon_that_the_package_did_not_replace_is_no_success(node: Node, state: str, code: int) -> None:
    """The package's script tries it, and dpkg ends with 0 anyway; the daemon accepts the configuration."""
    node.run("attached")
    node.package("two")
    (node.directory / "not-replaced").touch()
    if code:
        node.fault("upgrade --now", code)
    failed = code == 1
    ended, reported = node.run(state)
    assert ended == failed
    assert "the package has not replaced the daemon" in reported
    assert ("replacing the daemon failed, the node is reverted" in reported) == failed
    assert (node.installed, node.attached) == ("one" if failed else "two", True)
    assert node.calls.count("topoproxy upgrade --now") == 1
    assert ("systemctl restart topoproxy.service" in node.calls) == (code == 69)
    assert (node.directory / "ready").exists() != failed


def test_a_daemon_that_the_package_replaced_is_not_replaced_again(node: Node) -> None:
    node.run("attached")
    node.package("two")
    assert node.run("attached")[0] == 0
    assert "topoproxy upgrade --now" not in node.calls


def test_a_reload_that_is_refused_replaces_the_daemon(node: Node) -> None:
    """The new values may fit only together with those that need a restart."""
    node.run("attached")
    node.fault("reload --json", 78)
    assert node.run("attached")[0] == 0
    assert node.calls[1:3] == ["topoproxy reload --json", "topoproxy upgrade --now"]


def test_a_daemon_that_does_not_answer_is_restarted_with_the_new_settings(node: Node) -> None:
    """The daemon may have ended because of the former settings, to which a revert would return."""
    node.run("attached")
    node.configure("callTimeout: 3s\n")
    node.fault("reload --json", 69)
    code, reported = node.run("attached")
    assert code == 0
    assert "the daemon does not answer, it is restarted" in reported
    assert node.drop_in == "callTimeout: 3s\n"
    assert node.calls[1:3] == ["topoproxy reload --json", "systemctl restart topoproxy.service"]


def test_a_daemon_that_does_not_start_again_is_restarted_with_the_settings_before(node: Node) -> None:
    node.run("attached")
    node.configure("callTimeout: 3s\n")
    for _ in range(2):
        node.fault("reload --json", 69)
    node.fault("systemctl restart")
    assert node.run("attached")[0] == 1
    assert (node.attached, node.drop_in) == (True, "mode: observe\n")
    restarts = ["topoproxy reload --json", "systemctl restart topoproxy.service"]
    assert node.calls[1:] == [*restarts, *restarts]


def test_a_daemon_that_cannot_be_replaced_is_restarted(node: Node) -> None:
    node.run("attached")
    node.running("callTimeout")
    node.fault("upgrade --now", 69)
    assert node.run("attached")[0] == 0
    assert node.calls[2:4] == ["topoproxy upgrade --now", "systemctl restart topoproxy.service"]


@pytest.mark.parametrize(
    "step", ["upgrade --now", "systemctl restart", "attach --yes", "status --wait-ready"]
)
def test_a_failure_after_a_reload_restores_settings_that_need_a_restart(node: Node, step: str) -> None:
    node.run("attached")
    node.configure("callTimeout: 3s\n")
    node.running("callTimeout")
    if step == "systemctl restart":
        node.fault("upgrade --now", 69)
    node.fault(step)
    assert node.run("attached")[0] == 1
    assert (node.attached, node.drop_in) == (True, "mode: observe\n")
    reloads = [index for index, call in enumerate(node.calls) if call == "topoproxy reload --json"]
    assert len(reloads) == 2
    assert reloads[1] > node.calls.index("topoproxy upgrade --now")
    # The stand-in reports that a restart is needed until the daemon was replaced.
    replaced = step not in ("upgrade --now", "systemctl restart")
    assert node.calls[reloads[1] + 1 :] == ([] if replaced else ["topoproxy upgrade --now"])


@pytest.mark.parametrize("step", ["--install", "check-config", "attach --yes", "status --wait-ready"])
def test_a_failed_first_installation_leaves_nothing_and_keeps_the_lease(
    node: Node, leases: Leases, step: str
) -> None:
    node.fault(step)
    code, reported = node.run("attached")
    assert code == 1
    assert "the node is reverted" in reported
    assert (node.installed, node.attached, node.drop_in) == ("", False, "")
    assert leases.holder == "node-a"
    assert not (node.directory / "ready").exists()
    assert node.run("attached")[0] == 0, "the next attempt succeeds"
    assert (node.installed, node.attached, leases.holder) == ("one", True, "")


@pytest.mark.parametrize(
    "step", ["--install", "check-config", "reload", "attach --yes", "status --wait-ready"]
)
def test_a_failed_update_restores_the_package_and_the_configuration(node: Node, step: str) -> None:
    node.run("attached")
    node.package("two")
    node.configure("mode: enforce\n")
    node.fault(step)
    assert node.run("attached")[0] == 1
    assert BACK in node.calls
    assert (node.installed, node.attached, node.drop_in) == ("one", True, "mode: observe\n")


def test_a_failure_does_not_purge_a_package_that_another_program_installed(node: Node) -> None:
    (node.directory / "installed").write_text("theirs")
    node.fault("check-config")
    code, reported = node.run("attached")
    assert code == 1
    assert "there is no copy of the package before: the new one stays" in reported
    assert "dpkg --purge topoproxy" not in node.calls
    assert (node.installed, node.attached, node.drop_in) == ("one", False, "")


def test_installed_attaches_nothing(node: Node) -> None:
    assert node.run("installed")[0] == 0
    assert (node.installed, node.attached) == ("one", False)


def test_absent_detaches_before_it_purges(node: Node, leases: Leases) -> None:
    node.run("attached")
    assert node.run("absent")[0] == 0
    assert node.calls == ["topoproxy detach --yes", "dpkg --purge topoproxy"]
    assert not (node.directory / "root/var/lib/topoproxy-installer").exists()
    assert node.run("absent")[0] == 0
    assert node.calls == []
    assert leases.holder == ""


@pytest.mark.parametrize("by_chart", [True, False])
def test_a_state_directory_elsewhere_is_found(node: Node, by_chart: bool) -> None:
    node.state = "/data/topo"
    if by_chart:
        node.configure('stateDir: "/data/topo" # on the fast disk\n')
    else:
        (node.directory / "root/etc/topoproxy").mkdir(parents=True)
        file = node.directory / "root/etc/topoproxy/config.yaml"
        file.write_text("mode: observe\nstateDir: /data/topo\n")
    assert node.run("attached")[0] == 0
    assert node.run("attached")[0] == 0
    assert "topoproxy reload --json" in node.calls, "the script knows that the node is attached"
    assert node.run("absent")[0] == 0
    assert node.calls == ["topoproxy detach --yes", "dpkg --purge topoproxy"]


# What the script and the imitations call on a node.
PROGRAMS = ("sh", "cat", "cp", "dirname", "ls", "mkdir", "mv", "rm", "sed", "sleep", "test")


def without_dpkg(node: Node) -> str:
    """Turn the node into one with rpm; return its PATH."""
    directory = node.directory / "bin"
    (directory / "dpkg").rename(directory / "rpm")
    for name in PROGRAMS:
        (directory / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    (node.directory / "packages/topoproxy-0.1.0-1.x86_64.rpm").write_text("one")
    return str(directory)


@pytest.mark.parametrize(("left", "code"), [("", 0), ("ledger.jsonl", 1)])
def test_absent_succeeds_with_rpm_if_the_state_directory_is_a_mount_point(
    node: Node, left: str, code: int
) -> None:
    """The kernel refuses to remove a mount point: rm empties it and fails. Files that stay are a failure."""
    path = without_dpkg(node)
    assert end(node.start("installed", NODE_PATH=path))[0] == 0
    state = node.directory / "root/var/lib/topoproxy"
    state.mkdir(parents=True)
    if left:
        (state / left).touch()
    program = node.directory / "bin/rm"
    program.unlink()
    program.write_text(f'#!/bin/sh\ncase "$*" in *"{state}") exit 1 ;; esac\nexec /bin/rm "$@"\n')
    program.chmod(0o755)
    assert end(node.start("absent", NODE_PATH=path))[0] == code
    assert (node.installed, state.exists()) == ("", True)
    assert not (node.directory / "root/etc/topoproxy").exists()


def test_absent_that_cannot_detach_purges_nothing(node: Node) -> None:
    node.run("attached")
    node.fault("detach --yes")
    assert node.run("absent")[0] == 1
    assert node.calls == ["topoproxy detach --yes"]
    assert node.installed == "one"


def test_a_node_waits_for_the_lease(node: Node, leases: Leases) -> None:
    leases.hold("node-b", 10)
    leases.free_after = 3
    code, reported = node.run("installed")
    assert code == 0
    assert "waits: node node-b is being changed" in reported
    assert reported.count("waits") == 1


def test_a_holder_that_does_not_renew_loses_the_lease_and_a_conflict_is_retried(
    node: Node, leases: Leases
) -> None:
    leases.hold("node-b", 0, lasts_s=1)
    leases.conflicts = 2
    assert node.run("installed")[0] == 0
    assert leases.holder == ""


def test_a_clock_that_is_ahead_takes_no_turn(node: Node, leases: Leases) -> None:
    leases.hold("node-b", 1000)
    leases.free_after = 3
    code, reported = node.run("installed")
    assert code == 0
    assert "waits: node node-b is being changed" in reported


def test_an_answer_without_its_end_is_no_answer(node: Node, leases: Leases) -> None:
    leases.hold("", 0)
    leases.cut_off = 2
    code, reported = node.run("installed")
    assert code == 0
    assert "waits: the API server does not answer" in reported
    assert leases.holder == ""


def test_a_state_that_does_not_exist_is_refused(node: Node) -> None:
    assert node.run("here")[0] == 2
    assert node.installed == ""


def test_the_lease_is_renewed_while_the_node_is_changed(node: Node, leases: Leases) -> None:
    (node.directory / "attach-waits").touch()
    script = node.start("attached", TURN_SECONDS="1")
    try:
        wait_until(lambda: any("attach" in call for call in node.calls), 30)
        before = leases.lease["spec"]["renewTime"]
        wait_until(lambda: leases.lease["spec"]["renewTime"] > before, 30)
    finally:
        (node.directory / "attach-waits").unlink()
        code, reported = end(script)
    assert code == 0, reported
    assert leases.holder == ""


def test_a_failure_ends_the_renewals(node: Node, leases: Leases) -> None:
    node.fault("check-config")
    assert end(node.start("attached"), timeout=30)[0] == 1, "its output has ended: no process is left"
    assert leases.holder == "node-a"


def test_a_node_that_waits_for_its_turn_ends_at_a_signal(node: Node, leases: Leases) -> None:
    leases.hold("node-b", 10)
    script = node.start("attached", TURN_POLL="600")
    assert script.stdout is not None
    assert "waits: node node-b" in script.stdout.readline()
    script.send_signal(signal.SIGTERM)
    code, reported = end(script, timeout=30)
    assert code == 143
    assert "received a signal to stop" in reported
    assert (leases.holder, node.calls) == ("node-b", [])


def test_a_turn_that_is_taken_during_a_signal_is_released(node: Node, leases: Leases) -> None:
    leases.answers.clear()
    script = node.start("attached")
    assert leases.stored.wait(30)
    assert leases.holder == "node-a"
    script.send_signal(signal.SIGTERM)
    wait_until(lambda: leases.holder == "", 30)
    leases.answers.set()
    code, reported = end(script, timeout=30)
    assert code == 143, reported
    assert node.calls == []


def test_an_installer_that_is_done_ends_at_a_signal(node: Node) -> None:
    script = node.start("installed", ONCE="no")
    wait_until((node.directory / "ready").exists, 30)
    script.send_signal(signal.SIGTERM)
    assert end(script, timeout=30)[0] == 143, "no process is left"


@pytest.mark.parametrize("node", ["sh"], indirect=True)  # busybox runs its own sleep
def test_an_installer_ends_if_its_child_misses_the_signal(node: Node) -> None:
    sleep = node.directory / "image/sleep"
    sleep.unlink()
    sleep.write_text(
        f"#!{sys.executable}\nimport pathlib, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(node.directory / 'sleeps')!r}).touch()\nwhile True: signal.pause()\n"
    )
    sleep.chmod(0o755)
    script = node.start("installed", ONCE="no")
    wait_until((node.directory / "sleeps").exists, 30)
    script.send_signal(signal.SIGTERM)
    assert end(script, timeout=30)[0] == 143


def test_renewals_end_with_the_script(node: Node, leases: Leases) -> None:
    (node.directory / "attach-waits").touch()
    script = node.start("attached", TURN_SECONDS="1")
    try:
        wait_until(lambda: any("attach" in call for call in node.calls), 30)
    finally:
        script.kill()
        (node.directory / "attach-waits").unlink()
        end(script, timeout=30)
    assert leases.holder == "node-a"
