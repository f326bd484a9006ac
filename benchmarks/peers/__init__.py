"""The decoder beside other engines, each in its own process and virtual environment."""
