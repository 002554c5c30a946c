"""gen_ai.server.* of the conventions: what is recorded at a request's end."""

from __future__ import annotations

from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kvrelay.telemetry.genai import GenAiMetrics


def test_duration_first_token_and_mean_time_per_token_of_a_request() -> None:
    reader = InMemoryMetricReader()
    metrics = GenAiMetrics("test", reader)
    metrics.ended("m", "length", 1.0, 0.2, 5)
    metrics.ended("m", "Unavailable", 3.0, None, 0)
    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name: list(m.data.data_points) for m in data.resource_metrics[0].scope_metrics[0].metrics}
    sums = {name: {p.attributes.get("error.type"): p.sum for p in points} for name, points in found.items()}
    assert sums == {
        "gen_ai.server.request.duration": {None: 1.0, "Unavailable": 3.0},
        "gen_ai.server.time_to_first_token": {None: 0.2},
        "gen_ai.server.time_per_output_token": {None: 0.2},
    }
    assert found["gen_ai.server.time_to_first_token"][0].explicit_bounds[0] == 0.001
    metrics.close()
