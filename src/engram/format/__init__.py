"""Bytes on disk: what a store's folder holds and how it is checked. Knows neither torch nor tensordict."""
