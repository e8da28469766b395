"""The script that CI runs: every failure is reported, and the summary of pytest comes last."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.testkit.waiting import wait_until

RUN = Path(__file__).parents[1] / ".ci/run"
MADE = """
lint: ; @echo clean; exit {lint}
e2e-tools vm-tools venv: ; @:
test: ; @echo of the tests; sleep {tests}; echo '= tests ='; exit {test}
test-vm:
	@echo of the scenarios; echo $$PPID >scenarios; sleep {takes}; echo '= scenarios ='; exit {scenarios}
coverage: ; @echo of its tests; echo $$PPID >measuring; sleep {measures}; echo 'package lines'; exit {test}
"""

pytestmark = pytest.mark.skipif(
    not RUN.is_file() or shutil.which("make") is None, reason="this needs make and a checkout"
)


def environment(limit: str = "50") -> dict[str, str]:
    # a nested make prints the directory that it enters, and make may run these tests
    ours = ("TOPOPROXY_INSTALL", "MAKELEVEL", "MFLAGS")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    return {**kept, "TOPOPROXY_VM_LIMIT": limit, "TOPOPROXY_COVERAGE_WAIT": "2", "MAKEFLAGS": ""}


def lay(
    directory: Path,
    *,
    lint: int = 0,
    test: int = 0,
    scenarios: int = 0,
    takes: float = 0,
    tests: float = 0,
    measures: float = 0,
) -> Path:
    """Copy the script into a directory with stand-ins for everything that it calls."""
    (directory / ".ci").mkdir()
    shutil.copy(RUN, directory / ".ci")
    made = MADE.format(lint=lint, test=test, scenarios=scenarios, takes=takes, tests=tests, measures=measures)
    (directory / "Makefile").write_text(made)
    return directory / ".ci/run"


def reported(
    directory: Path,
    *,
    lint: int = 0,
    test: int = 0,
    scenarios: int = 0,
    takes: float = 0,
    tests: float = 0.5,
    measures: float = 0,
    limit: str = "50",
) -> tuple[int, list[str]]:
    """Run the script to its end."""
    done = subprocess.run(
        [
            lay(
                directory,
                lint=lint,
                test=test,
                scenarios=scenarios,
                takes=takes,
                tests=tests,
                measures=measures,
            )
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the script redirects its errors to stdout
        text=True,
        timeout=60,
        check=False,
        env=environment(limit),
    )
    return done.returncode, done.stdout.splitlines()


def test_a_successful_run_prints_all_parts(tmp_path: Path) -> None:
    status, lines = reported(tmp_path, takes=0.3, tests=1)
    assert status == 0
    coverage = ["package lines"]
    assert lines == ["clean", "of the tests", *coverage, "of the scenarios", "= scenarios =", "= tests ="]


@pytest.mark.parametrize(
    ("test", "scenarios", "last"), [(1, 0, "= tests ="), (0, 1, "= scenarios ="), (1, 1, "= tests =")]
)
def test_a_failure_is_reported_last(tmp_path: Path, test: int, scenarios: int, last: str) -> None:
    status, lines = reported(tmp_path, test=test, scenarios=scenarios)
    assert status != 0
    assert lines[-1] == last
    assert {"of the tests", "of the scenarios", "= tests =", "= scenarios =", "package lines"} <= set(lines)


def test_scenarios_that_take_too_long_are_ended(tmp_path: Path) -> None:
    status, lines = reported(tmp_path, takes=40, limit="1")
    assert status != 0
    assert "the scenarios in virtual machines took too long, and were ended" in lines


def test_coverage_does_not_make_the_check_longer(tmp_path: Path) -> None:
    status, lines = reported(tmp_path, measures=300)
    assert status == 0
    assert "the coverage was not measured: it took longer than the tests" in lines
    assert "package lines" not in lines
    assert lines[-1] == "= tests ="


def test_coverage_is_not_begun_after_the_tests(tmp_path: Path) -> None:
    status, lines = reported(tmp_path, takes=2, measures=300)
    assert status == 0
    assert "the coverage was not measured: the scenarios took longer than the tests" in lines
    assert not (tmp_path / "measuring").exists()
    assert lines[-1] == "= tests ="


def test_a_failed_installation_is_not_repeated(tmp_path: Path) -> None:
    """Without a network each attempt takes minutes, and parallel attempts wait for each other's locks."""
    lay(tmp_path)
    makefile = tmp_path / "Makefile"
    text = makefile.read_text().replace("@echo of the tests", "@echo install: $$TOPOPROXY_INSTALL")
    makefile.write_text(
        text.replace("vm-tools venv: ; @:", "vm-tools: ; @echo first: $$TOPOPROXY_INSTALL\nvenv: ; @:")
    )
    command = [tmp_path / ".ci/run"]
    reported = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=environment()
    )
    assert "first:\n" in reported.stdout
    assert "install: no\n" in reported.stdout
    script = RUN.parents[1] / "tests/e2e/install.sh"
    done = subprocess.run(
        ["sh", script, "topoproxy-has-no-such-package"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**environment(), "TOPOPROXY_INSTALL": "no"},
    )
    assert done.stdout.endswith("these are not installed: topoproxy-has-no-such-package\n")


def test_no_test_runs_after_a_lint_failure(tmp_path: Path) -> None:
    status, lines = reported(tmp_path, lint=1)
    assert status != 0
    assert "of the tests" not in lines


@pytest.mark.parametrize(
    ("file", "slow"),
    [("scenarios", {"takes": 300}), ("measuring", {"measures": 300})],
    ids=["scenarios", "coverage"],
)
def test_ending_the_script_ends_the_parallel_jobs(tmp_path: Path, file: str, slow: dict[str, float]) -> None:
    """The jobs have their own process groups, which a signal of the terminal does not reach."""
    script = lay(tmp_path, tests=2, **slow)  # type: ignore[arg-type]
    with subprocess.Popen([script], stdout=subprocess.DEVNULL, env=environment("300")) as process:
        started = tmp_path / file
        wait_until(lambda: started.is_file() and started.read_text().strip())
        process.terminate()
        assert process.wait(60) == 143
    pid = int(started.read_text())
    try:
        wait_until(lambda: not is_alive(pid))
    except AssertionError:
        os.killpg(os.getpgid(pid), signal.SIGKILL)  # timeout's
        raise


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False
