"""The annotation ``resource-status`` of a pod whose CPUs were chosen on the node, as a scheduler writes it.

A key says that it was written here: a later sandbox of the pod gets CPUs that are free then, and is not bound
to these (``proxy.pools.annotations``). Koordinator's scheduler does not read the key, and counts the CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from proxy.agent.objects.node_page import NodePage, PublishedPod
from proxy.pools.annotations import CHOSEN_BY, RESOURCE_STATUS, THIS_NODE

PODS = "/api/v1/pods"


def annotated_pods(page: NodePage) -> dict[str, dict[str, Any]]:
    """Return the JSON merge patches of pods that have CPUs which were chosen here, by the pods' paths."""
    return {pod_path(pod): _patch(pod) for pod in page.pods if pod.resource_status and pod.uid}


def pod_path(pod: PublishedPod) -> str:
    """Return the path of a pod at the API server."""
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def _patch(pod: PublishedPod) -> dict[str, Any]:
    text = json.dumps({**json.loads(pod.resource_status), CHOSEN_BY: THIS_NODE}, separators=(",", ":"))
    return {"metadata": {"uid": pod.uid, "annotations": {RESOURCE_STATUS: text}}}


def withdrawn(patch: dict[str, Any]) -> dict[str, Any]:
    """Return the patch that removes what another one has set."""
    return {"metadata": {"uid": patch["metadata"]["uid"], "annotations": {RESOURCE_STATUS: None}}}


def written_here(pods: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the patches that have set the annotations which pods at the API server have from here."""
    found = {}
    for each in pods:
        metadata = each.get("metadata") or {}
        text = (metadata.get("annotations") or {}).get(RESOURCE_STATUS)
        if _is_ours(text):
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            patch = {"uid": metadata["uid"], "annotations": {RESOURCE_STATUS: text}}
            found[path] = {"metadata": patch}
    return found


def _is_ours(text: object) -> bool:
    try:
        value = json.loads(str(text))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get(CHOSEN_BY) == THIS_NODE
