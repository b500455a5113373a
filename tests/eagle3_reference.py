"""A second EAGLE-3 head, written for clarity alone: one token at a time, one head at a time."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Variant:
    """Sizes and flags of a head, and its tensors under the names of speculators."""

    hidden: int = 16
    inner: int = 24
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 8
    n_layers: int = 1
    target_hidden: int = 16
    target_vocab: int = 50
    draft_vocab: int = 20
    n_features: int = 3
    eps: float = 1e-5
    theta: float = 10_000.0
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    bias: bool = False
    window: int | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    embedding: Tensor = field(default_factory=lambda: torch.empty(0))
    target_ids: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        size, width = self.hidden, self.n_features * self.target_hidden
        n_queries, n_keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self._add("fc.weight", size, width)
        self._add("norm.weight", size)
        self._add("lm_head.weight", self.draft_vocab, size)
        if self.norm_before_fc:
            self._add("input_norm.weight", width)
        if self.fc_norm:
            for i in range(self.n_features):
                self._add(f"fc_norm.{i}.weight", self.target_hidden)
        if self.bias:
            self._add("fc.bias", size)
        for i in range(self.n_layers):
            n_inputs = 2 * size if i == 0 else size
            layer = f"layers.{i}."
            for name in ["input_layernorm", "post_attention_layernorm"]:
                self._add(f"{layer}{name}.weight", size)
            if i == 0:
                self._add(layer + "hidden_norm.weight", size)
            self._add(layer + "self_attn.q_proj.weight", n_queries, n_inputs)
            self._add(layer + "self_attn.k_proj.weight", n_keys, n_inputs)
            self._add(layer + "self_attn.v_proj.weight", n_keys, n_inputs)
            self._add(layer + "self_attn.o_proj.weight", size, n_queries)
            if self.bias:
                for p, n in {"q": n_queries, "k": n_keys, "v": n_keys, "o": size}.items():
                    self._add(f"{layer}self_attn.{p}_proj.bias", n)
            if self.qk_norm:
                self._add(layer + "self_attn.q_norm.weight", self.head_dim)
                self._add(layer + "self_attn.k_norm.weight", self.head_dim)
            self._add(layer + "mlp.gate_proj.weight", self.inner, size)
            self._add(layer + "mlp.up_proj.weight", self.inner, size)
            self._add(layer + "mlp.down_proj.weight", size, self.inner)
        self.embedding = torch.randn(self.target_vocab, self.hidden)
        self.target_ids = torch.randperm(self.target_vocab)[: self.draft_vocab].sort().values

    def _add(self, name: str, *shape: int) -> None:
        self.tensors[name] = torch.randn(shape) * 0.3 + (1.0 if len(shape) == 1 else 0.0)

    @property
    def d2t(self) -> Tensor:
        return self.target_ids - torch.arange(self.draft_vocab)


class Reference:
    """Feeds tokens one by one and remembers keys and values of every position."""

    def __init__(self, variant: Variant) -> None:
        self.v = variant
        self.keys: list[list[Tensor]] = [[] for _ in range(variant.n_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(variant.n_layers)]

    def fuse(self, features: Tensor) -> Tensor:
        v = self.v
        if v.norm_before_fc:
            features = self._norm(features, "input_norm.weight")
        if v.fc_norm:
            size = v.target_hidden
            parts = [features[i * size : (i + 1) * size] for i in range(v.n_features)]
            parts = [self._norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            features = torch.cat(parts)
        return self._linear(features, "fc")

    def step(self, token: int, hidden: Tensor, position: int) -> Tensor:
        """Return the fed-back state [H] after one more token."""
        v = self.v
        for i in range(v.n_layers):
            name = f"layers.{i}."
            residual = hidden
            if i == 0:
                normed = self._norm(hidden, name + "hidden_norm.weight")
                embed = self._norm(v.embedding[token], name + "input_layernorm.weight")
                inputs = torch.cat([embed, normed])
                if v.norm_before_residual:
                    residual = normed
            else:
                inputs = self._norm(hidden, name + "input_layernorm.weight")
            x = residual + self._attention(inputs, i, position)
            normed = self._norm(x, name + "post_attention_layernorm.weight")
            gate = self._linear(normed, name + "mlp.gate_proj")
            up = self._linear(normed, name + "mlp.up_proj")
            hidden = x + self._linear(gate * torch.sigmoid(gate) * up, name + "mlp.down_proj")
        return self._norm(hidden, "norm.weight") if v.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.v.norm_output else self._norm(hidden, "norm.weight")
        return self._linear(normed, "lm_head")

    def _attention(self, inputs: Tensor, layer: int, position: int) -> Tensor:
        v, name = self.v, f"layers.{layer}.self_attn."
        q = self._linear(inputs, name + "q_proj").reshape(v.n_heads, v.head_dim)
        k = self._linear(inputs, name + "k_proj").reshape(v.n_kv_heads, v.head_dim)
        value = self._linear(inputs, name + "v_proj").reshape(v.n_kv_heads, v.head_dim)
        if v.qk_norm:
            q = self._norm(q, name + "q_norm.weight")
            k = self._norm(k, name + "k_norm.weight")
        q = torch.stack([self._rotate(head, position) for head in q])
        k = torch.stack([self._rotate(head, position) for head in k])
        self.keys[layer].append(k)
        self.values[layer].append(value)
        keys, values = self.keys[layer], self.values[layer]
        first = 0 if v.window is None else max(0, len(keys) - v.window)
        outputs = []
        for h in range(v.n_heads):
            shared = h // (v.n_heads // v.n_kv_heads)
            scores = [q[h] @ key[shared] / math.sqrt(v.head_dim) for key in keys[first:]]
            weights = torch.softmax(torch.stack(scores), dim=0)
            pairs = zip(weights, values[first:], strict=True)
            outputs.append(sum((w * one[shared] for w, one in pairs), torch.zeros(v.head_dim)))
        return self._linear(torch.cat(outputs), name + "o_proj")

    def _rotate(self, head: Tensor, position: int) -> Tensor:
        half = len(head) // 2
        rotated = head.clone()
        for i in range(half):
            angle = position * self.v.theta ** (-2 * i / len(head))
            rotated[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
            rotated[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
        return rotated

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.v.eps) * self.v.tensors[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = self.v.tensors[name + ".weight"] @ x
        return y + self.v.tensors[name + ".bias"] if name + ".bias" in self.v.tensors else y
