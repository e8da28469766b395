"""One hook server through its socket: answers, and all that can go wrong on the way."""

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
from proxy.hooks.remote.client import Client, Peer
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


def ask(hook: Hook, point: str = "pre_create_container", so_far: Adjustment | None = None) -> Any:
    event = sample(point)
    return hook.handlers[point](event) if so_far is None else hook.handlers[point](event, so_far)


def changing(**fields: Any) -> Callable[[Any], Any]:
    """Answer with an echo in which some resources are changed."""

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
def test_every_hook_is_asked_by_its_name_and_an_echo_wants_nothing(
    server: HookServer, hook_of: MakeHook, point: str
) -> None:
    assert ask(hook_of(server.path), point) is None
    name, request = server.asked[0]
    assert name == f"{POINTS[point].__name__}Hook"
    assert request.pod_meta.name


def test_what_a_server_changes_is_wanted(server: HookServer, hook_of: MakeHook) -> None:
    server.answer = changing(cpu_shares=77)
    hook = hook_of(server.path)
    assert ask(hook) == Adjustment(cpu_shares=77)
    assert ask(hook, "pre_update_container_resources") == Adjustment(cpu_shares=77)


@pytest.mark.parametrize("point", ["pre_start_container", "post_start_container", "post_stop_container"])
def test_answers_that_cannot_be_used_at_a_point_are_none(
    server: HookServer, hook_of: MakeHook, point: str
) -> None:
    server.answer = changing(cpu_shares=77)
    assert ask(hook_of(server.path), point) is None


def test_a_server_that_hangs_is_given_up_in_time(server: HookServer, hook_of: MakeHook) -> None:
    server.answer = server.hang
    hook = hook_of(server.path, timeout=0.2)
    ask_again = hook.handlers["pre_create_container"]
    started = time.monotonic()
    with pytest.raises(
        HookError, match=r"^cannot call PreCreateContainerHook at /.*: no answer within 0\.2 s$"
    ):
        ask_again(sample("pre_create_container"))
    assert time.monotonic() - started < 5


def test_a_socket_without_answer_is_given_up_in_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf.sock"))
        deaf.listen(1)
        client = Client(tmp_path / "deaf.sock", 0.3)
        with pytest.raises(HookError, match=r"no answer within 0\.3 s|no process answers there"):
            client.call("PreCreateContainerHook", b"")
        client.close()


def test_a_missing_socket_fails_at_once_in_one_sentence(tmp_path: Path, hook_of: MakeHook) -> None:
    hook = hook_of(tmp_path / "gone.sock", timeout=60)
    with pytest.raises(HookError) as raised:
        ask(hook)
    words = str(raised.value)
    assert words.startswith(
        f"cannot call PreCreateContainerHook at {tmp_path}/gone.sock: no process answers there ("
    )
    assert "No such file or directory" in words
    assert len(words) < 200 + len(str(tmp_path))


def test_a_server_that_dies_and_comes_back_is_used_again(server: HookServer, hook_of: MakeHook) -> None:
    hook = hook_of(server.path)
    assert ask(hook) is None
    server.stop()
    for _ in range(3):
        with pytest.raises(HookError, match="no process answers there"):
            ask(hook)
    server.start()
    back = time.monotonic()
    while time.monotonic() - back < 20:
        try:
            assert ask(hook) is None
            break
        except HookError:
            time.sleep(0.05)
    else:
        pytest.fail("the server is not asked again")
    assert len(server.asked) == 2


def test_a_server_that_dies_while_it_is_asked(server: HookServer, hook_of: MakeHook) -> None:
    server.answer = server.hang
    hook = hook_of(server.path, timeout=30)
    failed: list[HookError] = []

    def ask_it() -> None:
        try:
            ask(hook)
        except HookError as error:
            failed.append(error)

    thread = threading.Thread(target=ask_it)
    thread.start()
    while not server.asked:
        time.sleep(0.01)
    assert server._server is not None
    server._server.stop(None)
    thread.join(20)
    server.let_go.set()
    assert len(failed) == 1
    assert "cannot call PreCreateContainerHook" in str(failed[0])


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"\x0a\xff", b"\x1a\x01\xff"])
def test_garbage_is_not_an_answer(server: HookServer, hook_of: MakeHook, content: bytes) -> None:
    server.answer = lambda _request: content
    with pytest.raises(HookError, match="cannot use the answer of a hook server: it cannot be decoded"):
        ask(hook_of(server.path))


