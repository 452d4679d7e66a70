"""The embedded Redis server, private to a home, for installations without a server."""
