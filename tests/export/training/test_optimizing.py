"""The update of matrices that learn, beside torch's own."""

import pytest

torch = pytest.importorskip("torch")

from edgedec_export.training.optimizing import Muon  # noqa: E402

pytestmark = pytest.mark.slow

_RATE = 8e-3


@pytest.mark.parametrize("shape", [(40, 64), (64, 40)])
def test_matrices_learn_as_torchs_muon_teaches_them(shape: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    ours = torch.randn(shape, generator=draw).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    muon = Muon([ours])
    oracle = torch.optim.Muon([theirs], lr=_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    first = ours.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=draw)
        theirs.grad = ours.grad.clone()
        muon.step(_RATE)
        oracle.step()
    moved = (ours - first).norm()
    assert (ours - theirs).norm() < 0.025 * moved  # torch rounds to bfloat16, 0.0202 with AMX
    assert moved > 0.01
