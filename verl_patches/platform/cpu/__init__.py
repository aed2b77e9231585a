"""Stand-ins that let upstream run on a machine without an accelerator. Every one is a row of platform `cpu` only."""
