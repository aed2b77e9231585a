"""Train DeepSeek-V3 by RL on Ascend clusters, as patches on verl. Importing this package changes nothing."""

__version__ = "0.2.0"
