"""The campaigns, a module for each kind of fault. Each submits jobs, starts workers and injects faults meanwhile."""
