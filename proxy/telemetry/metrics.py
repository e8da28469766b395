"""Every metric, declared once: its name, its kind, its labels and what it measures.

To add a metric, declare it here and count it where the event happens: ``telemetry.count(metrics.NAME)``. Its
help and labels in ``/metrics``, its key in ``counters`` of the status, and its row in ``docs/metrics.md``
come from here; ``make metrics`` writes that page.
"""

from __future__ import annotations

from typing import TypedDict

from proxy.telemetry.registry import Counter, Gauge, Histogram, Metric


class Labels(TypedDict, total=False):
    """Every label of a counter or a histogram."""

    author: str
    kind: str
    method: str
    result: str
    rule: str
    verdict: str


# -- creates ----------------------------------------------------------------------------------------------

CREATES_PLACED = Counter("creates_placed", "Containers that were placed.")
CREATES_REFUSED = Counter("creates_refused", "CreateContainer calls that were refused.")
CREATES_WOULD_PLACE = Counter(
    "creates_would_place",
    "Containers of observed pods that would have been placed; their CreateContainer calls passed unchanged.",
)
CREATES_WOULD_REFUSE = Counter(
    "creates_would_refuse",
    "CreateContainer calls for observed pods that would have been refused, and passed unchanged.",
)
CONTAINERS_WOULD_MOVE = Counter(
    "containers_would_move",
    "Containers that would have had to leave CPUs for a container of an observed pod; none was moved.",
)
CREATES_FAILED = Counter("creates_failed", "CreateContainer calls that failed at the runtime.")
CREATES_ON_OTHER_CPUS = Counter(
    "creates_on_other_cpus",
    "Containers that got other exclusive CPUs, because those that were chosen first could not be freed.",
    former="creates_elsewhere",
)
OWNERS_MOVED = Counter("owners_moved", "Running containers that were moved to other exclusive CPUs.")
MOVES_ABORTED = Counter(
    "owner_moves_aborted", "Moves of running containers that were given up; the containers kept their CPUs."
)
EXCLUSIVE_CREATES = Counter(
    "exclusive_creates",
    "Creates of containers with exclusive CPUs, each after other containers had left these CPUs.",
    former="owners_cleared",
)
CREATES_WAITED = Counter(
    "creates_waited", "Creates with exclusive CPUs that waited for a start or an update in flight."
)
CREATES_WAITED_MS = Counter(
    "creates_waited_ms", "Milliseconds that creates have waited for calls in flight, in total."
)
CREATES_PAST_HANGING_CALLS = Counter(
    "creates_past_hanging_calls",
    "Creates that continued while a start or an update hung, with its container confined.",
    former="creates_past_calls",
)
PODS_REFUSED = Counter("pods_refused", "RunPodSandbox calls that were refused.")
PODS_WOULD_REFUSE = Counter(
    "pods_would_refuse",
    "RunPodSandbox calls for observed pods that would have been refused, and passed unchanged.",
)
BAD_INPUT = Counter(
    "bad_input",
    "Pods with labels or annotations that could not be followed, by what was wrong.",
    ("kind",),
    status_key="bad_input_{kind}",
)
ADMISSION_LIMITS = Counter(
    "admission_limits",
    "Claims to CPUs beyond a rule of admission, by rule and by verdict, such as rejected or shared.",
    ("rule", "verdict"),
    status_key="admission_{rule}_{verdict}",
)

# -- reconciles with the runtime and the kernel -----------------------------------------------------------

RECONCILES = Counter("reconciles", "Reconciles with the runtime and the kernel.", former="passes")
CONTAINERS_ADOPTED = Counter(
    "containers_adopted", "Containers that existed already and were adopted.", former="adopted"
)
CPUSETS_WRITTEN = Counter("cpusets_written", "Cpusets of containers that were written to the kernel.")
SANDBOXES_WRITTEN = Counter("sandboxes_written", "Cpusets of sandboxes that were written to the kernel.")
CPUSET_WRITES_RETRIED = Counter(
    "cpuset_writes_retried",
    "Times that cpusets were written again after the kernel had refused them.",
    former="refused_writes_retried",
)
CPUSETS_REPAIRED = Counter(
    "cpusets_repaired",
    "Cpusets that another program had written and that were put back.",
    status_key="drift_repaired",
)
DRIFT_REPAIRED = Counter(
    "drift_repaired",
    "Cpusets that another program had written and that were put back, by the likely writer.",
    ("author",),
    status_key="drift_by_{author}",
)
WRITE_CONFLICTS = Counter(
    "write_conflicts", "Times that another program began to write a cpuset repeatedly.", former="drift_wars"
)
CPUSET_WATCH_OVERFLOWS = Counter(
    "cpuset_watch_overflows", "Overflows of the queue of writes to cpusets.", former="write_floods"
)
MEMS_REPAIRED = Counter("mems_repaired", "Containers whose memory nodes were set to the planned ones again.")
MEMS_DRIFT = Counter("mems_drift", "Containers whose memory nodes another program had written.")
CGROUPS_LOCATED = Counter(
    "cgroups_located", "Containers whose cgroup was found by querying the runtime, not by its name."
)
RECORDS_REJECTED = Counter(
    "records_rejected", "Records that the ledger could not store because of what they hold."
)

