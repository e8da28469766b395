"""The admin socket of a daemon, served in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from proxy.admin.server import AdminServer, Route

Serve = Callable[[Mapping[str, Route]], Path]


@contextmanager
def _serving(path: Path, routes: Mapping[str, Route]) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = AdminServer(path, dict(routes))
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def serve_admin(tmp_path: Path) -> Iterator[Serve]:
    """Serve routes at an admin socket; returns the configuration file that names it."""
    with ExitStack() as stack:

        def serve(routes: Mapping[str, Route]) -> Path:
            (tmp_path / "c.yaml").write_text(f"listen: {tmp_path}/cri.sock\n")
            stack.enter_context(_serving(tmp_path / "admin.sock", routes))
            return tmp_path / "c.yaml"

        yield serve


@pytest.fixture
def removed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the current directory be one that was removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
