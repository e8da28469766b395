"""Kubelet's pod-resources API v1 for monitoring agents, with the CPUs and memory that topoproxy assigned.

It translates the state of the node, and decides nothing. grpc is imported when the socket is opened, so only
if it is configured.
"""