# -- the runtime ------------------------------------------------------------------------------------------

EXITS_BY_EVENT = Counter("exits_by_event", "Containers whose exit the runtime reported by an event.")
RUNTIME_EVENT_STREAMS = Counter(
    "runtime_event_streams", "Connections to the runtime's event stream.", former="event_streams"
)
RUNTIME_EVENT_OVERFLOWS = Counter(
    "runtime_event_overflows", "Overflows of the queue of the runtime's events.", former="event_floods"
)
RUNTIME_UPDATES = Counter(
    "runtime_updates", "Cpusets that were saved at the runtime, so that they last.", former="settled"
)
RELEASE_UPDATES = Counter(
    "release_updates",
    "Updates at the runtime by which a release restored a container's own values.",
    former="released",
)
CPUSETS_UPDATED_BEFORE_START = Counter(
    "cpusets_updated_before_start",
    "Containers whose saved cpuset was updated before their start.",
    former="specs_freshened",
)
RUNTIME_ENTRIES_UNREADABLE = Counter(
    "runtime_entries_unreadable",
    "Entries of the runtime's lists, answers and events that could not be read.",
)

# -- systemd ----------------------------------------------------------------------------------------------

SYSTEMD_UNITS_SET = Counter(
    "systemd_units_set", "Cpusets that were saved as properties of systemd units.", former="units_set"
)
SYSTEMD_UNITS_REPAIRED = Counter(
    "systemd_units_repaired",
    "Units whose cpuset the runtime had sent to systemd with its bytes reversed.",
    former="units_repaired",
)
POD_CGROUPS_NARROWED = Counter(
    "pod_cgroups_narrowed",
    "Times that a pod's cgroup was narrowed while a call for one of its containers was in flight.",
    former="fences",
)
SYSTEMD_CONNECTIONS = Counter("systemd_connections", "Connections to systemd.")
SYSTEMD_RELOADS = Counter("systemd_reloads", "Times that systemd had reloaded its units.")

# -- the machine ------------------------------------------------------------------------------------------

MACHINE_CHANGES = Counter("machine_changes", "Times that CPUs or memory went online or offline.")
MACHINE_EVENTS = Counter("machine_events", "Kernel events about CPUs or memory that changed.")
EXCLUSIVE_CPU_SHORTFALLS = Counter(
    "exclusive_cpu_shortfalls",
    "Containers that lost exclusive CPUs or bound memory because hardware went offline.",
    former="owners_cut",
)
REPLACEMENT_CPUS = Counter(
    "replacement_cpus",
    "Times that a container was given CPUs in place of its offline CPUs.",
    former="stand_ins",
)
PARTITIONS_MADE = Counter(
    "partitions_made", "Times that exclusive CPUs were made a cpuset partition (cgroup v2)."
)
PARTITIONS_LOST = Counter("partitions_lost", "Times that the kernel reported a partition as invalid.")

# -- CFS quotas and BE suppression ------------------------------------------------------------------------

CFS_QUOTAS_REMOVED = Counter(
    "cfs_quotas_removed", "CFS quotas that were removed from owners of CPUs.", former="quotas_off"
)
CFS_QUOTAS_RESTORED = Counter("cfs_quotas_restored", "CFS quotas that were restored.", former="quotas_back")
CFS_QUOTA_DRIFT = Counter(
    "cfs_quota_drift",
    "CFS quotas that another program had written and that were removed again.",
    former="quota_drift",
)
BE_SUPPRESS_ROUNDS = Counter("be_suppress_rounds", "Rounds of BE suppression.")
BE_SUPPRESS_CHANGES = Counter("be_suppress_changes", "Times that BE pods got more or less CPU.")
BE_SUPPRESS_UNREADABLE = Counter(
    "be_suppress_unreadable", "Rounds of BE suppression in which CPU usage could not be read."
)

# -- staged enforcement ------------------------------------------------------------------------------------

