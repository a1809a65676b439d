"Hostile input to the configuration: whatever comes in, a checked Config or a ConfigError of one line comes out."
import copy
import dataclasses
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from expertflow.config import (
    Config,
    ConfigError,
    ExpertFlowError,
    LoadError,
    Share,
    fmt_bytes,
    load_config,
    parse_budget,
    parse_bytes,
)

KEYS = [f.name for f in dataclasses.fields(Config)]
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
anything = st.recursive(plain, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
                        max_leaves=5)


def refused(call, *args, **kwargs) -> str:
    "The message with which a call is refused: one line, and not a long one."
    with pytest.raises(ConfigError) as e: call(*args, **kwargs)
    text = str(e.value)
    assert "\n" not in text and len(text) < 600
    return text


# amounts of memory

@given(anything)
@example("1e999GB")
@example("9" * 5000)
@example("٣GB")             # a digit for Python, not for people who count bytes
@example("1__0GB")
@example(10**400)
@example("1e-400B")
@example("1e-999999999B")    # as a fraction it would fill the memory
@example("1e+9999999999GB")
def test_parse_bytes_gives_bytes_or_refuses(x):
    try: n = parse_bytes(x)
    except ConfigError as e: assert "\n" not in str(e)
    else: assert type(n) is int and 0 <= n <= 10**15


@given(st.integers(0, 10**15), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_units_are_exact(n, unit):
    size = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    n //= size
    assert parse_bytes(f"{n}{unit}") == parse_bytes(f" {n} {unit.lower()} ") == n * size


@given(st.integers(0, 10**15))
def test_formatted_bytes_read_back_within_half_a_percent(n):
    assert abs(parse_bytes(fmt_bytes(n)) - n) <= 0.005 * n + 0.5
    up = fmt_bytes(n, up=True)
    assert len(up) <= 8
    if n <= 0.99e15: assert n <= parse_bytes(up) <= n * 1.0101 + 1
    assert fmt_bytes(-n) == ("-" if n else "") + fmt_bytes(n)


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"),
                                         (9_995_000_000, "10.0 GB"), (2_500_000_000_000, "2.50 TB"), (10**16, "10000 TB")])
def test_fmt_bytes(n, text): assert fmt_bytes(n) == text


def test_numbers_of_numpy_are_numbers():
    assert parse_bytes(np.float32(1.5)) == parse_bytes(np.float64(1.5)) == 1_500_000_000
    assert parse_bytes(np.int64(6)) == 6_000_000_000
    assert "bool" in refused(parse_bytes, np.bool_(True))


def test_settings_in_numbers_of_numpy_are_those_of_python():
    same = {"gpu_memory_budget": 2, "context": 512, "token_block_size": 16, "warmup_steps": 3, "tolerance": 0.5,
            "load_timeout": 8, "prediction_lookahead": 2}
    c = Config.make({k: np.float32(x) if isinstance(x, float) else np.int64(x) for k, x in same.items()})
    assert c == Config.make(same) and c.lookahead == 2
    assert all(type(getattr(c, k)) is type(x) for k, x in same.items())
    assert Config.make(json.loads(json.dumps(c.as_dict()))) == c


@pytest.mark.parametrize("x", ["50%", " 50 % ", "5e1%", Share(0.5)])
def test_share(x): assert parse_budget(x) == Share(0.5)


@pytest.mark.parametrize("x", [0, -0.5, 1.0001, math.nan, math.inf, True, "0.5", None])
def test_share_out_of_range(x): assert "must be above 0 and at most 1" in refused(Share, x)


# the configuration

@given(st.sampled_from(KEYS), anything)
def test_any_value_for_any_key_is_taken_or_refused_by_name(key, x):
    try: c = Config.make({key: x})
    except ConfigError as e: assert str(e).startswith(f"{key}") and "\n" not in str(e)
    else:
        assert Config.make(c.as_dict()) == c
        str(c)


