"""A forward pass of our own for Llama-shaped models: what transformers computes, in fewer calls.

At a few tokens per pass a small model spends much of its time on what happens between the matrix
products. Here projections are fused, weights laid out once, the queries that share a key head
are attended as rows of one matrix instead of copying that head, and masks and rotary angles are
computed once per pass. Knows the shape of these models and the cache; nothing of drafts, trees
or sampling. A model it does not know for certain is refused, never guessed at.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch_cache import BatchCache
from .cache import Extendable, KVCache, RowLayout, Slots
from .kernels import HEAD_DIM_STEP, LayerWeights, Texts, kernels_for
from .norms import RMSNorm, unit_rms
from .packed import PackedLinear

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_COMMON_PARTS = {"Linear", "Embedding", "ModuleList", "SiLU", "SiLUActivation"}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_MOST_OWN_TOKENS = 64
"""Passes over up to so many tokens of a text, and so its trees, run in the kernels of our own.

For more of them torch attends faster, and with a rounding of its own.
"""


class _Layer:
    """The weights of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.qkv = PackedLinear(q, k, v, norm=RMSNorm(layer.input_layernorm))
        self.out = PackedLinear(attention.o_proj)
        mlp_norm = RMSNorm(layer.post_attention_layernorm)
        self.gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj, norm=mlp_norm)
        self.down = PackedLinear(mlp.down_proj)
        # Weights [n_heads + n_kv_heads, head_dim] and epsilon of queries and keys.
        self.head_norm: tuple[Tensor, float] | None = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm, q), (attention.k_norm, k)
            weights = [
                norm.weight.detach().expand(linear.out_features // attention.head_dim, -1)
                for norm, linear in norms
            ]
            self.head_norm = torch.cat(weights), attention.q_norm.variance_epsilon
        # Up to how many tokens the kernels of our own compute the layer, and its weights for them.
        self.n_own = min(part.n_own for part in (self.qkv, self.out, self.gate_up, self.down))
        if attention.head_dim % HEAD_DIM_STEP != 0:
            self.n_own = 0
        self.own = self._own_weights(attention) if self.n_own > 0 else None

    def _own_weights(self, attention: Any) -> LayerWeights:
        n_heads, n_kv_heads = (
            linear.out_features // attention.head_dim
            for linear in (attention.q_proj, attention.k_proj)
        )
        return LayerWeights(
            norm=self.qkv.scale,
            qkv=self.qkv.weight,
            qkv_bias=self.qkv.bias,
            head_norm=self.head_norm,
            out=self.out.weight,
            mlp_norm=self.gate_up.scale,
            gate_up=self.gate_up.weight,
            down=self.down.weight,
            heads=(n_heads, n_kv_heads, attention.head_dim),
        )


class LeanForward:
    """The forward pass of one model; made by `build`.

    Transformers' modules look into the fused weights, so that these are held once; only where
    oneDNN reads them, on some CPUs, there is a packed copy beside them, see `PackedLinear`.
    Either way the model itself still runs. Weights changed after `build` may not be seen.
    """

    def __init__(self, model: Any) -> None:
        attention = model.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._n_heads: int = attention.q_proj.out_features // self._head_dim
        self._n_kv_heads: int = attention.k_proj.out_features // self._head_dim
        self._embedding: Tensor = model.model.embed_tokens.weight.detach()
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._logits = PackedLinear(model.lm_head, norm=RMSNorm(model.model.norm))
        self._kernels = kernels_for(self._embedding.device, self._embedding.dtype)
        self._n_own = min(layer.n_own for layer in self._layers)
        self._frequencies: Tensor = model.model.rotary_emb.inv_freq.float()
        self._rotary_scale: float = model.model.rotary_emb.attention_scaling

    @classmethod
    @torch.no_grad()
    def build(cls, model: Any) -> "LeanForward | None":
        """Return the lean forward of a model, or None where it does not exactly fit.

        What it computes for a few random tokens is compared with the model's own logits, so that
        a model which only looks the part is refused, too.
        """
        if not (_is_known(model) and _is_regular(model)):
            return None
        lean = cls(model)
        return lean if lean._agrees_with(model) else None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._embedding.device

    def cache_layout(self) -> tuple[int, int, int, Tensor]:
        """Return layers, key heads and head size of a cache, and a tensor like its own."""
        return len(self._layers), self._n_kv_heads, self._head_dim, self._embedding

    def _agrees_with(self, model: Any) -> bool:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, len(self._embedding), (5,), generator=generator)
        ids = ids.to(self._embedding.device)
        expected = model(input_ids=ids[None], use_cache=False).logits[0].double()
        positions = torch.arange(len(ids), device=ids.device)
        cache = KVCache(len(self._layers), len(ids))
        logits, _ = self(ids, positions, cache, None, last_only=False, feature_layers=())
        distance = (logits.double() - expected).norm() / expected.norm()
        return bool(distance < (0.1 if self._embedding.dtype.itemsize == 2 else 1e-4))

    @torch.inference_mode()
    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Extendable,
        mask: Tensor | None,
        *,
        last_only: bool,
        feature_layers: Sequence[int],
        layout: RowLayout | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model over new tokens of one sequence or several, and append them to the cache.

        Args:
            ids: int64 [n], those of several sequences one after another.
            positions: int64 [n], absolute.
            cache: What precedes them; grows by n.
            mask: bool [n, cached + n] or [rows, most new tokens of one, cached + them], who
                attends to whom, a sliding window included; causal over all that is cached if
                None.
            last_only: Compute logits for the last token only.
            feature_layers: Layers whose inputs to return.
            layout: How the tokens form rows; all are one row if None.

        Returns:
            Logits [n or 1, vocabulary] and the features side by side [n, n_features * hidden],
            None if there are none.
        """
        n = len(ids)
        x = F.embedding(ids, self._embedding)
        rotary = self._rotary(positions, x.dtype)
        inputs: dict[int, Tensor] = {}
        layout = layout or RowLayout([n], [cache.length])
        appends = isinstance(cache, KVCache | BatchCache)
        few = n <= self._n_own and layout.n <= _MOST_OWN_TOKENS
        own = self._kernels if appends and few else None
        texts = None if own is None else Texts(layout, mask)
        bias = None if own is not None else self._bias(mask, layout, cache.length, x)
        held = cache.extend(n, self._n_kv_heads, self._head_dim, x)
        for index, (layer, slots) in enumerate(zip(self._layers, held, strict=True)):
            if index in feature_layers:
                inputs[index] = x
            if own is not None and texts is not None and layer.own is not None:
                x = own.layer(layer.own, x, rotary, slots.keys, slots.values, texts)
                continue
            queries = self._project(layer, x, rotary, slots)
            x = layer.out.add_to(x, self._attend(queries, slots, bias, layout))
            x = layer.down.add_to(x, layer.gate_up.gated(x))
        features = torch.cat([inputs[i] for i in feature_layers], dim=-1) if inputs else None
        return self._logits(x[-1:] if last_only else x), features

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines, [n, 1, head_dim], computed in float32."""
        angles = positions[:, None, None].float() * self._frequencies
        cos, sin = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
        return (
            torch.cat((cos, cos), dim=-1).to(dtype),
            torch.cat((-sin, sin), dim=-1).to(dtype),
        )

    def _bias(
        self, mask: Tensor | None, layout: RowLayout, start: int, x: Tensor
    ) -> Tensor | None:
        """Return what is added to the scores, 0 or -inf, with a row per query of a key head.

        None where every score counts (one token) or torch's own causal order is right (nothing
        cached), which spares a long prompt the square matrix.
        """
        n_rows, n = layout.n_rows, layout.n
        if mask is None:
            if n == 1 or start == 0:
                return None
            mask = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(start)
        bias = x.new_zeros(mask.shape).masked_fill_(~mask.to(x.device), float("-inf"))
        n_shared = self._n_heads // self._n_kv_heads
        return bias.view(n_rows, n, -1).repeat_interleave(n_shared, dim=1)[:, None]

    def _project(
        self, layer: _Layer, x: Tensor, rotary: tuple[Tensor, Tensor], held: Slots
    ) -> Tensor:
        """Return rotated queries [n, n_heads, head_dim]; write keys and values to the cache."""
        n, (cos, sin) = len(x), rotary
        states = layer.qkv(x).view(n, -1, self._head_dim)
        rotated = states.narrow(1, 0, self._n_heads + self._n_kv_heads)
        if layer.head_norm is not None:
            weight, eps = layer.head_norm
            rotated.copy_(unit_rms(rotated, eps) * weight)
        # (a, b) -> (a cos - b sin, b cos + a sin): rolling by half a head swaps a and b.
        swapped = rotated.roll(self._head_dim // 2, dims=-1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        keys_values = states.narrow(1, self._n_heads, 2 * self._n_kv_heads)
        held.write(keys_values.view(n, 2, self._n_kv_heads, self._head_dim))
        return states.narrow(1, 0, self._n_heads)

    def _attend(
        self,
        queries: Tensor,
        held: Slots,
        bias: Tensor | None,
        layout: RowLayout,
    ) -> Tensor:
        """Attend with queries [n, n_heads, head_dim]; return [n, n_heads * head_dim]."""
        keys, values, n_groups = held.keys, held.values, self._n_kv_heads
        n_rows, n, slots = layout.n_rows, layout.n, layout.slots
        if bias is None and n > 1:
            attended: Tensor = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
            )
            return attended.transpose(1, 2).reshape(n, -1)
        if slots is not None:
            padded = queries.new_zeros(n_rows * n, *queries.shape[1:])
            queries = padded.index_copy_(0, slots, queries)
        rows = queries.view(n_rows, n, n_groups, -1, self._head_dim).transpose(1, 2)
        rows = rows.reshape(n_rows, n_groups, -1, self._head_dim)
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=bias)
        attended = attended.view(n_rows, n_groups, n, -1, self._head_dim).transpose(1, 2)
        attended = attended.reshape(n_rows * n, -1)
        return attended if slots is None else attended[slots]


