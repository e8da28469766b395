"""The commands of ``topoproxy``, one file each.

The module of a command imports at its top the modules that its options and its help need, and in its
functions those that only a run needs. So ``--help`` takes as long as ``topoproxy version`` (70 ms of CPU
time); with all imports at the top it would take 120 ms (``status``, ``reload``) to 480 ms (``release``).
``make help-times`` prints the times; its bound is 150 ms. ``agent`` and ``scheduler-extender`` also need
libraries that only the extra ``cluster`` installs.
"""
