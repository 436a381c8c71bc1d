"""Random programs of three functions, of what generated kernels support."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flexsp.compiler import (
    ConstExpr,
    LinearAttention,
    SymbTensor,
    cache_result,
    decayed_scores,
    decayed_sums,
    identity,
    matmul_out_fp32,
    unit_lower_inverse,
)

__all__ = [
    "CONSTANT_DECAY", "KEPT_TILES", "MAXIMA", "NOT_LINEAR", "OF_ALL_SIZES", "OF_EACH_NUMBER", "OF_SOME_SIZES",
    "OPERATORS", "PADDED_STATES", "SCORES_OF_SCORES", "SIZES_IN_A_DENSE_DECAY", "SUMS", "UNSUPPORTED", "WILD_PADDING",
    "DrawnProgram", "draw_program",
]  # fmt: skip

_NAMES: dict[str, Any] = {
    "torch": torch, "cache_result": cache_result, "decayed_scores": decayed_scores, "decayed_sums": decayed_sums,
    "identity": identity, "matmul_out_fp32": matmul_out_fp32, "unit_lower_inverse": unit_lower_inverse,
}  # fmt: skip
_SHAPES = {
    "q": ["T", "H", "K"], "k": ["T", "H", "K"], "v": ["T", "H", "V"], "g": ["T", "H"], "gk": ["T", "H", "K"],
    "beta": ["T", "H"], "z": ["T", "H", "V"], "u": ["H"], "w": ["H", "K"], "gv": ["T", "H", "V"], "A": ["H", "K", "V"],
}  # fmt: skip

# {x} is a tile [C, N], smooth; its values stay of the order of one.
_FEATURES = (
    "{x} / (1 + (-{x}).exp())", "({x} * {x} + 0.1).sqrt()", "(-({x} * {x})).exp()", "{x} * 0.5 + 0.1",
    "{x} / (1 + {x} * {x})", "1 - {x}", "-{x} / 2", "torch.sin({x})", "{x}.cos() * 0.5", "(1 + {x} * {x}).log()",
    "{x} - {x}.sum(-1, keepdim=True) / 8", "{x} * ({x} * {x} + 1).sum(-1)[:, None].rsqrt()", "{x} * {x} / 4",
    "({x} * {x} + 0.5).reciprocal()", "torch.add({x}, 0.25)",
)  # fmt: skip
_FEATURES += (
    "{x} * {x}.sigmoid()", "{x}.tanh()", "{x}.relu() + 0.1 * {x}", "{x} ** 2 * 0.3", "{x}.square() * 0.3",
    "{x}.abs() * 0.5 + 0.1",
)  # fmt: skip
_FEATURES += (
    "torch.where({x} > 0, {x}, 0.1 * {x})", "torch.maximum({x}, {x} * -0.3)", "{x}.clamp(-1.5, 1.5)",
    "torch.nn.functional.softplus({x})", "torch.nn.functional.gelu({x}, approximate='tanh')",
    "torch.nn.functional.elu({x})", "torch.nn.functional.leaky_relu({x}, 0.1)", "{x} * ({x} > 0).to({x}.dtype) + 0.1",
    "{x} * (1 / {x}.size(0)) * 8", "{x} / {x}.size(1) ** 0.5", "{x}.softmax(-1) * 3", "{x}.log_softmax(-1) * 0.3",
    "{x} - {x}.amax(-1, keepdim=True) * 0.3", "{x} - {x}.mean(-1, keepdim=True)", "{x}.clamp(max=1).exp2() * 0.5",
    "({x} * 0.5).clamp(max=1).expm1()", "({x} * {x}).log1p()", "torch.nn.functional.normalize({x}, dim=-1) * 2",
    "torch.einsum('cn,c->cn', {x}, {x}.amin(-1)) * 0.2", "{x}.mT.transpose(0, 1) * 0.7",
    "torch.nn.functional.silu({x})",
)  # fmt: skip
_OF_TOKENS = ("{x} * beta[:, None]", "{x} * (1 - beta).unsqueeze(-1)", "{x} * (beta * beta + 0.2).sqrt()[..., None]")
_OF_KEYS = ("{x} * w", "{x} + w[None, :] * 0.2", "{x} / (1 + w * w)", "{x} * gk.exp()")
_OF_SCORES = (
    "{s}.tril(0)", "{s}.tril(-1)", "({s} / (1 + {s} * {s})).tril()", "({s} * {s}).tril() * 0.2", "{s}.tril() * 0.5",
    "(-({s} * {s})).exp().tril()", "{s}.tril().sin()", "{s}.masked_fill(torch.ones_like({s}).tril() == 0, 0.0)",
)  # fmt: skip

_F = "torch.nn.functional"
OPERATORS = {
    "masks": [
        "torch.where(k > 0, k, 0.1 * k)", "torch.where(w > 0, k, -k)", "k * (k > 0).to(k.dtype)", "k.sign() * w",
        "k.masked_fill(k < 0, 0.5)", "k * (k.abs() < 1)", "torch.where((k > 0) & (w < 0), w, k * k)",
    ],
    "extrema": [
        "torch.maximum(k, k * -0.3)", "torch.minimum(k, w)", "torch.maximum(k, k)", "k.amax(-1, keepdim=True) * k",
        "k * k.amin(1)[:, None]", "(k - 9).amax(1)[:, None] * k", "k * (k + 9).amin(-1, keepdim=True)",
        "k.clamp(min=-1)", "k.clamp(max=0.5)", "k.clamp(-1, 1)", "torch.clamp(k, min=w)",
    ],
    "activations": [
        f"{_F}.softplus(k)", f"{_F}.silu(k)", f"{_F}.gelu(k, approximate='tanh')", f"{_F}.gelu(k)", f"{_F}.elu(k)",
        f"{_F}.leaky_relu(k)", f"{_F}.logsigmoid(k)", "k.erf()",
    ],
    "sizes": [
        "k * (k.size(0) * 0.1)", "k * (1 / k.size(0))", "k / k.size(1) ** 0.5", "k * (k.size(0) + 2) ** -0.5",
        "k * (k.size(0) // 2 - k.size(1)) * 0.1", "k * w.mean()", "k - k.mean(-1, keepdim=True)",
    ],
    "functions": [
        "k.exp2()", "(k * k + 1).log2()", "(k * 0.1).expm1()", "torch.log1p(k * k)", "(k * k + 1) ** -1.5",
        "torch.softmax(k, -1)", "torch.log_softmax(k, -1) * 0.3", "k + k.logsumexp(-1, keepdim=True)",
        f"{_F}.normalize(k, dim=-1)", "k / k.norm(dim=-1, keepdim=True)",
    ],
    "products": [
        "k * torch.outer(k[:, 0], w)", "k @ torch.outer(w, w)", "torch.einsum('ck,k->ck', k, w)",
        "torch.einsum('ck,dk->dc', [k, k]).triu().T @ k", "torch.einsum('ck,k->c', k, w)[:, None] * k",
        "torch.einsum('kj,ck', torch.outer(w, w), k)", "k.mT.T * 0.5", "k.permute(1, 0).transpose(0, 1) * 0.5",
        "(k @ w)[:, None] * k",
    ],
}  # fmt: skip
"""Features that kernels are made of."""

UNSUPPORTED = {
    "flip": "k.flip(1)", "stack": "torch.stack([k, k]).sum(0)", "unbind": "k.unbind(1)[0][:, None] * k",
    "cumprod": "k.cumprod(0)", "tiles of three axes": "torch.einsum('ck,cd->ckd', k, k).sum(-1)",
    "the power 0.3 of a chunk's length": "k * k.size(0) ** 0.3", "the power 2.3": "(k * k) ** 2.3",
}  # fmt: skip
"""What the message says, and features that run in PyTorch since no kernel is made of them or of their derivative."""

OF_SOME_SIZES = [
    "k[:16]", "k[-16:]", "k[:64]", "k[:, :18]", "k[:, :20]", "k.T[:, :12].T",
    *(f"k * {sized}" for n in (11, 20, 24, 101, 103, 191, 193) for sized in (
        f"w.sum().expand({n}).sum()", f"identity(k, {n}).sum()", f"w.sum().expand({n}, {n}).exp().sum()",
    )),
]  # fmt: skip
"""Features that are made of a number of tokens or channels; many such numbers are sizes of a trace by chance."""
OF_ALL_SIZES = ["k[:129]", "k[:, :300]", "k[: k.size(0)]", "k * identity(k, k.size(1)).sum() * 0.1"]
"""Features that are made of a size, or of a number that none exceeds. K is 20 and V is 24."""

WILD_PADDING = {
    "0 * log(0)": "k * (w * w).log() * 0.2",
    "0 / 0": "k * w / (w * w).sqrt()",
    "an axis masked, the other not": "(k * k).log().sum(-1)[:, None] * k * 0.05",
    "rows of a product": "(k * k).log() @ torch.outer(w, w) * 0.05",
    "a root": "k * ((w * w) * 1e6 - 1e-3).sqrt() * 1e-3",
    "behind relu": "((k @ torch.outer(w, w)) * 0.1).relu() * (w * w).log()",
    "behind a column": "(k @ torch.outer(w, w))[:, 0].square().log()[:, None] * k * 0.1",
    "an exponential": "k * ((w * w * 1e9).tanh() * -200 + 200).exp()",
}
"""Features that are inf or NaN where their inputs are padded with zeros, and finite elsewhere."""


@dataclass(frozen=True)
class DrawnProgram:
    """Source of chunk, decay and merge, the inputs they have, and their sizes."""

    source: str
    names: tuple[str, ...]
    H: int
    K: int
    V: int
    chunk: int
    vector: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in "HKV"}

    def model(self, **options: Any) -> LinearAttention:
        sizes = {name: ConstExpr(name, n) for name, n in self.sizes.items()}
        meta: dict[str, Any] = {
            name: SymbTensor([sizes.get(s, s) for s in _SHAPES[name]], torch.float32) for name in self.names
        }
        state = ["NS", sizes["H"], sizes["K"], sizes["V"]]
        meta |= {"prev_s": SymbTensor(state[: 4 - self.vector]), "scale": self.K**-0.5}
        made = dict(_NAMES)
        exec(self.source, made)
        return LinearAttention(meta, made["chunk"], made["decay"], made["merge"], chunk_size=self.chunk, **options)

    @staticmethod
    def of_features(*features: str) -> DrawnProgram:
        """Linear attentions with features of k, which are made of k and w, and the sum of their outputs.

        Every feature has products of its own, so that what one does to its padding is not hidden by another.
        """
        writes = " + ".join(f"({x}).T @ v" for x in features)
        reads = " + ".join(f"(q @ ({x}).T).tril() @ v" for x in features)
        source = (
            f"def chunk(k, v, w):\n    return {writes}\n\n\n"
            "def decay(prev_s, chunk_state):\n    return prev_s + chunk_state\n\n\n"
            f"def merge(q, k, v, w, scale, chunk_state):\n    return ({reads} + q @ chunk_state) * scale\n"
        )
        return DrawnProgram(source, ("q", "k", "v", "w"), 1, 20, 24, 16)

    @staticmethod
    def of_source(source: str, *more: str) -> DrawnProgram:
        return DrawnProgram(source, ("q", "k", "v", *more), 1, 20, 24, 16)

    def inputs(self, B: int, T: int, bounds: Any, made: torch.Generator) -> dict[str, torch.Tensor]:
        """Values that float32 has."""
        sizes = {"H": self.H, "K": self.K, "V": self.V, "T": T}
        found = {}
        for name in self.names:
            shape = [sizes[s] for s in _SHAPES[name]]
            x = torch.randn([B, *shape] if shape[0] == T and _SHAPES[name][0] == "T" else shape, generator=made)
            if name in ("g", "gk", "gv"):
                x = torch.nn.functional.logsigmoid(x + 1)
            found[name] = x.sigmoid() if name == "beta" else x
        n = B if bounds is None else len(bounds) - 1
        state = [n, self.H, self.K, self.V]
        return found | {"prev_s": torch.randn(state[: 4 - self.vector], generator=made)}


class _Draw:
    """Writes one program. `used` are the inputs beside q, k and v that its functions take so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        kinds = ["none", "none", "scalar", "vector", "parameter", "row parameter"]
        kinds += ["outer", "matrix parameter", "maximum"]
        self.gate = self.choice(kinds)
        self.dense = self.random.random() < 0.3 and self.gate not in kinds[-3:]
        self.cached: dict[str, str] = {}
        self.names: set[str] = set("qkv")

    def choice(self, options: Any) -> Any:
        return self.random.choice(list(options))

    def some(self, probability: float) -> bool:
        return self.random.random() < probability

    def feature(self, x: str, keys: bool = True) -> str:
        """A tile made of x, in one to three steps that work in any of the functions."""
        for _ in range(self.choice([0, 1, 1, 2])):
            kinds = [_FEATURES, _FEATURES, _OF_TOKENS, *([_OF_KEYS] if keys else [])]
            template = self.choice(self.choice(kinds))
            if "gk" in template and self.gate not in ("vector", "outer"):
                continue
            x = f"({template.format(x=x)})"
        return x

    def gates(self) -> tuple[list[str], str, str, str]:
        """(lines that make the cumulative log decay b, factor of the state, of keys to the end, of queries)."""
        if self.gate in ("none", "maximum"):
            return [], "", "", ""
        if self.gate in ("vector", "outer"):
            total, columns = self.choice(["gk.sum(0)", "b[-1]"]), ""
            if self.gate == "outer":
                columns = self.choice([" * gv.sum(0).exp()", " * (gv[0] - v[-1] * v[-1]).exp()[None, :]"])
            return ["b = gk.cumsum(0)"], f" * b[-1].exp()[:, None]{columns}", f" * ({total} - b).exp()", " * b.exp()"
        if self.gate == "matrix parameter":
            factor = self.choice([" * (A * A * g.sum()).exp()", " * A.sigmoid()", " * A.relu()"])
            return [], factor, "", self.choice(["", " + v @ A.T * 0.1"])
        if self.gate == "row parameter":
            line = "r = -(w * w)"
            return [line], " * (r * k.size(0)).exp().unsqueeze(1)", " * r.exp()", " * (r * 0.5).exp()[None, :]"
        line = "b = g.cumsum(0)"
        if self.gate == "parameter":
            line = "b = torch.ones_like(k[:, 0]).cumsum(0) * -(u * u)"
        return [line], " * b[-1].exp()", " * (b[-1] - b).exp()[:, None]", " * b.exp()[:, None]"

    def chunk(self) -> str:
        lines, _, to_end, _ = self.gates()
        lines = [*lines, f"kk = {self.feature('k')}", f"vv = {self.feature('v', keys=False)}"]
        if self.some(0.4):
            scores = self.choice(["kk @ k.T", "k @ kk.T", "matmul_out_fp32(kk, k.T)"])
            if self.gate in ("scalar", "parameter", "vector", "outer") and self.some(0.5):
                scores = "decayed_scores(kk, k, b)"
            lines.append(f"t = unit_lower_inverse(identity(k, k.size(0)) + (({scores}) * 0.1).tril(-1))")
            lines.append("vv = t @ vv")
            if self.some(0.6):
                lines.append("cache_result(t @ (kk * 0.3), 'kc')")
                self.cached["kc"] = "K"
            if self.some(0.6):
                lines.append("cache_result(vv, 'vc')")
                self.cached["vc"] = "V"
        elif self.some(0.3):
            lines.append(f"cache_result({self.choice(['kk', 'kk * 0.5'])}, 'kc')")
            self.cached["kc"] = "K"
        return self.function("chunk", [*lines, f"return (kk{to_end}).T @ vv"])

    def decay(self) -> str:
        lines, factor, _, _ = self.gates()
        if self.gate == "maximum":
            shift = self.choice(["gk.sum(0)[:, None]", "g.sum()", "gv.sum(0) * 0.5", "A * A * -0.3"])
            return self.function("decay", [f"return torch.maximum(prev_s + {shift}, chunk_state)"])
        state = f"prev_s{factor}"
        if self.dense:
            left = "kc" if "kc" in self.cached and self.some(0.7) else f"({self.feature('k')} * 0.2)"
            lines.append(f"p = {self.feature('k')} * 0.1")
            if self.gate == "none" and self.some(0.5):
                return self.function(
                    "decay", [*lines, f"return (identity(k, k.size(1)) - p.T @ {left}) @ prev_s + chunk_state"]
                )
            state = f"{state} - p.T @ ({left} @ prev_s)"
        total = self.choice([f"{state} + chunk_state", f"chunk_state + {state}"])
        return self.function("decay", [*lines, f"return {total}"])

    def merge(self) -> str:
        lines, _, _, enters = self.gates()
        lines.append(f"qq = {self.feature('q')}")
        keys = "kc" if "kc" in self.cached and self.some(0.5) else self.feature("k")
        values = "vc" if "vc" in self.cached and self.some(0.6) else self.feature("v", keys=False)
        lines.append(f"kk = {keys}")
        if self.gate in ("scalar", "parameter", "vector", "outer") and self.some(0.7):
            lines.append("a = decayed_scores(qq, kk, b)" + self.choice(["", ".tril(-1)", " * 0.5"]))
        elif self.gate in ("scalar", "parameter") and self.some(0.6):
            lines.append("a = (qq @ kk.T).tril() * (b[:, None] - b[None, :]).exp()")
        else:
            lines += ["s = qq @ kk.T", f"a = {self.choice(_OF_SCORES).format(s='s')}"]
        if self.some(0.25):
            lines.append("a = a * (-(u * u)).exp()")
        if "kc" in self.cached and self.some(0.5):
            values = f"({values} - kc @ chunk_state)"
        outputs = [f"a @ {values}", f"(qq{enters}) @ chunk_state"]
        if self.some(0.3):
            outputs.append("(qq * kk).sum(-1)[:, None] * v")
        lines.append(f"o = {' + '.join(outputs)}")
        changes = ["o = o / (1 + z.exp())", "o = o * u", "o = o * beta[:, None]", "o = o + 0.5 * v"]
        lines += [self.choice(changes)] if self.some(0.7) else []
        return self.function("merge", [*lines, self.choice(["return o * scale", "return scale * o"])])

    def function(self, name: str, lines: list[str]) -> str:
        states = {"chunk": [], "decay": ["prev_s", "chunk_state"], "merge": ["chunk_state"]}[name]
        known = [*_SHAPES, "scale", *self.cached, *states]
        body = "\n".join(f"    {line}" for line in lines)
        taken = [x for x in known if re.search(rf"(?<![\w.']){x}(?![\w'])", body)]
        if name == "chunk":
            taken = [x for x in taken if x not in self.cached]
        self.names |= set(taken) & set(_SHAPES)
        return f"def {name}({', '.join(taken)}):\n{body}\n"


