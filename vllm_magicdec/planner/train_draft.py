# SPDX-License-Identifier: Apache-2.0
"""`magicdec train-draft`: train a SPIRe draft of a Llama on documents.

`OUT/training` holds tokenized documents and a checkpoint until the draft is written, `config.json` last,
so that the same command resumes an interrupted training.
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
from vllm_magicdec.planner import documents
from vllm_magicdec.planner.console import UserError, require

EXTRA = "train"


def run(options: argparse.Namespace) -> None:
    """Run `magicdec train-draft`."""
    for module in ("torch", "transformers", "safetensors"):
        require(module, EXTRA)
    import torch
    from transformers.utils import logging

    from vllm_magicdec.spire.settings import SpireError

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not 0 <= options.omega <= 1:
        raise UserError(f"--omega has to be from 0 to 1, not {options.omega}")
    for name in ("batch", "sequence", "steps", "learning_rate"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} has to be above 0, not {value}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("train-draft uses one device; start it without torchrun")
    torch.manual_seed(options.seed)
    _create_work_folder(options.out)
    try:
        _train(options)
    except SpireError as error:
        raise UserError(str(error)) from None


def add_command(subparsers: Any) -> None:
    """Add `train-draft` to the command line."""
    parser = subparsers.add_parser(
        "train-draft",
        help="train a small draft from a target (SPIRe)",
        description="Train a SPIRe draft (arXiv 2504.06419) of a Llama: its embedding, last blocks and "
        f"unembedding, over sinks and a window of the target's activations. Formats: {documents.FORMATS}. "
        "The same command resumes an interrupted training.",
    )
    parser.add_argument("--model", required=True, help="the target: a name or a folder")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="FILE", help="files or folders"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    documents.add_options(parser)

    def add_number(group: Any, name: str, default: float, text: str) -> None:
        group.add_argument(name, type=type(default), default=default, help=f"{text} (default: %(default)s)")

    shape = parser.add_argument_group("the draft")
    shape.add_argument("--layers", type=int, help="layers (default: a quarter of the target's)")
    add_number(shape, "--sinks", 4, "first tokens that the draft attends to")
    add_number(shape, "--window", 252, "latest tokens that the draft attends to")
    add_number(shape, "--draft-steps", 4, "drafts per round in training, k")
    shape.add_argument(
        "--no-feedback-memory", action="store_true", help="compute keys and values as in a Llama"
    )
    training = parser.add_argument_group("the training")
    training.add_argument("--steps", type=int, help="optimizer steps (default: one epoch)")
    add_number(training, "--batch", 8, "sequences per step")
    add_number(training, "--sequence", 2048, "tokens per sequence")
    add_number(training, "--learning-rate", 5e-4, "highest learning rate")
    add_number(training, "--omega", 0.5, "share of distillation in the loss")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument(
        "--float32",
        action=argparse.BooleanOptionalAction,
        help="compute in float32 or in bfloat16 (default: bfloat16 on GPUs and on CPUs with fast bfloat16)",
    )
    add_number(training, "--checkpoint-minutes", 5.0, "minutes between checkpoints")
    parser.set_defaults(run=run)


def _train(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoTokenizer

    from vllm_magicdec.spire import files as draft_files
    from vllm_magicdec.spire.sequences import Sequences
    from vllm_magicdec.spire.settings import SpireSettings
    from vllm_magicdec.spire.target import Target, make_draft
    from vllm_magicdec.spire.training import Plan, Trainer, has_fast_bfloat16

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    in_float32 = not has_fast_bfloat16(device) if options.float32 is None else options.float32
    target = Target(options.model, torch.float32 if in_float32 else torch.bfloat16, device)
    settings = SpireSettings.pruned(
        os.path.basename(os.path.abspath(options.model)),
        target.config.num_hidden_layers,
        options.layers,
        sinks=options.sinks,
        window=options.window,
        num_draft_steps=options.draft_steps,
        feedback_memory=not options.no_feedback_memory,
    )
    if options.sequence < 2 * settings.num_draft_steps:
        raise UserError(
            f"--sequence has to be at least {2 * settings.num_draft_steps}, two rounds of drafts"
        )
    if options.sequence > target.config.max_position_embeddings:
        raise UserError(
            f"--sequence has to be at most {target.config.max_position_embeddings}, the target's length"
        )
    tokenizer = documents.load_tokenizer(options.model, AutoTokenizer.from_pretrained)
    work = options.out / "training"
    checkpoint = work / "checkpoint.pt"
    data = _encode_once(options, tokenizer, target.config.vocab_size, work)
    sequences = Sequences.read(
        work / "tokens.bin", target.config.vocab_size, options.sequence, options.seed
    )
    plan = Plan(
        num_steps=options.steps or max(1, sequences.num_training // options.batch),
        batch=options.batch,
        sequence=options.sequence,
        learning_rate=options.learning_rate,
        omega=options.omega,
        seed=options.seed,
        bfloat16=not in_float32,
    )
    draft = make_draft(target, settings)
    trainer = Trainer(draft, target, sequences, plan)
    if checkpoint.exists():
        trainer.resume(checkpoint)
        print(f"resumed at step {trainer.step:,} of {plan.num_steps:,}")
    with _ended_by_signals() as should_end:
        is_done = trainer.run(
            checkpoint,
            seconds_between=options.checkpoint_minutes * 60,
            should_end=should_end,
            report=lambda: _print_progress(trainer),
        )
    if not is_done:
        print(f"stopped at step {trainer.step:,} of {plan.num_steps:,}; the same command resumes it")
        return
    draft_files.save(draft, work)
    (work / "model.safetensors").replace(options.out / "model.safetensors")
    tokenizer.save_pretrained(options.out)
    size = (options.out / "model.safetensors").stat().st_size
    log = {
        "draft": {**asdict(settings), "num_layers": settings.num_layers},
        "plan": asdict(plan),
        "data": data,
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
    (options.out / "README.md").write_text(draft_files.make_card(options.out.resolve().name, command, log))
    (work / "config.json").replace(options.out / "config.json")  # last: it marks the folder as a model
    shutil.rmtree(work, ignore_errors=True)  # network file systems keep files that are still mapped
    print(f"wrote {options.out}: {size / 1e6:.1f} MB; expected acceptance {log['held_out_acceptance']}")


def _create_work_folder(out: Path) -> None:
    try:
        if (out / "config.json").exists():
            raise UserError(f"{out} holds a model already; remove it, or give --out another path")
        work = out / "training"
        work.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()  # an existing folder may be read-only
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {reason(error)}; name another") from None


def _encode_once(
    options: argparse.Namespace, tokenizer: Any, vocab_size: int, work: Path
) -> dict[str, Any]:
    """Write `work/tokens.bin` if it does not exist, and return the data's description."""
    from vllm_magicdec.spire.sequences import write_tokens

    files = documents.find_files(options.data, options.include)
    stamps = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    inputs = {"files": stamps, "field": options.field, "model": options.model}
    source = work / "data.json"
    if source.exists():
        earlier = json.loads(source.read_text())
        if earlier["made_of"] != inputs:
            raise UserError(
                f"{work.parent} holds a training on other data; give the same --data, or another --out"
            )
        return earlier["data"]
    names = sorted({file.name for file in files})
    data: dict[str, Any] = {"files": [*names[:5], *(["..."] if len(names) > 5 else [])]}
    data["num_tokens"] = write_tokens(
        work / "tokens.bin",
        documents.encode(documents.read_texts(files, options.field), tokenizer),
        vocab_size,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    partial = source.with_suffix(".part")
    partial.write_text(json.dumps({"made_of": inputs, "data": data}))
    partial.replace(source)
    return data


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGINT or SIGTERM was received."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_progress(trainer: Any) -> None:
    """Print a line for every new entry of the log."""
    entry, total = trainer.log[-1] if trainer.log else {"step": 0}, trainer.plan.num_steps
    if entry["step"] != trainer.step:
        return
    minutes_left = trainer.seconds / trainer.step * (total - trainer.step) / 60
    print(
        f"step {trainer.step:,} of {total:,}  loss {entry['loss']:.3f}  "
        f"acceptance {entry['acceptance']:.3f}  {minutes_left:.1f} minutes left",
        flush=True,
    )


def _machine(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of {os.cpu_count()} CPU cores"
