# SPDX-License-Identifier: Apache-2.0
"""`magicdec train-draft`: a SPIRe draft of a Llama, trained on documents.

`DIR/training` holds the encoded documents and a checkpoint until the draft is written, `config.json` last,
so that the same command goes on where one was interrupted.
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_magicdec.files import reason
from vllm_magicdec.planner.console import UserError, require
from vllm_magicdec.planner.documents import FORMATS, add_options, encode, find_files, read_texts

EXTRA = "train"


def run(options: argparse.Namespace) -> None:
    """The subcommand."""
    for module in ("torch", "transformers", "safetensors", "rich"):
        require(module, EXTRA)
    import torch
    from transformers.utils import logging

    from vllm_magicdec.spire.settings import SpireError
    from vllm_magicdec.spire.training import Processes

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not 0 <= options.omega <= 1:
        raise UserError(f"--omega is a number from 0 to 1, not {options.omega}")
    for name in ("batch", "sequence", "steps", "learning_rate"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} has to be above 0, not {value}")
    processes = Processes()
    torch.manual_seed(options.seed)
    try:
        processes.of_first(lambda: _make_work(options.out))
        _train(options, processes)
    except SpireError as error:
        raise UserError(str(error)) from None
    finally:
        processes.leave()


def add_command(subparsers: Any) -> None:
    """Add `train-draft` to the command line."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a small draft from a target (SPIRe)",
        description="Train a SPIRe draft (arXiv 2504.06419) of a Llama: its embedding, last blocks and "
        f"unembedding, over sinks and a window of the target's own activations. Formats: {FORMATS}. "
        "The same command goes on with a training that was interrupted; torchrun -m vllm_magicdec "
        "train-draft uses several GPUs.",
    )
    parser.add_argument("--model", required=True, help="the target: a name or a folder")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="FILE", help="files, or folders of them"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    add_options(parser)
    shape = parser.add_argument_group("the draft")
    shape.add_argument("--layers", type=int, help="of the draft (default: a quarter of the target's)")
    shape.add_argument("--sinks", type=int, default=4, help="first tokens in view (default: %(default)s)")
    shape.add_argument(
        "--window", type=int, default=252, help="latest tokens in view (default: %(default)s)"
    )
    shape.add_argument(
        "--draft-steps", type=int, default=4, help="drafts of a round in training, k (default: %(default)s)"
    )
    training = parser.add_argument_group("the training")
    training.add_argument("--steps", type=int, help="of the optimizer (default: all data once)")
    training.add_argument("--batch", type=int, default=8, help="sequences per step (default: %(default)s)")
    training.add_argument("--sequence", type=int, default=2048, help="tokens of one (default: %(default)s)")
    training.add_argument(
        "--learning-rate", type=float, default=5e-4, help="the highest (default: %(default)s)"
    )
    training.add_argument(
        "--omega", type=float, default=0.5, help="share of distillation in the loss (default: %(default)s)"
    )
    training.add_argument("--seed", type=int, default=0)
    training.add_argument(
        "--float32",
        action=argparse.BooleanOptionalAction,
        help="products in float32, or in bfloat16 (default: in bfloat16 on a GPU and on a CPU with "
        "AMX or AVX512_BF16, but for Intel's with AVX512_FP16 and without AMX; others are slower in it)",
    )
    training.add_argument(
        "--checkpoint-minutes", type=float, default=5, help="between checkpoints (default: %(default)s)"
    )
    ablations = parser.add_argument_group("the paper's ablations, for comparison")
    ablations.add_argument("--no-sparse-kv", action="store_true", help="a window over all of a sequence")
    ablations.add_argument(
        "--no-target-activations",
        action="store_true",
        help="the draft's own for verified tokens; cannot be served",
    )
    ablations.add_argument(
        "--no-distillation", action="store_true", help="train on the text's tokens alone"
    )
    ablations.add_argument("--random-init", action="store_true", help="take no weights of the target")
    ablations.add_argument(
        "--no-feedback-memory", action="store_true", help="keys and values as in a Llama"
    )
    parser.set_defaults(run=run)


