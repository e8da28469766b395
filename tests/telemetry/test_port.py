"""One call gives the log record, the problem and the count; what repeats is known by message and keys."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.logs import Log
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.telemetry import metrics
from proxy.telemetry.port import PROBLEM_LIMIT, Telemetry, subject, subject_of
from tests.testkit.captured_log import CapturedLog, telemetry


@pytest.fixture
def log() -> Iterator[Log]:
    """A separate log; the standard library's root logger is restored afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Log()
    root.handlers[:] = handlers
    root.setLevel(level)


def container(phase: Phase = Phase.RUNNING) -> Container:
    pod = Pod("s", "u", "shop", "web")
    return Container("id-1", "main", pod, Request(), Placement(Pool.OWN, CpuSet.parse("2-3"), Mask()), phase)


def log_output(log: Log, fmt: str, report: Any) -> str:
    stream = io.StringIO()
    log.setup("info", fmt, stream)
    report(Telemetry(log, lambda: 1.0))
    return stream.getvalue()


def placed(port: Telemetry) -> None:
    port.event("placed", **subject(container()), cpus=CpuSet.parse("2-3"), reason="requested 2 CPUs")


def test_an_event_has_its_keys_in_every_log_format(log: Log) -> None:
    record = json.loads(log_output(log, "json", placed))
    keys = {key: record[key] for key in ("msg", "pod", "container", "containerID", "cpus", "reason")}
    assert keys == {
        "msg": "placed",
        "pod": "shop/web",
        "container": "main",
        "containerID": "id-1",
        "cpus": "2-3",
        "reason": "requested 2 CPUs",
    }
    klog = (
        '"placed" pod="shop/web" container="main" containerID="id-1" cpus="2-3" reason="requested 2 CPUs"\n'
    )
    assert log_output(log, "klog", placed).endswith(klog)
    text = 'placed pod=shop/web container=main containerID=id-1 cpus=2-3 reason="requested 2 CPUs"\n'
    assert log_output(log, "text", placed).endswith(text)


@pytest.mark.parametrize("method", ["event", "warning", "frequent", "problem"])
def test_the_caller_in_the_log_is_the_reporting_code(log: Log, method: str) -> None:
    text = log_output(log, "json", lambda port: getattr(port, method)("x", pod="a/b"))
    assert json.loads(text)["caller"].startswith("test_port.py:")


def test_a_fault_and_a_resolved_problem_name_their_caller(log: Log) -> None:
    def report(port: Telemetry) -> None:
        port.fault(KeyError("oops"))
        port.resolved("internal error")

    lines = [json.loads(line) for line in log_output(log, "json", report).splitlines()]
    assert [line["msg"] for line in lines] == ["internal error", "resolved"]
    assert {line["caller"].partition(":")[0] for line in lines} == {"test_port.py"}


def test_a_container_that_is_being_created_has_no_id() -> None:
    lines: list[str] = []
    telemetry(lines).event("x", **subject(container(Phase.CREATING)))
    assert lines == ["x pod=shop/web container=main"]
    assert subject_of({}, "gone") == {"containerID": "gone"}
    assert subject_of({"id-1": container()}, "id-1") == subject(container())


def test_a_problem_is_known_by_its_message_and_keys_and_not_by_its_cause() -> None:
    lines: list[str] = []
    now = [1.0]
    port = telemetry(lines, lambda: now[0])
    for pod, cause in (("a", "busy"), ("a", "busy"), ("b", "busy"), ("a", "no space"), ("a", "no space")):
        port.problem("cannot write the cpuset", pod=pod, err=CgroupError(cause))
        now[0] += 1
    assert [(p["keys"], p["count"], p["first"], p["last"]) for p in port.problems()] == [
        ({"pod": "b", "err": "busy"}, 1, 3.0, 3.0),
        ({"pod": "a", "err": "no space"}, 4, 1.0, 5.0),
    ]
    assert lines == [
        "cannot write the cpuset pod=a err=busy",
        "cannot write the cpuset pod=b err=busy",
        'cannot write the cpuset pod=a err="no space"',
    ], "each cause is logged when it is new"
    assert port.problems()[-1]["what"] == lines[2]


