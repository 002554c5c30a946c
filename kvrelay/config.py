"""What every process of KVRelay may be told: one frozen value per role. Knows neither terminals nor the network.

Sources, weakest first: the defaults here, a TOML file ([coordinator], [worker], [up]), KVRELAY_* variables, flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.requests import Role

DEFAULT_TARGET = "127.0.0.1:50061"
EXECUTORS = ("torch", "hash", "scripted")
TRANSPORTS = ("nixl", "grpc")
DTYPES = ("bfloat16", "float32")
ROUTERS = ("cache_aware", "least_loaded", "round_robin", "random")
PREEMPT = ("auto", "swap", "recompute")
MAX_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """queue_limit: requests waiting for a placement; one more is refused at once with RESOURCE_EXHAUSTED.

    max_attempts: attempts of one request that may be lost with their workers; then it ends ABORTED.
    """

    listen: str = DEFAULT_TARGET
    model: str = "smollm2-135m-instruct"
    executor: str = "torch"
    queue_limit: int = 256
    open_limit: int = 1024
    max_attempts: int = MAX_ATTEMPTS
    local_prefill_below: int = 0
    """Prompts with fewer tokens to compute are computed by decode itself."""
    router: str = "cache_aware"
    max_request_bytes: int = 8 * 1024 * 1024
    slow_reader_bytes: int = 1024 * 1024
    trace_dir: str = ""
    otlp_endpoint: str = ""
    trace_ratio: float = 1.0
    """Share of traces that is kept, 0 .. 1."""
    trace_slow_s: float = 0.0
    """A request whose first token, or any later one, took longer than this keeps its trace all the same; 0: none."""
    metrics: str = ""
    """HOST:PORT of the Prometheus endpoint; none if empty."""
    http: str = ""
    """HOST:PORT of the OpenAI door; none if empty."""
    die_with_parent: bool = False


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One prefill or decode worker. num_blocks 0: as many as pool_mb holds. advertise "": the listen address.

    drain_grace_s: from SIGTERM to the end. verify_kv: prefill sends checksums of its blocks, decode checks them.
    """

    role: Role
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    coordinators: tuple[str, ...] = (DEFAULT_TARGET,)
    worker_id: str = ""
    model: str = "smollm2-135m-instruct"
    executor: str = "torch"
    dtype: str = "bfloat16"
    transport: str = "nixl"
    threads: int = 1
    block_size: int = 16
    num_blocks: int = 0
    pool_mb: int = 512
    step_tokens: int = 512
    step_target_s: float = 0.4
    """prefill only: prompts are cut so that a step lasts about this long at most, whatever step_tokens allows."""
    max_sequences: int = 256
    attention: str = "auto"
    script: str = ""
    step_seconds: float = 0.0
    """hash and scripted executors only: pretend that a step takes this long."""
    token_seconds: float = 0.0
    """The same for each token of a prompt, so that long ones take longer."""
    drain_grace_s: float = 8.0
    verify_kv: bool = False
    prefix_cache: bool = True
    """Keep full blocks after their request ended, and use them for others that begin alike."""
    preempt: str = "auto"
    """decode only: what becomes of the blocks of a sequence that must make room; auto takes the cheaper way."""
    swap_mb: int = 256
    """decode only: host memory for the blocks of such sequences."""
    metrics: str = ""
    """HOST:PORT of the Prometheus endpoint; none if empty."""
    die_with_parent: bool = False


@dataclass(frozen=True, slots=True)
class UpConfig:
    """A local cluster: how many workers of each role, where their logs go ("": stderr), how long a start may take."""

    prefill: int = 1
    decode: int = 1
    log_dir: str = ""
    ready_timeout_s: float = 120.0
