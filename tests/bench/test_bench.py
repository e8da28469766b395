"""The measuring tools are correct: checked against each other, and against a proxy that rewrites requests."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.load import load as load_config

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Path]:
    import procs

    sock = tmp_path / "runtime.sock"
    process = procs.start("the runtime", procs.backend_argv(sock), sock, malloc=True)
    yield sock
    process.end()


def load(target: Path, call: str, *options: str) -> dict[str, Any]:
    argv = [sys.executable, str(BENCH / "load.py"), "--target", str(target), "--call", call, "--dur", "60"]
    done = subprocess.run([*argv, *options], capture_output=True, text=True, timeout=120, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(
    ("call", "conc", "count"),
    [
        ("Version", 1, 200),
        ("Create", 64, 200),
        ("Create205k", 16, 40),
        ("List1000", 8, 40),
        ("Answer15M", 1, 1),
    ],
)
def test_every_call_is_answered(backend: Path, call: str, conc: int, count: int) -> None:
    result = load(backend, call, "--conc", str(conc), "-n", str(count), "--warm", "3")
    assert result["first_error"] == ""
    assert (result["n"], result["calls"], result["errors"], result["stalls"]) == (count, count + 3, 0, 0)
    assert 0 < result["p50_us"] <= result["p95_us"] <= result["p99_us"]
    assert result["answer_bytes"] >= {"List1000": 500_000, "Answer15M": 15 << 20}.get(call, 10)


def test_an_answer_that_is_not_the_expected_one_is_an_error(backend: Path) -> None:
    result = load(backend, "Create", "-n", "5", "--warm", "0", "--expect", "no such text")
    assert (result["n"], result["errors"]) == (0, 5)
    assert "unexpected answer" in result["first_error"]


def test_a_missing_target_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    result = load(tmp_path / "missing.sock", "Version", "-n", "5")
    assert (result["n"], result["errors"]) == (0, 1)
    assert "cannot connect" in result["first_error"]


def test_the_runtime_returns_what_it_received_and_the_plain_proxy_rewrites(
    backend: Path, tmp_path: Path
) -> None:
    import messages
    import procs

    (tmp_path / "plain").mkdir()
    process = procs.PLAIN.start(tmp_path, backend)
    with procs.ended([process]):
        straight = load(backend, "Create", "-n", "2", "--warm", "0")
        through = load(process.sock, "Create", "-n", "2", "--warm", "0")
        large = load(
            process.sock, "Create205k", "-n", "10", "--conc", "5", "--warm", "0", "--expect", "2-3|0|6000|"
        )
        before = process.cpu_ms()
        assert load(process.sock, "Version", "-n", "100")["errors"] == 0
        assert 1 < process.cpu_ms() - before < 5_000
        assert 5 < process.memory_mb() <= process.memory_mb("VmHWM") < 500
    size = len(messages.create_request(messages.SMALL_ENVS))
    assert straight["sample"].startswith(f"||{messages.SMALL_ENVS}|{size}|")
    assert through["sample"].startswith(f"2-3|0|{messages.SMALL_ENVS}|{size + 8}|")
    assert (large["n"], large["errors"]) == (10, 0)
    assert process.popen.poll() is not None


def test_the_bare_forwarder_passes_bytes_as_they_come(backend: Path, tmp_path: Path) -> None:
    import floor_figures
    import procs

    (tmp_path / floor_figures.BARE.name).mkdir(exist_ok=True)
    with procs.ended([floor_figures.BARE.start(tmp_path, backend)]) as (process,):
        straight = load(backend, "Create", "-n", "2", "--warm", "0")
        through = load(process.sock, "Create", "-n", "2", "--warm", "0")
        large = load(process.sock, "Create205k", "-n", "20", "--conc", "16", "--expect", "|6000|")
        answers = load(process.sock, "List1000", "-n", "20", "--conc", "8")
    # Behind the last bar the runtime counts its creates.
    assert through["sample"].rpartition("|")[0] == straight["sample"].rpartition("|")[0]
    assert (large["n"], large["errors"]) == (20, 0)
    assert (answers["n"], answers["errors"]) == (20, 0)


def test_a_measured_process_keeps_its_bytecode_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import procs

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in procs.environment(malloc=False)
    assert "PYTHONDONTWRITEBYTECODE" not in procs.environment(malloc=True)


def test_the_interpreter_of_a_benchmark_is_named_with_its_path() -> None:
    import procs

    version, _, path = procs.interpreter().partition(" (")
    assert version == f"Python {sys.version.split()[0]}"
    assert Path(path.rstrip(")")).samefile(sys.executable)


def test_the_floor_is_compared_with_a_daemon_that_never_polls(tmp_path: Path) -> None:
    import floor_figures

    argv = floor_figures.sleeping_argv(tmp_path, tmp_path / "cri.sock", tmp_path / "runtime.sock")
    assert load_config(Path(argv[argv.index("--config") + 1])).busy_poll == 0


def test_processes_that_compute_end_with_the_measurement() -> None:
    import floor_figures

    with contextlib.suppress(KeyboardInterrupt), floor_figures.computing(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
        raise KeyboardInterrupt
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_the_table_of_the_floor_compares_with_go() -> None:
    import floor_figures

    found = {
        (call, name): [(p50, cpu), (p50 + 10, cpu), (p50 + 500, cpu)]
        for call, _ in floor_figures.CALLS
        for name, p50, cpu in (
            ("direct", 50.0, 0.0),
            ("go", 150.0, 200.0),
            ("bare Python", 80.0, 50.0),
            ("topoproxy", 100.0, 100.0),
            ("topoproxy, no polls", 120.0, 80.0),
        )
    }
    rows = floor_figures.rows(found)
    assert rows[:4] == [
        ["Version", "60.0 us", "go", "+100 us", "1.00", "200 ms", "1.00"],
        ["", "", "bare Python", "+30.0 us", "0.30", "50.0 ms", "0.25"],
        ["", "", "topoproxy", "+50.0 us", "0.50", "100 ms", "0.50"],
        ["", "", "topoproxy, no polls", "+70.0 us", "0.70", "80.0 ms", "0.40"],
    ]
    assert len(rows) == 4 * len(floor_figures.CALLS)


def test_a_peer_that_ignores_the_window_loses_its_connection(backend: Path) -> None:
    import socket

    import frames
    import load as loader
    import messages

    path = messages.call("Create").path
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(backend))
        head = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, loader.header_blocks(path, 1)[0])
        body = frames.frame(frames.DATA, 0, 1, bytes(16_384))
        with contextlib.suppress(ConnectionError):
            sock.sendall(frames.PREFACE + frames.settings_frame({}) + head + body * 500)
            while sock.recv(65_536):
                pass
    assert "sent more than the window" in backend.with_suffix(".log").read_text()
    assert load(backend, "Version", "-n", "5")["errors"] == 0


@given(
    st.lists(
        st.tuples(st.sampled_from([b"/a/B", b"/a/C" * 30, b"/x/Version"]), st.integers(0, 400)), max_size=60
    )
)
def test_header_tables_are_followed_through_evictions(calls: list[tuple[bytes, int]]) -> None:
    import frames
    from hpack import Decoder

    encoder, reader, decoder = frames.Encoder(400), frames.PathReader(), Decoder()
    reader.limit = decoder.header_table.maxsize = decoder.max_allowed_table_size = 400
    for path, wait in calls:
        headers = [
            (b":method", b"POST"),
            (b":path", path),
            (b"te", b"trailers"),
            (b"grpc-timeout", b"%dm" % wait),
        ]
        block = encoder.encode(headers)
        assert reader.path(block) == path
        assert [(bytes(k), bytes(v)) for k, v in decoder.decode(block, raw=True)] == headers


def test_a_body_waits_for_flow_control_windows() -> None:
    import frames

    outbox = frames.Outbox()
    outbox.open(1)
    outbox.send(1, b"", bytes(100_000))
    sent = outbox.take()
    assert len(sent) == frames.DEFAULT_WINDOW + 9 * 4
    outbox.on_window(1, 50_000)
    assert outbox.take() == b""
    outbox.on_window(0, 10)
    assert outbox.take() == frames.frame(frames.DATA, 0, 1, bytes(10))
    outbox.on_window(0, 50_000)
    rest = 100_000 - frames.DEFAULT_WINDOW - 10
    assert len(outbox.take()) == rest + 9 * 3
    assert outbox.window == 50_000 - rest
    with pytest.raises(frames.PeerError):
        outbox.on_window(0, 0)


def test_the_receiver_updates_half_used_windows_and_rejects_a_body_beyond_them() -> None:
    import frames

    inflow = frames.Inflow(frames.Outbox(), 1_000, 2_000)

    def sent() -> bytes:
        inflow.grant()
        return inflow.outbox.take()

    inflow.on_data(1, 499, ended=False)
    assert sent() == b""
    inflow.on_data(1, 1, ended=False)
    assert sent() == frames.window_frame(1, 500)
    inflow.on_data(1, 500, ended=True)
    assert sent() == frames.window_frame(0, 1_000)
    inflow.on_data(3, 600, ended=False)
    with pytest.raises(frames.PeerError):
        inflow.on_data(3, 401, ended=False)


def test_the_comparison_of_checks_ignores_times_and_cpusets() -> None:
    import go_kit

    one = "a: ok 1.5 ms\nb: Canceled; backend cancels 1->2\nc: ok id=||120|5468 2.0 ms\nd: ok\n"
    same = "a: ok 9 ms\nb: Canceled; backend cancels 7->8\nc: ok id=0-1|0|120|5479 2.0 ms\nd: ok\n"
    assert go_kit.differences(one, same) == []
    other = same.replace("7->8", "7->7").replace("|120|", "|119|").replace("d: ok\n", "")
    assert [text.split("'")[1] for text in go_kit.differences(one, other)] == ["b", "c", "d"]


def test_figures_are_computed_and_rendered_as_a_table() -> None:
    import figures
    import table

    found = figures.Figures()
    for target, values in {"direct": (10.0, 12.0, 50.0), "ours": (30.0, 33.0, 31.0)}.items():
        for value in values:
            found.add("p50", target, value)
    assert found.added("p50", "ours", "direct") == 19.0
    assert found.added("p50", "missing", "direct") is None
    assert found.ratio(1.0, 0.0) is None
    rendered = table.render(
        ["", "x"], [["a", table.number(0.314)], ["bb", table.number(None)]], markdown=True
    )
    assert rendered == "|    |    x |\n|----|-----:|\n| a  | 0.31 |\n| bb |    - |"


def test_the_go_benchmark_is_skipped_with_a_reason_without_the_kit(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCH / "go_kit.py"), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "skipped: no Go sources" in done.stderr


def test_a_ratio_is_the_median_over_rounds_and_more_than_one_is_worse() -> None:
    import random

    import commit_comparison

    dice = random.Random(1)
    slow, rate = commit_comparison.Series(), commit_comparison.Series(higher_is_better=True)
    for started in range(4):
        for turn in range(8):
            busy = 1 + 3 * dice.random()  # what else the machine does touches both
            slow.add(started, {"base": busy, "now": 1.1 * busy})
            rate.add(started, {"base": 100 / busy, "now": 80 / busy * (1 + turn % 3 / 100)})
    assert slow.rounds() == 32
    assert slow.ratio() == pytest.approx(1.1)
    assert slow.interval(dice) == (pytest.approx(1.1), pytest.approx(1.1))
    assert rate.ratio() == pytest.approx(1.25 / 1.01)
    low, high = rate.interval(dice)
    assert low * 1.0001 >= 1.25 / 1.02
    assert low <= rate.ratio() <= high <= 1.2501


def test_an_unknown_base_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    for base, message in (
        ("no-such-commit", "cannot read the base"),
        (str(tmp_path), "cannot run topoproxy of"),
    ):
        argv = [sys.executable, str(BENCH / "commit_comparison.py"), base, "--quick"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr.partition(message)[0]


def test_a_slower_checkout_is_reported(tmp_path: Path) -> None:
    """Each call of the copy takes longer than the same call of the base: the run reports it as slower."""
    import shutil

    slow = tmp_path / "slow"
    shutil.copytree(BENCH.parent / "proxy", slow / "proxy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(BENCH.parent / "requirements.lock", slow)
    target = slow / "proxy/calls/create_calls.py"
    text = target.read_text()
    at = "    def _create(self, call: UndecidedCall) -> None:\n"
    assert at in text
    target.write_text(text.replace(at, f"{at}        sum(range(40_000))\n"))
    argv = [sys.executable, str(BENCH / "commit_comparison.py"), str(BENCH.parent), "--checkout", str(slow)]
    argv += ["--quick", "--starts", "1", "--rounds", "2", "--patience", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "SLOWER: p50 CreateContainer 5.5 kB: " in done.stdout
