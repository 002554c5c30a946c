"""Prompt in, KV out: the prefill life on top of worker/."""
