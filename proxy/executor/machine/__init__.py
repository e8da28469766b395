"""Changes of the machine, and the containers that have less than promised because of them."""