def _train(options: argparse.Namespace, processes: Any) -> None:
    import torch

    from vllm_magicdec.spire import files as draft_files
    from vllm_magicdec.spire.card import make_card
    from vllm_magicdec.spire.sequences import Sequences
    from vllm_magicdec.spire.settings import SpireSettings
    from vllm_magicdec.spire.target import Target, make_draft
    from vllm_magicdec.spire.training import Plan, Trainer, has_fast_bfloat16
    from vllm_magicdec.spire.training import run as run_training

    is_first = processes.rank == 0
    device = processes.device
    in_float32 = options.float32
    if in_float32 is None:
        in_float32 = processes.of_first(lambda: not has_fast_bfloat16(device))
    target = Target(options.model, torch.float32 if in_float32 else torch.bfloat16, device)
    settings = SpireSettings.pruned(
        os.path.basename(os.path.abspath(options.model)),
        target.config.num_hidden_layers,
        options.layers,
        sinks=options.sinks,
        window=target.config.max_position_embeddings if options.no_sparse_kv else options.window,
        num_draft_steps=options.draft_steps,
        feedback_memory=not options.no_feedback_memory,
        target_activations=not options.no_target_activations,
    )
    if options.sequence < 2 * settings.num_draft_steps:
        raise UserError(
            f"--sequence has to be at least {2 * settings.num_draft_steps}, two rounds of drafts"
        )
    if options.sequence > target.config.max_position_embeddings:
        raise UserError(
            f"--sequence is at most {target.config.max_position_embeddings}, what the target can read"
        )
    tokenizer = _load_tokenizer(options.model)
    work = options.out / "training"
    checkpoint = work / "checkpoint.pt"
    data = processes.of_first(lambda: _encode_once(options, tokenizer, target.config.vocab_size, work))
    held = processes.of_first(lambda: _stamps(work))
    if processes.any(_stamps(work) != held):
        raise UserError(f"--out {options.out} has to be in a folder that all processes share; name one")
    sequences = Sequences.read(work / "tokens.bin", options.sequence, options.seed)
    plan = Plan(
        num_steps=options.steps or max(1, sequences.num_training // options.batch),
        batch=options.batch,
        sequence=options.sequence,
        learning_rate=options.learning_rate,
        omega=options.omega,
        distillation=not options.no_distillation,
        seed=options.seed,
        bfloat16=not in_float32,
        pruned=not options.random_init,
    )
    draft = make_draft(target, settings, pruned=plan.pruned)
    trainer = Trainer(draft, target, sequences, plan, processes)
    if checkpoint.exists():
        trainer.resume(checkpoint)
        if is_first:
            print(f"goes on at step {trainer.step:,} of {plan.num_steps:,}")
    with _ended_by_signals(processes) as should_end, _progress(trainer, is_first) as report:
        is_done = run_training(
            trainer,
            checkpoint,
            seconds_between=options.checkpoint_minutes * 60,
            is_writer=is_first,
            should_end=should_end,
            report=report,
        )
    if not is_done:
        if is_first:
            print(f"stopped at step {trainer.step:,} of {plan.num_steps:,}; the same command goes on")
        return
    if not is_first:
        return
    draft_files.save(draft, work)
    (work / "model.safetensors").replace(options.out / "model.safetensors")
    tokenizer.save_pretrained(options.out)
    size = (options.out / "model.safetensors").stat().st_size
    log = {
        "draft": {**asdict(settings), "num_layers": settings.num_layers},
        "plan": asdict(plan),
        "pruned": plan.pruned,
        "data": data,
        "processes": processes.count,
        "num_parameters": sum(weight.numel() for weight in draft.parameters()),
        "megabytes": size / 1e6,
        "minutes": round(trainer.seconds / 60, 1),
        "held_out_acceptance": [round(share, 4) for share in trainer.evaluate()],
        "memory_weights": (
            draft.model.memory_logits.detach().softmax(-1).tolist() if settings.feedback_memory else None
        ),
        "machine": _machine(device),
        "versions": {
            "python": platform.python_version(),
            **{name: require(name).__version__ for name in ("torch", "transformers")},
        },
        "log": trainer.log,
    }
    (options.out / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")
    command = "magicdec " + shlex.join(sys.argv[1:])
    (options.out / "README.md").write_text(make_card(options.out.resolve().name, command, log))
    # It marks the folder as a model, so all else is there before.
    (work / "config.json").replace(options.out / "config.json")
    shutil.rmtree(work, ignore_errors=True)  # network file systems keep files that are still mapped
    print(f"wrote {options.out}: {size / 1e6:.1f} MB; expected acceptance {log['held_out_acceptance']}")


def _make_work(out: Path) -> None:
    """Make `out/training`, if it is not there."""
    try:
        if (out / "config.json").exists():
            raise UserError(f"{out} holds a model already; remove it, or give --out another path")
        work = out / "training"
        work.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()  # it may be there, and yet be read-only
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {reason(error)}; name another") from None


def _stamps(work: Path) -> list[tuple[int, int] | None]:
    """Sizes and times of the files in `work` that every process reads; None for one that it cannot open."""
    stamps: list[tuple[int, int] | None] = []
    for name in ("tokens.bin", "checkpoint.pt"):
        try:
            # Network file systems may know old attributes of a file until it is opened.
            with (work / name).open("rb") as file:
                status = os.fstat(file.fileno())
            stamps.append((status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return stamps


def _load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"--model {model} has no tokenizer that can be loaded: {reason}") from None


def _encode_once(
    options: argparse.Namespace, tokenizer: Any, vocab_size: int, work: Path
) -> dict[str, Any]:
    """Write `work/tokens.bin`, if it is not there; returns what it was made of."""
    from vllm_magicdec.spire.sequences import write_tokens

    files = find_files(options.data, options.include)
    stamps = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    made_of = {"files": stamps, "field": options.field, "model": options.model}
    source = work / "data.json"
    if source.exists():
        held = json.loads(source.read_text())
        if held["made_of"] != made_of:
            raise UserError(
                f"{work.parent} holds a training on other data; give the same --data, or another --out"
            )
        return held["data"]
    names = sorted({file.name for file in files})
    data: dict[str, Any] = {"files": [*names[:5], *(["..."] if len(names) > 5 else [])]}
    data["num_tokens"] = write_tokens(
        work / "tokens.bin",
        encode(read_texts(files, options.field), tokenizer),
        vocab_size,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    partial = source.with_suffix(".part")
    partial.write_text(json.dumps({"made_of": made_of, "data": data}))
    partial.replace(source)
    return data


@contextlib.contextmanager
def _ended_by_signals(processes: Any) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end a training after its step, in all processes together."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }

    try:
        yield lambda: processes.any(bool(received))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(trainer: Any, is_shown: bool) -> Iterator[Callable[[int, float, float], None]]:
    """A bar with loss, expected acceptance and the time left; lines where the output is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  acceptance {task.fields[acceptance]:.3f}"),
        TimeRemainingColumn(),
    )
    total = trainer.plan.num_steps
    with Progress(*columns, disable=not is_shown or not sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=total, completed=trainer.step, loss=0.0, acceptance=0.0)

        def report(step: int, loss: float, acceptance: float) -> None:
            progress.update(task, completed=step, loss=loss, acceptance=acceptance)
            if is_shown and progress.disable and trainer.log and trainer.log[-1]["step"] == step:
                entry = trainer.log[-1]
                left = trainer.seconds / step * (total - step) / 60
                print(
                    f"step {step:,} of {total:,}  loss {entry['loss']:.3f}  "
                    f"acceptance {entry['acceptance']:.3f}  {left:.1f} minutes left",
                    flush=True,
                )

        yield report


def _machine(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of {os.cpu_count()} CPU cores"
