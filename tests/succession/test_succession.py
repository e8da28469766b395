"""A daemon that is replaced by another process: the processes, and the messages between them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.early_socket import EarlySocket
from proxy.engine.inflight_call_rules import ORPHAN_GRACE_S
from proxy.executor.former_calls import RelayedCall
from proxy.model.errors import (
    CannotCreateError,
    LockedError,
    RuntimeCallError,
    TopoproxyError,
    UnavailableError,
)
from proxy.process import _serve
from proxy.sockets.unix_socket import Listener, open_listener
from proxy.succession.messages import FAILED, QUIET, SUCCEEDS, receive
from proxy.succession.predecessor import Predecessor
from proxy.succession.replacement import DaemonReplacement
from proxy.succession.successor import Successor
from proxy.upgrade.replacement import replace_daemon
from tests.succession.conftest import LIMIT_S, ProcessNode
from tests.testkit.daemon import run, temporary_node
from tests.testkit.waiting import until


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True


# -- the processes ----------------------------------------------------------------------------------------


def test_a_replaced_daemon_ends_its_calls_and_owners_stay(node: ProcessNode) -> None:
    slow = threading.Event()
    node.runtime.before("StopContainer", lambda request: slow.wait(LIMIT_S))
    with node.client() as client:
        owner = client.launch(DemoPod("own", "LSE", cpuset="2-3")).container_id
        stopped = client.launch(DemoPod("web", "LS")).container_id
        stopping = threading.Thread(target=client.stop, args=(stopped,))
        stopping.start()
        node.wait(lambda: any(call.method == "StopContainer" for call in node.runtime.calls))
        assert node.notified() == ["READY=1"]
        pid = replace_daemon(node.admin, LIMIT_S).pid
        assert pid == node.lock_holder() != node.popen.pid
        assert node.notified() == [f"MAINPID={pid}", "READY=1"], (
            "systemd has another main process, then it is ready"
        )
        assert node.popen.poll() is None, "it still relays a call"
        with node.client() as another:
            assert another.version().startswith("standin")
            later = another.launch(DemoPod("late", "LS")).container_id
        page: Any = query_admin(node.admin, "/status")
        assert [row["cpus"] for row in page["exclusive"]] == ["2-3"]
        slow.set()
        stopping.join(LIMIT_S)
    assert node.popen.wait(LIMIT_S) == 0, node.log
    assert node.runtime.containers[stopped].state == pb.CONTAINER_EXITED
    node.wait(lambda: node.cpus(later) == "0-1,4-15")
    assert node.cpus(owner) == "2-3"
    assert "replaced" in node.log
    assert replace_daemon(node.admin, LIMIT_S).pid not in (pid, node.popen.pid), (
        "a further replacement works too"
    )
    node.wait(lambda: not Path(f"/proc/{pid}").exists())
    os.kill(node.lock_holder(), signal.SIGTERM)
    node.wait(lambda: not connects(node.directory / "cri.sock"))
    assert not (node.directory / "cri.sock").exists(), "the last process removes the socket"


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [("mode: nonsense", "'nonsense'"), ("listen: unix:///run/other.sock", "which needs a restart")],
)
def test_a_daemon_whose_successor_does_not_start_continues_to_serve(
    node: ProcessNode, configuration: str, reason: str
) -> None:
    node.file.write_text(
        node.file.read_text().replace(f"listen: unix://{node.directory}/cri.sock", "") + "\n" + configuration
        if configuration.startswith("listen")
        else node.file.read_text() + "\n" + configuration
    )
    for _ in range(2):
        with pytest.raises(TopoproxyError, match="this daemon continues"):
            replace_daemon(node.admin, LIMIT_S)
    assert reason in node.log
    assert node.answers("ready") is True
    assert node.lock_holder() == node.popen.pid
    with node.client() as client:
        assert client.version()


def test_a_daemon_that_is_not_ready_has_still_replaced_its_predecessor(node: ProcessNode) -> None:
    node.runtime.stop()
    new = replace_daemon(node.admin, LIMIT_S, ready_s=1.0)
    assert new.pid == node.lock_holder() != node.popen.pid
    assert "runtime" in new.reason
    os.kill(new.pid, signal.SIGTERM)
    node.wait(lambda: not connects(node.directory / "cri.sock"))


def test_a_stop_does_not_wait_for_the_calls_of_a_replaced_daemon(node: ProcessNode) -> None:
    slow = threading.Event()
    node.runtime.before("StopContainer", lambda request: slow.wait(LIMIT_S))
    with node.client() as client:
        stopped = client.launch(DemoPod("web", "LS")).container_id
        failed: list[Exception] = []

        def stop() -> None:
            try:
                client.stop(stopped)
            except (UnavailableError, RuntimeCallError) as error:
                failed.append(error)

        stopping = threading.Thread(target=stop)
        stopping.start()
        node.wait(lambda: any(call.method == "StopContainer" for call in node.runtime.calls))
        replace_daemon(node.admin, LIMIT_S)
        node.popen.send_signal(signal.SIGTERM)
        assert node.popen.wait(LIMIT_S) == 0, node.log
        stopping.join(LIMIT_S)
        slow.set()
    assert failed


def test_an_update_that_the_replaced_daemon_still_relays_delays_owners(node: ProcessNode) -> None:
    """The runtime may execute it long after the successor has started, with the old CPUs."""
    node.configure("drainTimeout: 100ms\ncallTimeout: 1s")
    os.kill(node.popen.pid, signal.SIGHUP)
    slow = threading.Event()
    node.runtime.before("UpdateContainerResources", lambda request: slow.wait(LIMIT_S))
    with node.client() as client:
        shares = client.launch(DemoPod("web", "LS")).container_id
        limits = pb.LinuxContainerResources(cpu_shares=512)
        updating = threading.Thread(target=client.update, args=(shares, limits))
        updating.start()
        node.wait(lambda: any(call.method == "UpdateContainerResources" for call in node.runtime.calls))
        replace_daemon(node.admin, LIMIT_S)
        node.wait(lambda: node.answers("ready"))
        time.sleep(ORPHAN_GRACE_S + 1.0)  # so a call would be over that a killed daemon may have sent
        with node.client() as another:
            with pytest.raises(RuntimeCallError, match="still busy with calls"):
                another.launch(DemoPod("own", "LSE", cpuset="2-3"))
            assert node.popen.poll() is None, "it relays the update"
            slow.set()
            updating.join(LIMIT_S)
            assert node.popen.wait(LIMIT_S) == 0, node.log
            time.sleep(ORPHAN_GRACE_S + 1.0)
            owner = another.launch(DemoPod("own2", "LSE", cpuset="2-3")).container_id
    node.wait(lambda: node.cpus(shares) == "0-1,4-15")
    assert node.cpus(owner) == "2-3"


# -- what a daemon does with calls after it was replaced --------------------------------------------------


def test_a_replaced_daemon_makes_no_decisions() -> None:
    with temporary_node() as node:
        daemon = node.daemon()

        async def scenario() -> None:
            container = await node.launch(DemoPod("web", "LS"))
            assert daemon.parts.call_flow is not None
            daemon.parts.call_flow.replaced = True

            def late() -> None:
                with node.client() as client, pytest.raises(UnavailableError, match="connect again"):
                    client.launch(DemoPod("late", "LS"))
                with node.client() as client:
                    assert client.version()

            await asyncio.to_thread(late)
            assert daemon.executor is not None
            assert container in daemon.executor.state.containers

        run(daemon, scenario, reconciled=True)


@pytest.mark.parametrize(("drain", "placing_s"), [("100ms", 5.0), ("10m", 0.1)])
def test_a_call_held_during_a_replacement_is_refused_and_never_forwarded(
    monkeypatch: pytest.MonkeyPatch, drain: str, placing_s: float
) -> None:
    class Prepared:
        pid = 1

        def is_alive(self) -> bool:
            return True

        def take_over(self, *, quiet: bool, calls: Sequence[RelayedCall]) -> None:
            assert not quiet
            assert not calls

        def over(self, name: str) -> None:
            raise AssertionError(name)

        def follow(self) -> None:
            pass

    monkeypatch.setattr("proxy.daemon_handover.QUIET_WAIT_S", 0.1)
    monkeypatch.setattr("proxy.daemon_handover.GOAWAY_S", 0.1)
    monkeypatch.setattr("proxy.daemon_handover.PLACING_CALLS_S", placing_s)
    with temporary_node() as node:
        daemon = node.daemon(f"drainTimeout: {drain}\ncallTimeout: 3s")

        async def scenario() -> None:
            assert daemon.executor is not None
            assert daemon.parts.call_flow is not None
            assert daemon.parts.acceptor is not None
            daemon.executor.reconciled.clear()  # calls are held until a reconcile, for three seconds at most

            def late() -> None:
                with node.client() as client, pytest.raises(UnavailableError, match="connect again"):
                    client.launch(DemoPod("late", "LS"))

            held_call = asyncio.create_task(asyncio.to_thread(late))
            async with asyncio.timeout(LIMIT_S):
                while not daemon.parts.acceptor.is_placing():
                    await asyncio.sleep(0.01)
            daemon.replacement.successor = Prepared()  # type: ignore[assignment]
            await daemon.hand_over(lambda: False)
            await held_call
            await asyncio.sleep(3.2)
            assert not any(call.method == "RunPodSandbox" for call in node.runtime.calls)

        run(daemon, scenario, reconciled=True)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_successor_of_a_quiet_daemon_expects_no_relayed_calls(
    channel: tuple[socket.socket, Predecessor], quiet: bool
) -> None:
    with temporary_node() as node:

        async def fill() -> None:
            await node.launch(DemoPod("web", "LS"))

        run(node.daemon(), fill, reconciled=True)
        _, predecessor = channel
        predecessor.was_quiet = quiet
        daemon = node.daemon()
        listener = open_listener(daemon.config.listen, daemon.config.runtime, {})
        daemon._early = EarlySocket(daemon.config, [], node.machine, listener, predecessor)
        found: list[int] = []

        async def look() -> None:
            assert daemon.executor is not None
            found.append(len(daemon.executor.state.inflight.calls))

        run(daemon, look)
        assert found == [0 if quiet else 1]


# -- the channel ------------------------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with open_listener(tmp_path / "cri.sock", tmp_path / "runtime.sock", {}) as one:
        yield one


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, Predecessor]]:
    """Return the predecessor's end of the channel, and the successor's object for the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {SUCCEEDS: str(theirs.detach()), "PATH": "/bin"}
    predecessor = Predecessor.of(environ)
    assert predecessor is not None
    assert environ == {"PATH": "/bin"}
    yield ours, predecessor
    ours.close()
    predecessor.close()


