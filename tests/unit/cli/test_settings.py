from pathlib import Path

import pytest

from services.cli.settings import ConfigurationError, merge, type_name
from services.config import ENDPOINTS, FrontendConfig, SchedulerConfig, ServeConfig


def written(path: Path, text: str) -> Path:
    file = path / "config.yaml"
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 1\nmax-body-bytes: 5000\nhost: ::1\n")
    settings = merge(
        FrontendConfig, {"port": "3", "model": None}, file, {"RUNAHEAD_PORT": "2", "RUNAHEAD_MAX_BODY_BYTES": "6000"}
    )
    config = settings.config
    assert (config.port, config.max_body_bytes, config.host, config.model) == (3, 6000, "::1", "")
    assert {name: settings.origins[name] for name in ("port", "max_body_bytes", "host", "model")} == {
        "port": "flag --port",
        "max_body_bytes": "environment RUNAHEAD_MAX_BODY_BYTES",
        "host": f"file {file}",
        "model": "default",
    }


@pytest.mark.parametrize("key", ["max-num-seqs", "max_num_seqs"])
def test_keys_of_a_file_may_be_kebab_case_or_snake_case(tmp_path: Path, key: str) -> None:
    assert merge(SchedulerConfig, {}, written(tmp_path, f"{key}: 7\n"), {}).config.max_num_seqs == 7


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_auto_tool_choice", "enable_admin_routes"])
def test_switches_of_a_file_are_yes_or_no(tmp_path: Path, name: str) -> None:
    for text, value in {"yes": True, "off": False}.items():
        assert getattr(merge(ServeConfig, {}, written(tmp_path, f"{name}: {text}\n"), {}).config, name) is value


@pytest.mark.parametrize(
    ("text", "values"),
    [("log-level: off", "debug|info|warning|error"), ("port: yes", "INTEGER"), ("quantization: no", "TEXT")],
)
def test_yes_or_no_for_a_setting_that_is_no_switch_is_refused(tmp_path: Path, text: str, values: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        merge(ServeConfig, {}, written(tmp_path, text), {})
    assert str(refused.value).endswith(f"this setting is no switch; give its value, {values}")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("max-num-seq: 7\nport: 1\nspeed: 3\n", ["max-num-seq (max-num-seqs?)", "speed"]),
        ("port: 1\nPORT: 2\n", ["PORT (port?)"]),
        ("swap-space: 4\n", ["swap-space (preempted requests are recomputed; leave it out)"]),
        ("scheduler-endpoint: tcp://127.0.0.1:1\n", ["scheduler-endpoint"]),
    ],
)
def test_unknown_keys_of_a_file_are_named(tmp_path: Path, text: str, names: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        merge(ServeConfig, {}, written(tmp_path, text), {}, omitted=ENDPOINTS)
    assert str(refused.value).endswith(f"config.yaml: unknown keys: {', '.join(names)}")


@pytest.mark.parametrize(
    "text",
    [
        *("- port\n", "port", "port: [\n", "port: 1\nport: !!python/object:os.system {}\n"),
        *("host: \xff\n", "revision: 2026-13-01\n", f"port: {'[' * 1000}\n"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_file_without_a_mapping_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"config\.yaml") as refused:
        merge(ServeConfig, {}, file, {})
    assert "\n" not in str(refused.value)


def test_key_in_both_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="given twice"):
        merge(SchedulerConfig, {}, written(tmp_path, "block-size: 8\nblock_size: 16\n"), {})


@pytest.mark.parametrize(
    ("flags", "text", "variables", "keys"),
    [
        ({}, "", {}, ["v,w"]),
        ({"api_key": ["f"]}, "", {}, ["f"]),
        ({}, "api-key-file: keys", {}, []),
        ({}, "", {"RUNAHEAD_API_KEY": "a"}, ["a"]),
    ],
)
def test_the_key_of_vllm_is_read_if_there_is_no_other_one(
    tmp_path: Path, flags: dict[str, object], text: str, variables: dict[str, str], keys: list[str]
) -> None:
    environment = {"VLLM_API_KEY": "v,w", **variables}
    assert merge(FrontendConfig, flags, written(tmp_path, text), environment).config.api_key == keys


def test_empty_file_and_empty_variables_set_nothing(tmp_path: Path) -> None:
    settings = merge(ServeConfig, {}, written(tmp_path, "# empty\n"), {"RUNAHEAD_PORT": "", "RUNAHEAD_MODEL": ""})
    assert set(settings.origins.values()) == {"default"}


def test_list_from_commas_in_the_environment_and_from_one_text_in_a_file(tmp_path: Path) -> None:
    environment = {"RUNAHEAD_SERVED_MODEL_NAME": "a, b"}
    config = merge(FrontendConfig, {}, written(tmp_path, "api-key: one\n"), environment).config
    assert (config.served_model_name, config.api_key) == (["a", "b"], ["one"])


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({}, {"RUNAHEAD_PORT": "70000"}, "--port: .*65535, not '70000' .from environment RUNAHEAD_PORT"),
        ({"async_scheduling": "perhaps"}, {}, "--async-scheduling: .*boolean"),
        (
            {},
            {"RUNAHEAD_TENSOR_PARALLEL_SIZE": "0"},
            "'auto' or greater than or equal to 1, not '0' .from environment RUNAHEAD_TENSOR_PARALLEL_SIZE.$",
        ),
        ({"async_scheduling": False}, {"RUNAHEAD_BATCH_QUEUE_DEPTH": "3"}, "contradicts --batch-queue-depth 3"),
        ({"served_model_name": [1, 2]}, {}, "--served-model-name: input should be a valid string, not 1$"),
    ],
)
def test_wrong_values_of_a_file_and_the_environment_are_refused_by_flag_value_and_origin(
    flags: dict[str, object], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        merge(ServeConfig, flags, None, environment)


@pytest.mark.parametrize(
    ("name", "placeholder"),
    [
        ("tensor_parallel_size", "auto|INTEGER"),
        ("pipeline_parallel_size", "INTEGER"),
        ("batch_queue_depth", "INTEGER"),
        ("settle_seconds", "FLOAT"),
        ("kv_cache_memory_bytes", "SIZE"),
        ("max_model_len", "SIZE"),
        ("dtype", "auto|float32|bfloat16"),
        ("model", "TEXT"),
        ("tokenizer", "TEXT"),
        ("api_key", "TEXT"),
        ("override_generation_config", "TEXT"),
    ],
)
def test_placeholder_of_a_value_in_the_help(name: str, placeholder: str) -> None:
    assert type_name(ServeConfig.model_fields[name]) == placeholder


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("4G", 4 << 30),
        ("4g", 4_000_000_000),
        ("1.5GiB", 3 << 29),
        ("25.6k", 25_600),
        ("1 MB", 1_000_000),
        ("7", 7),
        ("9" * 400 + "k", 10**403),
    ],
)
def test_sizes_have_suffixes(given: str, size: int) -> None:
    assert merge(ServeConfig, {"kv_cache_memory_bytes": given}, None, {}).config.kv_cache_memory_bytes == size
    assert merge(ServeConfig, {"max_model_len": given}, None, {}).config.max_model_len == size


