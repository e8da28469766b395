"""The table of ``make coverage``."""

from __future__ import annotations

from tests.testkit.coverage_table import package_of, table


def test_packages_are_directories_below_proxy() -> None:
    assert package_of("proxy/relay/session.py") == "relay"
    assert package_of("proxy/hooks/engine/sequence.py") == "hooks"
    assert package_of("proxy/daemon.py") == "proxy"


def test_a_line_for_each_package_and_the_sum() -> None:
    counts = {
        "proxy/relay/session.py": (100, 10),
        "proxy/relay/flow.py": (100, 0),
        "proxy/daemon.py": (50, 50),
        "proxy/hooks/remote/__init__.py": (0, 0),
    }
    summaries = {
        file: {"summary": {"num_statements": whole, "missing_lines": missing}}
        for file, (whole, missing) in counts.items()
    }
    assert table({"files": summaries}) == [
        "package        lines  not run     run",
        "hooks              0        0  100.0%",
        "proxy             50       50    0.0%",
        "relay            200       10   95.0%",
        "all              250       60   76.0%",
    ]
