"""What outlives a killed rank: checkpoints, crash markers, and taking jobs back."""
