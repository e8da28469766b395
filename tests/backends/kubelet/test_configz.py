"""Queries to kubelet for the configuration that it runs with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.kubelet.cpu_manager import read_configz
from proxy.backends.kubelet.settings import KubeletError, KubeletSettings
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet

LONG_TIMEOUT_S = 60.0


def failure(**settings: Any) -> KubeletError:
    with pytest.raises(KubeletError) as caught:
        read_configz(KubeletSettings(**{"timeout": LONG_TIMEOUT_S, **settings}))
    return caught.value


def test_configz_is_requested_at_its_usual_path_with_token_and_certificate(
    tls_server: Any, certificate: tuple[Path, Path], tmp_path: Path, answer: Any
) -> None:
    (tmp_path / "token").write_text("secret")
    config = {
        "cpuManagerPolicy": "static",
        "reservedSystemCPUs": "0-1",
        "logging": {"flushFrequency": {"Duration": 5}, "of": ["another", "type", 1]},
        "newField": [{}],
    }
    tls_server.reply = answer(200, json.dumps({"kubeletconfig": config, "more": 1}).encode())
    result = read_configz(
        KubeletSettings(
            configz=tls_server.url,
            token_file=str(tmp_path / "token"),
            ca_file=str(certificate[0]),
            timeout=LONG_TIMEOUT_S,
        )
    )
    assert (result.policy, result.reserved, result.problems) == ("static", CpuSet([0, 1]), ())
    path, headers = tls_server.seen[0]
    assert (path, headers["Authorization"]) == ("/configz", "Bearer secret")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "the answer is not JSON"),
        (b"{", "the answer is not JSON"),
        (b"[" * 100_000, "the answer is not JSON"),
        (b"[]", "the answer holds no kubeletconfig"),
        (b'{"kubeletconfig": "x"}', "the answer holds no kubeletconfig"),
        (b'{"componentconfig": {}}', "the answer holds no kubeletconfig"),
    ],
)
def test_an_invalid_answer_is_reported(pods_server: Any, answer: Any, content: bytes, cause: str) -> None:
    pods_server.reply = answer(200, content)
    reported = str(failure(configz=pods_server.url))
    assert reported.startswith(f"cannot use the configuration of kubelet at {pods_server.url}")
    assert cause in reported


def test_a_refused_request_names_the_permission_to_grant(pods_server: Any, answer: Any) -> None:
    pods_server.reply = answer(403, b"no")
    reported = str(failure(configz=pods_server.url))
    assert reported.startswith("cannot read the configuration of kubelet at")
    assert "allow get on nodes/configz or nodes/proxy" in reported


def test_a_kubelet_that_hangs_is_reported_as_such(pods_server: Any) -> None:
    pods_server.reply = lambda handler: pods_server.over.wait(LONG_TIMEOUT_S)
    assert failure(configz=pods_server.url, timeout=0.05).code == GrpcStatus.DEADLINE_EXCEEDED