BAD = {
    "gpu_memory_budget": [("6 bananas", "unknown unit 'bananas'"), (-1, "negative"), (math.nan, "not a finite number"),
                          (True, "bool"), (6_000_000_000, "a plain number is GB"), ("150%", "at most 1")],
    "cpu_memory_budget": [("lots", "write e.g."), ([1], "list")],
    "system_reserve": [("10%", "no number with a unit")],
    "eviction_threshold": [(0, "above 0 and at most 1"), (1.01, "above 0"), ("0.9", "a number"), (math.nan, "a number"),
                           (True, "a number")],
    "eviction_policy": [("LRU", "known: priority_based, lru"), (None, "known"),
                        ("priority-based", "did you mean 'priority_based'?")],
    "experts_implementation": [("grouped", "did you mean 'grouped_mm'?"), (["eager"], "known")],
    "dtype": [("int8", "unknown value"), ("float64", "did you mean 'float"), (16, "unknown value")],
    "device": [("", "torch device"), ("cuda 0", "torch device"), (0, "torch device")],
    "context": [(0, "a whole number at least 1"), (1e3, "whole"), (10**13, "at most 1e+12")],
    "batch": [("3", "whole"), (False, "whole"), (None, "whole")],
    "token_block_size": [(0, "at least 1")],
    "warmup_steps": [(-1, "at least 0")],
    "io_threads": [(0, "at least 1"), (65, "at most 64")],
    "load_timeout": [(0, "above 0"), (math.inf, "a number"), (10**6, "at most 86400")],
    "host_compute": [("sometimes", "known: never, auto, always"), ("Auto", "did you mean 'auto'?"), (True, "known")],
    "paced_link": [(0, "must be a rate above 0"), (-2, 'write e.g. 2 (GB/s), "2GB/s"'), ("2GB", "a rate"), ("2", "a rate"),
                   ("/s", "a rate"), ("2GB/s/s", "a rate"), ("0.1B/s", "above 0"), (math.nan, "a rate"), (math.inf, "a rate"),
                   (True, "a rate"), (5_000_000_000, "a rate")],
    "preload": [(1, "true or false")],
    "cold_experts": [(0.9, "at most 0.5"), (0, "above 0"), (True, "pairs"), ([[0]], "pairs"), ([[0, -1]], "pairs"),
                     ("", "folder"), ([[0, 1.5]], "pairs"), (math.nan, "a number")],
    "cold_share": [(-0.1, "at least 0"), (0.6, "at most 0.5"), (None, "a number")],
    "strict": [(1, "true or false"), (None, "true or false")],
    "strict_layers": [(1, "a list of MoE layers"), ([-1], "counted from 0"), ("01", "a list"), ([True], "a list"),
                      ([0.5], "a list")],
    "tolerance": [(-0.1, "at least 0"), (2, "at most 1"), (math.nan, "a number"), (True, "a number")],
    "prediction_lookahead": [(-1, "at least 0"), (65, "at most 64"), (1.5, "a whole number"), (True, "a whole number")],
    "prediction_model_path": [("", '"gate" or the file'), (7, '"gate" or the file')],
    "forecast_model_path": [("", '"routing" or the file'), (7, '"routing" or the file')],
    "priority_weights": [({"recency": 0.5}, "sum to 0.5"), ({}, "sum to 0"), ([1, 0, 0], "table"),
                         ({"recency": True}, "a number"),
                         ({"recency": -1, "transfer_cost": 2}, "at least 0"), ({"recency": math.nan}, "a number"),
                         ({"prediction": 1.0}, "did you mean 'prediction_prob'?")],
    "model_path": [("", "folder"), (7, "folder")],
}
CASES = [(key, x, why) for key, cases in BAD.items() for x, why in cases]


@pytest.mark.parametrize(("key", "x", "why"), CASES, ids=[f"{k}={x!r}" for k, x, _ in CASES])
def test_impossible_value(key, x, why):
    text = refused(Config.make, {key: x})
    assert text.startswith(key) and why in text
    if not isinstance(x, dict): assert repr(x) in text
    assert refused(Config, **{key: x}) == text
    assert refused(dataclasses.replace, Config(), **{key: x}) == text


def test_every_setting_has_an_impossible_value(): assert set(BAD) == set(KEYS)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("x", [10**5000, "1" * 5000, "6GB\n" * 100, np.ones((30, 30))], ids=["digits", "ones", "lines", "array"])
def test_a_message_is_one_short_line_whatever_the_value(key, x):
    if isinstance(x, str) and (key == "cold_experts" or key.endswith("_path")): return      # any text may be a path
    refused(Config.make, {key: x})


@pytest.mark.parametrize(("key", "meant"), [("gpu_budget", "gpu_memory_budget"), ("eviction_treshold", "eviction_threshold"),
                                            ("warmup", "warmup_steps"), ("model", "model_path"), ("Context", "context")])
def test_unknown_key(key, meant):
    for call in (lambda: Config.make({key: 1}), lambda: Config.make(**{key: 1})):
        assert refused(call) == f"unknown setting {key!r}; did you mean {meant!r}?"


