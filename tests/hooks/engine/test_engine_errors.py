"""Reports to the operator: exceptions cut to the hook's frames, log records and states of hooks."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.hooks.engine import errors
from proxy.hooks.engine import log_capture as log_capture
from proxy.hooks.engine.errors import FailureLog, HookFailure, failure_of
from proxy.hooks.engine.log_capture import PREFIX, HookLogHandler
from proxy.hooks.engine.slots import HookSlots
from proxy.hooks.engine.stats import QUICK_ANSWERS, HookStats
from proxy.hooks.hook import Hook
from proxy.hooks.loader import loading
from proxy.logs import log
from proxy.model.errors import HookError
from proxy.telemetry.port import silent
from tests.testkit.captured_log import of_hooks

HOOK = """
import json
def pre_create_container(event):
    helper(event)

def helper(event):
    json.loads(event)
"""


def raised(handler: Any, *args: Any) -> BaseException:
    try:
        handler(*args)
    except BaseException as error:
        return error
    raise AssertionError("it does not raise")


@pytest.fixture
def handler(tmp_path: Path) -> Any:
    file = tmp_path / "10-x.py"
    space: dict[str, Any] = {}
    exec(compile(HOOK, file, "exec"), space)
    return space["pre_create_container"]


def of(handler: Any, **fields: Any) -> Hook:
    return Hook("10-x", handler.__code__.co_filename, {"pre_create_container": handler}, **fields)


def test_an_exception_is_one_line_with_the_hooks_own_last_frame(handler: Any) -> None:
    reported = failure_of(raised(handler, "{"), of(handler))
    assert reported.kind == "error"
    assert reported.text.startswith("JSONDecodeError: Expecting property name")
    assert reported.text.endswith("(10-x.py:7 in helper)")
    assert [line.rpartition("/")[2] for line in reported.trace.splitlines()[1:3]] == [
        '10-x.py", line 4, in pre_create_container',
        '10-x.py", line 7, in helper',
    ]
    assert "json/decoder" not in reported.trace


def test_an_error_of_a_server_is_reported_without_a_line(handler: Any) -> None:
    reported = failure_of(raised(handler, "{"), of(handler, remote=True))
    assert reported.text.startswith("Expecting property name")
    assert (".py" in reported.text, reported.trace) == (False, "")
    assert failure_of(HookError("cannot call it: away"), of(handler)).text == "cannot call it: away"


def test_an_exception_without_text_or_with_a_long_one_is_shortened() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert failure_of(MuteError(), of(raised)).text == "MuteError: an exception that cannot be written"
    assert len(failure_of(ValueError("x" * 10_000), of(raised)).text) < 400
    assert failure_of(ValueError("a\nb\t c"), of(raised)).text == "ValueError: a b c"
    assert "\x1b" not in failure_of(ValueError("\x1b[31m"), of(raised)).text


def test_an_error_outside_the_hooks_file_is_reported_with_its_place() -> None:
    reported = failure_of(raised(json.loads, "{"), of(raised))
    assert "test_engine_errors.py" in reported.text or "decoder.py" in reported.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "500 ms"), (0.0123, "12.3 ms"), (2.0, "2 s"), (100.0, "100 s")],
)
def test_durations_are_written_shortly(value: float, text: str) -> None:
    assert errors.duration(value) == text


def test_reports_about_a_hook_are_limited_and_the_rest_is_counted() -> None:
    messages: list[str] = []
    now = [0.0]
    failure_log = FailureLog(of_hooks(messages), lambda: now[0])
    slots = HookSlots(of(raised), print)
    for number in range(errors.MOST_MESSAGES + 5):
        failure_log.report_failure(slots.hook, HookFailure("error", f"no {number}"))
    failure_log.report_problem("other", "mine")
    assert len(messages) == errors.MOST_MESSAGES + 1
    now[0] = errors.MESSAGE_PERIOD_S
    failure_log.report_failure(slots.hook, HookFailure("error", "again"))
    assert messages[-2:] == ["failures of a hook were not reported hook=10-x count=5", "hook 10-x: again"]
    for number in range(errors.MOST_MESSAGES):
        failure_log.report_problem("10-x", f"no {number}")
    assert messages[-1] == f"hook 10-x: no {errors.MOST_MESSAGES - 2}"
    now[0] *= 2
    failure_log.report_problem("10-x", "still")
    assert messages[-2:] == ["failures of a hook were not reported hook=10-x count=1", "hook 10-x: still"]


def test_the_traceback_of_a_failure_is_logged_if_configured(log_stream: io.StringIO) -> None:
    log.setup("debug", "json", log_stream)
    FailureLog(silent, lambda: 0.0).report_failure(of(raised), HookFailure("error", "no", "Traceback"))
    (record,) = records(log_stream)
    assert (record["hook"], record["error"], record["trace"]) == ("10-x", "no", "Traceback")


@pytest.fixture
def log_stream() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    before = logging.getLogger().handlers[:], logging.getLogger().level
    log.setup("info", "json", stream)
    yield stream
    log.setup()
    logging.getLogger().handlers[:], logging.getLogger().level = before


def records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_hook_files_are_loaded_under_the_name_of_their_logger(tmp_path: Path) -> None:
    file = tmp_path / "10-x.py"
    file.write_text("API_VERSION = 1\ndef pre_create_container(event):\n    return __name__\n")
    hook = loading.load_file(file, trusted=False).hook
    assert hook.source == str(file)
    assert hook.handlers["pre_create_container"](None).startswith(f"{PREFIX}.")


def test_log_records_of_a_hook_are_logged_under_its_name(log_stream: io.StringIO) -> None:
    now = [0.0]
    handler = HookLogHandler(lambda: now[0])
    logger = logging.getLogger(f"{PREFIX}.10_x_1")
    try:
        handler.add_hooks([Hook("10-x", __file__, {})])
        logger.info("said %s", "this", extra={"x": 1})
        logger.debug("not this")
        handler.emit(logger.makeRecord(logger.name, 30, __file__, 1, "bad %d", ("arguments",), None))
        logger.error("failed", exc_info=OSError("gone"))
        first = records(log_stream)
        assert [(r["msg"], r["hook"]) for r in first] == [
            ("said this", "10-x"),
            ("bad %d", "10-x"),
            ("failed", "10-x"),
        ]
        assert first[2]["error"] == "OSError: gone"
        assert first[2]["severity"] == "error"
        for number in range(100):
            logger.info("flood %d", number)
        assert len(records(log_stream)) == log_capture.MOST_RECORDS - 1, "one was for debugging"
        assert handler.dropped("10-x") == 84
        now[0] = 1.5
        logger.info("after")
        assert records(log_stream)[-1] | {"left_out": 84} == records(log_stream)[-1]
        for number in range(100):
            logger.info("flood %d", number)
        assert handler.dropped("10-x") == 84 + 101 - log_capture.MOST_RECORDS
        handler.keep_only([])
        assert handler.dropped("10-x") == 0
    finally:
        handler.close()
    assert not logging.getLogger(PREFIX).handlers


def test_the_usual_duration_decides_whether_a_hook_is_awaited_at_once() -> None:
    stats, is_quick = HookStats(), []
    for seconds in [0.00001, 0.001] + [0.00001] * QUICK_ANSWERS + [0.0002] * 100:
        is_quick.append(stats.is_quick)
        stats.record_duration(seconds)
    assert is_quick[: QUICK_ANSWERS + 2] == [False, True] + [False] * QUICK_ANSWERS
    assert is_quick[QUICK_ANSWERS + 2]
    assert not is_quick[-1]
    stats.usual_s = 0.0
    stats.record_duration(0.0008)
    assert stats.usual_s == 0.0001, "one that is slow counts an eighth"
    assert stats.longest_s == 0.001
    assert stats.median() == 0.0002
