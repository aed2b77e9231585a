"""Write a tiny tokenizer of Moonlight's and Kimi-K2's kind: Python code in the model's folder, over tiktoken, and slow.

As theirs it has no tokenizer.json, takes another way in `encode` and `decode` where it gets keywords, names its code in
auto_map, and has a chat template with a default system turn, tools, and calls that are written by their ids.
"""

import base64
import json
import shutil
from pathlib import Path

SYSTEM = "You are tiny."
TEMPLATE = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>"
    f"{SYSTEM}<|im_end|>{{% endif %}}"
    "{{ '<|im_' + m.role + '|>' if m.role in ('user', 'assistant') else '<|im_system|>' }}"
    "{{ m.name or m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
SPECIAL_TOKENS = (
    "[BOS]", "[EOS]", "[PAD]", "[UNK]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|im_middle|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
WORDS = "the is an in er on th ou 10 What sum of and ad de".split()  # tokens of more than one byte
FILE = "tokenization_tiny.py"
CODE = """
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer


class TinyTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, size=512, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        names = {number: str(token) for number, token in (added_tokens_decoder or {}).items()}
        special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), size)}
        self.model = tiktoken.Encoding("tiny", pat_str=r"\\d| ?\\w+|\\W", mergeable_ranks=ranks, special_tokens=special)
        self.letters = bytes_to_unicode()
        self.bytes = {letter: byte for byte, letter in self.letters.items()}
        pieces = map(self.model.decode_single_token_bytes, range(size))
        self.decoder = dict(enumerate("".join(self.letters[byte] for byte in piece) for piece in pieces))
        self.encoder = {token: number for number, token in self.decoder.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.decoder)

    def get_vocab(self):
        return self.encoder

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs:
            return super().encode(text, **kwargs)
        if allow_special_tokens:
            return self.model.encode(text, allowed_special="all")
        return self.model.encode(text, disallowed_special=())

    def decode(self, token_ids, **kwargs):
        if kwargs:
            return super().decode(token_ids, **kwargs)
        return self.model.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def _tokenize(self, text, **kwargs):
        return [self.decoder[number] for number in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.encoder.get(token)

    def _convert_id_to_token(self, index):
        return self.decoder.get(index)

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes[letter] for letter in "".join(tokens)).decode("utf-8", "replace")
"""
CONFIG_CODE = """
from transformers.configuration_utils import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "deepseek_v3"
"""


def make_code_model(model: Path, folder: Path) -> Path:
    """Copy the tiny model to `folder`, with a tokenizer and a class of its configuration that are code; return it."""
    shutil.copytree(model, folder)
    for path in folder.glob("*token*"):
        path.unlink()
    pieces = [bytes([byte]) for byte in range(256)]
    for word in WORDS:  # with its begins, as byte-pair merges need them
        pieces += [word[:end].encode() for end in range(2, len(word) + 1) if word[:end].encode() not in pieces]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        number: {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for number, token in enumerate(SPECIAL_TOKENS, len(pieces))
    }
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL_TOKENS[:4], strict=True))
    settings = {"auto_map": {"AutoTokenizer": [f"{FILE[:-3]}.TinyTokenizer", None]}, "tokenizer_class": "TinyTokenizer"}
    settings |= {"added_tokens_decoder": added, "additional_special_tokens": SPECIAL_TOKENS[4:], **names}
    settings |= {"chat_template": TEMPLATE, "clean_up_tokenization_spaces": False, "model_max_length": 2560}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / FILE).write_text(CODE)
    (folder / "configuration_tiny.py").write_text(CONFIG_CODE)
    ids = {"bos_token_id": len(pieces), "eos_token_id": len(pieces) + 1, "pad_token_id": len(pieces) + 2}
    for name, more in (("config.json", {"auto_map": {"AutoConfig": "configuration_tiny.TinyConfig"}}),
                       ("generation_config.json", {"eos_token_id": [len(pieces) + 1, len(pieces) + 4]})):  # fmt: skip
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | ids | more))
    return folder
