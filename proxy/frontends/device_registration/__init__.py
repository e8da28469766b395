"""Being the registration server of kubelet's device manager: where device plug-ins register."""
