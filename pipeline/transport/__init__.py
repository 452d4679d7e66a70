"""Messages between neighbouring ranks: their form, the connections, how ranks meet, and who knows whose port."""
