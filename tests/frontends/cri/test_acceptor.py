"""The proxy between real gRPC peers on real unix sockets."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from proxy.frontends.cri.acceptor import Acceptor
from proxy.frontends.cri.link import Link
from proxy.frontends.cri.relay_loop import RelayLoop
from tests.testkit.captured_log import report
from tests.testkit.waiting import wait_until

SERVICE = "/runtime.v1.RuntimeService/"
CREATE, VERSION = SERVICE + "CreateContainer", SERVICE + "Version"
OPTIONS = [("grpc.max_receive_message_length", 1 << 28), ("grpc.max_send_message_length", 1 << 28)]


class Runtime:
    """A gRPC server that answers by method name; bytes in, bytes out."""

    def __init__(self, path):
        self.path = path
        self.seen = []
        self.cancelled = threading.Event()
        self.gate = threading.Event()
        self.server = grpc.server(ThreadPoolExecutor(80), options=OPTIONS)
        self.server.add_generic_rpc_handlers((self,))
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()

    def service(self, details):
        name = details.method.rpartition("/")[2]
        if name == "Events":
            return grpc.unary_stream_rpc_method_handler(self.events)
        handler = getattr(self, name, None)
        return handler and grpc.unary_unary_rpc_method_handler(handler)

    def CreateContainer(self, request, context):  # noqa: N802
        self.seen.append(request)
        return b"%d" % len(request)

    def StopContainer(self, request, context):  # noqa: N802
        return request

    def Version(self, request, context):  # noqa: N802
        return request

    def Meta(self, request, context):  # noqa: N802
        metadata = context.invocation_metadata()
        context.send_initial_metadata([(k, v) for k, v in metadata if k.startswith("x-")])
        context.set_trailing_metadata([("x-trail", "t"), ("x-trail-bin", b"\x00\xff")])
        return b""

    def Fail(self, request, context):  # noqa: N802
        context.set_trailing_metadata([("grpc-status-details-bin", b"\x08\x05\x12\x02no")])
        context.abort(grpc.StatusCode.NOT_FOUND, "no such thing: 100% göne")

    def Slow(self, request, context):  # noqa: N802
        context.add_callback(self.cancelled.set)
        self.seen.append(context.time_remaining())
        self.gate.wait(10)
        return b""

    def Big(self, request, context):  # noqa: N802
        return bytes(int(request))

    def events(self, request, context):
        # First: a callback that is added after the end is never called.
        context.add_callback(self.cancelled.set)
        for number in range(int(request)):
            yield b"%d" % number
        self.gate.wait(10)


class Decider:
    """An interceptor that records all calls and acts on the request body."""

    def __init__(self):
        self.calls, self.answers, self.ends = [], [], []
        self.held = []

    def request(self, call):
        self.calls.append(call)
        call.context = call.body
        if call.body.startswith(b"refuse"):
            call.refuse(9, "no room ü")
        elif call.body.startswith(b"hold"):
            self.held.append(call)
        elif call.body.startswith(b"raise"):
            raise ValueError("a fault of ours")
        elif call.body.startswith(b"later"):
            asyncio.get_running_loop().call_later(0.02, call.release, call.body + b"!")
        elif call.body.startswith(b"as is"):
            call.release()
        else:
            call.release(call.body + b"+cpuset")

    def response(self, call, message):
        self.answers.append((call, message))
        if call.context.startswith(b"as is: fault"):
            raise ValueError("a fault in reading")

    def finished(self, call, status):
        self.ends.append((call, status))
        assert call.done


class Bed:
    """A front on an event loop in a thread, its runtime, and a channel to the front."""

    def __init__(self, directory, runtime=True, methods=(CREATE, SERVICE + "StopContainer")):
        self.directory = directory
        self.path, self.upstream = str(directory / "p.sock"), str(directory / "r.sock")
        self.runtime = Runtime(self.upstream) if runtime else None
        self.decider = Decider()
        self.lines, self.resolved = [], []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(64)
        reported, resolved = report(self.lines), report(self.resolved)
        self.front = Acceptor(self.upstream, self.decider, methods, report=reported, resolved=resolved)
        self.loop = RelayLoop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.do(self.front.start(self.listener))
        self.channels = []

    def do(self, work, limit=10):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit)

    def on_loop(self, function, *args):
        async def run():
            return function(*args)

        return self.do(run())

    def channel(self):
        options = [
            *OPTIONS,
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
        ]
        self.channels.append(grpc.insecure_channel(f"unix:{self.path}", options=options))
        return self.channels[-1]

    def close(self):
        if self.runtime:
            self.runtime.gate.set()
        for channel in self.channels:
            channel.close()
        self.do(self.front.drain(0))
        if self.runtime:
            self.runtime.server.stop(0).wait(5)

        async def rest():
            async with asyncio.timeout(20):
                while len(asyncio.all_tasks()) > 1:
                    await asyncio.sleep(0.01)

        self.do(rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()
        self.listener.close()


@pytest.fixture
def bed(tmp_path):
    bed = Bed(tmp_path)
    yield bed
    bed.close()


@pytest.fixture
def call(bed):
    channel = bed.channel()

    def call(path, body=b"", timeout=60, **options):
        return channel.unary_unary(path if path[0] == "/" else SERVICE + path)(
            body, timeout=timeout, **options
        )

    call.channel = channel
    return call


def code(function, *args, **options):
    with pytest.raises(grpc.RpcError) as caught:
        function(*args, **options)
    return caught.value.code()


# -- calls that pass --------------------------------------------------------------------------------------


def test_unary_calls_pass_unchanged(bed, call):
    for size in (0, 1, 1000, 100_000):
        assert call("Version", bytes(size)) == bytes(size)
    assert not bed.decider.calls


def test_metadata_passes_in_both_directions(call):
    sent = [("x-probe", "p1"), ("x-probe", "p2"), ("x-probe-bin", b"\x00\xfe")]
    _, rpc = call.channel.unary_unary(SERVICE + "Meta").with_call(b"", metadata=sent)
    assert sorted(rpc.initial_metadata()) == sorted(sent)
    trailers = dict(rpc.trailing_metadata())
    assert (trailers["x-trail"], trailers["x-trail-bin"]) == ("t", b"\x00\xff")


def test_errors_pass_with_their_details(call):
    with pytest.raises(grpc.RpcError) as caught:
        call("Fail")
    error = caught.value
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == "no such thing: 100% göne"
    assert dict(error.trailing_metadata())["grpc-status-details-bin"] == b"\x08\x05\x12\x02no"


def test_a_deadline_reaches_the_runtime(bed, call):
    assert code(call, "Slow", timeout=3) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert bed.runtime.cancelled.wait(20)
    assert 0 < bed.runtime.seen[0] < 3.05, (
        "gRPC rounds up and converts clocks: the deadline may be slightly longer"
    )


def test_a_cancel_reaches_the_runtime(bed, call):
    future = call.channel.unary_unary(SERVICE + "Slow").future(b"")
    wait_until(lambda: bed.runtime.seen)
    future.cancel()
    assert bed.runtime.cancelled.wait(60)


def test_server_streams_pass_and_so_does_their_cancel(bed, call):
    stream = call.channel.unary_stream(SERVICE + "Events")(b"5")
    assert [next(stream) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    stream.cancel()
    assert bed.runtime.cancelled.wait(60)


def test_unknown_methods_and_services_are_refused_by_the_runtime(call):
    assert code(call, "BrandNew") is grpc.StatusCode.UNIMPLEMENTED
    assert code(call, "/other.v9.Service/Call") is grpc.StatusCode.UNIMPLEMENTED
    assert call("/runtime.v1.ImageService/Version", b"x") == b"x"


def test_messages_of_15_mib_pass_and_are_rewritten(bed, call):
    size = 15 << 20
    assert len(call("Big", b"%d" % size)) == size
    assert call(CREATE, bytes(size)) == b"%d" % (size + 7)
    assert bed.runtime.seen[-1] == bytes(size) + b"+cpuset"


# -- calls that are intercepted ---------------------------------------------------------------------------


def test_a_call_is_rewritten_and_its_answer_reported(bed, call):
    assert call(CREATE, b"config") == b"13"
    assert bed.runtime.seen == [b"config+cpuset"]
    (intercepted,) = bed.decider.calls
    assert (intercepted.path, intercepted.method) == (CREATE, "CreateContainer")
    assert intercepted.body == b"", "a create that has been forwarded keeps no message"
    wait_until(lambda: bed.decider.answers == [(intercepted, b"13")])
    wait_until(lambda: bed.decider.ends == [(intercepted, 0)])


def test_a_call_is_released_unchanged_or_later(bed, call):
    assert call(CREATE, b"as is") == b"5"
    assert call(CREATE, b"later") == b"6"
    assert bed.runtime.seen == [b"as is", b"later!"]


def test_a_refused_call_ends_with_its_status(bed, call):
    with pytest.raises(grpc.RpcError) as caught:
        call(CREATE, b"refuse" * 10_000)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "no room ü"
    assert not bed.runtime.seen
    wait_until(lambda: [status for _, status in bed.decider.ends] == [None])
    assert call(CREATE, b"config") == b"13"


def test_an_error_of_the_interceptor_lets_the_call_pass(bed, call):
    assert call(CREATE, b"raise") == b"5"
    assert call(CREATE, b"as is: fault") == b"12"
    assert bed.runtime.seen == [b"raise", b"as is: fault"]
    reported = [
        f'cannot handle a call step=decide method={CREATE} err="ValueError: a fault of ours"',
        f'cannot handle a call step="record the answer" method={CREATE} err="ValueError: a fault in reading"',
    ]
    wait_until(lambda: bed.lines == reported)


def test_a_cancel_ends_a_held_call(bed, call):
    future = call.channel.unary_unary(CREATE).future(b"hold")
    wait_until(lambda: bed.decider.held)
    (held,) = bed.decider.held
    assert not held.done
    future.cancel()
    wait_until(lambda: bed.decider.ends == [(held, None)])
    bed.on_loop(held.release, b"too late")
    bed.on_loop(held.refuse, 9, "too late")
    assert call(CREATE, b"as is") == b"5"
    assert bed.runtime.seen == [b"as is"]


def test_a_disconnect_of_a_client_ends_its_held_calls(bed):
    channel = bed.channel()
    future = channel.unary_unary(CREATE).future(b"hold")
    wait_until(lambda: bed.decider.held)
    assert not future.done()
    assert bed.front.connections == 1
    channel.close()
    wait_until(lambda: bed.decider.ends == [(bed.decider.held[0], None)])
    wait_until(lambda: bed.front.connections == 0)
    bed.on_loop(bed.decider.held[0].release)


def test_64_bodies_of_205_kb_pass_at_the_same_time(bed, call):
    body = os.urandom(205_000)
    method = call.channel.unary_unary(CREATE)
    for _ in range(3):
        futures = [method.future(body, timeout=60) for _ in range(64)]
        assert [future.result() for future in futures] == [b"205007"] * 64
    assert set(bed.runtime.seen) == {body + b"+cpuset"}
    wait_until(lambda: len(bed.decider.ends) == 192)


def test_refused_and_passed_calls_may_overlap(bed, call):
    method = call.channel.unary_unary(CREATE)
    futures = [
        method.future((b"refuse" if n % 2 else b"create") + bytes(50_000), timeout=60) for n in range(200)
    ]
    codes = [future.code() for future in futures]
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION] * 100


# -- connections ------------------------------------------------------------------------------------------


def test_a_runtime_that_is_not_there_is_unavailable_and_comes_back(tmp_path):
    bed = Bed(tmp_path, runtime=False)
    try:
        channel = bed.channel()
        method = channel.unary_unary(VERSION)
        assert code(method, b"", timeout=60) is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: bed.lines)
        raw(bed).close()
        raw(bed).close()
        bed.on_loop(lambda: None)
        assert bed.lines == [
            f'cannot connect a client to the runtime path={bed.upstream} err="No such file or directory"'
        ]
        assert bed.front.is_down()
        bed.runtime = Runtime(bed.upstream)
        assert method(b"x", timeout=60, wait_for_ready=True) == b"x"
        assert bed.resolved == ["cannot connect a client to the runtime"]
    finally:
        bed.close()


def test_the_runtime_is_down_only_until_it_can_be_connected_to(bed, call):
    assert call("Version", b"1") == b"1"
    away = f"{bed.upstream}.away"
    os.rename(bed.upstream, away)
    raw(bed).close()
    wait_until(lambda: bed.front.is_down())
    os.rename(away, bed.upstream)
    assert not bed.front.is_down(), "the other client has never lost its connection"
    assert bed.resolved == ["cannot connect a client to the runtime"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_does_not_mean_that_the_runtime_is_down(bed, monkeypatch, number):
    def lack():
        raise OSError(number, "too many open files")

    monkeypatch.setattr("proxy.frontends.cri.acceptor._unix_socket", lack)
    raw(bed).close()
    wait_until(lambda: bed.lines)
    monkeypatch.undo()
    bed.upstream, upstream = f"{bed.upstream}.away", bed.upstream
    os.rename(upstream, bed.upstream)
    bed.on_loop(lambda: None)
    assert not bed.front.is_down()
    raw(bed).close()
    wait_until(lambda: bed.front.is_down())
    assert [line.partition("err=")[2] for line in bed.lines] == [
        '"too many open files"', '"No such file or directory"'
    ]  # fmt: skip


def test_an_exit_of_the_runtime_ends_its_calls(bed, call):
    passing = call.channel.unary_unary(SERVICE + "Slow").future(b"")
    held = call.channel.unary_unary(CREATE).future(b"hold")
    wait_until(lambda: bed.decider.held and bed.runtime.seen)
    bed.runtime.server.stop(0)
    assert passing.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert held.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    wait_until(lambda: bed.front.connections == 0)
    assert [status for _, status in bed.decider.ends] in (
        [None],
        [14],
        [1],
    )  # 14, 1: a report, then the end


def raw(bed):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    try:
        client.connect(bed.path)
    except OSError:
        client.close()
        raise
    return client


def test_garbage_ends_its_connection_and_no_other(bed, call):
    assert call("Version", b"1") == b"1"
    with raw(bed) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65536):
                pass
    wait_until(lambda: bed.front.connections == 1)
    assert "does not speak HTTP/2" in bed.lines[0]
    assert call("Version", b"2") == b"2"


def test_a_client_that_closes_its_half_still_gets_its_answer(bed):
    """The end of file is passed to the runtime after the bytes before it."""
    with raw(bed) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(65536):
                answer += piece
        assert answer[3] == 4  # the runtime's SETTINGS
    wait_until(lambda: bed.front.connections == 0)


def test_a_client_that_does_not_read_stops_the_runtime_from_sending(bed, call):
    """Back-pressure: 200 MB of answers do not pile up in the proxy for a client that reads nothing."""
    call("Version")
    (link,) = bed.front._links
    paused = []

    def watch():
        link.client.other.pause()  # as for a client that does not read
        paused.append(link.server)

    bed.on_loop(watch)
    assert paused
    future = call.channel.unary_unary(VERSION).future(b"x", timeout=60)
    time.sleep(0.1)
    assert not future.done()
    bed.on_loop(link.client.other.resume)
    assert future.result() == b"x"


def test_running_out_of_descriptors_pauses_accepting_and_kills_nothing(bed, call):
    assert call("Version", b"1") == b"1"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    filling = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        for client in clients:
            client.connect(bed.path)
        wait_until(lambda: bed.lines)
        assert call("Version", b"2") == b"2"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for client in clients:
            client.close()
        for fd in filling:
            os.close(fd)
    reported = {line.partition(" err=")[0].partition(" path=")[0] for line in bed.lines}
    assert reported
    assert reported <= {"cannot accept a connection", "cannot connect a client to the runtime"}
    assert bed.channel().unary_unary(VERSION)(b"3", timeout=60) == b"3"
    assert set(bed.resolved) == reported


# -- draining ---------------------------------------------------------------------------------------------


def test_drain_waits_for_calls_and_closes_idle_connections(bed, call):
    call("Version")
    idle = bed.channel()
    idle.unary_unary(VERSION)(b"", timeout=60)
    future = call.channel.unary_unary(CREATE).future(b"hold", timeout=60)
    wait_until(lambda: bed.decider.held)
    assert bed.front.connections == 2
    draining = asyncio.run_coroutine_threadsafe(bed.front.drain(60), bed.loop)
    wait_until(lambda: bed.front.connections == 1)
    assert not draining.done()
    bed.on_loop(bed.decider.held[0].release)
    assert future.result() == b"4"
    draining.result(20)
    assert bed.front.connections == 0


def test_drain_ends_at_its_time_limit(bed, call):
    future = call.channel.unary_unary(CREATE).future(b"hold", timeout=120)
    wait_until(lambda: bed.decider.held)
    start = time.monotonic()
    bed.do(bed.front.drain(0.3))
    assert 0.25 < time.monotonic() - start < 60, "it waited for its limit, and not for the call"
    assert future.code() is grpc.StatusCode.UNAVAILABLE
    wait_until(lambda: [status for _, status in bed.decider.ends] == [None])


def test_drain_stops_accepting_even_if_the_listener_is_closed_already(bed):
    bed.listener.close()
    bed.do(bed.front.drain(0.2))
    with pytest.raises(ConnectionRefusedError):
        raw(bed)


def test_a_socket_that_systemd_holds_too_does_not_keep_the_event_loop_busy(bed):
    """A client waits in its backlog during the drain, and epoll reports the socket while it is registered."""
    with socket.socket(fileno=os.dup(bed.listener.fileno())):  # systemd's
        bed.on_loop(bed.front.stop_accepting)
        bed.listener.close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(bed.path)
            turns = []
            select = bed.loop._selector.select
            bed.loop._selector.select = lambda timeout: (turns.append(timeout), select(timeout))[1]
            bed.do(asyncio.sleep(0.3))
            bed.loop._selector.select = select
    assert len(turns) < 50


def test_closed_connections_leave_no_garbage_to_collect(bed):
    """A node has many short connections (probes, crictl); they must not wait for a garbage collection."""

    def links():
        return sum(type(thing) is Link for thing in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = links()
        for _ in range(30):
            with grpc.insecure_channel(f"unix:{bed.path}") as channel:
                assert channel.unary_unary(VERSION)(b"x", timeout=60) == b"x"
        wait_until(lambda: bed.front.connections == 0)
        wait_until(lambda: links() <= before + 1)
    finally:
        gc.enable()
