# SPDX-License-Identifier: Apache-2.0
"""Ask a model about many long documents, with any number of engines on Ray.

    python examples/ray_batch.py DOCUMENTS... --out ANSWERS --replicas 2

DOCUMENTS are files or folders: text (one document each), JSON lines and Parquet (one per row, in the
column `--field`). ANSWERS becomes a folder of Parquet files with one row per document: the answer and the
acceptance of its drafts. The same command resumes with documents that are new, changed or failed. Ray
restarts a replica that dies.
"""

import argparse
import fcntl
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray_cluster

ROWS_FORMATS = (".jsonl", ".ndjson", ".parquet")
SCHEMA = pa.schema(
    [
        ("document", pa.string()),  # absolute path, and # with the row's number
        ("text_sha256", pa.string()),  # the first 16 digits
        ("answer", pa.string()),
        ("error", pa.string()),  # "": none
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("rounds", pa.int32()),  # steps that verified drafts
        ("drafted", pa.int32()),
        ("accepted", pa.int32()),
        ("acceptance_length", pa.float32()),  # tokens per round, 1 without rounds
        ("seconds", pa.float32()),  # from the first token to the last
    ]
)
PROGRESS_INTERVAL_S = 5.0
# Ray distributes blocks; its default of 128 MiB would give a whole file to one replica.
BLOCK_BYTES = 1024
TABLE_ROWS = 20


# --- documents in -----------------------------------------------------------------------------------------


def find_files(given: list[str], out: str) -> list[str]:
    """List the given files and the files in given folders by absolute path, without answers in `out`.

    Raises:
        SystemExit: a path does not exist.
    """
    files: list[str] = []
    for path in map(Path, given):
        if path.is_dir():
            files += [str(file) for file in sorted(path.resolve().rglob("*")) if file.is_file()]
        elif path.is_file():
            # Keep a link's own name, because its target's name may have no suffix.
            files.append(str(path.parent.resolve() / path.name))
        else:
            sys.exit(f"error: {path} is neither a file nor a folder; name what holds the documents")
    answers = Path(out).resolve()
    return [file for file in dict.fromkeys(files) if answers not in Path(file).resolve().parents]


def find_documents(files: list[str], field: str) -> dict[str, str]:
    """Return the hash of each document's text by the document's name.

    Raises:
        SystemExit: a file cannot be read.
    """
    texts: dict[str, str] = {}
    for file in files:
        try:
            texts |= {found["document"]: found["text_sha256"] for found in read_documents(file, field)}
        except pa.ArrowException as error:
            sys.exit(f"error: {file} is no Parquet file ({error}); repair it or leave it out")
    return texts


def read_documents(file: str, field: str) -> Iterator[dict[str, str]]:
    """Yield each document of a file with its name and hash; `unreadable` says why it has no text."""
    if not file.endswith(ROWS_FORMATS):
        yield _document(file, Path(file).read_text(errors="replace"))
        return
    for index, row in enumerate(_rows(file, field)):
        text = row.get(field)
        is_text = isinstance(text, str) and bool(text)
        why = "" if is_text else f"it has no text in {field!r}; name the column with --field"
        yield _document(f"{file}#{index}", text if is_text else "", why)


def _document(name: str, text: str, unreadable: str = "") -> dict[str, str]:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    return {"document": name, "text": text, "text_sha256": digest, "unreadable": unreadable}


def _rows(file: str, field: str) -> Iterator[dict[str, Any]]:
    if file.endswith(".parquet"):
        parquet = pq.ParquetFile(file)
        columns = [field] if field in parquet.schema_arrow.names else []
        for batch in parquet.iter_batches(batch_size=64, columns=columns):
            yield from batch.to_pylist() if columns else ({} for _ in range(batch.num_rows))
        return
    with open(file, errors="replace") as lines:
        for line in lines:
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                yield row if isinstance(row, dict) else {}


# --- answers out ------------------------------------------------------------------------------------------


