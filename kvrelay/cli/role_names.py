"""The names of the roles' commands and what they say of themselves: all that listing them needs."""

from __future__ import annotations

ROLES = ("coordinator", "prefill", "decode")
ABOUT = {
    "coordinator": "Where requests enter: validates, tokenizes, places them on workers and streams the answer.",
    "prefill": "A worker that turns prompts into KV blocks and pushes them to decode workers.",
    "decode": "A worker that receives KV blocks and generates the tokens.",
}
EXAMPLES = {
    "coordinator": "kvrelay coordinator --listen 0.0.0.0:50061 --model ./my-model",
    "prefill": "kvrelay prefill --coordinator 10.0.0.1:50061 --advertise 10.0.0.2:50071 --listen 0.0.0.0:50071",
    "decode": "kvrelay decode --coordinator 10.0.0.1:50061 --model ./my-model --threads 8 --pool-mb 4096",
}
