"""Everything that is read from kubelet: state files, configuration, pods, devices, the Node object."""