class Answers:
    """A folder of atomically written Parquet files, so that a job can resume.

    The folder is locked against other jobs until it is closed.

    Args:
        folder: path, created if missing.
        job: settings that all answers share.
        rows_per_file, seconds_per_file: bounds on the answers that an interrupted job loses.

    Raises:
        SystemExit: the folder holds answers of another job, or another job writes to it now.
    """

    def __init__(
        self, folder: Path, job: dict[str, Any], rows_per_file: int = 256, seconds_per_file: float = 30.0
    ) -> None:
        self._folder, self._rows_per_file, self._seconds_per_file = folder, rows_per_file, seconds_per_file
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(folder / ".lock", "w")  # noqa: SIM115  # until it is closed
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"error: another job writes to {folder}; wait for its end, or use another --out")
        self._check_job(folder / "job.json", job)
        for torn in folder.glob(".*.parquet"):
            torn.unlink()
        files = self._files()
        self._next_file = 1 + max((int(file.stem.split("-")[1]) for file in files), default=-1)
        table = self._read(["document", "text_sha256", "error"])
        self._named: set[str] = set(table["document"].to_pylist())  # with a row, also of an error
        # Rows of old versions have no hashes and count as unanswered.
        self._answered: dict[str, str | None] = {
            row["document"]: row["text_sha256"] for row in table.to_pylist() if not row["error"]
        }
        self.num_repeated = 0
        self._rows: list[dict[str, Any]] = []
        self._saved_at = time.monotonic()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("answers-*.parquet"))

    def _read(self, columns: list[str]) -> pa.Table:
        tables = [pq.read_table(file, schema=SCHEMA, columns=columns) for file in self._files()]
        return pa.concat_tables([SCHEMA.empty_table().select(columns), *tables])

    def _check_job(self, path: Path, job: dict[str, Any]) -> None:
        if not path.exists():
            path.write_text(json.dumps(job, indent=1) + "\n")
            return
        before = json.loads(path.read_text())
        for name in job.keys() | before.keys():
            if before.get(name) != job.get(name):
                sys.exit(
                    f"error: {self._folder} has answers with {name} {json.dumps(before.get(name))}, not "
                    f"{json.dumps(job.get(name))}; use that, or another folder for --out"
                )

    def missing(self, texts: dict[str, str]) -> set[str]:
        """Return the documents whose text has no answer.

        Args:
            texts: hashes of all documents by name.
        """
        return {name for name, text in texts.items() if self._answered.get(name) != text}

    def make_room(self, documents: set[str]) -> None:
        """Drop the rows of these documents, and rows without an answer."""
        kept = {name for name, text in self._answered.items() if text and name not in documents}
        for file in self._files():
            table = pq.read_table(file, schema=SCHEMA)
            left = _rows_of(table, kept)
            if not left.num_rows:
                file.unlink()
            elif left.num_rows < table.num_rows:
                self._write(left, file.name)
        self._named = kept
        self._answered = {name: self._answered[name] for name in kept}

    def add(self, row: dict[str, Any]) -> bool:
        """Add a document's row unless it has one; return whether it was added."""
        name = row["document"]
        if name in self._named:
            self.num_repeated += 1  # from a replica that died after handing it on
            return False
        self._named.add(name)
        if not row["error"]:
            self._answered[name] = row["text_sha256"]
        self._rows.append(row)
        is_late = time.monotonic() - self._saved_at > self._seconds_per_file
        if len(self._rows) >= self._rows_per_file or is_late:
            self.save()
        return True

    def save(self) -> None:
        """Write the rows that are not written yet."""
        if self._rows:
            table = pa.Table.from_pylist(self._rows, schema=SCHEMA)
            self._write(table, f"answers-{self._next_file:06}.parquet")
            self._next_file += 1
            self._rows = []
        self._saved_at = time.monotonic()

    def _write(self, table: pa.Table, name: str) -> None:
        torn = self._folder / f".{name}"
        pq.write_table(table, torn)
        os.replace(torn, self._folder / name)

    def table(self, documents: Collection[str]) -> pa.Table:
        """Return the written rows of these documents without the answers, which may be large."""
        return _rows_of(self._read([name for name in SCHEMA.names if name != "answer"]), documents)


def _rows_of(table: pa.Table, documents: Collection[str]) -> pa.Table:
    return table.filter(pc.is_in(table["document"], value_set=pa.array(list(documents), pa.string())))


# --- from one to the other --------------------------------------------------------------------------------


def note_acceptance(engine_stage: type) -> type:
    """Return Ray's stage of vLLM's engine, extended to keep each request's acceptance.

    Ray passes on only the text and the fields of `metrics`, so acceptance becomes one of these.
    """

    class NotesAcceptance(engine_stage):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            engine = self.llm.engine
            generate = engine.generate

            async def generate_and_note(*args: Any, **kwargs: Any) -> Any:
                from dataclasses import asdict, make_dataclass

                async for output in generate(*args, **kwargs):
                    if output.finished:
                        known = asdict(output.metrics) if output.metrics else {}
                        drafts = output.outputs[0].spec_decode_metrics
                        known["drafts"] = json.dumps(drafts.to_dict()) if drafts else ""
                        output.metrics = make_dataclass("Metrics", known)(**known)
                    yield output

            engine.generate = generate_and_note

    NotesAcceptance.__name__ = engine_stage.__name__
    return NotesAcceptance


