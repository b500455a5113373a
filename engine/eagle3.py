"""The EAGLE-3 head: one small decoder layer that reads the target's hidden states.

Architecture of "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (arXiv 2503.01840) with the variants found in public checkpoints. Knows
tensors only: no files, no trees, no rounds.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class Eagle3Config:
    """Everything needed to build a head; sizes are those of the tensors.

    Attributes:
        rope: Rotary parameters as `transformers` names them: `rope_type`, `rope_theta`,
            and what the type needs.
        attention_bias: Biases on the q, k and v projections.
        output_bias: A bias on the o projection.
        qk_norm: RMSNorm per head on queries and keys.
        norm_before_residual: The residual starts at the normed hidden state, not the raw one.
        norm_before_fc: One RMSNorm over the concatenated features before `fc`.
        fc_norm: One RMSNorm per feature before `fc` (EAGLE-3.1).
        norm_output: The state fed back is the normed one (EAGLE-3.1).
        sliding_window: Keys a query may see, itself included; None sees all.
        max_positions: Length of the texts it was trained for; None if it is not known.
        feature_layers: Indices into the target's `hidden_states` (0 = embeddings), in the
            order in which `fuse` expects their concatenation.
    """

    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_layers: int
    target_hidden_size: int
    n_features: int
    target_vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    feature_layers: tuple[int, ...]
    attention_bias: bool = False
    output_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: int | None = None
    max_positions: int | None = None


class AppendOnlyCache(Protocol):
    """Where a layer leaves its keys and values and finds all of them again."""

    def update(self, keys: Tensor, values: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        """Append [B, n_kv, n, hd] and return the layer's whole keys and values."""
        ...


