"""A whole pipeline inside one process: real links and real stages, workers as threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pippin import config
from pippin.clock import SystemClock
from pippin.engine.core import EngineCore, Stages
from pippin.engine.followers import Followers
from pippin.engine.pipeline import Pipeline, Wake, announcement, greet
from pippin.engine.spec import StageSpec
from pippin.engine.split import ranges
from pippin.engine.start import assemble
from pippin.engine.worker import Worker
from pippin.errors import LinkError, PippinError
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import local_directory
from pippin.transport.link import Link
from pippin.types.request import Request, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "backends"))

from pippin.backends.torch.runner import load_checkpoint


class Ring:
    """An engine whose stages hold ``counts`` layers of the model in ``path``.

    ``wrap`` may change a worker's runner (by stage) to make it slow or faulty.
    """

    def __init__(
        self,
        path: Path,
        counts: Sequence[int],
        wrap: Callable[[int, Any], Any] = lambda stage, runner: runner,
        **sections: dict[str, Any],
    ) -> None:
        sections.setdefault("cache", {"kv_cache_bytes": 4 << 20})
        sections.setdefault("model", {}).update(model=str(path), device="cpu", dtype="float32")
        self.config = config.build(sections)
        files = local_directory("tiny", path)
        layers = ranges(counts)
        stages = len(layers)
        checkpoint = open_checkpoint(files)

        def load(first: int, last: int) -> Any:
            # The compiled kernels share one pool of threads: they are for one stage a process.
            return load_checkpoint(
                self.config,
                checkpoint,
                name="tiny",
                fingerprint="tiny",
                first_layer=first,
                last_layer=last,
                native=False,
            )

        runners = [wrap(stage, load(*held)) for stage, held in enumerate(layers)]
        specs = [
            StageSpec(
                config=self.config, backend="torch", stage=i, num_stages=stages, layers=layers[i]
            )
            for i in range(stages)
        ]
        self.errors: list[PippinError] = []
        self.threads: list[threading.Thread] = []
        self.wake = Wake()
        self.links: list[Link] = []
        pipeline = None
        if stages > 1:
            inboxes = [self._bind(path / f"{i}.sock", i == stages - 1) for i in range(stages)]
            outboxes = [self._connect(inboxes[(i + 1) % stages], i) for i in range(stages)]
            for i in range(stages - 1):
                self._start(specs[i], runners[i], inboxes[i], outboxes[i])
            mine = announcement(specs[-1], runners[-1], "float32")
            greet([inboxes[-1], outboxes[-1]], specs[-1], mine, timeout_s=30)
            pipeline = Pipeline(outboxes[-1], inboxes[-1], stages, self.wake)
        leader = Stages(runners[-1], pipeline)
        clock = SystemClock()
        self.engine: EngineCore = assemble(
            self.config, leader, specs[-1], "tests", clock.monotonic(), clock
        )

    def _bind(self, path: Path, leader: bool) -> Link:
        path.unlink(missing_ok=True)
        link = Link.bind(f"ipc://{path}", wake=self.wake.notify if leader else None)
        self.links.append(link)
        return link

    def _connect(self, to: Link, stage: int) -> Link:
        link = Link.connect(to.address)
        self.links.append(link)
        return link

    def _start(self, spec: StageSpec, runner: Any, inbox: Link, outbox: Link) -> None:
        def work() -> None:
            try:
                greet([inbox, outbox], spec, announcement(spec, runner, "float32"), timeout_s=30)
                Worker(spec, runner, inbox, outbox, Followers()).run()
            except LinkError as error:
                self.errors.append(error)
            finally:
                inbox.close()
                outbox.close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.threads.append(thread)

    def close(self) -> None:
        self.engine.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a worker did not end"
        for link in self.links:
            link.close(0.0)


def make_request(name: str, prompt: Sequence[int], params: SamplingParams, seed: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=params,
        seed=seed,
        max_tokens=params.max_tokens or 0,
        arrival_time=float(name),
    )


def answers(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    abort_after: dict[int, int] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt's answer, all at once; some aborted after so many tokens."""
    left = dict(abort_after or {})
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found[str(index)] = []
        engine.add(make_request(str(index), prompt, params, 100 + index))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
            index = int(output.request_id)
            if index in left and len(found[output.request_id]) >= left[index]:
                del left[index]
                assert engine.abort(output.request_id) is not None
    assert engine.stats().kv_cache_usage == 0.0
    return list(found.values())
