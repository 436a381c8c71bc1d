"""Changes to how runs start: shards' lengths, the environment, what is installed, transports, plans and examples."""

# ruff: noqa: E501 (texts of code are kept whole)
from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["STARTING"]

_GROUP = "tests/comm/test_group.py::"
_GROWS = "tests/scan/test_propagate.py::test_heaps_grow_with_the_states_of_calls"
_TOGETHER = "tests/scan/test_exchanges.py::test_two_scans_travel_together"
_AUTO = "tests/comm/test_transport.py::test_what_auto_takes"

_HYBRID = "tests/test_train_hybrid.py::"
_STEPS = "tests/test_train_hybrid_steps.py::"
_RELEASED = "tests/bench/test_bench_released.py::"

_AHEAD = "tests/ahead/test_ahead.py::"
_MOVED = _AHEAD + "test_later_processes_find_the_kernels_in_a_moved_folder"

STARTING = [
    *_in(
        "flexsp/ahead/kernels.py",
        ("known = keep_launcher(compiled) and known", "pass", "launchers are left to the first call", _MOVED),
    ),
    *_in(
        "flexsp/runtime/workarounds/moved_cache.py",
        ("return here if all(here.values()) else group", "return group", "a moved folder is compiled again", _MOVED),
    ),
    *_in(
        "flexsp/ahead/stand_in.py",
        ("lambda x: x.device.type == kind,", "lambda x: False,", "layers are planned as on a CPU",
         _AHEAD + "test_keys_are_those_of_calls"),
        ("return int(x.storage_offset()) * x.element_size() if x.is_meta", "return 8 if x.is_meta",
         "kernels are made for tensors that lie at no multiple of 16", _AHEAD + "test_keys_are_those_of_calls"),
    ),
    *_in(
        "flexsp/ahead/command.py",
        ("if any(args.packed) and args.B != 1:", "if False:", "documents are packed in several sequences",
         _AHEAD + "test_errors_name_what_is_wrong"),
    ),
    *_in(
        "flexsp/devices.py",
        ("abs(told / known.bandwidth - 1) < _ALIKE", "True", "GPUs of one name and another bandwidth are planned alike",
         "tests/test_devices.py::test_a_gpu_is_read"),
    ),
    *_in(
        "flexsp/comm/group.py",
        ("if found is None and ambient.entered is None:", "if found is None:", "who says that no ranks take part is warned",
         _GROUP + "test_a_call_that_forgets_the_group_warns_once[2]"),
        ("    if world == 1:\n        return\n", "", "calls of one rank are warned of ranks that are not there",
         _GROUP + "test_a_call_that_forgets_the_group_warns_once[1]"),
        ("    if name not in _warned:\n", "    if True:\n", "every call warns",
         _GROUP + "test_a_call_that_forgets_the_group_warns_once[2]"),
    ),
    *_in(
        "flexsp/comm/ranks.py",
        ("self._lengths is None or rows * self._lengths[self.rank] == T_local", "self._lengths is None or rows == 1",
         "a whole sequence is taken for a shard", "tests/ops/test_validation.py::test_a_whole_sequence_is_called_one"),
    ),
    *_in(
        "flexsp/compiler/arguments.py",
        ("sp.check_shard(T, rows)", "sp.check_shard(T)", "rows are taken for tokens",
         "tests/compiler/test_input_rows.py::test_another_length_than_was_set"),
        ("sp.check_shard(x.shape[x.dim() - dims])", "pass", "ranks exchange tokens of shards of another length",
         "tests/compiler/test_earlier_inputs.py::test_another_length_than_was_set"),
    ),
    *_in(
        "flexsp/testing/ranks.py",
        ("            own.kill()\n", "            pass\n", "processes of one call go on",
         "tests/comm/test_group.py::test_harness"),
        ('"flexsp.kernels.delta.calls", ', '"flexsp.kernels.delta.call", ', "ranks import what is not there",
         "tests/test_package.py::test_what_ranks_import_first_is_there"),
        ("        torch.manual_seed(seed)\n", "", "ranks draw numbers of their own",
         "tests/comm/test_group.py::test_ranks_of_a_test_draw_the_same_numbers"),
    ),
    *_in(
        "tests/harness/ops.py",
        ("mlstm.chunk, selective.scan,\n", "selective.scan,\n", "an op has no row among those on GPUs",
         "tests/ops/test_ops.py::test_public_names"),
    ),
    *_in(
        "flexsp/ops/_validate.py",
        ("sp.check_shard(x.shape[1])", "pass", "ops take shards of another length than was set",
         "tests/ops/test_validation.py::test_ops_refuse_another_length_than_was_set"),
    ),
    *_in(
        "flexsp/scan/tokens.py",
        ("sp.check_shard(T)", "pass", "convolutions take shards of another length than was set",
         "tests/scan/test_exchange_by_kernel.py::test_fewer_tokens_than_lengths_say"),
    ),
    *_in(
        "flexsp/exceptions.py",
        ("finite = -math.inf < value < math.inf", "finite = math.isfinite(value)", "graphs break where a number is a symbol",
         "tests/compiler/test_torch_compile.py::test_one_graph_where_all_sizes_are_symbols[mlstm]"),
        ("not value > above", "not value >= above", "a number that has to be above 0 may be 0",
         "tests/grammar/test_objectives_edges.py::test_errors_of_components"),
        ("if word and word not in _WORDS:", "if False:", "an unknown word for on is not named",
         _GROUP + "test_other_words_are_refused"),
        ('"yes": True, "on": True', '"yes": True, "on": False', "a usual word for on means off",
         _GROUP + "test_words_for_on_and_off"),
        ('if word not in ("", "triton"):', "if False:", "FLEXSP_BACKEND=cuda is ignored",
         _GROUP + "test_other_words_are_refused"),
    ),
    *_in(
        "flexsp/__init__.py",
        ("_ = checks_wanted(), kernels_on_cpu()", "_ = None", "a misspelt variable is noticed only where it is read",
         _GROUP + "test_other_words_are_refused"),
    ),
    *_in(
        "flexsp/comm/process_group.py",
        ("        if not lost_peer(error):\n            raise\n", "", "every error is called a silent peer",
         _GROUP + "test_what_is_no_silence_of_a_peer"),
        ("isinstance(error, dist.DistError) or", "", "a lost store is no silent peer",
         _GROUP + "test_what_is_a_silence_of_a_peer"),
    ),
    *_in(
        "flexsp/launch/bootstrap.py",
        ("        if not lost_peer(error):\n            raise\n", "", "every error is called a silent peer",
         _GROUP + "test_what_is_no_silence_of_a_peer"),
        ('if name == "put" and not any(problems):', "if False:", "auto takes put where its first call fails", _AUTO),
        ('if transport != "auto" or name != "put":', "if True:", "auto takes put where nothing arrives by it", _AUTO),
        ("        sp.start_anew()\n", "", "a failed trial is remembered", _AUTO),
        ("(sp.world_size == dist.get_world_size() or not chosen.of_world)", "True",
         "a part of the world makes what all of it must", "tests/comm/test_transport.py::test_which_heaps_grow"),
    ),
    *_in(
        "flexsp/scan/propagate.py",
        ("    larger.counters[:COUNTERS].copy_(channel.counters[:COUNTERS])", "    larger.counters[:COUNTERS]",
         "a larger heap forgets a failure", _GROWS),
        ("sp.open_heap(max(needed, 2 * had))", "sp.open_heap(needed)", "many heaps, each a little larger", _GROWS),
        ("    sp.outgrown.append((sp.heap, channel))", "    sp.outgrown.append((heap, channel))",
         "memory of captured graphs is lost", _GROWS),
    ),
    *_in(
        "flexsp/scan/both.py",
        ("nseg2, H2, max_tiles,", "nseg, H2, max_tiles,", "both states have as many segments",
         _TOGETHER + "[posix-chain-False]"),
        ("decays.append(a.repeat_interleave(F.shape[2:].numel() // piece, 1))",
         "decays.append(a.repeat(1, F.shape[2:].numel() // piece))", "heads decay by the gates of others",
         _TOGETHER + "[process_group-chain-False]"),
    ),
    *_in(
        "flexsp/kernels/executable.py",
        ("        run_steps(steps[at + 1 :], frame, device)\n", "        run_steps(steps[at:], frame, device)\n",
         "states travel together, and each alone after that",
         "tests/scan/test_exchanges.py::test_exchanges_of_a_pass[mlstm-kernels-False]"),
        ("        run_steps(steps[:at], frame, device)\n", "", "nothing runs before states travel together",
         "tests/kernels/test_mlstm_kernels.py::test_against_the_token_loop"),
    ),
    *_in(
        "flexsp/comm/transport.py",
        ('name, device, sends_in_kernel = PROCESS_GROUP, "any", False', 'name, device = PROCESS_GROUP, "any"',
         "kernels send where there is no memory to send to", "tests/comm/test_transport.py::test_who_sends"),
    ),
    *_in(
        "flexsp/launch/doctor.py",
        ('"ok" if numpy else "fail"', '"ok"', "doctor takes no notice of numpy",
         "tests/test_installed.py::test_doctor_names_numpy_where_it_is_missing"),
        ('Finding("ok", "posix"', 'Finding("ok", "shm"', "doctor says nothing of a transport",
         "tests/launch/test_cli.py::test_every_transport_has_a_line"),
        ("if world > 1:", "if world >= 1:", "doctor starts ranks of one GPU", "tests/launch/test_cli.py::test_ranks_of_the_self_test"),
        ('probe.bind(("127.0.0.1", 0))', 'probe.bind(("127.0.0.1", 1))', "all ranks of the machine meet at one port",
         "tests/launch/test_cli.py::test_ranks_that_run_at_once_meet_at_ports_of_their_own"),
        ("last words: {lines[-1:]}", "last words: {lines[1:]}", "doctor says all of what a late process wrote",
         "tests/launch/test_cli.py::test_children_report_fail_and_never_hang"),
    ),
    *_in(
        "flexsp/nn/exactness.py",
        ('found |= dict.fromkeys(cls.__name__ for cls in _read(module) if "forward" in vars(cls))', "pass",
         "nobody is told that forward code is not seen", "tests/nn/test_wrapper.py::test_what_cannot_be_seen_is_said_once"),
    ),
    *_in(
        "flexsp/bench/scale.py",
        ("gpus or _RANKS_A_CORE * cores", "gpus or 1000", "a hundred processes start on two cores",
         "tests/bench/test_bench.py::test_world_sizes_that_cannot_start_are_refused"),
    ),
    *_in(
        "flexsp/bench/gates.py",
        ("return BOUND * raw.sigmoid()", "return 2 * BOUND * raw.sigmoid()", "bounded gates are below the bound",
         "tests/bench/test_bench.py::test_gates_are_drawn_as_asked"),
        ("torch.full_like(bias, -3.0)", "torch.full_like(bias, -2.0)", "mild gates are stronger where an op makes them",
         _RELEASED + "test_gates_are_those_of_the_kind"),
    ),
    *_in(
        "flexsp/bench/own_inputs.py",
        ('"safe_gate": True, "lower_bound"', '"safe_gate": False, "lower_bound"', "RWKV-7's peer has a slow setting",
         _RELEASED + "test_libraries_are_called_as_their_layers_call_them"),
    ),
    *_in(
        "flexsp/bench/cases.py",
        (', promised={"safe_gate": True}', "", "KDA's peer does not know that gates are bounded",
         "tests/bench/test_bench_peers.py::test_other_libraries_are_called_as_their_layers_call_them"),
    ),
    *_in(
        "flexsp/bench/layers.py",
        ("chunk_size=256", "chunk_size=64", "mamba_ssm's scan has other chunks than its layer",
         _RELEASED + "test_libraries_are_called_as_their_layers_call_them"),
        ("_SAFE if kind ==", "_SAFE if kind !=", "KDA's bound is promised for the wrong gates",
         _RELEASED + "test_libraries_are_called_as_their_layers_call_them"),
        ('x["x"] * step.unsqueeze(-1)', 'x["x"]', "Mamba-2 in PyTorch leaves out the step size",
         _RELEASED + "test_an_op_in_pytorch_is_the_op"),
    ),
    *_in(
        "flexsp/bench/beside.py",
        ("missing += [", "_ = [", "a library that is not installed is left out silently",
         _RELEASED + "test_a_library_that_differs_is_named"),
    ),
    *_in(
        "flexsp/bench/models.py",
        ("if not x <= limit", "if x > 1", "a library whose gradient is half off is not named",
         _RELEASED + "test_a_library_that_differs_is_named"),
        ('"float64", case.ours, _wide(inputs)', '"float64", case.ours, inputs',
         "float64 is no float64", _RELEASED + "test_bench_models_writes_what_ran_and_what_did_not"),
    ),
    *_in(
        "flexsp/bench/table.py",
        ("min(libraries or rows", "min(rows", "the fastest library is PyTorch", _RELEASED + "test_tables_of_released_layers"),
    ),
    *_in(
        "examples/train_hybrid.py",
        ("step * world.world_size + world.rank) %", "step * world.world_size) %", "all ranks draw the same dropout masks",
         _STEPS + "test_dropout_differs_on_every_rank_and_in_every_step"),
        ("setattr(model, name, getattr(model, name) / self.parts)", "pass",
         "with several sequences a row the experts' balancing loss counts as many times",
         _STEPS + "test_what_routers_add_is_a_mean_over_the_sequences_of_a_row"),
        ("falls = min(self.steps - self.decay, before.steps - before.decay)", "falls = before.steps - before.decay",
         "a run is resumed with fewer steps although the rate should have fallen already",
         _HYBRID + "test_more_steps_may_be_added_while_the_rate_stands"),
        ("return {**shares, **given}", "return given", "--steps 30 is refused for the defaults of others",
         _STEPS + "test_few_steps_shorten_warmup_and_decay"),
    ),
    *_in(
        "examples/pretrained.py",
        ('_GATES = ("A_log", "dt_bias")', '_GATES = ("A_log",)', "the gates' biases are rounded to bfloat16",
         _STEPS + "test_gates_and_routers_are_not_rounded"),
        ("fully_shard(module, mesh=everyone, mp_policy=exact)", "pass", "routers are rounded to bfloat16",
         _STEPS + "test_gates_and_routers_are_not_rounded"),
    ),
    *_in(
        "flexsp/compiler/backend/generated_kernels.py",
        ("folder.mkdir(mode=0o755,", "folder.mkdir(mode=0o777,", "an umask of 0 opens the folder of generated kernels",
         "tests/compiler/test_code_folder.py::test_the_users_folder_with_an_umask_of_0"),
        ("*(state[:1] if dense", "*(state if dense", "states of many columns are taken for large ones",
         "tests/compiler/test_plan.py::test_kernels_in_pieces_are_those_of_large_states_alone"),
        ("return folder if os.access(folder, os.W_OK | os.X_OK) else _own_folder()", "return folder",
         "kernels' files go to a folder that cannot be written",
         "tests/compiler/test_made_once.py::test_folders_that_are_not_named"),
    ),
]  # fmt: skip
