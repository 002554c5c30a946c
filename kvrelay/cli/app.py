"""The typer application: which commands there are. Commands import what they need only when they run."""

from __future__ import annotations

import typer

from kvrelay.cli import bench, demo, drain, generate, models, plan, role_names, status, up

app = typer.Typer(
    name="kvrelay",
    help="Serve large language models with prefill and decode on separate pools of workers.",
    epilog="Start here: kvrelay models pull, kvrelay up, then kvrelay generate 'Once upon a time'",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.command(epilog=up.EXAMPLE)(up.up)
app.command(epilog=generate.EXAMPLE)(generate.generate)
app.command(epilog=status.EXAMPLE)(status.status)
app.command(epilog=drain.EXAMPLE)(drain.drain)
app.command(epilog=bench.EXAMPLE)(bench.bench)
app.command(epilog=plan.EXAMPLE)(plan.plan)
app.command(epilog=demo.EXAMPLE)(demo.demo)
app.add_typer(models.app, name="models")


def _add_role(name: str) -> None:
    """Lists a role's command; its flags are parsed by `roles`, which `main` calls directly."""

    def command(context: typer.Context) -> None:
        from kvrelay.cli.roles import run_role

        raise typer.Exit(run_role(name, context.args))

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=role_names.ABOUT[name], context_settings=settings)(command)


for _name in role_names.ROLES:
    _add_role(_name)
