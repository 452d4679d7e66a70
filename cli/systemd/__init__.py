"""systemd units for this installation, from `templates/`."""
