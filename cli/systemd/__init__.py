"""Units of systemd for this installation: `templates/`, and what fills them in."""
