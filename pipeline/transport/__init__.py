"""Messages between neighbouring ranks: their form, the connections, and who knows whose port."""
