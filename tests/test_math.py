"""The formulas of docs/math.md in float64, against autograd through token loops, and what cites that document."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
C, K, V = 16, 5, 3
Tensor = torch.Tensor


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def gates(*shape: int) -> Tensor:
    return (-2 * torch.rand(*shape, dtype=torch.float64)).requires_grad_()


def close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """The largest relative difference, by name, is one of rounding."""
    assert got.keys() == want.keys()
    apart = {name: ((got[name] - x).norm() / x.norm().clamp_min(1e-30)).item() for name, x in want.items()}
    assert max(apart.values()) < 1e-12, apart


def loop(x: dict[str, Tensor], step: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Outputs [C, V] and the last state, token by token."""
    S, o = x["S"], []
    for t in range(C):
        S, out = step({name: value[t] for name, value in x.items() if name != "S"}, S)
        o.append(out)
    return torch.stack(o), S


def diagonal(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    S = x["g"].exp().reshape(-1, 1) * S + x["k"][:, None] * x["v"]
    return S, x["q"] @ S


def delta(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    S = x["g"].exp().reshape(-1, 1) * S
    S = S + x["p"][:, None] * (x["v"] - x["r"] @ S)
    return S, x["q"] @ S


def gradients(x: dict[str, Tensor], o: Tensor, S: Tensor, do: Tensor, dS: Tensor) -> dict[str, Tensor]:
    return dict(zip(x, torch.autograd.grad((o * do).sum() + (S * dS).sum(), list(x.values())), strict=True))


def decay(b: Tensor) -> Tensor:
    """E_ijd of section 1; b [C, K]."""
    later = torch.ones(C, C, dtype=torch.bool).tril()[:, :, None]
    return (b[:, None] - b[None]).masked_fill(~later, float("-inf")).exp()


def scores(x: Tensor, y: Tensor, E: Tensor) -> Tensor:
    return torch.einsum("id,jd,ijd->ij", x, y, E)


def revcumsum(x: Tensor) -> Tensor:
    return x.flip(0).cumsum(0).flip(0)


def inputs(*names: str, wide: bool) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Leaves, cotangents of outputs and state, and b and E as for a gate a channel."""
    x = {name: normal(C, V if name == "v" else K) for name in names} | {"g": gates(C, *[K] * wide), "S": normal(K, V)}
    b = x["g"].detach().cumsum(0)
    b = b if wide else b[:, None].expand(C, K)
    return x, torch.randn(C, V, dtype=torch.float64), torch.randn(K, V, dtype=torch.float64), b, decay(b)


@pytest.mark.parametrize("wide", [False, True], ids=["gate a head", "gate a channel"])
def test_diagonal_chunk_and_its_gradients(wide: bool) -> None:
    """Sections 2 and 5, and 3's claim that a chunk is an affine map of the state."""
    x, do, dS1, b, E = inputs("q", "k", "v", wide=wide)
    o, S1 = loop(x, diagonal)
    want = gradients(x, o, S1, do, dS1)
    q, k, v, S = (x[name].detach() for name in "qkvS")
    reads, writes = q * b.exp(), k * (b[-1] - b).exp()
    A = scores(q, k, E)
    new = b[-1].exp()[:, None] * S + writes.T @ v
    close({"o": A @ v + reads @ S, "S": new}, {"o": o, "S": S1})

    dA = (do @ v.T).tril()
    found = {
        "q": torch.einsum("ij,jd,ijd->id", dA, k, E) + b.exp() * (do @ S.T),
        "k": torch.einsum("ij,id,ijd->jd", dA, q, E) + (b[-1] - b).exp() * (v @ dS1.T),
        "v": A.T @ do + writes @ dS1,
        "S": reads.T @ do + b[-1].exp()[:, None] * dS1,
    }
    dg = revcumsum(q * found["q"] - k * found["k"]) + (dS1 * new).sum(1)
    close({**found, "g": dg if wide else dg.sum(1)}, want)


def test_the_gates_gradient_by_pairs() -> None:
    """Section 5's four sets of pairs over several chunks, carried from the right edge."""
    x, do, dS1, b, _ = inputs("q", "k", "v", wide=False)
    o, S1 = loop(x, diagonal)
    want = gradients(x, o, S1, do, dS1)["g"]
    q, k, v, g, S = (x[name].detach() for name in "qkvgS")
    n, entering, dS = 4, [S], dS1
    for c in range(0, C, n):
        bc = g[c : c + n].cumsum(0)
        entering.append(bc[-1].exp() * entering[-1] + (k[c : c + n] * (bc[-1] - bc).exp()[:, None]).T @ v[c : c + n])
    edge, dg = (entering[-1] * dS).sum(), torch.zeros(C, dtype=torch.float64)
    for c in reversed(range(0, C, n)):
        bc, Sc = g[c : c + n].cumsum(0), entering[c // n]
        qc, kc, vc, oc = (x[c : c + n] for x in (q, k, v, do))
        P = (qc @ kc.T * (oc @ vc.T) * (bc[:, None] - bc).exp()).tril()
        read = ((qc * bc.exp()[:, None]) * (oc @ Sc.T)).sum(1)
        write = ((kc * (bc[-1] - bc).exp()[:, None]) * (vc @ dS.T)).sum(1)
        straddle = edge - write.sum()
        for p in range(n):
            dg[c + p] = P[p:, :p].sum() + read[p:].sum() + write[:p].sum() + straddle
        edge = straddle + read.sum()
        dS = (qc * bc.exp()[:, None]).T @ oc + bc[-1].exp() * dS
    close({"g": dg, "edge": edge}, {"g": want, "edge": (S * dS).sum()})


def test_scores_and_their_gradients_by_halves() -> None:
    """Section 6, with gates whose e^{-b} overflows float64."""
    q, k, b = normal(C, K), normal(C, K), (-100 * torch.rand(C, K, dtype=torch.float64)).cumsum(0)
    dA = torch.randn(C, C, dtype=torch.float64)
    assert not (-b).exp().isfinite().all()
    want = scores(q, k, decay(b))
    dq, dk = torch.autograd.grad((want * dA).sum(), (q, k))
    row, both = torch.arange(C), dA.tril(-1) + dA.tril(-1).T
    found, to_q, to_k = torch.diag((q * k).sum(1)), dA.diagonal()[:, None] * k, dA.diagonal()[:, None] * q
    s = 1
    while s < C:
        block, second = row // (2 * s), (row // s % 2 == 1)
        reference = b[block * 2 * s + s - 1]
        factor = torch.where(second[:, None], b - reference, reference - b).exp()
        assert factor.max() <= 1
        X = torch.where(second[:, None], q, k) * factor
        mask = (block[:, None] == block) & second[:, None] & ~second
        found = found + mask * (X @ X.T)
        Y = ((mask | mask.T) * both) @ X * factor
        to_q, to_k = to_q + second[:, None] * Y, to_k + ~second[:, None] * Y
        s *= 2
    close({"A": found, "q": to_q, "k": to_k}, {"A": want, "q": dq, "k": dk})


@pytest.mark.parametrize("wide", [False, True], ids=["gate a head", "gate a channel"])
def test_error_form_and_its_gradients(wide: bool) -> None:
    """Section 7, and 8's map of a chunk."""
    x, do, dS1, b, E = inputs("q", "r", "p", "v", wide=wide)
    with torch.no_grad():
        x["r"] /= 3
    o, S1 = loop(x, delta)
    want = gradients(x, o, S1, do, dS1)
    q, r, p, v, S = (x[name].detach() for name in ("q", "r", "p", "v", "S"))
    inverse = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + scores(r, p, E).tril(-1))
    reads, seen, writes, Aq = q * b.exp(), r * b.exp(), p * (b[-1] - b).exp(), scores(q, p, E)
    U, W = inverse @ v, inverse @ seen
    N = U - W @ S
    new = b[-1].exp()[:, None] * S + writes.T @ N
    affine = (torch.diag(b[-1].exp()) - writes.T @ W) @ S + writes.T @ U
    close({"o": Aq @ N + reads @ S, "S": new, "affine": affine}, {"o": o, "S": S1, "affine": S1})

    Y = inverse.T @ (Aq.T @ do + writes @ dS1)
    dAq, dG = (do @ N.T).tril(), -(Y @ N.T).tril(-1)
    found = {
        "q": torch.einsum("ij,jd,ijd->id", dAq, p, E) + b.exp() * (do @ S.T),
        "r": torch.einsum("ij,jd,ijd->id", dG, p, E) - b.exp() * (Y @ S.T),
        "p": torch.einsum("ij,id,ijd->jd", dAq, q, E) + torch.einsum("ij,id,ijd->jd", dG, r, E)
        + (b[-1] - b).exp() * (N @ dS1.T),
        "v": Y,
        "S": reads.T @ do + b[-1].exp()[:, None] * dS1 - seen.T @ Y,
    }  # fmt: skip
    dg = revcumsum(q * found["q"] + r * found["r"] - p * found["p"]) + (dS1 * new).sum(1)
    close({**found, "g": dg if wide else dg.sum(1)}, want)


def erasing(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    S = x["g"].exp()[:, None] * S
    S = S + x["k"][:, None] * (x["w"] * x["v"] - (x["b"] * x["k"]) @ S)
    return S, x["q"] @ S


def test_two_strengths_and_their_gradients() -> None:
    """Section 7: Gated DeltaNet-2 in error form, and what its gradients make of those of r, p and v."""
    x, do, dS, _, _ = inputs("q", "k", "v", wide=True)
    x |= {"b": torch.rand(C, K, dtype=torch.float64).requires_grad_(), "w": normal(C, V)}
    with torch.no_grad():
        x["k"] /= 3
    o, S1 = loop(x, erasing)
    want = gradients(x, o, S1, do, dS)
    q, k, v, b, w, g, S = (x[name].detach() for name in ("q", "k", "v", "b", "w", "g", "S"))
    form = {name: y.clone().requires_grad_() for name, y in
            {"q": q, "r": b * k, "p": k, "v": w * v, "g": g, "S": S}.items()}  # fmt: skip
    as_errors, last = loop(form, delta)
    of = gradients(form, as_errors, last, do, dS)
    found = {
        "q": of["q"], "k": of["p"] + b * of["r"], "v": w * of["v"], "b": k * of["r"], "w": v * of["v"], "g": of["g"],
        "S": of["S"],
    }  # fmt: skip
    close({"o": as_errors, "S": last}, {"o": o, "S": S1})
    close(found, want)


@pytest.mark.parametrize("size", [1, 4, C])
def test_scores_by_blocks(size: int) -> None:
    """Section 7: blocks of some tokens about their middles, and then pairs of blocks about the edge between them."""
    q, k, g = normal(C, K), normal(C, K), -torch.rand(C, K, dtype=torch.float64)
    b, row = g.cumsum(0), torch.arange(C)
    last = (row // size * size + max(size // 2, 1) - 1).clamp(max=C - 1)  # the token at the middle
    factor = (b - b[last]).exp() if size > 1 else torch.ones_like(b)
    found = ((q * factor) @ (k / factor).T) * (row[:, None] // size == row // size).tril()
    s = size
    while s < C:
        odd = (row // s % 2 == 1)[:, None]
        edge = b[row // (2 * s) * 2 * s + s - 1]
        factor = torch.where(odd, b - edge, edge - b).exp()
        assert factor.max() <= 1
        found += ((q * factor) @ (k * factor).T) * (odd & (row[:, None] // s == row // s + 1))
        s *= 2
    close({"A": found}, {"A": scores(q, k, decay(b))})


def test_inverse_by_blocks_and_its_adjoint() -> None:
    """Section 7."""
    M, grad = normal(C, C), torch.randn(C, C, dtype=torch.float64)
    unit = torch.eye(C, dtype=torch.float64) + M.tril(-1) / 4
    whole = torch.linalg.inv(unit)
    h = C // 2
    A, B, D = unit[:h, :h], unit[h:, :h], unit[h:, h:]
    A, D = torch.linalg.inv(A), torch.linalg.inv(D)
    blocks = torch.cat([torch.cat([A, torch.zeros_like(A)], 1), torch.cat([-D @ B @ A, D], 1)])
    (want,) = torch.autograd.grad((whole * grad).sum(), M)
    close({"inverse": blocks, "dM": -(whole.T @ grad @ whole.T).tril(-1) / 4}, {"inverse": whole, "dM": want})


def test_a_dense_transition_by_columns_and_by_the_adjoint() -> None:
    """Section 8: [0 | I] from left to right, and the unit matrix from right to left."""
    chunks = [(torch.randn(K, K, dtype=torch.float64), torch.randn(K, V, dtype=torch.float64)) for _ in range(4)]
    S = normal(K, V)
    end, wide, back = S, torch.cat([torch.zeros(K, V), torch.eye(K)], 1).double(), torch.eye(K).double()
    for A, F in chunks:
        end = A @ end + F
        wide = A @ wide + torch.nn.functional.pad(F, (0, K))
    for A, _ in reversed(chunks):
        back = A.T @ back
    close({"end": wide[:, V:] @ S + wide[:, :V], "A": back.T}, {"end": end, "A": wide[:, V:]})


def test_ranks_are_one_scan_in_both_directions() -> None:
    """Section 3: states from left to right, gradients from right to left, and those of A and F."""
    A, F, L = ([normal(K, n) for _ in range(3)] for n in (K, V, K))
    S0 = normal(K, V)
    entering, outputs = [S0], []
    for a, f, read in zip(A, F, L, strict=True):
        outputs.append(read @ entering[-1])
        entering.append(a @ entering[-1] + f)
    do = [torch.randn(K, V, dtype=torch.float64) for _ in range(3)]
    dS = torch.randn(K, V, dtype=torch.float64)
    loss = sum((x * y).sum() for x, y in zip(outputs, do, strict=True)) + (entering[-1] * dS).sum()
    want = torch.autograd.grad(loss, [S0, *A, *F])
    found, leaving = [], dS
    for r in reversed(range(3)):
        found.append((leaving @ entering[r].T, leaving))
        leaving = A[r].T @ leaving + L[r].T @ do[r]
    found.reverse()
    names = ["S0", "A0", "A1", "A2", "F0", "F1", "F2"]
    got = [leaving, *(x for x, _ in found), *(x for _, x in found)]
    close(dict(zip(names, got, strict=True)), dict(zip(names, want, strict=True)))


def test_vector_states() -> None:
    """Section 9."""
    x, g, h0 = normal(C, K), gates(C, K), normal(K)
    h, before = [], [h0]
    for t in range(C):
        h.append(g[t].exp() * before[-1] + x[t])
        before.append(h[-1])
    dh = torch.randn(C, K, dtype=torch.float64)
    want = torch.autograd.grad((torch.stack(h) * dh).sum(), (x, g, h0))
    y = [torch.zeros(K, dtype=torch.float64)]
    for t in reversed(range(C)):
        y.insert(0, dh[t] + (g[t + 1].exp() * y[0] if t + 1 < C else 0))
    y = torch.stack(y[:-1])
    earlier = g.exp() * torch.stack(before[:-1])
    close({"x": y, "g": y * earlier, "h": g[0].exp() * y[0]}, dict(zip("xgh", want, strict=True)))


def test_gates_of_the_rg_lru() -> None:
    """Section 9, of one token, with e^{g_t} h_{t-1} of a state before it."""
    u, r, i, rate, y, before = normal(K), normal(K), normal(K), gates(K), normal(K).detach(), normal(K).detach()
    g = rate * r.sigmoid()
    s = (-torch.expm1(2 * g)).sqrt()
    h = g.exp() * before + s * i.sigmoid() * u
    want = torch.autograd.grad(h, (u, r, i, rate), y)
    w, e = s * i.sigmoid(), g.exp()
    dg = y * (e * before - e**2 / s * i.sigmoid() * u)
    got = [y * w, dg * g * (1 - r.sigmoid()), y * w * u * (1 - i.sigmoid()), dg * r.sigmoid()]
    close(dict(zip("urid", got, strict=True)), dict(zip("urid", want, strict=True)))


def test_the_normaliser() -> None:
    """Section 10."""
    n, d, do = normal(C, V), normal(C).detach().abs().add(1).requires_grad_(), torch.randn(C, V, dtype=torch.float64)
    o = n / d[:, None]
    want = torch.autograd.grad((o * do).sum(), (n, d))
    close({"n": do / d[:, None], "d": -(do * o).sum(1) / d}, {"n": want[0], "d": want[1]})


def test_rotated_rows_and_own_products() -> None:
    """Section 18, of one token with three pairs (i, i + 3): through queries, weighted keys and own products."""
    b, c, x, phi, gamma, eta = normal(6), normal(6), normal(V), normal(3), normal(1), normal(1)
    dq, dk, dy = (normal(n).detach() for n in (6, 6, V))

    def turned(z: Tensor, phi: Tensor) -> Tensor:
        (one, two), angle = z.view(2, 3), 2 * torch.pi * phi
        return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()])

    outputs = turned(c, phi), (gamma + eta) * turned(b, phi), gamma * (b @ c) * x
    given = {"b": b, "c": c, "phi": phi, "gamma": gamma, "eta": eta}
    want = dict(zip(given, torch.autograd.grad(outputs, list(given.values()), [dq, dk, dy]), strict=True))
    u, v, w, rho = turned(dq, -phi), turned(dk, -phi), gamma + eta, dy @ x
    pairs = [z.view(2, 3) for z in (u, c, v, b)]
    (u1, u2), (c1, c2), (v1, v2), (b1, b2) = pairs
    got = {"b": w * v + gamma * rho * c, "c": u + gamma * rho * b, "eta": (v @ b).view(1)}
    got["phi"] = 2 * torch.pi * (u2 * c1 - u1 * c2 + w * (v2 * b1 - v1 * b2))
    close(got | {"gamma": got["eta"] + rho * (b @ c)}, want)


def removing(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    S = x["g"].exp()[:, None] * S + x["b"][:, None] * (x["a"] @ S) + x["k"][:, None] * x["v"]
    return S, x["q"] @ S


def test_a_transition_of_rank_one_and_its_gradients() -> None:
    """Section 19: rows of A one earlier, and one product with the inverse backward."""
    x, do, dS, c, E = inputs("q", "k", "v", "a", "b", wide=True)
    want_o, want_S = loop(x, removing)
    want = gradients(x, want_o, want_S, do, dS)
    q, k, v, a, b, g, S = (x[name].detach() for name in ("q", "k", "v", "a", "b", "g", "S"))
    earlier = torch.cat([a[1:], torch.zeros(1, K, dtype=torch.float64)])
    AK, AB = (torch.cat([torch.zeros(1, C, dtype=torch.float64), scores(earlier, y, E)[:-1]]) for y in (k, b))
    QK, QB, before, left = scores(q, k, E), scores(q, b, E), (c - g).exp(), (c[-1] - c).exp()
    M = torch.eye(C, dtype=torch.float64) - AB
    Z = torch.linalg.solve(M, AK @ v + (a * before) @ S)
    o = QK @ v + QB @ Z + (q * c.exp()) @ S
    new = c[-1].exp()[:, None] * S + (k * left).T @ v + (b * left).T @ Z
    Y = torch.linalg.solve(M.T, QB.T @ do + (b * left) @ dS)
    of_qk, of_qb, of_ak, of_ab = do @ v.T, do @ Z.T, (Y @ v.T).roll(-1, 0), (Y @ Z.T).roll(-1, 0)
    of_ak[-1], of_ab[-1] = 0, 0
    pairs = {name: x[:, :, None] * E for name, x in (("qk", of_qk), ("qb", of_qb), ("ak", of_ak), ("ab", of_ab))}
    rows = torch.einsum("ijd,jd->id", pairs["ak"], k) + torch.einsum("ijd,jd->id", pairs["ab"], b)
    found = {
        "dq": torch.einsum("ijd,jd->id", pairs["qk"], k) + torch.einsum("ijd,jd->id", pairs["qb"], b)
        + (do @ S.T) * c.exp(),
        "dk": torch.einsum("ijd,id->jd", pairs["qk"], q) + torch.einsum("ijd,id->jd", pairs["ak"], earlier)
        + (v @ dS.T) * left,
        "dv": QK.T @ do + AK.T @ Y + (k * left) @ dS,
        "da": torch.cat([torch.zeros(1, K, dtype=torch.float64), rows[:-1]]) + (Y @ S.T) * before,
        "db": torch.einsum("ijd,id->jd", pairs["qb"], q) + torch.einsum("ijd,id->jd", pairs["ab"], earlier)
        + (Z @ dS.T) * left,
    }  # fmt: skip
    wanted = {"o": want_o, "S": want_S} | {f"d{name}": want[name] for name in "qkvab"}
    close({"o": o, "S": new} | found, wanted)


def test_masks_that_factor() -> None:
    """Section 11."""
    x, do, _, _, _ = inputs("q", "k", "v", wide=False)
    rho, kappa, omega = normal(C), normal(C), normal(C)
    G = x["g"].cumsum(0)
    M = (rho[:, None] * kappa * (G[:, None] - G).tril().exp()).tril() + torch.diag(omega)
    want = (M * (x["q"] @ x["k"].T)) @ x["v"]
    zero = torch.zeros_like(x["S"])
    o, _ = loop({**x, "v": kappa[:, None] * x["v"], "S": zero}, diagonal)
    own = (omega * (x["q"] * x["k"]).sum(1))[:, None] * x["v"]
    close({"o": rho[:, None] * o + own, "M": M[8, 1] * M[5, 3]}, {"o": want, "M": M[8, 3] * M[5, 1]})


# What cites the document ----------------------------------------------------------------------------------------------

TEXTS = [
    path
    for folder in ("flexsp", "tests", "examples", "benchmarks", "docs", "torchrun_configs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".md", ".sh", ".sbatch"} and path != Path(__file__)
] + sorted(ROOT.glob("*.md"))


def sections(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"^## (\d+)\. ", text, flags=re.MULTILINE)}


def wrong_citations(text: str, there: set[int]) -> list[str]:
    """Sections cited that do not exist, and documents that are not in the repository."""
    joined = re.sub(r"\n\s*(#\s*)?", " ", text)
    cited = re.findall(r"docs/math\.md,? sections? ([\d, and]+)", joined)
    wrong = [number for numbers in cited for number in re.findall(r"\d+", numbers) if int(number) not in there]
    return wrong + re.findall(r"\bMATH\b|\bDESIGN\b|\bthe plan's bounds\b", joined)


def test_sections_and_documents_that_are_cited_exist() -> None:
    there = sections((ROOT / "docs" / "math.md").read_text())
    assert there == set(range(1, max(there) + 1))
    wrong = {path.name: found for path in TEXTS if (found := wrong_citations(path.read_text(), there))}
    assert not wrong
    assert sum("docs/math.md" in path.read_text() for path in TEXTS) > 10


def test_a_wrong_citation_is_noticed() -> None:
    assert wrong_citations("(docs/math.md,\n    section 99)", {1, 2}) == ["99"]
    assert wrong_citations("docs/math.md, sections 1 and 3", {1, 2}) == ["3"]
    assert wrong_citations("(MATH 1.D)", {1}) == ["MATH"] and wrong_citations("docs/math.md, section 2", {2}) == []


def test_links_between_documents_lead_to_headings() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
            target = (document.parent / path) if path else document
            titles = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{document.name}: {path}#{anchor}"


def test_inverses_of_contractions_are_small() -> None:
    """Section 7, "Keys that are alike": no row of M^-1 - I is beyond 1 with beta up to 1, and reflections are."""
    for many in (1, 2, 3, C):
        k = torch.nn.functional.normalize(normal(many, K).detach(), dim=-1)[torch.randint(0, many, (C,))]
        alike = torch.nn.functional.normalize(k[:1] + 0.05 * normal(C, K).detach(), dim=-1)
        for keys in (k, alike):
            for b in (torch.zeros(C, K), gates(C, K).detach().cumsum(0) / C):
                G = scores(keys, keys, decay(b.double())).tril(-1)
                for beta in (torch.ones(C), torch.rand(C), torch.rand(C).round()):
                    assert rows_of_inverse(G * beta.double()).max() < 1 + 1e-12
    G = torch.ones(C, C, dtype=torch.float64).tril(-1)
    assert rows_of_inverse(2 * G)[1:].min() > 1.25


def rows_of_inverse(G: Tensor) -> Tensor:
    """Of each row of (I + G)^-1 - I the sum of squares."""
    one = torch.eye(C, dtype=torch.float64)
    return (torch.linalg.inv(one + G) - one).square().sum(1)


@pytest.mark.parametrize("by_channel", [True, False])
def test_delta_rule_token_by_token(by_channel: bool) -> None:
    """Section 7, "Keys that are alike": of gates the sum from a token on is not needed."""
    x = {"q": normal(C, K), "k": normal(C, K), "v": normal(C, V), "beta": normal(C), "S": normal(K, V)}
    x["g"] = gates(C, K) if by_channel else gates(C, 1)
    do, dS = normal(C, V).detach(), normal(K, V).detach()

    def step(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        S = x["g"].exp().reshape(-1, 1) * S
        S = S + x["beta"] * x["k"][:, None] * (x["v"] - x["k"] @ S)
        return S, x["q"] @ S

    o, last = loop(x, step)
    want = gradients(x, o, last, do, dS)
    q, k, v, beta, g = (x[name].detach() for name in ("q", "k", "v", "beta", "g"))
    states, after, S = [], [], x["S"].detach()
    for t in range(C):
        states.append(g[t].exp().reshape(-1, 1) * S)
        S = states[t] + beta[t] * k[t][:, None] * (v[t] - k[t] @ states[t])
        after.append(S)
    got = {name: torch.zeros_like(y) for name, y in want.items()}
    behind = (after[-1] * dS).sum(1)
    for t in reversed(range(C)):
        D = dS + q[t][:, None] * do[t]
        e, y = v[t] - k[t] @ states[t], beta[t] * k[t] @ D
        written, read = beta[t] * D @ e, states[t] @ y
        got["q"][t], got["k"][t], got["v"][t], got["beta"][t] = after[t] @ do[t], written - read, y, e @ (k[t] @ D)
        if by_channel:
            behind = behind + q[t] * got["q"][t] - k[t] * (written + read)
        else:
            behind = behind.sum() + q[t] @ got["q"][t] - v[t] @ y
        got["g"][t] = behind
        dS = g[t].exp().reshape(-1, 1) * (D - k[t][:, None] * y)
    got["S"] = dS
    close(got, want)
