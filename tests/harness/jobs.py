"""Which files of tests start first, and which are a job of their own."""

from __future__ import annotations

__all__ = ["LONGEST", "TOOLS"]

# Files that take longest, in this order: two workers that take whole files end together if these come first.
LONGEST = (
    "test_delta_engine", "test_compile_delta", "test_torch_compile", "test_generated_offline", "test_unusual_tensors",
    "test_triton_engine", "test_generated_programs", "test_horizon_generated", "test_compile_diagonal",
    "test_step_graphs", "test_scalar_decay", "test_generated", "test_dispatch", "test_derivatives", "test_nonfinite",
    "test_transformers", "test_transformers_training", "test_reflections", "test_selective_scan", "test_reference",
    "test_vector_gates", "test_installed", "test_devices", "test_bench", "test_package", "test_torchrun_configs",
    "test_plan",
)  # fmt: skip

# Of documents, examples, benchmarks, plans, messages and the tests' own tools: a job of its own, `make test-tools`.
TOOLS = frozenset({
    "test_bad_arguments", "test_bench", "test_bench_documents", "test_bench_model", "test_bench_peers",
    "test_bench_released", "test_cli", "test_cost", "test_tested_versions", "test_demo", "test_demo_checkpoint",
    "test_devices", "test_dockerfile", "test_installed", "test_messages", "test_mutations", "test_package", "test_plan",
    "test_plans_cover", "test_ptx", "test_races", "test_release", "test_same_code", "test_sanitize", "test_simulate",
    "test_site", "test_synthetics", "test_torchrun_configs", "test_tour", "test_train_hybrid",
    "test_train_hybrid_steps", "test_training_plan", "test_validation", "test_wheel",
})  # fmt: skip