def facts(listener: Listener) -> bytes:
    page = {"path": str(listener.path), "adopted": listener.adopted, "identity": listener.identity}
    return json.dumps(page).encode()


def test_the_socket_and_its_lock_are_passed_to_the_successor(
    channel: tuple[socket.socket, Predecessor], listener: Listener, tmp_path: Path
) -> None:
    ours, predecessor = channel
    socket.send_fds(ours, [facts(listener)], listener.descriptors())
    inherited = predecessor.listener(tmp_path / "cri.sock")
    assert not os.get_inheritable(inherited.socket.fileno())
    listener.hand_over()
    assert connects(tmp_path / "cri.sock")
    assert inherited.is_in_place
    with pytest.raises(LockedError):
        open_listener(tmp_path / "cri.sock", tmp_path / "runtime.sock", {})
    inherited.close()
    assert not (tmp_path / "cri.sock").exists()
    open_listener(tmp_path / "cri.sock", tmp_path / "runtime.sock", {}).close()


def test_another_socket_path_needs_a_restart(
    channel: tuple[socket.socket, Predecessor], listener: Listener, tmp_path: Path
) -> None:
    ours, predecessor = channel
    socket.send_fds(ours, [facts(listener)], listener.descriptors())
    with pytest.raises(CannotCreateError, match="needs a restart"):
        predecessor.listener(tmp_path / "other.sock")
    assert connects(tmp_path / "cri.sock")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_successor_waits_for_its_turn_and_reports_that_it_serves(
    channel: tuple[socket.socket, Predecessor], quiet: bool
) -> None:
    ours, predecessor = channel
    successor = Successor(ours, 7)
    turn = threading.Thread(target=lambda: (predecessor.wait_for_turn(), predecessor.report_serving()))
    turn.start()
    assert json.loads(ours.recv(200)) == {"ready": True, "pid": os.getpid()}
    successor.take_over(quiet=quiet)
    turn.join()
    assert predecessor.was_quiet is quiet


