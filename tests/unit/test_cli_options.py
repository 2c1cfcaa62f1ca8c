"""Names and values: flags, configuration files and Python arguments."""

from __future__ import annotations

import msgspec
import pytest

from pippin import options
from pippin.cli.flags import config_from, read_file
from pippin.config import Config
from pippin.errors import ConfigError


def test_every_field_of_the_configuration_has_a_name():
    named = {(option.section, option.field) for option in options.OPTIONS} | {("model", "model")}
    fields = set()
    for section in msgspec.structs.fields(Config):
        value = getattr(Config(), section.name)
        if isinstance(value, msgspec.Struct):
            fields |= {(section.name, f.name) for f in msgspec.structs.fields(type(value))}
        else:
            fields.add(("", section.name))
    assert named == fields


def test_nothing_given_is_the_default():
    assert options.make_config({}) == Config()
    assert options.make_config({option.name: None for option in options.OPTIONS}) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), ("1.5G", 3 * 2**29),
     ("2m", 2_000_000)],
)  # fmt: skip
def test_counts(text: str, value: int):
    assert options.count(text) == value


@pytest.mark.parametrize("text", ["", "k", "8kk", "-3", "1e3", "0.5", "1.0001k", "8 192"])
def test_bad_counts(text: str):
    with pytest.raises(ValueError, match="8192"):
        options.count(text)


def test_values_as_text_reach_their_field():
    made = options.make_config(
        {
            "model": "m",
            "port": "9000",
            "max_model_len": "8k",
            "kv_cache_memory_bytes": "1G",
            "gpu_memory_utilization": "0.5",
            "scheduling_policy": "priority",
            "api_key": ("a", "b"),
            "served_model_name": "x",
            "dtype": "half",
            "request_timeout": "1.5",
            "enable_prefix_caching": False,
        }
    )
    assert (made.model.model, made.server.port, made.model.max_model_len) == ("m", 9000, 8000)
    assert made.cache.kv_cache_bytes == 2**30
    assert made.cache.gpu_memory_utilization == 0.5
    assert made.cache.enable_prefix_caching is False
    assert made.scheduler.policy == "priority"
    assert made.server.api_key == ("a", "b")
    assert made.model.served_model_name == ("x",)
    assert made.model.dtype == "float16"
    assert made.server.request_timeout == 1.5


@pytest.mark.parametrize("value", ["auto", "-1", -1])
def test_an_automatic_length(value):
    assert options.make_config({"max_model_len": value}).model.max_model_len is None


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", "abc", "port abc: expected a whole number"),
        ("port", 80.5, "expected a whole number"),
        ("port", True, "expected a whole number"),
        ("port", "70000", "65535"),
        ("request_timeout", "soon", "expected a number"),
        ("dtype", "int3", "expected one of auto, float32"),
        ("dtype", 16, "expected one of auto, float32"),
        ("enable_prefix_caching", "maybe", "true or false"),
        ("max_model_len", "long", "8192"),
        ("max_model_len", 0, "at least 1"),
        ("gpu_memory_utilization", "1.5", r"\(0, 1\]"),
        ("host", 5, "expected text"),
        ("block_size", "auto", "expected a whole number"),
    ],
)
def test_wrong_values_name_themselves(name: str, value, says: str):
    with pytest.raises(ConfigError, match=says):
        options.make_config({name: value})


def test_unknown_names_come_with_a_suggestion():
    with pytest.raises(ConfigError, match="max_modellen") as caught:
        options.make_config({"max_modellen": 5})
    assert caught.value.hint == "did you mean max_model_len?"


@pytest.mark.parametrize("name", [*options.LATER, "data_parallel_size"])
def test_what_comes_later_is_refused(name: str):
    with pytest.raises(ConfigError, match="later release"):
        options.make_config({name: "2"})


def test_later_names_that_ask_for_nothing_are_accepted():
    made = options.make_config(
        {
            "tensor_parallel_size": "1",
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "replicas_per_device": "1",
            "distributed_executor_backend": "uni",
        }
    )
    assert made.parallel.distributed_executor_backend == "uni"


def test_a_port_range_is_first_and_last():
    assert options.make_config({"port_range": "7000-7099"}).parallel.port_range == (7000, 7099)
    for wrong in ("7000", "7099-7000", "0-10", "a-b"):
        with pytest.raises(ConfigError, match=r"port.range"):
            options.make_config({"port_range": wrong})


def test_a_pipeline_split_is_layers_a_stage():
    made = options.make_config({"pipeline_parallel_size": "2", "pipeline_split": "17,13"})
    assert made.parallel.pipeline_split == (17, 13)
    for split, says in (("17", "names 1 stages"), ("30,0", "one layer"), ("a,b", "17,13")):
        with pytest.raises(ConfigError, match=says):
            options.make_config({"pipeline_parallel_size": 2, "pipeline_split": split})


def test_one_process_is_not_several_ranks():
    with pytest.raises(ConfigError, match="uni is one process"):
        options.make_config({"distributed_executor_backend": "uni", "pipeline_parallel_size": 2})


def test_several_models_are_refused():
    with pytest.raises(ConfigError, match="several models"):
        options.make_config({"model": ["a", "b"]})
    assert options.make_config({"model": ["a"]}).model.model == "a"


# --- --config FILE ----------------------------------------------------------------------------


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: m\nport: 9001\nmax-model-len: 8k\napi_key: [a, b]\nenable-prefix-caching: false\n"
    )
    made = config_from(None, {"port": "9002", "host": None}, file)
    assert (made.model.model, made.server.port, made.model.max_model_len) == ("m", 9002, 8000)
    assert made.server.api_key == ("a", "b")
    assert made.cache.enable_prefix_caching is False
    assert config_from("other", {}, file).model.model == "other"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("colour: red\n", "unknown option colour"),
        ("max-model-length: 5\n", "max-model-length"),
        ("port: [1, 2]\n", "port"),
        ("port: high\n", "port high: expected a whole number"),
        ("plan: x\n", "later release"),
        ("- a\n- b\n", "name: value"),
        ("a: [1\n", "not valid YAML in line"),
        ("max-model-len: 1\nmax_model_len: 2\n", "given twice"),
        ("served-model-name: {a: b}\n", "served_model_name"),
        ("api-key: [1]\n", "api_key"),
    ],
)
def test_mistakes_in_the_file_name_file_and_key(tmp_path, content: str, says: str):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        config_from("demo", {}, file)
    assert str(file) in str(caught.value)


def test_an_empty_file_says_nothing(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("# all defaults\n")
    assert config_from("demo", {}, file) == Config()


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path / "absent.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_file(tmp_path / "b.yaml")
