"""Bodies of the API's requests, as typed values. Meanings and limits are in ``server.openai``.

Fields that no struct names are either harmless (``HARMLESS``: they cannot change the answer),
refused (``REFUSED``: they would change it and nothing here does them), or unknown to us: those are
ignored, as in vLLM, and named in a response header.

Source: https://platform.openai.com/docs/api-reference and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/
"""

from __future__ import annotations

from typing import Any

import msgspec

Prompt = str | list[Any]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against traffic analysis, OpenAI's own; never added here."""


class Sampling(msgspec.Struct, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None


class ChatRequest(Sampling, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: Prompt
    logprobs: int | bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


#: Accepted without effect: they name the caller, its billing or its storage, or ask for speed.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "include_reasoning",
    }
)

#: Refused unless they have one of these values, which ask for nothing: name, values, why.
REFUSED: dict[str, tuple[Any, ...]] = {
    # constrained output: a later version
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "grammar": ("",),
    "json_schema": (),
    "regex": ("",),
    "ebnf": ("",),
    # the older form of tools
    "functions": ([],),
    "function_call": ("none",),
    # other kinds of output and of search
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "thinking_token_budget": (),
    "repetition_detection": (),
    # samplers of other engines
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "top_a": (0.0,),
    "top_n_sigma": (-1.0, 0.0),
    "mirostat": (0,),
    "dynatemp_range": (0.0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "no_repeat_ngram_size": (0,),
    "repeat_penalty": (1.0,),
    "repetition_context_size": (),
    "num_ctx": (),
    "n_predict": (),
    "max_new_tokens": (),
}