def test_the_problem_that_has_not_occurred_for_longest_is_forgotten_first() -> None:
    port = telemetry()
    port.problem("often")
    for number in range(PROBLEM_LIMIT - 1):
        port.problem("once", pod=str(number))
    port.problem("often")
    port.problem("one more")
    assert [(p["what"], p["count"]) for p in port.problems()][-2:] == [("often", 2), ("one more", 1)]
    assert port.problems()[0]["what"] == "once pod=1"


def test_values_whose_labels_are_not_in_the_status_key_are_added_up() -> None:
    port = telemetry()
    port.count(metrics.POD_RESOURCES_REQUESTS, 100, method="List")
    port.count(metrics.POD_RESOURCES_REQUESTS, 2, method="Get")
    assert port.registry.page()["pod_resources_requests"] == 102


def test_a_container_that_is_created_again_has_the_same_problem() -> None:
    port = telemetry()
    for container_id in ("one", "two"):
        port.problem("odd", pod="a/b", container="c", containerID=container_id)
    assert [(p["keys"]["containerID"], p["count"]) for p in port.problems()] == [("two", 2)]  # type: ignore[index]
    for container_id in ("one", "two"):
        port.problem("odd", containerID=container_id)
    assert len(port.problems()) == 3


def test_a_cause_that_varies_is_throttled() -> None:
    lines: list[str] = []
    port = telemetry(lines)
    for number in range(1000):
        port.problem("cannot continue a connection", err=f"reason {number}")
    assert len(lines) <= 5
    assert [p["count"] for p in port.problems()] == [1000]


def test_a_resolved_problem_is_removed_and_may_be_reported_again() -> None:
    lines: list[str] = []
    port = telemetry(lines)
    for worker in ("kernel", "ledger"):
        port.problem("a worker is stuck", worker=worker, seconds=10)
    port.resolved("a worker is stuck", worker="kernel")
    port.resolved("a worker is stuck", worker="missing")
    assert [p["keys"] for p in port.problems()] == [{"worker": "ledger", "seconds": 10}]
    assert lines[2:] == ['resolved problem="a worker is stuck" worker=kernel seconds=10']
    port.problem("a worker is stuck", worker="kernel", seconds=10)
    assert lines[3:] == ["a worker is stuck worker=kernel seconds=10"]


def test_messages_caused_by_clients_are_throttled() -> None:
    lines: list[str] = []
    port = telemetry(lines)
    for number in range(100):
        for pod in ("a", "b"):
            port.frequent("rejected a pod", pod=pod, err=f"no {number}")
    assert 1 <= len(lines) <= 10
    assert {re.sub(" err=.*", "", line) for line in lines} == {"rejected a pod pod=a", "rejected a pod pod=b"}


def test_debug_records_are_not_made_unless_they_are_read() -> None:
    reported = CapturedLog(levels=("info", "warning", "error"))
    port = Telemetry(reported, lambda: 1.0)
    port.debug("x")
    assert (port.verbose, reported.lines) == (False, [])
    assert telemetry().verbose


def test_values_are_plain_and_none_is_omitted() -> None:
    lines: list[str] = []
    port = telemetry(lines)
    port.event("x", a=None, b=True, c=1.5, d=CpuSet.parse("0-1"), e=ValueError("no"), f=Phase.RUNNING, g="")
    assert lines == ['x b=true c=1.5 d=0-1 e="ValueError: no" f=running g=""']


def test_a_fault_is_counted_and_kept() -> None:
    port = telemetry()
    port.fault(KeyError("a"))
    port.fault(KeyError("b"))
    assert port.value(metrics.INTERNAL_ERRORS) == 2
    assert [p["what"] for p in port.problems()] == [
        "internal error fault=\"KeyError: 'a'\"",
        "internal error fault=\"KeyError: 'b'\"",
    ]


def test_a_value_cannot_break_out_of_its_line() -> None:
    lines: list[str] = []
    telemetry(lines).event("x", pod='a\nb" err="no', odd="\x1b[31m")
    assert lines == ['x pod="a\\nb\\" err=\\"no" odd="\\u001b[31m"']
