"""Data that other libraries saved."""
