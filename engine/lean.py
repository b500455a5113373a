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

from .cache import Extendable, KVCache, RowLayout, Slots
from .packed import PackedLinear

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_COMMON_PARTS = {"Linear", "Embedding", "ModuleList", "SiLU", "SiLUActivation"}
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class RMSNorm:
    """Divide rows by their root mean square and scale them: x / sqrt(mean(x^2) + eps) * w.

    On a CPU, torch composes this of half a dozen kernels, but has one kernel for layer norm:
    the row (x, -x) has mean zero and the variance mean(x^2), so its layer norm is the RMS norm.

    Args:
        module: The norm as transformers has it.
    """

    def __init__(self, module: Any) -> None:
        self._weight: Tensor = module.weight.detach()
        self._eps: float = module.variance_epsilon
        self._size = len(self._weight)
        self._double = self._weight.dtype == torch.float64
        self._mirrored = self._weight.device.type == "cpu" and not self._double
        if self._mirrored:
            self._signs = self._weight.new_tensor([[1.0], [-1.0]])
            self._weight = self._weight.expand(2, -1).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows of x [n, size]."""
        if self._mirrored:
            rows = x.unsqueeze(1) * self._signs
            return F.layer_norm(rows, (2, self._size), self._weight, None, self._eps).select(1, 0)
        if self._double:
            return _unit_rms(x, self._eps) * self._weight
        return F.rms_norm(x, (self._size,), self._weight, self._eps)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    """Return x over its root mean square along the last axis, in float32 as transformers does."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class _Layer:
    """The weights of one decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.norm = RMSNorm(layer.input_layernorm)
        self.qkv = PackedLinear(q, k, v)
        self.out = PackedLinear(attention.o_proj)
        self.mlp_norm = RMSNorm(layer.post_attention_layernorm)
        self.gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear(mlp.down_proj)
        self.head_norm: Tensor | None = None  # [n_heads + n_kv_heads, head_dim]
        self.head_eps = 0.0
        if hasattr(attention, "q_norm"):
            self.head_norm = torch.cat(
                [
                    norm.weight.detach().expand(linear.out_features // attention.head_dim, -1)
                    for norm, linear in ((attention.q_norm, q), (attention.k_norm, k))
                ]
            )
            self.head_eps = attention.q_norm.variance_epsilon


class LeanForward:
    """The forward pass of one model; made by `build`.

    On a CPU in bfloat16 and float32 the weights of the linear layers are held twice: as
    transformers has them, and packed. Elsewhere they are held once, and transformers' modules
    look into the fused ones. Either way the model itself still runs. Weights changed after
    `build` may not be seen.
    """

    def __init__(self, model: Any) -> None:
        attention = model.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._n_heads: int = attention.q_proj.out_features // self._head_dim
        self._n_kv_heads: int = attention.k_proj.out_features // self._head_dim
        self._embedding: Tensor = model.model.embed_tokens.weight.detach()
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._norm = RMSNorm(model.model.norm)
        self._logits = PackedLinear(model.lm_head)
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
        cos, sin = self._rotary(positions, x.dtype)
        layout = layout or RowLayout(1, n)
        bias = self._bias(mask, layout, cache.length, x)
        inputs: dict[int, Tensor] = {}
        held = cache.extend(n, self._n_kv_heads, self._head_dim, x)
        for index, (layer, states) in enumerate(zip(self._layers, held, strict=True)):
            if index in feature_layers:
                inputs[index] = x
            queries = self._project(layer, x, cos, sin, states)
            x = layer.out.add_to(x, self._attend(queries, states, bias, layout))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = layer.down.add_to(x, F.silu(gate).mul_(up))
        features = torch.cat([inputs[i] for i in feature_layers], dim=-1) if inputs else None
        return self._logits(self._norm(x[-1:] if last_only else x)), features

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
        n_rows, n, _ = layout
        if mask is None:
            if n == 1 or start == 0:
                return None
            mask = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(start)
        bias = x.new_zeros(mask.shape).masked_fill_(~mask.to(x.device), float("-inf"))
        n_shared = self._n_heads // self._n_kv_heads
        return bias.view(n_rows, n, -1).repeat_interleave(n_shared, dim=1)[:, None]

    def _project(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, held: Slots) -> Tensor:
        """Return rotated queries [n, n_heads, head_dim]; write keys and values to the cache."""
        n_rotated = self._n_heads + self._n_kv_heads
        states = layer.qkv(layer.norm(x)).view(len(x), -1, self._head_dim)
        rotated = states.narrow(1, 0, n_rotated)
        if layer.head_norm is not None:
            rotated.copy_(_unit_rms(rotated, layer.head_eps) * layer.head_norm)
        # (a, b) -> (a cos - b sin, b cos + a sin): rolling by half a head swaps a and b.
        swapped = rotated.roll(self._head_dim // 2, dims=-1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        keys_values = states.narrow(1, self._n_heads, 2 * self._n_kv_heads)
        held.write(keys_values.view(len(x), 2, self._n_kv_heads, self._head_dim))
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
        n_rows, n, slots = layout
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
