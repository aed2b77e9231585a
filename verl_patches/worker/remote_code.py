"""Load tokenizers that are Python code of the model's folder, with recipe.trust_remote_code, in processes of a run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_patches.current import Current
from verl_patches.errors import RecipeError
from verl_patches.shared_files import locked_folder

trusts_code: Current[bool] = Current(False)  # verl's actor_rollout_ref.model.trust_remote_code in this worker


def load_if_trusted(load: Callable) -> Callable:
    """Wrap verl's hf_tokenizer and hf_processor, of whose calls some pass no trust_remote_code, to pass it always."""

    @functools.wraps(load)
    def load_with_trust(name_or_path: Any, *args: Any, trust_remote_code: bool | None = None, **kwargs: Any) -> Any:
        return load(name_or_path, *args, trust_remote_code=bool(trust_remote_code or trusts_code.value), **kwargs)

    return load_with_trust


def import_in_turn(load: Callable) -> Callable:
    """Wrap transformers' get_class_from_dynamic_module so that one process of a user at a time copies and imports."""

    @functools.wraps(load)
    def load_class(*args: Any, **kwargs: Any) -> type:
        from transformers.dynamic_module_utils import HF_MODULES_CACHE

        text = "; set HF_HOME to a folder that you can write"
        folder = Path(HF_MODULES_CACHE)
        with locked_folder(folder, lambda: time.sleep(0.01), lambda error: RecipeError(f"{folder}: {error}{text}")):
            return load(*args, **kwargs)

    return load_class
