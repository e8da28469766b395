"""Connections to device plug-ins, which report devices and the settings that containers need to use them."""
