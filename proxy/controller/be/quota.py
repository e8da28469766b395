"""The CFS quota of the group above all BE pods.

What was written is known to the ledger before it is written, so that whoever comes after a crash can take it
off. The quota is read before each decision: kubelet sets its own values again now and then, and what counts
is what the kernel has.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Protocol

from proxy.controller.context import NodeContext
from proxy.controller.worker import Worker
from proxy.model.errors import CgroupError
from proxy.pools.be_suppression import quota_for
from proxy.pools.quota import UNLIMITED

KEY = "b/suppress"
"""The ledger's record of what was written and has to be taken off."""


class GroupQuotas(Protocol):
    """CFS quotas of groups, by path below the hierarchy's root; see ``proxy.backends.cgroup.cfs_quota``."""

    def quota(self, path: str) -> int:
        """Read a quota: microseconds, -1 for none. Raises CgroupError (ENOENT: the group is gone)."""

    def set_quota(self, path: str, quota: int) -> bool:
        """Set a quota, unless it is that already. Raises CgroupError."""


class BeQuota:
    """Writes the quota, and takes it off."""

    def __init__(
        self,
        context: NodeContext,
        groups: GroupQuotas | None,
        worker: Worker,
        record: Mapping[str, object] | None,
    ) -> None:
        """Begin with what an earlier run has written.

        Args:
            context: Whose journal and problems.
            groups: Reads and writes quotas; None where there is no such controller.
            worker: Where that is done.
            record: What the ledger holds under ``KEY``.
        """
        self._context = context
        self._groups = groups
        self._worker = worker
        told = (record or {}).get("quota")
        paths = told if isinstance(told, list) else []
        self.written = {path for path in paths if isinstance(path, str)}
        self.in_force: int | None = None

    async def follow(self, path: str, milli: int, cpus: int) -> bool:
        """Put a budget into force.

        Args:
            path: The group above all BE pods.
            milli: The budget.
            cpus: How many CPUs the machine has.

        Returns:
            True when something was written.

        Raises:
            CgroupError: The quota cannot be read or written.
        """
        if self._groups is None:
            raise CgroupError("cannot set a CFS quota: the cpu controller is not there")
        if self.written - {path}:
            await self.give_back(but=path)
        now = await self._worker.run(self._groups.quota, path)
        self.in_force = now
        wanted = quota_for(milli, cpus, now)
        if wanted is None or wanted == now:
            return False
        if path not in self.written:
            self.written.add(path)
            await self._record()
        await self._worker.run(self._groups.set_quota, path, wanted)
        self.in_force = wanted
        return True

    async def give_back(self, but: str = "") -> bool:
        """Take off all quotas but one.

        Returns:
            True when none is left that has to be taken off.
        """
        before = set(self.written)
        for path in sorted(before - {but}):
            try:
                if self._groups is not None:
                    await self._worker.run(self._groups.set_quota, path, UNLIMITED)
                    self.written.discard(path)
            except CgroupError as error:
                if error.errno == errno.ENOENT:
                    self.written.discard(path)
                else:
                    self._context.telemetry.problem(
                        "cannot write the CFS quota of BE pods", path=path, err=error
                    )
        if self.written != before:
            await self._record()
        if not self.written:
            self.in_force = None
        return not self.written - {but}

    async def _record(self) -> None:
        self._context.journal.put(KEY, {"quota": sorted(self.written)} if self.written else None)
        await self._context.journal.flush()
