"""The metrics table: every key means one thing."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core import metrics
from strop.core.errors import ConfigError
from strop.core.metrics import METRICS, Reducer, aggregate, lookup, reference_markdown, validate

PLAIN = sorted(key for key in METRICS if "{" not in key)


def test_keys_have_an_area_and_a_unit_that_their_name_agrees_with():
    suffixes = {"_s": {"s", "CPU s", "GPU s"}, "_frac": {"frac"}, "_nats": {"nats"}, "_bytes": {"bytes"}, "_tokens": {"tokens"}}
    for key, metric in METRICS.items():
        assert key.count("/") >= 1
        assert metric.meaning.endswith("."), key
        if key.endswith("_per_s"):
            assert metric.unit.endswith("/s"), key
            continue
        for suffix, units in suffixes.items():
            if key.endswith(suffix) and key != "rollout/tokens":
                assert metric.unit in units, key


@pytest.mark.parametrize(
    ("key", "family"),
    [
        ("conservation/dropped/stale", "conservation/dropped/{reason}"),
        ("routes/load_layer3_expert7", "routes/load_layer{layer}_expert{expert}"),
        ("eval/best_of_8_frac", "eval/best_of_{n}_frac"),
        ("env/tool/read_p50_s", "env/tool/{tool}_p50_s"),
        ("rl/reward", "rl/reward"),
    ],
)
def test_families_cover_their_members(key: str, family: str):
    assert lookup(key).key == family


@pytest.mark.parametrize("key", ["rl/rewards", "conservation/dropped/a/b", "eval/best_of_{n}_frac", "reward", ""])
def test_unknown_keys_are_refused(key: str):
    with pytest.raises(ConfigError, match="not in the table"):
        validate({key: 1.0})


def test_the_message_names_the_nearest_key():
    with pytest.raises(ConfigError, match=r"'numerics/k2_nats'.*Did you mean 'numerics/k[13]_nats'"):
        lookup("numerics/k2_nats")


def test_values_must_be_numbers():
    assert validate({"rl/loss": np.float32(0.5), "numerics/is_exact": True}) == {"numerics/is_exact": 1.0, "rl/loss": 0.5}
    with pytest.raises(ConfigError, match=r"rl/loss.*'high'"):
        validate({"rl/loss": "high"})  # type: ignore[dict-item]


def test_reducers():
    records = [
        {"rl/reward": 0.2, "rl/trained_tokens": 10, "numerics/logprob_diff_max_nats": 0.1, "numerics/is_exact": 1, "rl/learning_rate": 1},
        {"rl/reward": 0.4, "rl/trained_tokens": 5, "numerics/logprob_diff_max_nats": 0.3, "numerics/is_exact": 0},
        {"rl/learning_rate": 3},
    ]
    assert aggregate(records) == {
        "numerics/is_exact": 0.0,
        "numerics/logprob_diff_max_nats": 0.3,
        "rl/learning_rate": 3.0,
        "rl/reward": pytest.approx(0.3),
        "rl/trained_tokens": 15.0,
    }


def test_a_value_that_is_no_number_is_never_hidden():
    for key in ("numerics/logprob_diff_max_nats", "numerics/is_exact", "rl/loss"):
        for order in ([0.0, math.nan], [math.nan, 0.0]):
            assert math.isnan(aggregate([{key: value} for value in order])[key])
    assert math.isnan(aggregate([{"rl/loss": math.inf}, {"rl/loss": -math.inf}])["rl/loss"])


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=6), st.sampled_from(PLAIN), st.randoms(use_true_random=False))
def test_order_matters_to_last_alone(values, key, random):
    shuffled = random.sample(values, len(values))
    left, right = (aggregate([{key: value} for value in order])[key] for order in (values, shuffled))
    if lookup(key).reducer is Reducer.LAST:
        assert left == values[-1]
    else:
        assert left == right or math.isclose(left, right)


def test_the_reference_lists_every_key_once():
    page = reference_markdown()
    for key in METRICS:
        assert page.count(f"| `{key}` |") == 1


def test_every_metric_of_the_table_is_written_somewhere() -> None:
    """A row that nothing writes is a promise that nobody keeps, and an empty place in a view."""
    package = Path(metrics.__file__).parent.parent
    files = [path for path in package.rglob("*.py") if path != Path(metrics.__file__) and path.parent.name != "ui"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    # Its keys are put together of the area and the names of the counts.
    conservation = (package / "rl" / "schedule.py").read_text(encoding="utf-8")

    def occurs(key: str, text: str) -> bool:
        parts = [re.escape(part) for part in re.split(r"\{\w+\}", key)]
        return re.search('"' + r"\{[^{}]+\}".join(parts) + '"', text) is not None

    def is_written(key: str) -> bool:
        area, _, name = key.partition("/")
        return occurs(key, source) or (area == "conservation" and occurs(name, conservation))

    assert [key for key in METRICS if not is_written(key)] == []
    for key in ("env/share_frac", "env/shares/{rule}", "conservation/lost", "eval/no_system_frac"):
        assert not is_written(key)
