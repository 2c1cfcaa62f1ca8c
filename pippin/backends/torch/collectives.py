"""Groups on torch's own collectives: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pippin.backends.meeting import INIT_SECONDS, LOAD_SECONDS, Meeting, listen, lost
from pippin.backends.torch.group import STEP_SECONDS

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: torch's own watch over NCCL ends the process: it comes after ours, which raises.
_NCCL_WATCH_SECONDS = 4 * STEP_SECONDS


class GlooGroup:
    """See ``group.Group``. CPU tensors."""

    def __init__(self, meeting: Meeting, host: str) -> None:
        """``host``: this rank's address, which its connections use."""
        self.rank, self.size = meeting.rank, meeting.size
        self.description = "gloo"
        self._meeting = meeting
        # Made by itself and not by init_process_group, which takes the address that the host's
        # name stands for.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=STEP_SECONDS)
        store = _store(meeting)
        self._group: Any = _checked(lambda: gloo(store, self.rank, self.size, options))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        _checked(lambda: self._group.allreduce([x]).wait())
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.sum(x))

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        padded, outs = _padded(x, widths, self.rank)
        options = dist.GatherOptions()
        options.rootRank = 0
        lists = [outs] if self.rank == 0 else []
        _checked(lambda: self._group.gather(lists, [padded], options).wait())
        return _joined(outs, widths) if self.rank == 0 else None

    def share(self, key: str, value: str, seconds: float = LOAD_SECONDS) -> list[str]:
        return self._meeting.share(key, value, seconds)

    def finish(self) -> None:
        """Nothing runs on."""

    def close(self) -> None:
        self._meeting.close()
        self._group = None


class NcclGroup:
    """See ``group.Group``. CUDA tensors; one a process."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self.description = "nccl"
        self._meeting = meeting
        self._device = device
        self._lost = False
        torch.cuda.set_device(device)
        store = _store(meeting)
        _checked(
            lambda: dist.init_process_group(
                "nccl",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=_NCCL_WATCH_SECONDS),
                device_id=device,
            )
        )
        # The first call sets the connections up, which takes longer than a step may.
        self.sum(torch.zeros(1, device=device))
        self._finish(INIT_SECONDS)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        _checked(lambda: dist.all_reduce(x))
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.sum(x))

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        padded, outs = _padded(x, widths, self.rank)
        _checked(lambda: dist.gather(padded, outs if self.rank == 0 else None, dst=0))
        return _joined(outs, widths) if self.rank == 0 else None

    def share(self, key: str, value: str, seconds: float = LOAD_SECONDS) -> list[str]:
        return self._meeting.share(key, value, seconds)

    def finish(self) -> None:
        self._finish(STEP_SECONDS)

    def close(self) -> None:
        self._meeting.close()
        if not dist.is_initialized():
            return
        if self._lost and dist.group.WORLD is not None:
            # Destroying would wait for the lost rank.
            dist.group.WORLD.abort()
        dist.destroy_process_group()

    def _finish(self, seconds: float) -> None:
        """Waiting in the driver, for a kernel that waits for a lost rank, would have no end."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > deadline:
                self._lost = True
                raise lost("(unknown)", f"the GPU has waited for {seconds:.0f} s")
            time.sleep(0)


def _store(meeting: Meeting) -> Any:
    """torch's own meeting point, which its groups want, beside ours."""
    timeout = timedelta(seconds=INIT_SECONDS)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    if meeting.rank == 0:
        listener = listen(meeting.host, 0)
        port = listener.getsockname()[1]
        # The store takes the descriptor over.
        store = _checked(
            lambda: make(
                meeting.host,
                port,
                meeting.size,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        )
        meeting.share("store", str(port), INIT_SECONDS)
        return store
    port = int(meeting.share("store", "", INIT_SECONDS)[0])
    return _checked(
        lambda: make(meeting.host, port, meeting.size, timeout=timeout, wait_for_workers=False)
    )


def _checked(call: Callable[[], T]) -> T:
    """torch tells of closed connections and deadlines as RuntimeErrors."""
    try:
        return call()
    except RuntimeError as error:
        raise lost("(unknown)", str(error).splitlines()[0]) from error


def _padded(
    x: torch.Tensor, widths: Sequence[int], rank: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``x`` as wide as the widest part, and as many places for such on rank 0."""
    widest = max(widths)
    if x.shape[1] < widest:
        x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
    x = x.contiguous()
    return x, [torch.empty_like(x) for _ in widths] if rank == 0 else []


def _joined(parts: Sequence[torch.Tensor], widths: Sequence[int]) -> torch.Tensor:
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)
