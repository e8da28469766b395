module example.com/policycheck

go 1.22

require github.com/google/cel-go v0.26.1
