"""The registration server at which device plugins register, as kubelet's device manager has one."""
