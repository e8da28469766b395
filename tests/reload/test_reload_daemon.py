"""A daemon that reloads its configuration: what changes, what waits, and the effect of a bad file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from proxy import logs
from proxy.config.cluster_config import FILE_NAME
from proxy.config.schema import Config, keys
from proxy.daemon import Daemon
from proxy.demo.client import DemoPod
from proxy.reload.reread import changes
from proxy.reload.service import NOT_RELOADED, NOTICE
from tests.reload.node import FileNode
from tests.testkit.daemon import run, temporary_node
from tests.testkit.waiting import until


@pytest.fixture
def node() -> Iterator[FileNode]:
    with temporary_node(FileNode) as made:
        yield made


def problems(daemon: Daemon) -> list[str]:
    return [str(problem["what"]) for problem in daemon.parts.pages.status()["problems"]]


def live_keys(part: Any = None, prefix: str = "") -> list[str]:
    found: list[str] = []
    for item, key, setting in keys(part or Config()):
        if setting is None:
            found += live_keys(getattr(Config(), item.name), f"{key}.")
        elif setting.live:
            found.append(prefix + key)
    return found


def test_all_live_settings_change_together(node: FileNode) -> None:
    daemon = node.from_file("reconcilePeriod: 1h\n")

    async def scenario() -> None:
        assert daemon.executor is not None
        page = await node.reload(
            daemon, "reconcilePeriod: 300ms\nexplainHistory: 7\nonError: refuse\nsettle: {perSecond: 3}\n"
        )
        assert page["reload"]["result"] == "applied"
        assert page["restart"] == []
        assert {row["key"]: (row["before"], row["after"]) for row in page["reload"]["applied"]} == {
            "onError": ("forward", "refuse"),
            "reconcilePeriod": ("1h", "300ms"),
            "explainHistory": ("500", "7"),
            "settle.perSecond": ("10", "3"),
        }
        options = daemon.executor.options
        assert (options.reconcile_period, options.history, options.settle_per_second) == (0.3, 7, 3)
        assert options.refuse_on_error
        before = daemon.executor.telemetry.registry.page()["reconciles"]
        await until(lambda: daemon.executor.telemetry.registry.page()["reconciles"] > before + 2, 20)

    run(daemon, scenario, reconciled=True)


@pytest.mark.parametrize("mode", ["enforce", "passthrough"])
def test_a_notice_is_the_same_at_the_start_and_at_a_reload_and_ends_with_its_cause(
    node: FileNode, mode: str
) -> None:
    named = node.directory / "node.json"
    named.write_text("{}")
    named.chmod(0o666)
    text = f"mode: {mode}\nkoordinator: {{nodeObject: {named}}}\n"
    daemon = node.from_file(text)

    def noticed() -> list[tuple[object, object]]:
        assert daemon.parts.telemetry is not None
        found = [row for row in daemon.parts.telemetry.problems() if "notice" in str(row["message"])]
        return [(row["message"], row["count"]) for row in found]

    async def scenario() -> None:
        assert noticed() == [(NOTICE, 1)]
        await node.reload(daemon)
        assert noticed() == [(NOTICE, 2)]
        await node.reload(daemon, "nothing: 1\n")
        assert noticed() == [(NOTICE, 2)]
        named.chmod(0o644)
        await node.reload(daemon, text)
        assert noticed() == []

    run(daemon, scenario)


@pytest.mark.parametrize("mode", ["cpuset", "cfs-quota"])
def test_suppression_that_cannot_work_is_refused_when_it_is_switched_on(node: FileNode, mode: str) -> None:
    text = f"cgroupRoot: {node.directory}/nothing\n"
    daemon = node.from_file(text)

    async def scenario() -> None:
        page = await node.reload(daemon, f"{text}callTimeout: 3s\nbeSuppress: {{mode: {mode}}}\n")
        assert page["reload"]["result"] == "refused"
        assert "beSuppress.mode: cannot find the kernel's CPU times" in page["reload"]["reason"]
        assert daemon.config.call_timeout == 5

    run(daemon, scenario)


def test_a_bad_file_changes_nothing_and_is_a_problem_until_a_good_one(node: FileNode) -> None:
    daemon = node.from_file("callTimeout: 3s\n")

    async def scenario() -> None:
        assert daemon.executor is not None
        ls = await node.launch(DemoPod("ls", "LS"))
        before, options = daemon.config, daemon.executor.options
        page = await node.reload(daemon, "callTimeout: 4s\nkoordinator: {reservedCPUs: 0-1}\nmoed: observe\n")
        assert page["reload"]["result"] == "refused"
        assert "line 3: moed: unknown key; did you mean mode?" in page["reload"]["reason"]
        assert daemon.config is before
        assert daemon.executor.options is options
        assert node.cpus(ls) == "0-15"
        assert any(NOT_RELOADED in what and "moed" in what for what in problems(daemon))
        text = daemon.parts.pages.metrics()
        assert 'topoproxy_config_reloads_total{result="refused"} 1' in text
        assert "topoproxy_config_last_reload_successful 0" in text
        page = await node.reload(daemon, "callTimeout: 4s\nkoordinator: {reservedCPUs: 0-1}\n")
        assert page["reload"]["result"] == "applied"
        await until(lambda: node.cpus(ls) == "2-15")
        assert daemon.executor.options.call_timeout == 4
        assert not any(NOT_RELOADED in what for what in problems(daemon))
        text = daemon.parts.pages.metrics()
        assert "topoproxy_config_last_reload_successful 1" in text
        assert f"topoproxy_config_last_reload_success_timestamp_seconds {page['since']}" in text

    run(daemon, scenario, reconciled=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("log: {level: debug}\nreservedSystemCPUs: 99\n", "CPU 99"),
        ("log: {level: debug}\nreservedSystemCPUs: 0-15\n", "reservedSystemCPUs"),
        ('log: {level: debug}\nkoordinator: {reservedCPUs: "0-1,4-15"}\n', "shared pool empty"),
        ("log: {level: debug}\n- x\n", "not YAML"),
    ],
)
def test_one_part_that_cannot_be_applied_blocks_the_whole_reload(
    node: FileNode, text: str, reason: str
) -> None:
    daemon = node.from_file()

    async def scenario() -> None:
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        ls = await node.launch(DemoPod("ls", "LS"))
        threshold = logs.log.enabled("debug")
        page = await node.reload(daemon, text)
        assert page["reload"]["result"] == "refused"
        assert reason in page["reload"]["reason"]
        assert logs.log.enabled("debug") == threshold
        assert (node.cpus(lse), node.cpus(ls)) == ("2-3", "0-1,4-15")
        assert changes(daemon.config, Config()) == changes(daemon.parts.reload.config, Config())

    run(daemon, scenario, reconciled=True)


def test_keys_that_need_a_restart_are_named_and_wait(node: FileNode) -> None:
    daemon = node.from_file()

    async def scenario() -> None:
        page = await node.reload(daemon, "sysfsRoot: /elsewhere\nlog: {format: json}\n")
        assert page["reload"]["result"] == "applied"
        assert page["restart"] == [{"key": "sysfsRoot", "before": "/sys", "after": "/elsewhere"}]
        assert str(daemon.config.sysfs_root) == "/sys"
        assert "topoproxy_config_restart_keys 1" in daemon.parts.pages.metrics()
        page = await node.reload(daemon, "")
        assert page["restart"] == []
        page = await node.reload(daemon, "")
        assert page["reload"]["result"] == "unchanged"

    run(daemon, scenario)


def test_a_change_that_contradicts_a_setting_waiting_for_a_restart_is_refused(node: FileNode) -> None:
    daemon = node.from_file()

    async def scenario() -> None:
        page = await node.reload(
            daemon, "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: true}\n"
        )
        assert page["reload"]["result"] == "refused"
        assert "restart to apply the whole file" in page["reload"]["reason"]

    run(daemon, scenario)


def test_settings_from_the_cluster_that_the_machine_cannot_meet_do_not_block_the_nodes_own(
    node: FileNode,
) -> None:
    cluster = node.directory / "cluster"
    cluster.mkdir()
    allowed = "clusterConfig: {allowed: [enforce.percent, reservedSystemCPUs]}\n"
    rest = f"{allowed}clusterFacts: {{directory: {cluster}}}\n"
    (cluster / FILE_NAME).write_text("reservedSystemCPUs: 0-999\nenforce: {percent: 7}\n")
    daemon = node.from_file(rest + "explainHistory: 5\n")

    async def scenario() -> None:
        assert daemon.executor is not None
        assert "there are no CPUs" in daemon.config.cluster_fault
        page = await node.reload(daemon, rest + "explainHistory: 6\n")
        assert [row["key"] for row in page["reload"]["applied"]] == ["explainHistory"]
        assert any("there are no CPUs" in note for note in page["reload"]["notes"])
        assert daemon.executor.options.history == 6
        (cluster / FILE_NAME).write_text("reservedSystemCPUs: '0'\nenforce: {percent: 7}\n")
        page = await node.reload(daemon)
        assert "enforce.percent" in [row["key"] for row in page["reload"]["applied"]]
        assert not page["reload"]["notes"]
        (cluster / FILE_NAME).write_text("reservedSystemCPUs: 0-999\nenforce: {percent: 8}\n")
        page = await node.reload(daemon)
        assert page["reload"]["result"] == "refused", "new settings leave those in effect that were in effect"

    run(daemon, scenario)


def test_options_of_the_command_line_keep_precedence(node: FileNode) -> None:
    daemon = node.from_file("explainHistory: 5\n", {"explainHistory": ("--explain-history", "9")})

    async def scenario() -> None:
        assert daemon.executor is not None
        page = await node.reload(daemon, "explainHistory: 6\nonError: refuse\n")
        assert [row["key"] for row in page["reload"]["applied"]] == ["onError"]
        assert daemon.executor.options.history == 9

    run(daemon, scenario)


def test_only_containers_that_must_move_are_moved(node: FileNode) -> None:
    daemon = node.from_file()

    async def scenario() -> None:
        assert daemon.executor is not None
        lse = await node.launch(DemoPod("lse", "LSE", cpuset="2-3"))
        ls = await node.launch(DemoPod("ls", "LS"))
        written = lambda: daemon.executor.telemetry.registry.page()["cpusets_written"]  # noqa: E731
        for _ in range(3):  # until all that follows from the launches is written
            await asyncio.sleep(0.05)
            await daemon.executor.kernel.run(lambda: None)
        before = written()
        page = await node.reload(daemon, "admission: {maxCPUsPerPod: 4, sharedFloor: 1}\n")
        assert page["reload"]["result"] == "applied"
        assert daemon.executor.state.node.admission.pod_limit == 4
        await asyncio.sleep(0.2)
        assert written() == before, "rules of admission move no container"
        await node.reload(daemon, "admission: {maxCPUsPerPod: 4}\nreservedSystemCPUs: 2-3\n")
        assert node.cpus(lse) == "2-3", "an owner keeps reserved CPUs until it ends"
        assert node.cpus(ls) == "0-1,4-15"
        with pytest.raises(Exception, match="maxCPUsPerPod"):
            await node.launch(DemoPod("much", "LSE", cpuset="4-9"))

    run(daemon, scenario, reconciled=True)


def test_a_fault_while_applying_reverts_the_applied_steps(
    node: FileNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = node.from_file()

    async def scenario() -> None:
        assert daemon.executor is not None
        ls = await node.launch(DemoPod("ls", "LS"))
        change = daemon.executor.change_options

        def faulty(options: Any) -> None:
            change(options)
            if options.history == 7:
                raise RuntimeError("odd")

        monkeypatch.setattr(daemon.executor, "change_options", faulty)
        page = await node.reload(daemon, "explainHistory: 7\nlog: {level: error}\n")
        assert page["reload"]["reason"] == "internal error: RuntimeError('odd')"
        assert daemon.executor.options.history == 500
        assert logs.log.enabled("info")
        assert node.cpus(ls) == "0-15"

    run(daemon, scenario, reconciled=True)


def test_a_daemon_in_passthrough_reloads_the_settings_that_it_uses(node: FileNode) -> None:
    daemon = node.from_file("mode: passthrough\n")

    async def scenario() -> None:
        page = await node.reload(daemon, "mode: passthrough\ndrainTimeout: 1s\ncallTimeout: 7s\n")
        assert [row["key"] for row in page["reload"]["applied"]] == ["callTimeout", "drainTimeout"]
        assert daemon.config.drain_timeout == 1
        assert daemon.parts.pages.status()["config"]["reload"]["result"] == "applied"

    run(daemon, scenario)


def test_a_daemon_without_a_file_refuses_a_reload(node: FileNode) -> None:
    daemon = node.daemon()

    async def scenario() -> None:
        page = await daemon.parts.reload.action()
        assert (
            page["reload"]["reason"] == "cannot reload: the daemon was not started from a configuration file"
        )

    run(daemon, scenario)


def test_each_live_key_has_one_step_and_each_step_has_live_keys(node: FileNode) -> None:
    daemon = node.from_file()

    async def scenario() -> None:
        steps = daemon.parts.reload._steps
        owners = {key: sum(step.applies(key) for step in steps) for key in live_keys()}
        assert {key: count for key, count in owners.items() if count != 1} == {}
        for step in steps:
            for own in step.keys:
                assert any(key == own or key.startswith(f"{own}.") for key in live_keys()), own

    run(daemon, scenario)
