"""Load tokenizers that are Python code of the model's folder, with recipe.trust_remote_code, in processes of a run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_patches.current import Current
from verl_patches.errors import RecipeError
from verl_patches.layout.model_folder import tokenizer_code
from verl_patches.shared_files import locked_folder

trusts_code: Current[bool] = Current(False)  # verl's actor_rollout_ref.model.trust_remote_code in this worker


def load_if_trusted(from_pretrained: Callable) -> Callable:
    """Wrap `AutoTokenizer.from_pretrained`: run a folder's code where the caller or the worker's run trusts it.

    transformers imports a copy in the user's cache. One process at a time makes it, as others would read half a file.
    """

    @functools.wraps(from_pretrained)
    def load(cls: type, pretrained_model_name_or_path: Any, *inputs: Any, **kwargs: Any) -> Any:
        from transformers.dynamic_module_utils import HF_MODULES_CACHE, get_class_from_dynamic_module

        def unusable(error: OSError) -> Exception:
            return RecipeError(f"{HF_MODULES_CACHE}: {error}; set HF_HOME to a folder that you can write")

        folder = pretrained_model_name_or_path
        kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code") or trusts_code.value)
        for name in tokenizer_code(Path(folder)) if kwargs["trust_remote_code"] else ():
            with locked_folder(Path(HF_MODULES_CACHE), lambda: time.sleep(0.01), unusable):
                get_class_from_dynamic_module(name, folder)
        return from_pretrained(cls, folder, *inputs, **kwargs)

    return load
