"""Release: every container gets the cpuset that it would have without topoproxy."""
