"""What a buffer does, as figures and as one page. matplotlib is imported when something is drawn."""

from engram.plotting.plots import Plots

__all__ = ["Plots"]
