"""examples/train_hybrid.py: what its layers compute with, its schedule, its seeds and the experts' loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexsp.testing.ranks import run_ranks
from tests.harness.hybrid import arguments, hybrid, place

__all__ = ["place"]  # the fixture


def seen_by_layers(_: Any, argv: list[str]) -> dict[str, tuple[torch.dtype, float]]:
    """Of the parameters that each module holds itself, in a forward pass in bfloat16: dtype, and the largest error."""
    script = hybrid()
    options = script.parse_options(argv)
    mesh, config = script.make_mesh(options, torch.device("cpu")), script.read_config(options.model)
    model = script.make_model(config, mesh.sp, mesh.everyone, torch.bfloat16, False)
    script.set_first_weights(model, options.model, config, 0, False, mesh.world)
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    found = {}

    def look(path: str, module: torch.nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            found[full] = p.dtype, float((p.detach().float() - whole[full]).abs().max())

    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, _, path=path: look(path, module))
    batch = hybrid("token_data").make_batch(torch.arange(25), 24, None)
    model(**script.shard(batch, mesh.sp)).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    mesh.sp.close()
    return found


def test_gates_and_routers_are_not_rounded(place: Path) -> None:
    for found in run_ranks(seen_by_layers, 2, arguments(place, "run"), whole_world=True):
        exact = {name for name, (dtype, off) in found.items() if dtype == torch.float32 and off == 0.0}
        assert exact == {x for x in found if x.endswith(("A_log", "dt_bias", "mlp.gate.weight"))}
        assert len(exact) >= 3 and sum(off > 0 for _, off in found.values()) > len(exact)


@pytest.mark.parametrize(
    "more, expected",
    [
        (["--steps", "30"], (30, 1, 6)), (["--steps", "30", "--decay", "25"], (30, 1, 25)),
        (["--steps", "1"], (1, 0, 0)), (["--steps", "50"], (50, 10, 40)),
        (["--steps", "45", "--decay", "15"], (45, 10, 15)), ([], (200, 10, 40)),
    ],
)  # fmt: skip
def test_few_steps_shorten_warmup_and_decay(more: list[str], expected: tuple[int, ...]) -> None:
    script = hybrid()
    options = script.parse_options(more)
    found = script.settings_of(script.Settings, options, None, options.folder, (), script.fitted)
    assert (found.steps, found.warmup, found.decay) == expected


def test_dropout_differs_on_every_rank_and_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    script, seeds = hybrid(), []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    for rank in range(3):
        mesh = SimpleNamespace(world=script.World(rank, 3), rows=1)
        run = script.TrainingRun(None, SimpleNamespace(param_groups=[]), None, script.Settings(), mesh)
        monkeypatch.setattr(run, "batches", lambda step: ([], 1.0))
        for step in range(4):
            with pytest.raises(AttributeError):  # there is no model
                run.take(step)
    assert len(set(seeds)) == 12


def test_what_routers_add_is_a_mean_over_the_sequences_of_a_row() -> None:
    script, model = hybrid(), SimpleNamespace(router_aux_loss_coef=0.25, z_loss_coefficient=0.5)
    script.TrainingRun(model, None, None, script.Settings(batch=8), SimpleNamespace(rows=2))
    assert (model.router_aux_loss_coef, model.z_loss_coefficient) == (0.25 / 4, 0.5 / 4)
