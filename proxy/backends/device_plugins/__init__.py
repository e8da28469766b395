"""Connections to device plugins, which report devices and the settings that containers need to use them."""
