"""The draft tree's four numbers: which are legal, which are the same, what others call them.

Knows nothing of tokens, scores or tensors: a tree's shape in one round is the engine's business.
"""

from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .errors import SpectuneError
from .strict import StrictModel, broken_rule, validated

# Far above any useful tree; they keep arithmetic on a mistyped setting cheap.
MAX_DEPTH = 1_000
MAX_NODES = 100_000


class TreeConfig(StrictModel):
    """The shape of the draft tree; `depth` 0 is plain decoding whatever the other numbers say.

    Level 1 has `c_1 = top_k` candidates, level j has `c_j = top_k * min(width, c_(j-1))`; a tree
    is legal when `depth <= nodes <= c_1 + ... + c_depth`.
    """

    depth: int = Field(ge=0, le=MAX_DEPTH, description="levels below the root; 0 = plain decoding")
    width: int = Field(default=0, ge=0, le=MAX_NODES, description="nodes expanded per level")
    top_k: int = Field(
        default=0, ge=0, le=MAX_NODES, description="children proposed per expanded node"
    )
    nodes: int = Field(
        default=0, ge=0, le=MAX_NODES, description="draft nodes verified per round, root excluded"
    )

    @field_validator("width", "top_k", "nodes")
    @classmethod
    def _plain_has_no_tree(cls, value: int, info: ValidationInfo) -> int:
        return 0 if info.data.get("depth") == 0 else value

    @model_validator(mode="after")
    def _is_legal(self) -> Self:
        if self.is_plain:
            return self
        for name in ("width", "top_k", "nodes"):
            if getattr(self, name) == 0:
                rule = f"with depth {self.depth} it must be at least 1"
                remedy = "raise it, or set depth to 0 for plain decoding"
                raise broken_rule(f"{rule}; {remedy}", at=(name,), value=0)
        if self.nodes < self.depth:
            rule = f"depth {self.depth} needs at least {self.depth} nodes"
            remedy = f"raise nodes to {self.depth} or lower depth to {self.nodes}"
            raise broken_rule(f"{rule}; {remedy}", at=("nodes",), value=self.nodes)
        if self.nodes > self.pool:
            rule = f"depth {self.depth}, width {self.width} and top_k {self.top_k} give only"
            remedy = f"lower nodes to {self.pool} or raise one of the others"
            rule = f"{rule} {self.pool} candidates; {remedy}"
            raise broken_rule(rule, at=("nodes",), value=self.nodes)
        return self

    @classmethod
    def chain(cls, depth: int) -> Self:
        """Build the tree without branches; depth 0 is plain decoding."""
        data = {"depth": depth, "width": 1, "top_k": 1, "nodes": depth}
        return validated(cls, data, f"a chain of depth {depth}")

    @classmethod
    def from_eagle(cls, total_token: int, depth: int, top_k: int) -> Self:
        """Translate the settings of EAGLE's own code: its `total_token` counts the root, and its
        `depth` leaves out the first level.

        Raises:
            SpectuneError: The setting is illegal.
        """
        data = {"depth": depth + 1, "width": top_k, "top_k": top_k, "nodes": total_token - 1}
        return validated(cls, data, f"EAGLE setting {total_token}/{depth}/{top_k}")

    @classmethod
    def from_sglang(cls, num_steps: int, eagle_topk: int, num_draft_tokens: int) -> Self:
        """Translate SGLang's `speculative_*` settings: its `num_draft_tokens` counts the root.

        Raises:
            SpectuneError: The setting is illegal.
        """
        data = {
            "depth": num_steps,
            "width": eagle_topk,
            "top_k": eagle_topk,
            "nodes": num_draft_tokens - 1,
        }
        return validated(cls, data, f"SGLang setting {num_steps}/{eagle_topk}/{num_draft_tokens}")

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Candidates on each level, `(c_1, ..., c_depth)`."""
        sizes = [self.top_k][: self.depth]
        while len(sizes) < self.depth:
            sizes.append(self.top_k * min(self.width, sizes[-1]))
        return tuple(sizes)

    @property
    def pool(self) -> int:
        """Candidates of all levels, from which `nodes` are picked."""
        return sum(self.level_sizes)

    @property
    def is_plain(self) -> bool:
        """Whether this is decoding with the target alone."""
        return self.depth == 0

    @property
    def is_chain(self) -> bool:
        """Whether the tree can never branch."""
        return not self.is_plain and (self.top_k == 1 or self.nodes == 1)

    def canonical(self) -> Self:
        """Return the setting that stands for all which do the same work and give the same tree.

        Width beyond the candidates of any expanded level does nothing, and with a single level
        the best `nodes` children are kept however many more were proposed. A deeper tree whose
        `top_k` exceeds its nodes stays as it is: it may expand other nodes, at another price.
        """
        if self.is_plain:
            return self
        width = min(self.width, max(self.level_sizes[:-1], default=1))
        top_k = self.nodes if self.depth == 1 else self.top_k
        return type(self)(depth=self.depth, width=width, top_k=top_k, nodes=self.nodes)

    def limited(self, max_depth: int) -> Self:
        """Return the tree cut to at most `max_depth` levels; below 1 it is plain."""
        if max_depth >= self.depth:
            return self
        if max_depth < 1:
            return type(self)(depth=0)
        nodes = min(self.nodes, sum(self.level_sizes[:max_depth]))
        return type(self)(depth=max_depth, width=self.width, top_k=self.top_k, nodes=nodes)

    def check_vocabulary(self, n_tokens: int) -> None:
        """Refuse a tree that asks a node for more children than the draft has tokens.

        Raises:
            SpectuneError: `top_k` exceeds `n_tokens`, the size of the draft's vocabulary.
        """
        if self.top_k > n_tokens:
            raise SpectuneError(
                f"tree.top_k is {self.top_k}, but the draft's vocabulary has only {n_tokens}"
                f" tokens: lower top_k to {n_tokens} or less."
            )

    def label(self) -> str:
        """Return a short name for tables, such as `D4 W3 K3 N10` or `plain`."""
        if self.is_plain:
            return "plain"
        return f"D{self.depth} W{self.width} K{self.top_k} N{self.nodes}"


PLAIN = TreeConfig(depth=0)
