"""``LLM`` with the demo model: real text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pippin import LLM, SamplingParams
from pippin.errors import ContextLengthExceeded

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    with LLM(
        "demo", dtype="float32", max_model_len=512, kv_cache_memory_bytes="128M", cpus_per_rank=1
    ) as made:
        yield made


def test_it_knows_the_capital_of_france(model: LLM):
    (result,) = model.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    (output,) = result.outputs
    assert "Paris" in output.text
    assert output.finish_reason == "stop"


def test_a_batch_gives_what_each_prompt_gives_alone(model: LLM):
    prompts = ["The sea is", "def add(a, b):", "1, 2, 3, 4,", "Once upon a time"]
    alone = [model.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    together = [result.outputs[0].token_ids for result in model.generate(prompts, GREEDY)]
    assert together == alone


def test_a_seed_gives_the_same_text_again_and_choices_differ(model: LLM):
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7, n=2)
    first = model.generate("My favourite food is", params)[0]
    again = model.generate("My favourite food is", params)[0]
    assert [o.text for o in first.outputs] == [o.text for o in again.outputs]
    assert first.outputs[0].text != first.outputs[1].text


def test_token_ids_and_text_are_the_same_prompt(model: LLM):
    ids = model.get_tokenizer().encode("The sky is")
    by_ids = model.generate({"prompt_token_ids": ids}, GREEDY)[0]
    by_text = model.generate("The sky is", GREEDY)[0]
    assert by_ids.outputs[0].text == by_text.outputs[0].text
    assert by_text.prompt_token_ids == ids


def test_a_stop_string_cuts_the_text(model: LLM):
    whole = model.generate("1, 2, 3, 4,", GREEDY)[0].outputs[0].text
    stopped = model.generate(
        "1, 2, 3, 4,", SamplingParams(temperature=0.0, max_tokens=24, stop=" 7")
    )[0].outputs[0]
    assert stopped.text == whole[: whole.index(" 7")]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " 7")


def test_logprobs_of_greedy_tokens_are_the_best(model: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=1)
    result = model.generate("The capital of Italy is", params)[0]
    (output,) = result.outputs
    assert output.logprobs is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry[token].rank == 1
        assert entry[token].logprob == max(found.logprob for found in entry.values())
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    )
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_a_repeated_prompt_is_found_in_the_cache(model: LLM):
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    model.generate(prompt, GREEDY)
    assert model.generate(prompt, GREEDY)[0].num_cached_tokens >= 64


def test_more_than_the_context_is_refused(model: LLM):
    with pytest.raises(ContextLengthExceeded, match="512"):
        model.generate([5] * 512)
