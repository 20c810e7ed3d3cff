# SPDX-License-Identifier: Apache-2.0
"""Gain of a datastore of the installed Python packages over lookups in a request's own context.

`magicdec index` reads `--megabytes` of the packages' sources in random order. Then excerpts of the standard
library, which is not in the datastore, are replayed as if the model wrote them: after every lookup the text
advances by the correct tokens and one more. The results are correct tokens per lookup with the context, the
datastore, and both; `gain` is the difference from the context alone, with the error over excerpts. No model
runs, so the acceptance by a model remains open.

Packages contain copies of some of the standard library. So the table shows the share of lookups whose
match in the datastore has the maximal length (`full`), and the numbers again for excerpts that have no
more of them than the median excerpt.

The time of a lookup is measured with the datastore's files in memory and, as `cold`, after the operating
system was asked to drop them.
"""

import argparse
import importlib.util
import itertools
import os
import random
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns, process_time
from typing import Any

import numpy as np
from acceptance import standard_error
from common.documents import excerpts
from common.options import add_documents, add_out, make_parser, settings_of
from common.record import make_record, write
from common.tables import console, make_table
from kv_heavy import TINY_LLAMA
from rich.table import Table
from vllm.tokenizers import get_tokenizer

from vllm_magicdec.lookup.calibration import Calibration, choose, learn
from vllm_magicdec.lookup.context_index import MAX_MATCH, ContextIndex
from vllm_magicdec.lookup.continuation import MIN_ACCEPTANCE
from vllm_magicdec.lookup.datastore import Datastore
from vllm_magicdec.lookup.datastore_files import Vocabulary
from vllm_magicdec.planner.console import main as magicdec

TEKKEN = "tekken"
SOURCES = {"context": ("context",), "datastore": ("datastore",), "both": ("context", "datastore")}
TIMED = 2000  # lookups, cold and warm


def link_tekken(folder: Path) -> str:
    """Create a model folder for vLLM with mistral_common's tokenizer of 131,072 tokens."""
    data = Path(importlib.util.find_spec("mistral_common").origin).parent / "data"
    model = folder / TEKKEN
    model.mkdir()
    (model / "tekken.json").symlink_to(max(data.glob("tekken_*.json")))
    return str(model)


def package_sources(megabytes: float, seed: int = 0) -> list[Path]:
    """Return source files of installed packages with a total of `megabytes`."""
    files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    random.Random(seed).shuffle(files)
    chosen, left = [], megabytes * 1e6
    for file in files:
        if left <= 0:
            break
        chosen.append(file)
        left -= file.stat().st_size
    return chosen


