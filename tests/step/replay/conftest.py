"""Transformers' answer for the tiny model, as the model tests have it."""

from tests.model.conftest import reference  # noqa: F401  the fixture
