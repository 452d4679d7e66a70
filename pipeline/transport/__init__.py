"""Messages between neighboring ranks: format, connections, rendezvous and addresses."""
