"""The annotation ``resource-status`` of the pods of the node: written, kept up to date, and removed.

``proxy.agent.objects.pod_events`` makes the patches. An earlier run of the agent may have written annotations
that are not wanted any more; they are looked for once, in the metadata of the node's pods.
"""

from __future__ import annotations

from proxy.agent.api_client import LIST_METADATA, ApiServerError, JsonObject
from proxy.agent.object_writer import ObjectWriter, Write
from proxy.agent.objects.node_page import NodePage
from proxy.agent.objects.pod_events import PODS, annotated_pods, removal_patch, written_patches
from proxy.agent.session import AgentSession

DELAY_FACTOR = 30.0
"""The annotation of a pod may wait this many times longer than an object of the node."""
MODIFIED = "the object has been modified"
"""The message of a conflict with another write (kubernetes v1.36
staging/src/k8s.io/apiserver/pkg/registry/generic/registry/store.go, OptimisticLockErrorMsg)."""


class PodAnnotations:
    """The annotations of one node's pods."""

    def __init__(self, session: AgentSession, writer: ObjectWriter) -> None:
        """Prepare to annotate; nothing is sent.

        Args:
            session: The node and the API server.
            writer: Writes the patches.
        """
        self._session = session
        self._writer = writer
        self._patches: dict[str, JsonObject] = {}
        self._has_searched = False

    def update(self, page: NodePage) -> None:
        """Annotate the pods of a page whose CPUs were chosen on this node, and no others."""
        patches = annotated_pods(page)
        for path in [path for path in self._patches if path not in patches]:
            self._remove(path)
        for path, patch in patches.items():
            self._patches[path] = patch
            self._writer.want(path, patch, self._merge_write(path, patch), delay_factor=DELAY_FACTOR)

    def withdraw(self) -> None:
        """Remove all annotations that this run has written."""
        for path in list(self._patches):
            self._remove(path)

    def forget(self) -> None:
        """Forget all annotations: the Node object was deleted. Earlier ones are looked for again."""
        self._patches.clear()
        self._has_searched = False

    def withdraw_earlier(self) -> None:
        """Look once for annotations of an earlier run that are not wanted any more, and remove them."""
        if self._has_searched:
            return
        self._has_searched = True
        self._writer.want(
            f"{PODS}?{self._session.node}",
            True,
            self._withdraw_listed,
            delay_factor=DELAY_FACTOR,
            once=True,
            gives_up=True,
        )

    async def _withdraw_listed(self) -> None:
        of_node = {"fieldSelector": f"spec.nodeName={self._session.node}"}
        async for page in self._session.api.pages(PODS, of_node, LIST_METADATA):
            for path, patch in written_patches(page.get("items") or ()).items():
                if path not in self._patches:
                    remove = self._merge_write(path, removal_patch(patch))
                    self._writer.want(path, None, remove, delay_factor=DELAY_FACTOR)

    def _remove(self, path: str) -> None:
        patch = self._patches.pop(path)
        self._writer.withdraw(path, self._merge_write(path, removal_patch(patch)))

    def _merge_write(self, path: str, patch: JsonObject) -> Write:
        """Return a write of a pod; it does nothing for a pod that is gone or was replaced by another.

        If others change the pod at the same time, the API server gives up the patch with a conflict, too.
        """

        async def write() -> JsonObject | None:
            try:
                return await self._session.api.merge(path, patch)
            except ApiServerError as error:
                was_replaced = error.status == 409 and MODIFIED not in str(error)
                if error.status == 404 or was_replaced:
                    return None
                raise

        return write