def test_an_older_daemon_names_no_relayed_calls(
    channel: tuple[socket.socket, Predecessor],
) -> None:
    ours, predecessor = channel
    ours.send(json.dumps({QUIET: True}).encode())
    predecessor.wait_for_turn()
    assert (predecessor.was_quiet, predecessor.relayed) == (True, [])


MANY_CPUS = ",".join(str(cpu) for cpu in range(0, 8192, 2))
"""The longest list of CPUs: every second one of as many as Linux supports."""
RELAYED = [
    RelayedCall("call-1", "UpdateContainerResources", "abc", MANY_CPUS),
    RelayedCall("call-2", "CreateContainer", "token"),
    RelayedCall("call-3", "StartContainer", "def", "0-3", released=True),
]


@pytest.mark.parametrize("ends", [True, False])
def test_a_successor_learns_which_calls_are_relayed_and_which_are_over(
    channel: tuple[socket.socket, Predecessor], ends: bool
) -> None:
    ours, predecessor = channel
    successor, received, ended = Successor(ours, 7), list[str](), list[bool]()

    def serve(_: object) -> None:
        predecessor.follow(received.append, lambda: ended.append(True))
        predecessor.report_serving()

    async def scenario() -> None:
        waiting = asyncio.ensure_future(asyncio.to_thread(predecessor.wait_for_turn))
        waiting.add_done_callback(serve)
        assert json.loads(await asyncio.to_thread(ours.recv, 200))["ready"] is True
        successor.over("call-2")  # before the successor serves
        await asyncio.to_thread(successor.take_over, quiet=False, calls=RELAYED)
        successor.follow()
        successor.over("call-1")
        if ends:
            ours.close()
        async with asyncio.timeout(LIMIT_S):
            while len(received) < 2 or bool(ended) is not ends:
                await asyncio.sleep(0.01)
        predecessor.close()
        successor.over("call-3")  # which has ended meanwhile

    asyncio.run(scenario())
    assert predecessor.relayed == RELAYED
    assert received == ["call-2", "call-1"]


