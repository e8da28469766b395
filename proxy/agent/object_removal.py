"""Removes topoproxy's fields from published objects, and the whole object if nothing else is left."""

from __future__ import annotations

from proxy.agent.api_client import FIELD_OWNER, ApiClient, ApiServerError, JsonObject
from proxy.agent.objects import node_resource_topology as nrt
from proxy.agent.objects import numatopology as volcano

ObjectVersion = tuple[str, bool]
"""The resource version of an object, and whether topoproxy has written fields of it."""
KIND_BY_PLURAL = {volcano.PLURAL: volcano.KIND, nrt.PLURAL: nrt.KIND}
"""The kind of an object, by the plural in its path."""


def object_version(item: JsonObject) -> ObjectVersion:
    """Return the stored fields of an object that topoproxy may have written."""
    managers = {entry.get("manager") for entry in item["metadata"].get("managedFields") or ()}
    return str(item["metadata"]["resourceVersion"]), FIELD_OWNER in managers


def has_others_content(item: JsonObject) -> bool:
    """Return whether other programs have written content of an object, and not only its metadata."""
    entries = item["metadata"].get("managedFields") or ()
    return any(
        (entry.get("fieldsV1") or {}).keys() - {"f:metadata", "f:apiVersion", "f:kind"}
        for entry in entries
        if entry.get("manager") != FIELD_OWNER
    )


async def remove_object(api: ApiClient, path: str) -> None:
    """Delete an object if topoproxy has written fields of it; leave the content of other programs.

    Args:
        api: The API server.
        path: Of the object.

    Raises:
        ApiServerError, ApiUnreachableError, NoCredentialsError: It cannot be read, changed or deleted.
    """
    try:
        item = await api.get(path)
    except ApiServerError as error:
        if error.status == 404:
            return
        raise
    _, has_own_fields = object_version(item)
    if not has_own_fields or (has_others_content(item) and await _remove_fields(api, path)):
        return
    await api.delete(path, uid=str(item["metadata"].get("uid") or ""))


async def _remove_fields(api: ApiClient, path: str) -> bool:
    """Remove topoproxy's fields of an object; return whether it is valid without them."""
    *_, group, version, plural, name = path.split("/")
    value = {"apiVersion": f"{group}/{version}", "kind": KIND_BY_PLURAL[plural], "metadata": {"name": name}}
    try:
        await api.apply(path, value)
    except ApiServerError as error:
        if error.status != 422:
            raise
        return False
    return True
