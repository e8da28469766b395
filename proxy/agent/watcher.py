"""A copy of a collection at the API server, kept current by a watch.

Theory (Kubernetes API concepts, "Efficient detection of changes"). A list gives all objects and a resource
version; a watch from that version gives each later change. When a watch ends, as it does after a while,
the next one starts at the version of the last event, so nothing is missed and nothing is read twice.
Bookmarks move the version forward while nothing changes. If the server no longer has that version, it answers
410. Then the collection is listed again, and the objects that are missing in the list are gone.

Memory is bounded twice: selectors choose the objects at the server, and ``digest`` keeps only the fields of
each object that its reader needs.

While the API server does not answer, or refuses (403), the copy stays as it is: ``age`` says since when it
may be stale. Only a collection that does not exist (404) is empty.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Set
from typing import Generic, TypeVar

import msgspec

from proxy.agent.api_client import (
    JSON,
    LIST_METADATA,
    OBJECT_METADATA,
    ApiClient,
    ApiServerError,
    ApiUnreachableError,
    JsonObject,
    retry_after,
)
from proxy.agent.credentials import NoCredentialsError
from proxy.model.backoff import Backoff, RetryDelays
from proxy.model.errors import TopoproxyError
from proxy.telemetry.port import Telemetry

T = TypeVar("T")
Key = tuple[str, str]
"""Namespace (empty for objects of the cluster) and name."""

PAUSES = Backoff(0.25, 4.0, steady=30.0)
"""Seconds before the next attempt: an API server that is back is detected within five."""
REFUSALS_UNTIL_ABSENT = 6
"""Refusals in a row before they count: an API server that has just started does not know permissions yet."""
ABSENT_S = 60.0
"""Seconds before another request for a collection that does not exist (its CRD is not installed), or that the
credentials do not permit."""
WATCH_S = 90
"""Seconds after which the server ends a watch. Bookmarks come about once a minute, but there are none if
nothing changes and etcd does not report its progress to the API server."""
SILENCE_S = WATCH_S + 10.0
"""Seconds without a byte after which a connection is dead: its watch should have ended."""
UNREADABLE = "cannot read an object of the cluster"
_UNDECODABLE = (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Watcher(Generic[T]):
    """Follows one collection.

    Attributes:
        values: The result of ``digest`` for each object.
        listed: Set once the collection has been listed.
        is_open: Whether a watch is open, or about to be.
        present: False if the API server does not have the collection, or does not permit the agent to read
            it.
    """

    def __init__(
        self,
        api: ApiClient,
        path: str,
        digest: Callable[[JsonObject], T | None],
        telemetry: Telemetry,
        *,
        selectors: Mapping[str, str] | None = None,
        changed: Callable[[Key, T | None], None] = lambda key, value: None,
        metadata_only: bool = False,
    ) -> None:
        """Prepare to follow a collection.

        Args:
            api: The API server.
            path: Of the collection.
            digest: Returns the value to keep for an object; None to keep nothing. A ValueError is reported,
                and counts as None.
            telemetry: Reports that the collection cannot be followed.
            selectors: ``fieldSelector``, ``labelSelector``.
            changed: Called with each key whose value is new, differs, or is gone (None).
            metadata_only: Objects come with their metadata and nothing else.
        """
        self._api = api
        self._path = path
        self._digest = digest
        self._telemetry = telemetry
        self._selectors = dict(selectors or {})
        self._changed = changed
        self._accept, self._watch_accept = (LIST_METADATA, OBJECT_METADATA) if metadata_only else (JSON, JSON)
        self._version = ""
        self._last_contact: float | None = None
        self._refusals = 0
        self._unreadable: set[Key] = set()
        self.values: dict[Key, T] = {}
        self.listed = asyncio.Event()
        self.is_open = False
        self.present = True

    @property
    def age(self) -> float | None:
        """Seconds since the API server has sent something; None before any list, and after 404.

        A connection that is dead looks like one that has nothing to send, for up to ``SILENCE_S``.
        """
        return None if self._last_contact is None else asyncio.get_running_loop().time() - self._last_contact

    @property
    def version(self) -> str:
        """The resource version of the copy; empty if the collection has to be listed."""
        return self._version

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        loop, pauses = asyncio.get_running_loop(), RetryDelays(PAUSES)
        while True:
            began, least, requested = loop.time(), 0.0, 0.0
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except ApiServerError as error:
                least, requested = self._handle_refusal(error), retry_after(error)
            except NoCredentialsError as error:
                least = PAUSES.longest
                self._telemetry.problem("cannot follow the cluster", path=self._path, err=error)
            except TopoproxyError as error:
                self._telemetry.problem("cannot follow the cluster", path=self._path, err=error)
            finally:
                self.is_open = False
            pause = max(least, pauses.next(loop.time() - began))
            spread = random.uniform(0.6, 1.0)  # noqa: S311  spreads nodes after an outage
            await asyncio.sleep(max(pause * spread, requested))

    def _handle_refusal(self, error: ApiServerError) -> float:
        """Handle an error that the API server has answered; return the shortest pause."""
        if error.status == 410:
            self._version = ""
            return 0.0
        if error.status == 403:
            self._refusals += 1
        is_refused = self._refusals >= REFUSALS_UNTIL_ABSENT
        if error.status == 404 or is_refused:
            self._version, self.present = "", False
            self.listed.set()
        if error.status == 404:
            self._last_contact = None
            self._replace({}, set())
            return ABSENT_S
        self._telemetry.problem("cannot follow the cluster", path=self._path, err=error)
        return ABSENT_S if is_refused else 0.0

    async def _list(self) -> None:
        values: dict[Key, T] = {}
        listed: set[Key] = set()
        version = ""
        async for page in self._api.pages(self._path, self._selectors, self._accept):
            version = str((page.get("metadata") or {}).get("resourceVersion") or version)
            for item in page.get("items") or ():
                key, value = _key(item), self._digested(item)
                listed.add(key)
                if value is not None:
                    values[key] = value
        self.present = True
        self._replace(values, listed)
        self._version = version  # after an error above, the collection is listed again
        self._record_answer()
        self.listed.set()

    async def _follow(self) -> None:
        """Handle the events of one watch."""
        params = {
            **self._selectors,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with self._api.watch(self._path, params, SILENCE_S, self._watch_accept) as lines:
            self._record_answer()
            async for line in lines:
                if line:
                    self._handle(line)
                self._last_contact = asyncio.get_running_loop().time()

    def _handle(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line)
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise self._error(item)
            version, key = str(item["metadata"]["resourceVersion"]), _key(item)
        except _UNDECODABLE as error:
            self._version = ""  # the same event would follow again: the collection is listed instead
            raise ApiUnreachableError(f"cannot watch {self._path} at the API server: {error!r}") from error
        self._version = version
        if kind == "BOOKMARK":
            return
        if kind == "DELETED":
            self._resolve_unreadable(key)
        self._set(key, None if kind == "DELETED" else self._digested(item))

    def _error(self, status: JsonObject) -> ApiServerError:
        """Return the error that a watch has reported."""
        message = f"cannot watch {self._path} at the API server: {status.get('message', '')}"
        return ApiServerError(message, int(status.get("code") or 500), str(status.get("reason", "")))

    def _record_answer(self) -> None:
        self.is_open = True
        self._last_contact, self._refusals = asyncio.get_running_loop().time(), 0
        self._telemetry.resolved("cannot follow the cluster", path=self._path)

    def _digested(self, item: JsonObject) -> T | None:
        key = _key(item)
        try:
            value = self._digest(item)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._unreadable.add(key)
            self._telemetry.problem(UNREADABLE, path=self._path, object=_name(key), err=error)
            return None
        self._resolve_unreadable(key)
        return value

    def _resolve_unreadable(self, key: Key) -> None:
        """Report that an object can be read again, or is gone."""
        if key in self._unreadable:
            self._unreadable.discard(key)
            self._telemetry.resolved(UNREADABLE, path=self._path, object=_name(key))

    def _replace(self, values: Mapping[Key, T], listed: Set[Key]) -> None:
        for key in [key for key in self.values if key not in values]:
            self._set(key, None)
        for key in self._unreadable - listed:
            self._resolve_unreadable(key)
        for key, value in values.items():
            self._set(key, value)

    def _set(self, key: Key, value: T | None) -> None:
        if value == self.values.get(key):
            return
        if value is None:
            del self.values[key]
        else:
            self.values[key] = value
        self._changed(key, value)


def _key(item: JsonObject) -> Key:
    metadata = item.get("metadata")
    if not isinstance(metadata, dict):
        return "", ""
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def _name(key: Key) -> str:
    """Return an object's name as kubectl shows it."""
    return "/".join(filter(None, key))
