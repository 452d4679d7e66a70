"""How a rank is: what it tells of itself, and who ends it when it hangs."""
