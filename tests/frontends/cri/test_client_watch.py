"""The watch for a missing client: pods run, and no client is connected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from proxy.frontends.cri.client_watch import LIKELY_CAUSE, NO_CLIENT, REPORT_AFTER_S, ClientWatch
from tests.testkit.captured_log import telemetry


class Watched:
    """A watch with an acceptor, pods and files that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pods = 1
        self.others: list[tuple[Path, str]] = []
        self.reported: list[str] = []
        self.telemetry = telemetry(self.reported)
        self.acceptor: Any = SimpleNamespace(connections=0)
        self.watch = ClientWatch(
            self.acceptor, self.telemetry, lambda: self.pods, lambda: self.others, lambda: self.now
        )

    def connecting(self) -> list[tuple[Path, str]]:
        """Let a client connect while the files are read."""
        self.acceptor.connections = 1
        return []

    def after(self, seconds: float) -> list[str]:
        """Check after some seconds; return the problems."""
        self.now += seconds
        asyncio.run(self.watch.check())
        return [str(problem["what"]) for problem in self.telemetry.problems()]


def test_a_minute_without_a_client_is_a_problem_with_the_likely_cause() -> None:
    w = Watched()
    assert w.after(0) == w.after(REPORT_AFTER_S - 1) == []
    (problem,) = w.after(1)
    assert problem.startswith(NO_CLIENT)
    assert "kubeadm-flags.env" in problem
    assert LIKELY_CAUSE in problem
    assert "instance-config.yaml" not in problem, "kubelet does not read that file"
    assert len(w.after(100)) == 1
    assert len(w.reported) == 1, "it is logged once"
    w.acceptor.connections = 1
    assert w.after(5) == []
    assert w.reported[1].startswith("resolved")
    w.acceptor.connections = 0
    assert w.after(5) == w.after(REPORT_AFTER_S - 1) == []
    assert len(w.after(1)) == 1


def test_the_files_that_lead_kubelet_elsewhere_are_named() -> None:
    w = Watched()
    w.others = [(Path("/k/kubeadm-flags.env"), "unix:///run/containerd/containerd.sock")]
    w.after(0)
    (problem,) = w.after(REPORT_AFTER_S)
    assert "/k/kubeadm-flags.env names unix:///run/containerd/containerd.sock" in problem


def test_a_client_that_connects_while_the_files_are_read_is_no_problem() -> None:
    w = Watched()
    w.watch = ClientWatch(w.acceptor, w.telemetry, lambda: 1, w.connecting, lambda: w.now)
    w.after(0)
    assert w.after(REPORT_AFTER_S) == []
    assert w.reported == []
    w.acceptor.connections = 0
    assert w.after(5) == w.after(REPORT_AFTER_S - 1) == []


def test_a_node_without_pods_needs_no_client() -> None:
    w = Watched()
    w.pods = 0
    assert w.after(0) == w.after(10 * REPORT_AFTER_S) == []
    w.pods = 1
    assert w.after(1) == w.after(REPORT_AFTER_S - 1) == []
    assert len(w.after(1)) == 1
