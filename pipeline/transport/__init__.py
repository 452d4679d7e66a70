"""Messages between neighboring ranks: format, connections and addresses."""
