"""The scripts of torchrun_configs/, run as they stand: each trains what one rank trains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import flexsp
from flexsp.testing.ranks import run_ranks
from tests.harness.demo import ROOT, SCHEDULE, arguments, rows_of, train, write_text
from tests.marks import slow

CONFIGS = ROOT / "torchrun_configs"
ENVIRONMENT = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SECONDS = 240


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and the folder ``one`` of a run on one rank, in float64."""
    path = write_text(tmp_path_factory.mktemp("torchrun"))
    run_ranks(train, 1, options(path, "one"))
    return path


def options(text: Path, name: str) -> list[str]:
    return ["--device", "cpu", *arguments(text, name, *SCHEDULE, "--steps", "3")]


def check(text: Path, name: str, ranks: int) -> None:
    one, mine = (rows_of(text.parent / folder, "loss") for folder in ("one", name))
    assert [row["ranks"] for row in mine] == [ranks] * 3
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in one], rel=1e-9)
    held_out = [rows_of(text.parent / folder, "held_out_loss")[0]["held_out_loss"] for folder in ("one", name)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-9)


def run_together(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """Runs the commands at once; all must succeed. What they printed; what is left of them at the end is stopped."""
    printed = []
    with ExitStack() as stack:
        started = [stack.enter_context(background(*pair)) for pair in zip(commands, environments, strict=True)]
        for process in started:
            said, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, said
            printed.append(said)
    return printed


@contextmanager
def background(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT | environment, start_new_session=True, **settings)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_one_host_without_triton(one_rank: Path) -> None:
    blocker = one_rank.parent / "blocked"
    blocker.mkdir()
    (blocker / "triton.py").write_text("raise ModuleNotFoundError('no triton in this test', name='triton')\n")
    command = [str(CONFIGS / "one_host_cpu.sh"), "2", *options(one_rank, "host")]
    (said,) = run_together([command], [{"PYTHONPATH": f"{blocker}:{ROOT}"}])
    check(one_rank, "host", 2)
    for part in ("step 1", "after 3 steps", "held out", "gradient norm, float64", "sample", "checkpoint.pt"):
        assert part in said


NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None


@pytest.mark.slow if NAMESPACES else lambda test: test  # the test in namespaces shows more
def test_two_hosts_that_are_one(one_rank: Path) -> None:
    """Two agents on the loopback interface."""
    command = [str(CONFIGS / "two_hosts.sh"), "1", *options(one_rank, "agents")]
    run_together([command] * 2, [{"RENDEZVOUS": f"localhost:{free_port()}"}] * 2)
    check(one_rank, "agents", 2)


@contextmanager
def two_namespaces() -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """Two network namespaces joined by a cable: for each, the start of a command in it, and its environment.

    Neither has another way out, so what their processes tell each other goes over the cable.
    """
    if not NAMESPACES:
        pytest.skip("network namespaces need root and iproute2; test_two_hosts_that_are_one runs without")
    names = [f"flexsp-{os.getpid()}-{i}" for i in range(2)]
    addresses = ["192.0.2.1", "192.0.2.2"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield [
            (["ip", "netns", "exec", name], {"LOCAL_ADDR": address, "GLOO_SOCKET_IFNAME": "cable"})
            for name, address in zip(names, addresses, strict=True)
        ]


@pytest.mark.parametrize("ranks", [1, *slow(2)])
def test_two_hosts_in_network_namespaces(one_rank: Path, ranks: int) -> None:
    """So many ranks a host. Where a host has several, which is the first is seen in `test_slurm`."""
    command = [str(CONFIGS / "two_hosts.sh"), str(ranks), *options(one_rank, f"hosts of {ranks}")]
    with two_namespaces() as hosts:
        meet = {"RENDEZVOUS": "192.0.2.1:29500"}
        run_together([[*inside, *command] for inside, _ in hosts], [environment | meet for _, environment in hosts])
    check(one_rank, f"hosts of {ranks}", 2 * ranks)


@pytest.mark.slow
def test_two_hosts_by_shares_of_the_state(one_rank: Path) -> None:
    """Two ranks a host: each sends its share of the state to the other host."""
    with two_namespaces() as hosts:
        command = [str(CONFIGS / "two_hosts.sh"), "2", *options(one_rank, "shares"), "--schedule", "hierarchical"]
        meet = {"RENDEZVOUS": "192.0.2.1:29500", "FLEXSP_RANKS_PER_HOST": "2"}  # both have the name of this host
        run_together([[*inside, *command] for inside, _ in hosts], [environment | meet for _, environment in hosts])
    check(one_rank, "shares", 4)


# ---------------------------------------------------------------- SLURM and GPUs, as far as they go without either


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


SRUN = """#!/usr/bin/env bash
# Runs its command once for each node of the job, all at once, as srun does with one task a node.
[ "$1" = --kill-on-bad-exit=1 ] && shift
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
    started+=($!)
done
for process in "${started[@]}"; do wait "$process" || exit 1; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[1-2]" ] && printf 'localhost\\nlocalhost\\n'
"""
RANK = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NODEID", "SRUN_CPUS_PER_TASK", "MASTER_ADDR",
         "TORCHELASTIC_MAX_RESTARTS")
row = {name: os.environ[name] for name in names} | {"argv": sys.argv[1:]}
open(f"{os.environ['REPORTS']}/{row['RANK']}", "w").write(json.dumps(row))
"""


def slurm_job(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a job of two nodes with two GPUs each, with commands that stand for srun and scontrol."""
    program(folder, "srun", SRUN)
    program(folder, "scontrol", SCONTROL)
    return {
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "64",
        "PATH": f"{folder}:{os.environ['PATH']}",
    } | more  # fmt: skip


def test_slurm(tmp_path: Path) -> None:
    """The batch script between commands that stand for srun and scontrol: one agent a node, one process a GPU."""
    reports = tmp_path / "reports"
    reports.mkdir()
    job = slurm_job(tmp_path, REPORTS=str(reports), SCRIPT=str(program(tmp_path, "rank.py", RANK)))
    run_together([["bash", str(CONFIGS / "slurm.sbatch"), "--tokens", "131072"]], [job])
    rows = [json.loads((reports / str(rank)).read_text()) for rank in range(4)]
    assert [row["LOCAL_RANK"] for row in rows] == ["0", "1", "0", "1"]
    seen = {(row["WORLD_SIZE"], row["LOCAL_WORLD_SIZE"], row["SRUN_CPUS_PER_TASK"]) for row in rows}
    assert seen == {("4", "2", "64")}
    nodes = [row["SLURM_NODEID"] for row in rows]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]  # a node's ranks are neighbours in the sequence
    assert all(row["argv"] == ["--name", f"slurm-{os.getpid()}", "--tokens", "131072"] for row in rows)


