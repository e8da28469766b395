"""Attaches kubelet to topoproxy.

The order of an attach: journal -> topoproxy runs and reaches the runtime of kubelet -> files -> restart of
kubelet -> its calls arrive -> the journal records it. An attach that fails or is interrupted (Ctrl-C,
SIGTERM) before the end is undone from the journal. An attach that is cut off (by a kill or a power loss) is
undone by the next attach, by detach or by the script rescue-detach.

If an attach sets a reset endpoint again, the running kubelet still uses topoproxy. The journal of the earlier
attach stays in effect until topoproxy is ready: until then nothing must be undone, and topoproxy must not be
stopped. Then a new journal replaces it, and its state is "changing" at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from proxy.attach import journal as journals
from proxy.attach.changes import FileChange, enabled_state, endpoint_changes, systemctl, unit_state
from proxy.attach.detach import undo
from proxy.attach.journal import AttachJournal
from proxy.attach.node import POLL_S, RESCUE, AttachNode
from proxy.attach.state_file import ATTACHED, BEGUN, CHANGING, directory_of
from proxy.backends.kubelet.cri_endpoint import KubeletFiles
from proxy.model.errors import CannotCreateError, PermissionDeniedError, TopoproxyError, UnavailableError
from proxy.model.phrases import counted
from proxy.observe.json_access import as_list, as_map

OUR_UNITS = ("topoproxy.socket", "topoproxy.service")
INTERRUPTED = "attach was interrupted"
ROLLED_BACK = "all changes were rolled back"
CPUSETS = "containers keep their cpusets (topoproxy release --offline)"
UNCHANGED = "no file was changed, and kubelet was not restarted"
UNDO_SHARE = 0.25
"""The part of the deadline that is kept for the undo."""


def planned_changes(node: AttachNode) -> list[FileChange]:
    """Return the changes that an attach would make now."""
    files = node.files()
    changes = endpoint_changes(files, node.root, node.endpoint)
    if changes and _uses_topoproxy(node, files) and journals.load(node.state) is None:
        _refuse_set_by_hand(node, files)
    return changes


def attach(node: AttachNode, timeout: float) -> str:
    """Point kubelet at topoproxy.

    Args:
        node: The node.
        timeout: Seconds until kubelet's calls have arrived or all changes are rolled back.

    Returns:
        A message.

    Raises:
        TopoproxyError: kubelet cannot be attached. Nothing has changed, or the changes were undone.
    """
    end = time.monotonic() + timeout * (1 - UNDO_SHARE)
    old = journals.load(node.state)
    if old is not None and old.state != ATTACHED:
        _roll_back(node, timeout * UNDO_SHARE, "cannot attach kubelet: an earlier attach was interrupted")
        node.report_progress("rolled back an interrupted attach")
        old = None
    files = node.files()
    changes = endpoint_changes(files, node.root, node.endpoint)
    if not changes:
        if old is None:
            already = f"kubelet is configured to use {node.endpoint} already"
            return f"{already}; topoproxy attach did not set it: nothing is changed"
        _wait_for_calls(node, old.unit, end, float("inf"))
        _place_again(node)
        return f"kubelet is attached already, and uses {node.endpoint}"
    if old is None and _uses_topoproxy(node, files):
        _refuse_set_by_hand(node, files)
    previous = old.previous if old is not None else _previous(files)
    if not files.unit:
        raise TopoproxyError(
            "cannot attach kubelet: no systemd unit of it was found, nor one of k3s, RKE2 or MicroK8s:"
            f" set kubelet's --container-runtime-endpoint to {node.endpoint} by hand"
        )
    enabled = old.enabled if old is not None else _to_enable()
    running = old.running if old is not None else tuple(unit for unit in enabled if _runs(unit))
    started = old.started if old is not None else _to_start(enabled)
    journal = AttachJournal(
        CHANGING if old is not None else BEGUN,
        files.unit,
        node.endpoint,
        previous,
        enabled,
        journals.merged(old, changes, node.root),
        running=running,
        started=started,
    )
    install_rescue(node.state)
    limit = timeout * UNDO_SHARE
    if old is None:
        journals.write(node.state, journal, node.root)
        with _undone_on_failure(node, limit, f"{ROLLED_BACK}: kubelet uses {previous}"):
            _start(node, journal, end)
            journals.set_stage(node.state, CHANGING)
            _change(node, journal, changes, end)
    else:
        with _unchanged_on_failure(node):
            _start(node, journal, end)
            journals.write(node.state, journal, node.root, directory_of(node.state))
        result = f"{ROLLED_BACK}, also those of the earlier attach: kubelet uses {previous}; {CPUSETS}"
        with _undone_on_failure(node, limit, result):
            _change(node, journal, changes, end)
    _place_again(node)
    return f"attached: kubelet uses {node.endpoint}, and its calls arrive"


@contextmanager
def _undone_on_failure(node: AttachNode, limit: float, result: str) -> Iterator[None]:
    """Undo the attach if it fails, or if a signal interrupts it (KeyboardInterrupt, SystemExit)."""
    try:
        yield
    except TopoproxyError as error:
        _roll_back(node, limit, str(error))
        error.reword(f"{error}; {result}")
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        cause = _cause(error)
        node.report_progress(f"{cause}: its changes are being rolled back")
        _roll_back(node, limit, cause)
        node.report_progress(f"{cause}: {result}")
        raise


@contextmanager
def _unchanged_on_failure(node: AttachNode) -> Iterator[None]:
    """If a repeated attach fails or is interrupted, report that kubelet is unchanged."""
    try:
        yield
    except TopoproxyError as error:
        error.reword(f"{error}; {UNCHANGED}")
        raise
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        node.report_progress(f"{_cause(error)}: {UNCHANGED}")
        raise


def _cause(error: BaseException) -> str:
    return "attach failed with an internal error" if isinstance(error, Exception) else INTERRUPTED


def _roll_back(node: AttachNode, limit: float, cause: str) -> None:
    """Undo an attach from its journal, and report if the undo fails too."""
    try:
        undo(node, journals.load(node.state), limit)
    except TopoproxyError as error:
        error.reword(f"{cause}; undoing it failed: {error}; repeat topoproxy detach")
        raise
    except (Exception, KeyboardInterrupt, SystemExit):
        unfinished = "its rollback is incomplete: topoproxy detach undoes the attach"
        node.report_progress(f"{cause}; {unfinished}")
        raise


def _previous(files: KubeletFiles) -> str:
    return files.effective.text if files.effective is not None else files.default


def _uses_topoproxy(node: AttachNode, files: KubeletFiles) -> bool:
    """Return whether the file in effect already names topoproxy's socket, with or without a scheme."""
    return files.effective is not None and _is_same_socket(files.effective.text, str(node.listen))


