"""torchair._contrib.custom_torch_ops, imported for its effect alone."""
