"""Requests to the API server: JSON objects in and out, by path.

lightkube connects and authenticates. Objects stay dictionaries: the agent writes and reads a few fields of a
few kinds, and classes of all of Kubernetes' objects would cost more memory than the rest of the agent.

A connection is opened by the first request. When one of the files of the credentials changes
(``proxy.agent.credentials``), the following requests use new connections with the new content; those in
flight continue. If the API server answers 401 and the credentials have changed since the request was sent,
the request is sent once more with the new ones. If they have not changed, all connections are closed and the
credentials are read again at the next request. So new credentials, a new CA and a new address need no
restart. Nothing else is retried
here: each caller knows when its request is worth another attempt, and ``retry_after`` returns the delay that
the API server has requested.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.core.exceptions import ConfigError

from proxy.agent.credentials import credential_files
from proxy.backends.kubelet.small_file import FileStamp, readable_file_stamp
from proxy.model.errors import TopoproxyError, UnavailableError

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

FIELD_OWNER = "topoproxy"
READ_TIMEOUT_S = 10.0
"""Seconds without a byte after which a request has failed."""
REQUEST_TIMEOUT_S = 60.0
"""Seconds after which a request without a complete answer has failed."""
COMPARE_S = 5.0
"""Seconds between two comparisons of the credentials' files."""
RETIRE_S = 120.0
"""Seconds after which connections with former credentials are closed: watches have ended by then."""
PAGE_OBJECTS = 250
"""Objects of a page of a list."""
LONGEST_RETRY_AFTER_S = 30.0
"""A longer delay that the API server, or a proxy before it, requests is shortened to this one."""
MESSAGE_LIMIT = 500
"""Characters of an answer that an error quotes."""
JSON = "application/json"
LIST_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
OBJECT_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""As ``LIST_METADATA``, for a single object and for the events of a watch."""
APPLY_PATCH = "application/apply-patch+yaml"  # JSON is YAML
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

JsonObject = dict[str, Any]
_CONNECTION_ERRORS = (httpx2.HTTPError, httpx2.StreamError, OSError)
_REQUEST_ERRORS = (
    *_CONNECTION_ERRORS,
    httpx2.InvalidURL,
    ValueError,
    LookupError,
    AssertionError,
    ConfigError,
)
"""Errors before a request is answered; lightkube reads tokens and runs commands in that time."""


class ApiServerError(TopoproxyError):
    """The API server has answered with an error.

    Attributes:
        status: Of HTTP: 401, 403, 404, 409, 410, 422, 429, ...
        reason: Of the Status object, such as ``Conflict``.
        retry_after: Seconds after which the API server wants another attempt; 0 if it has named none.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, status: int, reason: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class ApiUnreachableError(UnavailableError):
    """The API server does not answer."""


def retry_after(error: BaseException) -> float:
    """Return the seconds before another attempt that the API server has requested; 0 for none."""
    return error.retry_after if isinstance(error, ApiServerError) else 0.0


