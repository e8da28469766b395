"""A hook server like Koordinator's: it returns the content of the request with one resource changed.

python bench/hook_server.py --listen /tmp/x/hooks.sock
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpc

from proxy.api.koordinator import hook_pb2 as pb


def answer(
    request: pb.ContainerResourceHookRequest, _: grpc.ServicerContext
) -> pb.ContainerResourceHookResponse:
    """Echo a container's request with other shares."""
    response = pb.ContainerResourceHookResponse(
        container_annotations=request.container_annotations,
        container_resources=request.container_resources,
        pod_cgroup_parent=request.pod_cgroup_parent,
        container_envs=request.container_envs,
    )
    response.container_resources.cpu_shares = 777
    return response


def bad(request: pb.ContainerResourceHookRequest, context: grpc.ServicerContext) -> bytes:
    """Usually answer; sometimes hang, fail, return garbage, too much data, or CPUs of other containers."""
    how = random.choice(("hang", "refuse", "garbage", "flood", "steal") if random.random() < 0.1 else ("",))
    response = answer(request, context)
    if how == "hang":
        time.sleep(20)
    if how == "refuse":
        context.abort(grpc.StatusCode.INTERNAL, "no")
    if how == "garbage":
        return b"\xff" * 100
    if how == "flood":
        response.container_annotations["flood"] = "x" * (24 << 20)
    if how == "steal":
        response.container_resources.cpuset_cpus = "0-15"
    return response.SerializeToString()


METHODS = ("PreCreateContainerHook", "PreStartContainerHook", "PreUpdateContainerResourcesHook")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--listen", required=True)
    parser.add_argument("--bad", action="store_true")
    args = parser.parse_args()
    server = grpc.server(ThreadPoolExecutor(4))
    from_wire = pb.ContainerResourceHookRequest.FromString
    to_wire = pb.ContainerResourceHookResponse.SerializeToString
    good = grpc.unary_unary_rpc_method_handler(answer, from_wire, to_wire)
    handler = grpc.unary_unary_rpc_method_handler(bad, from_wire, None) if args.bad else good
    handlers = dict.fromkeys(METHODS, handler)
    service = "runtime.v1alpha1.RuntimeHookService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix://{args.listen}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