def draw_program(seed: int) -> DrawnProgram:
    """A program with sizes, the same for the same seed."""
    made = _Draw(seed)
    source = "\n\n".join([made.chunk(), made.decay(), made.merge()])
    source = _with_turned(source, made.cached, random.Random(f"{seed} turned"))
    K, V = made.choice([(20, 24), (7, 12), (16, 9), (33, 5)])
    names = tuple(name for name in _SHAPES if name in made.names)
    return DrawnProgram(source, names, made.choice([1, 1, 2]), K, V, made.choice([16, 16, 32]))


def _with_turned(source: str, cached: Iterable[str], made: random.Random) -> str:
    """The same program; some of what it caches lies the other way round, its tokens as columns."""
    for name in cached:
        if made.random() < 0.4:
            source = re.sub(rf"cache_result\((.*), '{name}'\)", rf"cache_result((\1).T, '{name}')", source)
            read = rf"(?<!['\w]){name}(?!['\w])"
            lines = [x if x.startswith("def ") else re.sub(read, f"{name}.T", x) for x in source.split("\n")]
            source = "\n".join(lines)
    return source


_PLAIN_DECAY = "def decay(prev_s, chunk_state):\n    return prev_s + chunk_state\n\n\n"
PADDED_STATES = {
    "columns of the state": (
        "def chunk(k, v):\n    return k.T @ (v * v + 1)\n\n\n" + _PLAIN_DECAY
        + "def merge(q, k, v, scale, chunk_state):\n"
        "    return (q @ chunk_state).sum(-1)[:, None] * v * scale + (q @ k.T).tril() @ v\n"
    ),
    "running sums [C, C]": (
        "def chunk(k, v):\n    return k.T @ v\n\n\n"
        "def decay(k, v, prev_s, chunk_state):\n"
        "    d = torch.outer(k[:, 0], k[:, 1]).square().log().cumsum(0) * 0.01\n"
        "    return prev_s + chunk_state + k.T @ (d @ v) * 0.1\n\n\n"
        "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
    ),
    "a kept [C, C]": (
        "def chunk(k, v):\n    cache_result((k @ k.T).square().log(), 'kc')\n"
        "    return (unit_lower_inverse(identity(k, k.size(0)) + (k @ k.T * 0.1).tril(-1)) @ k).T @ v\n\n\n"
        "def decay(k, v, kc, prev_s, chunk_state):\n    return prev_s + chunk_state + k.T @ (kc @ v) * 0.01\n\n\n"
        "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
    ),
}  # fmt: skip
"""Programs in which padding of what walks hold or of what is kept in memory is not zero, or not finite."""