def test_a_message_that_is_too_long_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(bytes(70_000))
        with pytest.raises(UnavailableError, match="a message is longer than 65536 bytes"):
            receive(theirs, 0)


def test_a_successor_detects_the_exit_of_its_predecessor(channel: tuple[socket.socket, Predecessor]) -> None:
    ours, predecessor = channel
    turn = threading.Timer(0.1, ours.close)
    turn.start()
    with pytest.raises(UnavailableError, match="cannot replace"):
        predecessor.wait_for_turn()
    turn.join()
    with pytest.raises(UnavailableError, match="gone"):
        predecessor.wait_for_turn()


def test_a_daemon_detects_the_exit_of_its_successor(channel: tuple[socket.socket, Predecessor]) -> None:
    ours, predecessor = channel
    predecessor.close()
    with pytest.raises(UnavailableError, match="cannot hand over to process 7"):
        Successor(ours, 7).take_over(quiet=True)


def test_a_daemon_continues_if_its_successor_has_ended_before_the_hand_over(
    channel: tuple[socket.socket, Predecessor],
) -> None:
    ours, predecessor = channel
    with temporary_node() as node:
        daemon = node.daemon("")

        async def scenario() -> None:
            replacement = daemon.replacement
            replacement.successor = Successor(ours, 7)
            replacement.prepared.set()
            assert not replacement.discard_ended(), "it waits"
            predecessor.close()
            assert await daemon.hand_over(lambda: False) is False
            failure = "process 7 ended before it took over, this daemon continues"
            assert replacement.page() == f"{FAILED}{failure}\n"
            assert not replacement.prepared.is_set()
            assert ours.fileno() == -1
            assert node.cpus(await node.launch(DemoPod("own", "LSE", cpuset="2-3"))) == "2-3"
            assert not replacement.discard_ended(), "another one may be started"

        run(daemon, scenario, reconciled=True)


