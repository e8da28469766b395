"""A deterministic simulation of a node: the real executor on a simulated kernel, runtime, disk and kubelet.

    make simulate-faults SEED=7                          1,000,000 events in two processes, some minutes
    .venv/bin/python -m tests.simulation --seed 7 --events 5000 --workers 1

Everything follows from the seed: how the node is, what its pods do, what goes wrong and when, in which order
threads, answers, timers and reports come. A run that finds a broken promise prints the seed and the command
that repeats it, with the same events and the same hash of its trace.

An *event* is one thing that is delivered to the daemon: a call of a client, the answer to one, a client that
went away, the result of a worker's job, a timer, a report (a cpuset was written, a uevent, an event of the
runtime, the end of a call that a replaced daemon relays), a command (a move, a release, its end, a
hand-over), a crash and a start. Turns of the loop, kernel writes and what the runtime or other programs do by
themselves are not counted.

The parts: ``clock`` (the schedule), ``loop`` and ``workers`` (asyncio and threads on it); the world is
``kernel``, ``runtime``, ``hanging``, ``disk``, ``kubelet`` and ``pods``; ``faults`` and ``disturbances`` say
what goes wrong; ``kernel_ports``, ``runtime_client`` and ``daemon`` are one life of the real executor;
``node`` is all of it; ``promises`` and ``calm_node_checks`` say what must hold; ``planted`` has faults that
must be found; ``run`` is the command.
"""

from tests.simulation.run import main

main()
