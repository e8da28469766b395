"""The engine as a hook server of Koordinator: ``runtime.v1alpha1.RuntimeHookService`` on a unix socket.

An existing koord-runtime-proxy sits between kubelet and the runtime, and calls us. Its requests are read
(``messages``) and decided by the code that also decides the calls that pass through us (``servicer``). The
result and the end of the peer's call, which we do not see, are looked up in the runtime (``pending_calls``).
"""
