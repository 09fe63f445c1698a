# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention's recurrent kernel on a chain, if the package is installed.

It takes no tree, no pending log and no state pool: one contiguous state per row, and with
output_final_state it writes a new one, as plain decoding and full acceptance need.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from specla.bench.bytes import Traffic, sizes
from specla.bench.graphs import Call
from specla.bench.kernel_problem import Problem, error
from specla.bench.methods import HALF_PRECISION, Method, Runner
from specla.errors import KernelUnavailable


def installed() -> str | None:
    """The version of fla-core here, or None."""
    try:
        return version("fla-core")
    except PackageNotFoundError:
        return None


def fused_recurrent(*, rerun: bool = False) -> Method:
    """fused_recurrent_gated_delta_rule over every row's chain, new states written.

    rerun: speculation without any state support (SpecLA's FLA-SD, as we read it): the chain is
    verified and its states dropped, then the accepted tokens run again and keep theirs.
    """
    found = installed()

    def build(problem: Problem) -> Runner:
        if found is None:
            raise KernelUnavailable("fla-core must be installed; pip install fla-core==0.6.0")
        if not problem.case.is_chain:
            raise KernelUnavailable("fla's recurrent kernel takes chains only")
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        tokens, accepted = _tokens(problem), len(problem.case.accepted)
        again = {name: x[:, :accepted].contiguous() for name, x in tokens.items()}
        states = [layer.S[problem.slots.long()] for layer in problem.layers]

        def run(x: dict[str, Tensor], S: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
            o, final = fused_recurrent_gated_delta_rule(
                **x, initial_state=S, output_final_state=keep, state_v_first=True,
                scale=problem.shape.key_dim**-0.5, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return o, final

        def step(S: Tensor) -> tuple[Tensor, Tensor]:
            """(o of all tokens, the state that is kept)."""
            o, final = run(tokens, S, keep=not rerun)
            return o, run(again, S, keep=True)[1] if rerun else final

        def check() -> float:
            o, final = step(problem.truth.live)
            kept = problem.case.accepted if rerun else range(problem.case.num_nodes)
            state = error(final[0], problem.after(kept))
            return max(error(o.reshape(problem.truth.o.shape), problem.truth.o), state)

        calls: list[Call] = [lambda S=S: step(S) for S in states]  # type: ignore[misc]
        return Runner(calls, len(states), check, _traffic(problem, accepted if rerun else 0))

    return Method(
        name=f"fla {found or '0.6.0'} recurrent" + (", accepted tokens re-run" if rerun else ""),
        scope="l2 norm, state",
        build=build,
        tolerance=HALF_PRECISION,
    )


def _traffic(problem: Problem, rerun: int) -> Traffic:
    """States read once per launch and written by the last; tokens in and out in 2 bytes."""
    one, n = sizes(problem.case), problem.case.num_nodes + rerun
    launches = 2 if rerun else 1
    return Traffic(
        read=launches * one.state + n * one.activation,
        written=one.state + n * one.node_out // 2,
    )


def _tokens(problem: Problem) -> dict[str, Tensor]:
    """q, k, v [B, N, heads, dim] after the convolution; g and beta [B, N, G] float32."""
    s, truth, rows = problem.shape, problem.truth, problem.case.num_rows
    keys = s.num_key_heads * s.key_dim
    q, k, v = truth.qkv.split([keys, keys, s.num_value_heads * s.value_dim], dim=-1)
    return {
        "q": q.reshape(rows, -1, s.num_key_heads, s.key_dim).contiguous(),
        "k": k.reshape(rows, -1, s.num_key_heads, s.key_dim).contiguous(),
        "v": v.reshape(rows, -1, s.num_value_heads, s.value_dim).contiguous(),
        "g": truth.x.g.reshape(rows, -1, s.num_value_heads).contiguous(),
        "beta": truth.x.beta.reshape(rows, -1, s.num_value_heads).contiguous(),
    }