PODS_ENFORCED = Counter("pods_enforced", "Running pods to which the plan was applied after a change.")
PODS_GIVEN_BACK = Counter(
    "pods_given_back", "Running pods that got back what they would have without topoproxy after a change."
)

# -- kubelet and the Node object --------------------------------------------------------------------------

KUBELET_CPU_MANAGER_CHANGES = Counter(
    "kubelet_cpu_manager_changes",
    "Changes of the CPUs that kubelet's CPU manager has assigned.",
    former="kubelet_changes",
)
NODE_POLICY_CHANGES = Counter(
    "node_policy_changes",
    "Changes of the settings that the Node object or the configuration prescribes.",
    former="rules_changed",
)

# -- hooks ------------------------------------------------------------------------------------------------

REFUSED_BY_HOOKS = Counter(
    "refused_by_hooks", "Calls that a hook refused, or that were refused because a required hook failed."
)
UPDATED_BY_HOOKS = Counter("updated_by_hooks", "Containers that hooks changed outside of their own calls.")
UPDATES_BY_HOOKS_FAILED = Counter(
    "updates_by_hooks_failed", "Changes of containers that hooks requested and that failed."
)
HOOK_SERVER_REQUESTS = Counter(
    "hook_server_requests",
    "Requests of a koord-runtime-proxy to topoproxy as its hook server.",
    former="hook_questions",
)
HOOK_SERVER_REQUESTS_REFUSED = Counter(
    "hook_server_requests_refused",
    "Requests of a koord-runtime-proxy that were answered with a refusal.",
    former="hook_questions_refused",
)
POD_RESOURCES_REQUESTS = Counter(
    "pod_resources_requests", "Requests to topoproxy's pod-resources API.", ("method",)
)
POD_RESOURCES_REQUESTS_REFUSED = Counter(
    "pod_resources_requests_refused",
    "Requests to topoproxy's pod-resources API that were answered with an error.",
    ("method",),
)

DEVICE_PLUGIN_REGISTRATIONS = Counter(
    "device_plugin_registrations",
    "Registrations of device plugins, by their result: registered, refused, or forwarded to kubelet.",
    ("result",),
    status_key="device_plugin_registrations_{result}",
)
CREATES_DEVICES_UNKNOWN = Counter(
    "creates_devices_unknown",
    "Creates whose pod kubelet has not reported, so that it is not known whether they request devices.",
)
DEVICE_LISTS = Counter("device_lists", "Device lists that device plugins have sent.")
DEVICE_CHANGES = Counter("device_changes", "Changes of the devices that device plugins report.")
DEVICE_PLUGIN_CALLS = Counter("device_plugin_calls", "Calls to device plugins.", ("method",))
DEVICE_PLUGIN_CALLS_FAILED = Counter(
    "device_plugin_calls_failed",
    "Calls to device plugins that had no answer in time, or an error.",
    ("method",),
)
DEVICE_PLUGINS_ISOLATED = Counter(
    "device_plugins_isolated",
    "Times that a device plugin was isolated, because several calls in a row had no usable answer.",
)

# -- faults -----------------------------------------------------------------------------------------------

REQUESTS_UNDECODABLE = Counter("requests_undecodable", "Requests that could not be decoded.")
CALLS_MALFORMED = Counter(
    "calls_malformed",
    "Calls of intercepted methods that were not one plain message.",
    former="calls_not_plain",
)
TASKS_RESTARTED = Counter(
    "tasks_restarted",
    "Background tasks that ended with an internal error and were restarted.",
    former="tasks_begun_anew",
)
INTERNAL_ERRORS = Counter("internal_errors", "Internal errors: faults of topoproxy itself.")

# -- configuration ----------------------------------------------------------------------------------------

CONFIG_RELOADS = Counter(
    "config_reloads",
    "Reloads of the configuration, by their result: applied, unchanged or refused.",
    ("result",),
    status_key="config_reloads_{result}",
)
ENFORCEMENT_PODS = Gauge(
    "enforcement_pods",
    "Pods by how the plan is applied: enforced, observed; of these toEnforce, toGiveBack, inStep.",
    ("state",),
)
ENFORCEMENT_PAUSED = Gauge("enforcement_paused", "Whether steps of staged enforcement are paused.")
CONFIG_LAST_RELOAD_SUCCESSFUL = Gauge(
    "config_last_reload_successful",
    "Whether the last reload of the configuration was accepted; also 1 before the first one.",
)
CONFIG_LAST_RELOAD_SUCCESS_TIMESTAMP = Gauge(
    "config_last_reload_success_timestamp_seconds",
    "When the configuration was last accepted, at the start or by a reload, in seconds since the epoch.",
)
CONFIG_RESTART_KEYS = Gauge(
    "config_restart_keys", "Keys of the configuration whose new values take effect at the next restart."
)

