"""The demonstration on the imitated node, and its failure if CPU sets are wrong."""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli.demo import demo
from proxy.demo.client import CriClient
from proxy.demo.demonstration import DemoOptions, _program, run_demonstration
from proxy.demo.environment import DemoEnvironment, standin_environment
from proxy.demo.runtime import StandInRuntime
from proxy.demo.scenario import Scenario, ScenarioCpus
from proxy.demo.snapshot import DemoError
from proxy.demo.step_runner import StepRunner
from proxy.demo.terminal import Screen
from proxy.model.errors import TopoproxyError, UnavailableError
from proxy.topology.regular_machine import regular_machine


def test_the_program_is_named_as_it_can_be_typed(tmp_path, monkeypatch):
    program = tmp_path / "bin/topoproxy"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    assert _program() == "bin/topoproxy"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert _program() == str(program)
    (tmp_path / "gone").rmdir()
    assert _program() == str(program), "the current directory was removed"


@pytest.mark.parametrize("version", [1, 2])
def test_the_demonstration_succeeds(version):
    out = io.StringIO()
    assert run_demonstration(Screen(out, width=80), DemoOptions(cgroup_version=version)), out.getvalue()
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for word in (
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "kill -9",
        "no space left on device",
        "That was it",
        "topoproxy simulate --help",
        "topoproxy explain POD",
    ):
        assert word in text


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_remains_whichever_signal_ends_it(end):
    """A closed terminal sends SIGHUP; the proxy has its own session and would not receive it."""
    running = subprocess.Popen(
        [sys.executable, "-m", "proxy", "demo", "--pause", "60", "--keep"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # If a shell runs the tests in the background, they and their children ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    reported = ""
    while "Read back from 2 cgroups" not in reported:  # the proxy runs
        reported += running.stdout.readline()
    running.send_signal(end)
    rest, _ = running.communicate(timeout=60)
    directory = Path((reported + rest).split("files are left in ")[1].split()[0])
    try:
        assert running.returncode in (128 + end, 130)
        assert not (directory / "cri.sock").exists()  # the proxy was ended as by systemd, and not abandoned
    finally:
        shutil.rmtree(directory)


def test_titles_are_folded():
    out, title = io.StringIO(), "Pods without a label: api (Burstable) and logs (BestEffort)"
    Screen(out, width=60).title(5, title)
    assert max(map(len, out.getvalue().splitlines())) == 60
    assert [word for word in out.getvalue().split() if word.strip("=")] == ["5", *title.split()]


def test_the_demonstration_runs_on_two_cpus(tmp_path):
    out = io.StringIO()
    with standin_environment(tmp_path, regular_machine(1, 1, 1, 2, sibling_offset=False)) as environment:
        runner = StepRunner(environment, Screen(out, width=80))
        for step in Scenario(runner).steps():
            runner.run_step(step)
    assert "trading (LSE) takes CPU 1" in out.getvalue()


def test_the_command_keeps_its_files_and_prints_no_escapes():
    done = CliRunner().invoke(demo, ["--fast", "--width", "100", "--keep"])
    assert done.exit_code == 0, done.output
    assert "\x1b[" not in done.output
    directory = Path(done.output.split("files are left in ")[1].split()[0])
    assert (directory / "config.yaml").is_file()
    assert (directory / "cgroup/kubepods").is_dir()


class NoProxy:
    """A missing proxy: the client calls the runtime directly."""

    pid = 0
    log = Path("/dev/null")


class Unjudged(DemoEnvironment):
    def status(self):
        rows = [
            {"ref": f"demo/{one.name}/main", "cpus": str(one.cpus), "phase": "running", "reason": ""}
            for one in self.snapshot().containers
        ]
        return {"containers": rows, "violations": [], "exclusive": [], "ready": True}


def unplaced(cgroups, runtime: StandInRuntime, client: CriClient, *, seen=True):
    machine = regular_machine(2, 1, 2, 2, sibling_offset=False)
    environment = Unjudged("", machine, cgroups, NoProxy(), client, runtime.fail_next_create)

    def watch(_):
        environment.snapshot_at_create = environment.snapshot()

    if seen:
        runtime.before("CreateContainer", watch)
    return StepRunner(environment, Screen(io.StringIO(), width=80))


@pytest.mark.parametrize(
    ("seen", "message"), [(True, "web was still on CPUs 0-7 when the create"), (False, "which trading owns")]
)
def test_the_demonstration_fails_without_the_proxy(cgroups, runtime, client, seen, message):
    runner = unplaced(cgroups, runtime, client, seen=seen)
    first, second, *_ = Scenario(runner).steps()
    runner.run_step(first)  # a runtime by itself gives all CPUs to every container
    with pytest.raises(DemoError, match=message):
        runner.run_step(second)


def test_violations_are_detected_without_the_proxy(cgroups, runtime, client):
    for at in ("cannot be placed", "the runtime fails"):
        runner = unplaced(cgroups, runtime, client)
        first, *rest = Scenario(runner).steps()
        runner.run_step(first)
        with pytest.raises((DemoError, TopoproxyError)):
            runner.run_step(next(step for step in rest if at in step.title))
        for pod in runner.environment.pods:
            client.end_pod(pod)


def test_the_parts_of_machines():
    big = ScenarioCpus.of(regular_machine(2, 1, 4, 2, sibling_offset=False))
    assert (str(big.lse), str(big.lsr), str(big.failed), big.count, big.fits_all) == (
        "2-3",
        "4-5",
        "14-15",
        4,
        True,
    )
    small = ScenarioCpus.of(regular_machine(1, 1, 2, 1))
    assert (str(small.lse), small.count, small.fits_all, str(small.absent)) == ("1", 1, False, "2-3")
    with pytest.raises(DemoError, match="at least two CPUs"):
        ScenarioCpus.of(regular_machine(1, 1, 1, 1))


def test_what_is_missing_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    options = DemoOptions("containerd", tmp_path / "no.sock")
    with pytest.raises(UnavailableError, match=r"not installed: containerd \(package containerd\), ctr"):
        run_demonstration(Screen(io.StringIO(), width=80), options)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(TopoproxyError, match="needs root"):
        run_demonstration(Screen(io.StringIO(), width=80), options)
