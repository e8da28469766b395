"""Our engine as a hook server of Koordinator's: ``runtime.v1alpha1.RuntimeHookService`` on a unix socket.

An existing koord-runtime-proxy stands between kubelet and the runtime, and asks us. What it asks is made
into the call that would have passed through us (``messages``), and decided by who decides those (``desk``).
What is not seen of the call then, its answer and its end, is found out at the runtime (``under_way``).
"""
