"""Serving kubelet's pod-resources API v1: what monitoring agents read, with the CPUs and memory that we gave.

It translates the state of the node; nothing is decided here. grpc is imported when the socket is opened,
and so only where it is configured.
"""
