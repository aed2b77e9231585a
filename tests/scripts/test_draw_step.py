"""Test that the README's picture of a step shows the figures of today's plan."""

import copy
import json
import re
from pathlib import Path

import draw_step
import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "step.svg"


def read_plan(config):
    return json.loads(CliRunner().invoke(app, ["plan", config, "--json"]).stdout)


@pytest.fixture(scope="module")
def plan():
    return read_plan("deepseekv3_256die_true_weight")


def missing(plan, picture):
    """Return the lines of the plan's labels that a picture does not show."""
    shown = re.findall(r"<text[^>]*>([^<]*)<", picture)
    lines = [line for label in draw_step.labels(plan).values() for line in label.split("\n")]
    return [line for line in lines if not any(line in text.replace("&gt;", ">") for text in shown)]


def test_the_picture_of_the_readme_is_that_of_the_plan(plan):
    assert missing(plan, PICTURE.read_text()) == [], f"draw it again: see {draw_step.__file__}"


def test_a_read_plan_other_figures_is_not_that_of_the_picture(plan):
    other = copy.deepcopy(plan)
    other["traffic"]["weight_sync"]["received_bytes"] *= 2
    assert missing(other, PICTURE.read_text()) == ["die to die: 61.2 GB a die"]


def test_another_preset_is_drawn(tmp_path):
    draw_step.draw(read_plan("moonlight_16die")).savefig(tmp_path / "other.png")
    assert (tmp_path / "other.png").stat().st_size > 20_000
