"""The stream between an engine's leader and its clients: encrypted, refused, interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pippin.errors import PortInUse
from pippin.transport.channel import ClientChannel, LeaderChannel, ask
from pippin.transport.keys import derive_keys
from pippin.types.message import Failed, Hello

KEYS = derive_keys("a cluster secret for tests")
FAILED = Failed("no model", "model_not_found", None)


@pytest.fixture(params=[None, KEYS], ids=["plain", "encrypted"])
def leader(request):
    """A leader that answers every message, at a port of its own; and its keys."""
    channel = LeaderChannel("tcp://127.0.0.1:0", request.param)
    over = threading.Event()

    def serve():
        while not over.is_set():
            if channel.wait(0.02):
                for client, _ in channel.receive():
                    channel.send(client, FAILED)

    thread = threading.Thread(target=serve)
    thread.start()
    yield channel, request.param
    over.set()
    thread.join()
    channel.close()


def test_questions_are_answered_over_tcp(leader):
    channel, keys = leader
    assert ask(channel.address, Hello(), 5, keys) == FAILED

    async def talk():
        client = ClientChannel(channel.address, keys)
        await client.send(Hello())
        answer = await asyncio.wait_for(client.receive(), 5)
        client.close()
        return answer

    assert asyncio.run(talk()) == FAILED


def test_other_keys_get_no_answer(leader):
    channel, keys = leader
    other = derive_keys("quite another secret")
    assert ask(channel.address, Hello(), 0.5, other) is None
    assert ask(channel.address, Hello(), 5, keys) == FAILED


def test_busy_port_is_a_clear_error():
    first = LeaderChannel("tcp://127.0.0.1:0")
    with pytest.raises(PortInUse, match=first.address):
        LeaderChannel(first.address, KEYS)
    first.close()


def test_interrupted_question_ends():
    """Interrupts at any moment, the making of the socket included, must not hang the process."""
    script = (
        "import signal, sys\n"
        "from pippin.transport.channel import ask\n"
        "from pippin.types.message import Hello\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('ready', flush=True)\n"
        "try:\n"
        "    while True:\n"
        "        ask('ipc:///nobody/there', Hello(), 0.001)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    for delay in (0, 0.01, 0.02, 0.03):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline() == b"ready\n"
                time.sleep(delay)  # another moment each time
                os.kill(process.pid, signal.SIGINT)
                assert process.wait(10) == 0
                assert process.stdout.read() == b"interrupted\n"
            finally:
                process.kill()
