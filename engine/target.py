"""The target: one pass over a tree of new tokens, or several trees, on top of what a cache holds.

Knows nothing about drafts, sampling or text.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiles.errors import SpectuneError

from .batch_cache import BatchCache, packed, padded, visible_rows
from .cache import CHUNK, SPARE_ROWS, KVCache, RowLayout
from .devices import sent
from .graphs import Recorder, recorder_for
from .lean import LeanForward
from .packed import pack_in_place
from .static import StaticForward

SLIDING = "sliding_attention"


class Target:
    """A causal language model of transformers, driven one tree at a time.

    Args:
        model: The loaded model, in eval mode; see also `check_tree_decoding`.

    Attributes:
        chunk: Most tokens of one pass over a long input.
        static: Recorded passes, None where nothing records them.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.n_layers: int = self.config.num_hidden_layers
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.chunk = CHUNK
        self._eager = self.config._attn_implementation == "eager"
        self._window, self._layer_kinds = _attention_kinds(self.config)
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._keep_logits = "logits_to_keep" in names
        self._lean = LeanForward.build(model)
        if self._lean is None:
            pack_in_place(model)
        self.static: StaticForward | None = None
        self.record(recorder_for(self.device))
        self._features: dict[int, Tensor] = {}
        self._watched: set[int] = set()

    def record(self, recorder: Recorder | None) -> None:
        """Run passes over a few tokens by recordings from now on, if there is a recorder."""
        self.static = StaticForward.build(self._lean, self._window, recorder)

    def _watch(self, index: int) -> None:
        """Keep the input of decoder layer `index` at every pass from now on."""

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._features[index] = hidden

        layer = _decoder_layers(self.model, self.n_layers)[index]
        layer.register_forward_pre_hook(keep, with_kwargs=True)
        self._watched.add(index)

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache with room for `capacity` tokens."""
        return KVCache(self.n_layers, capacity)

    def lend_cache(self, n_tokens: int) -> KVCache:
        """Return an empty cache for a text of that many tokens: one whose passes are recorded."""
        lent = None if self.static is None else self.static.lend(n_tokens)
        return self.new_cache(n_tokens + SPARE_ROWS) if lent is None else lent

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache per token held."""
        config = self.config
        n_heads = config.num_attention_heads
        n_kv_heads = getattr(config, "num_key_value_heads", None) or n_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // n_heads
        return int(2 * self.n_layers * n_kv_heads * head_dim * self.dtype.itemsize)

    @property
    def row_bytes(self) -> int:
        """Bytes that a token's activations take at most within a pass, about."""
        inner = getattr(self.config, "intermediate_size", None) or 4 * self.config.hidden_size
        return int((3 * inner + 6 * self.config.hidden_size) * self.dtype.itemsize)

    @property
    def is_windowed(self) -> bool:
        """Whether every layer sees a sliding window alone, so that no text is too long for it."""
        return self._window is not None and self._layer_kinds == [SLIDING]

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int] | Tensor,
        cache: KVCache,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run the target over new tokens and append them to the cache.

        Args:
            tokens: n token ids.
            cache: What precedes them; grows by n.
            positions: int64 [n], absolute; those that follow the cache if None.
            mask: bool [n, m] with m >= n, which new token attends to which of the last m tokens
                (the new ones are the last n); what precedes them is visible. Causal if None.
            last_only: Compute logits for the last token only; more tokens than `chunk`, in causal
                order, are then run in several passes.
            feature_layers: Features to return, as indices into transformers' `hidden_states`
                (0 = embeddings, i = the input of layer i).

        Returns:
            Logits [n or 1, vocabulary], and the features [n, n_features * hidden], concatenated
            in the order of `feature_layers`; None if there are none.
        """
        start, n = cache.length, len(tokens)
        if last_only and n > self.chunk and mask is None and positions is None:
            return self._in_chunks(tokens, cache, feature_layers)
        if self.static is not None and not last_only:
            result = self.static(tokens, cache, positions, mask, feature_layers)
            if result is not None:
                return result
        ids = sent(tokens, self.device)
        if positions is None:
            positions = torch.arange(start, start + n)
        positions = sent(positions, self.device)
        cache.note_positions(positions)
        visible = self._visible(cache, n, mask)
        if self._lean is not None:
            full = None if visible is None else visible[self._layer_kinds[0]]
            return self._lean(
                ids, positions, cache, full, last_only=last_only, feature_layers=feature_layers
            )
        logits, features = self._run(
            ids[None],
            positions[None],
            cache,
            self._as_model_mask(visible),
            feature_layers,
            last_only=last_only,
        )
        return logits[0], None if features is None else features[0]

    def new_batch_cache(self, n_slots: int) -> BatchCache:
        """Return an empty cache for at most `n_slots` sequences."""
        return BatchCache(self.n_layers, n_slots, self.device)

    @torch.inference_mode()
    def forward_rows(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Sequence[Tensor],
        cache: BatchCache,
        *,
        feature_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run the target over new tokens of several sequences at once.

        They are written to the cache, but it counts them only when it is told which to keep.

        Args:
            tokens: int64 [n], the new token ids, row after row.
            positions: int64 [n], absolute.
            masks: Per row bool [n_i, m_i] with m_i >= n_i, as for `forward`.
            cache: What precedes them, a row each.
            feature_layers: As for `forward`.

        Returns:
            Logits [n, vocabulary] and the features [n, n_features * hidden] of all new tokens,
            row after row; no features if there are no layers.
        """
        ids, positions = tokens.to(self.device), positions.to(self.device)
        layout = cache.begin([len(mask) for mask in masks], positions)
        visible = self._visible_rows(cache, masks, layout, positions)
        if self._lean is not None:
            full = None if visible is None else visible[self._layer_kinds[0]]
            return self._lean(
                ids,
                positions,
                cache,
                full,
                last_only=False,
                feature_layers=feature_layers,
                layout=layout,
            )
        logits, features = self._run(
            padded(ids, layout),
            padded(positions, layout),
            cache,
            self._as_model_mask(visible),
            feature_layers,
        )
        return packed(logits, layout), None if features is None else packed(features, layout)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache | BatchCache,
        mask: Tensor | dict[str, Tensor] | None,
        feature_layers: Sequence[int],
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run transformers' own forward over ids [rows, n].

        Returns:
            Logits [rows, n or 1, vocabulary] and features [rows, n, n_features * hidden].
        """
        for index in set(feature_layers) - self._watched:
            self._watch(index)
        kwargs: dict[str, Any] = {self._cache_argument: cache}
        if last_only and self._keep_logits:
            kwargs["logits_to_keep"] = 1
        logits = self.model(
            input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **kwargs
        ).logits
        if last_only:
            logits = logits[:, -1:]
        if not feature_layers:
            return logits, None
        return logits, torch.cat([self._features[i] for i in feature_layers], dim=-1)

    def _in_chunks(
        self, tokens: Sequence[int] | Tensor, cache: KVCache, feature_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Run a long input in passes of at most `chunk` tokens; as `forward` with `last_only`."""
        parts = []
        for start in range(0, len(tokens), self.chunk):
            logits, features = self.forward(
                tokens[start : start + self.chunk],
                cache,
                last_only=True,
                feature_layers=feature_layers,
            )
            parts += [] if features is None else [features]
        return logits, torch.cat(parts) if parts else None

    def _visible(self, cache: KVCache, n: int, mask: Tensor | None) -> dict[str, Tensor] | None:
        """Return who attends to whom, bool [n, cached + n], by kind; None if plainly causal."""
        start, total = cache.length, cache.length + n
        windowed = self._window is not None and total > self._window
        if mask is None and not windowed and (n == 1 or start == 0):
            return None
        full = torch.ones(n, total, dtype=torch.bool, device=self.device)
        if mask is None:
            full = full.tril(diagonal=start)
        else:
            full[:, total - mask.shape[1] :] = sent(mask, self.device)
        masks = dict.fromkeys(self._layer_kinds if windowed else self._layer_kinds[:1], full)
        if self._window is not None and windowed:
            positions = cache.positions[:total]
            masks[SLIDING] = full & (positions[start:, None] - positions[None, :] < self._window)
        return masks

    def _visible_rows(
        self, cache: BatchCache, masks: Sequence[Tensor], layout: RowLayout, positions: Tensor
    ) -> dict[str, Tensor] | None:
        """As `_visible` for several rows: bool [n_rows, n, cached + n]; None if all is seen."""
        windowed = self._window is not None and cache.end > self._window
        sees_all = all(mask.shape[1] == 1 for mask in masks)
        if sees_all and len(set(cache.lengths)) == 1 and not windowed:
            return None
        full = visible_rows(cache.lengths, masks, cache.end).to(self.device)
        visible = dict.fromkeys(self._layer_kinds if windowed else self._layer_kinds[:1], full)
        if self._window is not None and windowed:
            queries, keys = (
                padded(positions, layout),
                cache.positions[: layout.n_rows, : cache.end],
            )
            visible[SLIDING] = full & (queries[:, :, None] - keys[:, None] < self._window)
        return visible

    def _as_model_mask(
        self, visible: dict[str, Tensor] | None
    ) -> Tensor | dict[str, Tensor] | None:
        """Return the 4-D masks transformers expects; None where its own causal one is right."""
        if visible is None:
            return None
        masks = {
            kind: self._as_added(mask).view(-1, 1, *mask.shape[-2:])
            for kind, mask in visible.items()
        }
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _as_added(self, mask: Tensor) -> Tensor:
        if not self._eager:
            return mask
        added = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        return added.masked_fill_(~mask, torch.finfo(self.dtype).min)  # added to the scores


