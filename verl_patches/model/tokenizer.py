"""Load tokenizers, among them those that are Python code in the model's folder, as Moonlight's and Kimi-K2's are.

That code runs only with recipe.trust_remote_code, and transformers never asks for it on the terminal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_patches.current import Current
from verl_patches.layout.model_folder import require_whole_folder
from verl_patches.values import loading_errors

trusts_code: Current[bool] = Current(False)  # recipe.trust_remote_code of the run that this worker process belongs to


def read_tokenizer(place: str | Path, trusted: bool, expected: str = "a tokenizer", local: bool = True) -> Any:
    """Return the tokenizer of a model's folder or id; ConfigError without one. `trusted`: whether its code may run."""
    from transformers import AutoTokenizer

    with loading_errors(f"{place}: expected {expected}", str(place)):
        require_whole_folder(Path(place), trusted)
        return AutoTokenizer.from_pretrained(place, local_files_only=local, trust_remote_code=trusted)


def load_if_trusted(load: Callable) -> Callable:
    """Wrap verl's hf_tokenizer and hf_processor: never ask on the terminal.

    verl passes trust_remote_code in some of its calls only; in a worker the recipe's key decides for all of them.
    """

    @functools.wraps(load)
    def load_with_trust(name_or_path: Any, *args: Any, trust_remote_code: bool | None = None, **kwargs: Any) -> Any:
        trusted = bool(trust_remote_code) or trusts_code.value
        return load(name_or_path, *args, trust_remote_code=trusted, **kwargs)

    return load_with_trust
