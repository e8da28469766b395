"""A library for device plug-ins in Python: the author lists devices, the library implements API v1beta1."""
