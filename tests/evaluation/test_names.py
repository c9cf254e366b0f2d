"""Class names and templates: where they come from, and what is said when they are wrong."""

from pathlib import Path

import pytest

from shardclip.errors import UserError
from shardclip.training.evaluation import names
from shardclip.training.evaluation.names import Names, find, prompts


def test_imagenet_is_open_clips():
    from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    words = names.imagenet()
    expected = [template(IMAGENET_CLASSNAMES[7]) for template in OPENAI_IMAGENET_TEMPLATES]
    assert prompts(words.classnames[7:8], words.templates) == expected
    assert (len(words.classnames), len(words.templates)) == (1000, 80)


def test_a_name_with_braces_is_taken_as_it_is():
    assert prompts(["set {}", "{c}"], ["a {c}", "{} of"]) == ["a set {}", "set {} of", "a {c}", "{c} of"]


def test_files_beside_the_data_serve_its_shards(tmp_path: Path):
    (tmp_path / "test").mkdir()
    (tmp_path / "classnames.txt").write_text("red\nblue\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("all {c}\n")
    for data in (tmp_path, tmp_path / "test", tmp_path / "test" / "{0..3}.tar"):
        assert find(str(data), None, None, []) == Names(("red", "blue"), ("all {c}",))


def test_files_that_are_named_go_before_those_beside_the_data(tmp_path: Path):
    (tmp_path / "classnames.txt").write_text("red\n")
    (tmp_path / "mine.txt").write_text("rot\n")
    assert find(str(tmp_path), str(tmp_path / "mine.txt"), None, ["folder"]).classnames == ("rot",)


def test_folders_name_classes(tmp_path: Path):
    found = find(str(tmp_path), None, None, ["great_tit", "robin"])
    assert found == Names(("great tit", "robin"), names.DEFAULT_TEMPLATES)


def test_the_digest_tells_words_apart():
    digests = {Names(("a", "b"), ("{c}",)).digest, Names(("b", "a"), ("{c}",)).digest}
    assert len(digests) == 2
    assert Names(("a", "b"), ("{c}",)).digest in digests


@pytest.mark.parametrize(
    ("classnames", "templates", "message"),
    [
        (None, "{c}\n", "class names are not known"),
        ("a\n\nb\n", "{c}\n", "line 2 is empty"),
        ("", "{c}\n", "it is empty"),
        ("a\n", "a photo\n", "no {c} or {}"),
    ],
)
def test_wrong_words_are_said(tmp_path: Path, classnames: str | None, templates: str, message: str):
    if classnames is not None:
        (tmp_path / "classnames.txt").write_text(classnames)
    (tmp_path / "zeroshot_classification_templates.txt").write_text(templates)
    with pytest.raises(UserError, match=message):
        find(str(tmp_path), None, None, [])
