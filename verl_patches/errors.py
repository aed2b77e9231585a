"""The errors that users meet; their messages say what, where, expected, found, and what to do next."""


class ConfigError(ValueError):
    """Something that a user gave is wrong: a configuration key, an argument, a file or a catalogue row."""


class RecipeError(RuntimeError):
    """The run cannot go on, or its result could not be trusted: a check of this package failed at run time.

    patching/engine.py derives PatchError from it: a row of the catalogue could not be made active, or is no longer.
    """