class ApiClient:
    """A client of one API server.

    Attributes:
        writes: How many writing requests were sent.
    """

    def __init__(
        self,
        credentials: Callable[[], SingleConfig],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Prepare a client; nothing is opened.

        Args:
            credentials: Reads the credentials; may raise ``NoCredentialsError``, which requests pass on.
            transport: Replaces the sockets in tests.
        """
        self._credentials = credentials
        self._transport = transport
        self._http: httpx2.AsyncClient | None = None
        self._stamps: dict[Path, FileStamp | None] = {}
        self._compare_at = 0.0
        self._retiring: set[asyncio.Task[None]] = set()
        self.writes = 0

    async def close(self) -> None:
        """Close all connections; the next request opens new ones, with credentials that are read again."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()
        for task in tuple(self._retiring):
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)

    async def get(self, path: str) -> JsonObject:
        """Read an object, or the answer of a discovery path.

        Args:
            path: Such as ``/api/v1/nodes/NAME``.

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: It cannot be read.
        """
        return await self._request("GET", path)

    async def pages(
        self, path: str, params: Mapping[str, str], accept: str = JSON
    ) -> AsyncIterator[JsonObject]:
        """Read a list page by page, so that a long one is never in memory as a whole.

        Args:
            path: Of the collection.
            params: Selectors.
            accept: ``LIST_METADATA`` for objects without anything but their metadata.

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: As for ``get``.
        """
        following = ""
        while True:
            more = {"continue": following} if following else {}
            paged = {**params, "limit": str(PAGE_OBJECTS), **more}
            page = await self._request("GET", path, paged, headers={"Accept": accept})
            if not _is_list(page):
                raise ApiUnreachableError(f"cannot list {path} at the API server: the answer is not a list")
            yield page
            following = page["metadata"].get("continue") or ""
            if not following:
                return

    async def apply(
        self, path: str, value: JsonObject, *, owner: str = FIELD_OWNER, force: bool = True
    ) -> JsonObject:
        """Write fields of an object by a server-side apply, and create the object if there is none.

        Returns only the metadata of the object: a Numatopology of 512 CPUs has 20 kB more.

        Args:
            path: Of the object; with ``/status`` for its status.
            value: All fields of the owner; fields that it has written before and that are missing are
                removed.
            owner: The field owner.
            force: Take fields from other owners; otherwise a conflict with one of them ends with status 409.

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: As for ``get``.
        """
        params = {"fieldManager": owner, "force": "true" if force else "false"}
        headers = {"Accept": OBJECT_METADATA}
        return await self._request("PATCH", path, params, value, APPLY_PATCH, headers)

    async def patch(self, path: str, operations: list[dict[str, object]]) -> JsonObject:
        """Change an object that exists (JSON patch, RFC 6902).

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: As for ``get``.
        """
        return await self._request("PATCH", path, {"fieldManager": FIELD_OWNER}, operations, JSON_PATCH)

    async def merge(self, path: str, value: JsonObject) -> JsonObject:
        """Change fields of an object that exists (JSON merge patch).

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: As for ``get``.
        """
        return await self._request("PATCH", path, {"fieldManager": FIELD_OWNER}, value, MERGE_PATCH)

    async def create(
        self, path: str, value: JsonObject, *, within: int = 0, check: Callable[[], None] | None = None
    ) -> JsonObject:
        """Create an object in a collection, or a subresource such as an eviction.

        Args:
            path: Of the collection or of the subresource.
            value: The object.
            within: Seconds after which the API server gives up the request; 0 for its own limit.
            check: Called when the body is about to be sent; if it raises, the body is not sent.

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: As for ``get``.
        """
        # kubernetes v1.36 staging/src/k8s.io/apiserver/pkg/endpoints/filters/request_deadline.go
        limit = {"timeout": f"{within}s"} if within else {}
        params = {"fieldManager": FIELD_OWNER, **limit}
        return await self._request("POST", path, params, value, check=check)

    async def delete(self, path: str, *, uid: str = "", must_exist: bool = False) -> None:
        """Delete an object.

        Args:
            path: Of the object.
            uid: Delete only the object with this uid.
            must_exist: Whether it is an error if there is no such object.

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: As for ``get``.
        """
        body = {"preconditions": {"uid": uid}} if uid else None
        try:
            await self._request("DELETE", path, None, body)
        except ApiServerError as error:
            if error.status != 404 or must_exist:
                raise

    @asynccontextmanager
    async def watch(
        self, path: str, params: Mapping[str, str], silence: float, accept: str = JSON
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch; the value of the context iterates over its lines.

        Args:
            path: Of the collection.
            params: With ``resourceVersion``.
            silence: Seconds without a byte after which the connection counts as broken.
            accept: As for ``pages``.

        Raises:
            ApiServerError, ApiUnreachableError, NoCredentialsError: As for ``get``; the iteration may raise
                them too.
        """
        limits = httpx2.Timeout(READ_TIMEOUT_S, read=silence)
        requested, headers = {**params, "watch": "true"}, {"Accept": accept}

        async def send(http: httpx2.AsyncClient) -> httpx2.Response:
            request = http.build_request("GET", path, params=requested, timeout=limits, headers=headers)
            return await http.send(request, stream=True)

        try:
            answer = await self._send_with_credentials(send)
        except _REQUEST_ERRORS as error:
            raise _unreachable("watch", path, error) from error
        try:
            try:
                if answer.status_code >= 400:
                    await answer.aread()
                    await self._raise(answer, "watch", path)
                yield _lines(answer)
            finally:
                await answer.aclose()
        except _CONNECTION_ERRORS as error:
            raise _unreachable("watch", path, error) from error

    # -- inside -------------------------------------------------------------------------------------------

    def _open(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = self._with_credentials()
        elif time.monotonic() >= self._compare_at:
            self._compare_at = time.monotonic() + COMPARE_S
            if any(readable_file_stamp(str(file)) != before for file, before in self._stamps.items()):
                with contextlib.suppress(TopoproxyError, *_REQUEST_ERRORS):  # files that are being written
                    former, self._http = self._http, self._with_credentials()
                    task = asyncio.ensure_future(_retire(former))
                    self._retiring.add(task)
                    task.add_done_callback(self._retiring.discard)
        return self._http

    def _with_credentials(self) -> httpx2.AsyncClient:
        """Read the credentials; return a client that uses them."""
        # The stamps are taken before the files are read: a change in between is noticed later.
        stamps = {file: readable_file_stamp(str(file)) for file in credential_files(self._credentials())}
        # lightkube declares the transport with the type of its other client.
        params = ConnectionParams(httpx2.Timeout(READ_TIMEOUT_S), transport=cast("Any", self._transport))
        http = AsyncClient(self._credentials(), params)
        self._stamps, self._compare_at = stamps, time.monotonic() + COMPARE_S
        return http

    async def _request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        value: JsonObject | list[dict[str, object]] | None = None,
        kind: str = JSON,
        headers: Mapping[str, str] | None = None,
        check: Callable[[], None] | None = None,
    ) -> JsonObject:
        content = None if value is None else msgspec.json.encode(value)
        headers = {**(headers or {}), **({"Content-Type": kind} if content else {})}
        body: bytes | _CheckedBody | None = content
        if content and check:
            headers["Content-Length"] = str(len(content))
            body = _CheckedBody(content, check)
        self.writes += method != "GET"
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await self._send_with_credentials(
                    lambda http: http.request(method, path, params=params, content=body, headers=headers)
                )
        except _REQUEST_ERRORS as error:
            raise _unreachable(method, path, error) from error
        if answer.status_code >= 400:
            await self._raise(answer, method, path)
        try:
            decoded = msgspec.json.decode(answer.content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiUnreachableError(
                f"cannot {method} {path} at the API server: the answer is not JSON"
            ) from error
        return decoded if isinstance(decoded, dict) else {}

    async def _send_with_credentials(
        self, send: Callable[[httpx2.AsyncClient], Awaitable[httpx2.Response]]
    ) -> httpx2.Response:
        """Send a request; send it once more if the answer is 401 and there are new credentials."""
        http = self._open()
        answer = await send(http)
        if answer.status_code != 401:
            return answer
        self._compare_at = 0.0
        renewed = self._open()
        if renewed is http:
            return answer
        await answer.aclose()
        return await send(renewed)

    async def _raise(self, answer: httpx2.Response, method: str, path: str) -> None:
        """Raise the error that an answer reports, after reading its body."""
        status, content = answer.status_code, answer.content
        message, reason = content[:MESSAGE_LIMIT].decode(errors="replace"), ""
        try:
            status_object = msgspec.json.decode(content)
            message, reason = (
                str(status_object["message"])[:MESSAGE_LIMIT],
                str(status_object.get("reason", "")),
            )
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        if status == 401:
            await self.close()
        raise ApiServerError(
            f"cannot {method} {path} at the API server: {message.strip()}",
            status,
            reason,
            _requested_delay(answer),
        )


async def _retire(http: httpx2.AsyncClient) -> None:
    """Close the connections of a client once its requests have ended."""
    try:
        await asyncio.sleep(RETIRE_S)
    finally:
        await http.aclose()


class _CheckedBody:
    """A body that is checked when it is about to be sent: opening or awaiting a connection may take time.

    The body can be sent again: after 401, lightkube reads the token file again and repeats the request.
    """

    def __init__(self, content: bytes, check: Callable[[], None]) -> None:
        self._content = content
        self._check = check

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._check()
        yield self._content


def _requested_delay(answer: httpx2.Response) -> float:
    """Return the seconds of ``Retry-After``; 0 if it is missing, or a date, as client-go does.

    client-go v0.36 rest/with_retry.go, checkWait and retryAfterSeconds
    """
    text = answer.headers.get("Retry-After", "").strip()
    has_delay = answer.status_code == 429 or answer.status_code >= 500
    is_number = text.isascii() and text.isdigit()
    return min(float(text), LONGEST_RETRY_AFTER_S) if has_delay and is_number else 0.0


async def _lines(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the lines of an answer.

    Only a line feed ends a line. ``str.splitlines``, which ``Response.aiter_lines`` uses, also splits at
    characters such as U+0085, which Go's encoding/json does not escape.
    """
    begun = b""
    async for part in answer.aiter_bytes():
        *whole, begun = (begun + part).split(b"\n")
        for line in whole:
            yield line
    if begun:
        yield begun


def _unreachable(method: str, path: str, error: Exception) -> ApiUnreachableError:
    # The texts of other errors may quote a credential. A ConfigError says why a command for one has failed.
    text = str(error)[:MESSAGE_LIMIT] if isinstance(error, (*_CONNECTION_ERRORS, ConfigError)) else ""
    cause = text.strip().rstrip(":") or type(error).__name__
    return ApiUnreachableError(f"cannot {method} {path} at the API server: {cause}")


def _is_list(page: JsonObject) -> bool:
    """Return whether an answer is a page of a list; a proxy may answer 200 with something else."""
    metadata, items = page.get("metadata"), page.get("items")
    return (
        isinstance(metadata, dict)
        and bool(metadata.get("resourceVersion"))
        and str(page.get("kind")).endswith("List")
        and (items is None or (isinstance(items, list) and all(isinstance(item, dict) for item in items)))
    )
