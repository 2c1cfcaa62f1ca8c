"""Small tokenizers of each kind, for tests that need no model."""

from __future__ import annotations

from functools import cache

from text_samples import samples
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import Tokenizer as Backend

from pippin.models.tokenizer_parts import TokenizerParts
from pippin.server.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        samples(600, seed=1),
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return backend


@cache
def byte_fallback_backend() -> Backend:
    """As Llama 2's: pieces with U+2581, a token for each byte, one space dropped at the start."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "ab", "▁ab", "é", "好", "▁好"]
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "好")]
    backend = Backend(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@cache
def wordpiece_backend() -> Backend:
    """A decoder that is no byte mapping."""
    words = ["[UNK]", "[SEP]", "un", "##aff", "##able", "hello", "world", "!", ",", "##s"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    return backend


def tokenizer(backend: Backend | None = None, **values: object) -> Tokenizer:
    backend = byte_level_backend() if backend is None else backend
    parts = TokenizerParts(
        backend=backend,
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        bos_token_id=backend.token_to_id("<|im_start|>"),
        eos_token_ids=tuple(
            token_id
            for token in ("<|im_end|>", "</s>", "[SEP]")
            if (token_id := backend.token_to_id(token)) is not None
        ),
        chat_templates={"default": CHATML},
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        **values,  # type: ignore[arg-type]
    )
    return Tokenizer(parts)
