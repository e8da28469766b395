"""Quotas in the kernel's files: the part of ``quotas`` that runs in the kernel worker's thread."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.controller.kernel_ports import CpuGroups
from proxy.model.errors import CgroupError
from proxy.pools.quota import UNLIMITED


@dataclass(frozen=True, slots=True)
class GroupQuota:
    """A group and a quota."""

    path: str
    quota: int


Errors = list[tuple[str, str]]
"""Who it was about, and what was wrong, in words."""


def look(groups: CpuGroups, places: Mapping[str, tuple[str, str]]) -> tuple[dict[str, GroupQuota], Errors]:
    """Read quotas.

    Args:
        groups: Where.
        places: By key: ``cgroup_parent``, and a container's id or nothing for the pod itself.

    Returns:
        What was found by key, without groups that are not there; and errors.
    """
    found: dict[str, GroupQuota] = {}
    errors: Errors = []
    for key, (parent, container_id) in places.items():
        path = groups.find(parent, container_id) if container_id else groups.pod_group(parent)
        if path is None:
            continue
        try:
            found[key] = GroupQuota(path, groups.quota(path))
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                errors.append((key, str(error)))
    return found, errors


def take_off(groups: CpuGroups, some: Iterable[tuple[str, GroupQuota]]) -> Errors:
    """Take quotas off, in this order; groups that are gone have none."""
    errors: Errors = []
    for key, at in some:
        try:
            groups.set_quota(at.path, UNLIMITED)
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                errors.append((key, str(error)))
    return errors


def put_back(
    groups: CpuGroups, some: Iterable[tuple[str, tuple[GroupQuota, tuple[str, str]]]]
) -> tuple[dict[str, int | None], Errors]:
    """Put quotas back, in this order, where there is none now: what somebody else wrote is newer.

    Args:
        groups: Where.
        some: By key: the quota with the group's path; where that is empty, parent and id to find it.

    Returns:
        By key the quota that is there now (None: the group is gone), without those that failed; and errors.
    """
    done: dict[str, int | None] = {}
    errors: Errors = []
    for key, (at, (parent, container_id)) in some:
        path = at.path or groups.find(parent, container_id)
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
