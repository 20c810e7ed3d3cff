# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bad_day/kills.py: what clients and the log of a server say that is struck."""

import asyncio
import contextlib
import json
import socket
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import engines
import openai
import pytest

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
from bad_day import faults, judging, kills
from bad_day.asking import ask_and_hang_up
from bad_day.requests import Request

EVENT = openai.APIError("the engine is dead", request=None, body=None)
RESET = openai.APIConnectionError(request=None)
REQUEST = Request("greedy", [1], 3)


class Completions:
    """Of a client: every request fails, or gets so many chunks before it does."""

    def __init__(self, num_chunks=None, error=EVENT):
        self.completions = self
        self.num_chunks = num_chunks
        self.error = error

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def create(self, **body):
        if self.num_chunks is None:
            raise RuntimeError("500")
        return self._chunks()

    async def _chunks(self):
        for _ in range(self.num_chunks):
            yield SimpleNamespace(choices=[])
        await asyncio.sleep(0.5)
        raise self.error


@pytest.mark.parametrize("seed", [1, 2])  # before the first chunk, and after some
def test_an_error_before_a_client_hangs_up_is_an_error(seed):
    with pytest.raises(RuntimeError, match="500"):
        asyncio.run(ask_and_hang_up(Completions(), "tiny", REQUEST, seed))


@pytest.mark.parametrize(
    ("num_chunks", "error", "ended", "improper"),
    [
        (None, EVENT, 0, {"RuntimeError": 6}),
        (1, EVENT, 0, {}),
        (5, EVENT, 6, {}),
        (5, RESET, 0, {"connection lost": 6}),
    ],
)
def test_only_streams_that_were_running_count_as_ended(
    num_chunks, error, ended, improper, monkeypatch, tmp_path
):
    monkeypatch.setattr(kills, "client_of", lambda url: Completions(num_chunks, error))
    monkeypatch.setattr(kills, "_MOST_S", 1)
    process = SimpleNamespace(wait=lambda timeout: 0, poll=lambda: 0)
    server = SimpleNamespace(url="", log=tmp_path / "log", process=process)
    server.log.write_text("died")
    footprint = SimpleNamespace(note=lambda server: None, num_shared=0, wait_until_gone=lambda seconds: [])
    kill = kills.Kill("a kill", lambda server: None, "died", ())
    struck = asyncio.run(kills._strike(server, footprint, kill, REQUEST, tmp_path / "fault"))
    assert struck["streams_ended"] == ended and struck["improper_ends"] == improper
    assert not struck["sentence"], "it was there before"


def test_answers_that_a_server_has_to_end_are_shorter(monkeypatch, tmp_path):
    """Than those that it must not have ended when it is struck."""
    asked = set()

    class Asked(Completions):
        async def create(self, *, max_tokens, **body):
            asked.add(max_tokens)
            raise self.error

    monkeypatch.setattr(kills, "client_of", lambda url: Asked())
    process = SimpleNamespace(wait=lambda timeout: 0, poll=lambda: 0)
    server = SimpleNamespace(url="", log=tmp_path / "log", process=process)
    server.log.write_text("")
    footprint = SimpleNamespace(note=lambda server: None, num_shared=0, wait_until_gone=lambda seconds: [])
    for kill in kills.all_kills():
        asked.clear()
        unstruck = replace(kill, strike=lambda server: None)
        asyncio.run(kills._strike(server, footprint, unstruck, REQUEST, tmp_path / "fault"))
        assert asked == {800 if kill.name in judging._MOST_TO_END_S else 2000}


