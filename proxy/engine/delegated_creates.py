"""Creates that were decided here, and that another program sends to the runtime.

As a hook server, topoproxy answers with CPUs and never sees the call itself. The same create may still arrive
a second time: the caller asks again because the create failed, or the call passes through topoproxy on its
way to the runtime. Both are one container, so the first decision is withdrawn before the second is made. The
values that the first decision wrote into the request are not the client's, so the client's own values count
again.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, structs

from proxy.model.workload import Request

LIMIT = 512
"""How many are remembered; the oldest are forgotten first."""
Attempt = tuple[str, str, int]
"""A container as a create requests it: sandbox, name and attempt."""


class DelegatedCreate(Struct, frozen=True):
    """A decision that was returned to a caller.

    Attributes:
        token: The id of the container in the state.
        cpus, mems, quota: The values of the request, as they were returned.
    """

    token: str
    cpus: str
    mems: str
    quota: int


DelegatedCreates = Mapping[Attempt, DelegatedCreate]


def with_delegated(known: DelegatedCreates, attempt: Attempt, one: DelegatedCreate) -> DelegatedCreates:
    """Return what is known with one more decision, the newest."""
    others = {key: other for key, other in known.items() if key != attempt}
    if len(others) >= LIMIT:
        del others[next(iter(others))]
    return {**others, attempt: one}


def clients_request(request: Request, returned: DelegatedCreate, first: Request) -> Request:
    """Return a request with the client's values in place of those that were returned for the first one."""
    return structs.replace(
        request,
        cpuset_cpus=first.cpuset_cpus if request.cpuset_cpus == returned.cpus else request.cpuset_cpus,
        cpuset_mems=first.cpuset_mems if request.cpuset_mems == returned.mems else request.cpuset_mems,
        cpu_quota=first.cpu_quota if request.cpu_quota == returned.quota else request.cpu_quota,
    )
