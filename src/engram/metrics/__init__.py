"""What buffers say of themselves, for Prometheus, Grafana and the like, which ask for it by HTTP: see docs/metrics.md.

Needs ``pip install "engram-replay[metrics]"``, which brings prometheus-client.
"""

from engram.metrics.server import Collector, MetricsServer, serve

__all__ = ["Collector", "MetricsServer", "serve"]
