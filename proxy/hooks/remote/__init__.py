"""Hooks in other processes: servers of Koordinator's hook protocol behind unix sockets.

See Koordinator v1.8.0 apis/runtime/v1alpha1/api.proto and pkg/runtimeproxy.
"""
