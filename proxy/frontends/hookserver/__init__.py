"""Our engine as a hook server of Koordinator's: ``runtime.v1alpha1.RuntimeHookService`` on a unix socket.

An existing koord-runtime-proxy stands between kubelet and the runtime, and calls us. Its request is converted
to the CRI call that would have passed through us (``messages``), and decided by the same code (``servicer``).
The result and the end of that call, which we do not see, are looked up in the runtime (``pending_calls``).
"""
