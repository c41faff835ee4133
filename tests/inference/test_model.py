"""The model of every method, as files: it answers like the method it was made of, bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from rivals import CLASSES, Course, small_config
from safetensors import safe_open

from launch.sweep import method_names
from pipeline.config import Config
from pipeline.inference import model as exported
from pipeline.inference.model import Model, export_model, load_exported, restore
from shards.base.errors import UserError

NAMES = [f"class {k}" for k in range(CLASSES)]
COUNTS = [30, 10, 5]


def small(method: str) -> Config:
    return small_config({"name": method}, train={"epochs": 2})


def answers(model: Model, course: Course) -> np.ndarray:
    return np.stack([answer.scores for answer in model.predict(course.pictures.encoded)])


def as_it_is(course: Course) -> Model:
    return Model(course.config, NAMES, COUNTS, course.method)


@pytest.mark.parametrize("name", method_names())
def test_every_method_is_the_same_after_a_way_through_files(name: str, tmp_path: Path) -> None:
    course = Course(small(name))
    for _ in course.steps():
        pass
    loaded = load_exported(export_model(course.method, course.config, NAMES, COUNTS, tmp_path))
    np.testing.assert_array_equal(answers(loaded, course), answers(as_it_is(course), course))
    images = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        then, now = course.method.scores(images), loaded.method.scores(images)
    assert list(then) == list(now)
    assert all(torch.equal(then[head], now[head]) for head in then)
    assert loaded.clean_counts.tolist() == COUNTS


@pytest.mark.parametrize("name", ["aum", "crt"])
def test_a_checkpoint_from_the_middle_answers_as_the_training_did_there(name: str) -> None:
    """The second stage of these asks another network, or another classifier, than the first."""
    course = Course(small(name))
    for _ in course.steps():
        if course.position.stage == 1:
            break
    position = asdict(course.position)
    assert position["stage"] == 1
    tensors = {key: value.clone() for key, value in course.method.state_dict().items()}
    tree = course.config.model_dump(mode="json")
    loaded = restore(tree, NAMES, course.pictures.given, COUNTS, tensors, position=position)
    np.testing.assert_array_equal(answers(loaded, course), answers(as_it_is(course), course))


def test_what_is_known_of_single_samples_stays_out_if_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(small("rrl"))
    for _ in course.steps():
        pass
    monkeypatch.setattr(exported, "LARGE", 0)
    loaded = load_exported(export_model(course.method, course.config, NAMES, COUNTS, tmp_path))
    with safe_open(tmp_path / exported.WEIGHTS, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    assert not [key for key, shape in shapes.items() if shape and shape[0] == len(course.pictures)]
    assert loaded.partial  # its head of neighbours has no neighbours
    np.testing.assert_array_equal(answers(loaded, course), answers(as_it_is(course), course))


def test_what_is_no_picture_is_told_and_the_others_are_answered() -> None:
    course = Course(small("cross_entropy"))
    good = course.pictures.encoded[0]
    mixed = [good, None, "a.jpg", np.zeros((8, 8), np.uint8), b"", memoryview(good)]
    found = [(answer.scores is not None, answer.problem) for answer in as_it_is(course).predict(mixed)]
    assert [ok for ok, _ in found] == [True, False, False, False, False, True]
    assert found[2][1] == "a picture is bytes or a uint8 array, not str"
    assert all(ok != bool(problem) for ok, problem in found)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("model.json", b"x", "does not hold a complete model"),
        ("model.json", b'{"format": 9}', "not of format 1"),
        ("model.json", b'{"format": 1}', "classes"),
        ("weights.safetensors", b"half", "does not hold a complete model"),
        ("weights.safetensors", None, "does not hold a complete model"),
    ],
)
def test_a_damaged_model_is_told_by_a_sentence(tmp_path: Path, file: str, text: bytes | None, told: str) -> None:
    course = Course(small("cross_entropy"))
    export_model(course.method, course.config, NAMES, COUNTS, tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(text)
    with pytest.raises(UserError, match=told):
        load_exported(tmp_path)


def test_a_model_whose_facts_do_not_fit_is_told_by_a_sentence(tmp_path: Path) -> None:
    course = Course(small("cross_entropy"))
    export_model(course.method, course.config, NAMES, COUNTS, tmp_path)
    facts = json.loads((tmp_path / exported.MODEL_INFO).read_text())
    width = facts["config"] | {"model": facts["config"]["model"] | {"width": 8}}
    for wrong, told in (
        ({"classes": NAMES[:2]}, "does not count every class"),
        ({"given_counts": [10**12] * 3}, "more samples than there can be"),
        ({"config": width}, "do not fit cross_entropy: size mismatch"),
    ):
        (tmp_path / exported.MODEL_INFO).write_text(json.dumps(facts | wrong))
        with pytest.raises(UserError, match=told):
            load_exported(tmp_path)


@pytest.mark.parametrize("channels_last", [False, True])
def test_pictures_to_predict_have_the_layout_of_surveys(channels_last: bool) -> None:
    course = Course(small_config({"name": "cross_entropy"}, model={"channels_last": channels_last}))
    model = as_it_is(course)
    images = model.inputs([model.prepare(picture) for picture in course.pictures.encoded[:4]])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    _, surveyed = next(course.trainer.loader.survey())
    assert torch.equal(images, surveyed[:4])
