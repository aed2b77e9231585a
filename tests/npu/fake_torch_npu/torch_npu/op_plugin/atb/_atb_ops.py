"""torch_npu.op_plugin.atb._atb_ops."""


def _register_atb_extensions():
    """Nothing to register: no op of ATB is here."""
