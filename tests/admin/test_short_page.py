"""Who has less than he was promised, on the status page and in numbers."""

from __future__ import annotations

from proxy.admin.page import render
from proxy.admin.short import short
from proxy.report.metrics import metrics

ENTRIES: list[dict[str, object]] = [
    {
        "container": "ns/db/main",
        "what": "its CPU 3 is offline: it runs on 2, 1 fewer than promised",
        "missing": 1,
    },
    {"container": "ns/\x1bx", "what": "its memory of NUMA node 2 is gone", "missing": 0},
]
PART = """
NOT AS PROMISED (2)
  ns/db/main: its CPU 3 is offline: it runs on 2, 1 fewer than promised
  ns/ x: its memory of NUMA node 2 is gone
"""


def test_containers_with_less_than_promised() -> None:
    assert "\n".join(short(ENTRIES)) + "\n" == PART
    assert PART in render({"shortfalls": ENTRIES})
    assert "PROMISED" not in render({"shortfalls": []})


def test_in_numbers() -> None:
    told = metrics({"shortfalls": ENTRIES})
    assert "topoproxy_containers_below_promise 2\n" in told
    assert "topoproxy_containers_short 2\n" in told
    assert "topoproxy_cpus_short 1\n" in told
    assert "topoproxy_containers_short" not in metrics({})
