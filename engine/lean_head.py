"""The passes of an EAGLE-3 head in few calls, by the kernels of our own: what `Eagle3Head` does.

Knows the head and the cache; nothing of trees or rounds. A head whose variants the kernels do not
know runs as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import Extendable, RowLayout
from .eagle3 import Eagle3Head, Eagle3Layer, causal_mask
from .kernels import HEAD_DIM_STEP, Kernels, LayerWeights, Texts, kernels_for


class LeanHead:
    """One head on a CPU; made by `build`. Weights of the head changed in place are seen."""

    def __init__(self, head: Eagle3Head, kernels: Kernels) -> None:
        assert head.embed_tokens is not None  # noqa: S101 - only heads that are counted lack it
        self._head = head
        self._kernels = kernels
        self._embedding = head.embed_tokens
        self._layers = [_weights(layer) for layer in head.layers if isinstance(layer, Eagle3Layer)]
        first = head.layers[0]
        assert isinstance(first, Eagle3Layer)  # noqa: S101
        self._embed_norm = _scale(first.input_layernorm)
        self._hidden_norm = _scale(first.hidden_norm)
        self._norm = _scale(head.norm)
        self._dtype = head.fc.weight.dtype
        self._angles = torch.empty(0), torch.empty(0)  # cosines and signed sines by position

    @classmethod
    def build(cls, head: Eagle3Head) -> "LeanHead | None":
        """Return the lean passes of a head, or None where the kernels do not know its variant."""
        config, weight = head.config, head.fc.weight
        kernels = kernels_for(weight.device, weight.dtype)
        if (
            kernels is None
            or head.embed_tokens is None
            or head.embed_tokens.dtype != weight.dtype
            or config.output_bias
            or config.head_dim % HEAD_DIM_STEP != 0
            or head.n_rotated != config.head_dim
        ):
            return None
        return cls(head, kernels)

    def __call__(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        cache: Extendable,
        mask: Tensor | None,
        layout: RowLayout | None = None,
    ) -> Tensor:
        """Run the head over n new positions of a text or several; the cache gets keys and values.

        Args:
            tokens: Target ids [n], one position ahead of `hidden`.
            hidden: Fused features or fed-back states [n, H].
            positions: Rotary positions [n].
            cache: What precedes them.
            mask: bool [n, n_cached + n], or [rows, most new positions of one, cached + them]; True
                = may attend. None is causal, within the window, for a single text.
            layout: How the positions form rows; all are one row if None.

        Returns:
            The states [n, H] from which `Eagle3Head.logits` predicts and which are fed back.
        """
        config, kernels = self._head.config, self._kernels
        embeds = F.embedding(tokens, self._embedding)
        normed = kernels.normalised(hidden, self._hidden_norm)
        inputs = torch.cat((kernels.normalised(embeds, self._embed_norm), normed), dim=-1)
        x = normed if config.norm_before_residual else hidden.contiguous()
        rotary = self._rotary(positions)
        n, start = len(tokens), cache.length
        if mask is None and config.sliding_window is not None:
            mask = causal_mask(n, start + n, config.sliding_window, hidden.device)
        texts = Texts(layout or RowLayout([n], [start]), mask)
        held = cache.extend(n, config.n_kv_heads, config.head_dim, x)
        for weights, slots in zip(self._layers, held, strict=True):
            x = kernels.layer(weights, inputs, rotary, slots.keys, slots.values, texts, x)
            inputs = x
        return kernels.normalised(x, self._norm) if config.norm_output else x

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [n, head_dim]; computed once for every position."""
        if (n := int(positions.max()) + 1) > len(self._angles[0]):
            every = torch.arange(max(n, 2 * len(self._angles[0])))
            cos, sin = (part[0, :, 0] for part in self._head.rotary(every[None], self._dtype))
            self._angles = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        cosines, sines = self._angles
        return cosines[positions], sines[positions]

    def logits(self, hidden: Tensor) -> Tensor:
        """Score the draft vocabulary: [n, H] -> [n, Vd]."""
        weight = self._head.lm_head.weight
        if len(hidden) > self._kernels.most_rows(weight.shape):
            return self._head.logits(hidden)
        norm = None if self._head.config.norm_output else self._norm
        return self._kernels.linear(hidden, weight, norm=norm)


def _scale(norm: nn.RMSNorm) -> tuple[Tensor, float]:
    """Return the weights and the epsilon of a norm."""
    assert norm.eps is not None  # noqa: S101 - all norms of a head have their own
    return norm.weight.detach(), norm.eps


def _weights(layer: Eagle3Layer) -> LayerWeights:
    config = layer.config
    head_norm = None
    if config.qk_norm:
        query_norm, eps = _scale(layer.q_norm)
        key_norm, _ = _scale(layer.k_norm)
        own = [query_norm.expand(config.n_heads, -1), key_norm.expand(config.n_kv_heads, -1)]
        head_norm = torch.cat(own), eps
    bias = layer.qkv_proj.bias
    return LayerWeights(
        norm=_scale(layer.input_layernorm) if layer.index > 0 else None,
        qkv=layer.qkv_proj.weight.detach(),
        qkv_bias=None if bias is None else bias.detach(),
        head_norm=head_norm,
        out=layer.o_proj.weight.detach(),
        mlp_norm=_scale(layer.post_attention_layernorm),
        gate_up=layer.gate_up_proj.weight.detach(),
        down=layer.down_proj.weight.detach(),
        heads=(config.n_heads, config.n_kv_heads, config.head_dim),
    )
