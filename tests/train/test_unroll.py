# SPDX-License-Identifier: Apache-2.0
"""Training-time test against explicit states, against drafting, and across documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle_toy import toy_config
from torch import Tensor

from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_config import EagleConfig
from specla.models.base import TargetModel
from specla.ops.gdn import reference
from specla.train.eagle import EagleNet, Pairs
from specla.train.gdn import RMSNorm, pack_masks
from specla.train.unroll import MixerUnroll, pull, push, valid_steps

STEPS, LENGTH = 5, 23


ATTENTION = {"mixer": "attention", "num_heads": 4, "head_v_dim": 8}
MIXERS: dict[str, dict[str, object]] = {"gdn": {}, "attention": ATTENTION}
either = pytest.mark.parametrize("mixer", MIXERS)


def config_for(target: TargetModel, mixer: str = "gdn", **changes: object) -> EagleConfig:
    sizes = {"num_heads": 2, "num_v_heads": 2, "draft_vocab_size": 9, **MIXERS[mixer], **changes}
    return toy_config(target.info, **sizes)


def net_for(config: EagleConfig, seed: int = 0) -> EagleNet:
    """Weights large enough for errors to show; rounded to what a checkpoint keeps."""
    torch.manual_seed(seed)
    net = EagleNet(config, torch.tensor([0, 1, 4, 6, 7, 11, 13, 20, 22]))
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.5 if "conv" in name else p.shape[-1] ** -0.5)
            elif "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
            if not name.endswith(("A_log", "dt_bias")):
                p.copy_(p.bfloat16().float())
    return net


def wide(net: EagleNet) -> EagleNet:
    """The same in float64 throughout."""
    net.compute = torch.float64
    return net.double()


def pairs_of(net: EagleNet, lengths: list[int], dtype: torch.dtype = torch.float32) -> Pairs:
    """Random pairs of several documents packed into one row."""
    generator = torch.Generator().manual_seed(1)
    count, c = sum(lengths), net.config
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    width = c.target_hidden_size
    return Pairs(
        torch.randn(1, count, width, generator=generator, dtype=dtype),
        torch.randn(1, count, len(c.target_layer_ids) * width, generator=generator, dtype=dtype),
        segments[None],
    )


def test_push_and_pull() -> None:
    x = torch.arange(1, 6)[None]
    assert push(x, 2).tolist() == [[0, 0, 1, 2, 3]]
    assert pull(x, 2).tolist() == [[3, 4, 5, 0, 0]]
    assert push(x, 0) is x
    segments = torch.tensor([[0, 0, 0, 1, 1]])
    want = [[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [0, 0, 1, 0, 0]]
    assert valid_steps(segments, 3)[:, 0].int().tolist() == want


def explicit(net: EagleNet, inputs: list[Tensor]) -> list[Tensor]:
    """The mixer's outputs with a state of its own for every (t, s), written out; one document.
    inputs: x [T, inputs] of every step, whatever they are."""
    mixer = net.midlayer.linear_attn
    raws = [mixer.project(x[None], x.dtype)[0][0] for x in inputs]
    weight = mixer.conv_weight()
    width = weight.shape[1]
    states: dict[tuple[int, int], Tensor] = {}
    outputs = []
    for s, x in enumerate(inputs):
        _, gate, a, b = mixer.project(x[None], x.dtype)
        g, beta = (y[0] for y in mixer.gates(a, b))
        rows = []
        for t in range(s, len(x)):
            window = [
                raws[max(s - i, 0)][t - i] if t >= i else torch.zeros_like(raws[0][0])
                for i in range(width - 1, -1, -1)
            ]
            y = torch.nn.functional.silu((torch.stack(window) * weight.t()).sum(0))
            q, k, v = (z[0, 0] for z in mixer.heads(y[None, None]))
            root = states.get((t - 1, max(s - 1, 0)), torch.zeros(2, v.shape[-1], k.shape[-1]))
            state, _ = reference.step(root.to(x.dtype), k, v, g[t], beta[t])
            states[t, s] = state
            rows.append(reference.read(state, q))
        o = torch.stack(rows)[None]
        outputs.append(mixer.finish(o, gate[:, s:], x.dtype)[0])
    return outputs


@pytest.mark.parametrize("chunk", [4, 64])
def test_two_reads_are_a_state_for_every_pair(target: TargetModel, chunk: int) -> None:
    """Arbitrary inputs at every step, as in the reference check, in float64: outputs agree to
    1e-12 relative to explicit states."""
    net = wide(net_for(config_for(target)))
    torch.manual_seed(3)
    width = net.config.target_hidden_size + net.config.hidden_size
    inputs = [torch.randn(LENGTH, width, dtype=torch.float64) for _ in range(STEPS)]
    segments = torch.zeros(1, LENGTH, dtype=torch.int64)
    packing = pack_masks(segments, net.config.conv_size, chunk)
    unroll = MixerUnroll(net.midlayer.linear_attn, packing, torch.float64)
    got = [unroll(x[None])[0] for x in inputs]
    for s, want in enumerate(explicit(net, inputs)):
        assert (got[s][s:] - want).abs().max() < 1e-12 * want.abs().max()


@either
def test_a_step_ahead_is_a_draft(target: TargetModel, tmp_path: Path, mixer: str) -> None:
    """Step s of the module, saved and loaded, is s sequential steps of the drafter from the state
    after the pair that many before."""
    net = net_for(config_for(target, mixer))
    net.save(tmp_path)
    drafter = EagleDrafter(path=str(tmp_path))
    drafter.bind(target, num_slots=1, max_nodes=8, exact=False)
    model = drafter.model
    ids = torch.randint(0, 24, (LENGTH,), generator=torch.Generator().manual_seed(2))
    given = pairs_of(net, [LENGTH])
    pairs = given._replace(embeds=target.embeddings[ids][None].clone())
    with torch.no_grad():
        outputs = net.unroll(pairs, STEPS)
    for t in (6, 13, LENGTH - 1):
        for s in range(STEPS):
            model.reset(1)
            root = t - s + 1
            model.prefill(1, ids[:root].tolist(), pairs.features[0, :root])
            tips = model.roots([1])
            for token in ids[root : t + 1].tolist():
                tips = model.step(tips, [0], [token])
            torch.testing.assert_close(tips.y, outputs[s][:, t], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                model.logits(tips.y), net.logits(outputs[s][:, t]), rtol=1e-4, atol=1e-4
            )
    assert model.target_ids(torch.arange(9)).tolist() == net.d2t.tolist()


@either
def test_documents_in_a_row_do_not_meet(target: TargetModel, mixer: str) -> None:
    net = wide(net_for(config_for(target, mixer)))
    lengths = [7, 1, 12, 3]
    packed = pairs_of(net, lengths, torch.float64)
    together = net.unroll(packed, STEPS, chunk=8)
    valid = valid_steps(packed.segments, STEPS)[:, 0]
    start = 0
    for length in lengths:
        part = Pairs(*(x[:, start : start + length] for x in packed))
        for s, alone in enumerate(net.unroll(part, STEPS, chunk=8)):
            seen = valid[s, start : start + length]
            assert seen.sum() == max(0, length - s)
            both = together[s][0, start : start + length][seen], alone[0][seen]
            torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)
        start += length


@either
def test_gradients_stay_in_their_document(target: TargetModel, mixer: str) -> None:
    net = wide(net_for(config_for(target, mixer)))
    pairs = pairs_of(net, [9, 10], torch.float64)
    features = pairs.features.requires_grad_()
    outputs = net.unroll(pairs._replace(features=features), STEPS, chunk=8)
    valid = valid_steps(pairs.segments, STEPS)
    loss = sum((y * valid[s][..., None])[:, 9:].square().sum() for s, y in enumerate(outputs))
    loss.backward()  # type: ignore[union-attr]
    assert features.grad is not None
    # What is left is the rounding of a sum over decays that cancels.
    assert features.grad[:, :9].abs().max() < 1e-14 * features.grad.abs().max()
    assert features.grad[:, 9:].any(dim=-1).all()


@either
def test_gradients_agree_with_differences(target: TargetModel, mixer: str) -> None:
    net = wide(net_for(config_for(target, mixer)))
    pairs = pairs_of(net, [11], torch.float64)
    layer = net.midlayer
    p = (layer.linear_attn if mixer == "gdn" else layer.self_attn).k_proj.weight

    def loss() -> Tensor:
        return torch.stack([y[:, STEPS:].sin().sum() for y in net.unroll(pairs, STEPS, 4)]).sum()

    loss().backward()
    assert p.grad is not None
    with torch.no_grad():
        for at in ((0, 0), (5, 7), (12, 3)):
            old, eps = p[at].item(), 1e-6
            p[at] = old + eps
            above = loss()
            p[at] = old - eps
            below = loss()
            p[at] = old
            assert p.grad[at].item() == pytest.approx(float(above - below) / (2 * eps), rel=1e-5)


def test_a_fresh_drafter_gives_back_the_features(target: TargetModel) -> None:
    config = config_for(target, hidden_size=target.info.hidden_size)
    net = EagleNet(config, torch.arange(9))
    pairs = pairs_of(net, [6])
    first = net.unroll(pairs, 1)[0]
    norm = RMSNorm(config.target_hidden_size, config.norm_eps)
    halves = pairs.features.unflatten(-1, (2, -1))
    torch.testing.assert_close(first, norm(halves).mean(-2))