def test_settings_of_other_backends_may_have_their_default_values() -> None:
    merge(ServeConfig, {"sim_step_ms": "5", "load_format": "auto"}, None, {})


def test_blocks_of_vllm_on_a_cpu_are_larger_unless_they_are_given() -> None:
    given = [{"backend": "vllm"}, {"backend": "vllm", "block_size": "64"}, {"backend": "vllm", "device": "cuda"}, {}]
    assert [merge(ServeConfig, flags, None, {}).config.block_size for flags in given] == [32, 64, 16, 16]


def test_refused_secret_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--api-key") as refused:
        merge(FrontendConfig, {}, written(tmp_path, "api-key: [1234567]\n"), {})
    assert "1234567" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ({"tensor_parallel_size": "auto"}, "tensor_parallel_size", "auto"),
        ({"tensor_parallel_size": "4"}, "tensor_parallel_size", 4),
        ({}, "depth", 2),
        ({"async_scheduling": False}, "depth", 1),
        ({"async_scheduling": True}, "depth", 2),
        ({"async_scheduling": False, "batch_queue_depth": "1"}, "depth", 1),
        ({"async_scheduling": True, "batch_queue_depth": "5"}, "depth", 5),
        ({"batch_queue_depth": "8"}, "depth", 8),
    ],
)
def test_value_of_each_combination_of_flags(flags: dict[str, object], name: str, value: object) -> None:
    assert getattr(merge(SchedulerConfig, flags, None, {}).config, name) == value


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("RUNAHEAD_MAX_NUM_SEQ", "use RUNAHEAD_MAX_NUM_SEQS"),
        ("RUNAHEAD_KV_CACHE_MEMORY", "use RUNAHEAD_KV_CACHE_MEMORY_BYTES"),
        ("RUNAHEAD_ENGINE", "use RUNAHEAD_ENGINES"),
        ("RUNAHEAD_XYZZY", "remove it"),
    ],
)
def test_a_variable_of_no_setting_is_refused_with_a_suggestion(variable: str, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^environment {variable}: there is no such setting; {advice}$"):
        merge(ServeConfig, {}, None, {variable: "3"})


def test_variables_of_other_commands_and_of_kubernetes_are_no_mistakes() -> None:
    others = (
        *("MAX_CONCURRENCY", "SIM_STEP_MS", "FAILPOINT_MASK_SECONDS", "WORKER_MEMORY", "VERSION"),
        *("SERVICE_HOST", "FRONTEND_SERVICE_PORT_HTTP", "FRONTEND_PORT", "FRONTEND_PORT_8000_TCP_ADDR"),
    )
    merge(SchedulerConfig, {}, None, {**{f"RUNAHEAD_{name}": "3" for name in others}, "RUNAHEAD_XYZZY": ""})
