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
SPAN_STEPS = "worker.steps"
"""Of one worker, a root span of its own: a run of its steps as arrays."""
EVENT_LATE = "late token"
"""On a decode span: a gap far above the stream's median."""

# RPC
RPC_SYSTEM = "rpc.system"
RPC_SERVICE = "rpc.service"
RPC_METHOD = "rpc.method"
RPC_STATUS_CODE = "rpc.status_code"

# HTTP
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"

# GenAI
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
ERROR_TYPE = "error.type"

# Ours
REQUEST_ID = "kvrelay.request.id"
LABEL = "kvrelay.request.label"
"""The caller's own: x-request-id, or the one in the request."""
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
STEP_IDS = "kvrelay.decode.step_ids"
BATCH = "kvrelay.decode.batch"
SENT_S = "kvrelay.decode.sent_s"
INCARNATION = "kvrelay.worker.incarnation"
ROLE = "kvrelay.worker.role"
ACCEPTED_S = "kvrelay.request.accepted_s"
KEPT = "kvrelay.trace.kept"
LATE_INDEX = "kvrelay.gap.index"
LATE_SECONDS = "kvrelay.gap.seconds"
LATE_CAUSE = "kvrelay.gap.cause"

# Steps of a worker: arrays of one length
CLOCK_OFFSET_S = "kvrelay.clock.offset_s"
CLOCK_ERROR_S = "kvrelay.clock.error_s"
STEPS_IDS = "kvrelay.steps.ids"
STEPS_START_S = "kvrelay.steps.start_s"
STEPS_SCHEDULE_S = "kvrelay.steps.schedule_s"
STEPS_BUILD_S = "kvrelay.steps.build_s"
STEPS_FORWARD_S = "kvrelay.steps.forward_s"
STEPS_SAMPLE_S = "kvrelay.steps.sample_s"
STEPS_SEND_S = "kvrelay.steps.send_s"
STEPS_BATCH = "kvrelay.steps.batch"
STEPS_PREFILL_TOKENS = "kvrelay.steps.prefill_tokens"
STEPS_NUM_TOKENS = "kvrelay.steps.num_tokens"
STEPS_BLOCKS_USED = "kvrelay.steps.blocks_used"
STEPS_TRANSFERS = "kvrelay.steps.transfers"
STEPS_PREEMPTIONS = "kvrelay.steps.preemptions"
STEPS_SWAPPED_BLOCKS = "kvrelay.steps.swapped_blocks"
STEPS_FIELDS = (
    STEPS_IDS,
    STEPS_START_S,
    STEPS_SCHEDULE_S,
    STEPS_BUILD_S,
    STEPS_FORWARD_S,
    STEPS_SAMPLE_S,
    STEPS_SEND_S,
    STEPS_BATCH,
    STEPS_PREFILL_TOKENS,
    STEPS_NUM_TOKENS,
    STEPS_BLOCKS_USED,
    STEPS_TRANSFERS,
    STEPS_PREEMPTIONS,
    STEPS_SWAPPED_BLOCKS,
)
"""In the order of kvrelay.steps.StepRecord."""

# Metrics (seconds; buckets start well under OpenTelemetry's 10 ms)
METRIC_REQUEST_DURATION = "gen_ai.server.request.duration"
METRIC_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
METRIC_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
# Metrics of the Prometheus endpoints. Counters end in _total there.
PROM_STARTED = "kvrelay_requests_started"
PROM_REFUSED = "kvrelay_requests_refused"
PROM_OUTCOMES = "kvrelay_requests"
PROM_OPEN = "kvrelay_requests_open"
PROM_QUEUED = "kvrelay_requests_queued"
PROM_TOKENS = "kvrelay_tokens"
PROM_MIGRATIONS = "kvrelay_migrations"
PROM_RECOMPUTED = "kvrelay_recomputed_tokens"
PROM_TTFT = "kvrelay_time_to_first_token_seconds"
PROM_DURATION = "kvrelay_request_seconds"
PROM_GAP = "kvrelay_gap_seconds"
PROM_GAP_CAUSE = "kvrelay_gap_cause_seconds"
PROM_WORKER_UP = "kvrelay_worker_up"
PROM_BLOCKS = "kvrelay_worker_blocks"
PROM_BATCH = "kvrelay_worker_running_sequences"
PROM_WAITING = "kvrelay_worker_waiting_sequences"
PROM_QUEUED_TOKENS = "kvrelay_worker_queued_tokens"
PROM_TRANSFERS = "kvrelay_worker_transfers_in_flight"
PROM_TOKEN_RATE = "kvrelay_worker_tokens_per_second"
PROM_COUNTS = "kvrelay_worker_events"
PROM_STEP = "kvrelay_worker_step_seconds"
PROM_CACHE_MATCHED = "kvrelay_cache_matched_tokens"
PROM_CACHE_QUERIED = "kvrelay_cache_queried_tokens"
PROM_CLOCK_ERROR = "kvrelay_clock_error_seconds"
PROM_PUSHES = "kvrelay_pushes"
PROM_PUSH_BYTES = "kvrelay_push_bytes"
PROM_PUSH_SECONDS = "kvrelay_push_seconds"
PROM_PUSH_EXPOSED = "kvrelay_push_exposed_seconds"
PROM_TRACE_DROPPED = "kvrelay_trace_dropped_spans"
GAP_BUCKETS = (
    0.00025,
    0.0005,
    0.00075,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.004,
    0.006,
    0.008,
    0.012,
    0.016,
    0.024,
    0.032,
    0.048,
    0.064,
    0.096,
    0.128,
    0.256,
    0.512,
    1.024,
    2.048,
    4.096,
)
"""Fine enough for steps of a millisecond."""
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
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
