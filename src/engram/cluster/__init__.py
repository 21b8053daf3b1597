"""Stores that actors of Ray keep and serve: Ray places, names and restarts them, and never carries a row."""
