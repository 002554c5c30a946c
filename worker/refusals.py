"""Why a worker does not take a piece of work, whatever its role. Pure; the coordinator has validated before."""

from __future__ import annotations

from kvrelay.session import Refused, Work


def refused(work: Work, code: str, message: str, field: str = "", *, retry_after_s: float | None = None) -> Refused:
    """code: the class name of an error of kvrelay.errors."""
    return Refused(work.request_id, work.attempt, code, message, field, retry_after_s)


def refuse_work(work: Work, max_context: int, vocab_size: int, draining: bool) -> Refused | None:
    """The refusal, or None when the work can be taken. max_context in tokens."""
    if draining:
        return refused(work, "Unavailable", "the worker is draining")
    if not work.token_ids:
        return refused(work, "InvalidArgument", "there are no tokens", "token_ids")
    if not 1 <= work.num_prompt_tokens <= len(work.token_ids):
        return refused(work, "InvalidArgument", f"got {work.num_prompt_tokens}", "num_prompt_tokens")
    if len(work.token_ids) >= max_context:
        return refused(
            work, "InvalidArgument", f"{len(work.token_ids)} tokens, the context holds {max_context}", "token_ids"
        )
    if max(work.token_ids) >= vocab_size or min(work.token_ids) < 0:
        return refused(work, "InvalidArgument", f"a token id is outside 0 .. {vocab_size - 1}", "token_ids")
    if any(not 0 <= token < vocab_size for token, _ in work.sampling.logit_bias):
        return refused(work, "InvalidArgument", f"a token id is outside 0 .. {vocab_size - 1}", "sampling.logit_bias")
    if work.stop.max_tokens <= work.first_index:
        return refused(work, "InvalidArgument", "nothing is left to generate", "max_tokens")
    return None
