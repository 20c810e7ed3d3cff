# SPDX-License-Identifier: Apache-2.0
"""The results of every script, measured on one machine in one go: `make results`.

The results lie in a folder that is named for the machine. A part whose file is there is not measured again,
so that an interrupted run goes on; delete the file, or the folder, to measure anew. A part that fails does
not keep the others from being measured; what it had made lies beside its log. In the end the tables of the
pages are written anew from the files that they name.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.machine import describe_machine, device_of
from common.options import make_parser
from common.tables import console, make_table
from docs_tables import RESULTS, fill_tables
from kv_heavy import KV_HEAVY, KV_HEAVY_GROUPED, KV_HEAVY_HYBRIDS, TINY_HYBRID, TINY_LLAMA

HERE = Path(__file__).resolve().parent
LONG = f"--model {KV_HEAVY} --gamma 8"
SHARES = (*KV_HEAVY_HYBRIDS, KV_HEAVY)  # of layers that see the whole context, ascending
POLICY = "--batch 4 --context 8000 --policy"


@dataclass(frozen=True)
class Part:
    """One command; in its options `{out}` is where its result goes, `{folder}` where the others are."""

    result: str  # file, or folder of a file that is named for the script
    script: str
    options: str
    minutes: int  # on two cores of a Zen 5, rounded up


PARTS = (
    Part("decode-tiny-llama.json", "decode.py", "--out {out}", 4),
    Part("decode-tiny-llama-snapkv.json", "decode.py", f"{POLICY} snapkv --out {{out}}", 2),
    Part(
        "decode-tiny-llama-snapkv-token.json",
        "decode.py",
        f"{POLICY} snapkv --granularity token --out {{out}}",
        2,
    ),
    Part("decode-tiny-llama-verify-topk.json", "decode.py", f"{POLICY} verify-topk --out {{out}}", 2),
    Part(
        "decode-kv-heavy-16k.json",
        "decode.py",
        f"{LONG} --batch 1 4 8 --context 16000 --budget 1024 --vllm-attention --out {{out}}",
        7,
    ),
    Part(
        "decode-kv-heavy-16k-native.json",
        "decode.py",
        f"{LONG} --batch 8 --context 16000 --budget 1024 --out {{out}}",
        5,
    ),
    Part(
        "decode-kv-heavy-32k.json",
        "decode.py",
        f"{LONG} --batch 1 2 --context 32000 --budget 1024 --out {{out}}",
        6,
    ),
    Part(
        "decode-kv-heavy-16k-verify-topk.json",
        "decode.py",
        f"{LONG} --batch 4 --context 16000 --budget 1024 --policy verify-topk --out {{out}}",
        4,
    ),
    *(
        Part(
            f"decode-share-{model}.json",
            "decode.py",
            f"--model {model} --gamma 8 --batch 4 --context 16000 --budget 1024 --out {{out}}",
            3,
        )
        for model in SHARES
    ),
    Part("kernel-share.json", "kernel_share.py", "--out {out}", 12),
    Part(
        "kernel-share-grouped.json",
        "kernel_share.py",
        f"--model {KV_HEAVY_GROUPED} --batch 4 --context 4000 --gamma 4 --tokens 48 --turns 3 "
        "--out {out}",
        14,
    ),
    Part("native-attention.json", "native_attention.py", "--out {out}", 4),
    Part("native-attention-float32.json", "native_attention.py", "--dtype float32 --out {out}", 6),
    Part("native-attention-small-pages.json", "native_attention.py", "--small-pages --out {out}", 4),
    Part(
        "native-attention-fp8.json",
        "native_attention.py",
        "--kv-cache-dtype fp8_e4m3 --query-lens 1 4 9 --out {out}",
        1,
    ),
    *(
        Part(
            f"native-attention-threads-{threads}.json",
            "native_attention.py",
            f"--threads {threads} --out {{out}}",
            1,
        )
        for threads in (1, 2)
    ),
    Part("suite", "suite.py", "--rate-fractions 0.8 --out {out}", 20),
    Part(
        "suite-in-turns",
        "suite.py",
        "--in-turns --methods plain suffix draft_model magicdec-streamingllm magicdec-snapkv "
        "magicdec-verify-topk magicdec-auto magicdec-draft_model magicdec-draft_model-auto magicdec-spire "
        "--num-gpu-blocks-override 3800 --out {out}",
        53,
    ),
    Part(
        "suite-in-turns-ngram",
        "suite.py",
        "--in-turns --methods plain ngram suffix magicdec-streamingllm magicdec-snapkv-token magicdec-auto "
        "--rate-fractions 0.8 --num-gpu-blocks-override 3800 --out {out}",
        16,
    ),
    Part(
        "suite-in-turns-snapkv",
        "suite.py",
        "--in-turns --methods plain magicdec-streamingllm magicdec-snapkv magicdec-snapkv-token "
        "--context 7000 --rate-fractions 0.8 --num-gpu-blocks-override 3800 --out {out}",
        13,
    ),
    Part(
        "suite-in-turns-native",
        "suite.py",
        "--in-turns --methods plain plain-native ngram ngram-native suffix suffix-native draft_model "
        "draft_model-native magicdec-streamingllm magicdec-snapkv-token magicdec-auto --context 7000 "
        "--requests 8 --repeats 5 --rate-fractions 0.8 --num-gpu-blocks-override 1900 --out {out}",
        55,
    ),
    Part(
        "suite-in-turns-all",
        "suite.py",
        "--in-turns --methods plain ngram suffix draft_model magicdec-streamingllm magicdec-snapkv "
        "magicdec-snapkv-token magicdec-verify-topk magicdec-auto --requests 8 "
        "--num-gpu-blocks-override 1900 --out {out}",
        60,
    ),
    Part(
        "suite-in-turns-drafts",
        "suite.py",
        "--in-turns --methods plain draft_model magicdec-streamingllm magicdec-draft_model "
        "magicdec-draft_model-auto magicdec-spire magicdec-spire-auto --num-gpu-blocks-override 4600 "
        "--out {out}",
        27,
    ),
    Part("auto-kv-heavy.json", "auto.py", "--batch 1 4 8 --pairs 7 --out {out}", 30),
    Part(
        "lookups-tiny-llama.json",
        "lookups.py",
        f"--model {TINY_LLAMA} --batch 4 --context 1000 7000 --budget 512 --out {{out}}",
        5,
    ),
    Part("lookups-kv-heavy.json", "lookups.py", "--batch 1 4 --out {out}", 12),
    Part(
        "lookups-kv-heavy-batch-8.json",
        "lookups.py",
        "--batch 8 --contenders fixed auto-off auto --out {out}",
        14,
    ),
    Part(
        "lookups-sampled.json",
        "lookups.py",
        f"--model {TINY_LLAMA} --batch 8 --context 1000 7000 --tokens 192 --turns 7 --temperature 1 "
        "--contenders plain auto-off auto --out {out}",
        4,
    ),
    Part("confidence.json", "confidence.py", "--out {out}", 4),
    Part("datastore.json", "datastore.py", "--out {out}", 4),
    Part("datastore-tekken.json", "datastore.py", "--model tekken --out {out}", 4),
    Part("acceptance.json", "acceptance.py", "--requests 16 --out {out}", 20),
    Part(
        "acceptance-tiny-hybrid.json",
        "acceptance.py",
        f"--model {TINY_HYBRID.name} --requests 16 --budgets 128 256 512 --out {{out}}",
        10,
    ),
    Part(
        "roofline.json",
        "roofline.py",
        "--out {out} {folder}/decode-kv-heavy-16k.json {folder}/decode-tiny-llama.json",
        2,
    ),
    Part(
        "roofline-hybrids.json",
        "roofline.py",
        "--out {out} " + " ".join(f"{{folder}}/decode-share-{model}.json" for model in SHARES),
        2,
    ),
)


def measure(part: Part, folder: Path, log: Path) -> int:
    """Run one part; its result appears in the folder when it is whole, else beside the log.

    Returns:
        The exit status.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as unfinished:
        options = part.options.format(out=Path(unfinished) / part.result, folder=folder)
        command = [sys.executable, part.script, *shlex.split(options)]
        with log.open("w") as output:
            status = subprocess.run(command, cwd=HERE, stdout=output, stderr=subprocess.STDOUT).returncode
        target = folder if status == 0 else log.with_suffix("")
        target.mkdir(exist_ok=True)
        for made in Path(unfinished).iterdir():  # the result, and plots beside it
            shutil.move(made, target / made.name)
    return status


