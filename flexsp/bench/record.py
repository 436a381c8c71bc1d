"""What was measured where: versions, GPU, commit, command and date of a result file."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "case_of", "commit", "continued", "environment", "file_stem", "gates_of", "load", "load_kind", "save", "spread_of",
    "version_of",
]  # fmt: skip


_SAME = ("commit", "dirty", "device", "torch", "triton")  # of the parts of a run


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, or of a folder of its sources; None where there is neither."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(distribution.replace("-", "_"))
    text = Path(spec.origin).read_text() if spec and spec.origin else ""
    found = re.search(r"""^__version__ = ["'](.+?)["']""", text, re.MULTILINE)
    return found[1] if found else None


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> dict[str, Any]:
    """The source's commit: FLEXSP_COMMIT (a trailing "-dirty" marks local changes) where there is no git, else git."""
    given = os.environ.get("FLEXSP_COMMIT")
    if given:
        return {"commit": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    root = Path(__file__).resolve().parents[2]
    git = ("git", "-c", f"safe.directory={root}", "-C", str(root))
    head = _run(*git, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if head is None:
        return {"commit": None, "dirty": None}
    status = _run(*git, "status", "--porcelain", "--", "flexsp")
    return {"commit": head, "dirty": bool(status)}


def _flexsp_version() -> str:
    import flexsp

    return str(getattr(flexsp, "__version__", None) or version_of("flexsp") or "source tree")


def environment(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """Versions, hardware, commit, command and date, as one JSON-ready dictionary."""
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "flexsp " + shlex.join(command),
        **commit(),
        "flexsp": _flexsp_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "flash_linear_attention": version_of("flash-linear-attention") or version_of("fla-core"),
        "flash_qla": version_of("flash-qla"),
        "mlstm_kernels": version_of("mlstm_kernels"),
        "mamba_ssm": version_of("mamba_ssm"),
        "cudnn_frontend": version_of("nvidia-cudnn-frontend"),
        "device": "cpu",
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        drivers = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        record["device"] = properties.name
        record["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        record["sm_count"] = properties.multi_processor_count
        record["driver"] = drivers.splitlines()[0] if drivers else None
        record["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        record["nvshmem4py"] = next((v for c in ("cu13", "cu12") if (v := version_of(f"nvshmem4py-{c}"))), None)
        record["nvshmem"] = next((v for c in ("cu13", "cu12") if (v := version_of(f"nvidia-nvshmem-{c}"))), None)
    else:
        record["threads"] = torch.get_num_threads()
    return record


def file_stem(kind: str, record: dict[str, Any]) -> str:
    """`op_h200_20250131` or `scale_h200x4_20250131`: what, on what, when."""
    name = re.sub(r"[^a-z0-9]+", "", str(record["device"]).lower().replace("nvidia", "")) or "cpu"
    ranks = f"x{record['world_size']}" if record["world_size"] > 1 else ""
    return f"{kind}_{name}{ranks}_{str(record['date'])[:10].replace('-', '')}"


def save(path: Path, result: dict[str, Any]) -> None:
    """Write JSON through a temporary file, so that a run that is killed leaves the last whole version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read one result file."""
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or "kind" not in result:
        raise ValueError(f"{path}: expected a flexsp result file with a 'kind', got something else")
    return result


def load_kind(paths: Sequence[Path], kind: str) -> list[dict[str, Any]]:
    """Read result files that must all be of one kind."""
    results = [load(path) for path in paths]
    wrong = [str(path) for path, result in zip(paths, results, strict=True) if result["kind"] != kind]
    if wrong:
        raise ValueError(f"results: expected files of `flexsp bench {kind}`, got {', '.join(wrong)}")
    return results


def continued(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier part of a run, to go on with; ValueError where it was another run."""
    [old] = load_kind([path], new["kind"])
    pairs = [(what, old["environment"][what], new["environment"][what]) for what in _SAME]
    pairs += [(what, old[what], new[what]) for what in ("shape", "dtype") if what in new]
    for what, got, want in [*pairs, ("gates", gates_of(old), new["gates"])]:
        if got != want:
            raise ValueError(f"--add: expected a file of {what} {want}, got {got} in {path}")
    old.pop("skipped", None)
    old["environment"]["command"] += "; " + new["environment"]["command"]
    if "baseline_missing" in new:
        old["baseline_missing"] = old["baseline_missing"] and new["baseline_missing"]
    return old


def spread_of(value: float | dict[str, float] | None) -> dict[str, float] | None:
    """Median, min, max and n of a repeated measurement; the first files had one run, a bare number."""
    if value is None or isinstance(value, dict):
        return value
    return {"median": value, "min": value, "max": value, "n": 1}


def case_of(row: dict[str, Any]) -> str:
    """Operator of a row of `bench scale`; the first files had one and did not name it."""
    return str(row.get("case", "simple_gla"))


def gates_of(result: dict[str, Any]) -> str:
    """Kind of the log gates; the first files have another word for mild ones, or none."""
    return str(result.get("gates", "mild")).replace("usual", "mild")
