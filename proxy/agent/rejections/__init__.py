"""End pods that the daemon rejects: kubelet alone would retry them on this node for ever."""
