"""Detaches kubelet from topoproxy: undoes an attach from its journal, which a failed attach does too."""

from __future__ import annotations

import time

from proxy.attach import journal as journals
from proxy.attach.changes import FileChange, copied_endpoints, systemctl, unit_state
from proxy.attach.journal import AttachJournal
from proxy.attach.node import POLL_S, RESCUE, AttachNode
from proxy.attach.state_file import BEGUN
from proxy.model.errors import TopoproxyError, UnavailableError

RELEASE_S = 300.0
PLACE_AGAIN = "if kubelet is to stay attached, topoproxy release --undo places them again"
STOP_S = 75.0
"""Seconds that a stop of our units may take: more than ``TimeoutStopSec`` of topoproxy.service."""


def detach(node: AttachNode, timeout: float, *, force: bool, release: bool) -> str:
    """Point kubelet at the endpoint that it used before the attach.

    Args:
        node: The node.
        timeout: Seconds for systemd and kubelet.
        force: Detach even if another program changed a file; in that file only the endpoint is restored.
        release: Release the containers first.

    Raises:
        TopoproxyError: kubelet cannot be detached.
    """
    journal = journals.load(node.state)
    if journal is None:
        value = node.files().effective
        if value is not None and value.text == node.endpoint:
            raise TopoproxyError(
                f"cannot detach kubelet: {value.path} names {node.endpoint}, and topoproxy attach did not set"
                " it: change the endpoint there by hand, and restart kubelet"
            )
        return "kubelet is not attached: there is nothing to undo"
    refuse_changed_files(node, journal, force=force)
    others = copied_endpoints_of(node, journal)
    released = release and journal.state != BEGUN and _release(node)
    try:
        for change in others:
            journals.apply(change, node.root)
        undo(node, journal, timeout)
    except TopoproxyError as error:
        if released:
            error.reword(f"{error}; containers stay released: {PLACE_AGAIN}")
        raise
    end = time.monotonic() + timeout
    while (state := unit_state(journal.unit)).get("ActiveState") != "active":
        if time.monotonic() >= end or state.get("ActiveState") == "failed":
            raise TopoproxyError(
                f"all files are restored, but {journal.unit} is {state.get('ActiveState', 'unknown')}:"
                f" journalctl -u {journal.unit}"
            )
        time.sleep(POLL_S)
    return f"detached: kubelet uses {journal.previous}"


def refuse_changed_files(node: AttachNode, journal: AttachJournal, *, force: bool) -> None:
    """Raise if an undo would lose changes of another program.

    Raises:
        TopoproxyError: A file was changed since the attach, and this is not forced.
    """
    changed = [
        *journals.files_changed_by_others(journal, node.root),
        *(c.path for c in copied_endpoints_of(node, journal)),
    ]
    if changed and not force:
        names = ", ".join(map(str, changed))
        raise TopoproxyError(
            f"cannot detach kubelet: another program changed {names} since the attach;"
            " --force changes only the endpoint there, --dry-run shows it"
        )


def copied_endpoints_of(node: AttachNode, journal: AttachJournal) -> list[FileChange]:
    """Return the changes of files to which another program has copied our endpoint since the attach."""
    known = {change.path for change in journal.changes}
    return copied_endpoints(node.files(), node.root, journal.endpoint, journal.previous, known)


def _release(node: AttachNode) -> bool:
    """Make the daemon release the containers; without a daemon they keep their cpusets.

    Returns:
        Whether the node is released.
    """
    try:
        answer = node.query("/release/start", True)
        end = time.monotonic() + RELEASE_S
        while answer.get("stage") == "releasing" and time.monotonic() < end:
            time.sleep(POLL_S)
            answer = node.query("/release", False)
    except UnavailableError as error:
        node.report_progress(f"containers keep their cpusets: {error}; later: topoproxy release --offline")
        return False
    if answer.get("stage") == "releasing":
        raise TopoproxyError(
            f"cannot release the containers in {RELEASE_S:g} s: topoproxy status shows what is left;"
            f" --no-release detaches without; {PLACE_AGAIN}"
        )
    return answer.get("stage") == "released"


def undo(node: AttachNode, journal: AttachJournal | None, limit: float) -> None:
    """Undo an attach: files, kubelet, our units; then remove the journal.

    Args:
        node: The node.
        journal: The journal of the attach; None for none.
        limit: Seconds for each command of systemd: at least 10, and at least ``STOP_S`` when our units are
            disabled or stopped.

    Raises:
        TopoproxyError: A command of systemd fails, or takes longer.
    """
    if journal is None:
        return
    journals.restore(node.state, journal, node.root)
    if journal.state != BEGUN:
        systemctl(["daemon-reload"], max(limit, 10.0))
        systemctl(["restart", journal.unit], max(limit, 10.0))
    for command, units in (
        (["disable", "--now"], [unit for unit in journal.enabled if unit not in journal.running]),
        (["disable"], journal.running),
        (["stop"], journal.started),
    ):
        if units:
            systemctl([*command, *units], max(limit, STOP_S))
    journals.remove(node.state)
    (node.state / RESCUE).unlink(missing_ok=True)