# -- durations --------------------------------------------------------------------------------------------

_FAST_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
_SLOW_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

CREATE_DECISION_SECONDS = Histogram(
    "create_decision_seconds",
    "Seconds that the decision about one CreateContainer took.",
    buckets=_FAST_BUCKETS_S,
)
BARRIER_WAIT_SECONDS = Histogram(
    "barrier_wait_seconds",
    "Seconds that a create with exclusive CPUs waited until the ledger was written and the CPUs were free.",
    buckets=_SLOW_BUCKETS_S,
)
KERNEL_WRITE_SECONDS = Histogram(
    "kernel_write_seconds",
    "Seconds that writing the cpusets of one change to the kernel took.",
    buckets=_SLOW_BUCKETS_S,
)

# -- the daemon -------------------------------------------------------------------------------------------

INFO = Gauge("info", "The daemon: its version and mode.", ("version", "mode"))
UPTIME_SECONDS = Gauge("uptime_seconds", "Seconds since the daemon started.")
READY = Gauge(
    "ready",
    "Whether the daemon is ready: the runtime answers, the state has been compared with it, and kernel and"
    " ledger workers are not stuck.",
)
RUNTIME_CONNECTED = Gauge("runtime_connected", "Whether the runtime answers.")
SYSTEMD_CONNECTED = Gauge(
    "systemd_connected", "Whether systemd answers, if it manages the cgroups of containers."
)
RUNTIME_EVENTS = Gauge("runtime_events", "Whether the runtime's events are received.")
CLIENTS = Gauge("clients", "Open connections of clients.")
KUBELET_ENDPOINT_RESET = Gauge(
    "kubelet_endpoint_reset",
    "Whether kubelet's files name another endpoint than the one that topoproxy attach set; only on an"
    " attached node.",
)
WORKER_STUCK_SECONDS = Gauge(
    "worker_stuck_seconds",
    "Seconds that a worker thread has been at one job, once that is too long; otherwise 0.",
    ("worker",),
)
WORKER_JOBS_WAITING = Gauge("worker_jobs_waiting", "Jobs that wait for a worker thread.", ("worker",))
PROBLEMS = Gauge("problems", "Different problems that are listed in the status.")
VIOLATIONS = Gauge(
    "violations", "Invariants that the state violates; anything but 0 is a fault of topoproxy."
)
DECISIONS_REMEMBERED = Gauge("decisions_remembered", "Decisions that topoproxy explain can show.")

# -- the node ---------------------------------------------------------------------------------------------

POOL_CPUS = Gauge("pool_cpus", "CPUs of a pool.", ("pool",))
POOL_NODE_CPUS = Gauge("pool_node_cpus", "CPUs of a pool on a NUMA node.", ("pool", "node"))
OWNERS = Gauge("owners", "Owners of exclusive CPUs: pods and containers.")
OWNED_CPUS = Gauge("owned_cpus", "Exclusive CPUs that have an owner.", ("be_may_use",))
CONTAINERS = Gauge("containers", "Containers that have not exited, by the pool that they run on.", ("pool",))
PLANNED_POOL_CPUS = Gauge(
    "planned_pool_cpus",
    "CPUs of a pool by a plan that is not applied (observed or released node).",
    ("pool",),
)
PLANNED_POOL_NODE_CPUS = Gauge("planned_pool_node_cpus", "The same, on a NUMA node.", ("pool", "node"))
PLANNED_OWNERS = Gauge("planned_owners", "Observed pods and containers that would own exclusive CPUs.")
PLANNED_OWNED_CPUS = Gauge("planned_owned_cpus", "Exclusive CPUs that these would own.", ("be_may_use",))
PLANNED_CONTAINERS = Gauge(
    "planned_containers", "Observed containers that have not exited, by their pool in the plan.", ("pool",)
)
POD_RESERVATIONS = Gauge(
    "pod_reservations",
    "Pods that have CPUs or memory reserved before their containers are created.",
    former="pods_set_aside",
)
CONTAINERS_BELOW_PROMISE = Gauge(
    "containers_below_promise",
    "Containers that do not have all CPUs or memory that they were promised; others may replace them.",
    former="containers_short",
)
CPUS_BELOW_PROMISE = Gauge(
    "cpus_below_promise",
    "CPUs that were promised, are offline, and have not been replaced by others.",
    former="cpus_short",
)
NODE_POLICY_PROBLEMS = Gauge(
    "node_policy_problems",
    "Settings prescribed for the node that could not be followed.",
    former="prescribed_problems",
)
NODE_OBJECT_READABLE = Gauge("node_object_readable", "Whether the Node object could be read.")
WRITE_CONFLICTS_ACTIVE = Gauge(
    "write_conflicts_active",
    "Containers whose cpuset another program writes repeatedly now.",
    former="drift_wars_now",
)
CPUSETS_WATCHED = Gauge(
    "cpusets_watched",
    "Containers whose cpuset is watched: the kernel reports each write to it.",
    former="drift_watched",
)
PLANNED_POD_RESERVATIONS = Gauge(
    "planned_pod_reservations", "Pods for which a plan that is not applied reserves CPUs or memory."
)
MEMORY_BYTES = Gauge(
    "memory_bytes",
    "Memory and huge pages of NUMA nodes: allocatable, given to containers, and free.",
    ("node", "resource", "state"),
)
PLANNED_MEMORY_BYTES = Gauge(
    "planned_memory_bytes",
    "Memory and huge pages of NUMA nodes by a plan that is not applied.",
    ("node", "resource", "state"),
)
BE_BUDGET_CPUS = Gauge(
    "be_budget_cpus",
    "CPUs that the other pods leave to BE pods; below 0 if they use more than the threshold.",
)
BE_SUPPRESS_USED_CPUS = Gauge("be_suppress_used_cpus", "CPUs in use, as BE suppression counts them.", ("by",))
BE_CPUS = Gauge("be_cpus", "CPUs that BE containers run on.")
BE_QUOTA_CPUS = Gauge("be_quota_cpus", "CFS quota of all BE pods, in CPUs.")

