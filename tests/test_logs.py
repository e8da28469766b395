"""The format of log lines, and content that must never appear in them."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import pytest

from proxy.logs import Log, with_own_descriptor


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock):
    """A separate log; the root logger of the standard library is restored."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Log(clock)
    root.handlers[:] = handlers
    root.setLevel(level)


def open_as(log: Log, fmt: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    log.setup(level, fmt, stream)
    return stream


def test_level_and_form_change_while_records_are_written(log: Log) -> None:
    out = open_as(log, "text")
    log.info("first")
    log.change("error", "json")
    log.warning("left out")
    log.error("second")
    logging.getLogger("asyncio").warning("left out too")
    log.change("debug", "klog")
    log.debug("third")
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("INFO    first")
    assert json.loads(lines[1])["msg"] == "second"
    assert lines[2].endswith('] "third"')
    assert log.enabled("debug")


def test_a_line_of_text_has_time_level_message_and_keys(log: Log) -> None:
    out = open_as(log, "text")
    log.info("container placed", pod="ns/web", cpus="0-3", count=2, hard=True)
    stamp, line = out.getvalue().split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", stamp)
    assert line == "INFO    container placed pod=ns/web cpus=0-3 count=2 hard=true\n"


@pytest.mark.parametrize("zone", ["UTC0", "Asia/Kolkata", "<-03:30>3:30"])
def test_the_time_of_a_text_line_is_that_of_the_clock_in_any_zone(
    log: Log, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        before = time.time()
        out = open_as(log, "text")
        log.info("now")
        written = datetime.fromisoformat(out.getvalue().split(" ")[0])
        assert before - 0.001 <= written.timestamp() <= time.time()
        assert written.utcoffset() == datetime.now().astimezone().utcoffset()
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_line_of_klog_has_severity_and_place(log: Log) -> None:
    out = open_as(log, "klog")
    log.warning("pool small", cpus="0")
    pattern = r'W\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ test_logs\.py:\d+\] "pool small" cpus="0"\n'
    assert re.fullmatch(pattern, out.getvalue())


def test_a_line_of_json_is_one_object_with_typed_keys(log: Log) -> None:
    out = open_as(log, "json", "debug")
    log.debug("a", pod="ns/x", ts="not the time")
    log.error("b", err="broken", obj=object)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["msg"], first["v"], first["pod"]) == ("a", 4, "ns/x")
    assert isinstance(first["ts"], float)
    assert re.fullmatch(r"test_logs\.py:\d+", first["caller"])
    assert (second["msg"], second["err"], "v" in second) == ("b", "broken", False)


def test_messages_below_the_level_are_not_written(log: Log) -> None:
    out = open_as(log, "text", "warning")
    log.info("no")
    log.debug("no")
    assert out.getvalue() == ""
    assert (log.enabled("info"), log.enabled("warning")) == (False, True)
    log.warning("yes")
    assert "yes" in out.getvalue()


@pytest.mark.parametrize("fmt", ["text", "klog", "json"])
def test_one_record_is_one_line_whatever_it_says(log: Log, fmt: str) -> None:
    out = open_as(log, fmt)
    log.info('a\nb\x1b[31m{x} {0} "q"', pod='n"s\n\\/x\u2028\x85', name="{record}")
    assert len(out.getvalue().splitlines()) == 1
    assert "\x1b" not in out.getvalue()
    assert "{x} {0}" in out.getvalue()


def test_a_traceback_shows_no_values(log: Log) -> None:
    out = open_as(log, "text")

    def fail(secret: str) -> None:
        raise ValueError(len(secret))

    try:
        fail("PASSWORD=" + "2retnuh"[::-1])
    except ValueError:
        log.exception("cannot decide", pod="a/b")
    assert "ValueError: 16" in out.getvalue()
    assert "in fail" in out.getvalue()
    assert "hunter2" not in out.getvalue()


def test_records_of_the_standard_library_are_logged_too(log: Log) -> None:
    out = open_as(log, "text")
    logging.getLogger("asyncio").warning("slow %s {x}", "callback")
    logging.getLogger("asyncio").info("chatter")
    assert "WARNING slow callback {x} logger=asyncio" in out.getvalue()
    assert "chatter" not in out.getvalue()


def test_repeats_are_counted_for_a_minute(log: Log, clock: Clock) -> None:
    out = open_as(log, "text")
    for _ in range(5):
        log.say_once(("annotation", "ns/x"), "warning", "malformed annotation", pod="ns/x")
    log.say_once(("annotation", "ns/y"), "warning", "malformed annotation", pod="ns/y")
    assert len(out.getvalue().splitlines()) == 2
    clock.now = 60.0
    log.say_once(("annotation", "ns/x"), "warning", "malformed annotation", pod="ns/x")
    assert out.getvalue().splitlines()[2].endswith("malformed annotation pod=ns/x repeated=4")


def test_keys_are_bounded(log: Log) -> None:
    open_as(log, "text", "error")
    for i in range(3000):
        log.say_once(i, "info", "m")
    assert len(log._repeats) <= 1024


def test_lines_for_the_journal_have_priorities_and_no_times(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryFile("w+") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        log.setup("debug", "text", stream)
        log.info("placed", pod="a/b")
        log.error("two\nlines")
        log.warning("small")
        stream.seek(0)
        lines = stream.read().splitlines()
    assert lines == ["<6>placed pod=a/b", "<3>ERROR   two\\nlines", "<4>WARNING small"]


def test_loguru_is_not_imported_before_the_first_record() -> None:
    code = "import sys; from proxy.logs import log, setup; setup('info', 'json'); log.debug('x')"
    code += "; print('loguru' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_stopped_reader_does_not_block_the_daemon() -> None:
    """Nothing reads the pipe: lines are dropped and counted, and no write blocks."""
    end, start = os.pipe()
    try:
        with os.fdopen(start, "w") as stream:
            log = Log()
            log.setup("info", "text", stream)
            for _ in range(2000):
                log.info("x" * 200)
            os.set_blocking(end, False)
            first = os.read(end, 1 << 20)
            assert b"lost=" not in first
            log.info("again")
            assert b"lost=" in os.read(end, 1 << 20)
    finally:
        os.close(end)


def test_a_stack_trace_longer_than_the_room_in_a_pipe_does_not_block_the_daemon() -> None:
    """The pipe has room for one page: the beginning is written; the next record counts a lost one."""

    def even(depth: int) -> None:
        odd(depth - 1)

    def odd(depth: int) -> None:
        even(depth - 1) if depth > 0 else [][0]

    end, start = os.pipe()
    try:
        size = fcntl.fcntl(start, fcntl.F_SETPIPE_SZ, 2 * 4096)
        with os.fdopen(start, "w") as stream:
            os.write(start, b"." * (size - 4096))
            log = Log()
            log.setup("info", "text", stream)
            try:
                even(60)
            except IndexError:
                log.exception("a fault")
            first = os.read(end, 1 << 20).lstrip(b".")
            assert b" a fault\n" in first
            assert len(first) <= 4096
            log.info("again")
            cut, _, next_line = os.read(end, 1 << 20).partition(b"\n")
            assert cut == b""
            assert next_line.endswith(b"lost=1\n")
    finally:
        os.close(end)


def test_a_log_outlives_its_stream(log: Log, tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    own = with_own_descriptor(stream)
    log.setup("info", "text", own)
    log.info("before")
    number = stream.fileno()
    assert own.fileno() != number
    stream.close()
    with (tmp_path / "other").open("w") as other:
        assert other.fileno() == number, "another file has its descriptor number"
        log.info("after")
    os.close(own.fileno())
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == ["before", "after"]
    assert (tmp_path / "other").read_text() == ""


def test_a_stream_without_a_descriptor_is_used_directly() -> None:
    stream = io.StringIO()
    assert with_own_descriptor(stream) is stream


@pytest.mark.parametrize("fmt", ["text", "klog", "json"])
@pytest.mark.parametrize(
    "odd", ["x", "\u202e", "\ud800", "\u4e2d", '"', "\\", "\n", "\U0001f600", "\U000e0001"]
)
def test_a_line_is_never_long(log: Log, fmt: str, odd: str) -> None:
    out = open_as(log, fmt)
    message = "m" + odd * 10**5
    log.info(message, pod="p" + odd * 10**5, container="the last")
    log.info("refused", pod="ns/web", reason=odd * 10**5, attempt=3)
    for line in out.getvalue().splitlines():
        assert len(line.encode()) <= 2000
        assert line.isprintable()
        assert fmt != "json" or json.loads(line)["msg"]
    assert len(out.getvalue().splitlines()) == 2
    assert "ns/web" in out.getvalue()


@pytest.mark.parametrize("fmt", ["text", "klog", "json"])
def test_long_stack_traces_are_truncated(log: Log, fmt: str) -> None:
    out = open_as(log, fmt)

    def fail() -> None:
        raise ValueError("first\n" + "x\n" * 10**5 + "y" * 10**6 + "\ud800 last")

    try:
        fail()
    except ValueError:
        log.exception("cannot decide", pod="a/b")
    lines = out.getvalue().splitlines()
    assert sum(map(len, lines)) <= 25_000
    assert "test_long_stack_traces_are_truncated" in out.getvalue(), (
        "the position of the error is in the part that stays"
    )
    assert fmt == "json" or max(len(line.encode()) for line in lines) <= 2000
    out.getvalue().encode()
