"""Generate with transformers in fp32, the reference of generate's greedy texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def greedy_texts(folder: Path, prompts: list[Any], count: int) -> list[tuple[int, str]]:
    """Return (number of tokens, their text) of the response to each prompt, messages or text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype="float32", attn_implementation="eager").eval()
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            made = model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=tokenizer.pad_token_id)
        tokens = made[0, ids.shape[1] :].tolist()
        found.append((len(tokens), tokenizer.decode(tokens, skip_special_tokens=True)))
    return found
