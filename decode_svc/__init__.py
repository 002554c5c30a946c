"""KV in, tokens out: the decode life on top of worker/."""
