"""``python -P convert_tokenizer.py DIRECTORY TARGET``: a slow tokenizer as one file.

A process of its own, so that the API process never holds transformers. Imports nothing of Pippin.
"""

from __future__ import annotations

import sys


def convert(directory: str, target: str) -> None:
    """Write ``tokenizer.json`` to ``target``. Raises what transformers raises."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, use_fast=True, local_files_only=True)
    tokenizer.backend_tokenizer.save(target)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
