# SPDX-License-Identifier: Apache-2.0
"""Documents in and answers out, of the example for Ray; `tests/engine/test_ray.py` runs it."""

import json
import os

import engines
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray_batch
import ray_cluster

JOB = {"model": "m", "prompt": "{document}"}


def read(*paths, field="text"):
    return [
        (document["document"], document["text"], document["unreadable"])
        for path in paths
        for document in ray_batch.read_documents(str(path), field)
    ]


def row(name, **values):
    answer = {"answer": "a", "error": "", "acceptance_length": 2.0}
    return {"document": name, "text_sha256": "0" * 16, **answer, **values}


def written(folder):
    files = sorted(folder.glob("answers-*.parquet"))
    return [one for file in files for one in pq.read_table(file).to_pylist()]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs the example with answers in upper case; returns what was asked, what was said, and the rest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_cluster, "connect", lambda *_: None)
    (tmp_path / "in").mkdir()

    def run(given="in", failing=()):
        asked, said = [], []

        def answers_of(args, files, missing):
            for file in files:
                for found in ray_batch.read_documents(file, args.field):
                    if found["document"] in missing:
                        asked.append(found["text"])
                        error = "too long" if found["text"] in failing else ""
                        result = {"__inference_error__": error, "generated_text": found["text"].upper()}
                        counts = {"num_input_tokens": 1, "num_generated_tokens": 1, "metrics": None}
                        yield ray_batch.answer_row({**found, **result, **counts})

        monkeypatch.setattr(ray_batch, "answers_of", answers_of)
        args = ray_batch.make_parser().parse_args([str(given), "--out", "out"])
        missing = ray_batch.run(args, said.append)
        return asked, "\n".join(said), missing

    return run


def test_every_kind_of_file_is_read_and_counted(tmp_path):
    (tmp_path / "a").mkdir()
    text, lines, table = tmp_path / "a" / "one.txt", tmp_path / "b.jsonl", tmp_path / "c.parquet"
    text.write_bytes("grün\nzwei".encode() + b"\xff")
    lines.write_text('{"text": "first"}\n\n{"text": "second", "other": 1}\n')
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(100)], "n": range(100)}), table)
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "answers-000000.parquet").write_text("of an earlier start")
    files = ray_batch.find_files([str(tmp_path), str(lines)], str(tmp_path / "answers"))
    assert files == [str(text), str(lines), str(table)]
    documents = read(*files)
    assert list(ray_batch.find_documents(files, "text")) == [name for name, _, _ in documents]
    assert documents[:3] == [
        (str(text), "grün\nzwei�", ""),
        (f"{lines}#0", "first", ""),
        (f"{lines}#1", "second", ""),
    ]
    assert documents[3:] == [(f"{table}#{i}", f"row {i}", "") for i in range(100)]


def test_rows_without_text_are_named_and_none_is_left_out(tmp_path):
    lines, table = tmp_path / "b.jsonl", tmp_path / "c.parquet"
    lines.write_text('{"text": "first"}\nnot json\n{"text": 5}\n["text"]\n{"text": ""}\n{"text": "last"}')
    pq.write_table(pa.table({"other": [1, 2]}), table)
    assert [text for _, text, _ in read(lines)] == ["first", "", "", "", "", "last"]
    assert [bool(why) for _, _, why in read(lines)] == [False, True, True, True, True, False]
    assert len(read(table)) == 2
    assert all("no text in 'text'; name the column with --field" in why for _, _, why in read(table))
    assert read(table, field="other")[0][2], "numbers are no documents"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--engine-kwargs", "{'seed': 1}"), "is no JSON object, such as"),
        (("--sampling", "[1]"), "is no JSON object, such as"),
        (("--replicas", "0"), "'0' is no whole number from 1"),
        (("--cpus", "two"), "'two' is no whole number from 1"),
    ],
)
def test_invalid_options_are_refused_in_a_sentence(options, says, capsys):
    with pytest.raises(SystemExit):
        ray_batch.make_parser().parse_args(["d", "--out", "o", *options])
    assert says in capsys.readouterr().err


def test_a_missing_or_torn_file_or_an_empty_folder_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(SystemExit, match="neither a file nor a folder"):
        ray_batch.find_files([str(tmp_path / "missing")], "out")
    parse = ray_batch.make_parser().parse_args
    args = parse([str(tmp_path), "--out", str(tmp_path / "answers")])
    with pytest.raises(SystemExit, match="no files found"):
        ray_batch.run(args, print)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(SystemExit, match=r"b.parquet is no Parquet file"):
        ray_batch.run(args, print)
    assert not (tmp_path / "answers").exists()


