"""Write what DeepSpec's own classes make of toy block heads, for tests/runtimes/trained_heads/test_golden_blocks.py.

    git clone https://github.com/deepseek-ai/DeepSpec      # the stored file was made with commit afdfa7c
    pip install torch transformers==5.24.0
    PYTHONPATH=DeepSpec python benchmarks/heads/golden_blocks.py

Each head is loaded from a checkpoint as edgedec's tests write it, so that names and shapes are checked as well. The
block is evaluated at once behind all features, without a mask, as DeepSpec's evaluator does.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
from support.heads.golden_blocks import CARDS, MASK, N_TEXT, NEWEST, PATH, golden_head, golden_taps
from support.heads.tiny_blocks import block_config, stored_block
from transformers import Qwen3Config

from edgedec_runtimes.trained_heads.card import HeadCard


def drafted(card: HeadCard) -> dict[str, object]:
    """Return tokens, logits and confidences (before their sigmoid) of a head, of plain JSON types."""
    config = block_config(card)
    rope = config.pop("rope_parameters")
    model = Qwen3DSparkModel(
        Qwen3Config(
            **config, rope_theta=rope["rope_theta"], confidence_head_with_markov=True, attn_implementation="eager"
        )
    )
    stored = {
        name: torch.from_numpy(np.frombuffer(data, np.float32).reshape(shape).copy())
        for name, (_, shape, data) in stored_block(golden_head(card)).items()
    }
    model.load_state_dict(stored, strict=True)
    model.double().eval()
    n_rows = model.block_size
    with torch.no_grad():
        tokens = torch.tensor([[NEWEST] + [MASK] * (n_rows - 1)])
        states = model._forward_backbone(
            position_ids=torch.arange(N_TEXT + n_rows)[None],
            noise_embedding=model.embed_tokens(tokens),
            target_hidden_states=torch.from_numpy(golden_taps(card)).double()[None],
        )
        chain, logits = model.sample_draft_tokens(
            model.compute_logits(states), first_prev_token_ids=tokens[:, 0], hidden_states=states
        )
        before = torch.cat((tokens[:, :1], chain[:, :-1]), dim=1)
        sure = model.predict_confidence_step(states, before)
    return {
        "tokens": chain[0].tolist(),
        "logits": np.round(logits[0].numpy(), 6).tolist(),
        "sure": [] if sure is None else np.round(sure[0].numpy(), 6).tolist(),
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps({name: drafted(card) for name, card in CARDS.items()}) + "\n")
