"""What becomes of pods that the daemon rejects: kubelet alone would try them on this node for ever."""