CONSTANT_DECAY = (
    "def chunk(k, v):\n    return k.T @ v\n\n\n"
    "def decay(prev_s, chunk_state, u, A):\n    return prev_s * {factor} + chunk_state\n\n\n"
    "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
)
SIZES_IN_A_DENSE_DECAY = (
    "def chunk(k, v):\n    return k.T @ v * 0.1\n\n\n"
    "def decay(k, prev_s, chunk_state):\n"
    "    columns, rows = prev_s.size(1) / 20, prev_s.size(0) / 20\n"
    "    return prev_s * columns ** 0.5 - k.T @ (k @ prev_s) * (0.02 * rows / columns) + chunk_state\n\n\n"
    "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
)
"""Its matrix is carried by a program of `summarize` whose columns are as many as the state has rows."""

_SCORED = "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
_WRITTEN = "def chunk(k, v):\n    return k.T @ v\n\n\n"
OF_EACH_NUMBER = {
    "a parameter": (
        _WRITTEN + "def decay(prev_s, chunk_state, A, g):\n"
        "    return prev_s * (A * A * g.sum(0)).exp() + chunk_state\n\n\n" + _SCORED, "A", "g",
    ),
    "zeros": (
        _WRITTEN + "def decay(prev_s, chunk_state, A):\n    return prev_s * A.relu() + chunk_state\n\n\n" + _SCORED,
        "A",
    ),
    "columns": (
        _WRITTEN + "def decay(prev_s, chunk_state, gv):\n"
        "    return chunk_state + prev_s * gv.sum(0).exp()\n\n\n" + _SCORED, "gv",
    ),
    "turned": (
        _WRITTEN + "def decay(prev_s, chunk_state, gk, A):\n"
        "    return (prev_s.T * gk.sum(0).exp()).T * A.T.sigmoid().T + chunk_state\n\n\n" + _SCORED, "gk", "A",
    ),
    "a triangle": (
        _WRITTEN + "def decay(prev_s, chunk_state, k):\n"
        "    return prev_s.tril() * k.square().sum().tanh() + chunk_state\n\n\n" + _SCORED,
    ),
    "matrices in products": (
        "def chunk(k, v, A):\n    return k.T @ (v * (k @ A) * 0.3)\n\n\n"
        "def decay(prev_s, chunk_state, A):\n    return prev_s * A.sigmoid() + chunk_state * A.cos()\n\n\n"
        "def merge(q, k, v, scale, A, chunk_state):\n"
        "    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale + q @ A * 0.2\n", "A",
    ),
}  # fmt: skip
"""Source and inputs of programs in which each number of the state has a factor of its own; the chunk's length decides
what they compute."""

