"""What the command line says before it does anything: help, wrong usage, errors of its own files."""

import socket
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from kvrelay import errors
from kvrelay.cli.app import app
from kvrelay.cli.problems import EXIT_INTERRUPTED, error_code, error_line
from kvrelay.cli.role_names import ROLES
from kvrelay.cli.roles import HELP, build_parser
from kvrelay.config import CoordinatorConfig, WorkerConfig
from kvrelay.config_load import keys_of, load_coordinator, load_up, load_worker
from kvrelay.requests import Role
from kvrelay.rpc.status import STATUS_TABLE

COMMANDS = (
    ["up"],
    ["generate"],
    ["chat"],
    ["status"],
    ["bench"],
    ["demo"],
    ["doctor"],
    ["plan"],
    ["tbt"],
    ["models", "pull"],
    ["models", "list"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "Example" in done.output
    told = done.output.partition("Example")[2].splitlines()[1:]
    assert told == [f"    {line.strip()}" for line in told]
    assert all("kvrelay" in line and len(line) <= 88 for line in told)


def test_nothing_is_imported_before_ctrl_c_is_looked_after():
    ours = "import sys, kvrelay.cli.main as m; print(m.INTERRUPTED, *sorted(n for n in sys.modules if 'kvrelay' in n))"
    done = subprocess.run([sys.executable, "-c", ours], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == [str(EXIT_INTERRUPTED), "kvrelay", "kvrelay.cli", "kvrelay.cli.main"]


def test_the_version_is_one_line():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"kvrelay {version('kvrelay')}\n")


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_help_with_an_example_and_a_flag_for_every_key(role, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser(role).parse_args(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"Example: kvrelay {role}" in out
    assert "--die-with-parent" not in out
    for key in keys_of(CoordinatorConfig if role == "coordinator" else WorkerConfig):
        assert ("--coordinator" if key == "coordinators" else "--" + key.replace("_", "-")) in out
        assert HELP[key] in " ".join(out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "--tokens", "ids", "and a prompt"],
        ["generate", "--max-tokens", "many", "x"],
        ["generate", "--dtype", "float32", "x"],
        ["generate", "--local", "--deadline", "1", "x"],
        ["generate", "--logprobs", "1", "x"],
        ["generate", "--deadline", "nan", "x"],
        ["bench", "--scenario", "chaos"],
        ["bench", "--plot", "x.png"],
        ["bench", "--rate", "0"],
        ["bench", "--requests", "0"],
        ["up", "--prefil", "1"],
        ["nothing"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp32"], "--dtype must be one of bfloat16, float32, not 'fp32'"),
        (["--prefill", "-1"], "--prefill must be at least 0, not -1"),
        (["--decode", "0"], "--decode must be at least 1, not 0"),
        (["--listen", "nowhere"], "--listen must be HOST:PORT"),
        (["--step-tokens", "2147483648"], "--step-tokens must be at most 2147483647, not 2147483648"),
        (["--listen", "127.0.0.1:0", "--trace-dir", "/proc/x"], "trace_dir: cannot write into /proc/x"),
        (["--listen", "127.0.0.1:0", "--log-dir", "/dev/null"], "log_dir: cannot write into /dev/null"),
        (["--config", "/nowhere.toml"], "cannot read the configuration file /nowhere.toml"),
    ],
)
def test_up_names_a_wrong_setting_before_it_starts_anything(arguments, message):
    done = CliRunner().invoke(app, ["up", "--executor", "hash", *arguments])
    assert done.exit_code == 78
    assert done.stdout == ""
    assert message in done.stderr


def test_up_refuses_a_model_that_is_not_there_before_it_starts_anything(tmp_path):
    done = CliRunner().invoke(app, ["up", "--model", str(tmp_path / "nowhere")])
    assert (done.exit_code, done.stdout) == (78, "")
    assert "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1


def test_up_says_in_one_line_that_its_port_is_taken(taken_port):
    done = CliRunner().invoke(app, ["up", "--executor", "hash", "--listen", f"127.0.0.1:{taken_port}"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"kvrelay: cannot listen on 127.0.0.1:{taken_port}: Address already in use\n"


def test_up_says_in_one_line_that_a_port_for_metrics_is_taken(taken_port):
    given = ["up", "--executor", "hash", "--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{taken_port}"]
    done = CliRunner().invoke(app, given)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"kvrelay: metrics: cannot listen on 127.0.0.1:{taken_port}: Address already in use\n"


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize("kind", STATUS_TABLE)
def test_an_errors_code_is_that_of_its_grpc_status(kind):
    assert error_code(kind("x")) == STATUS_TABLE[kind].name


def test_an_error_is_one_line_that_names_the_field_once():
    assert error_line(errors.InvalidArgument("is\nodd", field="top_p")) == "kvrelay: top_p: is odd"
    assert error_line(errors.InvalidArgument("top_p: is odd", field="top_p")) == "kvrelay: top_p: is odd"


def test_the_example_configuration_is_valid():
    path = "examples/kvrelay.toml"
    assert load_up({}, path=path).decode == 2
    assert load_coordinator({}, path=path).queue_limit == 256
    assert load_worker(Role.PREFILL, {}, path=path).step_tokens == 512
