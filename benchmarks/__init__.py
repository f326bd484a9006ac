"""Measurements against a real server: what handle passing saves, what a client sees. See README.md."""
