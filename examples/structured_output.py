"""Answers that a program can read: JSON of a schema, one of some words, and how sure the model was of it.

Start a cluster first (`kvrelay up`), then `python examples/structured_output.py [HOST:PORT]`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from kvrelay.client import Client

SCHEMA = json.loads((Path(__file__).parent / "person.schema.json").read_text(encoding="utf-8"))


def main(target: str) -> None:
    with Client(target) as client:
        print(person(client))
        print(*verdict(client, "The soup was cold and the waiter was rude."))


def person(client: Client) -> dict[str, object]:
    """Whatever the model says, it is JSON of the schema; it is whole unless max_tokens ended it."""
    question = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
    result = client.generate(question, json_schema=SCHEMA, max_tokens=200, seed=7).collect()
    if result.finish_reason != "stop":
        raise SystemExit("the answer was cut off: it needs a larger max_tokens")
    answer: dict[str, object] = json.loads(result.text)
    return answer


def verdict(client: Client, review: str) -> tuple[str, float]:
    """One of two words, and the probability that the model gave to its first token before it was held to them."""
    question = [{"role": "user", "content": f"Is this review good or bad? {review}"}]
    result = client.generate(question, choice=["good", "bad"], temperature=0.0, logprobs=0).collect()
    return result.text, math.exp(result.logprobs[0].token)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50061")