def measure_all(parts: tuple[Part, ...], folder: Path, logs: Path) -> Iterator[tuple[Part, str, float]]:
    """Each part, what became of it, and its minutes."""
    for part in parts:
        if (folder / part.result).exists():
            yield part, "there already", 0.0
            continue
        console.print(f"{part.result}: about {part.minutes} minutes")
        began = time.monotonic()
        log = logs / f"{Path(part.result).stem}.log"
        status = measure(part, folder, log)
        outcome = f"failed with status {status}, see {log}" if status else "measured"
        yield part, outcome, (time.monotonic() - began) / 60


def name_of(device: str) -> str:
    """Of a machine's folder."""
    return re.sub(r"[^a-z0-9_]+", "-", device.lower()).strip("-")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[part.result for part in PARTS], help="of the parts")
    parser.add_argument("--out", type=Path, help=f"folder (default: the machine's, in {RESULTS.name}/)")
    args = parser.parse_args()
    machine = describe_machine()
    folder = (args.out or RESULTS / name_of(device_of(machine))).resolve()
    logs = folder.parent / f".{folder.name}-logs"
    for path in (folder, logs):
        path.mkdir(parents=True, exist_ok=True)
    parts = tuple(part for part in PARTS if not args.only or part.result in args.only)
    console.print(f"{device_of(machine)}, load average {machine['load_average']:.1f}: to {folder}")
    table = make_table("results", ["minutes"], names=["result", "outcome"])
    failed = False
    for part, outcome, minutes in measure_all(parts, folder, logs):
        failed |= outcome.startswith("failed")
        console.print(f"{part.result}: {outcome}, {minutes:.1f} minutes")
        table.add_row(part.result, outcome, f"{minutes:.1f}")
    console.print(table)
    for page in fill_tables():
        console.print(f"filled the tables of {os.path.relpath(page)}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
