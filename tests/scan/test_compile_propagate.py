"""The propagate kernel compiled without a GPU: resources, and the order of its signals in sm_90's PTX."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from flexsp.devices import H200, of_arch, planned_for
from tests.harness.compiling import in_child
from tests.marks import quick, slow

pytestmark = pytest.mark.compiles

VARIANTS: dict[str, dict[str, Any]] = {
    "local scalar": {"shape": (1, 9, 32, 128, 128), "kind": "scalar", "cut": True, "reverse": False},
    "local vector": {"shape": (2, 9, 4, 256, 256), "kind": "vector", "cut": True, "reverse": True},
    "local odd": {"shape": (1, 9, 3, 100, 37), "kind": "none", "cut": False, "reverse": False},
    "first": {"shape": (1, 9, 32, 128, 128), "kind": "none", "cut": False, "reverse": False, "rank": 0},
    "middle": {"shape": (1, 9, 32, 128, 128), "kind": "scalar", "cut": True, "reverse": False, "rank": 1},
    "middle vector": {"shape": (1, 9, 32, 64, 128), "kind": "vector", "cut": True, "reverse": True, "rank": 1},
    "middle wide": {"shape": (1, 9, 8, 256, 256), "kind": "vector", "cut": True, "reverse": True, "rank": 1},
    "middle odd": {"shape": (1, 9, 3, 100, 37), "kind": "scalar", "cut": True, "reverse": False, "rank": 1},
    "local each": {"shape": (1, 9, 32, 128, 128), "kind": "elementwise", "cut": True, "reverse": True},
    "middle each": {"shape": (1, 9, 32, 128, 128), "kind": "elementwise", "cut": True, "reverse": False, "rank": 1},
    "middle each odd": {"shape": (1, 9, 3, 100, 37), "kind": "elementwise", "cut": True, "reverse": True, "rank": 1},
    "local maxima": {"shape": (1, 9, 32, 64, 1), "kind": "max-plus", "cut": True, "reverse": False},
    "middle maxima": {"shape": (1, 9, 32, 128, 128), "kind": "max-plus", "cut": True, "reverse": False, "rank": 1},
    "maxima in float64": {
        "shape": (1, 2, 1, 16, 256),
        "kind": "max-plus",
        "cut": True,
        "reverse": False,
        "rank": 1,
        "number": "float64",
    },
    "last": {"shape": (1, 9, 32, 128, 128), "kind": "scalar", "cut": True, "reverse": False, "rank": 2},
    "few numbers": {"shape": (1, 2, 1, 1, 256), "kind": "none", "cut": True, "reverse": True, "rank": 1},
    "many numbers": {"shape": (1, 2, 3, 16, 256), "kind": "none", "cut": True, "reverse": False, "rank": 1},
    "fold": {"shape": (1, 9, 32, 128, 128), "kind": "scalar", "cut": True, "reverse": False, "fold": True},
    "middle dense": {"shape": (1, 2, 32, 128, 128), "kind": "dense", "cut": False, "reverse": False, "rank": 1},
    "middle dense back": {"shape": (1, 2, 32, 128, 128), "kind": "dense", "cut": False, "reverse": True, "rank": 1},
    "middle large": {"shape": (1, 2, 8, 256, 256), "kind": "dense", "cut": False, "reverse": False, "rank": 1},
    "middle large back": {"shape": (1, 2, 8, 192, 256), "kind": "dense", "cut": False, "reverse": True, "rank": 1},
    "local large": {"shape": (1, 2, 8, 200, 37), "kind": "dense", "cut": False, "reverse": False},
    "last dense": {"shape": (1, 2, 3, 100, 37), "kind": "dense", "cut": False, "reverse": False, "rank": 2},
    "both first": {"shape": (1, 9, 16, 256, 256), "kind": "scalar", "cut": False, "reverse": False, "rank": 0,
                   "beside": (1, 5, 8, 256, 1)},
    "both middle": {"shape": (1, 9, 16, 256, 256), "kind": "scalar", "cut": True, "reverse": False, "rank": 1,
                    "beside": (1, 5, 8, 256, 1)},
    "both middle back": {"shape": (2, 9, 8, 128, 128), "kind": "scalar", "cut": True, "reverse": True, "rank": 1,
                         "beside": (2, 9, 8, 128, 1)},
    "both last": {"shape": (1, 9, 3, 100, 37), "kind": "scalar", "cut": False, "reverse": False, "rank": 2,
                  "beside": (1, 4, 3, 100, 1)},
    "put": {"shape": (1, 9, 32, 128, 128), "kind": "scalar", "cut": True, "reverse": False, "rank": 1, "put": True},
}
QUICK = (
    "local odd", "first", "middle", "middle vector", "local each", "middle maxima", "maxima in float64", "last",
    "few numbers", "fold", "middle dense back", "both middle",
)  # fmt: skip
"""Of each kind of transition and of ranks one; they are compiled in one child, the others in another."""


def launch_of(
    shape: tuple[int, ...], kind: str, cut: bool, reverse: bool, rank: int | None = None, put: bool = False,
    fold: bool = False, number: str = "float32", beside: tuple[int, ...] | None = None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The one launch of a call on meta tensors, in a child process."""
    import torch

    from flexsp.comm.group import SequenceParallel
    from flexsp.comm.heap import SymmetricHeap
    from flexsp.scan import propagate as module
    from flexsp.scan.both import Scan, propagate_both
    from flexsp.scan.transitions import Transition
    from flexsp.testing.offline import record_launches

    class Heap(SymmetricHeap):
        def pe(self, group_rank: int) -> int:
            return group_rank

    def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    B, slots, H, K, V = shape
    n, dtype = slots - 1, getattr(torch, number)
    behind = {"none": None, "scalar": (), "vector": (K,), "dense": (K, K)}.get(kind, (K, V))
    a = None if behind is None else meta(B, n, H, *behind, dtype=dtype)
    through = Transition(kind, a, meta(B, n, dtype=torch.int32) if cut else None)
    sp = None
    if rank is not None:
        arena = meta(64 << 20, dtype=torch.uint8)
        heap = Heap(arena, [arena] * 3)
        sp = SequenceParallel(rank=rank, world_size=3, device="meta", transport="put" if put else "peer", heap=heap)
    with record_launches() as launches:
        if fold:
            folded = meta(B, H, K, V)
            module._launch(meta(*shape), through, reverse, folded=folded, seeded=False)
        elif beside is not None and sp is not None:
            n2, H2 = beside[1] - 1, beside[2]
            second = Transition(kind, meta(B, n2, H2), meta(B, n2, dtype=torch.int32) if cut else None)
            propagate_both(Scan(meta(*shape), through), Scan(meta(*beside), second), sp, reverse=reverse)
        else:
            module.propagate(meta(*shape, dtype=dtype), through, sp, reverse=reverse)
    assert len(launches) == 1, "propagate is one kernel"
    return launches[0]