def test_an_answer_of_another_type_is_none(server: HookServer, hook_of: MakeHook) -> None:
    """On the wire it decodes; what it says would be taken for an empty set of CPUs."""
    hook = hook_of(server.path)
    sandbox = pb.PodSandboxHookResponse(labels={"a": "b"}, annotations={"c": "d"}, cgroup_parent="/x")
    server.answer = lambda _request: sandbox
    with pytest.raises(HookError, match="it is not a ContainerResourceHookResponse"):
        ask(hook)
    container = pb.ContainerResourceHookResponse(container_resources={"cpu_period": 5})
    server.answer = lambda _request: container
    with pytest.raises(HookError, match="it is not a PodSandboxHookResponse"):
        ask(hook, "pre_run_pod_sandbox")


def test_fields_of_later_versions_do_not_matter(server: HookServer, hook_of: MakeHook) -> None:
    hook = hook_of(server.path)
    answers = changing(cpu_shares=77)
    server.answer = lambda request: answers(request).SerializeToString() + b"\xa2\x06\x01x"
    assert ask(hook) == Adjustment(cpu_shares=77)


def test_messages_of_five_mebibytes_pass_both_ways(server: HookServer, hook_of: MakeHook) -> None:
    """Koordinator's proxy ends at 4 MiB."""
    large = "x" * (5 << 20)

    def answer(request: Any) -> Any:
        said = changing(cpu_shares=77)(request)
        said.container_annotations["more"] = large
        return said

    server.answer = answer
    wanted = ask(hook_of(server.path, timeout=30), so_far=Adjustment(annotations={"much": large}))
    assert wanted == Adjustment(cpu_shares=77, annotations={"more": large})
    assert server.asked[0][1].container_annotations["much"] == large


def test_messages_without_end_are_refused(server: HookServer, hook_of: MakeHook) -> None:
    hook = hook_of(server.path, timeout=30)
    flood = "x" * (17 << 20)
    with pytest.raises(HookError, match=r"the request has \d+ bytes, and 16777216 is the most"):
        ask(hook, so_far=Adjustment(annotations={"much": flood}))
    assert not server.asked
    server.answer = lambda _request: pb.ContainerResourceHookResponse(container_annotations={"more": flood})
    with pytest.raises(HookError, match=r"larger than max .*\(RESOURCE_EXHAUSTED\)"):
        ask(hook)


def test_a_refusal_of_the_server_is_named(server: HookServer, hook_of: MakeHook) -> None:
    def refuse(_request: Any) -> Any:
        raise PermissionError("not\n  today " + "z" * 5000)

    server.answer = refuse
    with pytest.raises(HookError, match=r": not today z+ \(PERMISSION_DENIED\)$") as raised:
        ask(hook_of(server.path))
    assert len(str(raised.value)) < 1000


def test_a_server_that_does_not_know_the_hook(server: HookServer) -> None:
    client = Client(server.path, 5)
    with pytest.raises(HookError, match="the server does not implement this hook"):
        client.call("PreDanceHook", b"")
    client.close()


def test_a_shut_down_hook_sends_nothing_and_lets_calls_end(server: HookServer, hook_of: MakeHook) -> None:
    hook = hook_of(server.path, timeout=30)
    entered, leave = threading.Event(), threading.Event()

    def slowly(request: Any) -> Any:
        entered.set()
        leave.wait(20)
        return changing(cpu_shares=77)(request)

    server.answer = slowly
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(ask(hook)))
    thread.start()
    assert entered.wait(20)
    hook.handlers["shutdown"](sample("shutdown"))
    with pytest.raises(HookError, match="the hook has been shut down"):
        ask(hook)
    leave.set()
    thread.join(20)
    assert got == [Adjustment(cpu_shares=77)]
    with pytest.raises(HookError, match="the hook has been shut down"):
        ask(hook)
    assert len(server.asked) == 1


def test_a_socket_with_an_unusual_name(servers: Callable[[str], HookServer], hook_of: MakeHook) -> None:
    server = servers("a b")
    hook = hook_of(server.path)
    assert ask(hook) is None


def test_what_cannot_be_done_is_reported_once(server: HookServer, hook_of: MakeHook) -> None:
    reported: list[str] = []
    hook = hook_of(server.path, reported=reported)
    server.answer = changing(cpuset_cpus="2,4095", cpu_shares=9)
    for _ in range(3):
        assert ask(hook).cpu_shares == 9
    assert len(reported) == 1
    assert reported[0].startswith(
        "dropped a field of the answer of a hook server hook=koordlet point=pre_create_container"
        ' field=cpuset_cpus reason="4095'
    )
    ask(hook, "pre_update_container_resources")
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
    """Return all that was sent to a listening socket, over all connections."""
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
    monkeypatch.setattr("proxy.hooks.remote.client._listener", lambda *_: pytest.fail("another connection"))
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
        f"hooks: {{serverDirectory: {directory}, directory: {tmp_path}/none,"
        f" vendorDirectory: {tmp_path}/none}}\n"
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
    file.write_text(
        file.read_text().replace("{serverDirectory", f"{{serverUsers: [{OTHER}], serverDirectory")
    )
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
