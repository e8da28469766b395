"""``topoproxy status`` against a daemon's admin socket."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.admin import AdminServer
from proxy.cli.status import status
from proxy.model.errors import UnavailableError, UsageError


@pytest.fixture
def daemon(tmp_path: Path):
    """A daemon's admin socket in a thread; gives the configuration that leads to it."""
    (tmp_path / "c.yaml").write_text(f"listen: {tmp_path}/cri.sock\n")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = AdminServer(
        tmp_path / "admin.sock", {"/status": lambda: {"version": "9.9", "pools": {"shared": "0-3"}}}
    )
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield tmp_path / "c.yaml"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def run(*words: object) -> str:
    done = CliRunner().invoke(status, [str(w) for w in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_page(daemon: Path) -> None:
    page = run("--config", daemon)
    assert page.startswith("topoproxy 9.9\n")
    assert "shared  0-3" in page


def test_json_is_what_the_daemon_says(daemon: Path) -> None:
    assert json.loads(run("--json", "--config", daemon)) == {"version": "9.9", "pools": {"shared": "0-3"}}


def test_a_named_socket_needs_no_configuration(daemon: Path) -> None:
    socket = daemon.with_name("admin.sock")
    daemon.write_text("broken: [")
    assert run("--admin", f"unix://{socket}", "--config", daemon).startswith("topoproxy 9.9")


def test_nobody_answers(tmp_path: Path) -> None:
    words = r"nobody listens there \(systemctl status topoproxy tells whether it runs, --admin names another"
    with pytest.raises(UnavailableError, match=words) as caught:
        run("--admin", tmp_path / "no.sock")
    assert caught.value.exit_code == 69


def test_a_wrong_socket(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot use --admin: 'tcp://x'"):
        run("--admin", "tcp://x")