def test_slurm_with_an_image(tmp_path: Path) -> None:
    """What srun is asked for. Its options are Pyxis's."""
    job = slurm_job(tmp_path, IMAGE="flexsp.sqsh", SLURM_SUBMIT_DIR=str(tmp_path))
    program(tmp_path, "srun", "#!/usr/bin/env bash\necho \"$PYTHON\" \"$@\"\n")
    (said,) = run_together([["bash", str(CONFIGS / "slurm.sbatch"), "--steps", "3"]], [job])
    mounts = f"--container-mounts={tmp_path}/runs:/flexsp/runs --container-workdir=/flexsp"
    assert said.split() == [
        "python3", "--kill-on-bad-exit=1", "--container-image=flexsp.sqsh", *mounts.split(),
        "torchrun_configs/two_hosts.sh", "2", "--name", f"slurm-{os.getpid()}", "--steps", "3",
    ]  # fmt: skip
    assert (tmp_path / "runs").is_dir()


def manifests() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The service, the job and the job's container, as Kubernetes reads them."""
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((CONFIGS / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def test_kubernetes(tmp_path: Path) -> None:
    """The container's command as Kubernetes would start it in both pods: one agent a pod, the first one the meeting."""
    service, job, container = manifests()
    (tmp_path / "reports").mkdir()
    (command,) = container["command"]
    per_host, *arguments = container["args"]
    assert per_host == str(container["resources"]["limits"]["nvidia.com/gpu"])  # a process a GPU; here two
    asked = {row["name"]: row.get("value") for row in container["env"]}
    assert int(asked["HOSTS"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    port, environments = free_port(), []
    for index in ("0", "1"):
        values = {name: value and value.replace("$(INDEX)", index) for name, value in asked.items()} | {"INDEX": index}
        names = [f"{service['metadata']['name']}-{index}", job["spec"]["template"]["spec"]["subdomain"]]
        assert values["LOCAL_ADDR"] == ".".join(names)  # what the service makes of the pod's host name
        assert (values["RENDEZVOUS"] == f"{values['LOCAL_ADDR']}:29500") == (index == "0")
        # both pods are this host: the first has one of its names, the second another one
        local = {"flexsp-0.flexsp": "localhost", "flexsp-1.flexsp": "127.0.0.1"}[values["LOCAL_ADDR"]]
        values |= {"LOCAL_ADDR": local, "RENDEZVOUS": f"localhost:{port}", "SLURM_NODEID": index}
        values |= {"REPORTS": str(tmp_path / "reports"), "SRUN_CPUS_PER_TASK": ""}
        environments.append(values | {"SCRIPT": str(program(tmp_path, "rank.py", RANK))})
    run_together([[str(ROOT / command), "2", *arguments]] * 2, environments)
    rows = [json.loads((tmp_path / "reports" / str(rank)).read_text()) for rank in range(4)]
    nodes = [row["SLURM_NODEID"] for row in rows]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert all(row["argv"] == arguments and row["TORCHELASTIC_MAX_RESTARTS"] == "3" for row in rows)


def test_the_parts_of_the_kubernetes_recipe_fit_together() -> None:
    service, job, container = manifests()
    pod = job["spec"]["template"]["spec"]
    assert (service["kind"], service["apiVersion"]) == ("Service", "v1") and service["spec"]["clusterIP"] == "None"
    assert (job["kind"], job["apiVersion"], job["spec"]["completionMode"]) == ("Job", "batch/v1", "Indexed")
    name = job["metadata"]["name"]  # which the controller puts on the pods as the label job-name
    assert service["spec"] | {"selector": {"job-name": name}} == service["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] and pod["restartPolicy"] in ("Never", "OnFailure")
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {"job-name": name}
    assert {row["name"] for row in container["volumeMounts"]} == {row["name"] for row in pod["volumes"]}
    mounted = {row["mountPath"] for row in container["volumeMounts"]}
    assert mounted == {"/dev/shm", container["args"][container["args"].index("--runs") + 1]}
    assert [row["name"] for row in container["env"]].index("INDEX") == 0  # LOCAL_ADDR refers to it
    assert container["image"] == f"flexsp:{flexsp.__version__}"


def test_scripts_are_linted() -> None:
    scripts = [*CONFIGS.glob("*.sh"), CONFIGS / "slurm.sbatch"]
    assert len(scripts) >= 4
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines, script
    if (linter := shutil.which("shellcheck")) is not None:
        done = subprocess.run([linter, *scripts], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


NVIDIA_SMI = """#!/usr/bin/env bash
[ "$1" = --list-gpus ] && printf 'GPU 0\\nGPU 1\\nGPU 2\\n'
"""
SAY = """#!/usr/bin/env bash
echo "$@"
env | grep -E '^(NCCL|NVSHMEM|TORCH|OMP)_' | sort
"""


def test_one_host_with_gpus_starts_a_process_for_each(tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", NVIDIA_SMI)
    environment = ENVIRONMENT | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["PYTHON"] = str(program(tmp_path, "say", SAY))
    for given, gpus, rest in (([], 3, ""), (["2", "--name", "x"], 2, " --name x")):
        command = [str(CONFIGS / "one_host_gpus.sh"), *given]
        said = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
        first, *variables = said.splitlines()
        start = f"-m torch.distributed.run --standalone --nproc-per-node {gpus} examples/train_lm.py"
        assert first == f"{start} --tokens 65536{rest}"
        for variable in ("NCCL_NVLS_ENABLE=0", "NVSHMEM_DISABLE_NVLS=1", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
                         "NVSHMEM_REMOTE_TRANSPORT=none"):  # fmt: skip
            assert variable in variables


def test_two_hosts_want_a_rendezvous() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "RENDEZVOUS"}
    done = subprocess.run([str(CONFIGS / "two_hosts.sh")], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode and "set RENDEZVOUS=host:port" in done.stderr
