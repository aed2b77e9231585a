"""Make a HF folder as DeepSeek publishes it, with weights converted to bf16 and a config.json that still says fp8."""

import json

from verl_patches.layout.model_folder import INDEX, MTP_LAYERS, QUANTIZATION


def as_published(folder, public):
    """Add the keys of `public`, fp8 entry included, and an MTP layer's tensors to a tiny model's folder; return it."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    missing = {key: value for key, value in public.items() if key not in config}
    config |= missing | {MTP_LAYERS: 1, QUANTIZATION: public[QUANTIZATION]}
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / INDEX).read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = {prefix + name: torch.ones(2, 2) for name in ("eh_proj.weight", "self_attn.o_proj.weight")}
    save_file(tensors, folder / "model-mtp.safetensors")
    index["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def config_of_transformers_5(config):
    """Return config.json as transformers 5.3.0 saves what it has read from a config.json of transformers 4."""
    new = dict(config)
    yarn, theta, dtype = (new.pop(key) for key in ("rope_scaling", "rope_theta", "torch_dtype"))
    rope = {**yarn, "rope_theta": theta, "rope_type": yarn["type"]} if yarn else {"rope_theta": theta}
    new["rope_parameters"] = {"rope_type": "default", **rope}
    return {**new, "dtype": dtype, "transformers_version": "5.3.0"}