_LARGER = "def decay(prev_s, chunk_state, {more}):\n    return torch.maximum(prev_s + {shift}, chunk_state)\n\n\n"
MAXIMA = {
    "a vector": DrawnProgram(
        "def chunk(k, gk):\n    return (k + gk.sum(0) - gk.cumsum(0)).amax(0)\n\n\n"
        + _LARGER.format(more="gk", shift="gk.sum(0)")
        + "def merge(q, k, gk, chunk_state):\n"
        "    return q * torch.maximum(k, gk.cumsum(0) + chunk_state).tanh()\n",
        ("q", "k", "gk"), 2, 40, 1, 16, vector=True,
    ),
    "numbers of a vector joined": DrawnProgram(
        "def chunk(k, w, g):\n    return (k * w + (g.sum(0) - g.cumsum(0))[:, None]).amax(0)\n\n\n"
        + _LARGER.format(more="g, w", shift="0.25 * g.sum(0) - 0.125 * w * w")
        + "def merge(q, k, g, chunk_state):\n"
        "    h = torch.maximum(k, g.cumsum(0)[:, None] + chunk_state)\n"
        "    return q * (h - h.amax(-1, keepdim=True)).exp()\n",
        ("q", "k", "g", "w"), 1, 20, 1, 16, vector=True,
    ),
    "a matrix": DrawnProgram.of_source(
        _WRITTEN + _LARGER.format(more="gk", shift="gk.sum(0)[:, None]") + _SCORED, "gk"
    ),
    "a number": DrawnProgram.of_source(_WRITTEN + _LARGER.format(more="g", shift="0.125 * g.sum(0)") + _SCORED, "g"),
    "of each number": DrawnProgram.of_source(
        _WRITTEN + _LARGER.format(more="gv, A", shift="gv.sum(0) - A * A") + _SCORED, "gv", "A"
    ),
}  # fmt: skip
"""Programs whose states are maxima."""

