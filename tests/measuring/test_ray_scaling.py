# SPDX-License-Identifier: Apache-2.0
"""What `ray_scaling.py` takes for a lost answer, and for a replica of another mind."""

import sys
from types import SimpleNamespace

import engines
import httpx

sys.path.insert(0, str(engines.HERE.parent / "benchmarks"))
from ray_scaling import Answer, Clients, judge


def answered(pieces):
    """By a server that streams these; an exception among them is raised in its place."""

    def create(**_):
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            text, reason = piece
            yield SimpleNamespace(choices=[SimpleNamespace(text=text, finish_reason=reason)])

    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    return Clients("http://127.0.0.1:1/v1", ["prompt"], 4).ask(client, 0)


def test_an_answer_is_whole_with_its_reason_alone():
    whole = answered([("a", None), ("b", "length")])
    assert (whole.text, whole.error) == ("ab", "")
    assert answered([("a", None)]).error == "it broke off"
    assert "closed" in answered([("a", None), httpx.RemoteProtocolError("peer closed")]).error


def test_answers_are_compared_with_the_first_to_the_same_prompt():
    said = [(0, "a", ""), (1, "b", ""), (0, "", "it broke off"), (0, "a", ""), (1, "c", ""), (1, "b", "")]
    judged = judge([Answer(prompt, 1.0, text, error) for prompt, text, error in said])
    assert judged == {"answers": 5, "lost": 1, "errors": ["it broke off"], "differ": 1}
    lost_first = [Answer(0, 1.0, "", "it broke off"), Answer(0, 1.0, "a", "")]
    assert judge(lost_first)["differ"] == 0, "nobody said nothing"


def test_clients_ask_until_the_block_ends(monkeypatch):
    clients = Clients("http://127.0.0.1:1/v1", ["x", "y"], 4)
    monkeypatch.setattr(clients, "ask", lambda _, prompt: Answer(prompt, 0.0, "a", ""))
    with clients.asking(2):
        while len(clients.answers) < 10:
            pass
    assert {answer.prompt for answer in clients.answers} == {0, 1}
    assert judge(clients.answers)["lost"] == 0
