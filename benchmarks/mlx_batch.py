"""The whole engine on MLX against mlx-lm's own BatchGenerator: same weights, same process.

    python benchmarks/mlx_batch.py
    python benchmarks/mlx_batch.py demo --prompt 12 --output 8     (MLX's CPU build: minutes)

The default model is a random Llama of ``--layers`` layers of ``--hidden`` columns, float32.

Ours is ``EngineCore`` as it serves (scheduler, budget, paged KV, sampler), without HTTP; theirs is
``BatchGenerator.next``. Rounds alternate, each with fresh random prompts of the same lengths for
both, greedy. Time is the process's CPU time (it holds on a busy machine) and wall time; printed are
output tokens a second and the ratio of ours to theirs: of the rounds together, and the median of
the rounds. ``--profile`` prints where our rounds' time goes instead.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import torch
from mlx.utils import tree_unflatten
from mlx_lm.generate import BatchGenerator
from transformers import LlamaConfig, LlamaForCausalLM

from pippin.backends.description import read_config
from pippin.backends.mlx import runner as mlx_runner
from pippin.backends.mlx.model import MODULES, SUPPORTED, _arguments
from pippin.backends.mlx.rope import Rope
from pippin.backends.mlx.runner import MlxRunner
from pippin.config import CacheConfig, Config, ModelConfig, environment
from pippin.engine import core
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import ModelFiles, resolve
from pippin.types.request import Request, SamplingParams


@dataclass(frozen=True)
class Spent:
    cpu: float
    wall: float
    tokens: list[list[int]]


def library_model(files: ModelFiles, runner: MlxRunner) -> Any:
    """mlx-lm's own model with the very arrays of ours (its rope, its attention)."""
    config = read_config(open_checkpoint(files).config, SUPPORTED)
    stage = runner._model
    tied = not hasattr(stage.head, "weight")
    module = importlib.import_module(f"mlx_lm.models.{MODULES[config.model_type]}")
    arguments = _arguments(module.ModelArgs, config, tied)
    parameters = config.rope_parameters or {}
    if parameters.get("rope_type", "default") != "default":
        arguments["rope_scaling"] = dict(parameters)
    model = module.Model(module.ModelArgs(**arguments))
    for layer, own in zip(model.model.layers, stage.layers, strict=True):
        parts = own.leaf_modules()
        flat = [
            (name, part)
            for name, part in _leaves(parts)
            if not isinstance(part, Rope) and not name.endswith("rope")
        ]
        layer.update_modules(tree_unflatten(flat))
    model.model.embed_tokens, model.model.norm = stage.embedding, stage.norm
    if not tied:
        model.lm_head = stage.head
    return model


def _leaves(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict) and type(tree) is dict:
        found = []
        for name, part in tree.items():
            found += _leaves(part, f"{prefix}.{name}" if prefix else name)
        return found
    return [(prefix, tree)]


def ours(engine: core.EngineCore, prompts: list[list[int]], output: int, number: int) -> Spent:
    names = [f"{number}-{i}" for i in range(len(prompts))]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    cpu, wall = time.process_time(), time.perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                params=params,
                seed=0,
                max_tokens=output,
            )
        )
    while engine.has_unfinished():
        for result in engine.step():
            tokens[result.request_id].extend(result.token_ids)
    return Spent(
        time.process_time() - cpu, time.perf_counter() - wall, [tokens[name] for name in names]
    )


def theirs(model: Any, prompts: list[list[int]], output: int) -> Spent:
    cpu, wall = time.process_time(), time.perf_counter()
    generator = BatchGenerator(model, max_tokens=output, completion_batch_size=len(prompts))
    uids = generator.insert([list(prompt) for prompt in prompts])
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    left = set(uids)
    while left:
        _, responses = generator.next()
        for response in responses:
            tokens[response.uid].append(response.token)
            if response.finish_reason is not None:
                left.discard(response.uid)
    spent = Spent(time.process_time() - cpu, time.perf_counter() - wall, [tokens[u] for u in uids])
    generator.close()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="random")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--spread", type=int, default=0, help="prompts differ by so many tokens")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.model == "random":
            args.model = directory
            write_random(directory, args.layers, args.hidden)
        compare(args)


def write_random(directory: str, layers: int, hidden: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 96),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def compare(args: argparse.Namespace) -> None:
    loaded: list[MlxRunner] = []
    load = mlx_runner.load

    def remember(*arguments: Any, **options: Any) -> MlxRunner:
        loaded.append(load(*arguments, **options))
        return loaded[-1]

    mlx_runner.load = remember
    settings = ModelConfig(model=args.model, backend="mlx", device="cpu")
    engine = core.load(Config(model=settings, cache=CacheConfig(kv_cache_bytes=256 << 20)))
    (runner,) = loaded
    files = resolve(args.model, home=environment().home)
    model = library_model(files, runner)
    source = random.Random(0)

    def prompts() -> list[list[int]]:
        lengths = [args.prompt - i * args.spread // args.sequences for i in range(args.sequences)]
        return [[source.randrange(3, runner.info.vocab_size) for _ in range(n)] for n in lengths]

    warm = prompts()
    first = ours(engine, warm, 4, -1)
    # mlx-lm's compiled functions stay on for it, as a user of it has them.
    mx.enable_compile()
    second = theirs(model, warm, 4)
    same = sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True))
    print(f"{args.model}: {args.sequences} x ({args.prompt} + {args.output}) tokens")
    own: list[Spent] = []
    other: list[Spent] = []
    profiler = cProfile.Profile()
    for number in range(args.rounds):
        batch = prompts()
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            if which:
                mx.enable_compile()
                other.append(theirs(model, batch, args.output))
            else:
                mx.disable_compile()
                if args.profile:
                    profiler.enable()
                own.append(ours(engine, batch, args.output, number))
                profiler.disable()
        same += sum(a == b for a, b in zip(own[-1].tokens, other[-1].tokens, strict=True))
    if args.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    count = args.sequences * args.output
    for kind in ("cpu", "wall"):
        a, b = [getattr(s, kind) for s in own], [getattr(s, kind) for s in other]
        ratios = [theirs_ / ours_ for ours_, theirs_ in zip(a, b, strict=True)]
        print(
            f"{kind:>4}: ours {count * len(a) / sum(a):7.1f} tok/s,"
            f" mlx-lm {count * len(b) / sum(b):7.1f} tok/s,"
            f" ratio {sum(b) / sum(a):.3f}, median of rounds {statistics.median(ratios):.3f},"
            f" best of each {min(b) / min(a):.3f}"
        )
    print(f"the same tokens: {same} of {args.sequences * (args.rounds + 1)} sequences")


if __name__ == "__main__":
    main()
