from __future__ import annotations

import pytest
from scheduler_oracle import EOS, request

from pippin.engine.sequence import Sequence
from pippin.types.request import FinishReason


def sequence(*output: int, max_tokens: int = 8, **params: object) -> Sequence:
    seq = Sequence(request("r", [5, 6, 7], max_tokens, **params), (0, 0.0, 0), 1)
    seq.tokens += output
    return seq


def test_end_of_sequence_ends_unless_ignored() -> None:
    assert sequence(3, EOS, ignore_eos=False).ending(99) == (FinishReason.STOP, None)
    assert sequence(3, EOS, ignore_eos=True).ending(99) is None
    assert sequence(EOS, 3, ignore_eos=False).ending(99) is None


def test_stop_ids_end_and_are_named() -> None:
    assert sequence(4, stop_token_ids=(9, 4)).ending(99) == (FinishReason.STOP, 4)
    # A stop id that also ends sequences is an ordinary end, unless that is ignored.
    both = {"stop_token_ids": (EOS,)}
    assert sequence(EOS, ignore_eos=False, **both).ending(99) == (FinishReason.STOP, None)
    assert sequence(EOS, ignore_eos=True, **both).ending(99) == (FinishReason.STOP, EOS)


def test_nothing_stops_before_min_tokens() -> None:
    params = {"min_tokens": 3, "stop_token_ids": (4,), "ignore_eos": False}
    assert sequence(1, 4, **params).ending(99) is None
    assert sequence(1, 1, 4, **params).ending(99) == (FinishReason.STOP, 4)
    assert sequence(1, EOS, **params).ending(99) is None


@pytest.mark.parametrize("count", [1, 2, 8])
def test_length(count: int) -> None:
    tokens = [1] * count
    assert sequence(*tokens, max_tokens=count).ending(99) == (FinishReason.LENGTH, None)
    assert sequence(*tokens, max_tokens=count + 1).ending(99) is None
    # The context is full, whatever min_tokens says.
    full = sequence(*tokens, max_tokens=20, min_tokens=20).ending(3 + count)
    assert full == (FinishReason.LENGTH, None)


def test_stop_is_preferred_to_length() -> None:
    seq = sequence(1, 4, max_tokens=2, stop_token_ids=(4,))
    assert seq.ending(99) == (FinishReason.STOP, 4)


def test_sampling_state_holds_what_was_generated() -> None:
    seq = sequence(1, 2, stop_token_ids=(9,), ignore_eos=False)
    state = seq.sampling_state()
    assert state.prompt_token_ids == [5, 6, 7]
    assert state.output_token_ids == [1, 2]
    assert state.stop_token_ids == {EOS, 9}
    # As in vLLM, min_tokens keeps the end of sequence away even where it would not end anything.
    assert sequence(ignore_eos=True).sampling_state().stop_token_ids == {EOS}


def test_a_moved_request_brings_its_output_and_no_prompt_logprobs() -> None:
    seq = Sequence(request("r", [1, 2], output=[3, 4], prompt_logprobs=1), (0, 0.0, 0), 1)
    assert seq.tokens == [1, 2, 3, 4]
    assert seq.num_output == 2
    assert not seq.needs_prompt_logits
    assert Sequence(request("r", [1, 2], prompt_logprobs=1), (0, 0.0, 0), 1).needs_prompt_logits
    assert not Sequence(request("r", [1], prompt_logprobs=1), (0, 0.0, 0), 1).needs_prompt_logits


@pytest.mark.parametrize(("max_tokens", "computed"), [(0, 3), (1, 3), (2, 4)])
def test_the_last_token_is_never_computed(max_tokens: int, computed: int) -> None:
    assert sequence(max_tokens=max_tokens).max_computed == computed