def _attention_kinds(config: Any) -> tuple[int | None, list[str]]:
    """Return the sliding window, if any layer has one, and the kinds of attention in use."""
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    if not kinds:
        kinds = [SLIDING if window else "full_attention"]
    return (window if SLIDING in kinds else None), kinds


def _decoder_layers(model: nn.Module, n_layers: int) -> nn.ModuleList:
    """Return the list of decoder layers, whatever the architecture calls it."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise SpectuneError(
        f"an EAGLE-3 head reads the target's decoder layers, but {type(model).__name__} has no "
        "list of them; use --draft lookup or a small model instead"
    )


def check_tree_decoding(target: Target) -> None:
    """Refuse a model on which a tree pass and a rollback do not give plain decoding's logits.

    A short random prompt is continued twice along two branches, one token at a time on a fresh
    cache, and once as a tree on top of a rolled-back cache; the logits must agree to rounding.
    Finds models whose state cannot roll back or whose positions do not come from `position_ids`.

    Raises:
        SpectuneError: They do not agree; names the model and the distance.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (9,), generator=generator).tolist()
    prompt, root, first, second, below = ids[:5], ids[5], ids[6], ids[7], ids[8]
    plain = []
    for branch in ([root, first, below], [root, second]):
        cache = target.new_cache(16)
        target.forward(prompt, cache)
        plain += [target.forward([token], cache)[0][0] for token in branch]
    cache = target.new_cache(16)
    target.forward([*prompt, second, below], cache)
    cache.truncate(len(prompt))
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    tree, _ = target.forward(
        [root, first, second, below],
        cache,
        positions=torch.tensor([5, 6, 6, 7]),
        mask=mask,
    )
    expected = torch.stack([plain[0], plain[1], plain[4], plain[2]])
    scale = expected.float().std()
    distance = float((tree.float() - expected.float()).abs().max() / scale)
    # One rounding step of the dtype, grown by the depth of the network.
    allowed = 8 * float(torch.finfo(target.dtype).eps) ** 0.5 if target.dtype.itemsize > 2 else 0.5
    if not distance <= allowed:
        raise SpectuneError(
            f"{type(target.model).__name__} cannot verify draft trees: a tree pass after a "
            f"rollback differs from plain decoding by {distance:.2g} of the logits' spread; use "
            "a model with full or sliding-window attention and position ids"
        )
