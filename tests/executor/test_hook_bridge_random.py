"""Random calls with hooks that narrow CPUs, reject, fail, answer late and update other containers.

The invariant is the same as without hooks (see ``test_random``): no container that shares runs on
a CPU of a container that was allowed to start with CPUs of its own; and at the end nothing is left, not even
in the hooks' memory.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from proxy.hooks.answers import CLEAR, Adjustment, Update, Veto
from proxy.model.idset import CpuSet
from tests.executor.played_hooks import hooks
from tests.executor.test_random import RULES, RandomClient

DAYS = 6


class RandomHook:
    """A hook with random answers."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world = world
        self.dice = random.Random(seed)
        self.lock = threading.Lock()
        self.bad: list[str] = []

    def before(self, event: Any) -> Adjustment | Veto | None:
        with self.lock:
            mood, pause = self.dice.random(), self.dice.choice((0, 0, 0, 0.002, 0.01))
            allowed = sorted(event.decision.allowed) if hasattr(event, "decision") else []
            some = CpuSet(self.dice.sample(allowed, self.dice.randint(1, len(allowed)))) if allowed else None
            others = sorted(self.world.executor.state.containers)
            other = self.dice.choice(others) if others else "missing"
            anything = CpuSet(self.dice.sample(range(16), 3))
        time.sleep(pause)
        takes = type(event).TAKES
        if mood < 0.05 and type(event).VETO:
            return Veto("not today")
        if mood < 0.1:
            raise RuntimeError("moody")
        if mood < 0.5 and "cpus" in takes and some is not None:
            return Adjustment(cpus=some)
        if mood < 0.55 and "cpus" in takes:
            return Adjustment(cpus=CLEAR)
        if mood < 0.7:
            return Adjustment(updates={other: Update(cpus=anything)})
        if mood < 0.75:
            return Adjustment(updates={other: Update(cpus=CLEAR, cpu_shares=9)})
        return None


@pytest.mark.parametrize("seed", range(DAYS))
@pytest.mark.parametrize("wild", [False, True], ids=["one-by-one", "wild"])
@pytest.mark.parametrize("rules", ["no-policy", "by-pod"])
def test_random_calls_with_hooks_keep_the_invariants(
    run_scenario, seed: int, rules: str, *, wild: bool
) -> None:
    async def scenario(world: Any) -> None:
        runtime_sync = world.make_runtime_sync()
        syncing = asyncio.create_task(runtime_sync.run())
        async with hooks(world) as h:
            moody = RandomHook(world, seed)
            names = ("create_container", "start_container", "update_container_resources", "stop_container")
            h.add(**{f"pre_{name}": moody.before for name in names}, pre_remove_pod_sandbox=moody.before)
            h.add("20-after", post_start_container=moody.before, pools_changed=moody.before)
            h.listen()
            try:
                play = RandomClient(world, seed, wild=wild)
                await play.run()
            finally:
                syncing.cancel()
                await asyncio.gather(syncing, return_exceptions=True)
                await asyncio.to_thread(runtime_sync.close)
            await world.sync.once()
            assert h.remembers() == 0
            await world.until(lambda: not h.updates._is_running)
            assert not h.updates._waiting
            stops = [line for line in h.received if line.startswith("post_stop_container")]
            assert len(stops) == len(set(stops)), "once"

    run_scenario(scenario, rules=RULES[rules], settle_per_second=1000, call_timeout=0.5)
