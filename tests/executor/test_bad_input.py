from __future__ import annotations

from typing import Any

from proxy.executor import bad_input
from proxy.executor.bad_input import BadInput
from proxy.model.defects import DefectKind, InputDefect
from proxy.model.workload import Pod
from proxy.telemetry import metrics
from tests.testkit.captured_log import telemetry


def counted(world: Any) -> dict[str, int]:
    prefix = "bad_input_"
    return {
        k.removeprefix(prefix): n
        for k, n in world.executor.telemetry.registry.page().items()
        if k.startswith(prefix) and n
    }


def reported(world: Any, why: str, pod: str = "") -> list[str]:
    """Return the reported problems of pods that contain a text."""
    known = [p["keys"] for p in world.executor.telemetry.problems()]
    texts = [k.get("reason") or k["err"] for k in known if k.get("pod", "").startswith(pod)]
    return [text for text in texts if why in text]


def reasons(world: Any, name: str) -> str:
    record = world.executor.history.find(name)[-1].explanation
    return " | ".join(
        [*record.reasons, *(f"{f.what} {f.value}" for f in record.facts), record.verdict.message]
    )


def test_each_kind_is_counted_reported_and_explained_once_a_pod(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        odd = await world.pod("odd", "LSX")
        for _ in range(3):
            call = await world.begin(odd)
            assert call.refused is None
            world.finish(call, f"odd-{world.executor.state.runtime.changes.number}")
        assert counted(world) == {"qos-class": 1}
        assert reported(world, "label koordinator.sh/qosClass: 'LSX' is not a class", "ns/odd")
        assert "ignored: label koordinator.sh/qosClass: 'LSX'" in reasons(world, "ns/odd")

        first = await world.run(await world.pod("first", "LSE", "", "2-3"))
        assert world.on(first) == "2-3"
        for uid in ("clash", "clash"):
            call = await world.begin(await world.pod(uid, "LSR", "", "3-4"))
            assert call.refused is not None
        assert counted(world) == {"qos-class": 1, "overlap": 1}
        assert len(reported(world, "CPU 3 is owned by ns/first")) == 1
        assert "CPU 3 is owned by ns/first" in reasons(world, "ns/clash")

        soft = await world.begin(await world.pod("soft", "LS", "", "3"))
        assert soft.refused is None
        assert counted(world)["overlap"] == 2
        assert "CPU 3 is owned by ns/first" in reasons(world, "ns/soft")

        call = await world.begin(await world.pod("far", "LS", "", "99"))
        assert call.refused is None
        assert counted(world)["cpu-list"] == 1
        assert "CPU 99 is not on this machine (0-" in reasons(world, "ns/far")
        assert world.on(first) == "2-3", "other containers are never affected"
        world.check()

    run_scenario(scenario)


def test_what_is_remembered_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(bad_input, "REMEMBERED", 2)
    logged: list[str] = []
    port = telemetry(logged)
    seer = BadInput(port)
    assert {k: n for k, n in port.registry.page().items() if k.startswith("bad_")} == {
        f"bad_input_{k}": 0 for k in DefectKind
    }
    for number in (1, 2, 2, 3, 1):
        seer.report_defects(
            Pod("s", f"u{number}", "ns", f"p{number}", defects=(InputDefect("bad", DefectKind.POLICY),))
        )
    assert logged == [
        f"cannot follow what a pod requests pod=ns/p{n} kind=policy reason=bad" for n in (1, 2, 3)
    ], "a known problem is not logged again"
    assert port.value(metrics.BAD_INPUT, kind="policy") == 4


def test_bad_input_is_known_after_a_restart(run_scenario) -> None:
    async def scenario(world: Any) -> None:
        await world.run(await world.pod("odd", "LSX", annotation="{"))
        counted_before = counted(world)
        assert counted_before == {"qos-class": 1, "annotation": 1}
        await world.executor.ledger_writer.flush()
        await world.close()
        world.boot()
        await world.sync.once()
        assert counted(world) == counted_before
        assert reported(world, "label koordinator.sh/qosClass", "ns/odd")
        pod = next(iter(world.executor.state.pods.values()))
        assert pod.defects[1] == pod.problem
        assert isinstance(pod.problem, InputDefect)
        assert "ignored: label" in reasons(world, "ns/odd")

    run_scenario(scenario)
