"""What is particular to NPUs: the fused attention op, op schemas, the network interface, the visible die."""
