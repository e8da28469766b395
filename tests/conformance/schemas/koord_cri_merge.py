"""Koordinator's hook protocol: what servers are sent, how answers are merged, what is remembered for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.api.cri import api_pb2 as cri
from proxy.api.koordinator import hook_pb2 as hook
from proxy.config.hooks import HooksConfig
from proxy.frontends.cri.hook_adjust import adjusted_create
from proxy.frontends.hook_bridge.object_cache import ObjectCache
from proxy.frontends.hook_bridge.resources import resources_of
from proxy.hooks.answers import NOTHING
from proxy.hooks.events import (
    PostStartContainer,
    PostStopPodSandbox,
    PreCreateContainer,
    PreUpdateContainerResources,
)
from proxy.hooks.facts import ContainerFacts, Decision, PodFacts
from proxy.hooks.remote import merge
from proxy.hooks.remote.convert import container_request, resources_message, sandbox_request
from proxy.hooks.remote.handlers import claims_of
from proxy.hooks.remote.servers import server_of
from proxy.model.errors import HookError
from tests.conformance import hookmessages as messages
from tests.conformance.cases import BadCaseError, Case, Outcome, Topologies
from tests.conformance.hookmessages import message, shown

_KOORDLET = b'{"remote-endpoint": "/var/run/koordlet/koordlet.sock", "runtime-hooks": ["PreCreateContainer"]}'


def check(case: Case, _: Topologies) -> Outcome:
    kind = case.value("kind", str)
    if kind not in _KINDS:
        return Outcome(skipped=f"kind {kind!r} is not built yet")
    return _KINDS[kind](case)


def _apply_response(case: Case) -> Outcome:
    sandbox = case.value("rpc", str) == "RunPodSandbox"
    entry: Any = hook.PodSandboxHookRequest if sandbox else hook.ContainerResourceHookRequest
    reported: merge.Request = message(entry, case.optional("stored", dict))
    name = case.value("response_type", str)
    kind: Any = getattr(hook, name, None) or getattr(cri, name, None)
    if kind is None:
        raise BadCaseError(f"it has an unusable 'response_type': {name!r}")
    answer = message(kind, case.optional("response", dict))
    expected = _expected(case) or {}
    error = case.optional("error", bool, default=False)
    try:
        got, failed = _parts(merge.merge_answer(reported, answer)), False
    except HookError:
        got, failed = _request_parts(case), True  # nothing of it is changed
    wanted = {key: _part(key, value) for key, value in expected.items()}
    return Outcome((error, wanted), (failed, {key: got.get(key) for key in wanted}))


def _parts(after: Any) -> dict[str, object]:
    """Return the parts of a request that an answer can change."""
    if isinstance(after, hook.PodSandboxHookRequest):
        annotations, labels = dict(after.annotations), dict(after.labels)
        return {"annotations": annotations, "labels": labels, "cgroup_parent": after.cgroup_parent}
    return {
        "annotations": dict(after.container_annotations),
        "resources": shown(after.container_resources),
        "pod_cgroup_parent": after.pod_cgroup_parent,
    }


def _request_parts(case: Case) -> dict[str, object]:
    """Return the same parts of the request as it came."""
    raw, rpc = case.optional("request", dict), case.value("rpc", str)
    if rpc == "RunPodSandbox":
        config = message(cri.RunPodSandboxRequest, raw).config
        parent = config.linux.cgroup_parent
        return _parts(
            hook.PodSandboxHookRequest(
                annotations=config.annotations, labels=config.labels, cgroup_parent=parent
            )
        )
    if rpc == "UpdateContainerResources":
        update = message(cri.UpdateContainerResourcesRequest, raw)
        annotations, resources, parent = update.annotations, update.linux, ""
    else:
        create = message(cri.CreateContainerRequest, raw)
        annotations, resources = create.config.annotations, create.config.linux.resources
        parent = create.sandbox_config.linux.cgroup_parent
    return _parts(
        hook.ContainerResourceHookRequest(
            container_annotations=annotations,
            container_resources=resources_message(resources_of(resources)),
            pod_cgroup_parent=parent,
        )
    )


def _part(key: str, value: Any) -> object:
    if key == "resources":
        return shown(message(hook.LinuxContainerResources, value))
    return value or ("" if key.endswith("parent") else {})


def _hook_request_create(case: Case) -> Outcome:
    run = message(cri.RunPodSandboxRequest, case.optional("run_pod_sandbox_request", dict))
    create = message(cri.CreateContainerRequest, case.optional("request", dict))
    facts = messages.create_facts(run.config, create.SerializeToString())
    skip = server_of("koordlet", Path("koordlet.json"), _KOORDLET, HooksConfig()).skip
    assert skip is not None
    expected = shown(message(hook.ContainerResourceHookRequest, _expected(case)))
    got = shown(container_request(PreCreateContainer(*facts, Decision())))
    called = not skip(facts[0].labels)
    return Outcome((case.optional("call_hook", bool, default=True), expected), (called, got))


def _hook_request_update(case: Case) -> Outcome:
    entry = message(hook.ContainerResourceHookRequest, case.optional("stored", dict))
    request = message(cri.UpdateContainerResourcesRequest, case.optional("request", dict))
    event = PreUpdateContainerResources(
        *messages.facts_of_entry(entry), Decision(), resources_of(request.linux), dict(request.annotations)
    )
    expected = message(hook.ContainerResourceHookRequest, _expected(case))
    return Outcome(shown(expected), shown(container_request(event)))


def _restore_pod(case: Case) -> Outcome:
    raw, got = case.optional("pod_sandbox", dict), {}
    if raw is not None:
        pod = messages.listed_pod(message(cri.PodSandbox, raw), ObjectCache())
        got = shown(sandbox_request(PostStopPodSandbox(pod)))
    expected = shown(message(hook.PodSandboxHookRequest, _expected(case)))
    return Outcome((case.optional("error", bool, default=False), expected), (False, got))


def _restore_container(case: Case) -> Outcome:
    """A container of the runtime's list; its pod is a row of the other list, or a stored entry."""
    raw, of, stored = (case.optional(key, dict) for key in ("container", "pod_sandbox", "stored"))
    failed, got = False, dict[str, Any]()
    expected = message(hook.ContainerResourceHookRequest, _expected(case))
    if raw is not None:
        row = message(cri.Container, raw)
        if stored is not None:
            pod = messages.sandbox_row(message(hook.PodSandboxHookRequest, stored), row.pod_sandbox_id)
        else:
            pod = message(cri.PodSandbox, of)
        # A container whose pod is not known is left out.
        failed = pod.id != row.pod_sandbox_id and (bool(pod.id) or of is None)
        if not failed:
            got = shown(_told(*messages.listed_container(pod, row), like=expected))
    return Outcome((case.optional("error", bool, default=False), shown(expected)), (failed, got))


