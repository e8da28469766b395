"""One hook server called through its socket: its answers, faults and trust checks."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.api.koordinator import hook_pb2 as pb
from proxy.cli.main import cli
from proxy.config.hooks import HooksConfig
from proxy.config.load import parse
from proxy.hooks.answers import Adjustment
from proxy.hooks.events import POINTS
from proxy.hooks.hook import Hook
from proxy.hooks.remote.client import HookServerClient, HookServerSocket
from proxy.hooks.samples import sample
from proxy.model.errors import ConfigError, HookError

HookServer = Any  # of conftest
MakeHook = Callable[..., Hook]

SANDBOX = ("pre_run_pod_sandbox", "post_stop_pod_sandbox")
CONTAINER = (
    "pre_create_container",
    "pre_start_container",
    "post_start_container",
    "post_stop_container",
    "pre_update_container_resources",
)
OTHER = 1234
METHOD = "PreCreateContainerHook"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another user")


def call_hook(hook: Hook, point: str = "pre_create_container", so_far: Adjustment | None = None) -> Any:
    event = sample(point)
    return hook.handlers[point](event) if so_far is None else hook.handlers[point](event, so_far)


def changing(**fields: Any) -> Callable[[Any], Any]:
    """Answer with an echo that changes some resources."""

    def answer(request: Any) -> Any:
        from_request = pb.ContainerResourceHookResponse(container_resources=request.container_resources)
        from_request.container_annotations.update(request.container_annotations)
        from_request.container_envs.update(request.container_envs)
        from_request.pod_cgroup_parent = request.pod_cgroup_parent
        for name, value in fields.items():
            setattr(from_request.container_resources, name, value)
        return from_request

    return answer


@pytest.mark.parametrize("point", SANDBOX + CONTAINER)
def test_every_hook_calls_its_stage_and_an_echo_is_no_adjustment(
    server: HookServer, hook_of: MakeHook, point: str
) -> None:
    assert call_hook(hook_of(server.path), point) is None
    name, request = server.received[0]
    assert name == f"{POINTS[point].__name__}Hook"
    assert request.pod_meta.name


def test_a_change_by_a_server_is_an_adjustment(server: HookServer, hook_of: MakeHook) -> None:
    server.answer = changing(cpu_shares=77)
    hook = hook_of(server.path)
    assert call_hook(hook) == Adjustment(cpu_shares=77)
    assert call_hook(hook, "pre_update_container_resources") == Adjustment(cpu_shares=77)


@pytest.mark.parametrize("point", ["pre_start_container", "post_start_container", "post_stop_container"])
def test_a_change_at_a_point_without_changes_is_ignored(
    server: HookServer, hook_of: MakeHook, point: str
) -> None:
    server.answer = changing(cpu_shares=77)
    assert call_hook(hook_of(server.path), point) is None


def test_a_call_of_a_hanging_server_ends_at_the_timeout(server: HookServer, hook_of: MakeHook) -> None:
    server.answer = server.hang
    hook = hook_of(server.path, timeout=0.2)
    handler = hook.handlers["pre_create_container"]
    started = time.monotonic()
    with pytest.raises(
        HookError, match=r"^cannot call PreCreateContainerHook at /.*: no answer within 0\.2 s$"
    ):
        handler(sample("pre_create_container"))
    assert time.monotonic() - started < 5


def test_a_call_of_a_socket_without_answer_ends_at_the_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "deaf.sock"))
        silent.listen(1)
        client = HookServerClient(tmp_path / "deaf.sock", 0.3)
        with pytest.raises(HookError, match=r"no answer within 0\.3 s|no process answers there"):
            client.call("PreCreateContainerHook", b"")
        client.close()


def test_a_call_of_a_missing_socket_fails_at_once_with_a_short_error(
    tmp_path: Path, hook_of: MakeHook
) -> None:
    hook = hook_of(tmp_path / "gone.sock", timeout=60)
    with pytest.raises(HookError) as raised:
        call_hook(hook)
    message = str(raised.value)
    assert message.startswith(
        f"cannot call PreCreateContainerHook at {tmp_path}/gone.sock: no process answers there ("
    )
    assert "No such file or directory" in message
    assert len(message) < 200 + len(str(tmp_path))


def test_a_restarted_server_is_called_again(server: HookServer, hook_of: MakeHook) -> None:
    hook = hook_of(server.path)
    assert call_hook(hook) is None
    server.stop()
    for _ in range(3):
        with pytest.raises(HookError, match="no process answers there"):
            call_hook(hook)
    server.start()
    restarted = time.monotonic()
    while time.monotonic() - restarted < 20:
        try:
            assert call_hook(hook) is None
            break
        except HookError:
            time.sleep(0.05)
    else:
        pytest.fail("the restarted server is not called again")
    assert len(server.received) == 2


def test_a_server_that_stops_during_a_call_fails_it(server: HookServer, hook_of: MakeHook) -> None:
    server.answer = server.hang
    hook = hook_of(server.path, timeout=30)
    failed: list[HookError] = []

    def call_and_keep_error() -> None:
        try:
            call_hook(hook)
        except HookError as error:
            failed.append(error)

    thread = threading.Thread(target=call_and_keep_error)
    thread.start()
    while not server.received:
        time.sleep(0.01)
    assert server._server is not None
    server._server.stop(None)
    thread.join(20)
    server.let_go.set()
    assert len(failed) == 1
    assert "cannot call PreCreateContainerHook" in str(failed[0])


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"\x0a\xff", b"\x1a\x01\xff"])
def test_an_answer_that_cannot_be_decoded_is_an_error(
    server: HookServer, hook_of: MakeHook, content: bytes
) -> None:
    server.answer = lambda _request: content
    with pytest.raises(HookError, match="cannot use the answer of a hook server: it cannot be decoded"):
        call_hook(hook_of(server.path))


def test_an_answer_of_another_type_is_an_error(server: HookServer, hook_of: MakeHook) -> None:
    """Such an answer can be decoded, but would be read as an empty CPU set."""
    hook = hook_of(server.path)
    sandbox = pb.PodSandboxHookResponse(labels={"a": "b"}, annotations={"c": "d"}, cgroup_parent="/x")
    server.answer = lambda _request: sandbox
    with pytest.raises(HookError, match="it is not a ContainerResourceHookResponse"):
        call_hook(hook)
    container = pb.ContainerResourceHookResponse(container_resources={"cpu_period": 5})
    server.answer = lambda _request: container
    with pytest.raises(HookError, match="it is not a PodSandboxHookResponse"):
        call_hook(hook, "pre_run_pod_sandbox")


def test_unknown_fields_of_an_answer_are_ignored(server: HookServer, hook_of: MakeHook) -> None:
    hook = hook_of(server.path)
    answers = changing(cpu_shares=77)
    server.answer = lambda request: answers(request).SerializeToString() + b"\xa2\x06\x01x"
    assert call_hook(hook) == Adjustment(cpu_shares=77)


def test_messages_of_five_mebibytes_pass_in_both_directions(server: HookServer, hook_of: MakeHook) -> None:
    """Koordinator's proxy accepts at most 4 MiB."""
    large = "x" * (5 << 20)

    def answer(request: Any) -> Any:
        response = changing(cpu_shares=77)(request)
        response.container_annotations["more"] = large
        return response

    server.answer = answer
    adjustment = call_hook(hook_of(server.path, timeout=30), so_far=Adjustment(annotations={"much": large}))
    assert adjustment == Adjustment(cpu_shares=77, annotations={"more": large})
    assert server.received[0][1].container_annotations["much"] == large


