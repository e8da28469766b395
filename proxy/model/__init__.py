"""Values that all packages share. Imports nothing else of topoproxy."""
