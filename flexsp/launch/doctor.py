"""`flexsp doctor`: what this machine has, what flexsp can use of it, and a self-test of under a minute.

Everything that touches a device or another rank runs in child processes with a time limit, so the command ends even
where a driver or a rank does not answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Child", "Finding", "coverage", "gpu_report", "run", "software", "transports", "triton_advice"]

CHILD_TIMEOUT_S = 100.0
RANK_TIMEOUT_S = 20.0
_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "info": "    "}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `level` is ok, warn, fail or info, and only fail makes the exit status 1."""

    level: str
    name: str
    detail: str

    def line(self, width: int) -> str:
        return f"  {_MARKS[self.level]}  {self.name:<{width}}  {self.detail}"


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _interpreter_fails(triton: str, numpy: str | None) -> bool:
    """Triton 3.6's interpreter fails with numpy 2.4 and newer."""
    return _numbers(triton)[:2] == (3, 6) and numpy is not None and _numbers(numpy) >= (2, 4)


def triton_advice(triton: str | None, numpy: str | None, hopper: bool, wanted: str | None = None) -> list[Finding]:
    """Whether Triton is missing, has a known fault, or is not the release that torch was built with."""
    if triton is None:
        return [Finding("warn", "triton", "not installed: the ops run on the PyTorch reference")]
    number = _numbers(triton)
    found = []
    if (3, 4) <= number < (3, 7, 1):
        text = (
            f"{triton}: 3.4 to 3.7.0 miscompiles one gated backward kernel of flash-linear-attention on Hopper (its "
            "issue 640); flexsp's kernels are checked by the self-test below"
        )
        found.append(Finding("warn" if hopper else "info", "triton", text))
    else:
        found.append(Finding("ok", "triton", triton))
    if _interpreter_fails(triton, numpy):
        text = f"{numpy}: Triton 3.6's interpreter (TRITON_INTERPRET=1, transport posix) needs numpy < 2.4"
        found.append(Finding("warn", "numpy", text))
    if wanted is not None and wanted != triton:
        found.append(Finding("warn", "torch and triton", f"this torch was built for Triton {wanted}, found {triton}"))
    return found


def coverage(report: dict[str, Any], triton: str | None) -> list[Finding]:
    """Whether the GPU tests have run with this Triton on these GPUs."""
    from flexsp.runtime.tested_versions import uncovered

    found = []
    for name, capability in dict.fromkeys((gpu["name"], tuple(gpu["capability"])) for gpu in report["gpus"]):
        if triton is not None:
            text = uncovered(triton, capability, name)
            passed = f"passed with Triton {triton} on GPUs like {name}"
            found.append(Finding("warn" if text else "ok", "GPU tests", text or passed))
    return found


def _wanted_triton() -> str | None:
    """The Triton release that the installed torch requires, where it requires one exactly."""
    for line in importlib.metadata.requires("torch") or []:
        match = re.match(r"triton\s*==\s*([\d.]+)", line)
        if match:
            return match[1]
    return None