@pytest.mark.parametrize("wrong", [None, 1, 2, 4])
def test_a_server_answers_after_every_kill(wrong, monkeypatch):
    """The next one that is struck, or one that is started for this alone; it has no fault."""
    served = []

    @contextlib.contextmanager
    def serve_tiny(*options, environment):
        served.append((options, environment))
        yield len(served) - 1, None

    async def answer(server, known):
        return "other" if server == wrong else " ".join(served[server][0])

    async def strike(server, footprint, kill, known, brake):
        return {"name": kill.name, "exit_s": 1, "streams_ended": 6, "how_streams_ended": [], "left": []}

    monkeypatch.setattr(kills, "serve_tiny", serve_tiny)
    monkeypatch.setattr(kills, "_answer", answer)
    monkeypatch.setattr(kills, "_strike", strike)
    of_two = {"VLLM_MAGICDEC_FAULT": "selection", "BOUND": "0|1"}
    chosen = [
        kills.Kill("first", None, "", ("one",)),
        kills.Kill("second", None, "", ("one",)),
        kills.Kill("of two", None, "", ("two",), of_two),
    ]
    restarted = [kill["restarted"] for kill in kills.run_kills(lambda text: None, chosen)]
    assert [options for options, _ in served] == [("one",)] * 3 + [("two",)] * 2
    assert restarted == [server != wrong for server in (1, 2, 4)]
    assert served[3][1] == of_two and served[4][1] == {**of_two, "VLLM_MAGICDEC_FAULT": ""}


def chunk(data):
    line = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


def of_answer(reason=None):
    choice = {"index": 0, "text": "a", "finish_reason": reason, "logprobs": None}
    return chunk(json.dumps({"id": "x", "object": "text_completion", "created": 1, "choices": [choice]}))


DONE = chunk("[DONE]")
END = b"0\r\n\r\n"  # of a body in chunks
FAILED = chunk(json.dumps({"error": {"message": "EngineCore encountered an issue.", "code": 500}}))


@pytest.mark.parametrize(
    ("rest", "is_reset", "end"),
    [
        (of_answer("length") + DONE + END, False, kills.ANSWER),
        (of_answer("abort") + DONE + END, False, kills.ANSWER),
        (FAILED + DONE + END, False, kills.ERROR_EVENT),
        (DONE + END, False, kills.NO_REASON),
        (END, False, kills.NO_REASON),
        (b"", False, kills.LOST),
        (b"", True, kills.LOST),
        (None, False, kills.OPEN),
    ],
    ids=["answer", "aborted", "error event", "done", "end of chunks", "closed", "reset", "open"],
)
def test_the_ends_of_streams_are_told_apart(rest, is_reset, end):
    """Through the client itself, from a server in mid-stream."""
    stream = kills._Stream()

    async def until_begun():
        while not stream.has_begun:
            await asyncio.sleep(0.01)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        writer.write(of_answer() * 5)
        await writer.drain()
        if rest is None:
            return
        await until_begun()
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            writer.write(rest)
        writer.close()

    async def read():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            server = SimpleNamespace(url=f"http://127.0.0.1:{port}")
            task = asyncio.create_task(stream.read(server, REQUEST, 0))
            if rest is None:
                await asyncio.wait_for(until_begun(), 60)
            await asyncio.wait([task], timeout=0.5 if rest is None else 60)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(read())
    assert stream.end == end, stream.how
    assert stream.has_begun and (end in kills.PROPER) == (end in ("answer", "error event"))


def test_answers_are_slow_until_the_server_is_struck(monkeypatch, tmp_path):
    """On a busy machine a client may wait for longer than it takes the server to make a whole answer."""
    brake = tmp_path / "fault"
    seen = []

    class Seeing(Completions):
        async def create(self, **body):
            seen.append(brake.read_text())
            return self._chunks()

    monkeypatch.setattr(kills, "client_of", lambda url: Seeing(5))
    process = SimpleNamespace(wait=lambda timeout: seen.append(brake.read_text()), poll=lambda: 0)
    server = SimpleNamespace(url="", log=tmp_path / "log", process=process)
    server.log.write_text("died")
    footprint = SimpleNamespace(note=lambda server: None, num_shared=0, wait_until_gone=lambda seconds: [])

    def strike(server):
        seen.append(brake.read_text())
        server.log.write_text(server.log.read_text() + "\ndied of it")

    kill = kills.Kill("a kill", strike, r"died[^\n]*", ())
    struck = asyncio.run(kills._strike(server, footprint, kill, REQUEST, brake))
    assert struck["sentence"] == "died of it"
    slow = faults.FAULTS["slow"]
    assert slow.startswith("slow") and seen == [slow] * (kills._STREAMS + 1) + [""]