def test_messages_without_end_are_refused(server: HookServer, hook_of: MakeHook) -> None:
    hook = hook_of(server.path, timeout=30)
    flood = "x" * (17 << 20)
    with pytest.raises(HookError, match=r"the request has \d+ bytes, and 16777216 is the most"):
        call_hook(hook, so_far=Adjustment(annotations={"much": flood}))
    assert not server.received
    server.answer = lambda _request: pb.ContainerResourceHookResponse(container_annotations={"more": flood})
    with pytest.raises(HookError, match=r"larger than max .*\(RESOURCE_EXHAUSTED\)"):
        call_hook(hook)


def test_a_refusal_by_the_server_is_in_the_error(server: HookServer, hook_of: MakeHook) -> None:
    def refuse(_request: Any) -> Any:
        raise PermissionError("not\n  today " + "z" * 5000)

    server.answer = refuse
    with pytest.raises(HookError, match=r": not today z+ \(PERMISSION_DENIED\)$") as raised:
        call_hook(hook_of(server.path))
    assert len(str(raised.value)) < 1000


def test_a_hook_that_the_server_does_not_implement_is_an_error(server: HookServer) -> None:
    client = HookServerClient(server.path, 5)
    with pytest.raises(HookError, match="the server does not implement this hook"):
        client.call("PreDanceHook", b"")
    client.close()


