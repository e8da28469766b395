"""The units of containers in systemd: their properties, and fences around pods."""