class Eagle3Head(nn.Module):
    """Predict the next draft tokens from target features and the tokens that followed them.

    Position i pairs the feature of token i with the embedding of token i + 1 and predicts
    token i + 2. Beyond the known features the head's own output takes the feature's place.
    """

    embed_tokens: Tensor | None
    target_ids: Tensor | None

    def __init__(self, config: Eagle3Config, embed_tokens: Tensor | None) -> None:
        """Build the head with uninitialised meaning: load or train its weights.

        Args:
            config: Sizes and variants.
            embed_tokens: Embedding weight [target vocabulary, H], shared and not trained;
                None for a head that is only counted or inspected.
        """
        super().__init__()
        self.config = config
        width = config.n_features * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.n_features)
            )
        self.layers = nn.ModuleList(Eagle3Layer(config, i) for i in range(config.n_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        self.register_buffer("target_ids", None, persistent=False)
        with torch.device("cpu"):  # real numbers even when the weights are built on "meta"
            self._inv_freq, self._rotary_scale = rotary_frequencies(config)

    @property
    def n_parameters(self) -> int:
        """Weights of the head, the shared embedding not counted."""
        return sum(p.numel() for p in self.parameters())

    @property
    def n_rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return 2 * len(self._inv_freq)

    def variant(
        self, *, feature_layers: Sequence[int] | None = None, rope_theta: float | None = None
    ) -> "Eagle3Head":
        """Return this head with other conventions and the same weights, which are shared.

        Args:
            feature_layers: Layers of the target that feed it; its own if None.
            rope_theta: Base of the rotary angles; its own if None.
        """
        config = self.config
        if feature_layers is not None:
            config = replace(config, feature_layers=tuple(feature_layers))
        if rope_theta is not None:
            config = replace(config, rope={**config.rope, "rope_theta": rope_theta})
        twin = copy.copy(self)
        twin.config = config
        twin._inv_freq, twin._rotary_scale = rotary_frequencies(config)
        return twin

    def fuse(self, features: Tensor) -> Tensor:
        """Project concatenated target features [.., n_features * Ht] to hidden states [.., H]."""
        config = self.config
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            parts = features.chunk(config.n_features, dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: AppendOnlyCache,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run the decoder layers once over n new positions of each row.

        Args:
            tokens: Target ids [B, n], one position ahead of `hidden`.
            hidden: Fused features or fed-back states [B, n, H].
            positions: Rotary positions [B, n].
            cache: Receives the n new keys and values of each layer.
            mask: Bool [B or 1, 1, n, n_cached + n], True = may attend. None is causal, with
                the sliding window if there is one; a mask given must hold the window itself.

        Returns:
            The states [B, n, H] from which `logits` predicts and which are fed back.
        """
        assert self.embed_tokens is not None  # noqa: S101 - only heads that are counted lack it
        rotary = self.rotary(positions, hidden.dtype)
        embeds = F.embedding(tokens, self.embed_tokens)
        for layer in self.layers:
            hidden = layer(hidden, embeds, rotary, cache, mask)
        fed_back: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return fed_back

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the draft vocabulary: [.., H] -> [.., Vd]."""
        scores: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return scores

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Translate draft vocabulary ids to target ids."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [B, n, 1, rotated / 2] of the rotary angles."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angles = (positions[..., None] * self._inv_freq)[:, :, None]
        cos, sin = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
        return cos.to(dtype), sin.to(dtype)


class Eagle3Layer(nn.Module):
    """A Llama decoder layer; the first one attends over (token embedding, hidden state)."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        self.config = config
        self.index = index
        size, eps = config.hidden_size, config.rms_norm_eps
        n_heads = config.n_heads + 2 * config.n_kv_heads
        self.input_layernorm = nn.RMSNorm(size, eps)
        if index == 0:
            self.hidden_norm = nn.RMSNorm(size, eps)
        n_inputs = 2 * size if index == 0 else size
        self.qkv_proj = nn.Linear(n_inputs, n_heads * config.head_dim, config.attention_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, size, config.output_bias)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.gate_up_proj = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        embeds: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: AppendOnlyCache,
        mask: Tensor | None,
    ) -> Tensor:
        """Return the states [B, n, H] after this layer; arguments as for `Eagle3Head.forward`.

        Args:
            hidden: States [B, n, H] before it.
            embeds: Token embeddings [B, n, H]; read by the first layer only.
            rotary: Cosines and sines of the positions.
            cache: Receives the new keys and values.
            mask: As there.
        """
        if self.index == 0:
            normed = self.hidden_norm(hidden)
            residual = normed if self.config.norm_before_residual else hidden
            inputs = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        else:
            residual, inputs = hidden, self.input_layernorm(hidden)
        hidden = residual + self._attention(inputs, rotary, cache, mask)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        out: Tensor = hidden + self.down_proj(F.silu(gate) * up)
        return out

    def _attention(
        self,
        inputs: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: AppendOnlyCache,
        mask: Tensor | None,
    ) -> Tensor:
        config = self.config
        n_heads, n_kv = config.n_heads, config.n_kv_heads
        heads = self.qkv_proj(inputs).unflatten(-1, (-1, config.head_dim))
        if config.qk_norm:
            queries, keys, values = heads.split((n_heads, n_kv, n_kv), dim=-2)
            heads = torch.cat((self.q_norm(queries), self.k_norm(keys), values), dim=-2)
        rotated = rotate(heads[:, :, : n_heads + n_kv], *rotary).transpose(1, 2)
        queries, keys = rotated[:, :n_heads], rotated[:, n_heads:]
        values = heads[:, :, n_heads + n_kv :].transpose(1, 2)
        keys, values = cache.update(keys, values, self.index)
        mixed = attend(queries, keys, values, mask, config.sliding_window)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def rotary_frequencies(config: Eagle3Config) -> tuple[Tensor, float]:
    """Return the inverse frequencies [rotated / 2] and the scale of cosines and sines.

    Raises:
        ValueError: The rotary parameters make no angles.
    """
    rope = dict(config.rope)
    if rope["rope_type"] == "default":
        # The same formula, and unlike the default one it knows partial rotary factors.
        rope |= {"rope_type": "linear", "factor": 1.0}
    model = LlamaConfig(
        hidden_size=config.n_heads * config.head_dim,  # angles ask for the size of a head alone
        num_attention_heads=config.n_heads,
        head_dim=config.head_dim,
        rope_parameters=rope,
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model)
    if not (bool(inv_freq.isfinite().all()) and math.isfinite(scale)):
        raise ValueError("its angles are not finite")
    return inv_freq, scale


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, n, heads, hd] by the given angles; dimensions past the rotated ones stay."""
    n_half = cos.shape[-1]
    left, right = heads[..., :n_half], heads[..., n_half : 2 * n_half]
    parts = [left * cos - right * sin, right * cos + left * sin]
    if 2 * n_half < heads.shape[-1]:
        parts.append(heads[..., 2 * n_half :])
    return torch.cat(parts, dim=-1)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, window: int | None
) -> Tensor:
    """Attend [B, heads, n, hd] to [B, kv heads, n_keys, hd]; no mask means the last n keys.

    Without a mask query i stands at key n_keys - n + i and sees what is before it, no
    further back than the window.
    """
    n, n_keys = queries.shape[2], keys.shape[2]
    plain = (window is None or n_keys <= window) and n in (1, n_keys)
    if mask is None and not plain:
        mask = causal_mask(n, n_keys, window, keys.device)
    return F.scaled_dot_product_attention(
        queries, keys, values, mask, is_causal=mask is None and n > 1, enable_gqa=True
    )


def causal_mask(n: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return who of the last n of n_keys tokens attends to whom: bool [n, n_keys]."""
    back = torch.arange(n_keys - n, n_keys, device=device)[:, None]
    back = back - torch.arange(n_keys, device=device)
    return (back >= 0) if window is None else (back >= 0) & (back < window)
