"""What outlives a killed rank: checkpoints, breadcrumbs, and taking jobs back."""
