"""What buffers say of themselves, for Prometheus, Grafana and the like, which ask for it by HTTP: see docs/metrics.md.

Needs ``pip install "engram-replay[metrics]"``, which brings prometheus-client.
"""

from engram.metrics.collector import Collector
from engram.metrics.server import MetricsServer, serve

__all__ = ["Collector", "MetricsServer", "serve"]
