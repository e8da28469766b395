"""The registration server at which device plug-ins register, as kubelet's device manager has one."""
