"""The directory of device plugins: files removed at a start, and sockets that plugins may name."""

from __future__ import annotations

import asyncio
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from proxy.api.kubelet import deviceplugin_pb2 as pb
from proxy.frontends.device_registration.server import RegistrationServer, prepare_directory, socket_of
from proxy.model.errors import CannotCreateError, InputError
from tests.testkit.captured_log import telemetry


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp-") as name:
        yield Path(name) / "plugins"


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_a_missing_directory_is_created(directory: Path) -> None:
    below = directory / "below"
    prepare_directory(below)
    assert stat.S_IMODE(below.stat().st_mode) == 0o750
    prepare_directory(below)


def test_sockets_are_removed_and_other_files_are_kept(directory: Path) -> None:
    prepare_directory(directory)
    for name in ("a.sock", "b", "kubelet.sock"):
        bound(directory / name)
    bound(directory.parent / "elsewhere")
    (directory / "link").symlink_to(directory.parent / "elsewhere")
    (directory / "dangling").symlink_to(directory / "nowhere")
    (directory / "DEPRECATION").touch()
    (directory / "below").mkdir()
    prepare_directory(directory)
    assert sorted(entry.name for entry in directory.iterdir()) == [
        "DEPRECATION",
        "below",
        "dangling",
        "kubelet.sock",
    ]
    assert (directory.parent / "elsewhere").exists()


def test_a_directory_that_cannot_be_created_is_an_error(directory: Path) -> None:
    directory.touch()
    with pytest.raises(CannotCreateError, match="cannot prepare the directory"):
        prepare_directory(directory)


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [("a.sock", "a.sock"), ("/a.sock", "a.sock"), ("below/a.sock", "below/a.sock"), ("below/../a", "a")],
)
def test_endpoints_in_the_directory_are_accepted(directory: Path, endpoint: str, name: str) -> None:
    prepare_directory(directory)
    (directory / "below").mkdir()
    assert socket_of(directory, endpoint) == directory / name


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("", "not the name"),
        (".", "not the name"),
        ("below/..", "not the name"),
        ("kubelet.sock", "not the name"),
        ("./kubelet.sock", "not the name"),
        ("a\0b", "not the name"),
        ("..", "leads out"),
        ("../a.sock", "leads out"),
        ("/../../run/a.sock", "leads out"),
        ("below/../../a.sock", "leads out"),
        ("out/a.sock", "leads out"),
        ("link", "symbolic link"),
        ("x" * 200, "longer than"),
    ],
)
def test_endpoints_that_are_refused(directory: Path, endpoint: str, message: str) -> None:
    prepare_directory(directory)
    (directory / "below").mkdir()
    (directory / "out").symlink_to(directory.parent)
    (directory / "link").symlink_to(directory.parent / "a.sock")
    with pytest.raises(InputError, match=message):
        socket_of(directory, endpoint)


def test_plugins_that_hang_do_not_block_others(directory: Path) -> None:
    def call(name: str) -> None:
        request = pb.RegisterRequest(version="v1beta1", endpoint=name, resource_name=f"example.com/{name}")
        with grpc.insecure_channel(f"unix:{directory}/kubelet.sock") as channel:
            register = channel.unary_unary("/v1beta1.Registration/Register")
            register(request.SerializeToString(), timeout=30)

    async def body() -> None:
        hanging, release = asyncio.Semaphore(0), asyncio.Event()

        async def register(resource: str, path: Path) -> None:
            if path.name != "good":
                hanging.release()
                await release.wait()

        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
        server = RegistrationServer(directory, register, telemetry())
        await asyncio.to_thread(server.open)
        try:
            calls = [asyncio.create_task(asyncio.to_thread(call, f"h{number}")) for number in range(6)]
            async with asyncio.timeout(20):
                for _ in calls:
                    await hanging.acquire()
                await asyncio.to_thread(call, "good")
            release.set()
            await asyncio.gather(*calls)
        finally:
            release.set()
            await asyncio.to_thread(server.close)

    asyncio.run(body())
