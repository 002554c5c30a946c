"""`kvrelay models pull | list`: the models that can be had by name."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.flags import examples

app = typer.Typer(help="Pull models and list them.", no_args_is_help=True, rich_markup_mode=None)
DEFAULT_MODEL = "smollm2-135m-instruct"


@app.command(epilog=examples("kvrelay models pull smollm2-135m-instruct"))
def pull(
    model: Annotated[str, typer.Argument(help="Model id.")] = DEFAULT_MODEL,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Download a model, check it by hash and convert it into a Hugging Face directory. Prints the directory."""
    from kvrelay.cli.problems import EXIT_FAILED, report
    from kvrelay.errors import KVRelayError
    from kvrelay.models import pull as pulling

    try:
        path = pulling.pull(model, lambda line: typer.echo(line, err=True))
    except KVRelayError as error:
        report(error, json_output)
        raise typer.Exit(EXIT_FAILED) from None
    _print({"model": model, "path": str(path)}, str(path), json_output)


@app.command("list", epilog=examples("kvrelay models list --json"))
def list_(json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """List the models that can be pulled. Any local Hugging Face directory of a Llama model can be served, too."""
    from kvrelay.models.catalog import list_models

    listings = list_models()
    rows = [
        {"id": m.model_id, "title": m.title, "license": m.license, "path": str(m.path) if m.path else None}
        for m in listings
    ]
    lines = [f"{m.model_id}  {m.title}  {m.license}  {m.path or 'not pulled'}" for m in listings]
    _print({"models": rows}, "\n".join(lines), json_output)


def _print(value: dict[str, object], text: str, as_json: bool) -> None:
    import json

    typer.echo(json.dumps(value, ensure_ascii=False) if as_json else text)
