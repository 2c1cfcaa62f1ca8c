"""``LLM`` over a fake engine: what goes in, what comes out, what is refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pippin import LLM, SamplingParams, llm
from pippin.errors import ConfigError, ContextLengthExceeded, EngineError, InvalidRequest
from pippin.types.message import Ready
from pippin.types.request import FinishReason, Logprobs, Request, SequenceOutput

sys.path.append(str(Path(__file__).parents[1] / "server"))
from server_fakes import IM_END, MAX_MODEL_LEN, FakeEngine, ids, make_tokenizer

ANSWER = "The quick brown fox"


class FakeCore:
    """Recites ``ANSWER`` and ends, a token a step."""

    def __init__(self) -> None:
        self.ready: Ready = FakeEngine().ready
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.closed = False
        self.error: str | None = None
        self._left: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._left[request.request_id] = [*ids(ANSWER), IM_END]

    def abort(self, request_id: str) -> None:
        if self._left.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def step(self) -> list[SequenceOutput]:
        return [
            self._next(request) for request in self.requests if request.request_id in self._left
        ]

    def _next(self, request: Request) -> SequenceOutput:
        left = self._left[request.request_id]
        token = left.pop(0)
        made = len(ANSWER) + 1 - len(left)
        reason = None
        if token == IM_END:
            reason = FinishReason.STOP
        elif made == request.max_tokens:
            reason = FinishReason.LENGTH
        if self.error is not None:
            reason = FinishReason.ERROR
        if reason:
            del self._left[request.request_id]
        wanted = request.params.logprobs
        first = made == 1
        return SequenceOutput(
            request_id=request.request_id,
            token_ids=[token],
            finish_reason=reason,
            error=self.error,
            num_cached_tokens=2 if first else 0,
            logprobs=None if wanted is None else [Logprobs([token, 5, 6], [-0.5, -0.1, -0.2], 7)],
            prompt_logprobs=(
                [None, *(Logprobs([t], [-1.0], 1) for t in request.prompt_token_ids[1:])]
                if first and request.params.prompt_logprobs is not None
                else None
            ),
        )

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    fake = FakeCore()
    monkeypatch.setattr(llm.files, "resolve", lambda model, **how: model)
    monkeypatch.setattr(llm, "load_tokenizer", lambda files, name, **more: make_tokenizer())
    monkeypatch.setattr(llm.core, "load", lambda config, clock: fake)
    return fake


@pytest.fixture
def model(core: FakeCore) -> Iterator[LLM]:
    with LLM("fake") as made:
        yield made


LONG = SamplingParams(max_tokens=100)


def test_text_in_text_out(model: LLM, core: FakeCore):
    (result,) = model.generate("Hello", LONG)
    assert (result.prompt, result.prompt_token_ids) == ("Hello", ids("Hello"))
    assert result.finished
    assert result.num_cached_tokens == 2
    (output,) = result.outputs
    assert (output.index, output.text) == (0, ANSWER)
    assert output.token_ids == [*ids(ANSWER), IM_END]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)
    assert core.requests[0].eos_token_ids == (IM_END,)


def test_results_come_in_the_order_of_the_prompts(model: LLM):
    params = [SamplingParams(max_tokens=n) for n in (9, 1, 5)]
    results = model.generate(["a", "b", "c"], params)
    assert [result.prompt for result in results] == ["a", "b", "c"]
    assert [result.outputs[0].text for result in results] == [ANSWER[:9], ANSWER[:1], ANSWER[:5]]
    assert {result.outputs[0].finish_reason for result in results} == {"length"}


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ({"prompt": "ab"}, [ids("ab")]),
        ({"prompt_token_ids": [7, 8]}, [[7, 8]]),
        ([{"prompt_token_ids": [7, 8]}, "c"], [[7, 8], ids("c")]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        ((7, 8), [[7, 8]]),
    ],
)
def test_shapes_of_prompts(model: LLM, prompts: Any, wanted: list[list[int]]):
    results = model.generate(prompts, SamplingParams(max_tokens=1))
    assert [result.prompt_token_ids for result in results] == wanted


def test_no_prompts_no_results(model: LLM):
    assert model.generate([]) == []


def test_a_stop_string_ends_and_aborts(model: LLM, core: FakeCore):
    (result,) = model.generate("x", SamplingParams(max_tokens=100, stop="brown"))
    (output,) = result.outputs
    assert output.text == "The quick "
    assert (output.finish_reason, output.stop_reason) == ("stop", "brown")
    assert output.token_ids == ids("The quick brown")
    assert core.aborted == [core.requests[0].request_id]
    (kept,) = model.generate(
        "x", SamplingParams(max_tokens=100, stop=["brown"], include_stop_str_in_output=True)
    )
    assert kept.outputs[0].text == "The quick brown"


def test_choices_share_the_prompt_and_differ_in_number(model: LLM, core: FakeCore):
    (result,) = model.generate("x", SamplingParams(n=3, max_tokens=2, seed=11))
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert [request.choice for request in core.requests] == [0, 1, 2]
    assert {request.seed for request in core.requests} == {11}
    assert len({request.request_id for request in core.requests}) == 3


def test_unseeded_requests_get_different_seeds(model: LLM, core: FakeCore):
    model.generate(["x", "x"], LONG)
    first, second = core.requests
    assert first.seed != second.seed


def test_logprobs(model: LLM):
    (result,) = model.generate("abc", SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=0))
    (output,) = result.outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == 2
    token = ids("T")[0]
    assert list(output.logprobs[0]) == [token, 5, 6]
    assert output.logprobs[0][token] == llm.Logprob(-0.5, 7, "T")
    assert [output.logprobs[0][t].rank for t in (5, 6)] == [1, 2]
    assert output.cumulative_logprob == pytest.approx(-1.0)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in result.prompt_logprobs[1:] if entry] == ids("bc")


def test_the_context_bounds_the_length(model: LLM, core: FakeCore):
    model.generate([3] * (MAX_MODEL_LEN - 4), SamplingParams(max_tokens=None))
    model.generate([3] * (MAX_MODEL_LEN - 4), SamplingParams(max_tokens=50))
    assert [request.max_tokens for request in core.requests] == [4, 4]
    with pytest.raises(ContextLengthExceeded, match=str(MAX_MODEL_LEN)):
        model.generate([3] * MAX_MODEL_LEN)


def test_nothing_runs_when_one_prompt_is_bad(model: LLM, core: FakeCore):
    with pytest.raises(InvalidRequest, match="empty"):
        model.generate(["fine", ""])
    assert core.requests == []


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ("", None, "empty"),
        ({"prompt_token_ids": []}, None, "empty"),
        ({"text": "x"}, None, "prompt_token_ids"),
        ({}, None, "prompt_token_ids"),
        ([[10**6]], None, "outside"),
        ([[1, "a"]], None, "integers"),
        ([[-1]], None, "outside"),
        (["a", "b"], [SamplingParams()], "2 prompts but 1"),
        ("a", SamplingParams(max_tokens=0), "max_tokens"),
        ("a", SamplingParams(stop_token_ids=[10**6]), "outside the vocabulary"),
        ("a", SamplingParams(bad_words=[" "]), "blank"),
    ],
)
def test_bad_input_is_refused(model: LLM, prompts: Any, params: Any, says: str):
    with pytest.raises(InvalidRequest, match=says):
        model.generate(prompts, params)


def test_priorities(model: LLM, core: FakeCore):
    model.generate(["a", "b"], LONG, priority=[3, 1])
    assert [request.priority for request in core.requests] == [3, 1]
    with pytest.raises(InvalidRequest, match="priorities"):
        model.generate(["a", "b"], LONG, priority=[3])


def test_chat_uses_the_template(model: LLM, core: FakeCore):
    (result,) = model.chat([{"role": "user", "content": "Hi"}], LONG)
    assert result.outputs[0].text == ANSWER
    template = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert result.prompt_token_ids == model.get_tokenizer().encode(template)
    several = model.chat([[{"role": "user", "content": c}] for c in "ab"], LONG)
    assert len(several) == 2
    with pytest.raises(InvalidRequest, match="messages"):
        model.chat([])


def test_an_engine_error_is_raised_and_the_rest_aborted(model: LLM, core: FakeCore):
    core.error = "no memory"
    with pytest.raises(EngineError, match="no memory"):
        model.generate(["a", "b"], LONG)
    assert not core.has_unfinished()


def test_an_interrupt_aborts_everything(model: LLM, core: FakeCore, monkeypatch):
    def interrupted() -> list[SequenceOutput]:
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(["a", "b"], LONG)
    assert len(core.aborted) == 2


def test_options_are_those_of_the_flags(core: FakeCore, monkeypatch):
    seen = []
    monkeypatch.setattr(llm.core, "load", lambda config, clock: seen.append(config) or core)
    LLM("m", max_model_len="8k", dtype="float32", enable_prefix_caching=False, seed=3)
    assert seen[0].model.model == "m"
    assert (seen[0].model.max_model_len, seen[0].model.seed) == (8000, 3)
    assert seen[0].cache.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"colour": 1}, "colour"),
        ({"port": 8000}, "server"),
        ({"data_parallel_size": 2}, "later release"),
        ({"dtype": "int3"}, "dtype"),
    ],
)
def test_bad_options(core: FakeCore, given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        LLM("m", **given)


def test_a_closed_model_says_so(core: FakeCore):
    model = LLM("m")
    model.close()
    model.close()
    assert core.closed
    with pytest.raises(EngineError, match="closed"):
        model.generate("a")


def test_default_sampling_is_the_models(core: FakeCore, monkeypatch):
    tokenizer = make_tokenizer(default_sampling={"temperature": 0.6, "top_p": 0.9})
    monkeypatch.setattr(llm, "load_tokenizer", lambda files, name, **more: tokenizer)
    model = LLM("m")
    model.generate("a")
    params = core.requests[0].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, 16)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": None}, "stop", ()),
        ({"bad_words": None}, "bad_words", ()),
        ({"stop_token_ids": [1, 2]}, "stop_token_ids", (1, 2)),
        ({"allowed_token_ids": None}, "allowed_token_ids", None),
    ],
)
def test_sampling_params_take_what_vllms_take(given: dict[str, Any], field: str, value: Any):
    assert getattr(SamplingParams(**given), field) == value


@pytest.mark.parametrize(
    "given",
    [{"stop": ""}, {"stop": [""]}, {"stop": [1]}, {"stop_token_ids": "ab"},
     {"allowed_token_ids": []}, {"temperature": math.nan}],
)  # fmt: skip
def test_sampling_params_refuse_the_rest(given: dict[str, Any]):
    with pytest.raises(InvalidRequest):
        SamplingParams(**given)