def _checkpoint(case: Case) -> Outcome:
    kind, raw = case.optional("response_type", str, ""), case.optional("entry", dict, {})
    of_container = kind == "CreateContainerResponse" or any(key.startswith("container") for key in raw)
    expected, got = _remembered_container(case, raw) if of_container else _remembered_pod(case, raw)
    return Outcome((case.optional("error", bool, default=False), expected), (False, got))


def _remembered_pod(case: Case, raw: object) -> tuple[object, object]:
    wanted, answer, got = _expected(case), case.optional("response", dict), None
    expected = None if wanted is None else shown(message(hook.PodSandboxHookRequest, wanted))
    entry = message(hook.PodSandboxHookRequest, raw)
    if answer is not None and case.value("response_type", str) == "RunPodSandboxResponse":
        sandbox_id = message(cri.RunPodSandboxResponse, answer).pod_sandbox_id
        pod = messages.remembered_pod(entry, sandbox_id, case.optional("lookup", str, ""))
        got = None if pod is None else shown(sandbox_request(PostStopPodSandbox(pod)))
    return expected, got


def _remembered_container(case: Case, raw: object) -> tuple[object, object]:
    wanted, answer, got = _expected(case), case.optional("response", dict), None
    expected = message(hook.ContainerResourceHookRequest, wanted)
    entry = message(hook.ContainerResourceHookRequest, raw)
    if answer is not None and case.value("response_type", str) == "CreateContainerResponse":
        container_id = message(cri.CreateContainerResponse, answer).container_id
        known = messages.remembered_container(entry, container_id, case.optional("lookup", str, ""))
        got = None if known is None else shown(_told(*known, like=expected))
    return None if wanted is None else shown(expected), got


