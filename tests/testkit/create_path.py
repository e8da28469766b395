"""The files that a CreateContainer crosses, in the order in which it first enters them.

    make create-path

A daemon runs in this process, on the imitated node of the tests, with some containers. Then containers of two
kinds are created: one that shares its CPUs, and one that owns the CPU that its pod's annotation names. From
the moment at which the client sends the request until it has the answer and the ledger has the record, each
call of a function is recorded, on the event loop and on the daemon's workers. All files of ``proxy/`` count:
also values, log and metrics. A second number leaves these out.

A file counts if each of some creates of the kind crosses it, so that a timer that runs by chance does not
count. What stands in for the node does not count: ``proxy/demo`` (the client and the runtime) and
``proxy/backends/cgroup/fake`` (the kernel). What comes later does not count either: the cpusets of moved
containers, which are sent to the runtime and to systemd, are not sent here.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from proxy import logs
from proxy.demo.client import CriClient, DemoPod
from proxy.executor.background import Threads
from proxy.model.workload import KubeQos
from tests.testkit.daemon import run, temporary_node

ROOT = Path(__file__).parents[2] / "proxy"
STAND_INS = ("demo/", "backends/cgroup/fake/")
UNCOUNTED = ("model/", "api/", "telemetry/", "logs.py")
"""Values, generated messages, log and metrics: what a reader need not open."""
SHARING = "a container that shares its CPUs"
OWNER = "an owner of CPUs"
CREATES_PER_KIND = 3
QUIET_S = 0.15
"""How long to wait until nothing of an earlier call runs any more."""
CONFIGURATION = "mode: enforce\nreconcilePeriod: 1h\nsettle:\n  enabled: false\nhooks:\n  enabled: false\n"
"""Without hooks: they are looked for several times a second, so slow creates would all cross their files."""
MAX_LINE_CHARS = 100


class CrossedFiles:
    """Records whose functions are called on this thread, and on workers that start later.

    Attributes:
        files: The files, in the order of their first calls; None while nothing is recorded.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch this thread and the workers that start from now on."""
        threading.setprofile(self._begin)
        sys.setprofile(self._record_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _begin(self, frame: FrameType, event: str, arg: object) -> None:
        """Watch a thread if it is a worker: the client and the runtime have threads, too."""
        target = getattr(threading.current_thread(), "_target", None)
        is_worker = isinstance(getattr(target, "__self__", None), Threads)
        sys.setprofile(self._record_call if is_worker else None)

    def _record_call(self, frame: FrameType, event: str, arg: object) -> None:
        if self.files is not None and event == "call":
            self.files.setdefault(frame.f_code.co_filename)


def counted(files: dict[str, None]) -> list[str]:
    """Return those that count, as paths below ``proxy/``."""
    ours = [path.removeprefix(f"{ROOT}/") for path in files if path.startswith(f"{ROOT}/")]
    return [path for path in ours if not path.startswith(STAND_INS)]


def create_paths() -> dict[str, list[str]]:
    """Return for each kind of container the files that each of its creates crosses."""
    crossed = CrossedFiles()
    found: dict[str, list[list[str]]] = {SHARING: [], OWNER: []}

    with temporary_node() as node:
        daemon = node.daemon(CONFIGURATION)

        def create(client: CriClient, spec: DemoPod) -> dict[str, None]:
            pod = client.run_pod(spec)
            time.sleep(QUIET_S)
            crossed.files = files = {}
            client.create(pod)
            return files

        async def scenario() -> None:
            with node.client() as client:
                for i in range(4):
                    await asyncio.to_thread(client.launch, DemoPod(f"early-{i}", "LS"))
                for i in range(CREATES_PER_KIND + 1):
                    kinds = {
                        SHARING: DemoPod(f"shares-{i}", "LS"),
                        OWNER: DemoPod(f"owns-{i}", "LSR", KubeQos.GUARANTEED, str(2 * i + 1)),
                    }
                    for kind, spec in kinds.items():
                        files = await asyncio.to_thread(create, client, spec)
                        await daemon.parts.executor.ledger_writer.flush()
                        crossed.files = None
                        if i:  # the first one fills caches
                            found[kind].append(counted(files))

        with crossed.watched():
            run(daemon, scenario, reconciled=True)
    return {
        kind: [path for path in runs[0] if all(path in other for other in runs)]
        for kind, runs in found.items()
    }


def lines_by_package(files: list[str]) -> list[str]:
    """Return lines with the files, those of one package that follow each other in one line."""
    lines: list[str] = []
    for package, group in itertools.groupby(files, lambda path: path.rpartition("/")[0]):
        line = f"  {package or '.':<26}"
        for name in (path.rpartition("/")[2].removesuffix(".py") for path in group):
            if len(line) + len(name) > MAX_LINE_CHARS:
                lines.append(line.rstrip())
                line = " " * 28
            line += f"{name}, "
        lines.append(line.rstrip(", "))
    return lines


def page(paths: dict[str, list[str]]) -> list[str]:
    """Return what is printed, and what ``docs/architecture.md`` lists."""
    known: set[str] = set()
    lines: list[str] = []
    for kind, files in paths.items():
        fewer = sum(not path.startswith(UNCOUNTED) for path in files)
        also = ", and besides these" if known else ""
        lines += [f"{kind}: {len(files)} files, {fewer} without values, log and metrics{also}"]
        lines += lines_by_package([path for path in files if path not in known])
        known |= set(files)
    return lines


if __name__ == "__main__":
    logs.setup("error")
    print("\n".join(page(create_paths())))