def test_an_internal_error_while_a_successor_starts_is_reported_and_another_one_may_be_started(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Successor:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(Successor, "started", broken)

    async def scenario() -> None:
        replacement = DaemonReplacement()
        assert replacement.start(listener) == "preparing\n"
        await until(lambda: replacement.page().startswith(FAILED))
        assert replacement.page().endswith("this daemon continues: internal error: ZeroDivisionError: bug\n")
        assert not replacement.prepared.is_set()
        assert replacement.start(listener) == "preparing\n"

    asyncio.run(scenario())


def test_a_process_serves_until_a_successor_has_taken_over() -> None:
    class Replaced:
        def __init__(self) -> None:
            self.replacement = DaemonReplacement()
            self.attempts = 0

        async def start(self) -> None:
            self.replacement.prepared.set()

        async def hand_over(self, _: Callable[[], bool]) -> bool:
            self.attempts += 1
            self.replacement.prepared.clear()
            return self.attempts == 2

        async def finish_calls(self) -> None:
            pass

        def reload_soon(self) -> None:
            pass

    async def scenario() -> None:
        daemon: Any = Replaced()
        serving = asyncio.create_task(_serve(daemon))
        await until(lambda: daemon.attempts == 1)
        await asyncio.sleep(0.05)
        assert not serving.done()
        daemon.replacement.prepared.set()
        await asyncio.wait_for(serving, LIMIT_S)
        assert daemon.attempts == 2

    asyncio.run(scenario())


def test_a_plain_start_has_no_predecessor() -> None:
    assert Predecessor.of({}) is None


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_signal_during_a_hand_over_stops_the_daemon_or_its_successor(
    monkeypatch: pytest.MonkeyPatch, *, is_replaced: bool
) -> None:
    """Until the successor serves, this daemon stops as usual; then the signal is the successor's."""
    done: list[object] = []

    class Replaced:
        def __init__(self) -> None:
            self.config = SimpleNamespace(drain_timeout=7.0)
            self.replacement = DaemonReplacement()
            self.replacement.successor = cast("Successor", SimpleNamespace(pid=4711))

        async def start(self) -> None:
            self.replacement.prepared.set()

        async def hand_over(self, is_stopping: Callable[[], bool]) -> bool:
            assert not is_stopping()
            signal.raise_signal(signal.SIGTERM)
            await until(is_stopping)
            return is_replaced

        async def stop(self) -> None:
            done.append("stopped")

        async def finish_calls(self, limit_s: float) -> None:
            await asyncio.sleep(0.1)
            done.append(f"calls have ended within {limit_s:g} s")

        def reload_soon(self) -> None:
            pass

    monkeypatch.setattr(os, "kill", lambda *call: done.append(call))
    asyncio.run(asyncio.wait_for(_serve(cast("Daemon", Replaced())), LIMIT_S))
    assert done == ([(4711, signal.SIGTERM), "calls have ended within 7 s"] if is_replaced else ["stopped"])


def test_a_daemon_that_is_to_stop_hands_nothing_over(channel: tuple[socket.socket, Predecessor]) -> None:
    ours, _ = channel
    with temporary_node() as node:
        daemon = node.daemon("")

        async def scenario() -> None:
            daemon.replacement.successor = Successor(ours, 7)
            daemon.replacement.prepared.set()
            assert await daemon.hand_over(lambda: True) is False
            told = iter([False])
            assert await daemon.hand_over(lambda: next(told, True)) is False
            ours.close()

        run(daemon, scenario, reconciled=True)
