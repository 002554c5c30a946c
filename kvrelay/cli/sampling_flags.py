"""The flags that say how tokens are drawn: of `generate` and `chat` alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvrelay.client.options import GenerateOptions

DRAWING = "How tokens are drawn"


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    temperature: Annotated[float | None, typer.Option(rich_help_panel=DRAWING, help="0 is greedy (default 1).")] = None
    top_p: Annotated[
        float | None, typer.Option(rich_help_panel=DRAWING, help="Smallest set of tokens with this probability.")
    ] = None
    top_k: Annotated[int | None, typer.Option(rich_help_panel=DRAWING, help="The k likeliest tokens; 0 is off.")] = None
    min_p: Annotated[
        float | None,
        typer.Option(rich_help_panel=DRAWING, help="Drop tokens less likely than this share of the likeliest."),
    ] = None
    seed: Annotated[int | None, typer.Option(rich_help_panel=DRAWING, help="For the same answer again.")] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(rich_help_panel=DRAWING, help="Of tokens in prompt or answer: above 1 makes them less likely."),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(rich_help_panel=DRAWING, help="Off the logits of tokens in the answer, once each: -2 .. 2."),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(rich_help_panel=DRAWING, help="Off the logits of tokens in the answer, for each time: -2 .. 2."),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=DRAWING, metavar="ID=VALUE", help="Add to a token's logit; may be repeated."),
    ] = None

    def options(self) -> GenerateOptions:
        """typer.BadParameter for what cannot be read."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _parse_bias(self.logit_bias),
        }


def _parse_bias(entries: list[str] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in entries or ():
        token_id, _, added = entry.partition("=")
        try:
            bias[int(token_id)] = float(added)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias must be ID=VALUE, not {entry!r}") from None
    return bias