# -- each hook; the hook engine has the figures -----------------------------------------------------------

HOOKS = Gauge("hooks", "Hooks, by their state.", ("state",))
HOOK_BROKEN = Gauge("hook_broken", "Whether the newest version of a hook cannot be loaded.", ("hook",))
HOOK_BREAKER_OPEN = Gauge(
    "hook_breaker_open", "Whether a hook is not called now because it failed repeatedly.", ("hook",)
)
HOOK_CALLS = Counter("hook_calls", "Calls of hooks, since their files were loaded.", ("hook",))
HOOK_CONFLICTS = Counter(
    "hook_conflicts",
    "Answers of hooks that were dropped because an earlier hook had set the same field.",
    ("hook",),
)
HOOK_VETOES = Counter("hook_vetoes", "Calls that a hook has refused.", ("hook",))
HOOK_SKIPPED = Counter(
    "hook_skipped", "Times that a hook was not called because it had failed repeatedly.", ("hook",)
)
HOOK_LOST = Counter("hook_lost", "Events that a hook missed because its queue was full.", ("hook",))
HOOK_FAILURES = Counter("hook_failures", "Failures of hooks, by their kind.", ("hook", "kind"))
HOOK_HUNG_CALLS = Gauge(
    "hook_hung_calls", "Calls of hooks that have not returned after their deadline.", ("hook",)
)
HOOK_CALL_SECONDS = Gauge(
    "hook_call_seconds",
    "Seconds of one call of a hook: the median of the last ones, and the longest ever.",
    ("hook", "of"),
)

DAEMON_METRICS: tuple[Metric, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Metric)
)
"""All metrics of the daemon, in the order of their declarations."""
HOOK_METRICS = frozenset(each for each in DAEMON_METRICS if "hook" in each.labels)
"""Metrics of each hook, whose values the hook engine has."""

# -- the scheduler extender, which serves its metrics at its own address -------------------------------------

EXTENDER_REQUESTS = Counter(
    "extender_requests", "Requests of kube-scheduler, by verb and result.", ("verb", "result")
)
EXTENDER_REQUEST_SECONDS = Histogram(
    "extender_request_seconds",
    "Seconds until a request was answered, by verb.",
    ("verb",),
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
EXTENDER_LEADER = Gauge("extender_leader", "Whether this replica holds the lease.")
EXTENDER_VIEW_AGE_SECONDS = Gauge(
    "extender_view_age_seconds", "Seconds since the copy of the cluster was known to be current."
)
EXTENDER_NODES = Gauge("extender_nodes", "Nodes, by whether the extender can decide for them.", ("state",))
EXTENDER_PENDING_PODS = Gauge(
    "extender_pending_pods", "Pods that are assumed on a node whose object does not show them yet."
)
EXTENDER_EVALUATIONS = Counter("extender_evaluations", "Decisions that the engine has made.")

EXTENDER_METRICS: tuple[Metric, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Metric) and each not in DAEMON_METRICS
)
"""All metrics of the scheduler extender; the daemon exports none of them."""
