"""The error that users meet."""


class ConfigError(ValueError):
    """Something a user gave is wrong: the message says what, where, expected, found, and what to do next."""
