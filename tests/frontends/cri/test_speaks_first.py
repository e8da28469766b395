"""A runtime that sends its settings before the client has sent any bytes."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from proxy.frontends.cri.acceptor import Acceptor

SETTINGS = b"\0\0\0\4\0\0\0\0\0"


class Silent:
    def request(self, call: object) -> None: ...
    def response(self, call: object, message: bytes) -> None: ...
    def finished(self, call: object, status: int | None) -> None: ...


def test_early_settings_of_a_runtime_reach_the_client(tmp_path: Path) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SETTINGS)
        await reader.read(1)
        writer.close()

    async def scenario() -> None:
        runtime = await asyncio.start_unix_server(speak, tmp_path / "runtime")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "front"))
        listener.listen()
        listener.setblocking(False)
        front = Acceptor(str(tmp_path / "runtime"), Silent(), ())
        await front.start(listener)
        for _ in range(100):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "front")
            assert await asyncio.wait_for(reader.readexactly(9), 60) == SETTINGS
            writer.close()
            await writer.wait_closed()
        await front.drain(1)
        listener.close()
        runtime.close()

    asyncio.run(scenario())
