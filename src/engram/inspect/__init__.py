"""What a buffer does, in numbers, with advice, and row by row."""

from engram.inspect.advice import Finding, Health, count_usage, health
from engram.inspect.estimates import effective_size, gauges
from engram.inspect.explanation import Explanation, Place, explain

__all__ = ["Explanation", "Finding", "Health", "Place", "count_usage", "effective_size", "explain", "gauges", "health"]
