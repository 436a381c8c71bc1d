"""Mutations of what looks at the assembly and the machine code of kernels, and of their interpreter in tests."""

from __future__ import annotations

from tests.mutate import in_file as _in

__all__ = ["ASSEMBLY"]

_RACES = "tests/testing/test_races.py"
_CODE = "tests/runtime/test_machine_code.py"
_ARITHMETIC = "tests/runtime/test_triton_private.py::test_quick_arithmetic_is_arithmetic"
_REWRITTEN = "tests/runtime/test_triton_private.py::test_the_quick_interpreter_rewrites_kernels_as_the_plain_one"
_ALIKE = "tests/runtime/test_triton_private.py::test_the_quick_interpreter_computes_and_refuses_the_same"
_HALF = "tests/runtime/test_triton_private.py::test_bfloat16_in_the_interpreter"

ASSEMBLY = [
    *_in(
        "flexsp/testing/races.py",
        ("self.done += self.product_groups.pop(0)", "self.product_groups.pop(0)", "waits are barriers", _RACES),
        ('+= "proxy" in parts', "+= 1", "all fences are those of proxies", _RACES),
        ("for x in ways[1:] if", "for x in ways[2:] if", "one way of a branch is followed", _RACES),
        ("if not new and excluded:", "if False:", "what is done every so many turns is not seen", _RACES),
        ("        self.copying[at] = True\n", "", "copies under way are not seen", _RACES),
        ("and last >= x.at.min() and", "and last < x.at.min() and", "no store meets a product", _RACES),
        ("    at ^= (at >> 7 &", "    at ^= 0 * (at >> 7 &", "pieces of a line are not mixed", _RACES),
        ("getattr(other, name)[: self.top] = x[: self.top]", "pass", "the other way of a branch forgets", _RACES),
        ("leading, stride = stride, leading", "pass", "lines of one piece are as wide ones", _RACES),
    ),
    *_in(
        "flexsp/testing/ptx.py",
        ('2 * bits if "wide"', 'bits if "wide"', "wide products are cut", "tests/testing/test_ptx.py"),
        ("field - 2 * highest", "field", "fields have no sign", "tests/testing/test_ptx.py"),
    ),
    *_in(
        "flexsp/runtime/workarounds/unwritten_registers.py",
        ("if effects[at][1] & ~held and not", "if not held and not", "nothing is unwritten", _CODE),
        ("(after >> source & 1) << to", "1 << to", "copies of nothing are written", _CODE),
        ("not moved and all(code[i].slot is not None for i in stack)", "not moved", "what is stored anywhere is not seen", _CODE),
        ("if not wrong and not superfluous:", "if not superfluous:", "unwritten registers are taken", _CODE),
        ("if not wrong and not superfluous:", "if not wrong:", "constants that nothing reads are taken", _CODE),
        ("            continue\n        wrong", "            raise\n        wrong", "too few registers end it", _CODE),
        ("if stack_of(other) < stack_of(first):", "if False:", "a limit that makes a kernel spill is kept", _CODE),
        ("if stack_of(other) < stack_of(first):", "if True:", "a limit that spills no more is dropped", _CODE),
        ("_any(wanted, ways[at]) & ~replaces", "_any(wanted, ways[at]) & ~0 | replaces", "nothing is replaced", _CODE),
        ("4 if n % 4 == 0 else 2 if n % 2 == 0 else 1", "1", "vectors are one register", _CODE),
        ("todo += [x for x in before[at] if not waits[x]]", "todo += []", "what is read in the next turn is not seen",
         _CODE),
        ("doubtful = cubin, superfluous[0]", 'doubtful = cubin, [*reports, ""][0]', "another constant is named", _CODE),
        ("if n < _LEAST or n == limit:", "if n < _LEAST:", "the same is assembled twice", _CODE),
        ("min(x, most) for x", "x for x", "more registers than a block has", _CODE),
        ("conditional |= len(it.operands) > 1", "pass", "a way past a branch is not seen", _CODE),
        ("int(pair[1]) + 256", "int(pair[1])", "descriptors of addresses are not seen", _CODE),
        ("return self._width() if i == 3 else", "return", "accumulators are one register", _CODE),
        ("x.operation.startswith(unfollowed)", "False", "the stack pointer never moves", _CODE),
        ("if parts[-1].isdigit() else 1\n        if parts", "if False else 1\n        if parts",
         "stmatrix stores one register", _CODE),
        ("if stack_of(cubin) else None", "if not stack_of(cubin) else None", "kernels that spill are not looked at",
         _CODE, "tests/runtime/test_triton_private.py"),
        ("+ 256 if found else 0", "+ 256", "a product without descriptors cannot be read", _CODE),
        ("LookupError, OSError, ", "OSError, ", "what cannot be read is refused", _CODE),
        ("return [*returns, *([at + 1]", "return [*([at + 1]", "nothing comes behind a call", _CODE),
        ("not _TABLE.search(done.stdout)", "True", "nobody asks where jumps through tables go", _CODE),
    ),
    *_in(
        "flexsp/runtime/launch.py",
        ('"flexsp_registers": unwritten_registers.rules()', '"flexsp_registers": "written"', "older rules serve from the cache", _CODE),
        ("private.assembling_by(unwritten_registers.assembled)", "private.assembling_by(lambda ptx, plain: plain(ptx))",
         "kernels are not looked at", "tests/compiler/test_generated_offline.py::test_kernels_with_a_stack_are_looked_at"),
    ),
    *_in(
        "flexsp/compiler/planning/capacity.py",
        ('"C" not in dims(x) for x', '"C" in dims(x) for x', "any product counts as that of the next state",
         "tests/compiler/test_plan.py::test_copies_wait_for_products_of_the_next_state"),
        ("and not products.issuperset(users[load])", "", "tiles that only products read are not copied ahead",
         "tests/compiler/test_plan.py::test_copies_wait_for_products_of_the_next_state"),
        ("if packed and flipped else 0", "if False else 0", "a document's first state needs no shared memory",
         "tests/compiler/test_plan.py::test_documents_with_large_states_fit[gla_outer_gates]"),
        ("half = _TALL[packed] if tall else", "half = 0 if tall else", "a state of 256 rows is turned in 16 KiB",
         "tests/compiler/test_plan.py::test_estimates_of_tall_states[gla-0]"),
        ("anew = (packed and tall) or any(", "anew = any(", "a tall document's state is not laid out anew",
         "tests/compiler/test_plan.py::test_estimates_of_tall_states[linear-3]"),
    ),
    *_in(
        "flexsp/compiler/planning/generated_plan.py",
        ("how = replace(how, stages=1)", "pass", "tiles are copied over while a product reads them",
         "tests/compiler/test_plan.py::test_copies_wait_for_products_of_the_next_state"),
    ),
    *_in(
        "flexsp/runtime/triton_private.py",
        ("bits + 0x7FFF + ((bits >> 16) & 1)", "bits", "the interpreter rounds towards zero", _HALF),
        ("(handle.data.astype(\"uint32\") << 16)", "handle.data.astype(\"uint32\")", "bits taken for numbers", _HALF),
    ),
    *_in(
        "flexsp/testing/quick_interpreter.py",
        ("key = (element_ty.name, ", "key = (", "types of one shape are one type", _ALIKE),
        ("if data.itemsize > size:", "if False:", "numbers may be wider than their type", _ARITHMETIC),
        ("lhs.dtype is rhs.dtype in _NUMBERS", "lhs.dtype in _NUMBERS", "int meets float as it is", _ALIKE),
        ("self.ast_transformer.visit(ast.Module([found], []))", "ast.Module([found], [])", "numbers are no tensors", _REWRITTEN),
        ("shapes.setdefault(tuple([n.value for n in self.shape])", "shapes.setdefault(len(self.shape)",
         "shapes of as many sizes are one", _ALIKE),
    ),
    *_in(
        "flexsp/testing/triton_hooks.py",
        ("n - 1 - i if last_first else i", "i", "programs run by their numbers", "tests/testing/test_bounds.py"),
        ("and not turned.get(running[0], False)", "", "programs run the other way round", "tests/testing/test_bounds.py"),
    ),
    *_in(
        "flexsp/testing/quick_arithmetic.py",
        ("if of is to:", "if of in (to, tl.float64):", "wide numbers stay what they are", _ARITHMETIC),
        ("if x.shape is y.shape:", "if len(x.shape) == len(y.shape):", "unlike shapes pass", _ARITHMETIC),
        ("n if m == 1 else m", "m if m == 1 else n", "tiles are not stretched", _ARITHMETIC),
        ("of_blocks = _is_block(condition) or", "of_blocks =", "a choice of numbers is a number", _ARITHMETIC),
        ("size * y % 2**64", "size * abs(y)", "no pointer goes back", _ARITHMETIC),
        ("data.shape == shape:", "data.ndim == len(shape):", "masks of a column stay one", _ALIKE),
        ("if other is None else (id(", "if other is None or True else (id(", "what is masked is 0", _ALIKE),
        ("or value.shape is not pointers.shape or", "or", "values are not stretched", _ALIKE),
    ),
]
# ruff: noqa: E501 (texts of code are kept whole)
