"""The private Redis server of a home without one."""
