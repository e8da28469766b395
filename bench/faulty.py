"""The daemon with faults at its ports: kernel writes that fail, and an end by SIGKILL at any of its steps.

    FAULTS='{"kill_at": 17}' python bench/faulty.py serve --config ...

``FAULTS`` is JSON: ``kill_at`` (the step at which it kills itself, counted from 1), ``steps`` (a file to
which each step is appended), ``writes`` (the share of kernel writes that are refused, with EBUSY or ENOSPC),
``seed``. A step is a point at which something has just become true outside of the process, or is about to:
before, amid and after each write of the ledger, before and after each kernel write, before and after a call
is forwarded to the runtime, and when its answer arrives. Only steps of calls are counted: those of the first
reconcile are not, because a crash there is one more crash of the same kind.

An UpdateContainerResources with ``MOVE_SHARES`` makes the daemon move that owner to other CPUs while it
handles the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import random
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxy.api.cri import api_pb2 as pb
from proxy.atomic_write import write_completely
from proxy.backends.cgroup.fake.cpuset_rules import FakeCgroupFiles
from proxy.backends.ledger import file_ledger
from proxy.executor.node_executor import NodeExecutor
from proxy.frontends.cri.call import CriCallFlow, InterceptedCall
from proxy.model.idset import CpuSet

MOVE_SHARES = 777
"""The ``cpu_shares`` of an update that has its container moved."""


class DaemonFaults:
    """What goes wrong."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.kill_at = int(settings.get("kill_at", 0))
        self.share = float(settings.get("writes", 0.0))
        self.dice = random.Random(int(settings.get("seed", 1)))
        self.trace = Path(settings["steps"]).open("a", buffering=1) if "steps" in settings else None  # noqa: SIM115
        self.orders = Path(settings["orders"]) if "orders" in settings else None
        self.count = 0
        self.counting = False
        self._last_orders = ""
        self._lock = threading.Lock()

    def read_orders(self) -> None:
        """Begin to count, and begin again when there are other orders; a call has come."""
        self.counting = self.counting or self.orders is None
        with contextlib.suppress(FileNotFoundError):
            text = self.orders.read_text() if self.orders is not None else ""
            if text != self._last_orders:
                self._last_orders, self.count, self.counting = text, 0, True
                self.kill_at = int(json.loads(text)["kill_at"])
                if (steps := json.loads(text).get("steps")) is not None:
                    self.trace = Path(steps).open("a", buffering=1)  # noqa: SIM115

    def step(self, what: str) -> None:
        """Pass a step, or end at it."""
        if not self.counting:
            return
        with self._lock:
            self.count += 1
            if self.trace is not None:
                self.trace.write(f"{what}\n")
            if self.count == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()  # it is on its way

    def refuse(self, path: str) -> None:
        """Refuse a kernel write now and then."""
        with self._lock:
            if self.dice.random() >= self.share:
                return
            number = self.dice.choice((errno.EBUSY, errno.EBUSY, errno.ENOSPC))
        raise OSError(number, os.strerror(number), path)


async def move(executor: NodeExecutor, container_id: str) -> None:
    """Move an owner to the last shared CPUs."""
    container = executor.state.containers[container_id]
    target = CpuSet(list(executor.state.pools.shared)[-len(container.placement.exclusive) :])
    if why := await executor.owner_moves.move(container.owner, target):
        executor.telemetry.warning("cannot move the container", container=container_id, reason=why)


def install(faults: DaemonFaults) -> None:
    """Put the faults between the daemon and what it stands on."""
    store, write, release = write_completely, FakeCgroupFiles.write, InterceptedCall.release
    request, response = CriCallFlow.request, CriCallFlow.response

    def stored(fd: int, data: bytes) -> None:
        faults.step("ledger: before a record")
        if faults.count + 1 == faults.kill_at:
            os.write(fd, data[: len(data) // 2])
        faults.step("ledger: amid a record")
        store(fd, data)
        faults.step("ledger: after a record")

    def written(self: FakeCgroupFiles, path: str, name: str, text: str) -> None:
        faults.step("kernel: before a write")
        faults.refuse(path)
        write(self, path, name, text)
        faults.step("kernel: after a write")

    def released(self: InterceptedCall, body: bytes | None = None, suffix: bytes = b"") -> None:
        faults.step(f"{self.method}: before it continues")
        release(self, body, suffix)
        faults.step(f"{self.method}: after it continued")

    def requested(self: CriCallFlow, call: Any) -> None:
        faults.read_orders()
        request(self, call)
        if call.method == "UpdateContainerResources":
            update = pb.UpdateContainerResourcesRequest.FromString(call.body)
            if update.linux.cpu_shares == MOVE_SHARES:
                self.executor.spawn(move(self.executor, update.container_id))

    def answered(self: CriCallFlow, call: Any, message: bytes) -> None:
        faults.step(f"{call.method}: answered, not noted")
        response(self, call, message)
        faults.step(f"{call.method}: answered and noted")

    file_ledger.write_completely = stored  # type: ignore[attr-defined]
    FakeCgroupFiles.write = written  # type: ignore[method-assign]
    InterceptedCall.release = released  # type: ignore[method-assign]
    CriCallFlow.request = requested  # type: ignore[method-assign, assignment]
    CriCallFlow.response = answered  # type: ignore[method-assign]


def sizes() -> dict[str, int]:
    """Return how much all objects of the daemon hold, by class and attribute; and what its modules hold."""
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        held: Iterable[tuple[str, object]]
        kind = type(one)
        if isinstance(one, ModuleType):
            name, held = one.__name__, vars(one).items()
        else:
            name = f"{kind.__module__}.{kind.__qualname__}"
            slots = [slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ())]
            held = [
                *getattr(one, "__dict__", {}).items(),
                *((slot, getattr(one, slot, None)) for slot in slots),
            ]
        if name.startswith("proxy."):
            for attribute, value in held:
                if isinstance(value, dict | list | set | deque) and not attribute.startswith("__"):
                    found[f"{name}.{attribute}"] += len(value) - _cancelled_timers(value)
    return found


def _cancelled_timers(held: Iterable[object]) -> int:
    """Count cancelled timers: asyncio keeps up to a hundred (CPython's asyncio/base_events.py, _run_once)."""
    if not isinstance(held, list):
        return 0
    return sum(type(each) is asyncio.TimerHandle and each.cancelled() for each in held)


def report(*_: object) -> None:
    """Write down how much is held."""
    gc.unfreeze()
    gc.collect()
    Path(os.environ["SIZES"]).write_text(json.dumps(sizes()))


if __name__ == "__main__":
    if "SIZES" in os.environ:
        signal.signal(signal.SIGRTMIN, report)
    install(DaemonFaults(json.loads(os.environ.get("FAULTS", "{}"))))
    from proxy.__main__ import main

    main()
