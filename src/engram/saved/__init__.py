"""State and rows of components as files, and back."""
