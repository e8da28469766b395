"""Files and command lines that are read, and those that are refused with file, line, key and reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import Config, CpuManagerPolicy, as_yaml, load, override, parse
from proxy.model.errors import ConfigError, PermissionDeniedError, UsageError
from proxy.model.idset import CpuSet
from proxy.model.mode import NodeMode


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    assert caught.value.exit_code == 78
    message = str(caught.value)
    assert message.startswith("cannot use the configuration f.yaml: ")
    return message.removeprefix("cannot use the configuration f.yaml: ")


FULL = """\
apiVersion: topoproxy/v1
kind: TopoproxyConfiguration
mode: observe
cpuManagerPolicy: static
reservedSystemCPUs: 0-1,8
memoryNodes: leave
onError: refuse
listen: unix:///a/cri.sock
runtime: /b/r.sock
adminSocket: unix:///c/admin.sock
stateDir: /d
sysfsRoot: /e
procfsRoot: /f
cgroupRoot: /g
reconcilePeriod: 1m30s
callTimeout: 500ms
drainTimeout: 0s
settle: {enabled: false, perSecond: 3}
log: {level: debug, format: klog}
"""


def test_every_key_is_read() -> None:
    config = parse(FULL, "f.yaml")
    assert (config.mode, config.cpu_manager_policy) == (NodeMode.OBSERVE, CpuManagerPolicy.STATIC)
    assert config.reserved_system_cpus == CpuSet.parse("0-1,8")
    assert (config.memory_nodes, config.on_error) == ("leave", "refuse")
    assert [str(p) for p in (config.listen, config.runtime, config.admin_path)] == [
        "/a/cri.sock",
        "/b/r.sock",
        "/c/admin.sock",
    ]
    directories = (config.state_dir, config.sysfs_root, config.procfs_root, config.cgroup_root)
    assert [str(p) for p in directories] == ["/d", "/e", "/f", "/g"]
    assert (config.reconcile_period, config.call_timeout, config.drain_timeout) == (90, 0.5, 0)
    assert (config.settle.enabled, config.settle.per_second) == (False, 3)
    assert (config.log.level, config.log.format, config.source) == ("debug", "klog", "f.yaml")
    assert parse(as_yaml(config, comments=False), "again") == config


def test_an_empty_file_means_the_defaults() -> None:
    config = parse("", "f.yaml")
    assert config == Config()
    assert (config.mode, config.cpu_manager_policy, str(config.reserved_system_cpus)) == (
        "enforce",
        "none",
        "",
    )
    assert str(config.listen) == "/run/topoproxy/cri.sock"
    assert str(config.runtime) == "/run/containerd/containerd.sock"
    assert str(config.admin_path) == "/run/topoproxy/admin.sock"
    assert (config.reconcile_period, config.call_timeout, config.drain_timeout) == (10, 5, 20)


def test_the_admin_socket_follows_the_listen_socket() -> None:
    assert parse("listen: /x/y.sock", "f").admin_path == Path("/x/admin.sock")


@pytest.mark.parametrize(
    ("text", "cpus"), [("1", "1"), ("010", "10"), ("'0-3'", "0-3"), ("0,2", "0,2"), ('""', ""), ("1_0", None)]
)
def test_cpu_lists_are_read_as_written(text: str, cpus: str | None) -> None:
    """YAML takes 010 for the number 8 and 1_0 for 10."""
    if cpus is None:
        assert "'1_0' is not a list of ids" in refused(f"reservedSystemCPUs: {text}")
    else:
        assert str(parse(f"reservedSystemCPUs: {text}", "f").reserved_system_cpus) == cpus


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nlisen: /x", "line 2: lisen: unknown key; did you mean listen?"),
        ("cpumanagerpolicy: none", "line 1: cpumanagerpolicy: unknown key; did you mean cpuManagerPolicy?"),
        ("settle: {persecond: 1}", "line 1: settle.persecond: unknown key; did you mean settle.perSecond?"),
        ("perSecond: 1", "line 1: perSecond: unknown key; did you mean settle.perSecond?"),
        ("zzz: 1", "line 1: zzz: unknown key"),
        ("source: x", "line 1: source: unknown key"),
        ("settle: {kind: x}", "line 1: settle.kind: unknown key"),
        ("mode: enforce\nmode: observe", "line 2: mode: given twice, first on line 1"),
        ("log: {level: info, level: info}", "line 1: log.level: given twice, first on line 1"),
        ("mode: off", "line 1: mode: 'off' is not enforce, observe or passthrough"),
        ("mode: Enforce", "line 1: mode: 'Enforce' is not enforce, observe or passthrough"),
        ("mode:", "line 1: mode: has no value (leave the key out for the default)"),
        ("mode: ~", "line 1: mode: has no value (leave the key out for the default)"),
        ("mode: [enforce]", "line 1: mode: must be enforce, observe or passthrough, not a list"),
        ("listen: {a: b}", "line 1: listen: must be the address of a unix socket, not keys with values"),
        ("listen: tcp://a", "line 1: listen: 'tcp://a': only unix sockets are served, not tcp:"),
        ("stateDir: 5", "line 1: stateDir: '5' is not an absolute path"),
        (
            "settle: {perSecond: '5'}",
            "line 1: settle.perSecond: must be a whole number, 1 to 1000, not text ('5')",
        ),
        (
            "settle: {perSecond: 1.5}",
            "line 1: settle.perSecond: must be a whole number, 1 to 1000, not a number ('1.5')",
        ),
        ("settle: {perSecond: 0}", "line 1: settle.perSecond: 0 is not between 1 and 1000"),
        ("settle: {perSecond: 1001}", "line 1: settle.perSecond: 1001 is not between 1 and 1000"),
        ("settle: {enabled: 1}", "line 1: settle.enabled: must be true or false, not a number ('1')"),
        ("settle: {enabled: 'true'}", "line 1: settle.enabled: must be true or false, not text ('true')"),
        ("settle: true", "line 1: settle: must be keys with values, not true or false ('true')"),
        ("settle:", "line 1: settle: must be keys with values, not nothing"),
        ("reconcilePeriod: 10", "line 1: reconcilePeriod: '10' has no unit: write 10s for seconds"),
        ("reconcilePeriod: 1ms", "line 1: reconcilePeriod: 1ms is outside 100ms to 1h"),
        ("callTimeout: 2m", "line 1: callTimeout: 2m is outside 100ms to 1m"),
        ("drainTimeout: 11m", "line 1: drainTimeout: 11m is outside 0s to 10m"),
        ("reservedSystemCPUs: 3-1", "line 1: reservedSystemCPUs: range '3-1' in '3-1' runs backwards"),
        ("reservedSystemCPUs: a", "line 1: reservedSystemCPUs: 'a' is not a list of ids such as '0-3,8'"),
        (
            "reservedSystemCPUs: 0-99999",
            "line 1: reservedSystemCPUs: id 99999 in '0-99999' is outside 0-65535",
        ),
        ("kind: Pod", "line 1: kind: must be TopoproxyConfiguration (or be left out)"),
        ("apiVersion: v1", "line 1: apiVersion: must be topoproxy/v1 (or be left out)"),
        ("- a", "line 1: must be keys with values, not a list"),
        ("hello", "line 1: must be keys with values, not text ('hello')"),
        ("? [a]\n: b", "line 1: ?: unknown key"),
        ("<<: {mode: observe}", "line 1: <<: unknown key"),
        ("a: [", "line 1: not YAML: expected the node content, but found '<stream end>'"),
        ("mode: &a enforce\n--- \nmode: observe", "line 2: not YAML: but found another document"),
        ("mode: *missing", "line 1: not YAML: found undefined alias 'missing'"),
        ("mode: !!python/object:os.system x", "line 1: mode: must be enforce, observe or passthrough, not"),
        ("\0", "not YAML: "),
        ("listen: /r\nruntime: unix:///r", "listen: /r is the runtime's own socket"),
        ("listen: /x/admin.sock", "adminSocket: /x/admin.sock is in use for CRI calls already"),
        (
            "adminSocket: /run/containerd/containerd.sock",
            "adminSocket: /run/containerd/containerd.sock is in use",
        ),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_reason(text: str, message: str) -> None:
    assert refused(text).startswith(message)


def test_all_problems_are_reported_together() -> None:
    reported = refused("mode: x\nlog: {level: loud}\nfoo: 1\n").splitlines()
    assert reported[0] == "3 problems:"
    assert [line.split(": ")[:2] for line in reported[1:]] == [
        ["  line 1", "mode"],
        ["  line 2", "log.level"],
        ["  line 3", "foo"],
    ]


def test_deep_nesting_is_not_a_crash() -> None:
    assert refused("[" * 20000).startswith("it is nested too deeply")


@given(st.text(max_size=60) | st.text("abc:{}[]-,'\"&*!|>#? \n0", max_size=60))
def test_any_text_is_a_configuration_or_a_configuration_error(text: str) -> None:
    try:
        parse(text, "f.yaml")
    except ConfigError as error:
        assert str(error).startswith("cannot use the configuration f.yaml: ")  # noqa: PT017


class TestFiles:
    def test_the_default_file_may_be_missing_and_a_named_one_not(self, tmp_path: Path) -> None:
        assert load(default=tmp_path / "no.yaml") == Config()
        with pytest.raises(
            ConfigError, match=r"cannot read the configuration .*no\.yaml: there is no such file"
        ):
            load(tmp_path / "no.yaml")

    def test_the_default_file_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfmode: observe\n")
        config = load(default=tmp_path / "c.yaml")
        assert (config.mode, config.source) == ("observe", str(tmp_path / "c.yaml"))

    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"\xff\xfe", "byte 0 is not UTF-8"), (b"#" * ((1 << 20) + 1), "larger than 1048576")],
    )
    def test_values_that_are_not_text_or_too_long(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "c.yaml").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "c.yaml")

    def test_a_directory_as_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="Is a directory"):
            load(tmp_path)

    def test_a_file_without_permission_is_reported_as_such(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(13, os.strerror(13))

        monkeypatch.setattr("proxy.open_file.os.open", refuse)
        with pytest.raises(PermissionDeniedError, match="Permission denied"):
            load(tmp_path / "c.yaml")


class TestOverride:
    def test_arguments_override_settings(self) -> None:
        config = override(
            parse("mode: observe\nlog: {format: json}", "f"),
            {
                "listen": ("--listen", "unix:///x/y.sock"),
                "mode": ("--mode", None),
                "log.level": ("--log-level", "debug"),
            },
        )
        assert (str(config.listen), config.mode, str(config.admin_path)) == (
            "/x/y.sock",
            "observe",
            "/x/admin.sock",
        )
        assert (config.log.level, config.log.format, config.source) == ("debug", "json", "f")

    @pytest.mark.parametrize(
        ("key", "text", "message"),
        [
            ("mode", "x", "cannot use --opt: 'x' is not enforce, observe or passthrough"),
            ("listen", "tcp://a", "cannot use --opt: 'tcp://a': only unix sockets"),
            ("runtime", "/run/topoproxy/cri.sock", "cannot use the settings together: listen: "),
        ],
    )
    def test_refused_as_wrong_usage(self, key: str, text: str, message: str) -> None:
        with pytest.raises(UsageError, match=message) as caught:
            override(Config(), {key: ("--opt", text)})
        assert caught.value.exit_code == 2
