"""The engine as a hook server of Koordinator: ``runtime.v1alpha1.RuntimeHookService`` on a unix socket.

An existing koord-runtime-proxy, the *peer*, sits between kubelet and the runtime, and calls us. Its requests
are read (``messages``) and decided by the same code as the calls that pass through us (``servicer``). We do
not see the result and the end of the peer's call, so they are looked up in the runtime (``pending_calls``).
"""
