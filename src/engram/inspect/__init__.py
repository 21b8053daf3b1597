"""What a buffer does, in numbers, with advice, and row by row."""

from engram.inspect.advice import Explanation, Finding, Health, Place, count_usage, explain, gauges, health

__all__ = ["Explanation", "Finding", "Health", "Place", "count_usage", "explain", "gauges", "health"]
