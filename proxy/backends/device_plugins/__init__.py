"""Device plug-ins: programs that report devices and say what a container needs to use them."""
