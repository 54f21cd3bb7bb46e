"""gpt-neox's checkpoints, whose arguments decide about layouts and are not saved: the live run and the shapes tell."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from elastic_ckpt.core.local_state import ModelLayout, RankCoordinates
from elastic_ckpt.errors import MismatchError
from elastic_ckpt.sharding.resolve import STRICT, ReshardPlan, resolve
from elastic_ckpt.sharding.rules import ShardingRules
from tests.resolving import arrives, checkpoint, layout, numbered

#: All that it saves of its arguments.
SAVED = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "make_vocab_size_divisible_by": 8,
    "padded_vocab_size": 16,
    "tokenizer_type": "HFTokenizer",
    "model_parallel_size": 2,
}
LIVE = {**SAVED, "gpt_j_residual": False, "num_kv_heads": None, "output_layer_parallelism": "column"}
QKV, WIDE, BIAS = "2.attention.query_key_value.weight", "2.mlp.linear1.weight", "2.mlp.linear2.bias"


def shards(kv_heads: int, gate: int) -> dict[str, list[torch.Tensor]]:
    """What two ranks saved of a block: four heads two wide, and a layer of six columns."""
    wide = {
        QKV: numbered(8 + 4 * kv_heads, 8),
        WIDE: numbered(6 * gate, 8),
        "0.word_embeddings.weight": numbered(16, 8),
    }
    narrow = {"2.attention.dense.weight": numbered(8, 8), "2.mlp.linear2.weight": numbered(8, 6)}
    found = {name: list(whole.chunk(2)) for name, whole in wide.items()}
    found |= {name: list(whole.chunk(2, dim=1)) for name, whole in narrow.items()}
    return found | {BIAS: [numbered(8)] * 2, "2.input_layernorm.weight": [numbered(8)] * 2}


def resolved(saved: dict[str, list[torch.Tensor]], live_run: dict[str, Any], **configs: Any) -> ReshardPlan:
    """The layouts for one live rank."""
    metadata = checkpoint(saved, run={**SAVED, **configs})
    shapes = {
        name: torch.cat(held, dim=int("dense.weight" in name or "linear2.w" in name)) for name, held in saved.items()
    }
    shapes |= {BIAS: saved[BIAS][0], "2.input_layernorm.weight": numbered(8)}
    model = ModelLayout(RankCoordinates(), {name: layout([whole]) for name, whole in shapes.items()}, run=live_run)
    return resolve(metadata, model, saved, ShardingRules(), STRICT)


def got(found: ReshardPlan, saved: dict[str, list[torch.Tensor]], name: str, like: torch.Tensor) -> torch.Tensor:
    return arrives(found, name, saved[name], like)


def parts(held: list[torch.Tensor], *widths: int) -> torch.Tensor:
    """Ranks' parts put together one by one."""
    cut = [shard.split(list(widths)) for shard in held]
    return torch.cat([torch.cat(each) for each in zip(*cut, strict=True)])


@pytest.mark.parametrize("gate", [1, 2])
def test_heads_are_whole_and_halves_are_known_by_the_shapes(gate: int) -> None:
    saved = shards(4, gate)
    found = resolved(saved, LIVE)
    assert torch.equal(got(found, saved, QKV, numbered(24, 8)), numbered(24, 8))
    wide = parts(saved[WIDE], 3, 3) if gate == 2 else torch.cat(saved[WIDE])
    assert torch.equal(got(found, saved, WIDE, wide), wide)
    (note,) = (note for note in found.notes if "layout" in note)
    for words in ("args with padded_vocab_size, model_parallel_size", "fewer_kv_heads False by the shapes"):
        assert words in note
    assert f"gated {gate == 2} by the shapes" in note and "gpt_j_residual False by the live run" in note


def test_equal_row_biases_are_shares_or_copies_as_the_live_run_says() -> None:
    saved = shards(4, 1)
    assert torch.equal(got(resolved(saved, LIVE), saved, BIAS, numbered(8)), numbered(8))
    shared = resolved(saved, {**LIVE, "gpt_j_residual": True})
    assert torch.equal(got(shared, saved, BIAS, numbered(8)), 2 * numbered(8))


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_fewer_key_value_heads_are_arranged_as_in_the_live_code(is_contiguous: bool) -> None:
    saved = shards(2, 1)
    found = resolved(saved, {**LIVE, "num_kv_heads": 2, "gqa_contiguous": is_contiguous})
    whole = parts(saved[QKV], 4, 2, 2) if is_contiguous else torch.cat(saved[QKV])
    assert torch.equal(got(found, saved, QKV, whole), whole)


def test_what_nothing_tells_is_refused_with_the_lines_that_settle_it() -> None:
    with pytest.raises(MismatchError) as caught:
        resolved(shards(4, 1), {})
    assert caught.value.parameter == BIAS
    assert caught.value.remedy is not None and re.findall(r'"kind": "(\w+)"', caught.value.remedy) == [
        "replicated",
        "summed",
    ]
    lines = re.findall(r'"tp_rules": \[(\{.*?"\})\]', caught.value.remedy)
    assert (
        all(re.fullmatch(json.loads(line)["pattern"], "5.attention.dense.bias") for line in lines) and len(lines) == 2
    )
    with pytest.raises(MismatchError, match="96c242eb") as caught:
        resolved(shards(2, 1), {"gpt_j_residual": False})
    assert caught.value.parameter == QKV and '"sub_parameters": [2, 1, 1]' in str(caught.value)


def test_a_configuration_beside_the_checkpoint_has_to_agree_with_the_live_run() -> None:
    with pytest.raises(MismatchError, match="other arguments") as caught:
        resolved(shards(4, 1), LIVE, gpt_j_residual=True)
    assert (caught.value.expected, caught.value.found) == ("gpt_j_residual: True", "gpt_j_residual: False")


def test_a_vocabulary_is_not_offered_as_fused() -> None:
    saved = {
        "0.word_embeddings.weight": list(numbered(16, 8).chunk(2)),
        "0.position_embeddings.weight": [numbered(6, 8)] * 2,
    }
    metadata = checkpoint(saved)
    model = ModelLayout(RankCoordinates(), {"0.word_embeddings.weight": layout([numbered(18, 8)])})
    with pytest.raises(MismatchError) as caught:
        resolve(metadata, model, ["0.word_embeddings.weight"], ShardingRules(), STRICT)
    assert "sub_parameters" not in str(caught.value)


@pytest.mark.parametrize("norm", [numbered(8, 4), numbered(2)])
def test_a_norm_over_the_heads_of_a_rank_is_another_function_at_another_degree(norm: torch.Tensor) -> None:
    """Of all that a rank's heads give, or scaled by one number."""
    name = "2.attention.qk_layernorm.weight"
    metadata = checkpoint({name: list(norm.chunk(2))}, run=SAVED)
    model = ModelLayout(RankCoordinates(), {name: layout([norm])}, run=LIVE)
    with pytest.raises(MismatchError, match="another degree is another function"):
        resolve(metadata, model, [name], ShardingRules(), STRICT)
