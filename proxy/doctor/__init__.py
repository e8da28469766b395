"""``topoproxy doctor``: finds the faults that keep a node from working, with or without the daemon.

``gather`` reads the node; ``checks`` are pure functions on the facts that were read.
"""