def answer_row(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of Ray's processor to a row of `SCHEMA`."""
    error = row.get("unreadable") or row.get("__inference_error__") or ""
    document = {name: row[name] for name in ("document", "text_sha256")}
    if error:
        return {**document, "answer": "", "error": error}
    metrics = row["metrics"] or {}
    drafts = json.loads(metrics.get("drafts") or "{}")
    return {
        **document,
        "answer": row["generated_text"],
        "error": "",
        "prompt_tokens": row["num_input_tokens"],
        "output_tokens": row["num_generated_tokens"],
        "rounds": drafts.get("num_spec_steps", 0),
        "drafted": drafts.get("num_draft_tokens", 0),
        "accepted": drafts.get("num_accepted_draft_tokens", 0),
        "acceptance_length": drafts.get("mean_acceptance_length", 1.0),
        "seconds": metrics.get("last_token_ts", 0.0) - metrics.get("first_token_ts", 0.0),
    }


def answers_of(args: argparse.Namespace, files: list[str], missing: set[str]) -> Iterator[dict[str, Any]]:
    """Ask about the missing documents of files, and yield rows of `SCHEMA` in the order of completion."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = BLOCK_BYTES
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    environment = ray_cluster.environment(args.model, args.replicas)
    config = vLLMEngineProcessorConfig(
        model_source=ray_cluster.model_source(args.model),
        engine_kwargs=ray_cluster.engine_kwargs(args.engine_kwargs),
        placement_group_config=ray_cluster.placement(args.replicas, args.cpus),
        runtime_env={"env_vars": environment},
        concurrency=(args.replicas, args.replicas),
        batch_size=args.batch_size,
        should_continue_on_error=True,  # one document that is too long must not end the job
        chat_template_stage={"enabled": args.chat, "concurrency": 1, "num_cpus": 0.5},
        tokenize_stage=False,  # the engine does
        detokenize_stage=False,
        log_engine_metrics=False,
    )
    prompt, sampling, chat, field = args.prompt, sampling_params(args), args.chat, args.field

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        text = prompt.replace("{document}", row["text"]) or " "  # vLLM refuses an empty prompt
        asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        return {**asked, "sampling_params": sampling}

    # Each of Ray's processes takes 0.2 GB and seconds to start, so use few.
    few_cpus = {"num_cpus": 0.5, "compute": ray.data.TaskPoolStrategy(size=max(2, args.replicas))}
    processor = build_processor(
        config,
        preprocess=ask,
        postprocess=lambda row: row,
        preprocess_map_kwargs=few_cpus,
        postprocess_map_kwargs=few_cpus,
    )
    name = "vLLMEngineStage"
    stage = processor.get_stage_by_name(name)
    # Assigning `fn` would make the stage recompute its resources and request a GPU.
    processor.stages[name] = stage.model_copy(update={"fn": note_acceptance(stage.fn)})
    missing_ref = ray.put(missing)

    def read(item: dict[str, Any]) -> Iterator[dict[str, str]]:
        missing = ray.get(missing_ref)
        for document in read_documents(item["file"], field):
            if document["document"] in missing:
                yield document

    # One task per file reads the documents when they are needed.
    items = ray.data.from_items([{"file": file} for file in files], override_num_blocks=len(files))
    documents = items.flat_map(read, **few_cpus)
    for batch in processor(documents).iter_batches(
        batch_size=None, prefetch_batches=0, batch_format="pyarrow"
    ):
        for row in batch.to_pylist():
            yield answer_row(row)


def sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_tokens": args.max_tokens, "temperature": args.temperature, **args.sampling}


def run(args: argparse.Namespace, report: Callable[[str], None]) -> int:
    """Run the whole job and return the number of documents without an answer."""
    files = find_files(args.documents, args.out)
    if not files:
        sys.exit("error: no files found; name those with the documents, or their folder")
    texts = find_documents(files, args.field)
    job = {"model": args.model, "prompt": args.prompt, "chat": args.chat, "field": args.field}
    job |= {"sampling": sampling_params(args)}
    with Answers(Path(args.out), job, args.rows_per_file) as answers:
        missing = answers.missing(texts)
        before = len(texts) - len(missing)
        report(f"{len(texts):,} documents in {len(files):,} files, of which {before:,} are answered")
        if missing:
            ray_cluster.connect(args.address, args.replicas, args.cpus)
            report(f"{args.replicas} replicas start ...")
            answers.make_room(missing)
            _collect(args, files, answers, missing, before, report)
        if answers.num_repeated:
            report(f"{answers.num_repeated:,} answers came twice, after a replica had died, and count once")
        show_table(answers.table(texts), report)
        return len(answers.missing(texts))


def _collect(
    args: argparse.Namespace,
    files: list[str],
    answers: Answers,
    missing: set[str],
    before: int,
    report: Callable[[str], None],
) -> None:
    started = reported = time.monotonic()
    count = errors = tokens = rounds = accepted = 0
    try:
        for row in answers_of(args, files, missing):
            if not answers.add(row):
                continue
            now = time.monotonic()
            count += 1
            errors += bool(row["error"])
            tokens += row.get("output_tokens", 0)
            rounds += row.get("rounds", 0)
            accepted += row.get("accepted", 0)
            if now - reported >= PROGRESS_INTERVAL_S or count == len(missing):
                reported, seconds = now, now - started
                report(
                    f"{before + count - errors:,} of {before + len(missing):,} documents "
                    f"after {seconds:.0f} s including the start, "
                    f"{count / seconds:.2f} documents/s, "
                    f"{tokens / seconds:,.0f} tokens/s, "
                    f"{1 + accepted / max(1, rounds):.2f} tokens per round, {errors} errors"
                )
    finally:  # also when Ctrl-C ends it
        answers.save()


def show_table(table: pa.Table, report: Callable[[str], None]) -> None:
    """Report the documents with the fewest and the most tokens per round."""
    for row in table.filter(pc.not_equal(table["error"], "")).to_pylist():
        report(f"no answer: {row['document']}: {row['error']}")
    table = table.filter(pc.equal(table["error"], ""))
    if not table.num_rows:
        return
    order = pc.sort_indices(table["acceptance_length"]).to_pylist()
    half = TABLE_ROWS // 2
    is_short = len(order) <= TABLE_ROWS
    shown = table.take(order if is_short else order[:half] + order[-half:]).to_pylist()
    report(
        f"\n{'tokens per round':>16}  {'accepted of drafted':>20}  {'prompt':>7}  {'output':>6}  document"
    )
    for index, row in enumerate(shown):
        if index == half and not is_short:
            report(f"{'...':>16}  ({len(order) - TABLE_ROWS:,} more)")
        drafts = f"{row['accepted']:,} of {row['drafted']:,}"
        report(
            f"{row['acceptance_length']:16.2f}  {drafts:>20}  {row['prompt_tokens']:7,}  "
            f"{row['output_tokens']:6,}  {row['document']}"
        )
    accepted, rounds = (pc.sum(table[name]).as_py() for name in ("accepted", "rounds"))
    report(f"{1 + accepted / max(1, rounds):16.2f}  all {len(order):,} documents")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("documents", nargs="+", help="files or folders: text, JSON lines, Parquet")
    parser.add_argument("--out", required=True, help="folder for the answers; an interrupted job resumes")
    parser.add_argument(
        "--field", default="text", help="column with the document, of JSON lines and Parquet"
    )
    parser.add_argument("--prompt", default="{document}", help="the prompt; {document} stands for the text")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument(
        "--max-tokens", type=ray_cluster.positive, default=128, help="tokens per answer (default 128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--sampling", type=ray_cluster.json_object, default={}, metavar="JSON", help="other parameters"
    )
    parser.add_argument("--replicas", type=ray_cluster.positive, default=1, help="engines (default 1)")
    parser.add_argument(
        "--batch-size", type=ray_cluster.positive, default=16, help="documents given to an engine at a time"
    )
    parser.add_argument(
        "--rows-per-file", type=ray_cluster.positive, default=256, help="answers per file (default 256)"
    )
    ray_cluster.add_options(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if "{document}" not in args.prompt:
        sys.exit("error: --prompt has no {document}, which stands for each document's text")
    try:
        missing = run(args, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        sys.exit(f"interrupted; the same command resumes with the answers in {args.out}")
    except Exception as error:
        if not ray_cluster.is_of_ray(error):
            raise
        sys.exit(f"error: {ray_cluster.reason(error)}")
    if missing:
        sys.exit(f"error: {missing:,} documents have no answer; the same command tries them again")


if __name__ == "__main__":
    main()
