"""A kit for device plug-ins in Python: the author lists devices, the kit speaks the API v1beta1."""
