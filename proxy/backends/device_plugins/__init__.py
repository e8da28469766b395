"""Connections to device plug-ins, which report devices and what a container needs to use them."""
