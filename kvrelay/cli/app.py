"""The typer application: which commands there are. Commands import what they need only when they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Annotated

import typer

from kvrelay.cli import bench, chat, demo, doctor, drain, generate, health, models, plan, role_names, status, tbt, up
from kvrelay.cli.flags import Grouped, examples, flat

app = typer.Typer(
    name="kvrelay",
    help="Serve large language models with prefill and decode on separate pools of workers.",
    epilog="\b\nStart here:\n  kvrelay models pull\n  kvrelay up\n  kvrelay generate 'Once upon a time'",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvrelay {version('kvrelay')}")
        raise typer.Exit


@app.callback()
def _every(
    show: Annotated[bool, typer.Option("--version", is_eager=True, callback=_say_version, help="The version.")] = False,
) -> None:
    """What all commands take: nothing but the version's flag, which is answered before any of them runs."""


app.command(epilog=examples(*up.EXAMPLE))(up.up)
app.command(cls=Grouped, epilog=examples(*generate.EXAMPLE))(flat(generate.generate))
app.command(cls=Grouped, epilog=examples(*chat.EXAMPLE))(flat(chat.chat))
app.command(epilog=examples(*status.EXAMPLE))(status.status)
app.command(epilog=examples(*drain.EXAMPLE))(drain.drain)
app.command(epilog=examples(*bench.EXAMPLE))(bench.bench)
app.command(epilog=examples(*plan.EXAMPLE))(plan.plan)
app.command(epilog=examples(*doctor.EXAMPLE))(doctor.doctor)
app.command(epilog=examples(*tbt.EXAMPLE))(tbt.tbt)
app.command(epilog=examples(*demo.EXAMPLE))(demo.demo)
app.add_typer(models.app, name="models")


def _add_plain(name: str, about: str, run: Callable[[list[str]], int]) -> None:
    """Lists a command that parses its own arguments; `main` calls it without typer."""

    def command(context: typer.Context) -> None:
        raise typer.Exit(run(context.args))

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=about, context_settings=settings)(command)


def _run_role(name: str, arguments: list[str]) -> int:
    from kvrelay.cli.roles import run_role

    return run_role(name, arguments)


_add_plain("health", health.ABOUT, health.run_health)
for _name in role_names.ROLES:
    _add_plain(_name, role_names.ABOUT[_name], partial(_run_role, _name))
