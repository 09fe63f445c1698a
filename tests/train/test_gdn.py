# SPDX-License-Identifier: Apache-2.0
"""The differentiable model: against a token-by-token oracle, across boundaries, and step by
step."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from specla.train.gdn import GDNLanguageModel, GDNShape

# The inverse of chunks of more than 64 tokens is merged from two.
CHUNKS = [4, 64, 128]
SHAPES = [
    GDNShape(48, 2, 2, 8, 2.0, 64, 97),
    GDNShape(48, 2, 3, 12, 1.0, 64, 97),
    GDNShape(32, 1, 1, 16, 0.5, 48, 97),
]


def model_of(shape: GDNShape) -> GDNLanguageModel:
    """A float64 model with weights large enough for errors to show."""
    torch.manual_seed(0)
    model = GDNLanguageModel(shape, torch.float64).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.4 if "conv" in name else 0.2)
            elif "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


def oracle(model: GDNLanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [T, vocab] of one document, written out token by token (V-first state [H, V, K])."""
    s, sd = model.shape, dict(model.named_parameters())
    norm = lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.norm_eps) * w  # noqa: E731
    x = sd["model.embeddings.weight"][ids]
    for i in range(s.num_hidden_layers):
        p = lambda n, i=i: sd[f"model.layers.{i}.{n}"]  # noqa: E731
        h, qkv = norm(x, p("attn_norm.weight")), {}
        for n, d in (("q", s.head_dim), ("k", s.head_dim), ("v", s.value_head_dim)):
            u = F.pad(h @ p(f"attn.{n}_proj.weight").T, (0, 0, 3, 0))
            w = p(f"attn.{n}_conv1d.weight")[:, 0]
            y = F.silu(sum(u[j : j + len(ids)] * w[:, j] for j in range(4)))
            qkv[n] = y.view(len(ids), s.num_heads, d)
        unit = lambda y: y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6)  # noqa: E731
        q, k, v = unit(qkv["q"]) * s.head_dim**-0.5, unit(qkv["k"]), qkv["v"]
        dt = F.softplus(h @ p("attn.a_proj.weight").T + p("attn.dt_bias"))
        alpha, beta = (
            torch.exp(-p("attn.A_log").exp() * dt),
            torch.sigmoid(h @ p("attn.b_proj.weight").T),
        )
        state, out = x.new_zeros(s.num_heads, s.value_head_dim, s.head_dim), []
        for t in range(len(ids)):
            state = state * alpha[t][:, None, None]
            u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + u[:, :, None] * k[t][:, None, :]
            out.append(torch.einsum("hvk,hk->hv", state, q[t]))
        gate = F.silu((h @ p("attn.g_proj.weight").T).view(len(ids), s.num_heads, -1))
        o = norm(torch.stack(out), p("attn.o_norm.weight")) * gate
        x = x + o.reshape(len(ids), -1) @ p("attn.o_proj.weight").T
        h = norm(x, p("mlp_norm.weight"))
        hidden = F.silu(h @ p("mlp.gate_proj.weight").T) * (h @ p("mlp.up_proj.weight").T)
        x = x + hidden @ p("mlp.down_proj.weight").T
    return norm(x, sd["model.norm.weight"]) @ sd["model.embeddings.weight"].T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_equals_token_by_token(shape, chunk):
    model = model_of(shape)
    ids = torch.randint(0, 97, (37 if chunk < 128 else 137,))
    torch.testing.assert_close(
        model(ids[None], chunk=chunk)[0], oracle(model, ids), atol=1e-9, rtol=0
    )


def test_gradients_equal_token_by_token():
    model = model_of(SHAPES[0])
    ids = torch.randint(0, 97, (21,))
    params = dict(model.named_parameters())
    ours = torch.autograd.grad(model(ids[None], chunk=8).logsumexp(-1).sum(), params.values())
    theirs = torch.autograd.grad(oracle(model, ids).logsumexp(-1).sum(), params.values())
    for name, a, b in zip(params, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8, msg=name)


@pytest.mark.parametrize("cuts", [(5, 12), (8, 16), (1, 2, 3, 23), (16,)])
def test_packed_documents_do_not_see_each_other(cuts):
    """Each document of a packed row has the logits and gradients it has alone."""
    model, ids = model_of(SHAPES[0]), torch.randint(0, 97, (29,))
    edges = (0, *cuts, 29)
    spans = list(itertools.pairwise(edges))
    segments = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])
    packed = model(ids[None], segments[None], chunk=8)[0]
    for a, b in spans:
        torch.testing.assert_close(packed[a:b], oracle(model, ids[a:b]), atol=1e-9, rtol=0)
    embedded = model.model.embeddings(ids[None]).detach().requires_grad_()
    model.model.embeddings.forward = lambda _: embedded
    loss = model(ids[None], segments[None], chunk=8)[0, -1].logsumexp(-1)
    (grad,) = torch.autograd.grad(loss, embedded)
    inside = grad[0, cuts[-1] :].abs()
    assert inside.min() > 0
    # not exactly 0: the running sum of decays cancels to rounding, never more
    assert grad[0, : cuts[-1]].abs().max() < 1e-14 * inside.max()


def test_stepping_equals_one_pass():
    model, ids = model_of(SHAPES[1]), torch.randint(0, 97, (3, 19))
    cache, rows = model.start(3), []
    with torch.no_grad():
        for t in range(19):
            logits, cache = model.step(ids[:, t], cache)
            rows.append(logits)
        torch.testing.assert_close(torch.stack(rows, 1), model(ids, chunk=8), atol=1e-9, rtol=0)


def test_an_untied_head_is_its_own():
    tied = model_of(SHAPES[0])
    own = GDNLanguageModel(replace(SHAPES[0], tie_word_embeddings=False), torch.float64).double()
    own.load_state_dict({**tied.state_dict(), "lm_head.weight": 2 * tied.head})
    ids = torch.randint(0, 97, (1, 9))
    torch.testing.assert_close(own(ids), 2 * tied(ids))


def test_low_products_stay_near_and_carry_a_wide_state():
    """bf16 products cost about bf16's rounding, over several chunks and in the gradients."""
    torch.manual_seed(0)
    model = GDNLanguageModel(GDNShape(64, 2, 2, 32, 1.0, 96, 97))
    ids = torch.randint(0, 97, (2, 300))
    segments = (torch.arange(300) // 70).expand(2, -1)

    def run(products: torch.dtype | None) -> tuple[torch.Tensor, ...]:
        model.products = products
        out = model(ids, segments)
        return out, *torch.autograd.grad(out.logsumexp(-1).sum(), list(model.parameters()))

    wide, low = run(None), run(torch.bfloat16)
    errors = [(a - b).norm() / b.norm() for a, b in zip(low, wide, strict=True)]
    assert 1e-5 < max(errors) < 0.03


def test_parameter_count_of_the_demo_model():
    with torch.device("meta"):
        count = sum(p.numel() for p in GDNLanguageModel(GDNShape()).parameters())
    assert 12_000_000 < count < 13_000_000


def test_parameter_count_of_gdn_1_3b():
    shape = GDNShape(2048, 24, 8, 256, 1.0, 5632, 32000, tie_word_embeddings=False)
    with torch.device("meta"):
        count = sum(p.numel() for p in GDNLanguageModel(shape).parameters())
    assert count == 1_466_343_808