def software() -> list[Finding]:
    """The versions of Python, torch and the libraries that flexsp uses."""
    found = [Finding("info", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    torch = _version("torch")
    if torch is None:
        return [*found, Finding("fail", "torch", "not installed")]
    found.append(Finding("ok" if _numbers(torch) >= (2, 11) else "warn", "torch", f"{torch} (2.11 or newer expected)"))
    numpy = _version("numpy")
    missing = "not installed: torch.distributed needs it; pip install numpy"
    found.append(Finding("ok" if numpy else "fail", "numpy", numpy or missing))
    found.append(Finding("info", "flexsp", _version("flexsp") or "run from its source tree"))
    for name, packages in (
        ("nvshmem4py", ("nvshmem4py-cu13", "nvshmem4py-cu12")),
        ("nvidia-nvshmem", ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")),
        ("nccl", ("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
        ("flash-linear-attention", ("flash-linear-attention", "fla-core")),
    ):
        found.append(Finding("info", name, _version(*packages) or "not installed"))
    prefixes = ("FLEXSP_", "NVSHMEM_", "NCCL_NVLS", "NCCL_P2P", "TORCH_SYMM_MEM", "TRITON_", "CUDA_VISIBLE_DEVICES")
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(prefixes)]
    return [*found, Finding("info", "environment", " ".join(settings) or "nothing set")]


def gpu_report() -> dict[str, Any]:
    """GPUs and their peer access as seen by torch. Touches the driver: called in a child process."""
    import torch

    from flexsp.comm.nvshmem import find_device_library, why_not
    from flexsp.exceptions import NotAvailable

    if not torch.cuda.is_available():
        return {"gpus": [], "peers": []}
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        p = torch.cuda.get_device_properties(index)
        gpus.append({"name": p.name, "capability": [p.major, p.minor], "gib": p.total_memory / 2**30,
                     "sms": p.multi_processor_count})  # fmt: skip
    peers = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    heaps = {kind: why_not(kind) for kind in ("nvshmem", "torch_symm")}
    try:
        find_device_library()
        put = heaps["nvshmem"]
    except NotAvailable as error:
        put = str(error)
    return {"gpus": gpus, "peers": peers, "heaps": heaps, "put": put, "cuda": torch.version.cuda}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown driver"
    return f"driver {lines[0]}" if lines else "unknown driver"


def _hardware(report: dict[str, Any]) -> list[Finding]:
    if not report["gpus"]:
        return [Finding("info", "GPUs", "none that torch can use; everything runs on the CPU")]
    found = []
    for index, gpu in enumerate(report["gpus"]):
        capability = ".".join(map(str, gpu["capability"]))
        text = f"{gpu['name']}, {gpu['gib']:.0f} GiB, {gpu['sms']} SMs, capability {capability}"
        found.append(Finding("ok", f"GPU {index}", text))
    found.append(Finding("info", "CUDA", f"{report['cuda']}, {_driver()}"))
    for index, row in enumerate(report["peers"] if len(report["gpus"]) > 1 else []):
        marks = " ".join("." if index == j else "yes" if access else "no " for j, access in enumerate(row))
        found.append(Finding("ok" if all(row) else "warn", f"peer access from GPU {index}", marks))
    return found


def transports(report: dict[str, Any]) -> list[Finding]:
    """Which transports can be opened here, and what the others lack."""
    gpus, triton, numpy = len(report["gpus"]), _version("triton"), _version("numpy")
    reachable = gpus > 1 and all(all(row) for row in report["peers"])
    found = [Finding("ok", "process_group", "gloo" + (", nccl" if gpus else ""))]
    if gpus < 2:
        found.append(Finding("info", "peer, put", f"need 2 GPUs, found {gpus}"))
    else:
        names = {"nvshmem": "nvshmem4py", "torch_symm": "torch symmetric memory"}
        heaps = [names[kind] for kind, missing in report["heaps"].items() if missing is None]
        if not heaps:
            found.append(Finding("warn", "peer", "; ".join(map(str, report["heaps"].values()))))
        else:
            text = f"heap from {heaps[0]}" + ("" if reachable else "; some GPUs cannot reach each other's memory")
            found.append(Finding("ok" if reachable else "warn", "peer", text))
        missing = report["put"]
        found.append(Finding("info" if missing else "ok", "put", missing or "NVSHMEM put-with-signal"))
    interpreted = triton is not None and not _interpreter_fails(triton, numpy)
    if interpreted and Path("/dev/shm").is_dir() and os.access("/dev/shm", os.W_OK):
        return [*found, Finding("ok", "posix", "kernels between CPU processes under TRITON_INTERPRET=1")]
    return [*found, Finding("info", "posix", "needs Triton with a working interpreter and a writable /dev/shm")]


@dataclass
class Child:
    """One test as one or several processes, killed together at the time limit.

    Each prints its findings as JSON on its last line. `arguments` follow `python -m`; with `ranks` > 1 the processes
    get torchrun's environment.
    """

    title: str
    arguments: Sequence[str]
    ranks: int = 1
    timeout_s: float = CHILD_TIMEOUT_S
    environment: dict[str, str] = field(default_factory=dict)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _deadline: float = 0.0

    def start(self, folder: Path) -> Child:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        common = {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FLEXSP_TIMEOUT_S": str(RANK_TIMEOUT_S),
                  **self.environment}  # fmt: skip
        port = _free_port()
        self._deadline = time.monotonic() + self.timeout_s
        for rank in range(self.ranks):
            log = folder / f"{re.sub(r'[^a-z0-9]+', '_', self.title.lower())}.{rank}"
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            own = {name: str(value) for name, value in world.items()} if self.ranks > 1 else {}
            with log.open("wb") as output:
                command = [sys.executable, "-m", *self.arguments]
                process = subprocess.Popen(command, env={**common, **own}, stdout=output, stderr=subprocess.STDOUT,
                                           start_new_session=True)  # fmt: skip
            self._processes.append(process)
            self._logs.append(log)
        return self

    def collect(self) -> list[Finding]:
        """Wait for every process, at most until the time limit, then kill the process groups that still run."""
        late = []
        for rank, process in enumerate(self._processes):
            try:
                process.wait(max(0.1, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = [finding for rank in range(self.ranks) for finding in self._read(rank, rank in late)]
        failed = [finding for finding in found if finding.level != "ok"]
        return failed or found[: len(found) // self.ranks]

    def lines(self, rank: int) -> list[str]:
        """What the process has written so far."""
        return self._logs[rank].read_text(errors="replace").strip().splitlines()

    def _read(self, rank: int, late: bool) -> list[Finding]:
        name = self.title + (f", rank {rank}" if self.ranks > 1 else "")
        lines = self.lines(rank)
        if late:
            return [Finding("fail", name, f"no answer within {self.timeout_s:.0f} s; last words: {lines[-1:]}")]
        if self._processes[rank].returncode == 0:
            try:
                return [Finding(*finding) for finding in json.loads(lines[-1])]
            except (IndexError, ValueError, TypeError):
                pass
        last = lines[-1] if lines else "no output"
        return [Finding("fail", name, f"exit status {self._processes[rank].returncode}: {last[:300]}")]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _inspect(folder: Path) -> tuple[dict[str, Any], list[Finding]]:
    """gpu_report() from a child process, or an empty report and why."""
    child = Child("GPUs", ["flexsp.launch.doctor"]).start(folder)
    trouble = child.collect()
    try:
        return json.loads(child.lines(0)[-1])["report"], []
    except (IndexError, ValueError, KeyError, TypeError):
        return {"gpus": [], "peers": []}, trouble


def self_test(report: dict[str, Any], ranks: int | None, folder: Path) -> list[Finding]:
    """Ops against float64 on the CPU and on a GPU, then ranks against one rank, on the CPU and over each transport."""
    from flexsp.comm import transport as registry

    module, gpus = "flexsp.testing.selftest", len(report["gpus"])
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    together = [
        Child("ops on the CPU", [module, "ops", "cpu", "float32"], environment=hidden),
        Child("2 CPU ranks", [module, "ranks", "process_group"], ranks=2, environment=hidden),
    ]
    for dtype in ("bfloat16", "float32") if gpus else ():
        together.append(Child(f"ops on GPU 0, {dtype}", [module, "ops", "cuda", dtype]))
    started = [child.start(folder) for child in together]
    found = [finding for child in started for finding in child.collect()]
    world = min(ranks or 4, gpus)
    if world > 1:
        available = {finding.name for finding in transports(report) if finding.level == "ok"}
        for transport in registry.transports():
            if transport in available and registry.transport_of(transport).device != "cpu":
                child = Child(f"{world} GPU ranks, {transport}", [module, "ranks", transport], ranks=world)
                found += child.start(folder).collect()
    return found


def _print(title: str, findings: Sequence[Finding]) -> None:
    print(title)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(finding.line(width))
    print(flush=True)


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 where nothing failed."""
    began = time.monotonic()
    versions = software()
    _print("Software", versions)
    if any(finding.level == "fail" for finding in versions):
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report, trouble = _inspect(folder)
        hopper = any(gpu["capability"][0] == 9 for gpu in report["gpus"])
        wanted = _wanted_triton() if report["gpus"] else None
        advice = triton_advice(_version("triton"), _version("numpy"), hopper, wanted)
        _print("Triton", [*advice, *coverage(report, _version("triton"))])
        _print("Hardware", trouble or _hardware(report))
        _print("Transports", transports(report))
        tests = [] if args.no_test else self_test(report, args.ranks, folder)
    if tests:
        _print("Self-test", tests)
    failed = sum(finding.level == "fail" for finding in [*trouble, *tests])
    verdict = f"{failed} failed" if failed else "no failure" if tests else "no self-test was run"
    print(f"flexsp doctor: {verdict}, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    print(json.dumps({"report": gpu_report()}))
