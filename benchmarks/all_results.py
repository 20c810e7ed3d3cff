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
from kv_heavy import TINY_LLAMA

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """One command. `--out` is added to its options, in which `{folder}` is the folder of the results."""

    result: str  # file, or folder of a file that is named for the script
    script: str
    minutes: int  # on two cores of a Zen 5, rounded up
    options: str


# Result, script, minutes, options; lines that are indented go on with the options.
PARTS_TEXT = """
decode-tiny-llama.json decode 4
decode-tiny-llama-snapkv.json decode 2 --batch 4 --context 8000 --policy snapkv
decode-tiny-llama-snapkv-token.json decode 2 --batch 4 --context 8000 --policy snapkv --granularity token
decode-tiny-llama-verify-topk.json decode 2 --batch 4 --context 8000 --policy verify-topk
decode-kv-heavy-16k.json decode 7 --model kv-heavy --gamma 8 --batch 1 4 8 --context 16000 --budget 1024
    --vllm-attention
decode-kv-heavy-16k-native.json decode 5 --model kv-heavy --gamma 8 --batch 8 --context 16000 --budget 1024
decode-kv-heavy-32k.json decode 6 --model kv-heavy --gamma 8 --batch 1 2 --context 32000 --budget 1024
decode-kv-heavy-16k-verify-topk.json decode 4 --model kv-heavy --gamma 8 --batch 4 --context 16000
    --budget 1024 --policy verify-topk
decode-share-kv-heavy-2-full.json decode 3 --model kv-heavy-2-full --gamma 8 --batch 4 --context 16000
    --budget 1024
decode-share-kv-heavy-4-full.json decode 3 --model kv-heavy-4-full --gamma 8 --batch 4 --context 16000
    --budget 1024
decode-share-kv-heavy-6-full.json decode 3 --model kv-heavy-6-full --gamma 8 --batch 4 --context 16000
    --budget 1024
decode-share-kv-heavy.json decode 3 --model kv-heavy --gamma 8 --batch 4 --context 16000 --budget 1024
kernel-share.json kernel_share 12
kernel-share-grouped.json kernel_share 14 --model kv-heavy-grouped --batch 4 --context 4000 --gamma 4
    --tokens 48 --turns 3
native-attention.json native_attention 4
native-attention-float32.json native_attention 6 --dtype float32
native-attention-small-pages.json native_attention 4 --small-pages
native-attention-fp8.json native_attention 1 --kv-cache-dtype fp8_e4m3 --query-lens 1 4 9
native-attention-threads-1.json native_attention 1 --threads 1
native-attention-threads-2.json native_attention 1 --threads 2
suite suite 20 --rate-fractions 0.8
suite-in-turns suite 53 --in-turns --methods plain suffix draft_model magicdec-streamingllm magicdec-snapkv
    magicdec-verify-topk magicdec-auto magicdec-draft_model magicdec-draft_model-auto magicdec-spire
    --num-gpu-blocks-override 3800
suite-in-turns-ngram suite 16 --in-turns --methods plain ngram suffix magicdec-streamingllm
    magicdec-snapkv-token magicdec-auto --rate-fractions 0.8 --num-gpu-blocks-override 3800
suite-in-turns-snapkv suite 13 --in-turns --methods plain magicdec-streamingllm magicdec-snapkv
    magicdec-snapkv-token --context 7000 --rate-fractions 0.8 --num-gpu-blocks-override 3800
suite-in-turns-native suite 55 --in-turns --methods plain plain-native ngram ngram-native suffix
    suffix-native draft_model draft_model-native magicdec-streamingllm magicdec-snapkv-token magicdec-auto
    --context 7000 --requests 8 --repeats 5 --rate-fractions 0.8 --num-gpu-blocks-override 1900
suite-in-turns-all suite 60 --in-turns --methods plain ngram suffix draft_model magicdec-streamingllm
    magicdec-snapkv magicdec-snapkv-token magicdec-verify-topk magicdec-auto --requests 8
    --num-gpu-blocks-override 1900
suite-in-turns-drafts suite 27 --in-turns --methods plain draft_model magicdec-streamingllm
    magicdec-draft_model magicdec-draft_model-auto magicdec-spire magicdec-spire-auto
    --num-gpu-blocks-override 4600
auto-kv-heavy.json auto 30 --batch 1 4 8 --pairs 7
auto-ngram.json auto 12 --method ngram --batch 1 4 8 --context 1000 7000 --pairs 7
auto-draft-model.json auto 12 --method draft_model --batch 1 4 8 --context 1000 7000 --pairs 7
auto-suffix.json auto 12 --method suffix --batch 1 4 8 --context 1000 7000 --pairs 7
lookups-tiny-llama.json lookups 5 --model {tiny_llama} --batch 4 --context 1000 7000 --budget 512
lookups-kv-heavy.json lookups 12 --batch 1 4
lookups-kv-heavy-batch-8.json lookups 14 --batch 8 --contenders fixed auto-off auto
lookups-sampled.json lookups 4 --model {tiny_llama} --batch 8 --context 1000 7000 --tokens 192 --turns 7
    --temperature 1 --contenders plain auto-off auto
draft-window.json draft_window 15
confidence.json confidence 4
datastore.json datastore 4
datastore-tekken.json datastore 4 --model tekken
acceptance.json acceptance 20 --requests 16
acceptance-tiny-hybrid.json acceptance 10 --model tiny-hybrid --requests 16 --budgets 128 256 512
roofline.json roofline 2 {folder}/decode-kv-heavy-16k.json {folder}/decode-tiny-llama.json
roofline-hybrids.json roofline 2 {folder}/decode-share-kv-heavy-2-full.json
    {folder}/decode-share-kv-heavy-4-full.json {folder}/decode-share-kv-heavy-6-full.json
    {folder}/decode-share-kv-heavy.json
"""


def parse_parts(text: str) -> tuple[Part, ...]:
    """The parts of a text that is written as `PARTS_TEXT` is."""
    lines = text.strip().replace("\n    ", " ").splitlines()
    fields = (line.split(maxsplit=3) for line in lines)
    return tuple(Part(name, f"{script}.py", int(m), " ".join(rest)) for name, script, m, *rest in fields)


PARTS = parse_parts(PARTS_TEXT)


def measure(part: Part, folder: Path, log: Path) -> int:
    """Run one part; its result appears in the folder when it is whole, else beside the log.

    Returns:
        The exit status.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as unfinished:
        options = shlex.split(part.options.format(folder=folder, tiny_llama=TINY_LLAMA))
        command = [sys.executable, part.script, *options, "--out", str(Path(unfinished) / part.result)]
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
