"""Credentials of the API server: what a kubeconfig lacks is named, and nothing of it ends the process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from proxy.agent.api_client import ApiClient
from proxy.agent.credentials import NoCredentialsError, read_credentials
from proxy.config.cluster import ClusterConfig
from proxy.model.errors import UnavailableError
from tests.agent.kubeconfig import CLUSTERS, CONTEXT, USERS

PLUGIN = "users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/%s, command: %s}}}]\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return tmp_path / "kubeconfig"


def problem(file: Path) -> str:
    """Return why a request with a kubeconfig fails."""

    async def run() -> str:
        client = ApiClient(lambda: read_credentials(ClusterConfig(kubeconfig=file)))
        try:
            with pytest.raises(UnavailableError) as raised:
                await client.get("/apis")
        finally:
            await client.close()
        return str(raised.value)

    return asyncio.run(run())


@pytest.mark.timeout(30)
def test_a_named_pipe_is_no_kubeconfig(file: Path) -> None:
    os.mkfifo(file)
    assert problem(file) == f"cannot read the credentials in {file}: it is not a regular file"


def test_a_kubeconfig_is_read(file: Path) -> None:
    file.write_text(CLUSTERS + USERS + CONTEXT)
    found = read_credentials(ClusterConfig(kubeconfig=file))
    assert (found.context_name, found.cluster.server) == ("x", "http://127.0.0.1:1")
    assert found.fname == file


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "it is not a kubeconfig"),
        ("null\n", "it is not a kubeconfig"),
        ("- 1\n", "it is not a kubeconfig"),
        ("hello\n", "it is not a kubeconfig"),
        ("clusters: [1]\n", "it is not a kubeconfig"),
        ("clusters: {a: b}\n", "it is not a kubeconfig"),
        ("clusters: [{}]\n", "it is not a kubeconfig"),
        ("clusters: [{name: c, cluster: 1}]\n", "it is not a kubeconfig: Expected `object`, got `int`"),
        ("clusters: null\n", "it names no current context"),
        ("clusters: null\nusers: null\ncurrent-context: x\n", "its current context x is missing"),
        (USERS + CONTEXT, "context x names the cluster c, which is missing"),
        (CLUSTERS + CONTEXT, "context x names the user u, which is missing"),
        (CLUSTERS + USERS + CONTEXT.replace(", user: u", ""), "context x names no user"),
    ],
)
def test_what_is_wrong_with_a_kubeconfig_is_named(file: Path, text: str, cause: str) -> None:
    file.write_text(text)
    assert problem(file) == f"cannot read the credentials in {file}: {cause}"
    with pytest.raises(NoCredentialsError):
        read_credentials(ClusterConfig(kubeconfig=file))


def test_what_is_no_text_or_no_yaml_is_no_kubeconfig(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    assert problem(file) == f"cannot read the credentials in {file}: it is not a kubeconfig"
    for text, line in (
        ("clusters: [", 1),
        ("users:\n- name: u\n  user: {token: secret-token\n    x: [\n", 4),
        ("users:\n- name: u\n  user: {token: *secret-token}\n", 3),
    ):
        file.write_text(text)
        cause = f"it is not a kubeconfig: line {line} is not valid YAML"
        assert problem(file) == f"cannot read the credentials in {file}: {cause}"


def test_a_file_that_cannot_be_read_is_named_with_its_cause(file: Path) -> None:
    assert problem(file) == f"cannot read the credentials in {file}: No such file or directory"
    file.mkdir()
    assert problem(file) == f"cannot read the credentials in {file}: Is a directory"


def test_the_cause_of_a_plugin_that_fails_is_reported(file: Path) -> None:
    script = file.with_name("plugin")
    script.write_text("#!/bin/sh\necho the token has expired >&2\nexit 3\n")
    script.chmod(0o700)
    file.write_text(CLUSTERS + PLUGIN % ("v1beta1", script) + CONTEXT)
    assert problem(file).endswith(f"Exec {script} returned 3: the token has expired")
    file.write_text(CLUSTERS + PLUGIN % ("v1beta1", "/bin/false") + CONTEXT)
    assert problem(file).endswith("Exec /bin/false returned 1")
    file.write_text(CLUSTERS + PLUGIN % ("v1beta1", "/nowhere/plugin") + CONTEXT)
    assert "No such file or directory: '/nowhere/plugin'" in problem(file)
    file.write_text(CLUSTERS + PLUGIN % ("v9", "/bin/true") + CONTEXT)
    assert problem(file).endswith("auth exec api version client.authentication.k8s.io/v9 not implemented")


def test_the_output_of_a_plugin_is_not_quoted(file: Path) -> None:
    script = file.with_name("plugin")
    script.write_text("#!/bin/sh\necho secret-token\n")
    script.chmod(0o700)
    file.write_text(CLUSTERS + PLUGIN % ("v1beta1", script) + CONTEXT)
    assert "secret" not in problem(file)
