"""CPUs that come and go."""

from __future__ import annotations

import dataclasses
from typing import Any

from proxy.cri.pb import api_pb2 as pb
from proxy.keeper.runtime_ports import RuntimeDetail
from proxy.model.idset import CpuSet
from proxy.model.machine import Machine

WHOLE = {"cpu_shares": 2048, "cpu_quota": 200_000, "cpu_period": 100_000}


def without(machine: Machine, text: str) -> Machine:
    gone = CpuSet.parse(text)
    nodes = tuple(dataclasses.replace(n, cpus=n.cpus - gone) for n in machine.nodes)
    return dataclasses.replace(machine, cpus=tuple(c for c in machine.cpus if c.id not in gone), nodes=nodes)


def test_everybody_leaves_a_cpu_that_goes_and_returns_when_it_does(live) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        w.machine = without(whole, "3,15")
        await w.sync.once()
        await w.quiet()
        assert (w.on(ls), w.on(lse)) == ("0-1,4-14", "2")
        call = await w.call("UpdateContainerResources", pb.UpdateContainerResourcesRequest(container_id=ls))
        got = pb.UpdateContainerResourcesRequest.FromString(call.sent)
        assert got.linux.cpuset_cpus == "0-1,4-14", "the runtime would fail with a CPU that is not there"
        w.wire.finished(call, 0)
        clash = await w.begin(await w.pod("other", "LSE", "", "3"))
        assert clash.refused[0] == 3
        w.machine = whole
        await w.sync.once()
        await w.quiet()
        assert (w.on(ls), w.on(lse)) == ("0-1,4-15", "2-3")
        assert any("online CPUs are now 0-15, were 0-2,4-14" in line for line in w.said)
        w.check()

    live(day)


def test_a_restart_while_a_cpu_is_offline_keeps_its_owner(live) -> None:
    async def day(w: Any) -> None:
        whole = w.machine
        ls = await w.run(await w.pod("ls", "LS"))
        lse = await w.run(await w.pod("lse", "LSE", "", "2-3"))
        own = await w.run(await w.pod("g"), **WHOLE)
        had = w.on(own)
        w.runtime.details[own] = RuntimeDetail(f"/kubepods/podg/{own}", 2048, 200_000, 100_000, 0, had)
        await w.quiet()
        w.machine = without(whole, "3")
        for entries in (dict(w.ledger.entries), {}):  # with its ledger, and from the runtime alone
            w.ledger.entries = entries
            w.boot()
            await w.sync.once()
            await w.quiet()
            assert (w.on(ls), w.on(lse)) == ("1,4-7,9-15", "2")
        w.machine = whole
        await w.sync.once()
        await w.quiet()
        assert (w.on(lse), w.on(own)) == ("2-3", had)
        w.check()

    live(day)


def test_a_machine_that_leaves_nothing_to_share_is_not_followed(live) -> None:
    async def day(w: Any) -> None:
        ls = await w.run(await w.pod("ls", "LS"))
        await w.run(await w.pod("lse", "LSE", "", "0-3"))
        w.machine = without(w.machine, "4-15")
        await w.sync.once()
        await w.quiet()
        assert w.on(ls) == "4-15"
        assert any("shared pool is empty" in p["what"] for p in w.keeper.problems.page())

    live(day)
