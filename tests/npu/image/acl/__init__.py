"""Stand in for CANN's Python package as MindSpeed and vllm-ascend import it."""


def get_soc_name() -> str:
    """Return the name of an Atlas A3 die."""
    return "Ascend910_9391"