def heaps_of(shape: tuple[int, ...], stages: bool, grows: bool) -> Any:
    """In a child process: how large a heap a call of rank 1 makes, beside one of 32 MiB; else what its error says."""
    import torch

    from flexsp.comm.group import SequenceParallel
    from flexsp.comm.heap import SymmetricHeap
    from flexsp.comm.transport import Transport, register_transport
    from flexsp.exceptions import HeapTooSmall
    from flexsp.scan.propagate import fits, propagate
    from flexsp.scan.transitions import Transition
    from flexsp.testing.offline import record_launches

    def heap(nbytes: int) -> SymmetricHeap:
        arena = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return SymmetricHeap(arena, [arena] * 3)

    transport = Transport()
    transport.name, transport.device, transport.stages = "some", "cuda", stages
    register_transport(transport)
    how = {"heap": heap(32 << 20), "open_heap": heap if grows else None, "transport": "some"}
    sp = SequenceParallel(rank=1, world_size=3, device="meta", **how)
    B, _, H, K, V = shape
    assert fits(B, H, K, V, "none", sp) == grows
    try:
        with record_launches() as launches:
            propagate(torch.empty(shape, device="meta"), Transition("none"), sp)
    except HeapTooSmall as error:
        return str(error)
    assert len(launches) == 1
    return sp.heap.nbytes


