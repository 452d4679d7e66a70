"""click commands: words on a terminal, nothing else. One module for each group of commands."""
