"""A library for device plugins in Python: the author lists devices, the library implements API v1beta1."""