def _is_known(model: nn.Module) -> bool:
    """Whether model and parts are exactly transformers' own: not replaced, wrapped or hooked."""
    family = type(model).__name__.removesuffix("ForCausalLM")
    name = family.lower()
    home = f"transformers.models.{name}.modeling_{name}"
    parts = {family + part for part in _PARTS}
    return family in _FAMILIES and all(
        (
            (type(module).__module__ == home and type(module).__name__ in parts)
            or (
                type(module).__module__.startswith(("torch.nn.", "transformers.activations"))
                and type(module).__name__ in _COMMON_PARTS
            )
        )
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
        for module in model.modules()
    )


def _is_regular(model: Any) -> bool:
    """Whether weights, biases, rotary embedding and attention are of the plain kind."""
    config, rotary = model.config, model.model.rotary_emb
    parameters = list(model.parameters())
    kinds = set(getattr(config, "layer_types", None) or ())
    unbiased = [model.lm_head] + [
        linear
        for layer in model.model.layers
        for linear in (layer.self_attn.o_proj, *layer.mlp.children())
        if isinstance(linear, nn.Linear)
    ]
    return (
        not model.training
        and all(type(parameter) is nn.Parameter for parameter in parameters)
        and len({(p.dtype, p.device) for p in parameters}) == 1
        and parameters[0].dtype in _DTYPES
        and parameters[0].device.type in ("cpu", "cuda")
        and all(linear.bias is None for linear in unbiased)
        and len(model.model.layers) == config.num_hidden_layers
        and rotary.rope_type in _STATIC_ROPE
        and 2 * len(rotary.inv_freq) == model.model.layers[0].self_attn.head_dim
        and len(kinds) <= 1
        and config._attn_implementation in ("sdpa", "eager")
    )
