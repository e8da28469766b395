"""Takes a node over from kubelet's static CPU manager, without a drain."""