def test_unknown_key_near_nothing_lists_them_all():
    text = refused(Config.make, {"zzz": 1})
    assert all(key in text for key in KEYS)
    assert "unknown setting 3" in refused(Config.make, {3: 1})


def test_errors_are_what_python_would_call_them():
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, ExpertFlowError)
    assert issubclass(LoadError, RuntimeError)


def test_weights():
    c = Config(priority_weights={"prediction_prob": 0.1, "recency": 0.2, "transfer_cost": 0.7})     # sums to 0.99999...
    mine = {"recency": 1}
    d = Config(priority_weights=mine)
    mine["recency"] = 7
    assert d.priority_weights == {"prediction_prob": 0, "recency": 1, "transfer_cost": 0}
    assert sum(c.priority_weights.values()) == pytest.approx(1)
    d.as_dict()["priority_weights"]["recency"] = 7
    assert d.priority_weights["recency"] == 1 and Config().priority_weights["recency"] == 0.3


@pytest.mark.parametrize(("x", "rate"), [(None, None), (2, 2 * 10**9), (0.5, 5 * 10**8), ("2GB/s", 2 * 10**9),
                                         ("500 MB/S", 5 * 10**8), (" 1GiB/s ", 2**30), ("1.5/s", 15 * 10**8),
                                         (np.float32(0.25), 25 * 10**7)])
def test_rate_of_a_paced_link(x, rate):
    c = Config(paced_link=x)
    assert c.link_rate == rate and c.paced_link == x


def test_config_is_frozen_and_copies():
    c = Config(gpu_memory_budget="25%", device="cuda:1")
    with pytest.raises(dataclasses.FrozenInstanceError): c.batch = 2
    assert pickle.loads(pickle.dumps(c)) == copy.deepcopy(c) == Config.make(json.loads(json.dumps(c.as_dict()))) == c


def test_torch_objects_are_understood():
    torch = pytest.importorskip("torch")
    c = Config(dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (c.dtype, c.device) == ("bfloat16", "cpu")


# files

def test_file_then_overrides(tmp_path):
    f = tmp_path / "flow.json"
    text = '{"gpu_memory_budget": 6, "priority_weights": {"recency": 1.0}, "token_block_size": null}'
    f.write_text("\ufeff" + text, encoding="utf-8")
    for source in (f, str(f)):
        c = Config.make(source, batch=2)
        assert (c.gpu_budget, c.batch, c.priority_weights["recency"], c.token_block_size) == (6_000_000_000, 2, 1.0, None)
    assert load_config(f)["gpu_memory_budget"] == 6


BROKEN = {
    "a.json": [('{\n "batch": 3\n "context": 4}', "line 3: not valid JSON"), ("", "line 1: not valid JSON"),
               ("[1]", "holds a list"), ('{"batch": 3, "batch": 4}', "'batch' occurs twice"),
               ('{"eviction_threshold": NaN}', "eviction_threshold=nan"),
               ('{"batches": 3}', "did you mean 'batch'?"), ("[" * 100_000, "nested too deeply")],
    "a.toml": [("batch = 3\n\ncontext = = 4\n", "line 3: not valid TOML"), ("batch = 3\nbatch = 4\n", "line 2: not valid TOML"),
               ('batch = 3\ndtype = "f', "line 2: not valid TOML"), ("batch = true", "batch=True: must be a whole number"),
               ("[expertflow]\nbatch = 3", "unknown setting 'expertflow'")],
    "a.yaml": [("batch: 3", "name it .json or .toml")],
    "a": [("{}", "name it .json or .toml")],
}


@pytest.mark.parametrize(("name", "text", "why"), [(n, t, w) for n, cases in BROKEN.items() for t, w in cases])
def test_broken_file(tmp_path, name, text, why):
    f = tmp_path / name
    f.write_text(text)
    message = refused(Config.make, f)
    assert message.startswith(f"{f}: ") and why in message
    assert refused(Config.make, f, batch=4) == message      # an override does not hide the fault


def test_file_that_is_not_one(tmp_path):
    assert "no such configuration file" in refused(Config.make, tmp_path / "a.json")
    (tmp_path / "b.json").mkdir()
    assert "cannot be read" in refused(Config.make, tmp_path / "b.json")
    (tmp_path / "c.json").write_bytes(b'{"batch": "\xff"}')
    assert "not UTF-8 text (byte 11)" in refused(Config.make, tmp_path / "c.json")


def test_needs_no_numpy_or_torch():
    code = "import sys; sys.modules.update(torch=None, numpy=None, transformers=None); import expertflow.config"
    subprocess.run([sys.executable, "-c", code], check=True)
