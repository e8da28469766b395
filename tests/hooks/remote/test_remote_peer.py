"""Only a process of a trusted user is asked: the socket's directories, its owner, and its listener."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.cli.main import cli
from proxy.config.hooks import HooksConfig
from proxy.config.load import parse
from proxy.hooks.hook import Hook
from proxy.hooks.remote.client import Client
from proxy.hooks.remote.peer import Peer
from proxy.hooks.samples import sample
from proxy.model.errors import ConfigError, HookError

HookServer = Any  # of conftest
MakeHook = Callable[..., Hook]
OTHER = 1234
METHOD = "PreCreateContainerHook"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def listen() -> Iterator[Callable[[Path], socket.socket]]:
    """Listen at a path as another user than the path's owner."""
    with ExitStack() as stack:

        def make(path: Path, owner: int = 0) -> socket.socket:
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.bind(str(path))
            os.chown(path, owner, 0)
            with another_user():
                made.listen()
            made.settimeout(0.2)
            return made

        yield make


def asked(client: Client) -> str:
    with pytest.raises(HookError) as caught:
        client.call(METHOD, b"secret")
    message = str(caught.value)
    assert message.startswith(f"cannot call {METHOD} at {client.path}: ")
    return message.partition(f"{client.path}: ")[2]


def received(listening: socket.socket) -> bytes:
    """Give all that was sent to a listening socket, over all connections."""
    content = b""
    while True:
        try:
            end, _ = listening.accept()
        except TimeoutError:
            return content
        with end:
            end.settimeout(0.2)
            try:
                while data := end.recv(4096):
                    content += data
            except TimeoutError:
                pass


def test_a_process_of_another_user_is_not_asked(tmp_path: Path, listen: Callable[..., socket.socket]) -> None:
    listening = listen(tmp_path / "hook.sock")
    client = Client(tmp_path / "hook.sock", 2)
    words = f"process {os.getpid()} of user {OTHER} answers there, which hooks.serverUsers does not name"
    assert [asked(client), asked(client)] == [words, words]
    assert received(listening) == b""
    client.close()


def test_a_socket_of_another_user_is_not_asked(tmp_path: Path, listen: Callable[..., socket.socket]) -> None:
    listening = listen(tmp_path / "hook.sock", owner=OTHER)
    client = Client(tmp_path / "hook.sock", 2)
    assert asked(client) == f"the socket is owned by user {OTHER}, which hooks.serverUsers does not name"
    assert received(listening) == b""
    client.close()


def test_users_that_the_configuration_names_are_asked(
    tmp_path: Path, listen: Callable[..., socket.socket]
) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    path = tmp_path / "theirs/hook.sock"
    listen(path, owner=OTHER)
    words = f"the directory {path.parent} is owned by user {OTHER}: chown root {path.parent}"
    assert Peer(path).distrust_reason(1) == Peer(path, [OTHER + 1]).distrust_reason(1) == words
    assert Peer(path, [OTHER]).distrust_reason(1) == ""


def test_a_socket_in_a_directory_that_others_can_write_is_not_asked(server: HookServer) -> None:
    """There another user could put a socket in its place, also where the directory is sticky."""
    client = Client(server.path, 2)
    for mode in (0o777, 0o1777, 0o775):
        server.path.parent.chmod(mode)
        assert f"(mode {mode:04o}): chmod g" in asked(client)
    server.path.parent.chmod(0o755)
    assert client.call(METHOD, b"") is not None
    assert len(server.asked) == 1
    client.close()


def test_a_process_that_takes_the_place_of_a_server_is_not_asked(
    server: HookServer, hook_of: MakeHook, listen: Callable[..., socket.socket]
) -> None:
    """After a restart the socket is another one, and is checked again before gRPC's connection is used."""
    hook = hook_of(server.path)
    ask = hook.handlers["pre_create_container"]
    assert ask(sample("pre_create_container")) is None
    server.stop()
    listening = listen(server.path)
    for _ in range(2):
        with pytest.raises(HookError, match=f"of user {OTHER} answers there"):
            ask(sample("pre_create_container"))
    listening.close()
    server.path.unlink()
    server.start()
    until = time.monotonic() + 20
    while True:
        try:
            assert ask(sample("pre_create_container")) is None
            break
        except HookError:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert len(server.asked) == 2


def test_a_socket_that_is_known_is_not_connected_to_again(
    server: HookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer(server.path)
    assert peer.distrust_reason(1) == ""
    monkeypatch.setattr("proxy.hooks.remote.peer._listener", lambda *_: pytest.fail("another connection"))
    assert peer.distrust_reason(1) == ""
    os.chmod(server.path, 0o600)  # anything that changes it is looked at
    with pytest.raises(pytest.fail.Exception, match="another connection"):
        peer.distrust_reason(1)


def test_a_file_that_is_not_a_socket_is_not_called(tmp_path: Path) -> None:
    (tmp_path / "hook.sock").write_text("")
    client = Client(tmp_path / "hook.sock", 2)
    assert asked(client) == "it is not a socket"
    client.close()


def test_a_full_queue_ends_in_time(tmp_path: Path) -> None:
    path = tmp_path / "hook.sock"
    with socket.socket(socket.AF_UNIX) as deaf, ExitStack() as clients:
        deaf.bind(str(path))
        deaf.listen(0)
        waiting = clients.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(path))
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match="its queue has been full for 0"):
            Peer(path).distrust_reason(0.3)
        assert 0.2 < time.monotonic() - begun < 5


@pytest.fixture
def node(tmp_path: Path) -> tuple[Path, Path]:
    """A configuration with one server's file; gives the configuration and the socket."""
    directory = tmp_path / "hookserver.d"
    directory.mkdir()
    path = tmp_path / "hook.sock"
    (directory / "koordlet.json").write_text(
        json.dumps({"remote-endpoint": str(path), "runtime-hooks": ["PreCreateContainer"]})
    )
    file = tmp_path / "config.yaml"
    file.write_text(
        f"hooks: {{serverFolder: {directory}, folder: {tmp_path}/none, vendorFolder: {tmp_path}/none}}\n"
    )
    return file, path


def test_check_config_and_validate_report_it(
    node: tuple[Path, Path], listen: Callable[..., socket.socket]
) -> None:
    file, path = node
    server = file.parent / "hookserver.d/koordlet.json"
    check = ["check-config", "--config", str(file)]
    validate = ["hooks", "validate", str(server), "--config", str(file)]
    words = f"of user {OTHER} answers there, which hooks.serverUsers does not name"

    def said(*command: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, list(command))
        return done.exit_code, done.output

    assert words not in said(*check)[1]  # nothing runs there yet
    assert said(*validate)[0] == 0
    listen(path)
    assert f"note: hook {server} cannot be used: {path}: process {os.getpid()} {words}" in said(*check)[1]
    code, output = said(*validate)
    assert code != 0
    assert f"koordlet.json: untrusted\n  cannot trust hook server {server}: {path}: process" in output
    file.write_text(file.read_text().replace("{serverFolder", f"{{serverUsers: [{OTHER}], serverFolder"))
    assert words not in said(*check)[1]
    assert said(*validate)[0] == 0


@pytest.mark.parametrize("value", ["root", "[root]", "[-1]", "[4294967295]", "{1: 2}", "[[1]]"])
def test_users_that_are_not_numbers_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.serverUsers"):
        parse(f"hooks: {{serverUsers: {value}}}", "f")


def test_users_are_read_once_each() -> None:
    config = parse("hooks: {serverUsers: [1000, 0, 1000]}", "f").hooks
    assert config.server_users == (0, 1000)
    assert HooksConfig().server_users == ()