def grows_in_a_graph() -> str:
    from types import SimpleNamespace

    import torch

    from flexsp.exceptions import HeapTooSmall
    from flexsp.scan.propagate import _larger

    torch.cuda.is_current_stream_capturing = lambda: True
    sp: Any = SimpleNamespace(heap=SimpleNamespace(nbytes=9), open_heap=print, device=torch.device("cuda"))
    channel: Any = SimpleNamespace(tile_bytes=1 << 20)
    try:
        return str(_larger(sp, channel, 3))
    except HeapTooSmall as error:
        return str(error)


def test_a_heap_does_not_grow_while_a_graph_is_captured() -> None:
    """Its memory would be made once, by ranks that wait for each other, and the graph would be captured for it."""
    said = in_child(grows_in_a_graph)
    assert "did not grow, since a CUDA graph is being captured" in said and "FLEXSP_HEAP_MIB to 6 or more" in said


@pytest.mark.parametrize("stages", [False, True])
def test_the_heap_that_a_large_state_needs(stages: bool) -> None:
    """A state of 67 MB and four sequences: in both directions two slots for each tile, and a stage where it is sent
    from."""
    shape, regions = (4, 2, 64, 512, 512), 2 + stages
    needed = 2 * (4 * 64 * 512 * 512 // 4096) * (regions * 16384 + 128)
    assert in_child(heaps_of, shape, stages, True) == needed
    said = in_child(heaps_of, shape, stages, False)
    assert f"needed {needed} bytes, had {32 << 20}; set heap_mib" in said
    assert f"FLEXSP_HEAP_MIB to {1540 if stages else 1028} or more" in said


def compile_variants(arch: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """In a child process."""
    from flexsp.testing.offline import compile_launches

    with planned_for(of_arch(arch)):
        launches = [launch_of(**VARIANTS[name]) for name in names]
    found = compile_launches(launches, arch)
    return {name: vars(x) | {"waits_first": x.waits_first} for name, x in zip(names, found, strict=True)}


@functools.cache
def _compiled(of_quick: bool) -> dict[str, Any]:
    return in_child(compile_variants, 90, [x for x in VARIANTS if x != "put" and (x in QUICK) == of_quick])


def compiled(name: str) -> dict[str, Any]:
    return _compiled(name in QUICK)[name]


@pytest.mark.parametrize("name", quick((name for name in VARIANTS if name != "put"), *QUICK))
def test_resources(name: str) -> None:
    found = compiled(name)
    assert found["spills"] == 0, found["spills"]
    assert found["shared"] < H200.shared
    assert found["waits_first"], "memory is touched before the kernel before is done"


STACK = {(86, "last dense"): 48, (89, "last dense"): 48}  # bytes a thread, of Triton 3.6


@pytest.mark.parametrize("arch", slow(80, 86, 89, 100))
def test_other_gpus(arch: int) -> None:
    """It fits, spills no more than is stated, and waits for the kernel before where that is launched as a dependent,
    nowhere else."""
    for name, found in in_child(compile_variants, arch, [x for x in VARIANTS if x != "put"]).items():
        print(arch, name, found["registers"], found["stack"], found["shared"])
        assert found["shared"] <= of_arch(arch).shared, name
        assert found["stack"] <= STACK.get((arch, name), 0), name
        assert ("griddepcontrol" in found["ptx"]) == of_arch(arch).dependent == found["waits_first"], name


@pytest.mark.parametrize("name", quick((name for name in VARIANTS if name != "put"), *QUICK))
def test_only_the_first_rank_paces_its_tiles(name: str) -> None:
    assert ("%clock64" in compiled(name)["ptx"]) == name.endswith("first")


def instructions(ptx: str) -> tuple[list[str], list[list[int]]]:
    """The kernel's instructions and, for each, those that may run after it."""
    lines = [line.strip() for line in ptx.splitlines()]
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in lines:
        label = re.match(r"(\$\w+):", line)
        if label:
            labels[label[1]] = len(code)
        elif re.match(r"(@!?%p\d+\s+)?[a-z]+[\w.]*[\s;]", line) and line.endswith(";"):
            code.append(line)
    follow = []
    for i, line in enumerate(code):
        target = re.search(r"\bbra[\w.]*\s+(\$\w+)", line)
        after = [labels[target[1]]] if target else []
        if not (target and not line.startswith("@")) and "ret;" not in line and i + 1 < len(code):
            after.append(i + 1)
        follow.append(after)
    return code, follow


def first_reached(code: list[str], follow: list[list[int]], start: int, pattern: str) -> set[str]:
    """The first instructions matching ``pattern`` on the paths from (not including) ``start``."""
    seen: set[int] = set()
    found: set[str] = set()
    todo = list(follow[start])
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        hit = re.search(pattern, code[i])
        if hit:
            found.add(hit[0])
        else:
            todo += follow[i]
    return found


@pytest.mark.parametrize(
    "name",
    [
        "first",
        "middle",
        "middle vector",
        "middle dense back",
        "last",
        "both middle",
        *slow("middle wide", "middle odd", "middle dense", "middle large", "middle large back", "both middle back"),
    ],
)
def test_signals_are_ordered(name: str) -> None:
    code, follow = instructions(compiled(name)["ptx"])
    releases = [i for i, line in enumerate(code) if "sys.release" in line]
    assert releases
    for i in releases:
        # The barrier that brings in the other threads stands before every release, with no memory access between.
        before = next(line for line in reversed(code[:i]) if re.search(r"bar\.sync|(ld|st|atom|red)\.global", line))
        assert "bar.sync" in before
    acquires = [i for i, line in enumerate(code) if "sys.acquire" in line]
    assert acquires
    for i in acquires:
        # One thread polls; the others learn of it through a barrier before they load anything.
        assert first_reached(code, follow, i, r"bar\.sync|(ld|st)\.global") == {"bar.sync"}
    if name == "first":
        return
    arrived = [i for i, line in enumerate(code) if "ld.global.cg" in line]
    assert arrived, "tiles that arrive bypass L1"
    stops = r"ld\.global\.cg|sys\.release|sys\.acquire"
    assert any("ld.global.cg" in first_reached(code, follow, i, stops) for i in acquires)
    for i in arrived:
        # After the tile is loaded nothing is waited for before it is passed on or given credit for.
        assert first_reached(code, follow, i, r"sys\.release|sys\.acquire") == {"sys.release"}


def test_time_is_one_threads() -> None:
    """Loops with barriers in them must not end on a clock that every thread reads for itself."""
    ptx = compiled("middle")["ptx"]
    registers = re.findall(r"mov\.u64\s+(%rd\d+), %globaltimer", ptx)
    assert registers
    for register in registers:
        uses = [line for line in ptx.splitlines() if re.search(register + r"\b", line) and "globaltimer" not in line]
        assert uses and all(re.search(r"\b(atom|red)\..*\.max\.", line) for line in uses), uses


def test_put_links_the_nvshmem_bitcode() -> None:
    from flexsp.comm.nvshmem import find_device_library
    from flexsp.exceptions import NotAvailable

    try:
        find_device_library()
    except NotAvailable as error:
        pytest.skip(str(error))
    found = in_child(compile_variants, 90, ["put"])["put"]
    assert found["spills"] == 0 and found["waits_first"]
    assert found["shared"] < H200.shared
    assert not re.search(r"\.extern\s+\.func[^;]*nvshmem", found["ptx"], re.DOTALL), "bitcode not linked"
