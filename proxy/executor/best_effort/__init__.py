"""BE (best effort) containers: suppression, and the groups above them."""
