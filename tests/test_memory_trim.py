from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proxy import memory_trim

if TYPE_CHECKING:
    import pytest


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_here_loads_openssl() -> None:
    code = """
from proxy import memory_trim
memory_trim.block_tls_imports()
import proxy.daemon, proxy.frontends.cri.call, proxy.backends.runtime.client, sys, asyncio, hashlib
assert sys.modules["ssl"] is None and sys.modules["_hashlib"] is None
assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")
memory_trim.allow_tls_imports()
import ssl
assert ssl.OPENSSL_VERSION
memory_trim.allow_tls_imports()
assert sys.modules["ssl"] is ssl
"""
    run(code)


def test_modules_needed_only_at_the_start_are_unloaded() -> None:
    code = """
import sys
from proxy.cli.main import run_command_line
config = run_command_line(["serve"])
del run_command_line
from proxy import memory_trim
memory_trim.drop_start_only_modules()
assert not [m for m in sys.modules if m.startswith(("click", "yaml", "proxy.cli"))]
import proxy.daemon
assert not [m for m in sys.modules if m.startswith(("click", "yaml", "proxy.cli"))]
print(config.listen)
"""
    assert run(code) == "/run/topoproxy/cri.sock\n"


def test_protobuf_works_without_its_implementation_in_python() -> None:
    code = """
import sys
from proxy import memory_trim
memory_trim.block_python_protobuf()
from google.protobuf.internal import api_implementation
from proxy.api.cri import api_pb2 as pb
from proxy.api.containerd import containerd_events_pb2 as events
from proxy.api.kubelet import podresources_pb2, pods_pb2
from proxy.api.koordinator import hook_pb2
request = pb.CreateContainerRequest(pod_sandbox_id="a")
request.config.labels["k"] = "v"
assert pb.CreateContainerRequest.FromString(request.SerializeToString()) == request
assert "pod_sandbox_id" in str(request)
assert api_implementation.Type() != "upb" or "google.protobuf.text_format" not in sys.modules
from google.protobuf import json_format, text_format
assert text_format.Parse(str(request), pb.CreateContainerRequest()) == request
assert json_format.MessageToDict(request)["podSandboxId"] == "a"
print("ok")
"""
    assert run(code) == "ok\n"
    pure = "import os; os.environ['PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION'] = 'python'\n"
    assert run(pure + code) == "ok\n"


def test_libraries_work_after_their_pages_were_dropped() -> None:
    code = """
import ctypes, grpc
from proxy import memory_trim
def file_pages():
    return int(open("/proc/self/statm").read().split()[2]) * 4096
assert memory_trim.use_one_arena()
before = file_pages()
assert memory_trim.drop_clean_pages() > 1 << 20
assert file_pages() < before - (1 << 20), (before, file_pages())
memory_trim.trim()
channel = grpc.insecure_channel("unix:/nonexistent")
try:
    channel.unary_unary("/a/b")(b"", timeout=5)
except grpc.RpcError as error:
    print(error.code().name)
"""
    assert run(code) == "UNAVAILABLE\n"


def test_malloc_is_configured_on_glibc() -> None:
    glibc = "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    assert memory_trim.keep_large_blocks() is glibc


def test_malloc_without_glibc_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory_trim.keep_large_blocks() is False
    assert memory_trim.use_one_arena() is False
    memory_trim.trim()


def test_freezing_takes_objects_out_of_the_collection() -> None:
    before = gc.get_freeze_count()
    try:
        memory_trim.collect_and_freeze()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_resident_memory_matches_the_kernels_value() -> None:
    kilobytes = Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]
    assert 0.8 < memory_trim.resident_bytes() / (int(kilobytes) * 1024) < 1.25
