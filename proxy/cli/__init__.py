"""The commands of ``topoproxy``, one file each.

A module of a command imports at its top what its options and its help need, and in its functions what only a
run needs. So ``--help`` takes as long as ``topoproxy version`` (70 ms of CPU time); with all imports at the
top it would take 120 ms (``status``, ``reload``) to 480 ms (``release``). ``make help-times`` prints the
times, and its bound is 150 ms. ``agent`` and ``scheduler-extender`` also need libraries that only the extra
``cluster`` installs.
"""
