"""CFS quotas: taken off owners, and put back."""
