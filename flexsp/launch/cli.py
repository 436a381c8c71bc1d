"""The `flexsp` command: `doctor` reports and tests, `dump` reads what ranks wrote after a fault, `plan` and `simulate`
predict, `compile` makes kernels before they are needed, and `bench` measures and shows results.

This is the top of the import tree: the module of a command is imported only when that command runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flexsp import __version__
from flexsp.bench.sizes import DEFAULTS
from flexsp.comm.transport import transport_of, transports

__all__ = ["main", "parser"]

OPS = (
    "simple_gla", "linear_attn", "linear_attn_normalized", "retention", "lightning", "mamba2", "gla",
    "generated_simple_gla", "generated_gla", "generated_deltanet",
    "delta_rule", "gated_delta_rule", "gated_delta_rule_shared_keys", "kda", "gated_delta_product",
    "hgrn", "mlstm", "rwkv7", "mamba", "mamba3", "attention",
)  # fmt: skip
SCHEDULES = ("chain", "serial", "pipelined", "all_gather", "hierarchical")
SIMULATED = (
    "linear_attn", "simple_gla", "retention", "lightning", "mamba2", "generated_simple_gla", "gla", "generated_gla",
    "gated_delta_rule", "gated_delta_rule_shared_keys", "kda", "gated_delta_product",
)  # fmt: skip
PEERS = ("fla", "flashqla", "torch")
LIBRARIES = ("fla", "flashqla", "mamba_ssm", "mlstm_kernels", "cudnn")
GATES = ("mild", "initialised", "bounded", "unbounded", "none")


class _Version(argparse.Action):
    """Prints the releases in one line, and ends the command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        found = {"flexsp": __version__}
        for name in ("torch", "triton"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "not installed"
        print(", ".join(f"{name} {x}" for name, x in (found | {"Python": platform.python_version()}).items()))
        parser.exit()


def _listed(kind: Callable[[str], object], allowed: Sequence[str] | None = None) -> Callable[[str], list[object]]:
    """A comma-separated list, each item converted and, with `allowed`, checked."""

    def convert(text: str) -> list[object]:
        items = [item for item in text.split(",") if item]
        unknown = [item for item in items if allowed and item.partition(":")[0] not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed or ())}, got {','.join(unknown)}")
        return [kind(item) for item in items]

    convert.__name__ = "comma-separated list"
    return convert


def _cases(text: str) -> list[object]:
    """A list of operators, or all of them."""
    return list(OPS) if text == "all" else _listed(str, OPS)(text)


def _names_argument(
    parser: argparse.ArgumentParser, flag: str, allowed: Sequence[str], text: str, default: Sequence[str] | None = None
) -> None:
    """A list of names."""
    chosen = None if default is None else list(default)
    parser.add_argument(flag, type=_listed(str, allowed), default=chosen, metavar="A,B", help=text)


def _sizes_argument(
    parser: argparse.ArgumentParser, flag: str, text: str, default: Sequence[int] | None = None
) -> None:
    """A list of integers."""
    chosen = None if default is None else list(default)
    parser.add_argument(flag, type=_listed(int), default=chosen, metavar="N,N", help=text)


def _transport_arguments(parser: argparse.ArgumentParser, text: str, default: str, names: Sequence[str]) -> None:
    parser.add_argument("--transport", default=default, choices=names, help=f"{text} (default {default})")
    text = "run a file first, in every rank, that makes a transport known by register_transport; may be repeated"
    parser.add_argument("--register", action="append", metavar="FILE.py", help=text)


def _ranks_argument(parser: argparse.ArgumentParser) -> None:
    text = "start this many local ranks, one world size after another (default: the ranks of torchrun)"
    _sizes_argument(parser, "--ranks", text)


def _by_device(parser: argparse.ArgumentParser, flag: str, text: str, **options: Any) -> None:
    """An argument whose default depends on the device; `flexsp.bench.sizes.choose` fills it in."""
    gpu, cpu = (
        ",".join(map(str, value)) or "none" if isinstance(value, list) else value
        for value in DEFAULTS[flag.lstrip("-").replace("-", "_")]
    )
    parser.add_argument(flag, help=f"{text} (default {gpu}; on a CPU {cpu})", **options)