def test_answers_are_kept_once_and_a_job_resumes(tmp_path):
    texts = dict.fromkeys("abcde", "0" * 16)
    with ray_batch.Answers(tmp_path, JOB, rows_per_file=3) as answers:
        assert [answers.add(row(name)) for name in "abcda"] == [True] * 4 + [False]
        assert answers.num_repeated == 1
        assert answers.table(texts).num_rows == 3, "the fourth is not written yet"
    # Whoever is killed now leaves a file that is not whole, and loses what was not written.
    (tmp_path / ".answers-000001.parquet").write_bytes(b"PAR1 torn")
    with ray_batch.Answers(tmp_path, JOB, rows_per_file=3) as again:
        assert again.missing(texts) == {"d", "e"}
        for name in "cde":
            again.add(row(name))
        again.save()
        assert sorted(again.table(texts)["document"].to_pylist()) == list("abcde")
    left = [".lock", "answers-000000.parquet", "answers-000001.parquet", "job.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_another_jobs_answers_are_not_mixed_in(tmp_path):
    with ray_batch.Answers(tmp_path, JOB):
        pass
    with pytest.raises(SystemExit) as refused:
        ray_batch.Answers(tmp_path, {**JOB, "prompt": "Sum up: {document}"})
    assert 'has answers with prompt "{document}", not "Sum up: {document}"' in str(refused.value)


def test_a_second_job_at_the_same_time_is_refused_and_touches_nothing(tmp_path):
    with ray_batch.Answers(tmp_path, JOB) as answers:
        answers.add(row("a"))
        (tmp_path / ".answers-000000.parquet").write_bytes(b"being written")
        with pytest.raises(SystemExit, match="another job writes to"):
            ray_batch.Answers(tmp_path, JOB)
        assert (tmp_path / ".answers-000000.parquet").exists()
        answers.save()
    with ray_batch.Answers(tmp_path, JOB) as later:
        assert not later.missing({"a": "0" * 16})


def test_a_document_with_an_error_has_no_answer_and_is_tried_again(job, tmp_path):
    (tmp_path / "in" / "a").write_text("good")
    (tmp_path / "in" / "b").write_text("bad")
    for asked_for in (["good", "bad"], ["bad"]):
        asked, said, missing = job(failing=["bad"])
        assert (asked, missing) == (asked_for, 1)
        assert "1 of 2 documents after" in said and f"no answer: {tmp_path}/in/b: too long" in said
        assert [one["error"] for one in written(tmp_path / "out")] == ["", "too long"]
    asked, said, missing = job()
    assert (asked, missing) == (["bad"], 0)
    assert "of which 1 are answered" in said and "no answer" not in said
    answers = [(one["answer"], one["error"]) for one in written(tmp_path / "out")]
    assert answers == [("GOOD", ""), ("BAD", "")]


def test_a_text_is_answered_once_however_its_path_is_typed_and_again_when_it_changes(job, tmp_path):
    lines = tmp_path / "in" / "rows.jsonl"
    rows = [json.dumps({"text": text}) + "\n" for text in ("one", "two", "two")]
    lines.write_text("".join(rows))
    assert job("in/rows.jsonl")[0] == ["one", "two", "two"]
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for typed in ("in", lines, "in/../in/rows.jsonl", "link/rows.jsonl", "link"):
        assert job(typed)[0] == []
    lines.write_text("".join([rows[0], '{"text": "new"}\n', *rows[1:]]))
    assert job()[0] == ["new", "two"], "the second and the fourth; the third is as it was"
    answers = {one["document"]: one["answer"] for one in written(tmp_path / "out")}
    assert len(written(tmp_path / "out")) == len(answers) == 4
    assert [answers[f"{lines}#{index}"] for index in range(4)] == ["ONE", "NEW", "TWO", "TWO"]


def test_replicas_get_this_shells_variables_but_no_secrets(monkeypatch):
    monkeypatch.setenv("VLLM_MAGICDEC_STRICT", "1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    variables = ray_cluster.environment(str(engines.MODEL), 2)
    assert variables["VLLM_MAGICDEC_STRICT"] == variables["HF_HUB_OFFLINE"] == "1"
    assert "secret" not in variables.values()


def test_the_users_token_is_enabled_unless_configured_otherwise(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    ray_cluster._enable_token()
    assert "RAY_AUTH_MODE" not in os.environ, "there is none"
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_cluster._enable_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.delenv("RAY_AUTH_MODE")
    ray_cluster._enable_token()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_only_local_clusters_get_the_users_token():
    for address, is_here in {
        "127.0.0.1:6379": True,
        "localhost:6379": True,
        "203.0.113.9:6379": False,
        "ray://head.invalid:10001": False,
        "auto": False,  # Ray brings it itself
    }.items():
        assert ray_cluster._is_of_this_machine(address) == is_here, address