def _refuse_set_by_hand(node: AttachNode, files: KubeletFiles) -> NoReturn:
    """Refuse an attach that would use topoproxy itself as kubelet's runtime."""
    value, instance = files.effective, files.instance
    assert value is not None
    message = f"cannot attach kubelet: {value.path} names {value.text}, and topoproxy attach did not set it"
    if instance is not None and not _is_same_socket(instance.text, str(node.listen)):
        message += f"; {instance.path} names {instance.text}: set {node.endpoint} there by hand, too"
    else:
        message += ": nothing is changed"
    raise TopoproxyError(message)


def _runs(unit: str) -> bool:
    """Return whether a unit runs; a unit of unknown state counts as running, so it is not stopped later."""
    return unit_state(unit).get("ActiveState") not in ("inactive", "failed")


def _to_enable() -> tuple[str, ...]:
    states = {unit: enabled_state(unit) for unit in OUR_UNITS}
    for unit, state in states.items():
        if state in ("", "not-found", "masked", "masked-runtime"):
            raise TopoproxyError(
                f"cannot attach kubelet: {unit} is {_why_not_enabled(state)}; after a reboot kubelet would"
                " have no runtime"
            )
    return tuple(unit for unit, state in states.items() if state == "disabled")


def _to_start(to_enable: Sequence[str]) -> tuple[str, ...]:
    return tuple(unit for unit in OUR_UNITS if unit not in to_enable and not _runs(unit))


def _why_not_enabled(state: str) -> str:
    return state if state.startswith("masked") else f"not installed{f' ({state})' if state else ''}"


def _start(node: AttachNode, journal: AttachJournal, end: float) -> None:
    """Start topoproxy, and wait until it reaches the runtime of kubelet."""
    if journal.enabled:
        systemctl(["enable", *journal.enabled], _remaining_s(end))
    systemctl(["start", *OUR_UNITS], _remaining_s(end))
    _wait_ready(node, journal.previous, end)


def _change(node: AttachNode, journal: AttachJournal, changes: list[FileChange], end: float) -> None:
    """Change the files and restart kubelet; complete the journal when its calls arrive."""
    for change in changes:
        journals.apply(change, node.root)
    systemctl(["daemon-reload"], _remaining_s(end))
    began = time.monotonic()
    systemctl(["restart", journal.unit], _remaining_s(end))
    _wait_for_calls(node, journal.unit, end, began)
    journals.set_stage(node.state, ATTACHED)


def _remaining_s(end: float) -> float:
    remaining = end - time.monotonic()
    if remaining <= 0:
        raise TopoproxyError("cannot attach kubelet: timed out (--timeout)")
    return remaining