def _told(
    pod: PodFacts, container: ContainerFacts, like: hook.ContainerResourceHookRequest
) -> hook.ContainerResourceHookRequest:
    """Return what a server receives of a container that exists, its id and resources only if expected.

    Koordinator's entry gets its id at another time than ours, and has no resources after a restart.
    """
    reported = container_request(PostStartContainer(pod, container, Decision()))
    if not like.container_meta.id:
        reported.container_meta.id = ""
    if not like.HasField("container_resources"):
        reported.ClearField("container_resources")
    return reported


def _merge(case: Case) -> Outcome:
    update = case.value("kind", str) == "merge_kubelet_update_into_stored"
    had, answer, expected = (
        None if raw is None else message(hook.LinuxContainerResources, raw)
        for raw in (case.optional("stored", dict), case.optional("other", dict), _expected(case))
    )
    after = merge.merge_update(had, answer) if update else merge.merge_resources(had, answer)
    return Outcome(expected and shown(expected), after and shown(after))


def _resources_cri_to_hook(case: Case) -> Outcome:
    request = message(cri.LinuxContainerResources, case.optional("input", dict))
    expected = message(hook.LinuxContainerResources, _expected(case))
    return Outcome(shown(expected), shown(resources_message(resources_of(request))))


def _resources_hook_to_cri(case: Case) -> Outcome:
    """Resources have the same fields in both protocols."""
    found = message(hook.LinuxContainerResources, case.optional("input", dict))
    expected = message(cri.LinuxContainerResources, _expected(case))
    return Outcome(shown(expected), shown(resources_message(resources_of(found))))


def _envs_cri_to_hook(case: Case) -> Outcome:
    config = {"config": {"envs": case.optional("input", list, [])}}
    body = message(cri.CreateContainerRequest, config).SerializeToString()
    event = PreCreateContainer(*messages.create_facts(cri.PodSandboxConfig(), body), Decision())
    return Outcome(_expected(case) or {}, dict(container_request(event).container_envs))


def _envs_hook_to_cri(case: Case) -> Outcome:
    """A server answers with an environment for a container that has none."""
    event = PreCreateContainer(PodFacts(), ContainerFacts(), Decision())
    reported = container_request(event)
    raw = {"container_envs": case.optional("input", dict, {})}
    after = merge.merge_answer(reported, message(hook.ContainerResourceHookResponse, raw))
    body = adjusted_create(b"", claims_of(event, NOTHING, reported, after).adjustment)
    envs = cri.CreateContainerRequest.FromString(body).config.envs
    got = sorted((entry.key, entry.value.decode()) for entry in envs)
    expected = _expected(case, list) or []
    return Outcome(sorted((entry["key"], entry.get("value") or "") for entry in expected), got)


def _expected(case: Case, kind: type = dict) -> Any:
    return case.value("expected", (kind, type(None)))


_KINDS = {
    "apply_response": _apply_response,
    "hook_request_create": _hook_request_create,
    "hook_request_update": _hook_request_update,
    "restore_pod": _restore_pod,
    "restore_container": _restore_container,
    "checkpoint": _checkpoint,
    "merge_hook_into_stored": _merge,
    "merge_kubelet_update_into_stored": _merge,
    "resources_cri_to_hook": _resources_cri_to_hook,
    "resources_hook_to_cri": _resources_hook_to_cri,
    "envs_cri_to_hook": _envs_cri_to_hook,
    "envs_hook_to_cri": _envs_hook_to_cri,
}
