"""A process that tries grammars, so that one that is too much ends it and nothing else. Knows no requests.

After a first line (empty, or why there will be no more), a line of JSON in (kind, text, choices) and one out (grammar,
or field and words), until its input ends. Some texts make llguidance loop for minutes, overflow its stack or fill
memory (1.9.1: 3,000 rules in a chain, multipleOf a million), and no limit of its own stops that: processor time, stack
and address space are bounded here instead.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.constraints import Constraint, ConstraintKind, compile_grammar
from kvrelay.errors import InvalidArgument, KVRelayError
from kvrelay.guidance import byte_tokenizer, file_tokenizer, limits, words_of
from kvrelay.models.builtin import BUILTIN_EOS, BUILTIN_VOCAB
from kvrelay.models.config import ModelConfig

CPU_S = 1.0
"""For reading a grammar and for its first steps; a worker spends about the second half of it, on all its streams."""
STACK_BYTES = 4 * 1024 * 1024
"""Half of what the thread of a worker has that does the same."""
MEMORY_BYTES = 1024 * 1024 * 1024
"""More than there is when the tokenizer is loaded."""
STEPS = 48
TOO_BIG = f"is nested too deeply, or takes more than {MEMORY_BYTES >> 20} MiB to compile"
_NOTHING = "no text matches it"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the coordinator, whose end is this one's
    try:
        tokenizer = _tokenizer(sys.argv[1])
    except KVRelayError as error:
        _say({"unready": error.message})
        return
    _say({})
    _bound_memory()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(tokenizer,))
    thread.start()
    thread.join()


def trial(constraint: Constraint, tokenizer: Any) -> str:
    """The grammar, once its first steps were made with this vocabulary. InvalidArgument names the field."""
    grammar = compile_grammar(constraint)
    words = _fault(grammar, tokenizer)
    if words:
        raise InvalidArgument(f"{constraint.kind}: {words}", field=str(constraint.kind))
    return grammar


def _fault(grammar: str, tokenizer: Any) -> str:
    """What is wrong with a grammar, empty if nothing."""
    from llguidance import LLMatcher

    refused, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits())
    if refused or messages:  # it warns of what it would ignore
        return words_of("; ".join(messages))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    for step in range(STEPS):
        token_id = None if matcher.is_error() else _one_of(matcher.compute_bitmask(), tokenizer.eos_tokens, step)
        if matcher.is_error():
            words = words_of(matcher.get_error())
            return _NOTHING if words.startswith("NoExtension") else words
        if token_id is None:
            return "" if matcher.is_accepting() else _NOTHING if step == 0 else "some texts cannot end"
        matcher.consume_token(token_id)
    return ""


def _one_of(mask: bytes, eos_ids: Sequence[int], step: int) -> int | None:
    """An allowed token that ends nothing, another one at each step; None if there is none."""
    bits = bytearray(mask)
    for eos_id in eos_ids:
        bits[eos_id // 8] &= ~(1 << eos_id % 8)
    start = step * 7919 % len(bits)
    turned = bytes(bits[start:] + bits[:start])
    at = len(turned) - len(turned.lstrip(b"\0"))
    if at == len(turned):
        return None
    byte = turned[at]
    return (start + at) % len(bits) * 8 + (byte & -byte).bit_length() - 1


def _serve(tokenizer: Any) -> None:
    for line in sys.stdin:
        # Processor time, not the clock: a busy machine refuses nothing that an idle one takes.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = _answer(json.loads(line), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answer)


def _say(answer: dict[str, str]) -> None:
    print(json.dumps(answer), flush=True)


def _answer(asked: dict[str, Any], tokenizer: Any) -> dict[str, str]:
    constraint = Constraint(ConstraintKind(asked["kind"]), asked["text"], tuple(asked["choices"]))
    try:
        return {"grammar": trial(constraint, tokenizer)}
    except InvalidArgument as error:
        return {"field": error.field, "words": error.message}
    except MemoryError:
        words = TOO_BIG
    except BaseException as error:  # a panic of Rust is no Exception; the same constraint would bring it again
        words = f"cannot be compiled: {words_of(str(error))}"
    return {"field": str(constraint.kind), "words": f"{constraint.kind}: {words}"}


def _tokenizer(directory: str) -> Any:
    if not directory:
        return byte_tokenizer(BUILTIN_VOCAB, BUILTIN_EOS)
    facts = ModelConfig.from_dir(directory, weights=False)
    return file_tokenizer(directory, facts.vocab, facts.eos_ids)


def _bound_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
