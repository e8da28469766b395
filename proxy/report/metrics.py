"""What the daemon knows in numbers, in Prometheus' text format (version 0.0.4).

Everything is read off the page that ``topoproxy status`` shows, so both always say the same. Counters begin
with the process. What a page does not have is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from proxy.keeper.bad_input import COUNTER, LIMITED
from proxy.keeper.drift.authors import COUNTER as DRIFT_BY
from proxy.keeper.drift.authors import Author
from proxy.model.idset import CpuSet
from proxy.model.workload import Phase, Pool
from proxy.pools.quota import PERIOD
from proxy.report.exposition import Sample, family
from proxy.report.hook_metrics import hook_metrics
from proxy.report.parts import as_list, as_map

_COUNTERS = {
    "passes": "Comparisons with the runtime and the kernel.",
    "creates_placed": "Containers that were placed.",
    "creates_refused": "Creates of containers that were refused.",
    "creates_failed": "Creates that came to nothing at the runtime.",
    "creates_elsewhere": "Containers that got other CPUs, as those chosen first could not be freed.",
    "owners_cleared": "Creates of containers with CPUs of their own for which the others had to leave.",
    "creates_waited": "Of these, creates that waited for a start or an update that was in flight.",
    "creates_waited_ms": "Milliseconds that these creates have waited, together.",
    "creates_past_calls": "Creates that went on while a start or update hung, with its container confined.",
    "pods_refused": "Sandboxes that were refused.",
    "adopted": "Containers that were there already and were taken in.",
    "cpusets_written": "Cpusets of containers that were written to the kernel.",
    "drift_repaired": "Cpusets that somebody else, by author, had written and that were put back.",
    "drift_wars": "Times that somebody began to write a cpuset again and again.",
    "write_floods": "Times that more writes to cpusets were told of than could wait.",
    "records_rejected": "Records that could not be stored in the ledger because of what they hold.",
    "refused_writes_retried": "Times that sets that the kernel had refused were written again.",
    "mems_repaired": "Containers that were given memory nodes back that somebody had taken away.",
    "mems_drift": "Containers whose memory nodes somebody else had written.",
    "sandboxes_written": "Cpusets of sandboxes that were written to the kernel.",
    "cgroups_located": "Containers whose cgroup no name told and the runtime's answer did.",
    "exits_by_event": "Containers whose end the runtime told by an event.",
    "event_streams": "Times that listening to the runtime's events began.",
    "event_floods": "Times that more events came than could wait.",
    "settled": "Cpusets that were made lasting at the runtime.",
    "released": "Updates at the runtime by which a release gave a container back what it had.",
    "units_set": "Sets that were made lasting as properties of systemd's units.",
    "units_repaired": "Units whose set the runtime had told systemd with its bytes reversed.",
    "fences": "Times that a pod's group was narrowed while a call for one of its containers was in flight.",
    "systemd_connections": "Times that systemd was connected to.",
    "systemd_reloads": "Times that systemd had loaded its units anew.",
    "specs_freshened": "Containers whose saved cpuset was brought up to date before their start.",
    "machine_changes": "Times that CPUs or memory came or went.",
    "machine_events": "Times that the kernel told that some may have.",
    "owners_cut": "Times that a container had less than it was promised, because CPUs or memory went.",
    "stand_ins": "Times that an owner was given CPUs in place of his that had gone.",
    "quotas_off": "CFS quotas that were taken off owners of CPUs.",
    "quotas_back": "CFS quotas that were put back.",
    "quota_drift": "CFS quotas that somebody else had written and that were taken off again.",
    "kubelet_changes": "Times that what kubelet's CPU manager holds changed.",
    "rules_changed": "Times that what is prescribed for the node changed.",
    "be_suppress_rounds": "Rounds of BE suppression.",
    "be_suppress_changes": "Times that BE pods got more or less.",
    "be_suppress_unreadable": "Rounds of BE suppression in which usage could not be told.",
    "partitions_made": "Times that an owner's CPUs were made a partition of cgroup v2.",
    "partitions_lost": "Times that the kernel said that such a partition holds no more.",
    "refused_by_hooks": "Calls that were refused by a hook, or as one failed that must not.",
    "updated_by_hooks": "Containers that were changed as hooks want, beside calls.",
    "updates_by_hooks_failed": "Changes that hooks want of containers and that could not be made.",
    "hook_questions": "Times that a koord-runtime-proxy has asked us as its hook server.",
    "hook_questions_refused": "Times that it was told to refuse a call.",
    "requests_undecodable": "Requests that could not be decoded.",
    "runtime_entries_unreadable": "Parts of the runtime's lists, answers and events that could not be read.",
    "tasks_begun_anew": "Tasks of the background that a fault had ended and that were begun again.",
    "calls_not_plain": "Requests of intercepted methods that were not one plain message.",
    "internal_errors": "Faults of our own.",
}
"""Those that are there from the beginning."""


def metrics(status: Mapping[str, object]) -> str:
    """Write all metrics.

    Args:
        status: What ``/status`` answers.
    """
    parts = (_process, _workers, _node, _rules, _suppression, _memory, hook_metrics, _counters)
    return "".join(text for part in parts for text in part(status))


def _process(status: Mapping[str, object]) -> Iterator[str]:
    labels = {"version": status.get("version", ""), "mode": status.get("mode", "")}
    yield family("info", "gauge", "The daemon: its version and mode.", [(labels, 1)])
    runtime = as_map(status.get("runtime"))
    systemd = as_map(as_map(status.get("cgroups")).get("systemd")).get("connected")
    told = (
        ("uptime_seconds", "Seconds since the daemon started.", status.get("uptime_s")),
        (
            "ready",
            "Whether the first comparison with the runtime is done, and kernel and ledger answer.",
            status.get("ready"),
        ),
        ("runtime_connected", "Whether the runtime answers.", runtime.get("connected")),
        ("systemd_connected", "Whether systemd answers, where containers are its scopes.", systemd),
        ("runtime_events", "Whether the runtime's events reach us.", _hears(runtime.get("events"))),
        ("clients", "Connections of clients.", status.get("clients")),
    )
    yield from _plain(told)


def _workers(status: Mapping[str, object]) -> Iterator[str]:
    workers = {name: as_map(each) for name, each in as_map(status.get("workers")).items()}
    if not workers:
        return
    stuck = [({"worker": name}, _number(each.get("stuck_s"))) for name, each in sorted(workers.items())]
    words = "Seconds that a worker thread has been at one job, once that is too long; 0 while it is not."
    yield family("worker_stuck_seconds", "gauge", words, stuck)
    waiting = [({"worker": name}, _number(each.get("waiting"))) for name, each in sorted(workers.items())]
    yield family("worker_jobs_waiting", "gauge", "Jobs that wait for a worker thread.", waiting)


def _number(value: object) -> int | float:
    return value if isinstance(value, int | float) else 0


def _hears(events: object) -> object:
    return events if events is None else int(events == "connected")


def _plain(told: Iterable[tuple[str, str, object]]) -> Iterator[str]:
    for name, words, value in told:
        if isinstance(value, int | float):
            yield family(name, "gauge", words, [({}, value)])


def _node(status: Mapping[str, object]) -> Iterator[str]:
    pools = as_map(status.get("pools"))
    if not pools:
        return
    names = [name for name in ("shared", "be", "system") if name in pools]
    yield family("pool_cpus", "gauge", "CPUs of a pool.", [({"pool": n}, _count(pools[n])) for n in names])
    parts = [
        ({"pool": name, "node": part.get("node")}, _count(part.get(name)))
        for part in map(as_map, as_list(pools.get("nodes")))
        for name in names
        if name in part
    ]
    yield family("pool_node_cpus", "gauge", "CPUs of a pool on a NUMA node.", parts)
    owners = [as_map(owner) for owner in as_list(status.get("exclusive"))]
    yield family("owners", "gauge", "Who owns CPUs: pods and containers.", [({}, len(owners))])
    owned = [
        ({"be_may_use": told}, sum(_count(each.get("cpus")) for each in owners if each.get("hard") is hard))
        for told, hard in (("true", False), ("false", True))
    ]
    yield family("owned_cpus", "gauge", "CPUs that somebody owns.", owned)
    there = [as_map(each) for each in as_list(status.get("containers"))]
    live = [each for each in there if each.get("phase") != Phase.EXITED.value]
    held = [({"pool": pool.value}, sum(each.get("pool") == pool.value for each in live)) for pool in Pool]
    yield family("containers", "gauge", "Containers that have not ended, by what they run on.", held)


def _rules(status: Mapping[str, object]) -> Iterator[str]:
    told: list[tuple[str, str, object]] = []
    for name, words, key in (
        ("pods_set_aside", "Pods for which CPUs or memory are set aside.", "aside"),
        ("problems", "Different problems that are remembered.", "problems"),
        ("violations", "Rules that the state breaks; anything but 0 is a fault of ours.", "violations"),
    ):
        if key in status:
            told.append((name, words, len(as_list(status[key]))))
    if "short" in status:
        short = [as_map(entry) for entry in as_list(status["short"])]
        away = sum(n for entry in short if isinstance(n := entry.get("missing"), int))
        told.append(("containers_short", "Containers that have not all that they were promised.", len(short)))
        told.append(("cpus_short", "CPUs that were promised and are not there, nor others instead.", away))
    prescribed = as_map(status.get("prescribed"))
    if prescribed:
        wrong = sum(bool(as_map(value).get("problem")) for value in as_list(prescribed.get("values")))
        told.append(("prescribed_problems", "Values for the node that could not be followed.", wrong))
        if prescribed.get("nodeObject"):
            good = int(bool(prescribed.get("read")) and not prescribed.get("problem"))
            told.append(("node_object_readable", "Whether the Node object could be read.", good))
    if drift := as_map(status.get("drift")):
        words = "Containers whose cpuset somebody writes again and again."
        told.append(("drift_wars_now", words, len(as_list(drift.get("wars")))))
        told.append(("drift_watched", "Containers of which the kernel tells writes.", drift.get("watched")))
    told.append(("decisions_remembered", "Decisions that explain can tell.", status.get("remembered")))
    yield from _plain(told)


def _suppression(status: Mapping[str, object]) -> Iterator[str]:
    data = as_map(status.get("beSuppress"))
    if not data:
        return
    budget, quota, usage = data.get("budget_milli"), data.get("quota_us"), as_map(data.get("usage"))
    if isinstance(budget, int):
        words = "CPUs that the others leave to BE pods; below 0 where they use more than the threshold."
        yield family("be_budget_cpus", "gauge", words, [({}, budget / 1000)])
    used = [({"by": who}, n) for who in ("be", "others", "system") if isinstance(n := usage.get(who), float)]
    if used:
        yield family("be_suppress_used_cpus", "gauge", "CPUs in use, as BE suppression counts them.", used)
    yield family("be_cpus", "gauge", "CPUs that BE containers run on now.", [({}, _count(data.get("cpus")))])
    if isinstance(quota, int) and quota > 0:
        words = "CPUs that the CFS quota of all BE pods comes to."
        yield family("be_quota_cpus", "gauge", words, [({}, quota / PERIOD)])


def _memory(status: Mapping[str, object]) -> Iterator[str]:
    samples = [
        ({"node": node.get("node"), "resource": resource, "state": state}, amount)
        for node in map(as_map, as_list(status.get("memory")))
        for resource, amounts in as_map(node.get("resources")).items()
        for state in ("allocatable", "given", "free")
        if isinstance(amount := as_map(amounts).get(state), int)
    ]
    if samples:
        yield family("memory_bytes", "gauge", "Memory of NUMA nodes that is promised, and not.", samples)


def _counters(status: Mapping[str, object]) -> Iterator[str]:
    if "counters" not in status:
        return
    counters = {name: n for name, n in as_map(status["counters"]).items() if isinstance(n, int)}
    bad = {name: n for name, n in counters.items() if name.startswith(COUNTER)}
    limited = {name: n for name, n in counters.items() if name.startswith(LIMITED)}
    by = {f"{DRIFT_BY}{author}": author for author in Author}
    told = _COUNTERS.keys() | bad.keys() | limited.keys() | by.keys()
    for name in [*_COUNTERS, *sorted(counters.keys() - told)]:
        words = _COUNTERS.get(name, f"The counter {name} of topoproxy status.")
        samples: list[Sample] = [({}, counters.get(name, 0))]
        if name == "drift_repaired":
            samples = [({"author": author}, counters.get(key, 0)) for key, author in by.items()]
        yield family(f"{name}_total", "counter", words, samples)
    beyond = [
        ({"rule": name.removeprefix(LIMITED).rpartition("_")[0], "verdict": name.rpartition("_")[2]}, n)
        for name, n in sorted(limited.items())
    ]
    words = "Claims to CPUs that went beyond a rule of admission, by rule and what became of them."
    yield family("admission_limits_total", "counter", words, beyond)
    kinds = [({"kind": name.removeprefix(COUNTER)}, n) for name, n in sorted(bad.items())]
    words = "Pods with labels or annotations that could not be followed, by what was wrong."
    yield family(f"{COUNTER}total", "counter", words, kinds)


def _count(cpus: object) -> int:
    return len(CpuSet.parse(cpus)) if isinstance(cpus, str) else 0
