"""Every name of a span, attribute and metric that KVRelay emits. Knows nothing of who emits them.

gen_ai.* and rpc.* follow OpenTelemetry's conventions, which are still moving: this is the one place to follow them in.
"""

from __future__ import annotations

TRACER = "kvrelay"

# Spans below kvrelay.v1.InferenceService/Generate
SPAN_QUEUE = "queue"
SPAN_PLACE = "place"
SPAN_RESERVE = "reserve"
SPAN_PREFILL = "prefill"
SPAN_PREFILL_CHUNK = "prefill.chunk"
SPAN_PUSH = "kv.push"
SPAN_DECODE = "decode"
SPAN_MIGRATE = "migrate"

# RPC
RPC_SYSTEM = "rpc.system"
RPC_SERVICE = "rpc.service"
RPC_METHOD = "rpc.method"
RPC_STATUS_CODE = "rpc.status_code"

# GenAI
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"

# Ours
REQUEST_ID = "kvrelay.request.id"
OUTCOME = "kvrelay.request.outcome"
TTFT_S = "kvrelay.request.ttft_s"
MIGRATIONS = "kvrelay.request.migrations"
ATTEMPT = "kvrelay.attempt"
SEQUENCE = "kvrelay.sequence"
CAUSE = "kvrelay.migrate.cause"
TOKENS_SO_FAR = "kvrelay.migrate.tokens"
WORKER = "kvrelay.worker.id"
LOST = "kvrelay.worker.lost"
CHUNK_TOKENS = "kvrelay.chunk.tokens"
TRANSPORT = "kvrelay.push.transport"
BYTES = "kvrelay.push.bytes"
BLOCKS = "kvrelay.push.blocks"
GB_PER_S = "kvrelay.push.gb_per_s"
EXPOSED_S = "kvrelay.push.exposed_s"
SEGMENT = "kvrelay.decode.segment"
FIRST_INDEX = "kvrelay.decode.first_index"
TOKEN_OFFSETS_S = "kvrelay.decode.token_offsets_s"

# Metrics (seconds; buckets start well under OpenTelemetry's 10 ms)
METRIC_REQUEST_DURATION = "gen_ai.server.request.duration"
METRIC_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
METRIC_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
METRIC_REQUESTS = "kvrelay.requests"
METRIC_TOKENS = "kvrelay.tokens"
SECONDS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    81.92,
)
