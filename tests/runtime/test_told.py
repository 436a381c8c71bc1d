"""What flexsp says of itself: its log, `repr` of what users make, and the page of `explain`."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexsp
from flexsp import log, nn
from flexsp.comm.group import SequenceParallel
from flexsp.compiler import LinearAttention
from flexsp.grammar import FlexLinearAttention, decay, transition
from flexsp.testing.ranks import run_ranks
from tests.harness.interpreted import INTERPRETED
from tests.harness.layers import LAYERS
from tests.variants import load

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def recorded(level: int = logging.DEBUG) -> Iterator[list[logging.LogRecord]]:
    """What is logged inside, by a process that has logged nothing yet."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    before, told = log.LOGGER.level, dict(log._told)
    log._told.clear()
    log.LOGGER.addHandler(handler)
    log.LOGGER.setLevel(level)
    try:
        yield found
    finally:
        log.LOGGER.removeHandler(handler)
        log.LOGGER.setLevel(before)
        log._told.update(told)


def texts(records: list[logging.LogRecord], level: int = logging.INFO) -> list[str]:
    return [x.getMessage() for x in records if x.levelno == level]


# The log


def test_nothing_is_printed_without_a_handler() -> None:
    code = (
        "import logging, flexsp.log\n"
        "flexsp.log.tell(logging.WARNING, 'seen by nobody')\n"
        "logging.basicConfig(level=logging.INFO, format='%(name)s %(levelname)s %(filename)s %(message)s')\n"
        "flexsp.log.tell(logging.INFO, 'seen once')\nflexsp.log.tell(logging.INFO, 'seen once')\n"
        "flexsp.log.tell(logging.DEBUG, 'not wanted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == ["flexsp INFO <string> seen once"]


def test_messages_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_MOST", 2)
    with recorded() as found:
        for text in ("a", "b", "a", "c", "a", "c"):
            log.tell(logging.INFO, text)
    assert texts(found) == ["a", "b", "c", "a"]  # with c, a was forgotten


def test_calls_in_pytorch_are_told_once() -> None:
    q = torch.randn(1, 5, 2, 4)
    made = load("simple_gla").make(2, 4, 4)
    with recorded(logging.INFO) as found:
        for dtype in (torch.float32, torch.float64, torch.float32):
            x = q.to(dtype)
            flexsp.ops.chunk_linear_attn(x, x, x)
            made(q=x, k=x, v=x, g=-x[..., 0].abs())
            made(q=x[:, :3], k=x[:, :3], v=x[:, :3], g=-x[:, :3, :, 0].abs())
    name = made.program.merge.name
    assert texts(found) == [
        "fallback: ops run in PyTorch: the tensors are on CPU",
        f"fallback: {name} runs in PyTorch: the tensors are on CPU",
        "fallback: ops run in PyTorch: kernels have no float64",
        f"fallback: {name} runs in PyTorch: kernels have no float64",
    ]


def test_a_graph_has_no_breaks_for_the_log() -> None:
    with recorded():
        torch._dynamo.reset()
        run = torch.compile(flexsp.ops.chunk_linear_attn, fullgraph=True, backend="eager")
        q = torch.randn(1, 5, 2, 4)
        torch.testing.assert_close(run(q, q, q)[0], flexsp.ops.chunk_linear_attn(q, q, q)[0])


def of_kernels(sp: Any, folder: str) -> list[tuple[int, str]]:
    with recorded() as found:
        made = load("gla").make(2, 16, 16, code_dir=folder, lowering="generated")
        x = {name: torch.rand(1, 20, 2, 16) for name in ("q", "k", "v")}
        for _ in range(2):
            made(**x, g=-torch.rand(1, 20, 2, 16))
            flexsp.ops.chunk_linear_attn(**x)
        large = load("gla").make(1, 300, 4, code_dir=folder, lowering="generated", fallback="pytorch")
        k = torch.rand(1, 3, 1, 300)
        with pytest.warns(UserWarning, match="K = 300"):
            large(q=k, k=k, v=k[..., :4], g=-k)
    return [(x.levelno, x.getMessage()) for x in found]


def test_plans_launches_and_refusals(tmp_path: Path) -> None:
    (found,) = run_ranks(of_kernels, 1, str(tmp_path), env=INTERPRETED, own_processes=True)
    debug = [text for level, text in found if level == logging.DEBUG]
    assert len(set(debug)) == len(debug)
    (plan,) = [text for text in debug if text.startswith("plan: ")]
    assert re.search(r"merge with B = 1, T = 20, H = 2, float32: generated kernels, \w+, 2 chunks of 16 in", plan)
    launches = [text for text in debug if text.startswith("launches: ")]
    assert any("output" in text for text in launches) and len(launches) >= 2  # of the program and of the op
    (told,) = [text for level, text in found if level == logging.INFO]
    assert told.startswith("fallback: merge runs in PyTorch: K = 300")


def with_stand_ins(monkeypatch: pytest.MonkeyPatch, compiled: str | None = "there") -> Any:
    """Launches on a GPU that is not there, with what `run` leaves as their kernel."""
    from flexsp.runtime import launch, steps

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(steps, "current_stream", lambda device: 0)

    class StandIn(launch.KernelLaunch):
        def prepare(self, frame: Any, device: int) -> Any:
            return None

        def run(self, frame: Any, at: Any, stream: int) -> None:
            self.compiled = compiled

    kernels = [SimpleNamespace(__name__=name) for name in ("gate_kernel", "output_kernel")]
    return [StandIn(x, (3, 2), ["x"], (), {}, {}) for x in (*kernels, kernels[1])]


def test_what_a_gpu_compiles_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.runtime.steps import Frame, run_steps

    launches = with_stand_ins(monkeypatch)
    with recorded() as found:
        for _ in range(2):
            run_steps(launches, Frame({}, ()), torch.device("cuda:0"))
    assert texts(found, logging.DEBUG) == ["launches: gate_kernel 3 x 2, output_kernel 3 x 2, output_kernel 3 x 2"]
    (told,) = texts(found)
    start = r"kernels: 3 made ready and launched for the first time in \d+\.\d\d s: "
    assert re.fullmatch(start + "gate_kernel, output_kernel", told)


def test_kernels_that_are_only_collected_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `flexsp compile` does it before it compiles."""
    from flexsp.runtime.steps import Frame, run_steps

    launches = with_stand_ins(monkeypatch, compiled=None)
    with recorded(logging.INFO) as found:
        run_steps(launches, Frame({}, ()), torch.device("cuda:0"))
    assert not found


def test_compilations_are_told_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexsp.runtime import launch

    def compiled(seconds: float) -> SimpleNamespace:
        time.sleep(seconds)
        return SimpleNamespace(metadata=SimpleNamespace(shared=0))

    monkeypatch.setattr(launch, "_compiling", lambda *what: nullcontext((0.05,)))
    monkeypatch.setattr(launch.private, "compile_kernel", compiled)
    with recorded() as found:
        launch.build(SimpleNamespace(__name__="some_kernel"), (), {}, {}, launch.private.gpu_target(90))
    (told,) = texts(found, logging.DEBUG)
    took = re.fullmatch(r"kernel: some_kernel for sm_90, ready after (\d+\.\d{3}) s", told)
    assert took and 0.05 <= float(took[1]) < 60


def joined(sp: SequenceParallel) -> list[list[tuple[int, str]]]:
    found = []
    for options in ({}, {"schedule": "hierarchical", "timeout_s": 30.0}):
        with recorded() as records:
            flexsp.init_sequence_parallel(device="cpu", **options)  # type: ignore[arg-type]
        found.append([(x.levelno, x.getMessage()) for x in records])
    return found


def test_transports_are_told_by_the_first_rank() -> None:
    first, second = run_ranks(joined, 2)
    for level, number, found in ((logging.INFO, 0, first), (logging.DEBUG, 1, second)):
        of = f"ranks: {number} of 2 on 1 host, here cpu; transport process_group, schedule"
        assert [(x, text.startswith(of)) for records in found for x, text in records] == [(level, True)] * 2
        assert found[1][0][1] == f"{of} hierarchical, timeout 30 s"
    with recorded() as alone:
        flexsp.init_sequence_parallel(device="cpu")
    assert texts(alone) == ["ranks: one, on cpu; no transport"]


# Short forms


@pytest.mark.parametrize("name", [name for name, (_, options, _) in LAYERS.items() if "hidden_size" in options])
def test_layers_tell_their_sizes(name: str) -> None:
    cls, options, _ = LAYERS[name]
    layer = cls(**options)
    head = repr(layer).splitlines()[:2]
    assert re.fullmatch(r"\w+\(", head[0]) and re.match(rf"  {layer.hidden_size}, \w+=\d+", head[1]), head
    for attribute, value in re.findall(r"(\w+)=(\d+)", head[1]):
        assert getattr(layer, attribute) == int(value)


def test_wrapped_layers_keep_their_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), nn.SimpleGLA(8, num_heads=2))
    plain = repr(copy.deepcopy(model))
    bound = repr(nn.SequenceParallelLA(model, SequenceParallel(rank=1, world_size=3)))
    assert bound == plain.replace("head_v_dim=4", "head_v_dim=4, rank 1 of 3").replace("'silu'", "'silu', rank 1 of 3")
    assert bound.count("rank 1 of 3") == 2
    assert repr(nn.unwrap(model)) == plain


def test_repr_of_groups() -> None:
    assert repr(SequenceParallel()) == "SequenceParallel(one rank, device='cpu')"
    of_world = SequenceParallel(rank=1, world_size=2)
    assert repr(of_world) == (
        "SequenceParallel(rank 1 of 2, device='cpu', transport='process_group', schedule='chain')"
    )
    few = SequenceParallel(rank=1, world_size=2, global_ranks=[4, 6], segment=1024)
    assert "of the world 4, 6," in repr(few) and repr(few).endswith("bitwise=1024)")
    many = SequenceParallel(world_size=512, global_ranks=range(0, 1024, 2))
    assert "of the world 0, 2, 4, ..., 1022," in repr(many) and len(repr(many)) < 140


def test_repr_of_programs() -> None:
    assert repr(load("simple_gla").make(4, 64, 32)) == (
        "LinearAttention(merge: q [T, H, K], k [T, H, K], v [T, H, V], g [T, H]; H = 4, K = 64, V = 32; "
        "transition scalar)"
    )
    asked = load("gla").make(4, 64, 32, chunk_size=32, fallback="pytorch", autotune=True)
    assert repr(asked).endswith("chunk_size=32, autotune=True, fallback='pytorch')")


def test_repr_of_compositions() -> None:
    given = FlexLinearAttention(decay.gated(per_head=False), transition=transition.delta_rule(), fallback="pytorch")
    assert repr(given) == (
        "FlexLinearAttention(gated decay by channel, identity features, transition delta_rule, fallback='pytorch'; "
        "inputs q, k, v, decay, beta)"
    )

    def fading(i: Any, j: Any, gamma: Any) -> Any:
        return gamma ** (i - j)

    assert "custom mask fading; inputs q, k, v, gamma)" in repr(FlexLinearAttention(custom_mask=fading))


# The page of explain

LINES = 60


@pytest.mark.parametrize("name", ["simple_gla", "gated_deltanet", "rwkv7", "hgrn", "gdn2"])
def test_explain_is_a_page(name: str, tmp_path: Path) -> None:
    made: LinearAttention = load(name).make(4, 64, 64, code_dir=tmp_path)
    page, rest = made.explain(), made.explain(graph=True)
    assert len(page.splitlines()) <= LINES and max(map(len, page.splitlines())) <= 118
    lines = page.splitlines()
    assert rest.splitlines()[: len(lines) - 1] == lines[:-1] and "explain(graph=True)" in lines[-1]
    added = rest.splitlines()[len(lines) - 1 :]
    for word in ("kernels:", "reads", "writes", "chunk: chunk(", "decay: decay(", "merge: merge(", "placeholder"):
        assert any(word in line for line in added) and word not in page.replace(lines[-1], ""), word


def test_columns_of_explain_do_not_collide(tmp_path: Path) -> None:
    """Also with sizes whose numbers are long."""
    made = load("gated_deltanet").make(64, 128, 128, code_dir=tmp_path)
    lines = made.explain(T=2**26, B=64).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("forward "))
    end = next(i for i, line in enumerate(lines) if line.strip().startswith("forward + backward"))
    head = re.split(r"\s{2,}", lines[start].strip())
    assert head == ["forward", "grid", "read MB", "written MB", "GFLOP", "us", "bound by"]
    ends = [lines[start].index(name) + len(name) for name in head[2:6]]
    assert any("spills" in line for line in lines[start:end]) and max(map(len, lines[start:end])) > 118
    for line in [*lines[start:end], lines[end]]:
        assert all(line[at - 1] != " " and line[at : at + 2].strip() == "" for at in ends), line


def test_bad_arguments_of_explain() -> None:
    with pytest.raises(ValueError, match="graph: expected True or False, got 1"):
        load("linear").make(2, 16, 16).explain(graph=1)
