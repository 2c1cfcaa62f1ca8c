"""Write the demo model as Hugging Face directories, for peers that take no GGUF file.

    python benchmarks/make_peer_models.py FOLDER

Makes FOLDER/smollm2-f32 (safetensors, float32) and FOLDER/smollm2.gguf (a link to the original).
The weights are the GGUF's own, dequantised, so that every server runs the same model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pippin.config import environment
from pippin.models.files import resolve

#: Fields that the GGUF loader of transformers leaves and a plain directory must not have.
_LEFT_OVERS = ("quantization_config", "_name_or_path", "_model_name_or_path", "pretraining_tp")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    file = resolve("demo", home=environment().home).path
    link = folder / "smollm2.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    fields = {k: v for k, v in loaded.config.to_dict().items() if k not in _LEFT_OVERS}
    model = LlamaForCausalLM(LlamaConfig(**{**fields, "rms_norm_eps": 1e-5, "dtype": "float32"}))
    model.load_state_dict({k: v.float() for k, v in loaded.state_dict().items()}, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "smollm2-f32")
    tokenizer.save_pretrained(folder / "smollm2-f32")
    print(folder / "smollm2-f32")


if __name__ == "__main__":
    main()
