"""Read the config.json of models of DeepSeek-V3's family from configs/model."""

import json
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1] / "configs" / "model"
MOONLIGHT, KIMI_K2 = (json.loads((_FOLDER / f"{name}.json").read_text()) for name in ("moonlight_16b", "kimi_k2"))
