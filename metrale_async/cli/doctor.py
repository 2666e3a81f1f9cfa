"""``doctor``: what this machine is, and what the engine would choose on it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metrale_async.arguments import argument
from metrale_async.cli.environment import VARIABLES
from metrale_async.cli.machine import MachineFacts, machine_facts
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.engine.engine_args import DEFAULT_MODEL, EngineArgs
from metrale_async.errors import MetraleError

GIB: Final = 2**30
Finding = TypeVar("Finding")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorArgs:
    """Flags of ``doctor``."""

    json: bool = argument(False, group="Output", help="print JSON")


COMMAND_LINE: Final = CommandLine(
    "doctor",
    "Shows processor, memory, CUDA, kernels, io_uring and models, and what serve would choose with the same flags.",
    positionals=[Positional("model", "the model that memory is planned for", DEFAULT_MODEL)],
    configurations=[DoctorArgs, EngineArgs],
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Device:
    """One CUDA device."""

    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What ``serve`` would give the KV cache."""

    model: str
    dtype: str
    kv_cache_bytes: int
    num_blocks: int
    tokens: int
    max_seq_len: int
    max_batch_size: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A question that has no answer here, and why."""

    problem: str


@dataclass(frozen=True, slots=True)
class Report:
    machine: MachineFacts
    cuda: Sequence[Device]
    device: Choice | Problem
    kernels: Choice | Problem
    disk_io: Choice | Problem
    memory: MemoryPlan | Problem
    models_folder: str
    models: Mapping[str, str | None]
    """Name -> where it lies; None if it is not fetched."""
    environment: Mapping[str, str]
    """Variables of ours that are set."""


def run(line: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(line)
    report = examine(parsed.of(EngineArgs))
    if parsed.of(DoctorArgs).json:
        print(orjson.dumps(dataclasses.asdict(report), option=orjson.OPT_INDENT_2).decode())
    else:
        _print(report)
    problems = (report.device, report.kernels, report.disk_io, report.memory)
    return 1 if any(isinstance(finding, Problem) for finding in problems) else 0


def examine(args: EngineArgs) -> Report:
    """Look at everything; what cannot be answered becomes a Problem, so that the rest is still told."""
    from metrale_async.models import list_models, models_folder

    return Report(
        machine=machine_facts(),
        cuda=_cuda_devices(),
        device=_ask(lambda: _device(args)),
        kernels=_ask(lambda: _kernels(args)),
        disk_io=_ask(lambda: asyncio.run(_disk_io())),
        memory=_ask(lambda: _memory(args)),
        models_folder=str(models_folder()),
        models={model.name: None if model.path is None else str(model.path) for model in list_models()},
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _ask(question: Callable[[], Finding]) -> Finding | Problem:
    try:
        return question()
    except (MetraleError, ImportError, OSError, RuntimeError) as error:
        return Problem(f"{type(error).__name__}: {error}")


def _cuda_devices() -> list[Device]:
    import torch

    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [Device(device.name, device.total_memory, f"{device.major}.{device.minor}") for device in found]


def _device(args: EngineArgs) -> Choice:
    from metrale_async.startup import choose_device

    chosen = choose_device(args.device)
    if args.device != "auto":
        return Choice(str(chosen), f"--device {args.device}")
    return Choice(str(chosen), "torch finds a CUDA device" if chosen.type == "cuda" else "torch finds no CUDA device")


def _kernels(args: EngineArgs) -> Choice:
    from metrale_async.startup import choose_device, choose_kernels

    selection = choose_kernels(choose_device(args.device))
    return Choice(selection.name, selection.reason)


async def _disk_io() -> Choice:
    """Which backend the storage ring takes here; no file is touched."""
    from metrale_storage import Ring

    async with Ring.open() as ring:
        chosen = ring.backend_name
    if chosen == "io_uring":
        return Choice(chosen, "the kernel lets this process set up a ring")
    try:
        async with Ring.open(backend="io_uring"):
            pass
    except (OSError, ImportError, RuntimeError) as error:
        return Choice(chosen, f"no io_uring: {error}")
    return Choice(chosen, "asked for")


def _memory(args: EngineArgs) -> MemoryPlan:
    """As startup sizes it, from the configuration alone: the weights are not loaded, so their file stands for them."""
    import torch

    from metrale_async.models import decoder_states, load_config, resolve_model
    from metrale_async.startup import choose_device
    from metrale_async.startup.memory import (
        auto_batch_size,
        available_memory_bytes,
        bytes_per_block,
        cpu_kv_bytes,
        kv_cache_size,
        most_sequences,
        recurrent_bytes,
    )

    source = resolve_model(args.model)
    config = load_config(source)
    # What auto means for every checkpoint but those in float32.
    dtype = torch.float32 if args.dtype == "float32" else torch.bfloat16
    states = decoder_states(config, dtype)
    block_bytes, sequence_bytes = bytes_per_block(states, args.block_size), recurrent_bytes(states)
    files = [source.path] if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))
    weight_bytes = sum(file.stat().st_size for file in files)
    device = choose_device(args.device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * args.gpu_memory_utilization) - (total - free) - weight_bytes
        batch = args.max_batch_size or most_sequences(budget, sequence_bytes)
        budget -= batch * sequence_bytes
    else:
        budget = cpu_kv_bytes(args.kv_cache_gb, available_memory_bytes() - weight_bytes)
        batch = args.max_batch_size or most_sequences(budget, sequence_bytes)
    max_seq_len = min(args.max_seq_len, config.max_position_embeddings)
    useful = batch * -(-max_seq_len // args.block_size)
    size = kv_cache_size(budget, block_bytes, most_useful_blocks=useful)
    tokens = size.num_blocks * args.block_size
    return MemoryPlan(
        model=source.display_name,
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_bytes=size.nbytes,
        num_blocks=size.num_blocks,
        tokens=tokens,
        max_seq_len=max_seq_len,
        max_batch_size=args.max_batch_size or min(batch, auto_batch_size(tokens)),
    )


def _print(report: Report) -> None:
    machine = report.machine
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: Any) -> None:
        if isinstance(value, Problem):
            table.add_row(name, f"[red]{escape(value.problem)}[/red]")
        elif isinstance(value, Choice):
            table.add_row(name, f"{escape(value.name)} [dim]{escape(value.reason)}[/dim]")
        else:
            table.add_row(name, escape(str(value)))

    row("processor", f"{machine.cpu}, {machine.physical_cores} cores, {machine.usable_cores} usable threads")
    row("instruction sets", ", ".join(machine.isa_flags) or "none that matter here")
    row("memory", f"{_gib(machine.memory_bytes)}, {_gib(machine.available_memory_bytes)} available")
    row("system", f"{machine.operating_system}, Python {machine.python}")
    row("packages", ", ".join(f"{name} {version or '(missing)'}" for name, version in machine.packages.items()))
    row("CUDA", "; ".join(f"{d.name}, {_gib(d.memory_bytes)}, {d.compute_capability}" for d in report.cuda) or "none")
    row("device", report.device)
    row("kernels", report.kernels)
    row("disk I/O", report.disk_io)
    row("KV cache", report.memory if isinstance(report.memory, Problem) else _memory_text(report.memory))
    row("models folder", report.models_folder)
    row("models", "\n".join(f"{name}: {path or 'not fetched'}" for name, path in report.models.items()))
    row("environment", ", ".join(f"{name}={value}" for name, value in report.environment.items()) or "nothing set")
    Console().print(table)


def _memory_text(plan: MemoryPlan) -> str:
    size = f"{_gib(plan.kv_cache_bytes)} for {plan.model} in {plan.dtype}"
    return (
        f"{size}: {plan.num_blocks:,} blocks, {plan.tokens:,} tokens; "
        f"sequences of up to {plan.max_seq_len:,} tokens, {plan.max_batch_size} at once"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
