"""Which caption a sample gets: text members, fields of .json, lists, weights."""

import json
from collections import Counter
from typing import Any

import pytest

from shardclip.errors import UserError
from shardclip.training.data.config import DataConfig
from shardclip.training.data.samples import Captions, LeftOut, caption_id
from shardclip.training.data.sources import RawSample


def record(**fields: Any) -> RawSample:
    return RawSample("key", {"json": json.dumps(fields).encode()})


def test_fields_are_taken_by_priority() -> None:
    captions = Captions(DataConfig(json_text_key="alt;caption"))
    assert captions.draw(record(alt="first", caption="second"), 0) == "first"
    assert captions.draw(record(alt="  ", caption=" second\n"), 0) == "second"
    assert captions.draw(record(other="x"), 0) is None


@pytest.mark.parametrize("value", [None, float("nan"), 3, "", [], [None, " "], {"a": "b"}])
def test_b44_what_is_no_text_is_no_caption(value: Any) -> None:
    assert Captions(DataConfig(json_text_key="caption")).draw(record(caption=value), 0) is None


def test_one_of_a_list_is_drawn_by_the_seed_alone() -> None:
    captions = Captions(DataConfig(json_text_key="caption"))
    sample = record(caption=["a", "b", "c", ""])
    drawn = [captions.draw(sample, seed) for seed in range(60)]
    assert set(drawn) == {"a", "b", "c"}
    assert [captions.draw(sample, seed) for seed in range(60)] == drawn


def test_fields_are_drawn_by_weight_and_an_empty_one_gives_its_weight_away() -> None:
    captions = Captions(DataConfig(json_text_key="a;b;c", json_text_key_probs=(3.0, 1.0, 0.0)))
    counts = Counter(captions.draw(record(a="a", b="b", c="c"), seed) for seed in range(4000))
    assert set(counts) == {"a", "b"}
    assert abs(counts["a"] - 3000) < 5 * (4000 * 0.75 * 0.25) ** 0.5
    assert {captions.draw(record(b="b", c="c"), seed) for seed in range(20)} == {"b"}


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\xff\xfe", "caption is not UTF-8"), (b'{"caption": ', ".json is not valid")]
)
def test_unreadable_json_is_left_out(content: bytes, reason: str) -> None:
    with pytest.raises(LeftOut, match=reason):
        Captions(DataConfig(json_text_key="caption")).draw(RawSample("key", {"json": content}), 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"json_text_key": "a;b", "json_text_key_probs": (1.0,)},
        {"json_text_key": "a", "json_text_key_probs": (0.0,)},
        {"json_text_key_probs": (1.0,)},
        {"workers": -1},
        {"max_skip_rate": 2.0},
        {"aug_cfg": ("scale",)},
        {"aug_cfg": ("gray_scale_prop=0.2",)},
        {"aug_cfg": ("color_jitter_prob=0.8",)},
        {"aug_cfg": ("color_jitter_prob=0.8", "color_jitter=0.4")},
        {"aug_cfg": ("use_timm=True", "re_prob=0.9")},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        DataConfig(**settings)


def test_equal_captions_have_equal_ids() -> None:
    assert caption_id("a dog") == caption_id("a dog") >= 0
    assert caption_id("a dog") != caption_id("a cat")