_SUMMED = "decayed_sums((k * k).log() * 0.2, gk * (w * w).rsqrt() * 0.3)"
SUMS = {
    "channels apart": DrawnProgram(
        "def chunk(k, w, gk):\n    return decayed_sums(k * w, gk)[-1]\n\n\n"
        "def decay(gk, prev_s, chunk_state):\n    return prev_s * gk.sum(0).exp() + chunk_state\n\n\n"
        "def merge(q, k, w, gk, chunk_state):\n"
        "    return q * (decayed_sums(k * w, gk) + gk.cumsum(0).exp() * chunk_state) + w\n",
        ("q", "k", "gk", "w"), 1, 40, 1, 16, vector=True,
    ),
    "channels joined": DrawnProgram(
        "def chunk(k, w, g):\n    return decayed_sums(k * w, g).sum(0) * 0.2\n\n\n"
        "def decay(g, prev_s, chunk_state):\n    return prev_s * g.sum(0).exp() + chunk_state\n\n\n"
        "def merge(q, k, w, g, chunk_state):\n"
        "    h = decayed_sums(k * w, g) + g.cumsum(0).exp()[:, None] * chunk_state\n"
        "    return q * (h - h.mean(-1, keepdim=True)) + (q @ k.T).tril() @ k * 0.2\n",
        ("q", "k", "g", "w"), 2, 40, 1, 16, vector=True,
    ),
    "keys of a matrix": DrawnProgram(
        f"def chunk(k, v, w, gk):\n    return {_SUMMED}.T @ v\n\n\n" + _PLAIN_DECAY
        + "def merge(q, k, v, w, gk, scale, chunk_state):\n"
        f"    return ((q @ {_SUMMED}.T).tril() @ v + q @ chunk_state) * scale\n",
        ("q", "k", "v", "gk", "w"), 1, 20, 24, 16,
    ),
}  # fmt: skip
"""Decayed sums in a vector state whose channels are apart or joined, and of what is not finite in its padding."""

