"""What happens to pods and their sandboxes, as events (``proxy.engine.node_events``)."""

from __future__ import annotations

from msgspec import Struct

from proxy.allocation.providers.provider import NO_PREFERENCES, Preferences
from proxy.model.workload import Pod, Request


class SandboxRequested(Struct, frozen=True):
    """A client requests the creation of a sandbox.

    Attributes:
        pod: Its pod; ``sandbox_id`` is a token until the runtime has named it.
        total: The request of the pod as a whole.
        preferred: What device plugins prefer, as in ``CreateRequested``.
    """

    pod: Pod
    total: Request
    preferred: Preferences = NO_PREFERENCES


class PodChangedByHook(Struct, frozen=True):
    """A sandbox is being made, and a hook has changed its pod; no later call will show that change.

    Attributes:
        pod: Its pod as hooks have changed it; ``sandbox_id`` is a token until the runtime has named it.
    """

    pod: Pod


class PodLearned(Struct, frozen=True):
    """A sandbox exists, or more is known about its pod.

    Attributes:
        pod: The pod.
        recorded: Whether the ledger records it.
    """

    pod: Pod
    recorded: bool = True


class SandboxRunning(Struct, frozen=True):
    """A sandbox has been made; resources that an earlier sandbox of the same pod still holds are released.

    Attributes:
        pod: The pod with the sandbox's id.
        token: The token of its admission; empty if nothing was set aside for it.
        is_relayed_elsewhere: Whether another process relayed the call, so that its answer did not come here.
    """

    pod: Pod
    token: str = ""
    is_relayed_elsewhere: bool = False


class SandboxFailed(Struct, frozen=True):
    """A sandbox has failed; the resources set aside for it are free again.

    Attributes:
        token: The token of its admission.
    """

    token: str


class SandboxStopped(Struct, frozen=True):
    """A sandbox has been stopped: nothing in it runs any more.

    Attributes:
        sandbox_id: Its id.
    """

    sandbox_id: str


class SandboxRemoved(Struct, frozen=True):
    """A sandbox and its containers are gone.

    Attributes:
        sandbox_id: Its id.
    """

    sandbox_id: str
