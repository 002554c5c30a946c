"""A process's Prometheus endpoint: GET /metrics, on a thread of its own. Knows no metric but how to shape one.

Values are read when somebody asks; nothing is pushed, and what is hot keeps its own sums (kvrelay.telemetry.buckets).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.config_load import parse_address
from kvrelay.errors import FailedPrecondition
from kvrelay.telemetry.buckets import Buckets

Labels = dict[str, str]


class MetricsServer:
    """Serves until closed. FailedPrecondition, field `metrics`, when the address cannot be had."""

    def __init__(self, address: str, collect: Callable[[], Iterable[Metric]]) -> None:
        host, port = parse_address(address)
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), _registry(collect))
        except OSError as error:
            words = f"cannot serve metrics on {address}: {error.strerror or error}"
            raise FailedPrecondition(words, field="metrics") from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        stopper = threading.Thread(target=self._server.shutdown, daemon=True)
        stopper.start()
        stopper.join(1.0)
        self._server.server_close()


def exposition(collect: Callable[[], Iterable[Metric]]) -> bytes:
    """What the endpoint answers, in Prometheus' text format."""
    return generate_latest(_registry(collect))


def _registry(collect: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Collected(collect))
    return registry


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield from self._collect()

    def describe(self) -> list[Metric]:
        """Nothing is asked at registration."""
        return []


def gauge(name: str, about: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    return _family(GaugeMetricFamily, name, about, values)


def counter(name: str, about: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    return _family(CounterMetricFamily, name, about, values)


def histogram(name: str, about: str, values: Iterable[tuple[Labels, Buckets]]) -> Metric:
    rows = list(values)
    family = HistogramMetricFamily(name, about, labels=_names(rows))
    for labels, buckets in rows:
        family.add_metric(list(labels.values()), buckets.cumulative(), buckets.sum)
    return family


def _family(kind: Any, name: str, about: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    rows = list(values)
    family: Metric = kind(name, about, labels=_names(rows))
    for labels, value in rows:
        family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]  # all families have it
    return family


def _names(rows: list[tuple[Labels, Any]]) -> list[str]:
    return list(rows[0][0]) if rows else []
