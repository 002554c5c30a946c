"""gen_ai.server.* of OpenTelemetry's conventions, sent to the collector that gets the traces. Knows no request.

Three values at a request's end. Time per output token is, by the convention, a mean of the request: gaps are told by
the Prometheus endpoint, whose buckets are fine enough.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from kvrelay.telemetry import names

INTERVAL_S = 10.0
TIMEOUT_S = 2.0
OPERATION = "text_completion"


class GenAiMetrics:
    """The owner calls `close` once."""

    def __init__(self, service_name: str, reader: MetricReader) -> None:
        resource = Resource.create({SERVICE_NAME: service_name})
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(names.TRACER)
        self._duration, self._first, self._each = (
            meter.create_histogram(name, unit="s", explicit_bucket_boundaries_advisory=names.SECONDS_BUCKETS)
            for name in (
                names.METRIC_REQUEST_DURATION,
                names.METRIC_TIME_TO_FIRST_TOKEN,
                names.METRIC_TIME_PER_OUTPUT_TOKEN,
            )
        )

    def ended(self, model: str, outcome: str, duration_s: float, ttft_s: float | None, num_tokens: int) -> None:
        """outcome: stop, length, or the class name of an error, which becomes error.type."""
        about = {names.OPERATION: OPERATION, names.PROVIDER: "kvrelay", names.MODEL: model}
        failed: Mapping[str, str] = {} if outcome in ("stop", "length") else {names.ERROR_TYPE: outcome}
        self._duration.record(duration_s, {**about, **failed})
        if ttft_s is None:
            return
        self._first.record(ttft_s, about)
        if num_tokens > 1:
            self._each.record((duration_s - ttft_s) / (num_tokens - 1), about)

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Sends what there is, for at most timeout_s."""
        closer = threading.Thread(target=self._provider.shutdown, name="metrics-close", daemon=True)
        closer.start()
        closer.join(timeout_s)


def to_collector(service_name: str, endpoint: str) -> GenAiMetrics:
    """Sent every ten seconds over OTLP/gRPC; a collector that is not there loses them."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    exporter = OTLPMetricExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=TIMEOUT_S)
    return GenAiMetrics(service_name, PeriodicExportingMetricReader(exporter, INTERVAL_S * 1000, TIMEOUT_S * 1000))
