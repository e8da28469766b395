"""The lease: only the replica that holds it binds pods.

Theory. A replica that binds must know all pods that were assumed before, and must be the only one that
assumes pods. The Lease object (coordination.k8s.io/v1) is written under optimistic locking, so one replica at
a time holds it. Clocks are not compared: a replica takes the lease over when it has seen the lease unchanged
for its whole duration, by the replica's own monotonic clock. The holder counts the duration from *before* it
sent its last renewal, and stops ``MARGIN_S`` early. This margin is longer than a bind may take, so a bind of
the old holder has ended when the new holder begins.

A Lease object may be deleted while it is held. The holder stops when it detects this, and a replica that has
seen the lease waits for its whole duration before it creates another one.

A write whose answer was lost may have taken effect; then the next write conflicts with it. So after a
conflict the lease is read: it is lost only if it names another holder.

A holder that cannot renew ends its process, and starts again as a follower.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime
from math import inf

import msgspec
from msgspec import Struct

from proxy.agent.api_client import ApiClient, ApiServerError, ApiUnreachableError, JsonObject, retry_after
from proxy.model.errors import TopoproxyError
from proxy.telemetry.port import Telemetry

DURATION_S = 15
RETRY_S = 2.0
MARGIN_S = 6.0


class _Metadata(Struct, frozen=True, rename="camel"):
    resource_version: str


class _Spec(Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None


class _LeaseObject(Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec | None = None


class Lease:
    """One replica's view of the lease."""

    def __init__(
        self, api: ApiClient, namespace: str, name: str, identity: str, telemetry: Telemetry
    ) -> None:
        """Set the name of the lease; nothing is requested yet.

        Args:
            api: The API server.
            namespace: Of the Lease object.
            name: Of the Lease object.
            identity: Of this replica; unique.
            telemetry: The log.
        """
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._path = f"{self._collection}/{name}"
        self._identity = identity
        self._telemetry = telemetry
        self._version = ""
        self._observed: tuple[str, float] = ("", -inf)
        self._until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this replica may bind now."""
        return time.monotonic() < self._until - MARGIN_S

    async def acquire(self) -> None:
        """Wait until this replica holds the lease."""
        while True:
            pause = RETRY_S
            try:
                if await self._try_to_acquire():
                    self._telemetry.resolved("cannot read or create the lease")
                    return
            except TopoproxyError as error:
                self._telemetry.problem("cannot read or create the lease", err=error)
                pause = max(pause, retry_after(error))
            await asyncio.sleep(pause)

    async def renew_until_lost(self) -> None:
        """Renew the lease until it is lost."""
        while self.is_held:
            await asyncio.sleep(RETRY_S)
            try:
                async with asyncio.timeout(RETRY_S * 2):
                    if not await self._write_own(self._renewed()):
                        return
            except (TopoproxyError, TimeoutError) as error:
                self._telemetry.problem("cannot renew the lease", err=error)
                if isinstance(error, ApiServerError) and error.status == 404:
                    self._until = 0.0  # it was deleted: another replica may create it
                    return
            else:
                self._telemetry.resolved("cannot renew the lease")

    async def release(self) -> None:
        """Release the lease, so that another replica does not have to wait."""
        if self._until:
            spec = {"holderIdentity": "", "leaseDurationSeconds": 1}
            with contextlib.suppress(TopoproxyError, TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._write_own(spec)
            self._until = 0.0

    async def _try_to_acquire(self) -> bool:
        try:
            version, spec = self._read(await self._api.get(self._path))
        except ApiServerError as error:
            if error.status != 404:
                raise
            return self._is_expired("", DURATION_S) and await self._create()
        is_expired = self._is_expired(version, spec.lease_duration_seconds or DURATION_S)
        is_free = is_expired or spec.holder_identity in (None, "", self._identity)
        return is_free and await self._write(version, {**self._renewed(), "acquireTime": _now()})

    def _is_expired(self, version: str, lasts: float) -> bool:
        """Return whether the lease was seen in a version for its whole duration; empty: it does not exist."""
        now = time.monotonic()
        if version != self._observed[0]:
            self._observed = version, now
        return now - self._observed[1] > lasts

    async def _create(self) -> bool:
        began = time.monotonic()
        value = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": {**self._renewed(), "acquireTime": _now()},
        }
        try:
            self._record_written(await self._api.create(self._collection, value), began)
        except ApiServerError as error:
            if error.status != 409:
                raise
            return False
        return True

    async def _write_own(self, spec: JsonObject) -> bool:
        """Write the lease that this replica holds; return False if another replica holds it."""
        while not await self._write(self._version, spec):
            version, found = self._read(await self._api.get(self._path))
            if found.holder_identity != self._identity:
                return False
            self._version = version
        return True

    async def _write(self, version: str, spec: JsonObject) -> bool:
        """Write the lease unless it has changed; return False if it has."""
        began = time.monotonic()
        value = {"metadata": {"resourceVersion": version}, "spec": spec}
        try:
            self._record_written(await self._api.merge(self._path, value), began)
        except ApiServerError as error:
            if error.status != 409:
                raise
            return False
        return True

    def _record_written(self, lease: JsonObject, began: float) -> None:
        self._version, _ = self._read(lease)
        self._until = began + DURATION_S

    def _read(self, lease: JsonObject) -> tuple[str, _Spec]:
        """Return the version and the spec of a Lease; a proxy may answer 200 with something else."""
        try:
            read = msgspec.convert(lease, _LeaseObject)
        except msgspec.ValidationError as error:
            message = f"cannot read {self._path} at the API server: the answer is not a Lease: {error}"
            raise ApiUnreachableError(message) from error
        return read.metadata.resource_version, read.spec or _Spec()

    def _renewed(self) -> JsonObject:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "renewTime": _now(),
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