def test_a_shut_down_hook_sends_no_calls_and_lets_pending_ones_end(
    server: HookServer, hook_of: MakeHook
) -> None:
    hook = hook_of(server.path, timeout=30)
    entered, leave = threading.Event(), threading.Event()

    def slowly(request: Any) -> Any:
        entered.set()
        leave.wait(20)
        return changing(cpu_shares=77)(request)

    server.answer = slowly
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call_hook(hook)))
    thread.start()
    assert entered.wait(20)
    hook.handlers["shutdown"](sample("shutdown"))
    with pytest.raises(HookError, match="the hook has been shut down"):
        call_hook(hook)
    leave.set()
    thread.join(20)
    assert results == [Adjustment(cpu_shares=77)]
    with pytest.raises(HookError, match="the hook has been shut down"):
        call_hook(hook)
    assert len(server.received) == 1


def test_a_socket_path_may_contain_a_space(servers: Callable[[str], HookServer], hook_of: MakeHook) -> None:
    server = servers("a b")
    hook = hook_of(server.path)
    assert call_hook(hook) is None


def test_a_dropped_field_is_reported_once(server: HookServer, hook_of: MakeHook) -> None:
    reported: list[str] = []
    hook = hook_of(server.path, reported=reported)
    server.answer = changing(cpuset_cpus="2,4095", cpu_shares=9)
    for _ in range(3):
        assert call_hook(hook).cpu_shares == 9
    assert len(reported) == 1
    assert reported[0].startswith(
        "dropped a field of the answer of a hook server hook=koordlet point=pre_create_container"
        ' field=cpuset_cpus reason="4095'
    )
    call_hook(hook, "pre_update_container_resources")
    assert len(reported) == 2


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def listen() -> Iterator[Callable[[Path], socket.socket]]:
    """Listen on a socket as another user than its owner."""
    with ExitStack() as stack:

        def make(path: Path, owner: int = 0) -> socket.socket:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            os.chown(path, owner, 0)
            with another_user():
                listener.listen()
            listener.settimeout(0.2)
            return listener

        yield make


def error_of_call(client: HookServerClient) -> str:
    with pytest.raises(HookError) as caught:
        client.call(METHOD, b"secret")
    message = str(caught.value)
    assert message.startswith(f"cannot call {METHOD} at {client.path}: ")
    return message.partition(f"{client.path}: ")[2]


def received(listening: socket.socket) -> bytes:
    """Return all bytes sent to a listening socket, over all connections."""
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
    client = HookServerClient(tmp_path / "hook.sock", 2)
    message = f"process {os.getpid()} of user {OTHER} answers there, which hooks.serverUsers does not name"
    assert [error_of_call(client), error_of_call(client)] == [message, message]
    assert received(listening) == b""
    client.close()


def test_a_socket_of_another_user_is_not_asked(tmp_path: Path, listen: Callable[..., socket.socket]) -> None:
    listening = listen(tmp_path / "hook.sock", owner=OTHER)
    client = HookServerClient(tmp_path / "hook.sock", 2)
    assert (
        error_of_call(client) == f"the socket is owned by user {OTHER}, which hooks.serverUsers does not name"
    )
    assert received(listening) == b""
    client.close()


def test_users_in_the_configuration_are_trusted(tmp_path: Path, listen: Callable[..., socket.socket]) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    path = tmp_path / "theirs/hook.sock"
    listen(path, owner=OTHER)
    message = f"the directory {path.parent} is owned by user {OTHER}: chown root {path.parent}"
    assert (
        HookServerSocket(path).distrust_reason(1)
        == HookServerSocket(path, [OTHER + 1]).distrust_reason(1)
        == message
    )
    assert HookServerSocket(path, [OTHER]).distrust_reason(1) == ""


def test_a_socket_in_a_directory_that_others_can_write_is_not_asked(server: HookServer) -> None:
    """Another user could replace the socket there, even in a sticky directory."""
    client = HookServerClient(server.path, 2)
    for mode in (0o777, 0o1777, 0o775):
        server.path.parent.chmod(mode)
        assert f"(mode {mode:04o}): chmod g" in error_of_call(client)
    server.path.parent.chmod(0o755)
    assert client.call(METHOD, b"") is not None
    assert len(server.received) == 1
    client.close()


