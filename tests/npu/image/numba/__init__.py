"""Stand in for numba, which vllm-ascend requires and the CPU line's environment lacks: decorators do nothing."""


def jit(*args, **kwargs):
    """Return the function itself."""
    return args[0] if args and callable(args[0]) else lambda function: function


njit = jit
