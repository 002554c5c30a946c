"""Where cached tokens may have come from: only from requests with the same salt that begin alike. Reads, never acts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from sim.clients import History


def shared_too_much(histories: Sequence[History], first_try: Collection[str]) -> str:
    """Empty if nobody was given more cached tokens than others have in common with it; else who was.

    first_try: requests that were placed once; one that was placed again may find what it left behind itself.
    """
    for history in histories:
        told = max((seen.finish.cached_tokens for seen in history.seen if seen.finish is not None), default=0)
        if told and history.ask.name in first_try:
            prompt = history.ask.prompt_ids
            most = max((_in_common(prompt, tokens) for tokens in _of_others(histories, history)), default=0)
            if told > most:
                return f"{history.ask.name}: {told} tokens were cached, others have {most} in common with it"
    return ""


def _of_others(histories: Sequence[History], one: History) -> Iterator[tuple[int, ...]]:
    """All that was ever computed for those who may share with it."""
    for other in histories:
        ask = other.ask
        if other is not one and ask.prefix_cache and ask.cache_salt == one.ask.cache_salt:
            for answer in other.answers:
                yield ask.prompt_ids + answer.token_ids


def _in_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
