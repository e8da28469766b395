"""Signs that kubelet runs: processes, sockets, the health port; and processes that only look like it."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.takeover.service import signs_of_kubelet

NOWHERE = ("127.0.0.1", 1)


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp-") as short:
        (Path(short) / "proc").mkdir()
        yield Path(short)


def process(root: Path, pid: int, name: str, state: str = "S") -> None:
    entry = root / "proc" / str(pid)
    entry.mkdir()
    (entry / "comm").write_text(f"{name}\n")
    (entry / "stat").write_text(f"{pid} ({name} (x) y) {state} 1 1\n")


def found(root: Path, health: tuple[str, int] = NOWHERE) -> tuple[str, ...]:
    return signs_of_kubelet(root / "kubelet", root / "proc", health)


def test_processes_that_run_a_kubelet_are_found(root: Path) -> None:
    process(root, 30, "kubelet")
    process(root, 4, "k3s-server")
    process(root, 5, "kubelet", "Z")
    process(root, 6, "not-kubelet")
    (root / "proc" / "7").mkdir()
    (root / "proc" / "self").mkdir()
    assert found(root) == ("process 4 is k3s-server", "process 30 is kubelet")
    assert signs_of_kubelet(root / "kubelet", root / "absent", NOWHERE) == ()


def test_sockets_count_if_a_process_listens(root: Path) -> None:
    path = root / "kubelet/pod-resources/kubelet.sock"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert found(root) == (), "bound, but no process listens, as after the end of kubelet"
        server.listen()
        assert found(root) == (f"a process listens at {path}",)
    assert path.exists()
    assert found(root) == ()


def test_the_health_port(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert found(root, ("127.0.0.1", port)) == (f"its health port 127.0.0.1:{port} answers",)
