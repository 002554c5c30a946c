"""How every process of KVRelay logs: to stderr, lines for people or JSON for machines. stdout is never touched."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

FORMAT_VARIABLE = "KVRELAY_LOG"
"""json: one object a line. Anything else: lines for people."""
LEVEL_VARIABLE = "KVRELAY_LOG_LEVEL"


def setup(*, stream: TextIO | None = None, level: str = "", **context: object) -> None:
    """Configures structlog and the standard library's logging alike. context (role, worker_id) is in every line.

    Called once by a process's main, before it starts anything. ValueError for an unknown level.
    """
    stream = sys.stderr if stream is None else stream
    level = (level or os.environ.get(LEVEL_VARIABLE, "INFO")).upper()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _Everywhere(context),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping().get(level, logging.INFO)),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(stream)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class _Everywhere:
    """Adds the process's own words to each line, in every thread: context variables are not inherited by threads."""

    def __init__(self, words: Mapping[str, object]) -> None:
        self._words = dict(words)

    def __call__(self, logger: object, method: str, event: EventDict) -> EventDict:
        return {**self._words, **event}


def get_logger(name: str) -> FilteringBoundLogger:
    logger: FilteringBoundLogger = structlog.get_logger(name)
    return logger


def _renderers(stream: TextIO) -> list[Processor]:
    if os.environ.get(FORMAT_VARIABLE, "").lower() == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    colors = stream.isatty() and not os.environ.get("NO_COLOR")
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
