"""``topoproxy doctor``: finds what keeps a node from working as it should, with or without the daemon.

``gather`` reads the node, ``checks`` are pure functions on what was read.
"""
