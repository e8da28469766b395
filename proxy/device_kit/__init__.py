"""A library for device plug-ins in Python: the author lists devices, it implements the API v1beta1."""