def _shape_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--B", type=int, default=1, help="batch (default 1)")
    _by_device(parser, "--H", "heads", type=int)
    _by_device(parser, "--K", "key width of a head", type=int)
    _by_device(parser, "--V", "value width of a head", type=int)
    _timing_arguments(parser)
    parser.add_argument("--strict", action="store_true", help="exit 1 when an aim is missed")


def _timing_arguments(parser: argparse.ArgumentParser) -> None:
    _by_device(parser, "--dtype", "of q, k and v", choices=("bfloat16", "float16", "float32"))
    _by_device(parser, "--warmup", "runs before timing", type=int)
    _by_device(parser, "--iterations", "timed runs, of which the median is taken", type=int)
    _by_device(parser, "--out", "folder of the JSON")


def _gates_argument(parser: argparse.ArgumentParser) -> None:
    text = "kind of log gates, of `flexsp.bench.gates` (default mild; mamba2's dt stay as they are)"
    parser.add_argument("--gates", default="mild", choices=GATES, help=text)


def _variant_argument(parser: argparse.ArgumentParser) -> None:
    text = "a program of one's own in place of these: a LinearAttention or make(H, K, V, dtype), beside PyTorch"
    parser.add_argument("--variant", metavar="FILE.py:OBJECT", help=text)


def _op_arguments(parser: argparse.ArgumentParser) -> None:
    _shape_arguments(parser)
    _gates_argument(parser)
    _variant_argument(parser)
    _names_argument(parser, "--ops", OPS, f"of {','.join(OPS)} (default all)", OPS)
    _by_device(parser, "--T", "tokens", type=_listed(int), metavar="N,N")
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument("--no-baseline", action="store_true", help="leave flash-linear-attention out")
    _names_argument(parser, "--baseline-ops", OPS, "its ops (tuning one takes minutes)")
    _sizes_argument(parser, "--baseline-T", "its lengths (default all)")
    first = "ops whose first training step is timed, in fresh processes with an empty cache; '' for none"
    _by_device(parser, "--cold", first, type=_listed(str, OPS), metavar="A,B")
    _names_argument(parser, "--cold-baseline", OPS, "the same for the baseline", [])
    parser.add_argument("--cold-timeout", type=float, default=300.0, metavar="S", help="seconds (default 300)")
    _by_device(parser, "--repeats", "repeated runs of first calls and of peak memory", type=int, metavar="N")
    _run_arguments(parser)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--add", metavar="FILE", help="go on with this result file, of the same commit and machine")
    parser.add_argument("--time-limit", type=float, metavar="S", help="start nothing further after this many seconds")
    text = "memory bandwidth of the floor (default: that of a copy, measured in the same run; none on a CPU)"
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help=text)


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="REGEX", help="layers whose names match (default all)")
    _by_device(parser, "--lengths", "tokens", type=_listed(int), metavar="N,N")
    _sizes_argument(parser, "--B", "batches (default 1)", [1])
    text = "kind of log gates, of `flexsp.bench.gates` (default: that of each layer's trained models)"
    parser.add_argument("--gates", choices=GATES[:-1], help=text)
    text = f"other libraries, of {','.join(LIBRARIES)} (default all; '' for none)"
    _names_argument(parser, "--peers", LIBRARIES, text, LIBRARIES)
    text = "the op in PyTorch too: eager, compile or both; '' for neither (default eager)"
    _names_argument(parser, "--naive", ("eager", "compile"), text, ["eager"])
    _by_device(parser, "--check", "tokens over which all are compared with float64; 0 for none", type=int, metavar="N")
    parser.add_argument("--device", help="default: cuda where there is one")
    _timing_arguments(parser)
    _by_device(parser, "--repeats", "repeated runs of peak memory", type=int, metavar="N")
    _run_arguments(parser)


