"""`kvrelay plan`: what a model needs of a machine, worked out before anything is bought or started."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.config import DTYPES

if TYPE_CHECKING:
    from kvrelay.models.config import ModelConfig
    from kvrelay.planning import Load, Machine, Plan, Terms

EXAMPLE = (
    "kvrelay plan --model-preset llama-3-8b --long-prompt 32768 --decode-sequences 32",
    "kvrelay plan ./my-model --memory-gb 24 --bandwidth-gbs 1008 --tflops 165",
    "kvrelay plan ./my-model --network-gbs 12.5 --rate 4 --json",
)
GB = 10**9


def plan(
    model: Annotated[str, typer.Argument(help="Model id or a directory; its config.json is enough.")] = "",
    model_preset: Annotated[
        str, typer.Option(metavar="NAME", help="Instead of MODEL: llama-3-8b or llama-3-70b.")
    ] = "",
    memory_gb: Annotated[float, typer.Option(help="Memory of one worker, in 1e9 bytes (the defaults: H100).")] = 80.0,
    bandwidth_gbs: Annotated[float, typer.Option(help="GB/s that it reads.")] = 3350.0,
    tflops: Annotated[float, typer.Option(help="Dense 1e12 operations a second in --dtype.")] = 990.0,
    network_gbs: Annotated[float, typer.Option(help="GB/s from prefill to decode.")] = 50.0,
    usable: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    reserve_gb: Annotated[float, typer.Option(help="GB kept for activations.")] = 2.0,
    block_size: Annotated[int, typer.Option(min=1, help="Token slots of a block.")] = 16,
    dtype: Annotated[str, typer.Option(help=f"Of weights and KV: {' or '.join(DTYPES)}.")] = "bfloat16",
    step_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one step; longer prompts are cut.")] = 2048,
    max_sequences: Annotated[int, typer.Option(min=1, help="Most sequences of one batch.")] = 256,
    long_prompt: Annotated[
        int, typer.Option(min=0, help="Tokens of the long prompt to look at; 0: the model's positions.")
    ] = 0,
    decode_sequences: Annotated[
        int, typer.Option(min=1, help="Sequences that decode while the long prompt is computed.")
    ] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Load: tokens of a prompt.")] = 800,
    output_tokens: Annotated[int, typer.Option(min=1, help="Load: tokens of an answer.")] = 400,
    rate: Annotated[float, typer.Option(help="Load: requests a second.")] = 1.0,
    tbt_ms: Annotated[float, typer.Option(help="Longest time between tokens wanted; 0: any.")] = 0.0,
    efficiency: Annotated[float, typer.Option(help="Share of peak that is reached, for what a load needs.")] = 0.5,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Work out pool size, how many requests fit, bounds of steps, chunks, hand-off, and workers for a load.

    Nothing is measured or loaded: `kvrelay doctor` measures this machine, `kvrelay bench` a cluster.
    """
    if (not model) == (not model_preset):
        raise typer.BadParameter("give either MODEL or --model-preset NAME")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    above = {"--memory-gb": memory_gb, "--bandwidth-gbs": bandwidth_gbs, "--tflops": tflops}
    _require_above_zero(above | {"--network-gbs": network_gbs, "--rate": rate})
    _require_share({"--usable": usable, "--efficiency": efficiency})
    _require_not_negative({"--reserve-gb": reserve_gb, "--tbt-ms": tbt_ms})
    from kvrelay.planning import Load, Machine, Terms

    terms = Terms(
        dtype=dtype,
        usable=usable,
        reserve_bytes=round(reserve_gb * GB),
        block_size=block_size,
        step_tokens=step_tokens,
        max_sequences=max_sequences,
        decode_sequences=decode_sequences,
        long_prompt=long_prompt,
        efficiency=efficiency,
        tbt_s=tbt_ms / 1e3,
    )
    machine = Machine(round(memory_gb * GB), bandwidth_gbs * GB, tflops * 1e12, network_gbs * GB)
    _run(model, model_preset, machine, Load(prompt_tokens, output_tokens, rate), terms, json_output)


def _run(model: str, preset: str, machine: Machine, load: Load, terms: Terms, as_json: bool) -> None:
    from kvrelay.cli.problems import EXIT_FAILED, report
    from kvrelay.errors import KVRelayError
    from kvrelay.planning import make_plan

    try:
        made = make_plan(_config(model, preset), machine, load, terms)
    except KVRelayError as error:
        report(error, as_json)
        raise typer.Exit(EXIT_FAILED) from None
    _print(model or preset, made, as_json)


def _config(model: str, preset: str) -> ModelConfig:
    """NotFound or InvalidArgument names what is wrong with the model, or the preset."""
    from kvrelay.config_load import nearest
    from kvrelay.errors import NotFound
    from kvrelay.models.catalog import resolve
    from kvrelay.models.config import ModelConfig
    from kvrelay.models.presets import PRESETS

    if model:
        return ModelConfig.from_dir(resolve(model), weights=False)
    if preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise NotFound(
            f"--model-preset must be one of {known}, not {preset!r}{nearest(preset, PRESETS)}", field="--model-preset"
        )
    return PRESETS[preset]


def _print(name: str, made: Plan, as_json: bool) -> None:
    import json

    from kvrelay.cli.plan_view import plan_object, plan_tables

    if as_json:
        print(json.dumps({"name": name} | plan_object(made), ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    for number, table in enumerate(plan_tables(name, made)):
        console.print(*([""] if number else []), table, sep="\n")
    for note in made.notes:
        console.print(f"\nNote: {note}.")


def _require_above_zero(values: dict[str, float]) -> None:
    for flag, value in values.items():
        if not 0 < value < float("inf"):
            raise typer.BadParameter(f"{flag} must be more than 0, not {value:g}")


def _require_share(values: dict[str, float]) -> None:
    for flag, value in values.items():
        if not 0 < value <= 1:
            raise typer.BadParameter(f"{flag} must be more than 0 and at most 1, not {value:g}")


def _require_not_negative(values: dict[str, float]) -> None:
    for flag, value in values.items():
        if not 0 <= value < float("inf"):
            raise typer.BadParameter(f"{flag} must be 0 or more, not {value:g}")