def build(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Run `magicdec index` and return its cost."""
    files = package_sources(args.megabytes)
    began, cpu = perf_counter_ns(), process_time()
    options = {"--model": args.model, "--tokenizer-mode": args.tokenizer_mode, "--out": str(path)}
    status = magicdec(["index", *map(str, files), *itertools.chain(*options.items())])
    if status:
        raise SystemExit(status)
    return {
        "num_files": len(files),
        "source_bytes": sum(file.stat().st_size for file in files),
        "bytes": {file.name: file.stat().st_size for file in sorted(path.iterdir())},
        "seconds": round((perf_counter_ns() - began) / 1e9, 1),
        "cpu_seconds": round(process_time() - cpu, 1),
    }


@dataclass
class Walk:
    """Results of the lookups in one excerpt."""

    lookups: int = 0
    offered: int = 0  # tokens
    right: int = 0  # correct tokens
    from_datastore: int = 0  # lookups that used the datastore's continuation
    longest_in_datastore: int = 0  # lookups with a match of maximal length there
    times_us: list[float] = field(default_factory=list)


def walk(
    tokens: Sequence[int],
    context: int,
    most: int,
    sources: Sequence[str],
    store: Datastore,
    calibrations: Sequence[Calibration],
) -> Walk:
    """Replay an excerpt after its first `context` tokens."""
    done, position, index = Walk(), context, ContextIndex(len(tokens))
    text = np.array(tokens, dtype=np.int32)
    index.extend(text[:context])
    none_ahead = np.empty(0, dtype=np.int32)
    look_up = {
        "context": lambda: index.look_up(none_ahead, most),
        "datastore": lambda: store.look_up(index.latest(none_ahead), most),
    }
    while position < len(tokens):
        began = perf_counter_ns()
        matches = [look_up[source]() for source in sources]
        source, choice = choose(matches, calibrations, MIN_ACCEPTANCE)
        done.times_us.append((perf_counter_ns() - began) / 1e3)
        followed = tokens[position : position + most]
        right = 0
        while right < min(len(choice.tokens), len(followed)) and choice.tokens[right] == followed[right]:
            right += 1
        learn(matches, calibrations, followed[: right + 1])
        done.lookups += 1
        done.offered += len(choice.tokens)
        done.right += right
        if "datastore" in sources:
            done.from_datastore += bool(choice.tokens) and sources[source] == "datastore"
            done.longest_in_datastore += matches[sources.index("datastore")].length == MAX_MATCH
        index.extend(text[position : position + right + 1])
        position += right + 1
    return done


def rate(walks: Sequence[Walk]) -> tuple[float, list[float]]:
    """Return correct tokens per lookup, and each excerpt's contribution to the error (linearised ratio)."""
    lookups, right = sum(w.lookups for w in walks), sum(w.right for w in walks)
    return right / lookups, [(w.right - right / lookups * w.lookups) / lookups for w in walks]


def summary(walks: Sequence[Walk], base: Sequence[Walk]) -> dict[str, float]:
    """Summarise the lookups in several excerpts, and their gain over `base` in the same excerpts."""
    lookups = sum(w.lookups for w in walks)
    (right, deviations), (base_right, base_deviations) = rate(walks), rate(base)
    return {
        "right_per_lookup": right,
        "error": standard_error(deviations),
        "gain": right - base_right,
        "gain_error": standard_error([a - b for a, b in zip(deviations, base_deviations, strict=True)]),
        "offered_per_lookup": sum(w.offered for w in walks) / lookups,
        "from_datastore": sum(w.from_datastore for w in walks) / lookups,
        "longest_in_datastore": sum(w.longest_in_datastore for w in walks) / lookups,
    }


def measure_cell(
    texts: Sequence[Sequence[int]], context: int, store: Datastore, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure every choice of sources on the same excerpts, each with fresh calibrations."""
    walks = {}
    for name, sources in SOURCES.items():
        calibrations = [Calibration() for _ in sources]
        walks[name] = [walk(text, context, args.most, sources, store, calibrations) for text in texts]
    copied = [w.longest_in_datastore / w.lookups for w in walks["datastore"]]
    original = [index for index, share in enumerate(copied) if share <= statistics.median(copied)]
    for name, done in walks.items():
        times = sorted(time for w in done for time in w.times_us)
        yield {
            "context": context,
            "sources": name,
            "all": summary(done, walks["context"]),
            "least_copied": summary(*([side[i] for i in original] for side in (done, walks["context"]))),
            "median_us": statistics.median(times),
            "p99_us": times[int(0.99 * len(times))],
            "walks": [{k: v for k, v in asdict(w).items() if k != "times_us"} for w in done],
        }


def forget(path: Path) -> None:
    """Ask the operating system to drop a datastore's pages, which no process may have mapped."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_times(path: Path, vocab_size: int, tokens: Sequence[int], most: int) -> dict[str, Any]:
    """Measure lookups at positions all over a text, first with cold files, then with warm ones."""
    text = np.array(tokens, dtype=np.int32)
    ends = np.linspace(MAX_MATCH, len(text) - 1, TIMED).astype(int)
    random.Random(0).shuffle(ends)
    forget(path)
    store = Datastore(path, vocab_size)
    times = {}
    for name in ("cold", "warm"):
        seen = []
        for end in ends:
            began = perf_counter_ns()
            store.look_up(text[end - MAX_MATCH : end], most)
            seen.append((perf_counter_ns() - began) / 1e3)
        times[name] = {
            "first_100_mean_us": statistics.mean(seen[:100]),
            "mean_us": statistics.mean(seen),
            "median_us": statistics.median(seen),
            "p99_us": sorted(seen)[int(0.99 * len(seen))],
        }
    return times


def table_of(record: Mapping[str, Any]) -> Table:
    """A record's cells."""
    columns = (
        *("context", "right per lookup", "gain", "offered", "from the datastore", "full"),
        *("least copied: right", "gain", "median us", "99 % us"),
    )
    title = f"{record['model']}: lookups of up to {record['settings']['most']} tokens"
    table = make_table(title, columns, names=["sources"])
    for cell in record["cells"]:
        whole, least = cell["all"], cell["least_copied"]
        table.add_row(
            *(cell["sources"], f"{cell['context']:,}", _right(whole), _gain(whole)),
            f"{whole['offered_per_lookup']:.2f}",
            *(f"{100 * whole['from_datastore']:.0f} %", f"{100 * whole['longest_in_datastore']:.0f} %"),
            *(_right(least), _gain(least), f"{cell['median_us']:.0f}", f"{cell['p99_us']:.0f}"),
        )
    return table


def _right(numbers: Mapping[str, float]) -> str:
    return f"{numbers['right_per_lookup']:.2f} ± {numbers['error']:.2f}"


def _gain(numbers: Mapping[str, float]) -> str:
    return f"{numbers['gain']:+.2f} ± {numbers['gain_error']:.2f}" if numbers["gain"] else ""


def run(args: argparse.Namespace, folder: Path) -> None:
    path = folder / "datastore"
    record = make_record("datastore", settings=settings_of(args, "model"), model=Path(args.model).name)
    record["build"] = build(args, path)
    tokenizer = get_tokenizer(args.model, tokenizer_mode=args.tokenizer_mode)
    vocabulary = Vocabulary.of(tokenizer.get_vocab())
    texts = excerpts(tokenizer, args.excerpts, max(args.context) + args.tokens, args.documents)
    record["times"] = measure_times(path, vocabulary.size, list(itertools.chain(*texts)), args.most)
    store = Datastore(path, vocabulary.size, vocabulary)
    record["datastore"] = asdict(store.header)
    record["cells"] = [
        cell
        for context in args.context
        for cell in measure_cell([text[: context + args.tokens] for text in texts], context, store, args)
    ]
    console.print(table_of(record))
    for name, times in record["times"].items():
        console.print(f"{name}: " + ", ".join(f"{key} {value:.0f}" for key, value in times.items()))
    write(record, args.out)


def main() -> None:
    parser = make_parser(__doc__)
    model_help = f"whose tokenizer it is, or {TEKKEN!r}, Mistral's, which vLLM brings"
    parser.add_argument("--model", default=str(TINY_LLAMA), help=model_help)
    parser.add_argument("--tokenizer-mode", default="auto", help="as of 'vllm serve'")
    parser.add_argument("--megabytes", type=float, default=64, help="of sources in the datastore, at most")
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 7000], help="tokens")
    parser.add_argument("--tokens", type=int, default=1000, help="that are followed, per excerpt")
    parser.add_argument("--excerpts", type=int, default=32)
    parser.add_argument("--most", type=int, default=8, help="tokens per lookup")
    add_documents(parser)
    add_out(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model == TEKKEN:
            args.model = link_tekken(Path(folder))
        run(args, Path(folder))


if __name__ == "__main__":
    main()