def _scale_arguments(parser: argparse.ArgumentParser) -> None:
    _shape_arguments(parser)
    _gates_argument(parser)
    _variant_argument(parser)
    text = f"all, or some of {','.join(OPS)} (default simple_gla)"
    parser.add_argument("--case", type=_cases, default=["simple_gla"], metavar="A,B", help=text)
    _by_device(parser, "--T-local", "tokens a rank", type=_listed(int), metavar="N,N")
    text = f"of {','.join(SCHEDULES)}; chain:put names the transport too (default all)"
    _names_argument(parser, "--schedules", SCHEDULES, text, SCHEDULES)
    text = "of chain; the other schedules are torch send/recv"
    _transport_arguments(parser, text, "auto", ("auto", *transports()))
    text = f"other libraries over ranks too, of {','.join(PEERS)} (default none; on GPUs alone)"
    _names_argument(parser, "--peers", PEERS, text, [])
    _ranks_argument(parser)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="wait for a rank (default 120)")
    parser.add_argument("--no-states", action="store_true", help="leave out the states' travel alone")
    _sizes_argument(parser, "--state-batches", "batches whose states travel alone (default 1,4)", [1, 4])
    _sizes_argument(parser, "--state-segments", "segments a rank folds there (default 1,8)", [1, 8])


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="that has a config.json of transformers")
    parser.add_argument("--tokens", required=True, metavar="N", help="of one sequence, such as 262144, 128k or 1M")
    parser.add_argument("--gpus", required=True, type=int, metavar="N", help="GPUs in all")
    parser.add_argument("--gpus-per-host", type=int, default=8, metavar="N", help="GPUs of a host (default 8)")
    parser.add_argument("--gpu", default="h200", choices=("h100", "h200"), help="kind of GPU (default h200)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="of a GPU (default: as torch reports it)")
    parser.add_argument("--sequences", type=int, metavar="N", help="of a step (default: one for each dp rank)")
    text = "dtype that parameters and gradients are kept in; layers compute in bfloat16 (default float32)"
    parser.add_argument("--parameters", default="float32", choices=dtypes, help=text)
    text = "dtype of AdamW's two states (default float32)"
    parser.add_argument("--optimizer", default="float32", choices=dtypes, help=text)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    text = "between hosts, of each GPU (default 50)"
    parser.add_argument("--network", type=float, default=50.0, metavar="GB/S", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _gb_s(text: str) -> float:
    """A rate: 50 or 50GB/s."""
    number = text.removesuffix("GB/s")
    try:
        return float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected GB/s such as 50 or 50GB/s, got {text!r}") from None


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    text = "files of `bench scale` on 1, 2 and 4 GPUs (default: those of this project's checkout)"
    parser.add_argument("results", nargs="*", help=text)
    sizes = [8 << i for i in range(8)]
    _sizes_argument(parser, "--ranks", "ranks in all (default 8,16,...,1024)", sizes)
    parser.add_argument("--per-host", type=int, default=8, metavar="N", help="ranks of a host (default 8)")
    text = "of a network card, in each direction (default 50GB/s)"
    parser.add_argument("--nic", type=_gb_s, default=50.0, metavar="GB/s", help=text)
    text = "that a message between hosts takes beside its bytes and what it takes inside one (default 20, assumed)"
    parser.add_argument("--nic-latency", type=float, default=20.0, metavar="US", help=text)
    parser.add_argument("--nics", type=int, metavar="N", help="cards of a host (default: one for each rank)")
    text = "of a GPU's port inside a host, in each direction (default 450GB/s)"
    parser.add_argument("--nvlink", type=_gb_s, default=450.0, metavar="GB/s", help=text)
    parser.add_argument("--T-local", type=int, default=65536, metavar="N", help="tokens a rank (default 65536)")
    chosen = ["gated_delta_rule", "kda", "mamba2", "simple_gla"]
    text = f"operators, of those that make one exchange a pass (default {','.join(chosen)})"
    _names_argument(parser, "--case", SIMULATED, text, chosen)
    chosen = ["chain", "hierarchical", "all_gather"]
    _names_argument(parser, "--schedules", SCHEDULES, f"of {','.join(SCHEDULES)} (default {','.join(chosen)})", chosen)
    text = "that an operator of PyTorch takes beside its bytes, in place of what was measured; 0: what links alone take"
    parser.add_argument("--kernel-us", type=float, metavar="US", help=text)
    parser.add_argument("--check", action="store_true", help="measured rows that are missed, and the cost model")
    parser.add_argument("--out", metavar="FILE.json", help="save the predictions")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them")


def _compile_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a model's folder, with a config.json of transformers or flash-linear-attention; weights are not read"
    parser.add_argument("model", nargs="?", metavar="MODEL_FOLDER", help=text)
    text = "in place of a model: a layer of `flexsp bench models`; may be given again"
    parser.add_argument("--layer", action="append", default=[], metavar="NAME", help=text)
    text = "a program of one's own: a LinearAttention or make(H, K, V, dtype)"
    parser.add_argument("--variant", metavar="FILE.py:OBJECT", help=text)
    for flag, size in (("H", 16), ("K", 128), ("V", 128)):
        parser.add_argument(f"--{flag}", type=int, default=size, help=f"of --variant (default {size})")
    parser.add_argument("--gates", default="mild", choices=GATES, help=argparse.SUPPRESS)
    text = "tokens of one rank, such as 65536 or 64k; long texts are cut otherwise than short ones (default 64k)"
    parser.add_argument("--tokens", type=_listed(str), default=["64k"], metavar="N,N", help=text)
    parser.add_argument("--B", type=int, default=1, help="sequences of a rank (default 1)")
    text = "documents that are packed in a sequence, 0 for none (default 0); each number may have kernels of its own"
    _sizes_argument(parser, "--packed", text, [0])
    text = "of parameters and activations (default bfloat16)"
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help=text)
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of a sequence (default 1)")
    text = "of the ranks (default chain)"
    parser.add_argument("--schedule", default="chain", choices=SCHEDULES, help=text)
    _transport_arguments(parser, "of chain", "peer", [x for x in transports() if transport_of(x).device != "cpu"])
    text = "FLEXSP_HEAP_MIB of the ranks (default: not set, so that calls get what they need)"
    parser.add_argument("--heap", type=int, metavar="MIB", help=text)
    text = "such as h100, h200 or sm_90, which need not be here (default: the GPU that is here)"
    parser.add_argument("--gpu", help=text)
    text = "CUDA release of torch on the GPU's machine, such as 12.8, which limits the release of ptxas (default: here)"
    parser.add_argument("--cuda", metavar="N.N", help=text)
    text = "folder of the kernels, for TRITON_CACHE_DIR there and elsewhere (default: Triton's cache)"
    parser.add_argument("--out", metavar="FOLDER", help=text)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one for each core)")
    parser.add_argument("--check", action="store_true", help="compile nothing; exit 1 if a kernel is not in the cache")


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=("tiny", "1b"), default="1b", help="of the Qwen3-Next model (default 1b)")
    _sizes_argument(parser, "--T", "tokens of the sequence (default 32768,131072)", [32768, 131072])
    parser.add_argument("--sp", type=int, metavar="N", help="ranks that a sequence is cut over (default: all)")
    parser.add_argument("--unmodified", action="store_true", help="the model as transformers has it, on one rank")
    parser.add_argument("--profile", action="store_true", help="one more step, and the times of its kernels on rank 0")
    _transport_arguments(parser, "of the ranks", "auto", ("auto", *transports()))
    _ranks_argument(parser)
    parser.add_argument("--warmup", type=int, default=2, help="steps before timing (default 2)")
    parser.add_argument("--iterations", type=int, default=3, help="timed steps; their median is taken (default 3)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="wait for a rank (default 300)")
    parser.add_argument("--out", default="benchmarks/results", help="folder of the JSON (default benchmarks/results)")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(prog="flexsp", description=sys.modules["flexsp"].__doc__)
    root.add_argument("--version", action=_Version, help="of flexsp and of what it runs with")
    commands = root.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what works on this machine, and a self-test of under a minute")
    doctor.add_argument("--no-test", action="store_true", help="report only")
    doctor.add_argument("--ranks", type=int, metavar="N", help="GPU ranks of the self-test (default: up to 4)")
    dump = commands.add_parser("dump", help="who was where, from the files of a folder that FLEXSP_DUMP named")
    dump.add_argument("folder")
    text = "memory and step time of a model of transformers on some GPUs, and how to split them"
    _plan_arguments(commands.add_parser("plan", help=text))
    text = "weak scaling over many ranks on many hosts, predicted from what 1, 2 and 4 GPUs were measured to take"
    _simulate_arguments(commands.add_parser("simulate", help=text))
    text = "compile the kernels of a model's training step into Triton's cache, on any machine"
    _compile_arguments(commands.add_parser("compile", help=text))
    bench = commands.add_parser("bench", help="measure").add_subparsers(dest="bench", required=True)
    _op_arguments(bench.add_parser("op", help="operators on one device, beside flash-linear-attention"))
    _scale_arguments(bench.add_parser("scale", help="weak scaling over ranks, under torchrun or with --ranks"))
    text = "layers of released models, beside other libraries as their layers call them"
    _models_arguments(bench.add_parser("models", help=text))
    host = bench.add_parser("host", help="host time of a call of generated kernels, with and without the dispatcher")
    _shape_arguments(host)
    chosen = ["generated_simple_gla", "generated_deltanet", "simple_gla", "mamba2"]
    _names_argument(host, "--ops", OPS, f"of {','.join(OPS)}", chosen)
    host.add_argument("--T", type=int, default=1024, help="tokens (default 1024)")
    _by_device(host, "--repeats", "fresh processes, of whose medians the median is taken", type=int, metavar="N")
    host.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    traffic = bench.add_parser("traffic", help="bytes that generated kernels move, counted by ncu, and predicted")
    _shape_arguments(traffic)
    generated = [name for name in OPS if name.startswith("generated")]
    traffic.add_argument("--op", choices=generated, default="generated_simple_gla")
    traffic.add_argument("--T", type=int, default=65536, help="tokens (default 65536)")
    traffic.add_argument("--timeout", type=float, default=300, help="seconds for ncu (default 300)")
    traffic.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    _model_arguments(bench.add_parser("model", help="training steps of a whole model, one sequence over the ranks"))
    table = bench.add_parser("table", help="Markdown tables of result files")
    table.add_argument("results", nargs="+")
    document = bench.add_parser("document", help="write the measured parts of documents anew from result files")
    document.add_argument("documents", nargs="+")
    plot = bench.add_parser("plot", help="weak-scaling picture of `bench scale` result files")
    plot.add_argument("results", nargs="+")
    plot.add_argument("--case", type=_cases, metavar="A,B", help="operators to draw (default all in the files)")
    plot.add_argument("--out", default="benchmarks/results/weak_scaling.png")
    predict = bench.add_parser("predict", help="cost model of `bench scale` result files, for another world size")
    predict.add_argument("results", nargs="+")
    predict.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks to predict for (default 8)")
    predict.add_argument("--case", type=_cases, metavar="A,B", help="operators to predict (default all in the files)")
    return root


def _run_first(words: Sequence[str]) -> None:
    """Runs the files of ``--register``. The names that they register may stand among the other words."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--register", action="append", default=[])
    for file in early.parse_known_args(words)[0].register:
        path = Path(file)
        found = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
        if found is None or found.loader is None:
            raise ValueError(f"--register: expected a Python file that exists, got {file!r}")
        sys.modules[path.stem] = module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _run_first(words)
    except ValueError as error:
        print(f"flexsp: {error}", file=sys.stderr)
        return 1
    args = parser().parse_args(words)
    args.argv = words
    modules = {
        "doctor": "flexsp.launch.doctor", "dump": "flexsp.launch.dump", "plan": "flexsp.planner.report",
        "simulate": "flexsp.bench.simulate", "compile": "flexsp.ahead.command",
    }  # fmt: skip
    name = modules.get(args.command) or f"flexsp.bench.{args.bench}"
    try:
        status: int = importlib.import_module(name).run(args)
        return status
    except (OSError, ValueError) as error:
        print(f"flexsp: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
