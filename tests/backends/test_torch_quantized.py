"""Weights that stay at four bits, and the choice of how weights lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_tiny import DEVICES

from pippin.backends.torch import precision
from pippin.backends.torch.device import DeviceChoice
from pippin.backends.torch.precision import choose_precision
from pippin.backends.torch.quantized import Int4Linear, fits_int4
from pippin.config import ModelConfig
from pippin.errors import ConfigError, OutOfMemory
from pippin.models.quant import QuantizedTensor

CPU = torch.device("cpu")


def quantized(out: int, width: int, group: int, *, bits: int = 4, ordered: bool = True):
    rng = np.random.default_rng(out + width)
    return QuantizedTensor(
        codes=rng.integers(0, 1 << bits, (out, width), dtype=np.uint8),
        scales=rng.normal(0.01, 0.002, (out, width // group)).astype(np.float32),
        biases=rng.normal(-0.08, 0.01, (out, width // group)).astype(np.float32),
        bits=bits,
        group_size=group,
        columns=None if ordered else rng.permutation(width).astype(np.int32),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize(
    ("group", "bits", "ordered"), [(32, 4, True), (128, 4, False), (64, 3, True), (512, 2, True)]
)
def test_int4_equals_the_dequantized_weight(
    device: str, rows: int, group: int, bits: int, ordered: bool
):
    weight = quantized(64, 512, group, bits=bits, ordered=ordered)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert fits_int4(weight, torch.device(device), dtype)
    bias = torch.randn(64).to(device, dtype)
    linear = Int4Linear(weight, bias, torch.device(device), dtype)
    x = torch.randn(rows, 512).to(device, dtype)
    wanted = x.float().cpu() @ torch.from_numpy(weight.dequantize()).t() + bias.float().cpu()
    residual = torch.randn(rows, 64).to(device, dtype)
    tolerance = 1e-4 if device == "cpu" else 0.1
    torch.testing.assert_close(linear(x).float().cpu(), wanted, atol=tolerance, rtol=0)
    added = linear.add(x, residual.clone())
    torch.testing.assert_close(
        added.float().cpu(), wanted + residual.float().cpu(), atol=tolerance, rtol=0
    )
    assert linear.nbytes < 64 * 512 * 2


def test_what_does_not_fit_int4():
    assert not fits_int4(quantized(64, 512, 32, bits=6), CPU, torch.float32)
    assert not fits_int4(quantized(64, 512, 16), CPU, torch.float32)
    assert not fits_int4(quantized(63, 512, 32), CPU, torch.float32)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    def set_free(gib: float) -> None:
        size = int(gib * 2**30)
        monkeypatch.setattr(precision, "free_memory", lambda device: (size, size))

    return set_free


def choose(checkpoint: str | None, billions: float, **asked):
    choice = DeviceChoice(CPU, torch.float32, "cpu", "")
    return choose_precision(ModelConfig(**asked), choice, checkpoint, int(billions * 1e9))


def test_dense_weights_are_used_where_they_fit(memory):
    memory(16)
    plain = choose(None, 1)
    assert (plain.dtype, plain.form) == (torch.float32, "dense")
    quantized = choose("gguf-q4_1", 1)
    assert (quantized.dtype, quantized.form) == (torch.float32, "dense")
    assert "dequantised" in quantized.reason


def test_weights_that_do_not_fit_shrink_and_say_why(memory):
    memory(16)
    kept = choose("gptq-4bit", 8)
    assert (kept.dtype, kept.form) == (torch.bfloat16, "small")
    assert "29.8 GiB" in kept.reason
    halved = choose(None, 7)
    assert (halved.dtype, halved.form) == (torch.bfloat16, "dense")
    assert choose("gguf-q4_1", 7, quantization="none").form == "dense"


def test_weights_that_fit_in_no_form_are_refused(memory):
    memory(16)
    with pytest.raises(OutOfMemory, match=r"260\.8 GiB"):
        choose("gguf-q4_1", 70)
    with pytest.raises(OutOfMemory):
        choose(None, 7, dtype="float32")
    with pytest.raises(ConfigError, match="quantise"):
        choose(None, 1, quantization="4bit")