def test_a_process_that_takes_the_place_of_a_server_is_not_asked(
    server: HookServer, hook_of: MakeHook, listen: Callable[..., socket.socket]
) -> None:
    """The socket is another one after a restart, and is checked again before gRPC connects."""
    hook = hook_of(server.path)
    handler = hook.handlers["pre_create_container"]
    assert handler(sample("pre_create_container")) is None
    server.stop()
    listening = listen(server.path)
    for _ in range(2):
        with pytest.raises(HookError, match=f"of user {OTHER} answers there"):
            handler(sample("pre_create_container"))
    listening.close()
    server.path.unlink()
    server.start()
    until = time.monotonic() + 20
    while True:
        try:
            assert handler(sample("pre_create_container")) is None
            break
        except HookError:
            assert time.monotonic() < until
            time.sleep(0.05)
    assert len(server.received) == 2


def test_a_checked_socket_is_not_connected_to_again(
    server: HookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = HookServerSocket(server.path)
    assert peer.distrust_reason(1) == ""
    monkeypatch.setattr("proxy.hooks.remote.client._listener", lambda *_: pytest.fail("another connection"))
    assert peer.distrust_reason(1) == ""
    os.chmod(server.path, 0o600)  # any change of the socket causes a new check
    with pytest.raises(pytest.fail.Exception, match="another connection"):
        peer.distrust_reason(1)


def test_a_file_that_is_not_a_socket_is_not_called(tmp_path: Path) -> None:
    (tmp_path / "hook.sock").write_text("")
    client = HookServerClient(tmp_path / "hook.sock", 2)
    assert error_of_call(client) == "it is not a socket"
    client.close()


def test_a_full_listen_queue_ends_at_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "hook.sock"
    with socket.socket(socket.AF_UNIX) as silent, ExitStack() as clients:
        silent.bind(str(path))
        silent.listen(0)
        waiting = clients.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(path))
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="its queue has been full for 0"):
            HookServerSocket(path).distrust_reason(0.3)
        assert 0.2 < time.monotonic() - started < 5


@pytest.fixture
def node(tmp_path: Path) -> tuple[Path, Path]:
    """A configuration with the file of one server; returns the configuration file and the socket."""
    directory = tmp_path / "hookserver.d"
    directory.mkdir()
    path = tmp_path / "hook.sock"
    (directory / "koordlet.json").write_text(
        json.dumps({"remote-endpoint": str(path), "runtime-hooks": ["PreCreateContainer"]})
    )
    file = tmp_path / "config.yaml"
    file.write_text(
        f"hooks: {{serverDirectory: {directory}, directory: {tmp_path}/none,"
        f" vendorDirectory: {tmp_path}/none}}\n"
    )
    return file, path


def test_check_config_and_validate_report_an_untrusted_server(
    node: tuple[Path, Path], listen: Callable[..., socket.socket]
) -> None:
    file, path = node
    server = file.parent / "hookserver.d/koordlet.json"
    check = ["check-config", "--config", str(file)]
    validate = ["hooks", "validate", str(server), "--config", str(file)]
    message = f"of user {OTHER} answers there, which hooks.serverUsers does not name"

    def run_cli(*command: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, list(command))
        return result.exit_code, result.output

    assert message not in run_cli(*check)[1]  # no process listens there yet
    assert run_cli(*validate)[0] == 0
    listen(path)
    assert (
        f"note: hook {server} cannot be used: {path}: process {os.getpid()} {message}" in run_cli(*check)[1]
    )
    code, output = run_cli(*validate)
    assert code != 0
    assert f"koordlet.json: untrusted\n  cannot trust hook server {server}: {path}: process" in output
    file.write_text(
        file.read_text().replace("{serverDirectory", f"{{serverUsers: [{OTHER}], serverDirectory")
    )
    assert message not in run_cli(*check)[1]
    assert run_cli(*validate)[0] == 0


@pytest.mark.parametrize("value", ["root", "[root]", "[-1]", "[4294967295]", "{1: 2}", "[[1]]"])
def test_users_that_are_not_numbers_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.serverUsers"):
        parse(f"hooks: {{serverUsers: {value}}}", "f")


def test_repeated_users_are_read_once() -> None:
    config = parse("hooks: {serverUsers: [1000, 0, 1000]}", "f").hooks
    assert config.server_users == (0, 1000)
    assert HooksConfig().server_users == ()
