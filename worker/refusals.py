"""Why a worker does not take a piece of work, whatever its role. Pure; the coordinator has validated before."""

from __future__ import annotations

from kvrelay.session import Refused, Work


def refuse_work(work: Work, max_context: int, vocab_size: int, draining: bool) -> Refused | None:
    """The refusal, or None when the work can be taken. max_context in tokens."""

    def refused(code: str, message: str, field: str = "") -> Refused:
        return Refused(work.request_id, work.attempt, code, message, field=field)

    if draining:
        return refused("Unavailable", "the worker is draining")
    if work.n != 1:
        return refused("Unimplemented", f"n must be 1, got {work.n}", "n")
    if not work.token_ids:
        return refused("InvalidArgument", "there are no tokens", "token_ids")
    if not 1 <= work.num_prompt_tokens <= len(work.token_ids):
        return refused("InvalidArgument", f"got {work.num_prompt_tokens}", "num_prompt_tokens")
    if len(work.token_ids) >= max_context:
        return refused("InvalidArgument", f"{len(work.token_ids)} tokens, the context holds {max_context}", "token_ids")
    if max(work.token_ids) >= vocab_size or min(work.token_ids) < 0:
        return refused("InvalidArgument", f"a token id is outside 0 .. {vocab_size - 1}", "token_ids")
    if work.stop.max_tokens <= len(work.token_ids) - work.num_prompt_tokens:
        return refused("InvalidArgument", "nothing is left to generate", "max_tokens")
    return None
