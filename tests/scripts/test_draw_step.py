"""Test that the README's picture of a step shows the figures of today's plan."""

import json
import re
from pathlib import Path

import draw_step
import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "step.svg"


@pytest.fixture(scope="module")
def plan():
    return json.loads(CliRunner().invoke(app, ["plan", "deepseekv3_256die_true_weight", "--json"]).stdout)


def missing(plan, picture):
    """Return the lines of the plan's labels that a picture does not show."""
    shown = re.findall(r"<text[^>]*>([^<]*)<", picture)
    lines = "\n".join(draw_step.labels(plan).values()).split("\n")
    return [line for line in lines if not any(line in text.replace("&gt;", ">") for text in shown)]


def test_the_picture_of_the_readme_is_that_of_the_plan(plan):
    assert missing(plan, PICTURE.read_text()) == [], f"draw it again: see {draw_step.__file__}"


def test_other_figures_are_not_those_of_the_picture(plan):
    other = json.loads(json.dumps(plan))
    other["traffic"]["weight_sync"]["received_bytes"] *= 2
    assert missing(other, PICTURE.read_text()) == ["die to die: 61.2 GB a die"]