def _status(node: AttachNode) -> Mapping[str, object]:
    return node.query("/status", False)


def _wait_ready(node: AttachNode, previous: str, end: float) -> None:
    """Wait until the daemon reaches the runtime that kubelet uses now: another has other containers."""
    why = ""
    while True:
        try:
            status = _status(node)
            runtime = status.get("runtime")
            facts = runtime if isinstance(runtime, dict) else {}
            endpoint = str(facts.get("endpoint", ""))
            if not _is_same_socket(endpoint, previous):
                raise TopoproxyError(
                    f"cannot attach kubelet: it uses {previous}, and topoproxy forwards to {endpoint}:"
                    " set runtime in topoproxy's configuration to kubelet's endpoint"
                )
            listen = str(status.get("listen") or node.listen)
            if not _is_same_socket(listen, str(node.listen)):
                raise TopoproxyError(
                    f"cannot attach kubelet: the daemon listens on {listen}, and its configuration says"
                    f" {node.listen}: set ListenStream of topoproxy.socket to the same path, then restart"
                    " topoproxy.socket and topoproxy.service"
                )
            if status.get("ready") is True and facts.get("connected") is not False:
                return
            why = f"topoproxy is not ready: {facts.get('reason') or 'topoproxy status shows why'}"
        except UnavailableError as error:
            why = str(error)
        if time.monotonic() >= end:
            raise TopoproxyError(f"cannot attach kubelet: {why}")
        time.sleep(POLL_S)


def _is_same_socket(first: str, other: str) -> bool:
    """Return whether two endpoints are one socket."""
    other = other.replace("${SNAP_COMMON}", "/var/snap/microk8s/common")
    return Path(first.removeprefix("unix://")).resolve() == Path(other.removeprefix("unix://")).resolve()


def _wait_for_calls(node: AttachNode, unit: str, end: float, began: float) -> None:
    """Wait until kubelet has called since ``began``; if that is infinity, a call of the last 60 s counts.

    Calls of other clients, such as crictl and monitoring agents, do not count.
    """
    recent = 60.0
    while True:
        try:
            status = _status(node)
            state = unit_state(unit)
            clients = [as_map(each) for each in as_list(as_map(status.get("calls")).get("clients"))]
            kubelets = [each for each in clients if _is_kubelet(node, each.get("pid"), state)]
            since = recent if began == float("inf") else time.monotonic() - began
            if any(isinstance(last := each.get("last_s"), int | float) and last < since for each in kubelets):
                return
            why = f"{counted(len(clients), 'client')} connected, {len(kubelets)} of kubelet"
        except UnavailableError as error:
            why, state = str(error), unit_state(unit)
        if time.monotonic() >= end or state.get("ActiveState") == "failed":
            raise TopoproxyError(
                f"cannot attach kubelet: no calls from kubelet arrived: {why}; {unit} is"
                f" {state.get('ActiveState', 'unknown')} ({state.get('SubState', '?')}, result"
                f" {state.get('Result', '?')}, {state.get('NRestarts', '?')} restarts): journalctl -u {unit}"
            )
        time.sleep(POLL_S)


def _is_kubelet(node: AttachNode, pid: object, state: Mapping[str, str]) -> bool:
    """Return whether a process is the main process of kubelet's unit, or in its cgroup."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    if str(pid) == state.get("MainPID"):
        return True
    try:
        lines = (node.procfs / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return False
    group = state.get("ControlGroup")
    return group in [line.split(":", 2)[-1] for line in lines] if group else False


def _place_again(node: AttachNode) -> None:
    """Undo the release of the last detach, after which the daemon only relays."""
    try:
        released = node.query("/release", False).get("stage") in ("releasing", "released")
        if released:
            node.query("/release/undo", True)
    except TopoproxyError as error:
        node.report_progress(
            f"the release of the last detach is not undone: {error}; later: topoproxy release --undo"
        )
        return
    except (KeyboardInterrupt, SystemExit):
        node.report_progress(f"{INTERRUPTED}: kubelet is attached; topoproxy detach undoes it")
        raise
    if released:
        node.report_progress("containers are placed again: the release of the last detach is undone")


def install_rescue(state: Path) -> None:
    """Copy the script that undoes an attach without Python to the state directory, where it stays."""
    from proxy.atomic_write import write_file

    source = Path(__file__).with_name("rescue-detach.sh")
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(state / RESCUE, source.read_bytes(), mode=0o700)
    except OSError as error:
        kind = PermissionDeniedError if isinstance(error, PermissionError) else CannotCreateError
        raise kind(f"cannot install {state / RESCUE}: {error.strerror}") from error
