"""Files that name hook servers, good and bad (Koordinator v1.8.0 pkg/runtimeproxy/config/config.go)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.config.enums import FailurePolicy
from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.hooks import HooksConfig, HookSettings
from proxy.hooks.hook import Hook, HookFailurePolicy
from proxy.hooks.remote.servers import server_of
from proxy.model.errors import HookError
from tests.testkit.captured_log import of_hooks, report

KOORDLET = {
    "remote-endpoint": "/var/run/koordlet/koordlet.sock",
    "failure-policy": "Ignore",
    "runtime-hooks": ["PreRunPodSandbox", "PreCreateContainer", "PreUpdateContainerResources"],
}
FILE = Path("/etc/runtime/hookserver.d/koordlet.json")


def make_hook(data: object, config: HooksConfig | None = None, reported: list[str] | None = None) -> Hook:
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    sentences: list[str] = [] if reported is None else reported
    return server_of("koordlet", FILE, content, config or HooksConfig(), of_hooks(sentences))


def changed(**fields: Any) -> dict[str, Any]:
    entries = {**KOORDLET, **{name.replace("_", "-"): value for name, value in fields.items()}}
    return {name: value for name, value in entries.items() if value is not ...}


def test_a_file_of_koordlet_is_read() -> None:
    reported: list[str] = []
    hook = make_hook(KOORDLET, reported=reported)
    assert hook.name == "koordlet"
    assert set(hook.handlers) == {
        "pre_run_pod_sandbox", "pre_create_container", "pre_update_container_resources", "shutdown",
    }  # fmt: skip
    assert (hook.policy, hook.timeout, hook.remote, hook.receives_earlier_changes) == (
        HookFailurePolicy.IGNORE,
        0.5,
        True,
        True,
    )
    assert hook.source == f"{FILE} (/var/run/koordlet/koordlet.sock)"
    assert not reported


@pytest.mark.parametrize(
    ("value", "policy", "sentences"),
    [("Fail", "Fail", 0), ("Ignore", "Ignore", 0), ("", "Ignore", 0), (None, "Ignore", 0), (..., "Ignore", 0),
     ("fail", "Ignore", 1), ("None", "Ignore", 1)],
)  # fmt: skip
def test_only_the_exact_policy_fail_fails_calls(value: object, policy: str, sentences: int) -> None:
    reported: list[str] = []
    assert make_hook(changed(failure_policy=value), reported=reported).policy == policy
    assert len(reported) == sentences
    assert all(repr(value) in sentence for sentence in reported)


@pytest.mark.parametrize("address", ["/run/x.sock", "unix:///run/x.sock", "unix:/run/x.sock"])
def test_addresses_of_unix_sockets_are_read(address: str) -> None:
    assert make_hook(changed(remote_endpoint=address)).source.endswith(" (/run/x.sock)")


def test_all_hooks_of_koordinator() -> None:
    reported: list[str] = []
    names = ["PreRunPodSandbox", "PostStopPodSandbox", "PreCreateContainer", "PreStartContainer"]
    names += ["PostStartContainer", "PostStopContainer", "PreUpdateContainerResources"]
    hook = make_hook(changed(runtime_hooks=[*names, "PreRemoveRunPodSandbox", names[0]]), reported=reported)
    assert len(hook.handlers) == 8
    assert not reported


def test_unknown_hooks_are_reported_and_ignored() -> None:
    reported: list[str] = []
    hook = make_hook(
        changed(runtime_hooks=["PreDance", "PostStopContainer", "precreatecontainer"]), reported=reported
    )
    assert set(hook.handlers) == {"post_stop_container", "shutdown"}
    assert len(reported) == 1
    assert "'PreDance', 'precreatecontainer'" in reported[0]
    empty: tuple[object, ...] = (None, [], ...)
    assert all(set(make_hook(changed(runtime_hooks=none)).handlers) == {"shutdown"} for none in empty)


def test_keys_are_read_as_go_reads_them() -> None:
    data = {key.title(): value for key, value in KOORDLET.items()} | {"more": 1}
    assert len(make_hook(data).handlers) == 4


def test_settings_override_the_file() -> None:
    settings = FrozenMapping({"koordlet": HookSettings(timeout=2.0, policy=FailurePolicy.FAIL)})
    hook = make_hook(KOORDLET, HooksConfig(settings=settings))
    assert (hook.timeout, hook.policy) == (2.0, HookFailurePolicy.FAIL)
    settings = FrozenMapping({"koordlet": HookSettings(policy=FailurePolicy.IGNORE)})
    hook = make_hook(changed(failure_policy="Fail"), HooksConfig(timeout=0.1, settings=settings))
    assert (hook.timeout, hook.policy) == (0.1, HookFailurePolicy.IGNORE)
    hook = make_hook(
        changed(failure_policy="Fail"),
        HooksConfig(settings=FrozenMapping({"koordlet": HookSettings(timeout=3.0)})),
    )
    assert (hook.timeout, hook.policy) == (3.0, HookFailurePolicy.FAIL)
    other = FrozenMapping({"other": HookSettings(timeout=9.0, policy=FailurePolicy.FAIL)})
    hook = make_hook(KOORDLET, HooksConfig(settings=other))
    assert (hook.timeout, hook.policy) == (0.5, HookFailurePolicy.IGNORE)


def test_without_a_notifier_faults_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("proxy.logs.Log.warning", lambda _log, line, **keys: report(lines)(line, **keys))
    server_of("koordlet", FILE, json.dumps(changed(failure_policy="fail")).encode(), HooksConfig())
    assert len(lines) == 1
    assert "unknown failure-policy of a hook server: Ignore is used hook=koordlet" in lines[0]


def test_pods_with_the_label_are_skipped() -> None:
    skip = make_hook(KOORDLET).skip
    assert skip is not None
    label = "runtimeproxy.koordinator.sh/skip-hookserver"
    assert skip({"a": "b", label: "true"})
    assert not skip({label: "false"})
    assert not skip({})
    assert make_hook(KOORDLET, HooksConfig(skip_label="")).skip is None
    empty = make_hook(KOORDLET, HooksConfig(skip_label="quiet=")).skip
    assert empty is not None
    assert empty({"quiet": ""})
    assert not empty({})


def test_the_socket_of_the_daemon_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    config = HooksConfig(serve=tmp_path / "real" / "hook.sock")
    for path in (f"{tmp_path}/real/hook.sock", f"unix://{tmp_path}/link/../real//hook.sock"):
        with pytest.raises(HookError, match=r"is the socket of hooks\.serve: topoproxy would call itself"):
            make_hook(changed(remote_endpoint=path), config)
    assert make_hook(changed(remote_endpoint=f"{tmp_path}/other.sock"), config)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "it is empty"),
        (b" \n\0"[:2], "it is empty"),
        (b'{"remote-endpoint": "/run/x', "it is not JSON: "),
        (b"[" * 100_000, "it is not JSON: "),
        (b'{"remote-endpoint": "\xff"}', "it is not JSON: it is not UTF-8"),
        (b"1" * 5000, "it is not JSON: "),
        (b"null", "it is JSON, but not an object"),
        (b'["x"]', "it is JSON, but not an object"),
        (b"7", "it is JSON, but not an object"),
        ({}, "it has no remote-endpoint"),
        (changed(remote_endpoint=...), "it has no remote-endpoint"),
        (changed(remote_endpoint=None), "it has no remote-endpoint"),
        (changed(remote_endpoint=" "), "it has no remote-endpoint"),
        (changed(remote_endpoint=7), "remote-endpoint must be a string, not 7"),
        (changed(remote_endpoint=["/run/x.sock"]), 'remote-endpoint must be a string, not ["/run/x.sock"]'),
        (changed(remote_endpoint="run/x.sock"), "the path of the socket must be absolute"),
        (changed(remote_endpoint="tcp://127.0.0.1:1"), "only unix sockets are served, not tcp:"),
        (changed(remote_endpoint="/run/\0x"), "this cannot be the name of a socket"),
        (changed(remote_endpoint="/run/\ud800"), "remote-endpoint: "),
        (changed(remote_endpoint="/" + "x" * 200), "a unix socket's at most 107"),
        (changed(failure_policy=True), "failure-policy must be a string, not true"),
        (changed(runtime_hooks="PreCreateContainer"), "runtime-hooks must be a list of strings"),
        (changed(runtime_hooks=[1]), "runtime-hooks must be a list of strings, not [1]"),
        (changed(runtime_hooks={"PreCreateContainer": True}), "runtime-hooks must be a list of strings"),
    ],
)
def test_files_that_name_no_server(data: object, cause: str) -> None:
    """Some of these make Koordinator's proxy crash at its next call."""
    with pytest.raises(HookError) as raised:
        make_hook(data)
    message = str(raised.value)
    assert message.startswith(f"cannot use the hook server of {FILE}: ")
    assert cause in message
    assert "\n" not in message
    assert len(message) < 600
