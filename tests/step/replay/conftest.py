"""Provide transformers' results for the tiny model, as the model tests do."""

from tests.model.conftest import reference  # noqa: F401  the fixture
