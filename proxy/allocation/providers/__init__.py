"""The providers of the topology manager, one file each. ``provider`` defines what all of them implement."""
