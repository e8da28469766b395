"""Kubelet's pod-resources API v1 for monitoring agents, with the CPUs and memory that topoproxy assigned.

It translates the state of the node; nothing is decided here. grpc is imported when the socket is opened,
and so only where it is configured.
"""