NOT_LINEAR = (
    "def chunk(k, v):\n    return k.T @ v\n\n\n" + _PLAIN_DECAY
    + "def merge(q, k, v, chunk_state):\n    o = q @ chunk_state\n"
    "    return o * (o * o).sum(-1)[:, None] + (q @ k.T).tril() @ v\n"
)  # fmt: skip
"""The gradient of the state needs the state: no kernel is made of that."""

_INVERSE = "unit_lower_inverse(identity(k, k.size(0)) + (k @ k.T * 0.1).tril(-1))"
KEPT_TILES = {
    "tokens are columns": DrawnProgram.of_source(
        f"def chunk(k, v):\n    t = {_INVERSE}\n    cache_result(k.T @ t.T * 0.3, 'kt')\n"
        "    cache_result((t @ v).T, 'vt')\n    cache_result((t * 0.5).T, 'tt')\n    return k.T @ (t @ v)\n\n\n"
        "def decay(k, kt, prev_s, chunk_state):\n    return prev_s - k.T @ (kt.T @ prev_s) * 0.2 + chunk_state\n\n\n"
        "def merge(q, k, kt, vt, tt, scale, chunk_state):\n"
        "    o = (q @ kt).tril() @ (vt.T - kt.mT @ chunk_state) + (tt.T @ vt.T).tanh()\n"
        "    return (o + q @ chunk_state) * scale\n"
    ),
    "no axis is tokens": DrawnProgram(
        f"def chunk(k, v):\n    t = {_INVERSE}\n    cache_result(k.T @ (t @ v), 'kv')\n"
        "    cache_result(v.T @ (t @ k) * 0.1, 'vk')\n    return k.T @ v\n\n\n"
        "def decay(k, kv, vk, prev_s, chunk_state):\n"
        "    return prev_s * 0.9 + 0.1 * kv * vk.T + chunk_state\n\n\n"
        "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n",
        ("q", "k", "v"), 1, 20, 70, 16,
    ),
    "columns by columns": DrawnProgram.of_source(
        f"def chunk(k, v):\n    t = {_INVERSE}\n    cache_result(v.T @ (t @ v) * 0.1, 'vv')\n    return k.T @ v\n\n\n"
        "def decay(k, vv, prev_s, chunk_state):\n    return prev_s * 0.9 + chunk_state + 0.1 * chunk_state @ vv\n\n\n"
        "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
    ),
    "a matrix of a dense walk": DrawnProgram.of_source(
        "def chunk(k, v):\n    return k.T @ v\n\n\n"
        "def decay(k, prev_s, chunk_state):\n"
        "    m = (k.T @ (k * 0.1)).tanh() * 0.2\n    return prev_s - m @ prev_s + chunk_state\n\n\n"
        "def merge(q, k, v, scale, chunk_state):\n    return ((q @ k.T).tril() @ v + q @ chunk_state) * scale\n"
    ),
}  # fmt: skip
"""Values that kernels leave for others, laid out in ways other than a row a token."""

SCORES_OF_SCORES = (
    "def chunk(k, v, gk):\n    b = gk.cumsum(0)\n"
    "    t = unit_lower_inverse(identity(k, k.size(0)) + (decayed_scores(k, k, b) * 0.1).tril(-1))\n"
    "    cache_result(t @ (k * 0.3), 'kc')\n    return (k * (b[-1] - b).exp()).T @ (t @ v)\n\n\n"
    "def decay(gk, prev_s, chunk_state):\n    return prev_s * gk.sum(0).exp()[:, None] + chunk_state\n\n\n"
    "def merge(q, v, gk, kc, chunk_state):\n    b = gk.cumsum(0)\n"
    "    return decayed_scores(q, kc, b) @ v + (q * b.exp()) @ chunk_state\n"
)
"""The gradient of the first scores needs that of the second."""
