"""CFS quotas in the kernel's files: the part of ``quotas`` that runs in the kernel worker's thread."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

from proxy.engine.quotas import QuotaPlace, QuotaRecord
from proxy.executor.kernel_ports import CpuGroups
from proxy.model.errors import CgroupError
from proxy.pools.quota import UNLIMITED

Errors = list[tuple[str, str]]
"""The ledger's key of a quota, and the error in words."""


def read_quotas(groups: CpuGroups, places: Mapping[str, QuotaPlace]) -> tuple[dict[str, QuotaRecord], Errors]:
    """Read quotas.

    Returns:
        The quotas by key, without groups that do not exist; and errors.
    """
    found: dict[str, QuotaRecord] = {}
    errors: Errors = []
    for key, (parent, container_id) in places.items():
        path = groups.find(parent, container_id) if container_id else groups.pod_group(parent)
        if path is None:
            continue
        try:
            found[key] = QuotaRecord(groups.quota(path), path)
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                errors.append((key, str(error)))
    return found, errors


def remove_quotas(groups: CpuGroups, some: Iterable[tuple[str, QuotaRecord]]) -> Errors:
    """Remove quotas, in this order; groups that are gone have none."""
    errors: Errors = []
    for key, at in some:
        try:
            groups.set_quota(at.group, UNLIMITED)
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                errors.append((key, str(error)))
    return errors


def restore_quotas(
    groups: CpuGroups, some: Iterable[tuple[str, tuple[QuotaRecord, QuotaPlace]]]
) -> tuple[dict[str, int | None], Errors]:
    """Restore quotas, in this order, where there is none now: a quota that another program wrote is newer.

    Returns:
        By key the quota in effect now (None: the group is gone), without those that failed; and errors.
    """
    done: dict[str, int | None] = {}
    errors: Errors = []
    for key, (at, (parent, container_id)) in some:
        path = at.group or groups.find(parent, container_id)
        try:
            now = None if path is None else groups.quota(path)
            if path is not None and now == UNLIMITED:
                groups.set_quota(path, at.quota)
                now = at.quota
            done[key] = now
        except CgroupError as error:
            if error.errno == errno.ENOENT:
                done[key] = None
            else:
                errors.append((key, str(error)))
    return done, errors
