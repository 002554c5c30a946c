import pytest

from kvrelay.config import CoordinatorConfig, UpConfig, WorkerConfig
from kvrelay.config_load import load_coordinator, load_up, load_worker, parse_address
from kvrelay.errors import InvalidArgument
from kvrelay.requests import Role


def file(tmp_path, text):
    path = tmp_path / "kvrelay.toml"
    path.write_text(text)
    return str(path)


def test_without_sources_the_defaults_hold():
    assert load_coordinator({}) == CoordinatorConfig()
    assert load_worker(Role.DECODE, {"threads": None}) == WorkerConfig(role=Role.DECODE)
    assert load_up({}) == UpConfig()


def test_flags_beat_variables_beat_the_file_beats_defaults(tmp_path):
    path = file(tmp_path, "[worker]\nthreads = 2\npool_mb = 100\nstep_tokens = 64\n")
    config = load_worker(
        Role.PREFILL, {"threads": 4}, path=path, env={"KVRELAY_THREADS": "3", "KVRELAY_POOL_MB": "200", "PATH": "x"}
    )
    assert (config.threads, config.pool_mb, config.step_tokens, config.block_size) == (4, 200, 64, 16)


def test_a_table_of_one_role_beats_the_table_of_all_workers(tmp_path):
    path = file(tmp_path, 'model = "a"\n[worker]\nthreads = 1\nmodel = "b"\n[decode]\nthreads = 8\n')
    assert load_worker(Role.DECODE, {}, path=path).threads == 8
    assert load_worker(Role.PREFILL, {}, path=path).threads == 1
    assert load_worker(Role.PREFILL, {}, path=path).model == "b"
    assert load_coordinator({}, path=path).model == "a"


def test_lists_come_from_commas_in_text_and_from_arrays_in_the_file(tmp_path):
    path = file(tmp_path, '[worker]\ncoordinators = ["a:1", "b:2"]\n')
    assert load_worker(Role.DECODE, {}, path=path).coordinators == ("a:1", "b:2")
    assert load_worker(Role.DECODE, {"coordinators": "c:3,d:4"}).coordinators == ("c:3", "d:4")


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("[worker]\nthread = 2", "worker.thread", "worker.thread is not a known setting; did you mean threads?"),
        ("[workers]\n", "[workers]", "[workers] is not a known setting; did you mean worker?"),
        ('modle = "x"', "modle", "modle is not a known setting; did you mean model?"),
        ("zzz = 1", "zzz", "zzz is not a known setting"),
        ("prefill = 2", "prefill", "prefill must be a table: write [prefill]"),
        ("[worker]\nrole = 'decode'", "worker.role", "worker.role is not a known setting"),
        ('[worker]\nthreads = "2"', "worker.threads", "worker.threads must be a whole number, not '2'"),
        ("[worker]\nthreads = true", "worker.threads", "worker.threads must be a whole number, not True"),
        ("[worker]\nthreads = 0", "worker.threads", "worker.threads must be at least 1, not 0"),
        ("[worker]\nstep_seconds = nan", "worker.step_seconds", "worker.step_seconds must be at least 0, not nan"),
        ("[worker]\nmodel = 3", "worker.model", "worker.model must be a string, not 3"),
        ('[worker]\ncoordinators = "a:1"', "worker.coordinators", "worker.coordinators must be a list of strings"),
        ('[worker]\ncoordinators = ["a"]', "worker.coordinators", "worker.coordinators must be HOST:PORT"),
        ('[decode]\ndtype = "fp32"', "decode.dtype", "decode.dtype must be one of bfloat16, float32, not 'fp32'"),
        ("[worker", "config", "is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_names_the_key_as_it_was_written(tmp_path, text, field, message):
    with pytest.raises(InvalidArgument) as caught:
        load_worker(Role.DECODE, {}, path=file(tmp_path, text))
    assert caught.value.field == field
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"KVRELAY_THREDS": "1"}, "KVRELAY_THREDS is not a known setting; did you mean KVRELAY_THREADS?"),
        ({"KVRELAY_THREADS": "two"}, "KVRELAY_THREADS must be a whole number, not 'two'"),
        ({"KVRELAY_STEP_SECONDS": "inf"}, "KVRELAY_STEP_SECONDS must be at least 0, not inf"),
        ({"KVRELAY_LISTEN": "50061"}, "KVRELAY_LISTEN must be HOST:PORT"),
    ],
)
def test_a_mistake_in_a_variable_names_it(env, message):
    with pytest.raises(InvalidArgument, match="KVRELAY") as caught:
        load_worker(Role.DECODE, {}, env=env)
    assert message in caught.value.message


def test_a_variable_of_another_process_is_no_mistake():
    env = {"KVRELAY_QUEUE_LIMIT": "3", "KVRELAY_CACHE": "/x", "KVRELAY_TARGET": "a:1"}
    assert load_worker(Role.DECODE, {}, env=env) == WorkerConfig(role=Role.DECODE)
    assert load_coordinator({}, env=env).queue_limit == 3


def test_a_mistake_in_a_flag_names_the_flag():
    with pytest.raises(InvalidArgument, match="--pool-mb must be a whole number, not 'x'"):
        load_worker(Role.DECODE, {"pool_mb": "x"})
    with pytest.raises(InvalidArgument, match="did you mean scripted"):
        load_coordinator({"executor": "script"})


@pytest.mark.parametrize("endpoint", ["nonsense", "http://collector", "ftp://collector:4317", "http://:4317", "c:x"])
def test_a_collector_that_is_no_address_is_refused(endpoint):
    with pytest.raises(InvalidArgument, match="--otlp-endpoint must be HOST:PORT"):
        load_coordinator({"otlp_endpoint": endpoint})


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://collector:4317/", "https://[::1]:4317"])
def test_a_collector_may_be_told_with_its_scheme(endpoint):
    assert load_coordinator({"otlp_endpoint": endpoint}).otlp_endpoint == endpoint


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"cannot read the configuration file .*nowhere\.toml"):
        load_up({}, path=str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "host:²", "http://host:1", "a b:1"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        parse_address(text)


def test_an_address_has_a_host_and_a_port():
    assert parse_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_address("[::1]:65535") == ("[::1]", 65535)
