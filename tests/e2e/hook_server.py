"""A hook server of Koordinator's protocol as a process: ``hook_server.py SOCKET``.

Like koordlet, it returns the content of the request; to a create it adds one annotation.
"""

from __future__ import annotations

import sys
from concurrent import futures
from typing import Any

import grpc

from proxy.api.koordinator import hook_pb2 as pb

SERVICE = "runtime.v1alpha1.RuntimeHookService"
SEEN = "example.com/seen-by"


def create(content: bytes, _context: object) -> Any:
    """Return the response of the hook before a create."""
    request = pb.ContainerResourceHookRequest.FromString(content)
    response = pb.ContainerResourceHookResponse(
        container_annotations=request.container_annotations,
        container_resources=request.container_resources,
        pod_cgroup_parent=request.pod_cgroup_parent,
        container_envs=request.container_envs,
    )
    response.container_annotations[SEEN] = "server"
    return response


def main() -> None:
    """Serve until killed."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler: Any = grpc.unary_unary_rpc_method_handler(
        create, response_serializer=lambda answer: answer.SerializeToString()
    )
    methods = {"PreCreateContainerHook": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(f"unix:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
