"""BE containers: suppression, and the groups above them."""
