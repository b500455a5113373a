"""Let the demo target write texts: prompts, answers and the hidden states behind them.

The target samples prompts from its own chat template, a given opening at a time, and answers
them, greedily for the most part. The states that a head is trained on are kept while decoding,
so that no text runs through the target twice. No question set is read.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

# fmt: off
CODE = (
    "def ", "Complete the following Python function.\n\ndef ", "Complete the code.\n\ndef ",
    "Write a Python function", "Write a function that", "Write a Python program", "Implement",
    "Write a script", "Create a function", "```python\n", "Finish this function:\n\ndef ",
    "from typing import List\n\n\ndef ", "import ", "class ", "Write a SQL query",
    "Write a JavaScript function", "Fix the bug in this code:\n",
    "Explain what this code does:\n", "Given a list of integers, write",
    "Given a string, write a", "You are given an array", "Write unit tests for",
    "Write a recursive function",
    "Complete the body of the function.\n\nfrom typing import List\n\ndef ", "def is_",
    "def count_", "def find_", "def sort_", "def get_", "def check_", "def sum_",
    "def remove_", "def max_", "def string_", "def list_", "Write a program to compute",
    "How do I use", "Write a regular expression", "Convert this code", "Write a class",
)
MATH = (
    "Solve", "What is the value of", "If ", "Calculate", "A train", "A store sells", "Tom has",
    "Sarah", "John", "There are", "How many", "Find the", "James", "A farmer", "Mary buys",
    "The sum of", "A rectangle", "Lisa", "In a class of", "Each", "Emily", "A box contains",
    "The price of", "At a", "Every day,", "Mike", "Anna and", "It takes", "A car travels",
    "Jack earns", "Half of", "A baker", "The average of", "Simplify", "Evaluate", "Let x",
    "What is the probability", "Prove that", "Maria", "Ben",
)
CHAT = (
    "Explain", "What is", "What are", "How", "Why", "Describe", "Write", "Write a short story",
    "Write an email", "Write a poem", "Compose", "Draft", "Give me", "Can you", "I", "I'm",
    "Imagine", "Suppose", "Tell me", "List", "Compare", "Discuss", "Who", "When", "Which",
    "Hi", "Hello", "Please", "Act as", "You are", "Create", "Suggest", "Provide", "Analyze",
    "Identify", "Develop", "Outline", "Design", "Help me", "What's", "Should", "Do", "Is",
    "Are", "In", "As a", "Could you", "Pretend", "Based on", "Name", "Recommend", "My", "We",
    "The", "Consider", "Picture yourself", "Given", "Evaluate", "Edit", "Classify",
    "Write a blog post", "Write a persuasive", "Write a product description", "Plan a",
    "What would happen if", "What were", "Generate", "Rephrase", "Translate", "",
)
TEXT = (
    "Summarize", "Summarize the following text:", "Rewrite the following", "Rewrite this",
    "Make this", "Shorten", "Translate", "Paraphrase", "Correct the grammar", "Extract",
    "Identify the main", "Read the following", "Answer the question", "Proofread",
    "Turn this into", "Here is a", "Given the following",
)
# fmt: on
OPENINGS = ((0.34, CODE), (0.26, MATH), (0.30, CHAT), (0.10, TEXT))

N_ROWS, CHUNK = 128, 32
LONGEST_PROMPT, LONGEST_ANSWER = 144, 192
SHORTEST_PROMPT, SHORTEST_CUT, SHORTEST_ANSWER = 4, 48, 16
PROMPT_TEMPERATURE, ANSWER_TEMPERATURE, SHARE_GREEDY = 0.9, 0.7, 0.85
LOOP_CUT = 40


@dataclass(frozen=True)
class Text:
    """One prompt and its answer, both written by the target.

    Attributes:
        tokens: Token ids [n], chat template included.
        n_opening: Tokens of the template before the prompt.
        n_prompt: Tokens before the answer.
        states: Hidden states [n - 1, 4 * H] of all but the last token: the three fused layers
            and the one after the final norm, from which the target's logits follow.
    """

    tokens: Tensor
    n_opening: int
    n_prompt: int
    states: Tensor


@dataclass
class Row:
    """A text being written."""

    tokens: list[int]
    forced: list[int]
    longest_prompt: int
    temperature: float = PROMPT_TEMPERATURE
    n_prompt: int | None = None  # known once the prompt has ended


class Decoder:
    """Decode many rows of different lengths at once, one token of each per step.

    Rows are attended in chunks, each as far as its longest row; kept sorted by length, short
    rows do not pay for long ones.
    """

    def __init__(self, model: Any, n_rows: int, n_positions: int) -> None:
        config = model.config
        self.layers = list(model.model.layers)
        self.norm = model.model.norm
        self.embedding = model.model.embed_tokens.weight
        self.n_heads, self.n_kv = config.num_attention_heads, config.num_key_value_heads
        self.feature_layers = feature_layers(config.num_hidden_layers)
        attentions = [layer.self_attn for layer in self.layers]
        self.qkv = [
            torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]) for a in attentions
        ]
        shape = (n_rows, self.n_kv, n_positions, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=torch.bfloat16) for _ in self.layers]
        self.values = [torch.zeros(shape, dtype=torch.bfloat16) for _ in self.layers]
        cos, sin = model.model.rotary_emb(self.embedding, torch.arange(n_positions)[None])
        self.cos, self.sin = cos[0, :, None], sin[0, :, None]
        self.rows = torch.arange(n_rows)

    def reorder(self, order: Tensor) -> None:
        """Let row i become the present row `order[i]`."""
        for cached in (*self.keys, *self.values):
            cached.copy_(cached[order])

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed one token per row and return its hidden states [rows, 4 * H]."""
        chunks = [
            (slice(i, i + CHUNK), length_mask(positions[i : i + CHUNK]))
            for i in range(0, len(tokens), CHUNK)
        ]
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embedding[tokens]
        states = []
        for i, layer in enumerate(self.layers):
            if i in self.feature_layers:
                states.append(x)
            heads = F.linear(layer.input_layernorm(x), self.qkv[i])
            heads = heads.unflatten(1, (-1, cos.shape[-1]))
            turned = heads[:, : self.n_heads + self.n_kv]
            left, right = turned.chunk(2, dim=-1)
            turned = turned * cos + torch.cat([-right, left], dim=-1) * sin
            keys, values = self.keys[i], self.values[i]
            keys[self.rows, :, positions] = turned[:, self.n_heads :]
            values[self.rows, :, positions] = heads[:, self.n_heads + self.n_kv :]
            queries = turned[:, : self.n_heads].unflatten(1, (self.n_kv, -1))
            mixed = [
                F.scaled_dot_product_attention(
                    queries[rows],
                    keys[rows, :, : mask.shape[-1]],
                    values[rows, :, : mask.shape[-1]],
                    mask,
                )
                for rows, mask in chunks
            ]
            x = x + layer.self_attn.o_proj(torch.cat(mixed).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return torch.cat([*states, self.norm(x)], dim=-1)


def length_mask(positions: Tensor) -> Tensor:
    """Return an additive mask [rows, 1, 1, n] that shows each row what it has written."""
    n = (int(positions.max()) // 16 + 1) * 16
    unseen = torch.arange(n) > positions[:, None]
    mask = torch.zeros(unseen.shape, dtype=torch.bfloat16).masked_fill_(unseen, -1e4)
    return mask[:, None, None]


class Writer:
    """Write texts with the target for as long as they are taken."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.model = load_target(folder, torch.bfloat16)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        template = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": "|||"}], tokenize=False, add_generation_prompt=True
        )
        self.opening, self.turn = (self._encode(part) for part in template.split("|||"))
        self.end = self.turn[0]  # ends the user's turn and the answer alike
        self.specials = set(self.tokenizer.all_special_ids)
        self.seen: set[tuple[int, ...]] = set()

    @torch.inference_mode()
    def texts(self) -> Iterator[Text]:
        """Yield texts as they are finished, no prompt twice."""
        n_positions = len(self.opening) + LONGEST_PROMPT + len(self.turn) + LONGEST_ANSWER + 16
        decoder = Decoder(self.model, N_ROWS, n_positions)
        n_state = self.model.config.hidden_size
        states = torch.zeros(N_ROWS, n_positions, 4 * n_state, dtype=torch.bfloat16)
        for position, token in enumerate(self.opening):  # fed once, reused by every later row
            everywhere = torch.full((N_ROWS,), position)
            states[:, position] = decoder.step(torch.full((N_ROWS,), token), everywhere)
        rows = [self._fresh() for _ in range(N_ROWS)]
        for n_steps in itertools.count(1):
            tokens = torch.tensor([row.tokens[-1] for row in rows])
            positions = torch.tensor([len(row.tokens) - 1 for row in rows])
            new = decoder.step(tokens, positions)
            states[decoder.rows, positions] = new
            picked = self._pick(rows, F.linear(new[:, -n_state:], decoder.embedding))
            for i, row in enumerate(rows):
                if self._extend(row, row.forced.pop(0) if row.forced else picked[i]):
                    continue
                rows[i] = self._fresh()
                n = len(row.tokens)
                if row.n_prompt is not None and n - row.n_prompt >= SHORTEST_ANSWER:
                    written = torch.tensor(row.tokens), len(self.opening), row.n_prompt
                    yield Text(*written, states[i, : n - 1].clone())
            if n_steps % 48 == 0:
                order = sorted(range(N_ROWS), key=lambda i: len(rows[i].tokens))
                rows = [rows[i] for i in order]
                decoder.reorder(torch.tensor(order))
                states.copy_(states[order])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _fresh(self) -> Row:
        openings = self.random.choices(list(OPENINGS), [share for share, _ in OPENINGS])[0][1]
        forced = self._encode(self.random.choice(openings))
        forced = forced or [self.random.randrange(100, 40_000)]
        longest = self.random.randint(SHORTEST_CUT, LONGEST_PROMPT)
        return Row([*self.opening, forced[0]], forced[1:], len(self.opening) + longest)

    def _pick(self, rows: list[Row], logits: Tensor) -> list[int]:
        """Choose each row's next token: the likeliest, or a draw from the 40 likeliest."""
        picked = logits.argmax(-1)
        drawn = [i for i, row in enumerate(rows) if row.temperature > 0 and not row.forced]
        if drawn:
            top, ids = logits[drawn].topk(40)
            temperature = torch.tensor([rows[i].temperature for i in drawn])[:, None]
            chances = torch.softmax(top.float() / temperature, -1)
            draws = torch.multinomial(chances, 1, generator=self.generator)
            picked[drawn] = ids.gather(1, draws)[:, 0]
        return picked.tolist()

    def _extend(self, row: Row, token: int) -> bool:
        """Append a token; return False when the row ends, with its prompt set if it is of use."""
        if row.n_prompt is None:
            return self._extend_prompt(row, token)
        row.tokens.append(token)
        answer = row.tokens[row.n_prompt :]
        if len(answer) % 8 == 0 and is_loop(answer):
            del row.tokens[-LOOP_CUT:]
            return False
        finished = token in self.specials or len(answer) > LONGEST_ANSWER
        return not (answer and finished)

    def _extend_prompt(self, row: Row, token: int) -> bool:
        prompt = row.tokens[len(self.opening) :]
        if is_loop(prompt):
            return False
        # A prompt that does not end by itself is cut: half a docstring is a prompt, too.
        if token != self.end and len(row.tokens) < row.longest_prompt:
            row.tokens.append(token)
            return token not in self.specials
        if len(prompt) < SHORTEST_PROMPT or tuple(prompt) in self.seen:
            return False
        self.seen.add(tuple(prompt))
        row.tokens.append(self.end)
        row.forced = self.turn[1:]
        row.n_prompt = len(row.tokens) + len(row.forced)
        row.temperature = 0.0 if self.random.random() < SHARE_GREEDY else ANSWER_TEMPERATURE
        return True


def is_loop(tokens: list[int]) -> bool:
    """Tell whether the last 64 tokens repeat themselves with a period of 24 or less."""
    tail = tokens[-64:]
    return len(tail) == 64 and any(tail[p:] == tail[:-p] for p in range(1, 25))


def load_target(folder: Path, dtype: torch.dtype) -> Any:
    """Load the demo target, a Llama model with tied embeddings."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)


def feature_layers(n_layers: int) -> tuple[int, int, int]:
    """Return the three fused layers of EAGLE-3, as indices into `hidden_states`."""
    return 2, n_layers // 2, n_layers - 3


def write_texts(args: argparse.Namespace) -> None:
    """Add parts of 120 texts to the data folder until it holds enough answer tokens."""
    n_answer = sum(len(t.tokens) - t.n_prompt for t in read_texts(args.data))
    texts: list[Text] = []
    for text in Writer(args.target, args.seed).texts():
        texts.append(text)
        n_answer += len(text.tokens) - text.n_prompt
        if len(texts) == 120 or n_answer >= args.tokens:
            n_parts = len(list(args.data.glob("part_*.pt")))
            part = args.data / "part.tmp"
            torch.save([vars(text) for text in texts], part)
            part.replace(args.data / f"part_{n_parts:04d}.pt")
            texts = []
            log(f"{n_answer} of {args.tokens} answer tokens written")
        if n_answer >= args.tokens:
            return


def read_texts(folder: Path) -> list[Text]:
    """Read every part written so far."""
    parts = sorted(folder.glob("part_*.pt"))
    return [Text(**fields) for part in parts for fields in torch.load(part)]


def log(line: str) -> None:
    """Report progress, which is no result, on stderr."""
    sys.stderr.write(line + "\n")
