"""Messages between neighbouring ranks: format, connections, rendezvous and addresses."""
